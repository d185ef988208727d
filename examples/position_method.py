"""A position method of your own: ALiBi in half of the heads, no positions in the others.

    pretrain data build configs/demo.toml
    python examples/position_method.py config configs/demo.toml --set position.method=half_alibi
    python examples/position_method.py train configs/demo.toml \\
        --set position.method=half_alibi --set run.directory=runs/half_alibi
    torchrun --nproc-per-node 2 examples/position_method.py train ...

Start these in the clone. You write only the class. This script's commands know it: config, train,
evaluate, plan, and export, which refuses it for the reason that the class states. `pretrain study`
and `launcher` start `python -m pretrain`, which knows only the classes in pretrain/positions;
CONTRIBUTING.md says how to add yours. `pretrain/positions/base.py` lists the properties and
functions that a method may define.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pretrain.__main__ import main
from pretrain.positions.alibi import published_slopes
from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    # Only for types, because the launcher imports pretrain/positions without torch.
    import torch
    from torch import Tensor

    from pretrain.config import RunConfig


class HalfAlibi(PositionMethod):
    """The published slopes in the first heads, 0 in the others."""

    method: Literal["half_alibi"] = "half_alibi"

    share: float = Field(default=0.5, ge=0, le=1)
    """Share of the heads that have a slope; position.share in a config."""

    bias = "slopes"

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        """Return the slopes of this tensor-parallel rank's heads, which kernels add in fp32."""
        import torch

        count = config.model.num_attention_heads
        with_slope = round(self.share * count)
        slopes = torch.tensor([*published_slopes(max(1, with_slope))[:with_slope]])
        whole = torch.cat([slopes, torch.zeros(count - with_slope)])
        return {"slopes": whole[heads].to(device)}

    @property
    def no_class(self) -> str:
        """Return the reason that `pretrain export` and `pretrain config` give."""
        return "no stock class has heads with and without ALiBi"


if __name__ == "__main__":
    main()

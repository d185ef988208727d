"""A window of keys and no other positions: a baseline for the limited reach of ALiBi's heads.

A token sees itself and the last tokens before it, as in Longformer (Beltagy, Peters and Cohan 2020,
arXiv 2004.05150, section 3.1) and Mistral. Chi et al. 2022 (arXiv 2212.10356) compare ALiBi with
it. The order of tokens shows only in the mask and in the depth: layer n sees n windows back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig


class Windowed(PositionMethod):
    """A window of keys, and nothing that distinguishes positions within it."""

    method: Literal["windowed"] = "windowed"

    window: int = Field(default=128, gt=0)
    """Number of tokens that a token sees, itself and those before it. With train.objective =
    "masked" it sees as many after it."""

    bias = "scores"

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        from pretrain.kernels.call import ScoreFunction

        return {"scores": ScoreFunction(_unchanged, (), self.window)}

    def result_name(self, config: RunConfig) -> str:
        is_default = self.window == type(self).model_fields["window"].default
        return self.method if is_default else f"{self.method}_{self.window}"

    def visible(self, config: RunConfig) -> int:
        return self.window

    @property
    def no_class(self) -> str:
        return "the stock transformers decoders that have a window rotate queries and keys, too"


def _unchanged(scores: Tensor, *others: Tensor) -> Tensor:
    """Return the scores unchanged. The kernel masks the keys beyond the window."""
    return scores

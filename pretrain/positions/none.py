"""No positions: the causal mask alone tells tokens apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig


class NoPositions(PositionMethod):
    """No positions at all."""

    method: Literal["none"] = "none"

    def held_by(self, config: RunConfig) -> tuple[str | None, str]:
        return None, "no stock transformers decoder goes without positions"

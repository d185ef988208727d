"""No positions: the causal mask alone tells tokens apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    pass


class NoPositions(PositionMethod):
    """No positions at all."""

    method: Literal["none"] = "none"

    @property
    def no_class(self) -> str:
        return "no stock transformers decoder goes without positions"

"""No positions: the causal mask alone tells tokens apart."""

from __future__ import annotations

from typing import Literal

from pretrain.positions.base import PositionMethod


class NoPositions(PositionMethod):
    """No positions at all."""

    method: Literal["none"] = "none"

    title = "NoPE"

    @property
    def no_class(self) -> str:
        return "no stock transformers decoder goes without positions"

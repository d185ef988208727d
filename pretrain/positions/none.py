"""No positions: only the causal mask tells the model the order of tokens."""

from __future__ import annotations

from typing import Literal

from pretrain.positions.base import PositionMethod


class NoPositions(PositionMethod):
    """No positions at all."""

    method: Literal["none"] = "none"

    title = "NoPE"

    @property
    def no_class(self) -> str:
        return "every stock transformers decoder has positions"

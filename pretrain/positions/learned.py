"""Learned positions: Megatron's table, added to the embeddings. There are none beyond its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pretrain.config.schema import Fixed
from pretrain.positions.base import LEARNED_TABLE, PositionMethod

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig


class Learned(PositionMethod):
    """A learned table added to the embeddings."""

    method: Literal["learned"] = "learned"

    max_position_embeddings: Fixed[int | None] = Field(default=None, gt=0)
    """Number of positions in the table. The model cannot be evaluated on longer texts. Default:
    data.sequence_length."""

    def resolved(self, config: RunConfig) -> dict[str, Any]:
        return {"max_position_embeddings": self.table_end(config)}

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        return {LEARNED_TABLE: (self.table_end(config), config.model.hidden_size)}

    def table_end(self, config: RunConfig) -> int:
        return self.max_position_embeddings or config.data.sequence_length

"""Hybrid positions: different layers have different methods, as in SmolLM3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pretrain.config.errors import Refusal
from pretrain.config.schema import Fixed
from pretrain.positions.base import OWN, Position, PositionMethod, Rope
from pretrain.positions.none import NoPositions
from pretrain.positions.rotary import Rotary

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.config.run import RunConfig


class Hybrid(PositionMethod):
    """A list of methods, repeated over the layers.

    Layers with the same entry of the list share what it learns. All rotary entries have the same
    keys, because Megatron computes one table of angles.
    """

    method: Literal["hybrid"] = "hybrid"

    layers: Fixed[Annotated[tuple[Position, ...], Field(strict=False)]] = (
        *(Rotary() for _ in range(3)),
        NoPositions(),
    )
    """Methods of the layers, in order, each as a table of its keys: [{method = "rotary"}, {method =
    "none"}]. The list is repeated until all layers have one. Default: rotary positions, but none in
    every fourth layer, as in SmolLM3."""

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why layers cannot have these methods, and the refusals of each method."""
        count = config.model.num_layers
        if not 1 <= len(self.layers) <= count:
            yield Refusal(
                "position.layers",
                [each.method for each in self.layers],
                f"lists {len(self.layers)} methods, and model.num_layers = {count}",
                f"List 1 to {count}",
            )
        for number, each in enumerate(self.layers):
            key = f"position.layers[{number}]"
            if each.adds_to_embeddings(config) or isinstance(each, Hybrid):
                yield Refusal(
                    f"{key}.method",
                    each.method,
                    "cannot differ between layers, which all read the same embeddings",
                    "Choose one that acts in attention",
                )
            for found in each.refusals(config.model_copy(update={"position": each})):
                yield found._replace(key=found.key.replace("position.", f"{key}.", 1))
        if len({each for each in self.layers if each.rope() is not None}) > 1:
            yield Refusal(
                "position.layers",
                [each.description(config) for each in self.layers],
                "has rotations of several kinds, and Megatron computes one table of angles",
                "Give all the same keys",
            )

    def resolved(self, config: RunConfig) -> dict[str, Any]:
        return {"layers": [dict(each) | each.resolved(config) for each in self.layers]}

    def result_name(self, config: RunConfig) -> str:
        names = groupby(each.result_name(config) for each in self.layers)
        return "_".join([self.method, *(f"{name}{len(list(same))}" for name, same in names)])

    def description(self, config: RunConfig) -> str:
        return f"{self.method} of {', '.join(each.description(config) for each in self.layers)}"

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        return self._named([each.tensors(config) for each in self.layers])

    @property
    def shared_by_heads(self) -> tuple[str, ...]:  # type: ignore[override]  # a class has no entries
        return tuple(
            f"{_prefix(number)}{name}"
            for number, each in enumerate(self.layers)
            for name in each.shared_by_heads
        )

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        return self._named([each.initial_values(config) for each in self.layers])

    def _named(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Merge the methods' dictionaries under names that tell the entries apart."""
        return {
            f"{OWN}{_prefix(number)}{name.removeprefix(OWN)}": value
            for number, of_method in enumerate(found)
            for name, value in of_method.items()
        }

    def rope(self) -> Rope | None:
        return next(filter(None, (each.rope() for each in self.layers)), None)

    def of_layer(self, config: RunConfig, layer: int) -> PositionMethod:
        return self.layers[layer % len(self.layers)]

    def table_end(self, config: RunConfig) -> int | None:
        ends = (each.table_end(config) for each in self.layers)
        return min((end for end in ends if end is not None), default=None)

    def rotated_channels(self, config: RunConfig) -> int:
        # One number, because all rotations have the same keys. xPos turns channels without angles.
        return max((e.rotated_channels(config) for e in self.layers if e.rope()), default=0)

    def own_of_layer(self, layer: int, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        number = layer % len(self.layers)
        begin = _prefix(number)
        mine = {n.removeprefix(begin): x for n, x in own.items() if n.startswith(begin)}
        return self.layers[number].own_of_layer(layer, mine)

    @property
    def no_class(self) -> str:
        return "no class of ours has layers of different methods"


def _prefix(number: int) -> str:
    """Return the prefix of an entry's parameter names, after "position."."""
    return f"layers_{number}_"

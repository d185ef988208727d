"""What a position method has to say: the questions that the rooms ask, with the answers of none.

The fields of a method are its keys in [position]. Its class variables and functions say what it
adds to embeddings and scores, what it does to queries and keys, what it learns, how far it reaches,
what it costs, and which transformers class can hold it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, SerializeAsAny
from pydantic.fields import FieldInfo

from pretrain.config.errors import Refusal
from pretrain.config.schema import ChosenSection, Effect

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig

OWN = "position."
"""Begins the global name of a parameter that the method itself holds."""

LEARNED_TABLE = "embedding.position_embeddings.weight"
"""Global name of Megatron's learned position table."""


class Rope(NamedTuple):
    """Megatron's rotary embeddings, which are also those of GPT-NeoX."""

    base: float
    """Base of the frequencies."""

    percent: float
    """Share of each head's channels that is rotated, the first ones."""

    inverse_frequencies: Callable[[int], Tensor] | None = None
    """Takes the number of rotated channels, and returns the angles per token of their pairs, fp32
    [channels / 2]. None: base^(-2 i / channels), which Megatron computes."""


class PositionMethod(ChosenSection):
    """[position]: how the model knows the order of tokens."""

    # A subclass answers what it does otherwise. In every question, config is the whole run; B are
    # sequences, S tokens, and D is the width of a head.

    # What it learns may come and go: see `begins_anew`. A key by which a tensor has another shape
    # is Fixed.
    EFFECT = Effect.FUNCTION
    CHOICE = "position.method"
    REGISTERED: ClassVar = {}

    method: str = "alibi"
    """alibi: linear biases on attention scores. sinusoidal, learned: a table added to the
    embeddings. rotary: queries and keys are rotated; xpos: and fade with the distance. t5: a
    learned bias on attention scores for each bucket of distances. kerple, tisa, fire, sandwich: a
    function of the distance on attention scores, learned but for sandwich. multiplied: scores
    times a learned function of the distance. windowed: only the last tokens are seen. shaw: learned
    vectors of distances, beside the keys. transformer_xl: sinusoids of distances, beside the keys.
    cope: learned vectors of positions that the content counts. none: no positions. hybrid: layers
    of other methods. Each has the keys that name it."""

    title: ClassVar[str] = ""
    """What people call it, as in "a model with ALiBi positions". Default: position.method."""

    about: ClassVar[str] = ""
    """Sentences about it for the model card, with a space before them."""

    adds_to_embeddings: ClassVar[bool] = False
    """True if something is added to the embeddings: `embedded`, or Megatron's learned table."""

    bias: ClassVar[Literal["none", "slopes", "table", "scores"]] = "none"
    """What `score_terms` hands to the kernels: nothing, a slope for each head as ALiBi's, a table
    of heads and buckets as T5's, or a `pretrain.kernels.call.ScoreFunction`. Kernels, memory and
    time follow from it. A method with slopes leaves queries and keys as they are:
    `pretrain.model.reach` bounds how far heads see."""

    shared_by_heads: ClassVar[tuple[str, ...]] = ()
    """Those of `tensors` that all heads share, without "position."."""

    looks_back: ClassVar[str] = ""
    """Why queries cannot see keys behind them, as `Refusal.reason` begins; "" if they can."""

    of_each_layer: ClassVar[tuple[str, ...]] = ()
    """Those that have the layers of the model as an axis, behind the heads, if they have heads."""

    # ---- config ----

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why the model cannot have these positions, beside what the types of keys say."""
        if self.looks_back and config.is_masked:
            why = f'{self.looks_back}, and train.objective = "masked" shows later keys, too'
            yield config.refusal("position.method", why, 'Set train.objective = "next_token"')

    def resolved(self, config: RunConfig) -> dict[str, Any]:
        """Return the values that keys stand for, where two spellings may mean one model.

        They are what two configs are compared by. Keys that are left out count as they are written.
        """
        return {}

    @property
    def result_name(self) -> str:
        """The name under which results are compared: other settings may be another method."""
        return self.method

    def description(self, config: RunConfig) -> str:
        """Return the method and its unusual settings, for `pretrain config`."""
        return self.method

    # ---- parameters: model, optimizer, checkpoint and plan follow from this list ----

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        """Return the parameters that it learns: global name -> shape in the whole model.

        There are two kinds. "position.NAME" has the heads of the model as axis 0, which tensor
        ranks divide among them, or is one of `shared_by_heads`, which each of them holds whole;
        every pipeline stage holds a copy, and the gradients of the copies are summed. Megatron's
        learned table, LEARNED_TABLE, is held whole by the first stage.
        """
        return {}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        """Return the initial fp32 values of parameters that are not drawn as the model's, whole."""
        return {}

    # ---- model ----

    def embedded(self, config: RunConfig, positions: Tensor) -> Tensor | None:
        """Return what is added to the embeddings at some positions; None if nothing, or learned.

        Args:
            config: The run.
            positions: Positions in the text, counted from 0; integers of any shape [...].

        Returns:
            [..., hidden_size], of any float type.
        """
        return None

    def rope(self) -> Rope | None:
        """Return the rotation that Megatron applies to queries and keys in every layer."""
        return None

    def queries_and_keys(
        self, config: RunConfig, query: Tensor, key: Tensor, first: int, length: int
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys as the scores see them, where that is not Megatron's rotation.

        Args:
            config: The run.
            query: [queries, B, heads of this rank, D]; they are the last positions of the keys.
            key: [keys, B, key heads of this rank, D].
            first: Position of the first key: a context rank holds a part of the sequence.
            length: Positions of the whole sequence.
        """
        return query, key

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        """Return what is added to the scores of some heads.

        Args:
            config: The run.
            heads: The heads of this tensor-parallel rank, among those of the whole model.
            own: What `own_of_layer` returns of this rank's part of `tensors`.
            device: The device of the queries.

        Returns:
            Keyword arguments of `pretrain.kernels.dispatch.attention`. Where nothing is learned,
            they are kept for later calls.
        """
        return {}

    def of_layer(self, config: RunConfig, layer: int) -> PositionMethod:
        """Return the method of a layer, from 0 in the whole model: layers may have different ones.

        All rooms ask it for what a layer does, or `layers` for the list. What a model has once is
        asked of the method itself: its keys and tensors, the embeddings, the rotation.
        """
        return self

    def own_of_layer(self, layer: int, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the part of a rank's parameters that `score_terms` of a layer is given.

        Args:
            layer: The layer, from 0 in the whole model.
            own: This rank's part of `tensors`, "position.NAME" by NAME.
        """
        return {
            name: x.select(0 if name in self.shared_by_heads else 1, layer)
            if name in self.of_each_layer
            else x
            for name, x in own.items()
        }

    # ---- reach and costs ----

    def table_end(self, config: RunConfig) -> int | None:
        """Return the number of positions that exist; None if there is one for every token."""
        return None

    def reach(self, config: RunConfig) -> int:
        """Return the distance in tokens from which on the bias of a table is the same."""
        return config.data.sequence_length

    def visible(self, config: RunConfig) -> int | None:
        """Return how many tokens back a query sees at most, itself included; None: all."""
        return None

    def head_slopes(self, config: RunConfig) -> tuple[float, ...] | None:
        """Return by how much the score of a key falls with each token of its distance, by head.

        Of all heads of the model, before training; heads with a slope cannot see any distance. None
        where no score falls without end.
        """
        return None

    def score_blocks(self, config: RunConfig) -> float:
        """Return the fp32 blocks that its function holds beside those of a bias by distance.

        A block has the scores of a micro batch and a rank's heads. They are counted while
        `pretrain.kernels.scored` differentiates one, at 256 keys, for `pretrain plan`.
        """
        return 0.0

    def rotated_channels(self, config: RunConfig) -> int:
        """Return the channels of each head that are rotated, in new tensors of queries and keys."""
        return 0

    # ---- Hugging Face ----

    @property
    def no_class(self) -> str:
        """Return why no class of `pretrain.huggingface` lists this method among its positions.

        It begins in lower case, without a full stop.
        """
        return f"no stock transformers decoder computes {self.method} positions"


def generator(config: RunConfig, name: str) -> torch.Generator:
    """Return the generator of a parameter's initial values, seeded by run.seed and global name."""
    import torch

    digest = hashlib.sha256(f"{config.run.seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


METHODS: dict[str, type[PositionMethod]] = PositionMethod.REGISTERED
"""Value of position.method -> its class. A subclass of PositionMethod enters itself."""


def layers(config: RunConfig) -> list[PositionMethod]:
    """Return the method of each layer of the whole model."""
    return [config.position.of_layer(config, n) for n in range(config.model.num_layers)]


def by_layer(config: RunConfig) -> list[RunConfig]:
    """Return the run as each layer sees it, with the method of the layer; once if all are alike."""
    found = layers(config)
    if all(method is config.position for method in found):
        return [config]
    return [config.model_copy(update={"position": method}) for method in found]


def all_keys() -> dict[str, FieldInfo]:
    """Return every key of [position], whichever methods have it, with its field."""
    return {key: field for each in METHODS.values() for key, field in each.model_fields.items()}


Position = Annotated[SerializeAsAny[PositionMethod], BeforeValidator(PositionMethod.chosen)]
"""The section [position]: an instance of the class that its method names."""

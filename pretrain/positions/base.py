"""The interface of a position method, with the defaults of a method that does nothing.

The fields of a method are its keys in [position]. Its class variables and functions say what it
adds to embeddings and scores, what it does to queries and keys, what it learns, how far it reaches,
what it costs, and which transformers class can hold it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, SerializeAsAny

from pretrain.config.errors import Refusal
from pretrain.config.schema import ChosenSection, Effect

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig

OWN = "position."
"""Prefix of the global names of parameters that the method itself holds."""

LEARNED_TABLE = "embedding.position_embeddings.weight"
"""Global name of Megatron's learned position table."""


class Rope(NamedTuple):
    """Settings of Megatron's rotary embeddings, which are also those of GPT-NeoX."""

    base: float
    """Base of the frequencies."""

    percent: float
    """Share of each head's channels that is rotated, from the first channel on."""

    inverse_frequencies: Callable[[int], Tensor] | None = None
    """Map the number of rotated channels to the angle per token of each pair, fp32 [channels / 2].
    None: base^(-2 i / channels), which Megatron computes."""


class PositionMethod(ChosenSection):
    """[position]: how the model knows the order of tokens."""

    # A subclass overrides what it does differently. In every function, config is that of the whole
    # run. Shapes: B sequences, S tokens, D channels of a head.

    # FUNCTION, because a method's parameters may be added or dropped when a run resumes: see
    # `begins_anew`. A key that changes the shape of a parameter is Fixed.
    EFFECT = Effect.FUNCTION
    CHOICE = "position.method"
    REGISTERED: ClassVar = {}

    method: str = "alibi"
    """alibi: linear biases on attention scores. sinusoidal, learned: a table added to the
    embeddings. rotary: queries and keys are rotated. xpos: rotated, with scores that also fade with
    distance. t5: a learned bias on attention scores for each bucket of distances. kerple, tisa,
    fire: a learned function of the distance, added to attention scores. sandwich: a fixed one.
    multiplied: scores times a learned function of the distance. windowed: a token sees only the
    last tokens. shaw: a learned vector for each distance, added to the keys. transformer_xl:
    projected sinusoids of the distance, added to the keys. cope: learned vectors of positions that
    depend on the content. none: no positions. hybrid: different methods in different layers. Most
    methods have further keys."""

    title: ClassVar[str] = ""
    """Name for readers, as in "a model with ALiBi positions". Default: position.method."""

    about: ClassVar[str] = ""
    """Sentences about the method for the model card, with a space before them."""

    bias: ClassVar[Literal["none", "slopes", "table", "scores"]] = "none"
    """What `score_terms` passes to the kernels: nothing, a slope for each head like ALiBi's, a
    table of heads and buckets like T5's, or a `pretrain.kernels.call.ScoreFunction`. The choice of
    kernel and the estimates of memory and time depend on it. A method with slopes must leave
    queries and keys unchanged, because `pretrain.model.reach` bounds how far its heads see."""

    shared_by_heads: ClassVar[tuple[str, ...]] = ()
    """Names of the `tensors` that all heads share, without "position."."""

    looks_back: ClassVar[str] = ""
    """Why queries cannot see later keys, in the form of `Refusal.reason`; "" if they can."""

    of_each_layer: ClassVar[tuple[str, ...]] = ()
    """Names of the `tensors` with the model's layers as an axis: the first one after any heads."""

    # ---- config ----

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why the model cannot have these positions, beyond what the types of keys check."""
        if self.looks_back and config.is_masked:
            why = f'{self.looks_back}, and train.objective = "masked" shows later keys, too'
            yield config.refusal("position.method", why, 'Set train.objective = "next_token"')

    def resolved(self, config: RunConfig) -> dict[str, Any]:
        """Return the meaning of those keys for which two spellings may give the same model.

        Two configs are compared by these values, and by the written values of all other keys.
        """
        return {}

    def result_name(self, config: RunConfig) -> str:
        """Return the name under which results are compared; unusual settings may have their own."""
        return self.method

    def description(self, config: RunConfig) -> str:
        """Return the method and its unusual settings, for `pretrain config`."""
        return self.method

    # ---- parameters: model, optimizer, checkpoint and plan follow from this list ----

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        """Return the learned parameters: global name -> shape in the whole model.

        There are two kinds. Axis 0 of "position.NAME" is the model's heads, which tensor ranks
        split, unless `shared_by_heads` lists it: then every tensor rank holds the whole parameter.
        Every pipeline stage holds a copy, and the gradients of the copies are summed. The other
        kind is Megatron's learned table, LEARNED_TABLE, which the first stage holds.
        """
        return {}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        """Return initial values, fp32 and unsharded, of the `tensors` or of some of them.

        The others start as model weights.
        """
        return {}

    # ---- model ----

    def embedded(self, config: RunConfig, positions: Tensor) -> Tensor | None:
        """Return what is added to the embeddings; None for nothing, or Megatron's learned table.

        A method that overrides this always adds something, and cannot have `rope`.

        Args:
            config: The run.
            positions: Positions in the text, counted from 0; integers of any shape [...].

        Returns:
            [..., hidden_size], of any float type.
        """
        return None

    def adds_to_embeddings(self, config: RunConfig) -> bool:
        """Return True if it adds to the embeddings: by `embedded`, or by Megatron's learned table.

        Do not override this. It computes nothing, because plans and configs are torch-free.
        """
        is_own = type(self).embedded is not PositionMethod.embedded
        return is_own or LEARNED_TABLE in self.tensors(config)

    def rope(self) -> Rope | None:
        """Return the rotation that Megatron applies to queries and keys in every layer."""
        return None

    def queries_and_keys(
        self, config: RunConfig, query: Tensor, key: Tensor, first: int, length: int
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys as the scores see them, apart from Megatron's rotation.

        Args:
            config: The run.
            query: [queries, B, heads of this rank, D], at the last positions of the keys.
            key: [keys, B, key heads of this rank, D].
            first: Position of the first key, above 0 if a context rank holds a later part.
            length: Number of positions of the whole sequence.
        """
        return query, key

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        """Return what is added to the scores of some heads.

        Args:
            config: The run.
            heads: The heads of this tensor-parallel rank, among those of the whole model.
            own: This rank's part of the layer's `tensors`, from `own_of_layer`.
            device: The device of the queries.

        Returns:
            Keyword arguments of `pretrain.kernels.dispatch.attention`. The caller reuses them if
            the method learns nothing.
        """
        return {}

    def of_layer(self, config: RunConfig, layer: int) -> PositionMethod:
        """Return the method of a layer, counted from 0 in the whole model.

        Layers may have different methods. What belongs to the model as a whole (keys, tensors,
        embeddings, rotation) is asked of the method itself and not of its layers.
        """
        return self

    def own_of_layer(self, layer: int, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the part of a rank's parameters that `score_terms` takes for one layer.

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
        """Return the number of positions that exist; None if there is no limit."""
        return None

    def reach(self, config: RunConfig) -> int:
        """Return the distance in tokens beyond which the bias of a table is constant."""
        return config.data.sequence_length

    def visible(self, config: RunConfig) -> int | None:
        """Return how many tokens back a query sees at most, itself included; None: all."""
        return None

    def head_slopes(self, config: RunConfig) -> tuple[float, ...] | None:
        """Return by how much a key's score falls per token of distance, for all heads of the model.

        The values are those before training. A head with a slope above 0 has a limited reach. None
        if no score falls without bound.
        """
        return None

    def score_blocks(self, config: RunConfig) -> float:
        """Return how many more fp32 blocks its function holds than a bias by distance does.

        `pretrain plan` needs this. A block holds the scores of a micro batch for a rank's heads.
        The number was counted while `pretrain.kernels.scored` differentiates a block of 256 keys.
        """
        return 0.0

    def rotated_channels(self, config: RunConfig) -> int:
        """Return how many channels of each head are rotated; rotating copies queries and keys."""
        return 0

    # ---- Hugging Face ----

    @property
    def no_class(self) -> str:
        """Return why no class of `pretrain.huggingface` lists this method among its positions.

        The text is a clause: it begins in lower case and has no full stop.
        """
        return f"no stock transformers decoder computes {self.method} positions"


def generator(config: RunConfig, name: str) -> torch.Generator:
    """Return the generator of a parameter's initial values, seeded by run.seed and global name."""
    import torch

    digest = hashlib.sha256(f"{config.run.seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


METHODS: dict[str, type[PositionMethod]] = PositionMethod.REGISTERED
"""Value of position.method -> class. Subclasses of PositionMethod register themselves."""


def layers(config: RunConfig) -> list[PositionMethod]:
    """Return the method of each layer of the whole model."""
    return [config.position.of_layer(config, n) for n in range(config.model.num_layers)]


def by_layer(config: RunConfig) -> list[RunConfig]:
    """Return the config of each layer, with the layer's method; just one if all are the same."""
    found = layers(config)
    if all(method is config.position for method in found):
        return [config]
    return [config.model_copy(update={"position": method}) for method in found]


Position = Annotated[SerializeAsAny[PositionMethod], BeforeValidator(PositionMethod.chosen)]
"""The section [position]: an instance of the class that its method names."""

"""List the parameters of a rank without building the model, and lay them out as ZeRO does.

Names, order and shapes are those of `pretrain.model.parameters.named_parameters`, with which the
tests compare them on every rank of many layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from pretrain.config import Layout, RunConfig, num_parameters_of_rank
from pretrain.config.errors import ConfigError
from pretrain.optim.cutting import Piece, Settings, cut

TIED = "embedding.word_embeddings.weight"
ALIGNMENT = 2
"""DeepSpeed pads each flat tensor to a multiple of this times the data-parallel size (deepspeed/
runtime/zero/stage_1_and_2.py, `nccl_start_alignment_factor`)."""


class Weight(NamedTuple):
    """One parameter of a tensor-parallel rank."""

    name: str
    shape: tuple[int, ...]
    is_split: bool
    """True if the tensor-parallel ranks divide it among them."""
    is_partial: bool
    """True if each rank's gradient is that of its part of the sequence (sequence parallelism)."""

    @property
    def num_elements(self) -> int:
        """Elements that this rank holds."""
        return math.prod(self.shape)


def chunk_layers(config: RunConfig, stage: int) -> list[tuple[int, int]]:
    """Return (number of the chunk, its layers) of every chunk of a pipeline stage."""
    pipeline = config.parallel.pipeline_model_parallel_size
    return list(enumerate(config.layers_per_chunk))[stage::pipeline]


def weights_of_rank(config: RunConfig, stage: int) -> list[Weight]:
    """Return the parameters of a rank of a pipeline stage, in the order of its chunks.

    All tensor-parallel and data-parallel ranks of a stage have alike ones.

    Args:
        config: The run.
        stage: The pipeline stage, from 0.

    Raises:
        ConfigError: The model has parameters that are not known here.
    """
    last = len(config.layers_per_chunk) - 1
    weights: list[Weight] = []
    for number, layers in chunk_layers(config, stage):
        if number == 0:
            weights += _embedding(config)
        first = sum(config.layers_per_chunk[:number])
        for layer in range(first, first + layers):
            weights += _layer(config, f"decoder.layers.{layer}")
        if number == last:
            if config.model.final_layernorm:
                weights += _norm(config, "decoder.final_layernorm")
            if last or not config.model.tie_word_embeddings:
                name = TIED if config.model.tie_word_embeddings else "output_layer.weight"
                weights.append(Weight(name, _vocabulary(config), True, False))
        if number == chunk_layers(config, stage)[0][0]:
            weights += _position(config)
    counted = sum(weight.num_elements for weight in weights)
    if counted != num_parameters_of_rank(config, stage):
        raise ConfigError(
            f"this model has {num_parameters_of_rank(config, stage):,} parameters on a rank of "
            f"pipeline stage {stage}, of which `pretrain plan` knows {counted:,}. It plans models "
            "with one embedding and one output matrix of the whole vocabulary"
        )
    return weights


def _vocabulary(c: RunConfig) -> tuple[int, int]:
    """Return the shape of a tensor rank's part of the embedding."""
    return c.padded_vocab_size // c.parallel.tensor_model_parallel_size, c.model.hidden_size


def _embedding(c: RunConfig) -> Iterator[Weight]:
    """Yield what stands before the first layer."""
    yield Weight(TIED, _vocabulary(c), True, False)
    # Megatron adds positions to the whole sequence and splits it afterwards.
    adds_positions = c.position.method in ("learned", "sinusoidal")
    if c.position.method == "learned":
        shape = (c.max_position_embeddings, c.model.hidden_size)
        yield Weight("embedding.position_embeddings.weight", shape, False, False)
    if c.model.embedding_layernorm:
        for weight in _norm(c, "embedding.word_embeddings_layernorm"):
            yield weight._replace(is_partial=weight.is_partial and not adds_positions)


def _layer(c: RunConfig, name: str) -> Iterator[Weight]:
    """Yield the parameters of a transformer layer."""
    tensor, hidden = c.parallel.tensor_model_parallel_size, c.model.hidden_size
    heads = c.model.num_attention_heads + 2 * c.num_query_groups
    qkv, ffn = heads * c.head_dim // tensor, c.ffn_hidden_size // tensor
    partial = c.parallel.sequence_parallel

    def linear(part: str, shape: tuple[int, int], splits_output: bool) -> Iterator[Weight]:
        yield Weight(f"{name}.{part}.weight", shape, True, False)
        if c.model.use_bias:
            is_partial = partial and not splits_output
            yield Weight(f"{name}.{part}.bias", shape[:1], splits_output, is_partial)

    yield from _norm(c, f"{name}.input_layernorm")
    yield from linear("self_attention.linear_proj", (hidden, hidden // tensor), False)
    yield from linear("self_attention.linear_qkv", (qkv, hidden), True)
    yield from _norm(c, f"{name}.pre_mlp_layernorm")
    yield from linear("mlp.linear_fc1", (ffn, hidden), True)
    yield from linear("mlp.linear_fc2", (hidden, ffn), False)


def _norm(c: RunConfig, name: str) -> list[Weight]:
    """Return the parameters of a LayerNorm."""
    kinds = ("weight", "bias") if c.model.use_bias else ("weight",)
    partial = c.parallel.sequence_parallel
    return [Weight(f"{name}.{kind}", (c.model.hidden_size,), False, partial) for kind in kinds]


def _position(c: RunConfig) -> Iterator[Weight]:
    """Yield the parameters that the position method learns for each head."""
    heads = c.model.num_attention_heads // c.parallel.tensor_model_parallel_size
    if c.position.method == "t5":
        shape = (heads, c.position.relative_attention_num_buckets)
        yield Weight("position.relative_attention_bias", shape, True, False)
    elif c.position.method == "alibi" and c.position.trainable_slopes:
        yield Weight("position.slopes", (heads,), True, False)


@dataclass(frozen=True)
class FlatBucket:
    """Parameters of a rank that lie in one flat tensor."""

    num_elements: int
    """With the padding."""
    is_late: bool
    """True if the reduction cannot start within the backward pass."""
    names: tuple[str, ...]


def buckets_of_rank(config: RunConfig, layout: Layout, stage: int) -> list[FlatBucket]:
    """Return the flat tensors of a rank, in the order in which they are reduced at ZeRO 1.

    Args:
        config: The run.
        layout: Its layout.
        stage: The pipeline stage, from 0.
    """
    weights = weights_of_rank(config, stage)
    unit = ALIGNMENT * layout.data

    def flat(members: list[int], is_late: bool) -> FlatBucket:
        size = sum(weights[number].num_elements for number in members)
        names = tuple(weights[number].name for number in members)
        return FlatBucket(-(-size // unit) * unit, is_late, names)

    if zero_stage(config, layout) > 1:
        groups: dict[Settings, list[int]] = {}
        for number, weight in enumerate(weights):
            groups.setdefault(_settings(config, weight), []).append(number)
        return [flat(groups[settings], False) for settings in sorted(groups, reverse=True)]
    pieces = [_piece(config, weight) for weight in weights]
    return [flat(part, pieces[part[0]].is_late) for part in cut(pieces)]


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, and how many later ones are like it."""

    number: int
    """From 0."""
    buckets: tuple[FlatBucket, ...]
    """Those of each of its ranks."""
    partial: int
    """Elements of which each tensor rank has the gradient of its part of the sequence."""
    shared: tuple[int, ...]
    """Elements of each parameter that all stages share."""
    count: int = 1
    """Stages with as many layers, this one included. It keeps the most activations of them."""

    @property
    def tail(self) -> float:
        """Part of a rank's gradients that cannot be reduced within the backward pass.

        These are the buckets that other ranks complete, and the last bucket of the others.
        """
        early = [bucket for bucket in self.buckets if not bucket.is_late]
        exposed = [bucket for bucket in self.buckets if bucket.is_late]
        exposed += [b for b in early if TIED in b.names] or early[-1:]
        sizes = [sum(b.num_elements for b in part) for part in (exposed, self.buckets)]
        return sizes[0] / sizes[1]


def stage_of(config: RunConfig, layout: Layout, number: int) -> Stage:
    """Return one pipeline stage; arguments as for `buckets_of_rank`."""
    weights = weights_of_rank(config, number)
    return Stage(
        number,
        tuple(buckets_of_rank(config, layout, number)),
        partial=sum(weight.num_elements for weight in weights if weight.is_partial),
        shared=tuple(w.num_elements for w in weights if w.name.startswith("position.")),
    )


def stages_of(config: RunConfig, layout: Layout) -> list[Stage]:
    """Return the first pipeline stage of each kind, with the number of stages of the kind.

    They do not depend on the micro-batch size and on recomputation.

    Args:
        config: The run.
        layout: Its layout.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number in range(layout.pipeline):
        layers = tuple(count for _, count in chunk_layers(config, number))
        kind = (layers, number == 0, number == layout.pipeline - 1)
        kinds.setdefault(kind, []).append(number)
    return [
        replace(stage_of(config, layout, members[0]), count=len(members))
        for members in kinds.values()
    ]


def zero_stage(config: RunConfig, layout: Layout) -> int:
    """Return the ZeRO stage that the run takes: with one data-parallel rank all are stage 1."""
    return 1 if layout.data == 1 else config.parallel.zero_stage


def _piece(c: RunConfig, weight: Weight) -> Piece:
    """Return what decides in which bucket a parameter stands (`pretrain.optim.gradients`)."""
    parallel = c.parallel
    is_tied = c.model.tie_word_embeddings and weight.name == TIED
    is_late = (
        weight.name.startswith("position.")
        or (parallel.tensor_model_parallel_size > 1 and weight.is_partial)
        or (parallel.pipeline_model_parallel_size > 1 and is_tied)
    )
    is_replicated = not weight.is_split or parallel.tensor_model_parallel_size == 1
    return Piece(weight.name, weight.num_elements, is_late, _settings(c, weight), is_replicated)


def _settings(c: RunConfig, weight: Weight) -> Settings:
    """Return weight decay and learning-rate factor, as `pretrain.optim.buckets` sets them."""
    if weight.name.startswith("position."):
        return 0.0, c.optimizer.position_learning_rate_mult
    return c.optimizer.weight_decay if len(weight.shape) == 2 else 0.0, 1.0

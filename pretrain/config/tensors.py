"""List the tensors of a model by arithmetic alone: name, shape, and which ranks hold what of it.

The parameter count, the bytes of checkpoints and exports, and the weights that `pretrain plan`
gives to each rank follow from this list. Names, shapes and order are those that Megatron's modules
have under `pretrain.model.gpt.named_parameters`; the tests compare both on ranks of many
layouts. No torch: the launcher sizes its checks with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pretrain.positions.base import LEARNED_TABLE, OWN

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig

TIED = "embedding.word_embeddings.weight"
"""Global name of the embedding, which a tied output layer shares."""


@dataclass(frozen=True)
class ModelTensor:
    """A parameter where it stands in the model; twice in the list if two pipeline stages hold it.

    All data-parallel ranks hold the same, before ZeRO shards it.
    """

    name: str
    """The global name."""
    shape: tuple[int, ...]
    """Of the whole model."""
    axis: int | None = None
    """Along which the tensor-parallel ranks divide it evenly; None: each holds all of it."""
    is_partial: bool = False
    """True if each tensor rank's gradient is that of its part of the sequence, or of its heads."""
    chunk: int = 0
    """Number of the pipeline chunk that holds it, in the order of the model."""
    is_copy: bool = False
    """True if another stage holds the same values and saves them."""

    @property
    def num_elements(self) -> int:
        """Elements in the whole model."""
        return math.prod(self.shape)

    def of_rank(self, tensor: int) -> int:
        """Return the elements that one of `tensor` tensor-parallel ranks holds."""
        return self.num_elements // (1 if self.axis is None else tensor)


def model_tensors(config: RunConfig) -> list[ModelTensor]:
    """Return every parameter of the model, chunk by chunk, each in the order of its modules.

    The dtype of all is that of train.precision while training, and fp32 in checkpoints.
    """
    parallel, m = config.parallel, config.model
    last = len(config.layers_per_chunk) - 1
    found: list[ModelTensor] = []
    first_layer = 0
    for number, layers in enumerate(config.layers_per_chunk):
        own = list(_inputs(config)) if number == 0 else []
        if layers:
            layer = list(_layer(config))
        for index in range(first_layer, first_layer + layers):
            name = f"decoder.layers.{index}."
            own += [replace(each, name=name + each.name, chunk=number) for each in layer]
        first_layer += layers
        if number == last:
            if m.final_layernorm:
                own += _norm(config, "decoder.final_layernorm")
            own += _outputs(config, is_first=last == 0)
        if number < parallel.pipeline_model_parallel_size:
            # Each stage holds the position method's own parameters once.
            own += [replace(each, is_copy=number > 0) for each in _position(config)]
        found += [each if each.chunk == number else replace(each, chunk=number) for each in own]
    return found


def stage_tensors(config: RunConfig, stage: int) -> list[ModelTensor]:
    """Return what the ranks of a pipeline stage hold, in the order of their chunks."""
    pipeline = config.parallel.pipeline_model_parallel_size
    return [each for each in model_tensors(config) if each.chunk % pipeline == stage]


def num_parameters(config: RunConfig) -> int:
    """Return the number of distinct parameters of the whole model.

    The rows that pad the vocabulary count, and an embedding that is tied to the output layer counts
    once.
    """
    return sum(each.num_elements for each in model_tensors(config) if not each.is_copy)


def num_parameters_of_rank(config: RunConfig, pipeline_rank: int) -> int:
    """Return the number of parameters that a rank of one pipeline stage holds.

    ZeRO is not considered: it may shard them further. All tensor-parallel and data-parallel ranks
    of a stage hold the same number. The sum over stages may exceed `num_parameters`: with pipeline
    stages a tied embedding stands on the first and on the last one, and T5's bias table and
    trainable slopes stand on every stage.

    Args:
        config: The run.
        pipeline_rank: The pipeline stage, from 0.
    """
    tensor = config.parallel.tensor_model_parallel_size
    return sum(each.of_rank(tensor) for each in stage_tensors(config, pipeline_rank))


class Widths(NamedTuple):
    """Numbers that a token has on one tensor-parallel rank; every model of memory counts by them.

    The residual stream has hidden_size of them on each rank, but for sequence parallelism.
    """

    query: int
    """Its heads' queries, and as many of attention's output."""
    key: int
    """Its key heads' keys, and as many values. A rank has one head at least."""
    ffn: int
    """The input of the MLP's second product."""
    projected: int
    """The output of its first one, which is twice as wide where it is gated."""
    vocabulary: int
    """Logits."""


def widths(config: RunConfig) -> Widths:
    """Return the widths of a rank's tensors, in numbers a token."""
    tensor, head = config.parallel.tensor_model_parallel_size, config.head_dim
    return Widths(
        query=config.model.num_attention_heads // tensor * head,
        key=max(1, config.num_query_groups // tensor) * head,
        ffn=config.ffn_hidden_size // tensor,
        projected=(1 + config.model.gated_linear_unit) * config.ffn_hidden_size // tensor,
        vocabulary=config.padded_vocab_size // tensor,
    )


def _inputs(c: RunConfig) -> Iterator[ModelTensor]:
    """Yield what stands before the first layer."""
    hidden = c.model.hidden_size
    for i, cluster in enumerate(c.adaptive_clusters):
        words = "embedding.word_embeddings"
        yield ModelTensor(f"{words}.embedding_{i}", (cluster.size, cluster.dim))
        yield ModelTensor(f"{words}.projection_{i}", (hidden, cluster.dim))
    if not c.adaptive_clusters:
        yield ModelTensor(TIED, (c.padded_vocab_size, hidden), axis=0)
    if shape := c.position.tensors(c).get(LEARNED_TABLE):
        yield ModelTensor(LEARNED_TABLE, shape)
    if c.model.embedding_layernorm:
        # Megatron adds positions to the whole sequence and splits it afterwards.
        is_whole = c.position.adds_to_embeddings(c)
        for each in _norm(c, "embedding.word_embeddings_layernorm"):
            yield replace(each, is_partial=each.is_partial and not is_whole)


def _layer(c: RunConfig) -> Iterator[ModelTensor]:
    """Yield the parameters of a transformer layer, by their names in it."""
    hidden, ffn, m = c.model.hidden_size, c.ffn_hidden_size, c.model
    queries = m.num_attention_heads * c.head_dim
    qkv = queries + 2 * c.num_query_groups * c.head_dim

    def linear(
        name: str, outputs: int, inputs: int, axis: int, has_bias: bool = m.use_bias
    ) -> Iterator[ModelTensor]:
        """Yield a linear layer that splits its outputs (axis 0) or its inputs (axis 1)."""
        yield ModelTensor(f"{name}.weight", (outputs, inputs), axis)
        if has_bias:
            is_whole = axis == 1
            is_partial = c.parallel.sequence_parallel and is_whole
            yield ModelTensor(f"{name}.bias", (outputs,), None if is_whole else 0, is_partial)

    yield from _norm(c, "input_layernorm")
    yield from linear("self_attention.linear_proj", hidden, queries, axis=1)
    has_bias = m.use_bias or m.add_qkv_bias
    yield from linear("self_attention.linear_qkv", qkv, hidden, axis=0, has_bias=has_bias)
    for kind in ("q_layernorm", "k_layernorm") if m.qk_layernorm else ():
        for each in _norm(c, f"self_attention.{kind}"):
            yield replace(each, shape=(c.head_dim,), is_partial=True)
    yield from _norm(c, "pre_mlp_layernorm")
    # The rows of a gate, then those of what it is multiplied by; each tensor rank has a part of
    # both (`pretrain.model.gpt.Named`).
    yield from linear("mlp.linear_fc1", (1 + m.gated_linear_unit) * ffn, hidden, axis=0)
    yield from linear("mlp.linear_fc2", hidden, ffn, axis=1)


def _norm(c: RunConfig, name: str) -> list[ModelTensor]:
    """Return the parameters of a norm."""
    has_bias = c.model.use_bias and c.model.normalization == "layernorm"
    kinds = ("weight", "bias") if has_bias else ("weight",)
    is_partial = c.parallel.sequence_parallel
    return [
        ModelTensor(f"{name}.{kind}", (c.model.hidden_size,), is_partial=is_partial)
        for kind in kinds
    ]


def _outputs(c: RunConfig, is_first: bool) -> Iterator[ModelTensor]:
    """Yield what stands behind the last layer; `is_first`: the embedding is in the same chunk."""
    hidden, is_tied = c.model.hidden_size, c.model.tie_word_embeddings
    clusters = c.adaptive_clusters
    for i, cluster in enumerate(() if is_tied else clusters):
        yield ModelTensor(f"output_layer.embedding_{i}", (cluster.size, cluster.dim))
        if i:
            yield ModelTensor(f"output_layer.projection_{i}", (hidden, cluster.dim))
    if clusters:
        # The head of the softmax has a row for each tail.
        yield ModelTensor("output_layer.tails", (len(clusters) - 1, hidden))
    elif not (is_tied and is_first):
        name = TIED if is_tied else "output_layer.weight"
        yield ModelTensor(name, (c.padded_vocab_size, hidden), axis=0, is_copy=is_tied)


def _position(c: RunConfig) -> Iterator[ModelTensor]:
    """Yield the parameters that the position method itself holds."""
    for name, shape in c.position.tensors(c).items():
        if name.removeprefix(OWN) in c.position.shared_by_heads:
            # Each tensor rank's gradient is that of its heads.
            yield ModelTensor(name, shape, is_partial=True)
        elif name.startswith(OWN):
            yield ModelTensor(name, shape, axis=0)

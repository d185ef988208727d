"""Compute the memory of a rank by part, from a config and a layout.

State (weights, gradients, optimizer) is exact to the byte. Activations are counted at the moment of
a step at which the most memory is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from pretrain.config import ConfigError, Layout, RunConfig, num_parameters
from pretrain.config.tensors import TIED, ModelTensor, stage_tensors, widths
from pretrain.optim import Piece, cut, is_late, settings_of
from pretrain.positions.base import by_layer

# ---- The order in which Megatron's schedules run the micro batches of a pipeline stage ----
# Origin: megatron/core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`,
# `get_schedule_table` and the two functions that run them.


State = tuple[tuple[int, ...], int]
"""The number of micro batches of each chunk that await their backward pass, and the next chunk."""


@lru_cache(maxsize=4096)
def states(pipeline: int, virtual: int, stage: int, count: int) -> frozenset[State]:
    """Return the states of a stage at the beginning of backward passes, each once.

    The arguments are those of `passes`.
    """
    # More micro batches add no states: each further forward pass follows a backward pass of the
    # same chunk.
    count = min(count, 3 * pipeline if virtual > 1 else pipeline + 1)
    waiting = [0] * virtual
    found = set()
    for is_forward, chunk in passes(pipeline, virtual, stage, count):
        if is_forward:
            waiting[chunk] += 1
        else:
            found.add((tuple(waiting), chunk))
            waiting[chunk] -= 1
    return frozenset(found)


def passes(pipeline: int, virtual: int, stage: int, count: int) -> Iterator[tuple[bool, int]]:
    """Yield the passes of a step on a stage, in order: True if forward, and the chunk.

    Args:
        pipeline: Number of pipeline stages.
        virtual: Number of chunks of each stage.
        stage: The stage, from 0.
        count: Number of micro batches.
    """
    if virtual == 1:
        warm_up = pipeline - stage - 1
    else:
        warm_up = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline
    # Micro batches pass chunk by chunk in groups of the pipeline's size.
    group = pipeline if virtual > 1 else count
    forward = [
        chunk
        for first in range(0, count, group)
        for chunk in range(virtual)
        for _ in range(first, min(count, first + group))
    ]
    backward = [virtual - 1 - chunk for chunk in forward]
    warm_up = min(warm_up, len(forward))
    yield from ((True, chunk) for chunk in forward[:warm_up])
    for number, chunk in enumerate(forward[warm_up:]):
        yield True, chunk
        yield False, backward[number]
    yield from ((False, chunk) for chunk in backward[len(forward) - warm_up :])


# ---- Lay out the parameters of a rank as ZeRO does, without building the model ----


ALIGNMENT = 2
"""DeepSpeed pads each flat tensor to a multiple of this times the data-parallel size (deepspeed/
runtime/zero/stage_1_and_2.py, `nccl_start_alignment_factor`)."""


def chunk_layers(config: RunConfig, stage: int) -> list[tuple[int, int]]:
    """Return (number of the chunk, its layers) of every chunk of a pipeline stage."""
    pipeline = config.parallel.pipeline_model_parallel_size
    return list(enumerate(config.layers_per_chunk))[stage::pipeline]


@dataclass(frozen=True)
class FlatBucket:
    """Parameters of a rank in one flat tensor."""

    num_elements: int
    """The number of elements, with padding."""
    is_late: bool
    """True if the reduction cannot start during the backward pass; meaningless at ZeRO 2 and 3."""
    names: tuple[str, ...]


def buckets_of_rank(config: RunConfig, layout: Layout, stage: int) -> list[FlatBucket]:
    """Return the flat tensors of a rank, in the order in which they are reduced at ZeRO 1.

    Args:
        config: The run.
        layout: Its layout.
        stage: The pipeline stage, from 0.
    """
    pieces = [_piece(config, weight) for weight in stage_tensors(config, stage)]
    unit = ALIGNMENT * layout.replicas

    def flat(members: list[int]) -> FlatBucket:
        size = sum(pieces[number].num_elements for number in members)
        names = tuple(pieces[number].name for number in members)
        return FlatBucket(-(-size // unit) * unit, pieces[members[0]].is_late, names)

    return [flat(part) for part in cut(pieces, layout.zero_stage)]


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, and the number of stages like it."""

    number: int
    """The index of the stage, from 0."""
    buckets: tuple[FlatBucket, ...]
    """The buckets of each of its ranks."""
    partial: int
    """The number of elements whose gradient on each tensor rank covers only its part of the
    sequence."""
    parameters: int
    """The number of parameters of each of its ranks."""
    count: int = 1
    """The number of stages with equally many layers, including this stage. Among them, this stage
    keeps the most activations."""

    @property
    def tail(self) -> float:
        """The share of a rank's gradients that cannot be reduced during the backward pass.

        These are the buckets that other ranks complete, and the last one of the other buckets.
        """
        early = [bucket for bucket in self.buckets if not bucket.is_late]
        exposed = [bucket for bucket in self.buckets if bucket.is_late]
        exposed += [b for b in early if TIED in b.names] or early[-1:]
        sizes = [sum(b.num_elements for b in part) for part in (exposed, self.buckets)]
        return sizes[0] / sizes[1]


def stage_of(config: RunConfig, layout: Layout, number: int) -> Stage:
    """Return one pipeline stage; the arguments are those of `buckets_of_rank`."""
    weights = stage_tensors(config, number)
    return Stage(
        number,
        tuple(buckets_of_rank(config, layout, number)),
        partial=sum(w.of_rank(layout.tensor) for w in weights if w.is_partial),
        parameters=sum(w.of_rank(layout.tensor) for w in weights),
    )


def stages_of(config: RunConfig, layout: Layout) -> list[Stage]:
    """Return the first pipeline stage of each kind, with the number of stages of the kind.

    The stages do not depend on the micro-batch size or on recomputation.

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


def _piece(c: RunConfig, weight: ModelTensor) -> Piece:
    """Return the properties that decide a parameter's bucket (`pretrain.optim.buckets`)."""
    p, tensor = c.parallel, c.parallel.tensor_model_parallel_size
    is_tied = c.model.tie_word_embeddings and weight.name == TIED
    late = is_late(weight.name, weight.is_partial, is_tied, tensor, p.pipeline_model_parallel_size)
    is_replicated = weight.axis is None or tensor == 1
    settings = settings_of(c, weight.name, weight.shape)
    return Piece(weight.name, weight.of_rank(tensor), late, settings, is_replicated)


# ---- activations ----
# Bytes of the tensors that a rank keeps for the backward pass, and of temporary tensors.
#
# These are closed forms of what Megatron's layers, our attention and our loss save
# (tests/unit/test_plan_memory.py compares them with every allocation of real ranks). Letters: T
# tokens of a micro batch, d hidden size, t tensor-parallel size. Under sequence parallelism, norms,
# residual stream and dropout hold T / t tokens; tensors between the two products of a block are
# divided by t in any case.


ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number in each precision."""
LOSS_PIECE = 2**24
"""Logits that the loss converts to fp32 at once if it is not compiled (`pretrain.model.loss`)."""
FOLDED_COLUMNS = 6
"""Columns that ALiBi adds to q and k on a V100 (`pretrain.kernels.folded`)."""
FOLDED_KEYS = 60_000
"""The most keys for which such columns can be used."""
WIDEST_HEAD = 256
"""The largest head width that the Triton kernel supports."""
QUERY_BLOCK = 256
"""Queries of a masked call of torch's attention (`pretrain.kernels.sdpa`), and of a block of scores
(`pretrain.kernels.scored`)."""
BLOCKS_OF_SCORES = 3
"""Blocks of fp32 scores that exist at the same time while one block is recomputed and
differentiated, for a method that adds a bias by distance. A method's `score_blocks` adds others."""


def attention_backend(config: RunConfig, is_modern: bool) -> str:
    """Return the backend that model.attention_backend = auto chooses on a GPU that has Triton.

    This repeats the choice of `pretrain.kernels.dispatch` without torch. A test compares the two.

    Args:
        config: The run.
        is_modern: As in `Activations`.
    """
    position, parts_documents = config.position, config.data.per_document_attention
    if position.bias == "scores":
        return "scored"
    if position.bias == "none" and not parts_documents:
        return "sdpa"
    if is_modern and config.head_dim <= WIDEST_HEAD:
        return "triton"
    is_fixed = position.bias == "slopes" and not position.tensors(config)
    if (
        is_fixed
        and not parts_documents
        and config.train.precision != "fp32"
        and config.data.sequence_length <= FOLDED_KEYS
    ):
        return "folded"
    return "sdpa"


def check_counted(config: RunConfig) -> None:
    """Raise ConfigError for a run whose step depends on its text."""
    if config.model.adaptive_cutoffs is not None:
        raise ConfigError(
            f"model.adaptive_cutoffs = {list(config.model.adaptive_cutoffs)}: how many tokens a "
            "tail computes is up to the text, so a step cannot be counted without one. `pretrain "
            "bench train` times steps"
        )


class Activations:
    """The tensors of one micro batch in the chunks of a rank. All are in bytes."""

    def __init__(self, config: RunConfig, is_modern: bool) -> None:
        """Compute the sizes that other parts are made of.

        Args:
            config: The run, with the layout's keys.
            is_modern: The GPU has bf16, a Triton kernel for attention, and operations that
                torch.compile fuses.
        """
        parallel, hidden = config.parallel, config.model.hidden_size
        self.config, self.is_modern = config, is_modern
        self.item = ITEM[config.train.precision]
        """Bytes of a number in the training precision."""
        self.context = parallel.context_parallel_size
        """n, the number of parts of a sequence; this rank holds the last, with the most keys."""
        self.tokens = config.batch.micro_batch_size * config.data.sequence_length // self.context
        """T, tokens of a micro batch on this rank."""
        self.tensor = parallel.tensor_model_parallel_size
        """t, the tensor-parallel size."""
        self.stream_tokens = self.tokens // (self.tensor if parallel.sequence_parallel else 1)
        """The number of tokens for which this rank holds norms and residual stream."""
        self.stream = self.stream_tokens * hidden * self.item
        """One tensor of the residual stream."""
        self.whole = self.tokens * hidden * self.item
        """One tensor of the width d for all tokens, independent of sequence parallelism."""
        self.gathered = self.whole if parallel.sequence_parallel else 0
        """Megatron's buffer for gathered sequences, which is never freed."""
        self.widths = widths(config)
        """Numbers of a token in each kind of tensor."""
        self.inner = self.tokens * self.widths.ffn * self.item
        """The input of the second product of the MLP."""
        self.projected = self.tokens * self.widths.projected * self.item
        """The output of the first product of the MLP."""
        self.statistics = 8 if config.model.normalization == "layernorm" else 4
        """Bytes that torch keeps per normalized row: mean and 1 / std, or 1 / root mean square."""
        self.is_compiled = config.train.fusion != "off" and is_modern
        """Regions of the model are compiled on this GPU."""
        self.has_fused_loss = config.train.fusion != "off"
        """The loss keeps no second copy of the logits: `train.fusion` on a GPU."""
        self.accumulates_in_products = (
            self.has_fused_loss and is_modern and parallel.zero_stage == 1
        )
        """The product itself adds weight gradients to fp32."""
        self.backend = attention_backend(config, is_modern)
        """With "folded", ALiBi is held in extra columns of q and k, in fp16 on a V100."""
        self.is_scored = self.backend == "scored"
        """A function of the method changes the scores, of which no block is kept."""
        self.uses_mask = self.backend == "sdpa" and config.position.bias != "none"
        """The bias is passed to attention as a mask in memory."""

    def layer(self) -> int:
        """Return the bytes that a layer keeps with the config's train.recompute_granularity."""
        recompute = self.config.train.recompute_granularity
        if recompute == "full":
            return self.stream
        return self.whole_layer(keeps_core=recompute == "none")

    def whole_layer(self, keeps_core: bool = True) -> int:
        """Return the bytes that a layer keeps without recomputation, or with that of the core."""
        m = self.config.model
        # Inputs and outputs of both norms, and their statistics.
        norms = 4 * self.stream + 2 * self.statistics * self.stream_tokens
        if m.parallel_residual:
            # Both norms have the same input.
            norms -= self.stream
        dropout = 2 * self.stream // self.item if m.hidden_dropout else 0
        mlp = self.projected + self.inner
        if m.gated_linear_unit and not (self.is_compiled and m.hidden_act == "silu"):
            # The activation, and a copy of the tensor by which it is multiplied.
            mlp += 2 * self.inner
        elif m.hidden_act == "relu" and not m.gated_linear_unit and not m.activation_dropout:
            # ReLU's backward pass reads its output, which the second product keeps anyway.
            mlp -= self.projected
        if m.activation_dropout:
            # The mask, one byte per element.
            mlp += self.inner // self.item
        return norms + dropout + mlp + self._attention(keeps_core)

    def _attention(self, keeps_core: bool) -> int:
        """Return what attention keeps besides its input: queries, keys, values and output."""
        c = self.config
        heads = c.model.num_attention_heads // self.tensor
        # The kernels of a V100 do not support grouped queries, so keys and values are repeated for
        # each head.
        groups = c.num_query_groups // self.tensor if self.is_modern else heads
        query = self.widths.query * self.item
        pair = 2 * (self.widths.key if self.is_modern else self.widths.query) * self.item
        rows = 4 * heads
        kept = query + pair
        # With several parts, the keys and values of all parts are joined. The queries are a copy,
        # except those without a bias or a rotation.
        is_view = self.context == 1 or not keeps_core
        if not is_view:
            is_copy = c.position.bias != "none" or c.position.rotated_channels(c)
            kept = query + (self.context + (not is_copy)) * pair
        if c.model.clip_qkv is not None:
            # The input of the clipping.
            kept += (self.widths.query + 2 * self.widths.key) * self.item
        has_copy = 1 < groups < heads
        if c.model.qk_layernorm:
            # Norms read keys from the projection's output, and queries from there or as below.
            kept += self.statistics * (heads + groups) + has_copy * query
            kept += 0 if is_view else query + pair
        if channels := c.position.rotated_channels(c):
            # The rotated queries and keys are new tensors; the values are a view of the old tensor.
            kept += is_view * (query + pair // 2)
            # Sines and cosines of queries and of keys, which all samples of the batch share.
            kept += 4 * channels * self.item // c.batch.micro_batch_size
        elif c.model.qk_layernorm:
            kept += is_view * (query + pair // 2)
        elif is_view and has_copy:
            # Queries of several groups are not evenly spaced, so they are copied. Rotated queries
            # are new tensors in any case.
            kept += query
        core = 0 if self.is_scored else rows
        if self.backend == "folded":
            extra = -(-(c.head_dim + FOLDED_COLUMNS) // 8) * 8 - c.head_dim
            core += (heads + groups) * extra * self.item
        elif self.uses_mask:
            # q, k, v and the output in fp32, in addition to the tensors above.
            core += (2 * query + pair) * 4 // self.item
        if not self.is_modern and not self.uses_mask and not self.is_scored:
            # The kernel's output has the batch as its first dimension, so the projection copies it.
            core += query
        total = kept + query + (core if keeps_core else 0)
        return self.tokens * total + (self._mask() if keeps_core and self.uses_mask else 0)

    def _mask(self) -> int:
        """Return the bytes of a layer's fp32 masks, one per block of queries, for all samples."""
        length = self.config.data.sequence_length
        heads = self.config.model.num_attention_heads // self.tensor
        blocks = range(length, length - length // self.context, -QUERY_BLOCK)
        return 4 * heads * sum(min(QUERY_BLOCK, keys) * keys for keys in blocks)

    def embedding(self) -> int:
        """Return what the embedding keeps besides the input of the first layer: token ids."""
        ids = 8 + (9 if self.tensor > 1 else 0)
        dropout = self.stream // self.item if self.config.model.hidden_dropout else 0
        norm = 0
        if self.config.model.embedding_layernorm:
            norm = self.stream + self.statistics * self.stream_tokens
        return ids * self.tokens + dropout + norm

    def logits(self) -> int:
        """Return the bytes of the logits of a micro batch, in the form that the loss keeps."""
        # Megatron's loss keeps the softmax of the logits, in fp32.
        per_logit = self.item if self.has_fused_loss else 4
        return self.tokens * self.widths.vocabulary * per_logit

    def loss(self) -> int:
        """Return what the final norm and the loss keep besides the logits."""
        # Input and output of the norm, whose output the output layer has gathered for all tokens;
        # labels, and three statistics per token.
        norm = self.stream + self.statistics * self.stream_tokens + self.whole
        if not self.config.model.final_layernorm:
            # The output of the last layer is the input of the output layer.
            norm = self.whole
        return norm + (8 + 3 * 4) * self.tokens

    def loss_buffers(self, is_tied_here: bool) -> int:
        """Return the temporary memory of the backward pass of the loss.

        Args:
            is_tied_here: The embedding and the output layer are one parameter of this rank.
        """
        gradient = self.whole + (self.stream if self.config.parallel.sequence_parallel else 0)
        if not is_tied_here or not self.accumulates_in_products:
            # A gradient of the weight's shape, which autograd needs even if it is never filled.
            gradient += self.embedding_weight()
        logits = self.tokens * self.widths.vocabulary
        if not self.has_fused_loss:
            # The softmax becomes the gradient of the logits, and is freed before the products.
            gradient = self.item * logits + max(0, gradient - self.logits())
        elif not self.is_modern:
            gradient += 4 * min(logits, LOSS_PIECE)
        return gradient + 8 * self.tokens

    def embedding_weight(self) -> int:
        """Return the bytes of this rank's embedding in the training precision."""
        return self.widths.vocabulary * self.config.model.hidden_size * self.item

    def layer_buffers(self) -> int:
        """Return the largest temporary memory of the backward pass of a layer."""
        total = max(self._mlp_buffers(), self._attention_buffers())
        if self.config.train.recompute_granularity == "full":
            # The layer runs once more and keeps everything. Its input is already kept, but the
            # output of its last product also exists when the backward pass begins.
            total += self.whole_layer()
        return total

    def _mlp_buffers(self) -> int:
        """Return the buffers of the second product of the MLP, or of the activation before it.

        They are the gradients of the product's output and of its input, and a tensor of its
        weight's shape. ReLU writes a second gradient of its size while its output still exists; a
        gate writes two after the product's input has been freed.
        """
        c = self.config
        weight = c.model.hidden_size * self.widths.ffn * self.item
        dropped = self.stream if c.model.hidden_dropout else 0
        beside = weight + self.gathered
        if c.model.hidden_act == "relu" or c.model.gated_linear_unit:
            beside = max(beside, self.inner)
        return self.stream + self.inner + beside + dropped

    def _attention_buffers(self) -> int:
        """Return the buffers of attention, less the memory that the MLP has freed by then.

        They are the gradients of the residual stream, of the output, and of queries, keys and
        values; with a learned bias, also the sums of its gradient (kernels/flash/launch.py).
        """
        c = self.config
        heads = c.model.num_attention_heads // self.tensor
        pairs = (self.widths.query + 2 * self.widths.key) * self.item
        sums = 0
        if self.is_modern and c.position.bias == "table":
            reach = c.position.reach(c)
            block = 32 if c.head_dim * self.item < 1024 else 16
            queries = c.data.sequence_length // self.context
            splits = min(c.batch.micro_batch_size * -(-queries // block), 16)
            sums = 4 * heads * -(-(reach + block - 1) // block) * splits * block * 2 * block
        if self.is_scored:
            block = min(QUERY_BLOCK, c.data.sequence_length // self.context)
            one = 4 * c.batch.micro_batch_size * heads * block * c.data.sequence_length
            sums = int((BLOCKS_OF_SCORES + c.position.score_blocks(c)) * one)
        given_back = self.projected + self.inner + 2 * self.stream
        if self.context > 1:
            # Gradients of the keys and values of the other parts; with scores, also a copy in fp32.
            pairs += (self.context - 1) * (2 * self.item + 4 * self.is_scored) * self.widths.key
        pairs += self.widths.query * self.item
        return 2 * self.stream + self.tokens * pairs + sums - given_back


OVERHEAD_BYTES = 1_500_000_000
"""CUDA's context, NCCL's buffers and fragmentation. Assumed; measured on no GPU."""
ZERO_BUCKET = 500_000_000
"""The most elements of DeepSpeed's reduction buffer at ZeRO 2 and 3 (`pretrain.optim.zero`)."""
ZERO_LIVE = 1_000_000_000
"""The most elements of gathered weights that ZeRO 3 keeps (DeepSpeed's default of
stage3_max_live_parameters)."""


@dataclass(frozen=True)
class Memory:
    """The bytes of a rank by part."""

    weights: int
    gradients: int
    """fp32, or this rank's part of them from ZeRO 2 on."""
    wire: int
    """Copies of gradients in the form in which they are sent, and DeepSpeed's buffers for them."""
    optimizer: int
    """fp32 masters and moments."""
    activations: int
    logits: int
    buffers: int
    """Temporary tensors of a backward pass."""
    overhead: int = OVERHEAD_BYTES

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


def memory_of_rank(config: RunConfig, layout: Layout, stage: Stage, is_modern: bool) -> Memory:
    """Return the memory of a rank of a pipeline stage.

    Args:
        config: The run, whose precision decides the size of the weights.
        layout: Its layout.
        stage: The pipeline stage.
        is_modern: As in `Activations`.
    """
    kept, logits, buffers = max(_moments(config, layout, stage.number, is_modern), key=sum)
    buffers += Activations(config, is_modern).gathered
    # In the order of the fields.
    return Memory(*_state(config, layout, stage), kept, logits, buffers)


def _state(config: RunConfig, layout: Layout, stage: Stage) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients, wire and optimizer of a rank.

    Args:
        config: The run.
        layout: Its layout.
        stage: The pipeline stage.
    """
    item, data = ITEM[config.train.precision], layout.replicas
    padded = sum(bucket.num_elements for bucket in stage.buckets)
    # Masters and moments, and a count of steps for each group.
    optimizer = config.state_bytes * padded // data + 4 * len(stage.buckets)
    if layout.zero_stage == 1:
        wire = 0
        if data > 1 and config.parallel.gradient_reduce_dtype != "fp32":
            # The sent and the received copy of every bucket, until all have been summed.
            wire = 2 * 2 * padded
        return item * padded, 4 * padded, wire, optimizer
    buffer = min(ZERO_BUCKET, num_parameters(config))
    if layout.zero_stage == 2:
        # The buffer in the precision of the model, and its cast to fp32.
        wire = (item + (4 if item == 2 else 0)) * buffer
        return item * padded, 4 * padded // data, wire, optimizer
    live = item * min(padded, ZERO_LIVE)
    # The fp32 buffer is permanent, and gradients are collected in the precision of the model.
    wire = (4 + item) * buffer
    return item * padded // data + live, 4 * padded // data, wire, optimizer


def _moments(
    config: RunConfig, layout: Layout, stage: int, is_modern: bool
) -> set[tuple[int, int, int]]:
    """Return what a rank holds besides the state at the beginning of and during backward passes.

    Args:
        config: The run.
        layout: Its layout.
        stage: The pipeline stage, from 0.
        is_modern: As in `Activations`.

    Returns:
        (activations, logits, buffers) in bytes of each moment.
    """
    a = Activations(config, is_modern)
    kinds = [a if each is config else Activations(each, is_modern) for each in by_layer(config)]
    repeated = config.model.num_layers // len(kinds)
    of_layer = [kind.layer() for kind in kinds] * repeated
    in_layer = [kind.layer_buffers() for kind in kinds] * repeated
    chunks = chunk_layers(config, stage)
    before = [sum(config.layers_per_chunk[:number]) for number, _ in chunks]
    own = [slice(first, first + layers) for first, (_, layers) in zip(before, chunks)]
    last = len(config.layers_per_chunk) - 1
    size = [
        sum(of_layer[layers])
        + (a.embedding() if number == 0 else 0)
        + (a.loss() if number == last else 0)
        for (number, _), layers in zip(chunks, own)
    ]
    is_tied_here = config.model.tie_word_embeddings and last == 0
    received = _exchanged(layout, stage) * a.stream
    # The loss has freed what it kept before the layers begin. Without a loss, the gradient of the
    # output is the received one.
    logits_size, of_loss = a.logits(), a.loss()
    in_loss = a.loss_buffers(is_tied_here)
    in_embedding = a.embedding() + a.embedding_weight() + a.whole
    found: set[tuple[int, int, int]] = set()
    for waiting, chunk in states(layout.pipeline, layout.virtual, stage, layout.num_microbatches):
        number, _ = chunks[chunk]
        has_loss = number == last
        of_layers = max(in_layer[own[chunk]])
        kept = received + sum(n * each for n, each in zip(waiting, size))
        # The last chunk is the only one with logits.
        logits = waiting[-1] * logits_size if chunks[-1][0] == last else 0
        found.add((kept, logits, 0))
        if has_loss:
            found.add((kept, logits, in_loss))
            logits -= logits_size
            found.add((kept - of_loss, logits, of_layers))
        else:
            found.add((kept, logits, of_layers - a.stream))
        if number == 0:
            found.add((kept - size[chunk], logits, in_embedding))
    return found


def _exchanged(layout: Layout, stage: int) -> int:
    """Return how many tensors from and for other stages exist when a backward pass begins.

    Args:
        layout: The layout.
        stage: The pipeline stage.
    """
    if layout.virtual > 1:
        # The interleaved schedule also receives activations early.
        return 3
    # The gradient of its output, and the gradient of its input that the last backward pass has
    # sent, which Megatron's schedule keeps until the next one.
    return (stage < layout.pipeline - 1) + (stage > 0 and layout.num_microbatches > 1)

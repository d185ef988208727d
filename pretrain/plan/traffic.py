"""List the collectives of a step at ZeRO 1, as `pretrain bench step --count` counts them.

Counted are those of one rank of a pipeline stage; a test compares every row with the counter. Of
ZeRO 2 and 3, whose calls are DeepSpeed's, the model of time knows the bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pretrain.config import Layout, RunConfig
from pretrain.plan.activations import ITEM, Activations
from pretrain.plan.weights import Stage, chunk_layers

LOSS_BYTES = 32
"""The loss and the votes on requests, in fp64 (`pretrain.train.step._sum_over_ranks`)."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Messages(NamedTuple):
    """Calls of one collective that are alike."""

    name: str
    """As in `pretrain.plan.costs.Collective`; "send" and "recv" between pipeline stages."""
    group: str
    """"tensor", "pipeline", "embedding", "data" or "world"."""
    dtype: str
    calls: int
    num_bytes: int
    """Of all calls together, as `Collective` counts them."""
    is_hidden: bool = False
    """True if matrix products run meanwhile."""


def messages(config: RunConfig, layout: Layout, stage: Stage, is_modern: bool) -> list[Messages]:
    """Return the collectives of a step on one rank of a stage, those of single ranks left out.

    Args:
        config: The run, at ZeRO 1.
        layout: Its layout.
        stage: The pipeline stage.
        is_modern: As in `Activations`.
    """
    found = [
        *_tensor(config, layout, stage, is_modern),
        *_pipeline(config, layout, stage, is_modern),
        *_shared(config, layout, stage),
        *_data(config, layout, stage),
    ]
    return [each for each in found if each.calls]


def _chunks(config: RunConfig, stage: Stage) -> tuple[int, bool, bool]:
    """Return the layers of a stage, and if it has the embedding and the output layer."""
    numbers = chunk_layers(config, stage.number)
    last = len(config.layers_per_chunk) - 1
    return (
        sum(layers for _, layers in numbers),
        any(number == 0 for number, _ in numbers),
        any(number == last for number, _ in numbers),
    )


def _tensor(config: RunConfig, layout: Layout, stage: Stage, is_modern: bool) -> Iterator[Messages]:
    """Yield what tensor-parallel ranks send in the passes."""
    if layout.tensor == 1:
        return
    a, dtype = Activations(config, is_modern), DTYPES[config.train.precision]
    layers, has_embedding, has_output = _chunks(config, stage)
    micro = layout.num_microbatches
    forward = 2 if config.train.recompute_granularity == "full" else 1

    def many(name: str, times: int, is_hidden: bool = False) -> Messages:
        """Return messages of all tokens, `times` for each micro batch."""
        return Messages(name, "tensor", dtype, times * micro, times * micro * a.whole, is_hidden)

    if config.parallel.sequence_parallel:
        # Megatron adds positions before it splits the sequence.
        adds_positions = config.position.method in ("learned", "sinusoidal")
        yield many("allreduce", has_embedding * adds_positions)
        scattered = 2 * layers * forward + has_embedding * (not adds_positions)
        yield many("reduce_scatter_base", scattered)
        yield many("allgather_base", 2 * layers * forward + has_output)
        # Gradients of outputs, which the products wait for, and inputs for the weights' gradients.
        yield many("allgather_base", 2 * layers + has_embedding)
        # The fused loss keeps what it has gathered.
        again = 2 * layers + (has_output and not a.has_fused_loss)
        yield many("allgather_base", again, is_hidden=True)
        yield many("reduce_scatter_base", 2 * layers + has_output, is_hidden=True)
    else:
        yield many("allreduce", 2 * layers * forward + has_embedding)
        yield many("allreduce", 2 * layers + has_output, is_hidden=True)
    if has_output:
        # Maximum, sum of exponentials and the label's logit of each token; Megatron's loss sends
        # the last two apart.
        count = micro * (2 if a.has_fused_loss else 3)
        yield Messages("allreduce", "tensor", "float32", count, micro * 3 * 4 * a.tokens)


def _pipeline(
    config: RunConfig, layout: Layout, stage: Stage, is_modern: bool
) -> Iterator[Messages]:
    """Yield what neighbouring stages send: activations forward, gradients backward."""
    if layout.pipeline == 1:
        return
    a, dtype = Activations(config, is_modern), DTYPES[config.train.precision]
    chunks = [number for number, _ in chunk_layers(config, stage.number)]
    last = len(config.layers_per_chunk) - 1
    # A chunk sends to the next one and to the one before, and receives as often.
    times = sum((number > 0) + (number < last) for number in chunks) * layout.num_microbatches
    for name in ("send", "recv"):
        yield Messages(name, "pipeline", dtype, times, times * a.stream)


def _shared(config: RunConfig, layout: Layout, stage: Stage) -> Iterator[Messages]:
    """Yield the sums of gradients that several model-parallel ranks hold parts of."""
    if layout.tensor > 1 and stage.partial:
        yield Messages("allreduce", "tensor", "float32", 1, 4 * stage.partial)
    if layout.pipeline > 1:
        for elements in stage.shared:
            yield Messages("allreduce", "pipeline", "float32", 1, 4 * elements)
        if config.model.tie_word_embeddings and stage.number in (0, layout.pipeline - 1):
            rows = config.padded_vocab_size // layout.tensor
            size = 4 * rows * config.model.hidden_size
            yield Messages("allreduce", "embedding", "float32", 1, size)


def _data(config: RunConfig, layout: Layout, stage: Stage) -> Iterator[Messages]:
    """Yield what data-parallel ranks send on one node, and the sums over all ranks."""
    if layout.world_size > 1:
        # The squared norm; and the loss with what is logged beside it.
        yield Messages("allreduce", "world", "float64", 2, 8 + LOSS_BYTES)
    if layout.data == 1:
        return
    wire = config.parallel.gradient_reduce_dtype
    name, size = ("reduce_scatter_base", 4) if wire == "fp32" else ("alltoall_base", 2)
    padded, calls = sum(b.num_elements for b in stage.buckets), len(stage.buckets)
    yield Messages(name, "data", DTYPES[wire], calls, size * padded, is_hidden=True)
    item, dtype = ITEM[config.train.precision], DTYPES[config.train.precision]
    yield Messages("allgather_base", "data", dtype, calls, item * padded, is_hidden=True)

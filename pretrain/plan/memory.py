"""Compute the memory of a rank, part by part, from a config and a layout.

State (weights, gradients, optimizer) is exact to the byte. Activations follow
`pretrain.plan.activations`, at the moment of a step at which most memory is in use.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pretrain.config import Layout, RunConfig, num_parameters
from pretrain.plan.activations import ITEM, Activations
from pretrain.plan.pipeline import states
from pretrain.plan.weights import Stage, chunk_layers, zero_stage

OVERHEAD_BYTES = 1_500_000_000
"""CUDA's context, NCCL's buffers and fragmentation. Assumed; measured on no GPU."""
ZERO_BUCKET = 500_000_000
"""Elements of DeepSpeed's reduction buffer at ZeRO 2 and 3, at most (`pretrain.optim.zero`)."""
ZERO_LIVE = 1_000_000_000
"""Elements of gathered weights that ZeRO 3 keeps at most (DeepSpeed's default of
stage3_max_live_parameters)."""


@dataclass(frozen=True)
class Memory:
    """Hold the bytes of a rank by part."""

    weights: int
    gradients: int
    """fp32, or this rank's part of them from ZeRO 2 on."""
    wire: int
    """Copies of gradients in the form in which they travel, and DeepSpeed's buffers of them."""
    optimizer: int
    """fp32 masters and moments."""
    activations: int
    logits: int
    buffers: int
    """What comes and goes in a backward pass."""
    overhead: int = OVERHEAD_BYTES

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def state(self) -> int:
        """Bytes that a rank holds between two steps."""
        return self.weights + self.gradients + self.optimizer


def memory_of_rank(config: RunConfig, layout: Layout, stage: Stage, is_modern: bool) -> Memory:
    """Return the memory of a rank of a pipeline stage.

    Args:
        config: The run, whose precision decides about the size of weights.
        layout: Its layout.
        stage: The pipeline stage.
        is_modern: As in `Activations`.
    """
    kept = peak(config, layout, stage.number, is_modern)
    weights, gradients, wire, optimizer = _state(config, layout, stage)
    activations = Activations(config, is_modern)
    return Memory(
        weights=weights,
        gradients=gradients,
        wire=wire,
        optimizer=optimizer,
        activations=kept.activations,
        logits=kept.logits,
        buffers=kept.buffers + activations.persistent(),
    )


def _state(config: RunConfig, layout: Layout, stage: Stage) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients, wire and optimizer of a rank.

    Args:
        config: The run.
        layout: Its layout.
        stage: The pipeline stage.
    """
    item, data = ITEM[config.train.precision], layout.data
    padded = sum(bucket.num_elements for bucket in stage.buckets)
    # Masters and moments; and a count of steps for each group.
    optimizer = config.state_bytes * padded // data + 4 * len(stage.buckets)
    zero = zero_stage(config, layout)
    if zero == 1:
        wire = 0
        if data > 1 and config.parallel.gradient_reduce_dtype != "fp32":
            # What is sent and what is received, of every bucket, until all have been summed.
            wire = 2 * 2 * padded
        return item * padded, 4 * padded, wire, optimizer
    buffer = min(ZERO_BUCKET, num_parameters(config))
    if zero == 2:
        # The buffer in the precision of the model, and its cast to fp32.
        wire = (item + (4 if item == 2 else 0)) * buffer
        return item * padded, 4 * padded // data, wire, optimizer
    live = item * min(padded, ZERO_LIVE)
    # The buffer is there in fp32 for good, and gradients are collected in the model's precision.
    wire = (4 + item) * buffer
    return item * padded // data + live, 4 * padded // data, wire, optimizer


@dataclass(frozen=True)
class Kept:
    """Hold the bytes that a step needs beside the state, at one moment."""

    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.activations + self.logits + self.buffers


def peak(config: RunConfig, layout: Layout, stage: int, is_modern: bool) -> Kept:
    """Return what a rank holds when a step holds most.

    Args:
        config: The run.
        layout: Its layout.
        stage: The pipeline stage, from 0.
        is_modern: As in `Activations`.
    """
    return max(_moments(config, layout, stage, is_modern), key=lambda moment: moment.total)


def most_kept(config: RunConfig, layout: Layout, stage: int, is_modern: bool) -> int:
    """Return the most that waits for a backward pass when one begins; arguments as for `peak`."""
    moments = _moments(config, layout, stage, is_modern)
    return max(moment.total for moment in moments if not moment.buffers)


def _moments(config: RunConfig, layout: Layout, stage: int, is_modern: bool) -> list[Kept]:
    """Return what a rank holds at the beginning of each backward pass and within it."""
    a = Activations(config, is_modern)
    chunks = chunk_layers(config, stage)
    last = len(config.layers_per_chunk) - 1
    size = [
        layers * a.layer()
        + (a.embedding() if number == 0 else 0)
        + (a.loss() if number == last else 0)
        for number, layers in chunks
    ]
    is_tied_here = config.model.tie_word_embeddings and last == 0
    received = _exchanged(layout, stage) * a.stream
    # The loss has given back what it kept when the layers begin. Without a loss, the gradient of
    # the output is the one received.
    logits_size, of_loss, of_layers = a.logits(), a.loss(), a.layer_buffers()
    in_loss = a.loss_buffers(is_tied_here)
    in_embedding = a.embedding() + a.embedding_weight() + a.whole
    found: set[tuple[int, int, int]] = set()
    for waiting, chunk in states(layout, stage):
        number, _ = chunks[chunk]
        has_loss = number == last
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
    return [Kept(*moment) for moment in found]


def _exchanged(layout: Layout, stage: int) -> int:
    """Return how many tensors from and for other stages are there when a backward pass begins.

    Args:
        layout: The layout.
        stage: The pipeline stage.
    """
    if layout.virtual > 1:
        # The interleaved schedule receives early, activations too.
        return 3
    # The gradient of its output, and of its input what the last backward pass has sent: Megatron's
    # schedule keeps it until the next one.
    return (stage < layout.pipeline - 1) + (stage > 0 and layout.num_microbatches > 1)

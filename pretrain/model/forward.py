"""Run batches through this rank's model chunks under Megatron's pipeline schedule.

Training runs forward and backward, evaluation runs forward only. Shapes: B micro batch size, S
tokens, V padded vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from pretrain import platform

LossFunction = Callable[[Tensor], tuple[Tensor, Any]]
"""A function of the loss of every token (fp32 [B, S], in nats).

It returns the tensor to differentiate and the result to keep.
"""


class MaskedBatch(NamedTuple):
    """A micro batch of a model that predicts masked tokens."""

    inputs: Tensor
    """Token ids with masks, int64 [B, S]."""
    labels: Tensor
    """Token ids without, int64 [B, S]."""
    chosen: Tensor
    """Which tokens are predicted, bool [B, S]."""


Batch = Tensor | MaskedBatch
"""Token ids of a micro batch, int64 [B, S + 1], each to be predicted from those before it; or a
masked one."""


def run_schedule(
    chunks: list[GPTModel],
    batches: Sequence[Batch],
    loss_function: LossFunction,
    *,
    forward_only: bool = False,
    schedule_module: nn.Module | None = None,
    scored: list[int] | None = None,
    eos_id: int | None = None,
) -> list[Any]:
    """Run every micro batch through the pipeline.

    Args:
        chunks: This rank's model chunks.
        batches: The micro batches, the same on all pipeline stages.
        loss_function: Called on the last pipeline stage with the losses of a micro batch; of a
            masked one with those of the chosen tokens alone, row by row in one dimension.
        forward_only: Skip the backward pass.
        schedule_module: Module to call in the chunk's place, where the optimizer needs that
            (`ZeroOptimizer.schedule_module`).
        scored: For each micro batch, the number n of tokens at its end whose losses are wanted;
            the loss function then gets [B, n]. None means all. Logits are the widest tensors of
            the model, and those of unscored tokens are not computed.
        eos_id: End-of-document token, if each document is to be computed as if it stood alone;
            see `document_starts`.

    Returns:
        What `loss_function` kept of each micro batch; [] except on the last pipeline stage.
    """

    def forward_step(
        batch_iterator: Iterator[tuple[Batch, int]], chunk: GPTModel
    ) -> tuple[Tensor, LossFunction]:
        batch, last = next(batch_iterator)
        model = schedule_module or chunk
        if isinstance(batch, MaskedBatch):
            batch = MaskedBatch(*map(platform.to_device, batch))
            return call_model(model, batch, length), _of_chosen(loss_function, batch.chosen)
        with _logits_of_last(chunk, last) if last < length else contextlib.nullcontext():
            tokens = platform.to_device(batch)
            return call_model(model, tokens, last, eos_id), loss_function

    is_masked = isinstance(batches[0], MaskedBatch)
    shape = batches[0].inputs.shape if isinstance(batches[0], MaskedBatch) else batches[0].shape
    micro_batch_size, length = shape[0], shape[1] - (0 if is_masked else 1)
    # Under sequence parallelism each tensor rank holds another part of the sequence, so the last
    # tokens are not the last rows of its hidden states. All tokens are scored there.
    if scored is None or chunks[0].config.sequence_parallel:
        scored = [length] * len(batches)
    iterators = [iter(zip(batches, scored)) for _ in chunks]
    # Megatron takes lists for the interleaved schedule and single objects for the others.
    kept: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=length,
        forward_only=forward_only,
    )
    return kept


def _of_chosen(loss_function: LossFunction, chosen: Tensor) -> LossFunction:
    """Return the function that applies another one to the losses of the chosen tokens."""
    return lambda losses: loss_function(losses[chosen])


def call_model(model: nn.Module, batch: Batch, last: int, eos_id: int | None = None) -> Tensor:
    """Run one chunk on a micro batch.

    Args:
        model: The chunk, or what is called in its place.
        batch: The micro batch, on the model's device.
        last: Number of tokens at the end whose losses are wanted.
        eos_id: As in `run_schedule`.

    Returns:
        On the last pipeline stage the losses [B, last] in nats, else the hidden states.
    """
    if isinstance(batch, MaskedBatch):
        inputs, labels = batch.inputs, batch.labels
    else:
        inputs, labels = batch[:, :-1].contiguous(), batch[:, -last:].contiguous()
    positions = _position_ids(inputs)
    starts = None
    if eos_id is not None:
        starts = document_starts(inputs, eos_id)
        positions = positions - starts
    # In the place of the attention mask, since core attention is causal by itself, or looks both
    # ways.
    out: Tensor = model(inputs, positions, starts, labels=labels)
    return out


def document_starts(inputs: Tensor, eos_id: int) -> Tensor:
    """Return the index of the first token of each token's document.

    A document ends with its end-of-document token, which therefore belongs to it; the next token
    begins another one. A document that began before the first token counts from there.

    Args:
        inputs: Token ids, int64 [B, S].
        eos_id: End-of-document token.

    Returns:
        int32 [B, S].
    """
    begins = F.pad(inputs[:, :-1] == eos_id, (1, 0))
    index = torch.arange(inputs.shape[1], dtype=torch.int32, device=inputs.device)
    return torch.where(begins, index, 0).cummax(dim=1).values


@contextlib.contextmanager
def _logits_of_last(chunk: GPTModel, last: int) -> Iterator[None]:
    """Give the output layer only the hidden states [last, B, hidden] of the last tokens.

    A hook, because GPTModel has no argument for it.
    """
    if not chunk.post_process:
        yield
        return
    hook = chunk.output_layer.register_forward_pre_hook(
        lambda _, arguments: (arguments[0][-last:], *arguments[1:])
    )
    try:
        yield
    finally:
        hook.remove()


def logits(chunk: GPTModel, inputs: Tensor) -> Tensor:
    """Return the logits of an unsharded model, without gradient.

    Args:
        chunk: The whole model, on one rank.
        inputs: Token ids, int64 [B, S].

    Returns:
        fp32 [B, S, V].
    """
    with torch.no_grad():
        out: Tensor = chunk(inputs, _position_ids(inputs), None).float()
        return out


def _position_ids(inputs: Tensor) -> Tensor:
    """Return the positions 0 .. S - 1 of token ids [B, S], in the same shape."""
    return torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)


def is_reporting_rank() -> bool:
    """Return True on one rank of each data-parallel replica: last stage, tensor rank 0.

    Losses exist on the last stage, once per tensor rank. A sum over the reporting ranks counts
    every sample once.
    """
    is_last: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return is_last and parallel_state.get_tensor_model_parallel_rank() == 0

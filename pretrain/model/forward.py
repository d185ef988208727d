"""Batches through this rank's chunks under Megatron's schedule: forward-backward in training, forward in evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from pretrain import platform

LossFunction = Callable[[Tensor], tuple[Tensor, Any]]


def run_schedule(
    chunks: list[GPTModel],
    batches: list[Tensor],
    loss_function: LossFunction,
    *,
    forward_only: bool = False,
    schedule_module: nn.Module | None = None,
    scored: list[int] | None = None,
) -> list[Any]:
    """Runs every micro batch [B, S + 1] of token ids; returns what `loss_function` kept of each.

    `loss_function` takes the loss of every token [B, S] (fp32, in nats) and returns (what is differentiated, what is
    kept); it runs on the last pipeline stage, and elsewhere the result is []. `schedule_module` is called
    in the chunk's place where the optimizer needs that (`ZeroOptimizer.schedule_module`). `scored` asks for the loss of the last tokens alone, [B, n], n a
    micro batch: logits are the widest tensors there are, and those of unscored tokens are not computed.
    """

    def forward_step(batch_iterator: Iterator[tuple[Tensor, int]], chunk: GPTModel):
        tokens, last = next(batch_iterator)
        with _logits_of_last(chunk, last) if last < length else contextlib.nullcontext():
            return call_model(
                schedule_module or chunk, tokens.to(platform.device(), non_blocking=True), last
            ), loss_function

    micro_batch, length = batches[0].shape[0], batches[0].shape[1] - 1
    if (
        scored is None or chunks[0].config.sequence_parallel
    ):  # there each rank holds other tokens than the last ones
        scored = [length] * len(batches)
    iterators = [iter(zip(batches, scored)) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=micro_batch,
        decoder_seq_length=length,
        forward_only=forward_only,
    )


def call_model(model: nn.Module, tokens: Tensor, last: int) -> Tensor:
    """Token ids [B, S + 1] through one chunk -> loss of the `last` tokens [B, last] on the last stage, else hidden states."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, -last:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    return model(inputs, positions, None, labels=labels)


@contextlib.contextmanager
def _logits_of_last(chunk: GPTModel, last: int) -> Iterator[None]:
    """The output layer sees the hidden states [S, B, hidden] of the last tokens alone."""
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
    """Token ids [B, S] -> logits [B, S, padded vocabulary] in fp32, without gradient. The whole model on one rank."""
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    with torch.no_grad():
        return chunk(inputs, positions, None).float()


def is_reporting_rank() -> bool:
    """True on one rank of each data-parallel replica: last stage, tensor rank 0. Sums over these count nothing twice."""
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return is_last and parallel_state.get_tensor_model_parallel_rank() == 0

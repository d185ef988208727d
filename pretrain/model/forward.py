"""Run batches through this rank's model chunks under Megatron's pipeline schedule.

Training runs forward and backward, evaluation runs forward only. Shapes: B micro batch size, S
tokens, V padded vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from pretrain import platform
from pretrain.config import ConfigError, RunConfig
from pretrain.config.run import PIECE
from pretrain.model.attention import CoreAttention
from pretrain.model.cache import Kept, KeyCache
from pretrain.model.reach import certificates
from pretrain.topology import context_group, own_part

LossFunction = Callable[[Tensor], tuple[Tensor, Any]]
"""Maps the loss of every token (fp32 [B, S], in nats) to the tensor to differentiate, and the
result to keep."""


class MaskedBatch(NamedTuple):
    """A micro batch of a model that predicts masked tokens."""

    inputs: Tensor
    """Token ids with masks, int64 [B, S]."""
    labels: Tensor
    """Token ids without masks, int64 [B, S]."""
    chosen: Tensor
    """Which tokens are predicted, bool [B, S]."""


Batch = Tensor | MaskedBatch
"""A micro batch: token ids, int64 [B, S + 1], each to be predicted from those before it; or a
masked batch."""


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
        loss_function: Called on the last pipeline stage with the losses of a micro batch. A masked
            batch gives only the losses of the chosen tokens, in one dimension. A context rank
            gives the losses of its part of the sequence.
        forward_only: Skip the backward pass.
        schedule_module: Module to call in place of the chunk, if the optimizer needs one
            (`ZeroOptimizer.schedule_module`).
        scored: For each micro batch, the number n of tokens at its end whose losses are needed;
            the loss function then gets [B, n]. None means all. Logits are the widest tensors of
            the model, and those of unscored tokens are not computed.
        eos_id: End-of-document token, to compute each document separately (`document_starts`);
            None to treat each sequence as one text.

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
            return call_model(model, batch, length), lambda losses: own_loss(losses[batch.chosen])
        cuts = last < length and chunk.post_process
        with _logits_of_last(chunk, last) if cuts else contextlib.nullcontext():
            return call_model(model, platform.to_device(batch), last, eos_id), own_loss

    def own_loss(losses: Tensor) -> tuple[Tensor, Any]:
        # Undo a factor of Megatron's: it multiplies the loss by the number of context ranks, as if
        # it were a share of a common loss (megatron/core/pipeline_parallel/schedules.py,
        # `forward_step_calc_loss`). Ours is a mean over this rank's tokens, which the optimizer
        # averages over ranks.
        loss, kept = loss_function(losses)
        return loss / parts if has_stages and parts > 1 else loss, kept

    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    is_masked = isinstance(batches[0], MaskedBatch)
    shape = batches[0].inputs.shape if isinstance(batches[0], MaskedBatch) else batches[0].shape
    micro_batch_size, length = shape[0], shape[1] - (0 if is_masked else 1)
    # If ranks split the sequence, its last tokens are not the last rows of every rank's hidden
    # states, so all tokens are scored.
    parts = context_group().size()
    is_split = chunks[0].config.sequence_parallel or parts > 1
    if scored is None or is_split:
        scored = [length] * len(batches)
    if not has_stages:
        step = functools.partial(forward_step, iter(zip(batches, scored)), chunks[0])
        return [_run_alone(step, chunks[0], forward_only, len(batches)) for _ in batches]
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


def _run_alone(
    step: Callable[[], tuple[Tensor, LossFunction]], chunk: GPTModel, forward_only: bool, count: int
) -> Any:
    """Run one of `count` micro batches like Megatron's schedule, with fewer calls on the host."""
    out, loss_function = step()
    loss, kept = loss_function(out)
    if not forward_only:
        loss, scaled = loss / count, chunk.config.grad_scale_func
        torch.autograd.backward(loss if scaled is None else scaled(loss))
    return kept


def call_model(model: nn.Module, batch: Batch, last: int, eos_id: int | None = None) -> Tensor:
    """Run one chunk on a micro batch.

    Args:
        model: The chunk, or the module that is called in its place.
        batch: The micro batch, on the model's device.
        last: Number of tokens at the end whose losses are needed.
        eos_id: As in `run_schedule`.

    Returns:
        On the last pipeline stage the losses [B, last] in nats, on others the hidden states; under
        context parallelism, of this rank's part of the sequence.
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
    if context_group().size() > 1:
        # Slice last: a part of the sequence does not show where its first document begins.
        own = own_part(inputs.shape[1])
        inputs, labels, positions = (x[:, own].contiguous() for x in (inputs, labels, positions))
        starts = None if starts is None else starts[:, own].contiguous()
    # Document starts take the place of the attention mask, which core attention does not need.
    out: Tensor = model(inputs, positions, starts, labels=labels)
    return out


def document_starts(inputs: Tensor, eos_id: int) -> Tensor:
    """Return the index of the first token of each token's document.

    The end-of-document token is the last token of its document. The first token of the inputs
    counts as the start of its document.

    Args:
        inputs: Token ids, int64 [B, S].
        eos_id: End-of-document token.

    Returns:
        int32 [B, S].
    """
    begins = F.pad(inputs[:, :-1] == eos_id, (1, 0))
    index = torch.arange(inputs.shape[1], dtype=torch.int32, device=inputs.device)
    return torch.where(begins, index, 0).cummax(dim=1).values


def _logits_of_last(chunk: GPTModel, last: int) -> Any:
    """Give the output layer only the hidden states [last, B, hidden] of the last tokens.

    A hook, because GPTModel has no argument for it. The result is a context manager that removes
    the hook.
    """
    return chunk.output_layer.register_forward_pre_hook(
        lambda _, arguments: (arguments[0][-last:], *arguments[1:])
    )


def logits(chunk: GPTModel, inputs: Tensor) -> Tensor:
    """Return the logits of an unsharded model, without building a graph.

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
    """Return True on tensor rank 0 of the last pipeline stage.

    Losses exist on the last stage, the same on every tensor rank, and each context rank has those
    of its part of the sequence. A sum over the reporting ranks counts every token once.
    """
    is_last: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return is_last and parallel_state.get_tensor_model_parallel_rank() == 0


# ---- Score a text in pieces, each token once (`pretrain evaluate --stream`) ----
# Each layer's core attention has a cache (`pretrain.model.cache`) that gives it the keys before a
# piece. Positions need no offset, because slopes depend only on distances.


def check_stream(config: RunConfig, world_size: int) -> None:
    """Check that `world_size` processes can read a text in one pass.

    Raises:
        ConfigError: The method has no limited reach, the model is a masked one, or the layout does
            not allow it.
    """
    if config.is_masked:
        raise ConfigError(
            '--stream: with train.objective = "masked" the model attends in both directions and '
            "predicts no next token. Evaluate windows instead, with --lengths"
        )
    p = config.parallel
    if p.ranks_per_copy > p.tensor_model_parallel_size or p.sequence_parallel:
        raise ConfigError(
            "parallel.pipeline_model_parallel_size, parallel.context_parallel_size, "
            "parallel.sequence_parallel: a text that is read in pieces can be split neither over "
            "pipeline stages nor along the sequence. Set 1, 1 and false for --stream, and split "
            "the model by parallel.tensor_model_parallel_size"
        )
    if config.position.bias != "slopes":
        raise ConfigError(
            f"--stream: with position.method = {config.position.method} every token may need all "
            "tokens before it. ALiBi's slopes, in all layers, limit how far a head sees. Evaluate "
            "windows instead, with --lengths"
        )
    if config.layout(world_size).data > 1:
        raise ConfigError(
            f"--stream on {world_size} processes: the text is read from its beginning to its end "
            "by one copy of the model. Start one process, or split the model over all of them by "
            f"--set parallel.tensor_model_parallel_size={world_size}"
        )


class Decoder:
    """Passes texts through a model whose position method has slopes, each token once.

    Args:
        config: The run.
        chunk: The whole model, or a tensor-parallel rank's part of all layers. Switched to
            evaluation mode.
        length: Length of the texts in tokens.
    """

    def __init__(self, config: RunConfig, chunk: GPTModel, length: int) -> None:
        self.chunk, self.tokens = chunk.eval(), 0
        self.layers = [m for m in chunk.modules() if isinstance(m, CoreAttention)]
        self.groups = config.num_query_groups // config.parallel.tensor_model_parallel_size
        of_heads = certificates(config, chunk, length)
        reaches = of_heads.view(len(of_heads), self.groups, -1).amax(2).tolist()
        self.caches = [KeyCache(reaches_of_layer) for reaches_of_layer in reaches]

    @torch.no_grad()
    def losses(self, tokens: Tensor) -> Tensor:
        """Append all tokens but the last to the texts, and return the loss of each next token.

        All tensor-parallel ranks call this together, with the same tokens.

        Args:
            tokens: The next n tokens of the texts and one more as a label, int64 [B, n + 1].

        Returns:
            Losses in nats, fp32 [B, n].
        """
        inputs, labels = (torch.split(x, PIECE, dim=1) for x in (tokens[:, :-1], tokens[:, 1:]))
        return torch.cat([self._pass(*piece).float() for piece in zip(inputs, labels)], dim=1)

    def _pass(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [B, n] of a piece."""
        end = self.tokens + tokens.shape[1]
        positions = torch.arange(self.tokens, end, device=tokens.device).expand_as(tokens)
        for layer, cache in zip(self.layers, self.caches):
            layer.cache = cache
        try:
            out: Tensor = self.chunk(tokens, positions, None, labels=labels)
        finally:
            for layer in self.layers:
                layer.cache = None
        self.tokens = end
        return out

    def kept(self) -> Kept:
        """Return what the caches of all layers hold now, in total."""
        return Kept(*map(sum, zip(*(cache.kept() for cache in self.caches))))

    def full_bytes(self) -> int:
        """Return the bytes that the keys and values of all tokens so far would take."""
        numbers = 2 * len(self.layers) * self.groups * self.layers[0].config.kv_channels
        each: int = numbers * next(self.chunk.parameters()).element_size()
        return each * self.tokens

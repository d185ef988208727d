"""Score a token stream with a model: mean loss by window length, protocol and position.

Evaluation runs on any parallel layout. Batches of windows are dealt round-robin to the
data-parallel ranks and go through the pipeline forward only. A batch holds the same number of
tokens whatever the window length, so memory does not grow with the length under evaluation.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from pretrain import platform
from pretrain.config import ConfigError, Layout, RunConfig, in_bytes
from pretrain.config.run import STREAM
from pretrain.config.tensors import widths
from pretrain.data.order import mask_text
from pretrain.evaluation.records import (
    DEVICE_SECONDS,
    LONGPPL_FIELDS,
    PROCESSOR_SECONDS,
    Losses,
    bounded_exp,
    confidence_interval,
)
from pretrain.evaluation.windows import SLIDING, Protocol, ScoredText, Window
from pretrain.model.forward import Batch, Decoder, MaskedBatch, is_reporting_rank, run_schedule
from pretrain.model.gpt import transformer_config
from pretrain.topology import Topology, gather, own_part, ranks_here

# ---- Estimate the memory of an evaluation's forward pass, and refuse lengths that do not fit ----
# Without this check, the kernel's OOM killer would end the process without a message, or another
# process on the node.


MARGIN = 1.2
"""Bytes that the allocator takes per byte of a tensor, because it does not reuse all memory."""
LOSS_PIECE_BYTES = 4 * 2**24
"""fp32 logits that the loss converts at a time, besides the logits (`pretrain.model.loss`)."""


def check_memory(config: RunConfig, topology: Topology, protocols: Iterable[Protocol]) -> None:
    """Check that one forward pass at each length fits into the memory that is free now.

    This is a collective operation: all ranks call it together, and it raises on all of them.

    Args:
        config: The run's config.
        topology: This process's ranks in the parallel layout.
        protocols: The protocols to measure.

    Raises:
        ConfigError: A length does not fit.
    """
    free = free_memory()
    for length in sorted({protocol.pass_length for protocol in protocols}):
        needed = forward_bytes(config, topology.layout, length)
        if needed > free:
            raise ConfigError(
                f"length {length}: a forward pass takes about {in_bytes(needed)} of memory on each "
                f"process, and {in_bytes(free)} are free. Choose a shorter length, lower "
                "evaluation.tokens_per_batch to the length, or split the model over more processes "
                "(parallel.tensor_model_parallel_size)"
            )


def free_memory() -> int:
    """Return the bytes that are free for each process, the same on all of them. Collective."""
    free = platform.free_memory()
    if not platform.has_cuda():
        free //= ranks_here()
    return min(gather(free, int))


def forward_bytes(config: RunConfig, layout: Layout, length: int) -> int:
    """Return the bytes of a forward pass without gradients, not counting the weights.

    This is the largest of three sums: the tensors that are alive at the same time in attention, in
    the MLP and in the loss. It assumes a kernel that stores no scores. `docs/decisions.md` compares
    the estimate with measurements.

    Args:
        config: The run's config.
        layout: How the processes share the model.
        length: Tokens in a window.
    """
    m = config.model
    item = platform.DTYPES[config.train.precision].itemsize
    rows = max(1, config.evaluation.tokens_per_batch // length)
    tokens = rows * length // layout.context
    hidden, width = m.hidden_size, widths(config)
    # The residual, the output of its norm, and the input that is kept for the next sum.
    stream = 3 * hidden * item
    # Queries, keys and values, joined and separate; the output in pieces, joined and in order.
    attention = (2 * (width.query + 2 * width.key) + 3 * width.query) * item
    # Keys and values of all context ranks, as received and joined.
    attention += 2 * 2 * width.key * item * layout.context * (layout.context > 1)
    # The output of the first product and of the activation, and with a gate their product.
    read = width.ffn * (1 + config.model.gated_linear_unit)
    mlp = (width.projected + read + hidden) * item
    logits = _logit_bytes(config, item)
    # Token ids, positions, labels and the losses by position, of every micro batch of a pass.
    ids = (4 * 8 + 4 * 8) * micro_batches(layout) * layout.context
    of_token = stream + max(attention, mlp, logits) + ids
    return int(MARGIN * tokens * of_token) + LOSS_PIECE_BYTES


def _logit_bytes(config: RunConfig, item: int) -> int:
    """Return the bytes of a token's logits on a rank; `item`: bytes of a number of the model."""
    clusters = config.adaptive_clusters
    if not clusters:
        return widths(config).vocabulary * item
    if config.train.fusion == "off":
        # log p of all words in fp32, in parts and joined.
        return 2 * config.padded_vocab_size * 4
    # Not the tails' logits, which are computed after the head's, and for few tokens.
    return (clusters[0].size + len(clusters) - 1) * item


@dataclass(frozen=True)
class Evaluation:
    """The result of scoring a text under one protocol."""

    protocol: Protocol
    loss_nats: float
    """Mean loss over all tokens, in nats per token."""
    tokens: int
    """Number of tokens scored."""
    bytes: int
    """Bytes of these tokens' text in UTF-8; 0 if not known, and for masked tokens, which do not
    form a text."""
    by_position: Losses
    """Mean loss and number of tokens at each position of the window. Sliding windows score no
    tokens at their first positions."""
    by_block: Losses
    """Summed loss and tokens of each block of the text (`pretrain.evaluation.records`)."""
    by_token: NDArray[np.float32] | None = None
    """[tokens] loss of each token of the text, if these were kept."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """One of `records.COSTS` -> cost of the scoring; empty if it was not measured."""

    def record(self) -> dict[str, Any]:
        """Return the measured values, under the keys of records.FIELDS."""
        name, stride, length = self.protocol.key
        low, high = confidence_interval(self.by_block.losses, self.by_block.counts)
        bits = self.loss_nats * self.tokens / math.log(2)
        return {
            "protocol": name,
            "stride": stride,
            "length": length,
            "perplexity": bounded_exp(self.loss_nats),
            "loss_nats": self.loss_nats,
            "loss_low": low,
            "loss_high": high,
            "bits_per_byte": bits / self.bytes if self.bytes else None,
            "tokens": self.tokens,
            "bytes": self.bytes or None,
        }


# ---- LongPPL: the perplexity of the tokens that a long context makes much more probable ----
# Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?", 2024, arXiv
# 2410.23771; the numbers are those of longppl/longppl.py in github.com/PKU-ML/LongPPL at 1decd2a.


ALPHA, BETA = 2.0, -2.0
"""A key token's loss is more than ALPHA nats lower with the long context than with the short one,
and its log-probability with the long context is above BETA."""


def short_protocol(context: int) -> Protocol:
    """Return the windows of the short context: `context` tokens, and up to a quarter more.

    As in the reference, which scores 1,024 tokens after 4,096 tokens of context.
    """
    step = max(1, context // 4)
    return Protocol(SLIDING, context + step, step)


def find_keys(short: Evaluation, long: Evaluation, context: int) -> NDArray[np.bool_]:
    """Return which tokens of the text are key tokens, bool [tokens].

    Args:
        short: Losses by token with the short context.
        long: Losses by token with the long context.
        context: Fewest tokens of context that a key token has in both.
    """
    assert short.by_token is not None and long.by_token is not None
    tokens = len(long.by_token)
    before = np.arange(tokens)
    if long.protocol.name != STREAM:
        for window in long.protocol.windows(tokens):
            end = window.start + window.size
            before[end - window.scored : end] -= window.start
    gained = short.by_token - long.by_token > ALPHA
    keys: NDArray[np.bool_] = gained & (long.by_token < -BETA) & (before >= context)
    return keys


def longppl(result: Evaluation, keys: NDArray[np.bool_], ends: Any, context: int) -> dict[str, Any]:
    """Return the LONGPPL_FIELDS of a result; only the last two if there is no key token.

    Args:
        result: An evaluation with losses by token.
        keys: Which tokens are key tokens.
        ends: Where the blocks of the text end.
        context: Tokens of the short context.
    """
    assert result.by_token is not None
    count = int(keys.sum())
    if not count:
        return {"key_tokens": 0, "short_context": context}
    starts = [0, *ends[:-1]]
    sums = np.add.reduceat(np.where(keys, result.by_token, 0.0), starts)
    low, high = confidence_interval(sums, np.add.reduceat(keys.astype(np.float64), starts))
    values = *(bounded_exp(x) for x in (float(sums.sum() / count), low, high)), count, context
    return dict(zip(LONGPPL_FIELDS, values, strict=True))


def clock() -> tuple[str, float]:
    """Return the key in `records.COSTS` and a clock for it in seconds, from an arbitrary start.

    On a GPU it is wall time, because waiting costs as much as work. On a CPU it is processor time,
    which does not depend on other processes.
    """
    if platform.has_cuda():
        platform.synchronize()
        return DEVICE_SECONDS, time.perf_counter()
    return PROCESSOR_SECONDS, time.process_time()


T = TypeVar("T")


def micro_batches(layout: Layout) -> int:
    """Return how many micro batches of a rank fill the pipeline in one pass.

    Interleaved schedules need a multiple of the pipeline size.
    """
    return layout.pipeline * layout.virtual


def deal(items: Iterable[T], size: int, topology: Topology) -> Iterator[list[list[T]]]:
    """Yield this rank's micro batches of at most `size` items, pass by pass.

    Every rank gets the same number of passes and micro batches, as the pipeline's communication and
    ZeRO's collectives require; when the items run out, some micro batches are empty.
    """
    replicas = topology.layout.data
    count, left = micro_batches(topology.layout) * replicas, iter(items)
    while dealt := list(itertools.islice(left, size * count)):
        each = [dealt[i * size : (i + 1) * size] for i in range(count)]
        yield each[topology.data_rank :: replicas]


@dataclass(eq=False)
class Evaluator:
    """Scores one text with one model, under any number of protocols."""

    chunks: list[Any]
    """This rank's model chunks, one for each virtual pipeline stage."""
    topology: Topology
    """This process's ranks in the parallel layout."""
    text: ScoredText
    """The text to score."""
    _: KW_ONLY
    tokens_per_batch: int
    """Tokens in a micro batch, rounded down to whole windows (at least one)."""
    schedule_module: nn.Module | None = None
    """Module to call in place of a chunk, if the optimizer needs one
    (`ZeroOptimizer.schedule_module`)."""
    mask_id: int | None = None
    """Id of the mask, for a model that predicts masked tokens; all protocols must then be
    MASKED."""
    by_token: bool = False
    """Keep the loss of each token, 4 bytes per token."""
    decoder: Decoder | None = field(default=None, init=False)
    """The decoder that has read the text in one pass, with its cache at the end."""

    def evaluate(
        self,
        protocol: Protocol,
        progress: bool = False,
        before_pass: Callable[[], None] = lambda: None,
    ) -> Evaluation:
        """Score every token of the stream (or every masked token) exactly once under `protocol`.

        This is a collective operation: all ranks call it together.

        Args:
            protocol: Windows to cut the stream into.
            progress: Show a progress bar on rank 0 when stderr is a terminal.
            before_pass: Called on every rank before each pass through the pipeline. All ranks make
                the same number of passes, so it may communicate. If it raises, the evaluation ends,
                and the model returns to its previous mode.

        Returns:
            The result, the same on every rank.
        """
        _, begin = clock()
        # Over this rank's share of windows.
        ends = torch.from_numpy(self.text.block_ends)
        kept = self.text.tokens if self.by_token else 0
        totals = _Totals(protocol.pass_length, ends, kept)
        with torch.no_grad(), _eval_mode(self.chunks):
            show = progress and self.topology.is_main
            if protocol.name == STREAM:
                self._read(protocol, show, totals)
            else:
                for batches, windows in self._passes(protocol, show):
                    before_pass()
                    self._score(protocol.length, batches, windows, totals)
        (sums, counts), of_blocks = totals.over_all_ranks()
        by_token = totals.by_token.numpy() if self.by_token else None
        kind, end = clock()
        cost = {kind: sum(gather(end - begin, float))}
        tokens = int(counts.sum())
        size = self.text.bytes if self.mask_id is None else 0
        expected = self.text.tokens if self.mask_id is None else tokens
        assert tokens == of_blocks[1].sum() == expected, f"{tokens} tokens of {expected}"
        # A position without scored tokens gives 0 / 0 = NaN.
        with np.errstate(invalid="ignore"):
            by_position = Losses(sums / counts, counts.astype(np.int64))
        loss = float(sums.sum() / counts.sum())
        by_block = Losses(*of_blocks)
        return Evaluation(protocol, loss, tokens, size, by_position, by_block, by_token, cost)

    def _read(self, protocol: Protocol, progress: bool, totals: _Totals) -> None:
        """Read the text in one pass, and add its losses up."""
        (chunk,) = self.chunks
        self.decoder = Decoder(chunk.position.config, chunk, self.text.tokens)
        hidden = None if progress else True
        with tqdm(total=self.text.tokens, desc=STREAM, leave=False, disable=hidden) as bar:
            for window in protocol.windows(self.text.tokens):
                tokens = self.text.inputs(window.start, window.size).astype(np.int64)
                losses = self.decoder.losses(platform.to_device(torch.from_numpy(tokens)[None]))
                if is_reporting_rank():
                    totals.add(losses.double().cpu(), window.size, [window])
                bar.update(window.size)

    def _score(
        self,
        length: int,
        batches: Sequence[Batch],
        windows: list[list[Window]],
        totals: _Totals,
    ) -> None:
        """Run one pass and add up its losses.

        Args:
            length: Tokens in a window.
            batches: Micro batches.
            windows: The windows in the first rows of each micro batch.
            totals: The sums to add to.
        """
        # With a short stride most of a window is context. The output layer is then applied only to
        # the last positions, because logits are the widest tensors of the model. A batch without
        # windows only fills the pass, and its losses are dropped.
        scored = [length - min((w.size - w.scored for w in each), default=0) for each in windows]
        losses = run_schedule(
            self.chunks,
            batches,
            # The scalar that a schedule expects, and the losses in nats to keep.
            lambda losses: (losses.sum(), losses.float()),
            forward_only=True,
            schedule_module=self.schedule_module,
            scored=scored,
        )
        if is_reporting_rank():
            stop = own_part(length).stop
            for loss, batch, batch_windows in zip(losses, batches, windows):
                if isinstance(batch, MaskedBatch):
                    all_losses = torch.zeros(batch.chosen.shape, dtype=torch.float64)
                    all_losses[batch.chosen] = loss.double().cpu()
                    totals.add(all_losses, stop, batch_windows, batch.chosen)
                else:
                    totals.add(loss.double().cpu(), stop, batch_windows)

    def _passes(
        self, protocol: Protocol, progress: bool
    ) -> Iterator[tuple[list[Batch], list[list[Window]]]]:
        """Yield this rank's micro batches for each pass through the pipeline.

        Every rank gets the same number of passes and the same shapes, as the pipeline's
        communication and ZeRO's collectives require. When the windows run out, the remaining rows
        are filled with EOS and belong to no window.

        Args:
            protocol: Windows to cut the stream into.
            progress: Show a progress bar when stderr is a terminal.

        Yields:
            (micro batches, the windows in the first rows of each).
        """
        layout = self.topology.layout
        rows = max(1, self.tokens_per_batch // protocol.length)
        # Count first and iterate again, because with stride 1 a list would hold as many windows as
        # tokens.
        count = sum(1 for _ in protocol.windows(self.text.tokens))
        passes = -(-count // (rows * micro_batches(layout) * layout.data))  # rounded up
        dealt = deal(protocol.windows(self.text.tokens), rows, self.topology)
        label = f"{protocol.name} {protocol.length}"
        # disable=None: tqdm shows the bar on a terminal and nothing in a log file.
        hidden = None if progress else True
        for mine in tqdm(dealt, total=passes, desc=label, leave=False, disable=hidden):
            yield [self._batch(windows, rows, protocol.length) for windows in mine], mine

    def _batch(self, windows: list[Window], rows: int, length: int) -> Batch:
        """Return the token ids [rows, length + 1] of these windows: inputs and the last target.

        Shorter windows are padded on the right, where causal attention does not see the padding;
        dynamic and LongRoPE frequencies of a foreign model are those of the padded length.
        """
        if self.mask_id is not None:
            return self._masked_batch(windows, rows, length, self.mask_id)
        batch = np.full((rows, length + 1), self.text.inputs(0, 0), dtype=np.int64)
        for row, window in zip(batch, windows):
            row[: window.size + 1] = self.text.inputs(window.start, window.size)
        return torch.from_numpy(batch)

    def _masked_batch(
        self, windows: list[Window], rows: int, length: int, mask_id: int
    ) -> MaskedBatch:
        """Return the masked tokens of these windows; rows without a window have no chosen tokens.

        Args:
            windows: The windows of the first rows, each of `length` tokens.
            rows: Rows of the micro batch.
            length: Tokens in a window.
            mask_id: Id of the mask.
        """
        labels = np.full((rows, length), self.text.inputs(0, 0), dtype=np.int64)
        inputs, chosen = labels.copy(), np.zeros(labels.shape, dtype=bool)
        for row, window in enumerate(windows):
            # Skip the end-of-document token that precedes the text.
            labels[row] = self.text.inputs(window.start + 1, length - 1)
            inputs[row], chosen[row] = mask_text(labels[row], window.start, mask_id)
        return MaskedBatch(*map(torch.from_numpy, (inputs, labels, chosen)))


@contextlib.contextmanager
def _eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Switch dropout off, and restore the model's previous mode on exit."""
    training = modules[0].training
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module in modules:
            module.train(training)


class _Totals:
    """Sums and numbers of losses, by position in the window and by block of the text.

    Args:
        length: Tokens in a window.
        block_ends: Where the blocks of the text end, int64 [blocks].
        kept: Number of tokens of the text to keep the loss of each; 0 to keep none.
    """

    def __init__(self, length: int, block_ends: Tensor, kept: int) -> None:
        self.by_token = torch.zeros(kept)
        # Row 0: sums of losses; row 1: numbers of losses.
        self.by_position = torch.zeros(2, length, dtype=torch.float64)
        self.by_block = torch.zeros(2, len(block_ends), dtype=torch.float64)
        self.block_ends = block_ends

    def add(
        self, losses: Tensor, stop: int, windows: list[Window], chosen: Tensor | None = None
    ) -> None:
        """Add the losses of the scored tokens.

        Args:
            losses: [B, n] losses in nats at positions stop - n to stop - 1 of each row.
            stop: The position after the last loss.
            windows: The windows in the first rows; the other rows are padding.
            chosen: Which tokens count, bool [B, n], with losses of 0 elsewhere; None for all.
        """
        before = stop - losses.shape[1]
        counts = torch.ones_like(losses) if chosen is None else chosen.to(losses)
        for row, count, window in zip(losses, counts, windows):
            first, end = max(window.size - window.scored, before), min(window.size, stop)
            if first >= end:
                continue
            scored, counted = (x[first - before : end - before] for x in (row, count))
            self.by_position[0, first:end] += scored
            self.by_position[1, first:end] += counted
            tokens = torch.arange(window.start + first, window.start + end)
            blocks = torch.searchsorted(self.block_ends, tokens, right=True)
            self.by_block[0].index_add_(0, blocks, scored)
            self.by_block[1].index_add_(0, blocks, counted)
            if len(self.by_token):
                self.by_token[tokens] = scored.float()

    def over_all_ranks(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (sums and numbers by position, the same by block), each [2, n]. Collective."""
        both = torch.cat([self.by_position, self.by_block], dim=1)
        # On the device, because NCCL reduces only device tensors. Ranks that do not report losses
        # add zeros.
        both, by_token = (x.to(platform.device()) for x in (both, self.by_token))
        dist.all_reduce(both)
        if len(by_token):
            dist.all_reduce(by_token)
            self.by_token = by_token.cpu()
        length = self.by_position.shape[1]
        totals: NDArray[np.float64] = both.cpu().numpy()
        return totals[:, :length], totals[:, length:]


# ---- Score a text with a model that transformers computes ---------------------------------------
class StockChunk(nn.Module):
    """Wraps a transformers model that predicts next tokens as a chunk for `run_schedule`.

    It is then scored like our models: with the same windows, batches, ranks and sums.

    Args:
        model: Called as model(input_ids=[B, S]).logits, [B, S, vocabulary].
        config: A config for `run_schedule`, which does not describe the model.
    """

    post_process = True
    """`run_schedule` calls it without Megatron's schedule: it is whole on each process."""

    def __init__(self, model: Any, config: RunConfig) -> None:
        super().__init__()
        self.model, self.config = model, transformer_config(config)
        self.output_layer = _Logits()
        # Take over the model's mode, which the end of an evaluation restores.
        self.train(model.training)

    def forward(self, inputs: Tensor, _positions: Any, _starts: Any, labels: Tensor) -> Tensor:
        """Return the losses in nats of the labels [B, n] of the last n positions."""
        inputs = inputs.to(next(self.model.parameters()).device)
        # transformers keeps the frequencies of "dynamic" rotary positions from the longest pass so
        # far (modeling_rope_utils.py, `dynamic_rope_update`). Each pass has those of its length.
        for module in self.model.modules():
            for name in [key for key in vars(module) if key.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)
        logits = self.model(input_ids=inputs, use_cache=False).logits
        # A hook on the output layer keeps the logits of the last positions, [n, B, V].
        logits, _ = self.output_layer(logits.transpose(0, 1))
        labels = labels.to(logits.device)
        rows = max(1, LOSS_PIECE_BYTES // 4 // logits[0].numel())
        pieces = zip(torch.split(logits, rows), torch.split(labels.t(), rows))
        of_pieces = [
            functional.cross_entropy(x.float().flatten(0, 1), y.flatten(), reduction="none")
            for x, y in pieces
        ]
        return torch.cat(of_pieces).view(labels.t().shape).t()


class _Logits(nn.Module):
    """Takes the place of our model's output layer, to which hooks are attached."""

    def forward(self, logits: Tensor) -> tuple[Tensor, None]:
        return logits, None

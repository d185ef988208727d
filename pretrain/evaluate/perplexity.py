"""Score a token stream with a model: mean loss by window length, protocol and position.

Evaluation runs on any parallel layout. Batches of windows are dealt round-robin to the
data-parallel ranks and go through the pipeline forward only. A batch holds the same number of
tokens whatever the window length, so memory does not grow with the length under evaluation.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from pretrain import platform
from pretrain.evaluate.memory import explained_memory
from pretrain.evaluate.records import PositionLosses
from pretrain.evaluate.spread import confidence_interval
from pretrain.evaluate.text import ScoredText
from pretrain.evaluate.windows import Protocol, Window
from pretrain.model.forward import is_reporting_rank, run_schedule
from pretrain.topology import Topology


@dataclass(frozen=True)
class Evaluation:
    """The result of scoring a text under one protocol."""

    protocol: Protocol
    loss_nats: float
    """Mean loss over all tokens, in nats per token."""
    tokens: int
    """Number of tokens scored."""
    bytes: int
    """Bytes of the text of these tokens, in UTF-8; 0 where they are not known."""
    by_position: PositionLosses
    """Mean loss and number of tokens at each position of the window. At the first positions of
    sliding windows no token is scored."""
    block_losses: NDArray[np.float64]
    """[blocks] summed losses of each block of the text (`pretrain.evaluate.spread`)."""
    block_tokens: NDArray[np.float64]
    """[blocks] tokens of each block."""

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinity beyond 700 nats."""
        return bounded_exp(self.loss_nats)

    @property
    def bits_per_byte(self) -> float:
        """Return the bits that the model needs for a byte of the text; nan for no bytes."""
        bits = self.loss_nats * self.tokens / math.log(2)
        return bits / self.bytes if self.bytes else math.nan

    def record(self) -> dict[str, Any]:
        """Return what this evaluation has measured, under the keys of records.FIELDS."""
        name, stride, length = self.protocol.key
        low, high = confidence_interval(self.block_losses, self.block_tokens)
        return {
            "protocol": name,
            "stride": stride,
            "length": length,
            "perplexity": self.perplexity,
            "loss_nats": self.loss_nats,
            "loss_low": low,
            "loss_high": high,
            "bits_per_byte": self.bits_per_byte if self.bytes else None,
            "tokens": self.tokens,
            "bytes": self.bytes or None,
        }


def bounded_exp(value: float) -> float:
    """Return exp(value), or infinity where it would overflow a float64; nan stays nan."""
    return math.exp(value) if not value >= 700 else math.inf


class Evaluator:
    """Scores one text with one model, under any number of protocols.

    Args:
        chunks: This rank's model chunks, one for each virtual pipeline stage.
        topology: This process's ranks in the parallel layout.
        text: The text to score.
        tokens_per_batch: Tokens in a micro batch, rounded down to whole windows (at least one).
        schedule_module: Module to call in place of a chunk, where the optimizer needs that
            (`ZeroOptimizer.schedule_module`).
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        topology: Topology,
        text: ScoredText,
        *,
        tokens_per_batch: int,
        schedule_module: nn.Module | None = None,
    ) -> None:
        self.chunks, self.topology, self.text = chunks, topology, text
        self.schedule_module = schedule_module
        self.tokens_per_batch = tokens_per_batch

    def evaluate(
        self,
        protocol: Protocol,
        progress: bool = False,
        before_pass: Callable[[], None] = lambda: None,
    ) -> Evaluation:
        """Score every token of the stream exactly once under `protocol`.

        This is a collective operation: all ranks call it together.

        Args:
            protocol: Windows to cut the stream into.
            progress: Show a progress bar on rank 0 when stderr is a terminal.
            before_pass: Called on every rank before each pass through the pipeline. All ranks make
                the same number of passes, so it may communicate. An exception that it raises ends
                the evaluation and leaves the model in the mode in which it was.

        Returns:
            The result, the same on every rank.
        """
        # Over this rank's share of windows.
        totals = _Totals(protocol.length, torch.from_numpy(self.text.block_ends))
        with torch.no_grad(), self._eval_mode(), explained_memory(protocol.length):
            for batches, windows in self._passes(protocol, progress and self.topology.is_main):
                before_pass()
                self._score(protocol.length, batches, windows, totals)
        (sums, counts), (block_losses, block_tokens) = totals.over_all_ranks()
        tokens = self.text.tokens
        assert counts.sum() == block_tokens.sum() == tokens, f"{counts.sum()} tokens of {tokens}"
        # A position at which no token was scored is 0 / 0 = nan.
        with np.errstate(invalid="ignore"):
            by_position = PositionLosses(sums / counts, counts.astype(np.int64))
        loss = float(sums.sum() / counts.sum())
        return Evaluation(
            protocol, loss, tokens, self.text.bytes, by_position, block_losses, block_tokens
        )

    def _score(
        self, length: int, batches: list[Tensor], windows: list[list[Window]], totals: _Totals
    ) -> None:
        """Run one pass and add its losses up.

        Args:
            length: Tokens in a window.
            batches: Micro batches [B, length + 1].
            windows: The windows of the first rows of each.
            totals: What is added to.
        """
        # With a short stride most of a window is context. The output layer is then applied to the
        # last positions alone, since logits are the widest tensors of the model.
        scored = [length - _first_scored(batch_windows) for batch_windows in windows]
        losses = run_schedule(
            self.chunks,
            batches,
            _token_losses,
            forward_only=True,
            schedule_module=self.schedule_module,
            scored=scored,
        )
        if is_reporting_rank():
            for loss, batch_windows in zip(losses, windows):
                totals.add(loss.double().cpu(), batch_windows)

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Switch dropout off, and on exit restore the mode in which the model was."""
        training = self.chunks[0].training
        try:
            for chunk in self.chunks:
                chunk.eval()
            yield
        finally:
            for chunk in self.chunks:
                chunk.train(training)

    def _passes(
        self, protocol: Protocol, progress: bool
    ) -> Iterator[tuple[list[Tensor], list[list[Window]]]]:
        """Yield this rank's micro batches for each pass through the pipeline.

        Every rank gets the same number of passes and the same shapes, because the pipeline's
        communication and ZeRO's collectives require it. When the windows run out, the remaining
        rows are filled with EOS and belong to no window.

        Args:
            protocol: Windows to cut the stream into.
            progress: Show a progress bar when stderr is a terminal.

        Yields:
            (micro batches [B, length + 1], the windows of their first rows).
        """
        layout = self.topology.layout
        rows = max(1, self.tokens_per_batch // protocol.length)
        # Interleaved schedules need a multiple of the pipeline size; this also fills the pipeline.
        micro_batches = layout.pipeline * layout.virtual
        # Count first and iterate again: with stride 1 a list would hold a window for each token.
        count = sum(1 for _ in protocol.windows(self.text.tokens))
        windows_per_pass = rows * micro_batches * layout.data
        passes = -(-count // windows_per_pass)  # rounded up
        windows = protocol.windows(self.text.tokens)
        label = f"{protocol.name} {protocol.length}"
        # disable=None: tqdm shows the bar on a terminal and nothing in a log file.
        for _ in tqdm(range(passes), desc=label, leave=False, disable=None if progress else True):
            dealt = [
                list(itertools.islice(windows, rows)) for _ in range(micro_batches * layout.data)
            ]
            mine = dealt[self.topology.data_rank :: layout.data]
            yield [self._batch(w, rows, protocol.length) for w in mine], mine

    def _batch(self, windows: list[Window], rows: int, length: int) -> Tensor:
        """Return the token ids [rows, length + 1] of these windows: inputs and the last target.

        Shorter windows are padded on the right, which causal attention never looks at.
        """
        batch = np.full((rows, length + 1), self.text.inputs(0, 0), dtype=np.int64)
        for row, window in zip(batch, windows):
            row[: window.size + 1] = self.text.inputs(window.start, window.size)
        return torch.from_numpy(batch)


def _token_losses(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the scalar that a schedule expects, the losses [B, n] in nats that are kept)."""
    return losses.sum(), losses.float()


def _first_scored(windows: list[Window]) -> int:
    """Return the first position that any of the windows scores.

    A batch without windows only fills up the pass. Its losses are dropped, so any position will do.
    """
    return min((w.size - w.scored for w in windows), default=0)


class _Totals:
    """Sums and numbers of losses, by position in the window and by block of the text.

    Args:
        length: Tokens in a window.
        block_ends: Where the blocks of the text end, int64 [blocks].
    """

    def __init__(self, length: int, block_ends: Tensor) -> None:
        # Row 0: summed losses; row 1: their number.
        self.by_position = torch.zeros(2, length, dtype=torch.float64)
        self.by_block = torch.zeros(2, len(block_ends), dtype=torch.float64)
        self.block_ends = block_ends

    def add(self, losses: Tensor, windows: list[Window]) -> None:
        """Add the losses of the scored tokens.

        Args:
            losses: [B, n] losses at the last n positions of each row, in nats.
            windows: The windows of the first rows; the rows after them are padding.
        """
        before = self.by_position.shape[1] - losses.shape[1]
        for row, window in zip(losses, windows):
            first, end = window.size - window.scored, window.size
            scored = row[first - before : end - before]
            self.by_position[0, first:end] += scored
            self.by_position[1, first:end] += 1
            tokens = torch.arange(window.start + first, window.start + end)
            blocks = torch.searchsorted(self.block_ends, tokens, right=True)
            self.by_block[0].index_add_(0, blocks, scored)
            self.by_block[1].index_add_(0, blocks, torch.ones_like(scored))

    def over_all_ranks(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (sums and numbers by position, the same by block), each [2, n]. Collective."""
        both = torch.cat([self.by_position, self.by_block], dim=1)
        # NCCL reduces device tensors only. Ranks that do not report losses add zeros.
        both = both.to(platform.device())
        dist.all_reduce(both)
        length = self.by_position.shape[1]
        totals: NDArray[np.float64] = both.cpu().numpy()
        return totals[:, :length], totals[:, length:]

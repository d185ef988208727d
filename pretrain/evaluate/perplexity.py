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
from pretrain.data.stream import TokenStream
from pretrain.evaluate.windows import Window, nonoverlapping, sliding
from pretrain.model.forward import is_reporting_rank, run_schedule
from pretrain.topology import Topology


@dataclass(frozen=True)
class Protocol:
    """A rule that cuts a stream into windows and says which tokens each window scores.

    For 8 tokens and windows of length 4 ("#": scored, ".": read as context only):

        token             0 1 2 3 4 5 6 7
        nonoverlapping    # # # #              window 0
                                  # # # #      window 1
        sliding           # # # #              window 0
        with stride 2         . . # #          window 1
                                  . . # #      window 2

    `pretrain.evaluate.windows` defines both, also where the stream does not divide evenly.
    """

    name: str
    """Either "nonoverlapping" or "sliding"."""
    length: int
    """Tokens in a window."""
    stride: int
    """Tokens by which sliding windows advance. Nonoverlapping windows ignore it."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Return (name, stride, length) as in records, where nonoverlapping has stride = length."""
        return self.name, self.length if self.name == "nonoverlapping" else self.stride, self.length

    def windows(self, tokens: int) -> Iterator[Window]:
        """Yield the windows over a stream of `tokens` tokens."""
        if self.name == "nonoverlapping":
            return nonoverlapping(tokens, self.length)
        return sliding(tokens, self.length, self.stride)


@dataclass(frozen=True)
class Evaluation:
    """The result of scoring a stream under one protocol."""

    protocol: Protocol
    loss_nats: float
    """Mean loss over all tokens, in nats per token."""
    tokens: int
    """Number of tokens scored."""
    loss_by_position: NDArray[np.float64]
    """[length] mean loss in nats of the tokens scored at each position of the window.

    A position is nan where no window scored a token, as at the first positions of sliding windows.
    """

    @property
    def perplexity(self) -> float:
        """Return exp(loss), or infinity where it would overflow a float64 (beyond 709 nats)."""
        return math.exp(self.loss_nats) if self.loss_nats < 700 else math.inf

    def record(self) -> dict[str, Any]:
        """Return the fields that this evaluation has in metrics.jsonl and in curve.json."""
        name, stride, length = self.protocol.key
        return {
            "protocol": name,
            "stride": stride,
            "length": length,
            "perplexity": self.perplexity,
            "loss_nats": self.loss_nats,
            "tokens": self.tokens,
        }


class Evaluator:
    """Scores one token stream with one model, under any number of protocols.

    Args:
        chunks: This rank's model chunks, one for each virtual pipeline stage.
        topology: This process's ranks in the parallel layout.
        stream: Tokens to score.
        eos_id: End-of-document token, which serves as the context of the first token.
        tokens_per_batch: Tokens in a micro batch, rounded down to whole windows (at least one).
        max_tokens: Score at most the first `max_tokens` tokens; None scores the whole stream.
        schedule_module: Module to call in place of a chunk, where the optimizer needs that
            (`ZeroOptimizer.schedule_module`).
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        topology: Topology,
        stream: TokenStream,
        eos_id: int,
        *,
        tokens_per_batch: int,
        max_tokens: int | None = None,
        schedule_module: nn.Module | None = None,
    ) -> None:
        self.chunks, self.topology = chunks, topology
        self.schedule_module = schedule_module
        self.tokens_per_batch = tokens_per_batch
        self.tokens = min(len(stream), max_tokens or len(stream))
        # With the EOS in front, stream[t] is the input whose target is stream[t + 1].
        self.stream = np.concatenate([[eos_id], stream.read(0, self.tokens)])

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
        # Row 0: summed losses by position; row 1: their number. Over this rank's share of windows.
        total = torch.zeros(2, protocol.length, dtype=torch.float64)
        with torch.no_grad(), self._eval_mode():
            for batches, windows in self._passes(protocol, progress and self.topology.is_main):
                before_pass()
                self._score(batches, windows, total)
        # NCCL reduces device tensors only. Ranks that do not report losses add zeros.
        total = total.to(platform.device())
        dist.all_reduce(total)
        sums, counts = total.cpu().numpy()
        assert counts.sum() == self.tokens, f"{counts.sum()} tokens scored of {self.tokens}"
        # A position at which no token was scored is 0 / 0 = nan.
        with np.errstate(invalid="ignore"):
            loss_by_position = sums / counts
        return Evaluation(protocol, float(sums.sum() / counts.sum()), self.tokens, loss_by_position)

    def _score(self, batches: list[Tensor], windows: list[list[Window]], total: Tensor) -> None:
        """Run one pass and add its losses to `total` [2, length] (sums and counts by position)."""
        length = total.shape[1]
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
                _add_losses(total, loss.double().cpu(), batch_windows)

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
        count = sum(1 for _ in protocol.windows(self.tokens))
        windows_per_pass = rows * micro_batches * layout.data
        passes = -(-count // windows_per_pass)  # rounded up
        windows = protocol.windows(self.tokens)
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
        batch = np.full((rows, length + 1), self.stream[0], dtype=np.int64)
        for row, window in zip(batch, windows):
            row[: window.size + 1] = self.stream[window.start : window.start + window.size + 1]
        return torch.from_numpy(batch)


def _token_losses(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the scalar that a schedule expects, the losses [B, n] in nats that are kept)."""
    return losses.sum(), losses.float()


def _first_scored(windows: list[Window]) -> int:
    """Return the first position that any of the windows scores.

    A batch without windows only fills up the pass. Its losses are dropped, so any position will do.
    """
    return min((w.size - w.scored for w in windows), default=0)


def _add_losses(total: Tensor, losses: Tensor, windows: list[Window]) -> None:
    """Add the losses of the scored tokens to the sums and counts by position.

    Args:
        total: [2, length] sums of losses and numbers of tokens, updated in place.
        losses: [B, n] losses at the last n positions of each row, in nats.
        windows: The windows of the first rows; the rows after them are padding.
    """
    before = total.shape[1] - losses.shape[1]
    for row, window in zip(losses, windows):
        first, end = window.size - window.scored, window.size
        total[0, first:end] += row[first - before : end - before]
        total[1, first:end] += 1

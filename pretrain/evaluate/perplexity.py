"""Model and stream -> loss by length, protocol and position within the window.

Runs on any layout: batches of windows are dealt to the data-parallel ranks and pass the pipeline forward only. Tokens a
batch are constant, so memory is bounded however long the windows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from tqdm import tqdm

from pretrain import platform
from pretrain.data.stream import TokenStream
from pretrain.evaluate.windows import Window, nonoverlapping, sliding
from pretrain.model.forward import is_reporting_rank, run_schedule
from pretrain.topology import Topology


@dataclass(frozen=True)
class Protocol:
    """How a stream is cut into windows: name is "nonoverlapping" or "sliding"; length and stride in tokens."""

    name: str
    length: int
    stride: int

    @property
    def key(self) -> tuple[str, int, int]:
        """(name, stride, length), as its records tell them: a nonoverlapping window's stride is its length."""
        return self.name, self.length if self.name == "nonoverlapping" else self.stride, self.length

    def windows(self, tokens: int) -> Iterator[Window]:
        """The windows over a stream of `tokens` tokens."""
        if self.name == "nonoverlapping":
            return nonoverlapping(tokens, self.length)
        return sliding(tokens, self.length, self.stride)


@dataclass(frozen=True)
class Evaluation:
    """What one protocol gave."""

    protocol: Protocol
    loss_nats: float
    """Mean over all tokens."""
    tokens: int
    loss_by_position: np.ndarray
    """Mean loss in nats of the tokens scored at each position of the window [length]; nan where none was."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss_nats) if self.loss_nats < 700 else math.inf

    def record(self) -> dict:
        """As it stands in metrics.jsonl and curve.json."""
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
    """Scores a stream with a model; `schedule_module`: the optimizer's, where there is one."""

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
        self.stream = np.concatenate([[eos_id], stream.read(0, self.tokens)])

    def evaluate(
        self,
        protocol: Protocol,
        progress: bool = False,
        before_pass: Callable[[], None] = lambda: None,
    ) -> Evaluation:
        """Every token of the stream scored once under `protocol`; every rank gets the result.

        All ranks call `before_pass` before each of their passes, which are equally many; what it raises ends the
        evaluation and leaves the model as it was.
        """
        # [position] sums and counts, over this rank's share
        total = torch.zeros(2, protocol.length, dtype=torch.float64)
        with torch.no_grad(), self._evaluating():
            for batches, windows in self._passes(protocol, progress and self.topology.is_main):
                before_pass()
                scored = [protocol.length - _first_scored(w) for w in windows]
                losses = run_schedule(
                    self.chunks,
                    batches,
                    _keep,
                    forward_only=True,
                    schedule_module=self.schedule_module,
                    scored=scored,
                )
                if is_reporting_rank():
                    for loss, those in zip(losses, windows):
                        _add(total, loss.double().cpu(), those)
        total = total.to(platform.device())
        dist.all_reduce(total)
        sums, counts = total.cpu().numpy()
        assert counts.sum() == self.tokens, f"{counts.sum()} tokens scored of {self.tokens}"
        with np.errstate(invalid="ignore"):
            return Evaluation(
                protocol, float(sums.sum() / counts.sum()), self.tokens, sums / counts
            )

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model without dropout, and afterwards as it was."""
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
        """(micro batches [B, length + 1], the window in each row) for each pass through the pipeline.

        Every rank gets equally many passes of equal shape, as the pipeline and ZeRO's collectives need; rows that only
        fill up have no window.
        """
        layout = self.topology.layout
        rows = max(1, self.tokens_per_batch // protocol.length)
        micro_batches = layout.pipeline * layout.virtual
        count = sum(1 for _ in protocol.windows(self.tokens))
        passes = -(-count // (rows * micro_batches * layout.data))
        windows = protocol.windows(self.tokens)
        label = f"{protocol.name} {protocol.length}"
        for _ in tqdm(range(passes), desc=label, leave=False, disable=None if progress else True):
            dealt = [
                list(itertools.islice(windows, rows)) for _ in range(micro_batches * layout.data)
            ]
            mine = dealt[self.topology.data_rank :: layout.data]
            yield [self._batch(w, rows, protocol.length) for w in mine], mine

    def _batch(self, windows: list[Window], rows: int, length: int) -> Tensor:
        """Token ids [rows, length + 1]; a shorter window is padded on its right, which causal attention never sees."""
        batch = np.full((rows, length + 1), self.stream[0], dtype=np.int64)
        for row, window in zip(batch, windows):
            row[: window.size + 1] = self.stream[window.start : window.start + window.size + 1]
        return torch.from_numpy(batch)


def _keep(token_losses: Tensor) -> tuple[Tensor, Tensor]:
    return token_losses.sum(), token_losses.float()


def _first_scored(windows: list[Window]) -> int:
    """First position that any of the windows scores; a batch without windows scores its first too, and is not read."""
    return min((w.size - w.scored for w in windows), default=0)


def _add(total: Tensor, losses: Tensor, windows: list[Window]) -> None:
    """Adds the scored part of the last tokens' losses [B, n] to the sums and counts by position, total [2, length]."""
    before = total.shape[1] - losses.shape[1]
    for row, window in zip(losses, windows):
        first, end = window.size - window.scored, window.size
        total[0, first:end] += row[first - before : end - before]
        total[1, first:end] += 1

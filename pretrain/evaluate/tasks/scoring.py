"""Run the sequences of a task through the model: the loss of each, and how often it was right.

Works on any parallel layout, as evaluations do: batches of sequences are dealt to the data-parallel
ranks and go through the pipeline forward only.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from torch import Tensor

from pretrain import platform
from pretrain.evaluate.tasks.rows import Arm, Row
from pretrain.model.forward import is_reporting_rank, run_schedule
from pretrain.topology import Topology

Score = Callable[[Arm], NDArray[np.float64]]
"""A function of an arm that returns [rows, 2]: of each sequence the mean loss in nats, and the
share of its scored targets that the model holds for the most probable token."""


class Scorer:
    """Scores arms with one model; a `Score`."""

    def __init__(
        self, chunks: list[GPTModel], topology: Topology, eos_id: int, tokens_per_batch: int
    ) -> None:
        """Switch the model to evaluation, without dropout.

        Args:
            chunks: This rank's model chunks, built with train.fusion = "off": a fused loss has no
                logits to look at.
            topology: This process's ranks in the parallel layout.
            eos_id: A token to fill up batches with.
            tokens_per_batch: Tokens in a micro batch, rounded down to whole sequences (at least
                one).
        """
        self.chunks, self.topology, self.eos_id = chunks, topology, eos_id
        self.tokens_per_batch = tokens_per_batch
        for chunk in chunks:
            chunk.eval()

    def __call__(self, arm: Arm) -> NDArray[np.float64]:
        """Score an arm. All ranks together; the result is the same on every rank."""
        found = torch.zeros(len(arm.rows), 2, dtype=torch.float64)
        with torch.no_grad(), _predictions(self.chunks) as predicted:
            for passed in self._passes(arm):
                self._score(arm, passed, predicted, found)
        # NCCL reduces device tensors only. Ranks that do not report add zeros.
        found = found.to(platform.device())
        dist.all_reduce(found)
        return found.cpu().numpy()

    def _score(
        self,
        arm: Arm,
        passed: list[list[tuple[int, Row]]],
        predicted: list[Tensor],
        found: Tensor,
    ) -> None:
        """Run one pass through the pipeline, and put its results into `found` [rows, 2].

        Args:
            arm: What is scored.
            passed: The numbered sequences of each micro batch.
            predicted: Where the hook of `_predictions` puts the last micro batch's.
            found: Updated on one rank of each replica.
        """
        scored = arm.scored

        def keep(losses: Tensor) -> tuple[Tensor, Any]:
            # Under sequence parallelism the losses of all positions are here.
            last = losses[:, -scored:].double()
            return losses.sum(), (last, predicted.pop()[-scored:].t())

        batches = [self._batch(arm, rows) for rows in passed]
        kept = run_schedule(
            self.chunks, batches, keep, forward_only=True, scored=[scored] * len(batches)
        )
        if not is_reporting_rank():
            return
        for (losses, tokens), batch, rows in zip(kept, batches, passed):
            right = tokens.cpu() == batch[:, -scored:]
            results = torch.stack([losses.mean(1).cpu(), right.double().mean(1)], dim=1)
            for (number, _), result in zip(rows, results):
                found[number] = result

    def _passes(self, arm: Arm) -> Iterator[list[list[tuple[int, Row]]]]:
        """Yield the numbered sequences of this rank's micro batches, pass by pass.

        Every rank gets as many passes and micro batches, because the pipeline communicates.
        """
        layout = self.topology.layout
        size = max(1, self.tokens_per_batch // arm.length)
        # Interleaved schedules need a multiple of the pipeline size; this also fills the pipeline.
        batches = layout.pipeline * layout.virtual * layout.data
        numbered = iter(enumerate(arm.rows))
        while dealt := list(itertools.islice(numbered, size * batches)):
            each = [dealt[i * size : (i + 1) * size] for i in range(batches)]
            yield each[self.topology.data_rank :: layout.data]

    def _batch(self, arm: Arm, rows: list[tuple[int, Row]]) -> Tensor:
        """Return token ids [B, length + 1]; sequences that are missing are filled with EOS."""
        size = max(1, self.tokens_per_batch // arm.length)
        batch = np.full((size, arm.length + 1), self.eos_id, dtype=np.int64)
        for target, (_, row) in zip(batch, rows):
            target[:] = row.tokens()
        return torch.from_numpy(batch)


@contextlib.contextmanager
def _predictions(chunks: list[GPTModel]) -> Iterator[list[Tensor]]:
    """Collect the most probable token at every position whose logits are computed.

    Yields:
        A list to which each forward pass of the last stage adds its token ids [S, B].
    """
    found: list[Tensor] = []

    def look(_module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        found.append(_most_probable(output[0]))

    hooks = [
        chunk.output_layer.register_forward_hook(look) for chunk in chunks if chunk.post_process
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _most_probable(logits: Tensor) -> Tensor:
    """Return the token ids [S, B] of the largest logits, which tensor ranks hold parts of.

    Args:
        logits: [S, B, V], the vocabulary of this tensor rank.
    """
    largest, index = logits.float().max(dim=-1)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return index
    index = index + group.rank() * logits.shape[-1]
    best = largest.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
    # Of equal ones the first, as on one rank. A nan is the largest nowhere, and the token no id.
    index = torch.where(largest == best, index, torch.iinfo(index.dtype).max)
    dist.all_reduce(index, dist.ReduceOp.MIN, group=group)
    return index

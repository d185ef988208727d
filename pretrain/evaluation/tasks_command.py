"""Run `pretrain evaluate-tasks`: score checkpoints on the long-context tasks, and report.

The command runs on as many processes as it is started with, alone or under torchrun or srun, and on
any parallel layout: batches of sequences are dealt to the data-parallel ranks and go through the
pipeline forward only, as in an evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from torch import Tensor

from pretrain import platform
from pretrain.config import ConfigError
from pretrain.evaluation.command import Opened, is_main, measure_all, open_source, say
from pretrain.evaluation.perplexity import deal
from pretrain.evaluation.tasks import (
    FIELDS,
    Arm,
    Cell,
    Row,
    TasksRequest,
    Text,
    check_out,
    format_tables,
    long_documents,
    make_cell,
    measure,
    write_report,
)
from pretrain.evaluation.windows import NONOVERLAPPING, Protocol
from pretrain.model.forward import is_reporting_rank, run_schedule
from pretrain.topology import Topology

SEED = 1234
"""Seed of all that is drawn, so that every checkpoint is asked the same."""


@dataclass(frozen=True)
class Plan(Opened):
    """The measurements of one checkpoint."""

    cells: tuple[Cell, ...]
    left_out: tuple[str, ...]
    """Sentences about what is not measured."""


def evaluate_tasks(
    sources: list[Path], request: TasksRequest, overrides: list[str], out: Path | None
) -> list[dict[str, Any]]:
    """Measure runs or checkpoints, print tables of all, and write a report if asked to.

    Args:
        sources: Run directories (their newest checkpoint is measured) or checkpoint directories.
        request: Tasks, lengths and samples from the command line.
        overrides: `section.key=value` settings for every checkpoint.
        out: FILE.json of the report, whose other files are written beside it; None for no report.

    Returns:
        The records, with the keys of `results.FIELDS`.

    Raises:
        ConfigError: A source is not a run or checkpoint, a length cannot be measured, the data has
            another tokenizer, or the report cannot be written to `out`.
    """
    # All of it is checked before the process group starts, which takes seconds.
    plans = [_plan(source, request, overrides) for source in sources]
    if out is not None:
        check_out(out)
    left_out = list(dict.fromkeys(sentence for plan in plans for sentence in plan.left_out))
    for sentence in left_out:
        say(sentence)
    write = partial(write_report, left_out=left_out)
    return measure_all(plans, _measure, format_tables, write, out)


def _plan(source: Path, request: TasksRequest, overrides: list[str]) -> Plan:
    """Return what is measured of a source; nothing of the model is read yet.

    Raises:
        ConfigError: As `evaluate_tasks`.
    """
    # A fused loss has no logits, and accuracy needs them. Last, so that nothing overrides it.
    opened = open_source(source, request.evaluation(), [*overrides, "train.fusion=off"])
    config, stream = opened.config, opened.stream
    if config.is_masked:
        raise ConfigError(
            f"{opened.checkpoint.path}: was trained with train.objective = masked, and the tasks "
            "ask for the token that follows. `pretrain evaluate` scores its masked tokens"
        )
    trained = config.data.sequence_length
    documents: tuple[tuple[int, int], ...] = ()
    if "documents" in request.tasks:
        documents = long_documents(stream, 2 * trained)
    text = Text(stream, SEED, documents)
    cells: list[Cell] = []
    left_out = []
    for task in request.tasks:
        for length in config.evaluation_lengths:
            cell = make_cell(task, text, length, request.samples, trained)
            if isinstance(cell, Cell):
                cells.append(cell)
            elif request.lengths is not None and task != "documents":
                raise ConfigError(
                    f"--lengths {length}: the task {task} cannot be measured on "
                    f"{stream.directory}: {cell}. Choose other lengths, or --tasks"
                )
            else:
                left_out.append(f"{source}: {task} at {length} tokens is left out: {cell}")
    if not cells:
        reasons = "\n".join(left_out)
        raise ConfigError(
            f"{reasons}\n{source}: nothing is left to measure. Choose other --lengths or --tasks"
        )
    return Plan(**vars(opened), cells=tuple(cells), left_out=tuple(left_out))


def _measure(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the records of a checkpoint, and print each task and length when it is done."""
    lengths = dict.fromkeys(cell.length for cell in plan.cells)
    chunks, topology = plan.load([Protocol(NONOVERLAPPING, n, n) for n in lengths])
    tokens = plan.config.evaluation.tokens_per_batch
    scorer = Scorer(chunks, topology, plan.stream.eos_id, tokens)
    common = plan.common()
    if is_main():
        print(f"{plan.run}, step {common['step']} ({common['method']})", flush=True)
    for cell in plan.cells:
        found = list(measure(cell, scorer))
        if is_main():
            gains = [r["value"] for r in found if r["measure"] == "gain_nats"]
            spread = (
                f"{gains[0]:.3f}" if len(gains) == 1 else f"{min(gains):.3f} to {max(gains):.3f}"
            )
            print(f"{cell.task:<10} {cell.length:>7} tokens  gain {spread} nats", flush=True)
        for record in found:
            merged = {**common, **record}
            yield {field: merged[field] for field in FIELDS}


# ---- the model ----------------------------------------------------------------------------------
class Scorer:
    """Scores arms with one model; a `tasks.Score`."""

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
            for passed in deal(enumerate(arm.rows), self._size(arm), self.topology):
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

    def _size(self, arm: Arm) -> int:
        """Return the sequences of a micro batch."""
        return max(1, self.tokens_per_batch // arm.length)

    def _batch(self, arm: Arm, rows: list[tuple[int, Row]]) -> Tensor:
        """Return token ids [B, length + 1]; sequences that are missing are filled with EOS."""
        batch = np.full((self._size(arm), arm.length + 1), self.eos_id, dtype=np.int64)
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

"""Run `pretrain evaluate-tasks`: score checkpoints on the long-context tasks, and report.

The command runs on as many processes as it is started with, alone or under torchrun or srun.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pretrain.topology
from pretrain.checkpoint.load import load_weights
from pretrain.checkpoint.manifest import Checkpoint, open_checkpoint
from pretrain.config import ConfigError, RunConfig, writing
from pretrain.config.load import check_beside, check_unread
from pretrain.data.stream import TokenStream
from pretrain.evaluate.command import evaluation_config, open_validation
from pretrain.evaluate.perplexity import check_memory
from pretrain.evaluate.records import HASH_DIGITS
from pretrain.evaluate.tasks.report import FIELDS, check_out, format_tables, measure, write_report
from pretrain.evaluate.tasks.rows import Cell, TasksRequest, Text, long_documents, make_cell
from pretrain.evaluate.tasks.scoring import Scorer
from pretrain.evaluate.windows import Protocol
from pretrain.model.attention import check_positions
from pretrain.model.gpt import build_model
from pretrain.rundir.checkpoints import find_checkpoint
from pretrain.rundir.files import make_directory
from pretrain.rundir.lineage import hold

SEED = 1234
"""Seed of all that is drawn, so that every checkpoint is asked the same."""
UNREAD = {
    "train.fusion": "the tasks are scored without fusion, since a fused loss has no logits to tell "
    "the accuracy from. Leave it out",
    **dict.fromkeys(
        ("evaluation.max_tokens", "evaluation.protocols", "evaluation.stride"),
        "the tasks do not score the text in windows. Leave it out",
    ),
}
"""Keys that --set may not be about, because they would have no effect, and why."""


@dataclass(frozen=True)
class Plan:
    """The measurements of one checkpoint."""

    run: str
    """The run's directory as the user gave it, or the checkpoint's path if it stands alone."""
    checkpoint: Checkpoint
    config: RunConfig
    stream: TokenStream
    cells: tuple[Cell, ...]
    left_out: tuple[str, ...]
    """Sentences about what is not measured."""

    def common(self) -> dict[str, Any]:
        """Return what all records of the checkpoint say."""
        # What the checkpoint was trained with, whatever the command line has set.
        trained = self.checkpoint.config
        return {
            "run": self.run,
            "step": self.checkpoint.trainer_state.step,
            "method": trained.position.method,
            "seed": trained.run.seed,
            "train_length": trained.data.sequence_length,
            "tokenizer": self.stream.tokenizer_sha256[:HASH_DIGITS],
            "validation": self.stream.identity[:HASH_DIGITS],
            "precision": self.config.train.precision,
            "checkpoint": str(self.checkpoint.path),
        }


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
    lengths = ",".join(map(str, request.lengths)) if request.lengths else None
    check_beside(overrides, {"--lengths": (lengths, "evaluation.lengths")})
    check_unread(overrides, UNREAD)
    plans = [_plan(source, request, overrides) for source in sources]
    if out is not None:
        check_out(out)
        with writing(out):
            make_directory(out.parent)
    rank = pretrain.topology.Process.from_environment().rank
    left_out = list(dict.fromkeys(sentence for plan in plans for sentence in plan.left_out))
    if rank == 0:
        for sentence in left_out:
            print(sentence, file=sys.stderr, flush=True)
    with contextlib.ExitStack() as held:
        # All from now on: while one is measured, its run may go on and delete the next one.
        for plan in plans:
            held.enter_context(hold(plan.checkpoint.path))
        records = [record for plan in plans for record in _measure(plan, rank == 0)]
    if rank == 0:
        # The tables are printed first: their numbers are not lost if the report cannot be written.
        print("\n" + format_tables(records))
        if out is not None:
            with writing(out):
                names = write_report(out, records, left_out)
            print(f"\nReport written to {out.parent}/ ({', '.join(names)})")
    pretrain.topology.finish()
    return records


def _plan(source: Path, request: TasksRequest, overrides: list[str]) -> Plan:
    """Return what is measured of a source; nothing of the model is read yet.

    Raises:
        ConfigError: As `evaluate_tasks`.
    """
    checkpoint = open_checkpoint(find_checkpoint(source))
    if checkpoint.config.is_masked:
        raise ConfigError(
            f"{checkpoint.path}: was trained with train.objective = masked, and the tasks ask for "
            "the token that follows. `pretrain evaluate` scores its masked tokens"
        )
    # A fused loss has no logits, and accuracy needs them. Last, so that nothing overrides it.
    settings = [*overrides, "train.fusion=off"]
    config = evaluation_config(checkpoint, request.evaluation(), settings)
    stream = open_validation(checkpoint, config)
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
    return Plan(
        _run_of(source, checkpoint), checkpoint, config, stream, tuple(cells), tuple(left_out)
    )


def _run_of(source: Path, checkpoint: Checkpoint) -> str:
    """Return the run of a source: itself, or the directory that the checkpoint is in."""
    if source == checkpoint.path and source.parent.name == "checkpoints":
        return str(source.parent.parent)
    return str(source)


def _measure(plan: Plan, is_main: bool) -> Iterator[dict[str, Any]]:
    """Yield the records of a checkpoint, and print each task and length when it is done."""
    config, checkpoint = plan.config, plan.checkpoint
    topology = pretrain.topology.initialize(config)
    chunks = build_model(config)
    check_positions(config, chunks)
    load_weights(checkpoint, chunks)
    lengths = dict.fromkeys(cell.length for cell in plan.cells)
    check_memory(config, topology, [Protocol("nonoverlapping", n, n) for n in lengths])
    scorer = Scorer(chunks, topology, plan.stream.eos_id, config.evaluation.tokens_per_batch)
    common = plan.common()
    if is_main:
        print(f"{plan.run}, step {common['step']} ({common['method']})", flush=True)
    for cell in plan.cells:
        found = list(measure(cell, scorer))
        if is_main:
            gains = [r["value"] for r in found if r["measure"] == "gain_nats"]
            spread = (
                f"{gains[0]:.3f}" if len(gains) == 1 else f"{min(gains):.3f} to {max(gains):.3f}"
            )
            print(f"{cell.task:<10} {cell.length:>7} tokens  gain {spread} nats", flush=True)
        for record in found:
            merged = {**common, **record}
            yield {field: merged[field] for field in FIELDS}

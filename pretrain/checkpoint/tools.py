"""Implement `pretrain checkpoint`: list, show, verify, prune and upload."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.format import BlockReader, DamagedCheckpoint, FileRecord
from pretrain.checkpoint.manifest import MASTER, Checkpoint, open_checkpoint
from pretrain.checkpoint.store import Rounds, Store, split_checkpoint
from pretrain.config import ConfigError, RunFailed, load_config, writing
from pretrain.config.errors import columns, moment, printable, size
from pretrain.config.run import describe, is_url
from pretrain.config.schema import CheckpointSection
from pretrain.optim.optimizers import meaning
from pretrain.rundir.attempts import check_free
from pretrain.rundir.checkpoints import (
    MANIFEST,
    check_one_line,
    checkpoint_step,
    complete_checkpoints,
    find_checkpoint,
    hold,
    is_complete,
    named_by_step,
    read_abandoned,
    saved_checkpoints,
    unheld,
)
from pretrain.rundir.files import remove_directory
from pretrain.rundir.history import Policy, clear_removed, old_checkpoints
from pretrain.rundir.paths import RunPaths, check_version

# ---- list ----


@dataclass(frozen=True)
class Row:
    """A checkpoint in the list of `pretrain checkpoint list`."""

    path: str
    step: int
    """The step in its name."""
    id: str | None = None
    """The checkpoint's id. None, like all following fields, if it cannot be read."""
    parent: str | None = None
    branch: str | None = None
    """The id of its branch."""
    bytes: int | None = None
    saved_at: float | None = None
    """Unix seconds; None if it is damaged."""
    validation_loss_nats: float | None = None
    problem: str | None = None
    """Why it cannot be used, judged by its small files; the tensors are not read."""
    abandoned: str | None = None
    """Its folder in RUN/abandoned."""


def list_run(run: Path) -> list[Row]:
    """Return the checkpoints of a run, then its abandoned ones, both ordered by step.

    Raises:
        ConfigError: The directory is not that of a run with a checkpoint.
    """
    check_version(run)
    rows = [_row(path) for path in named_by_step(RunPaths(run).checkpoints)]
    for folder, why in read_abandoned(run):
        place = f"abandoned/{folder.name} ({printable(why.reason)})"
        rows += [dataclasses.replace(_row(p), abandoned=place) for p in named_by_step(folder)]
    if not rows:
        raise ConfigError(f"{run}: has no checkpoints. Give a run's directory")
    return rows


def format_rows(run: Path, rows: Sequence[Row]) -> str:
    """Return the list of a run as text."""
    blocks = [str(run)]
    for place in dict.fromkeys(row.abandoned for row in rows):
        there = [row for row in rows if row.abandoned == place]
        blocks.append(("" if place is None else f"{place}\n") + _table(there))
    return "\n\n".join(blocks)


def _row(path: Path) -> Row:
    row = Row(str(path), checkpoint_step(path.name) or 0)
    try:
        opened = open_checkpoint(path)
        assert opened.index
        saved_at = (path / MANIFEST).stat().st_mtime
    except (ConfigError, OSError) as error:
        return dataclasses.replace(row, problem=_problem(error, path))
    lineage = opened.lineage
    return dataclasses.replace(
        row,
        id=lineage.id,
        parent=lineage.parent,
        branch=lineage.branches[-1].id,
        bytes=sum(opened.files.values()),
        validation_loss_nats=opened.origin.validation_loss_nats,
        saved_at=saved_at,
    )


def _table(rows: Sequence[Row]) -> str:
    header = ("step", "id", "branch", "saved at", "size", "validation", "problem")
    lines = [
        (
            f"{row.step:,}",
            row.id or "-",
            row.branch or "-",
            moment(row.saved_at) if row.saved_at else "-",
            "-" if row.bytes is None else size(row.bytes),
            "-" if row.validation_loss_nats is None else f"{row.validation_loss_nats:.4f}",
            row.problem or "",
        )
        for row in rows
    ]
    return "\n".join(columns([header, *lines], right=(0, 4, 5)))


# ---- show ----


def show_source(source: Path) -> str:
    """Return a description of a checkpoint, or of a run's newest one.

    Raises:
        ConfigError: The source is neither, or the checkpoint is damaged.
    """
    path = find_checkpoint(source)
    with hold(path):
        checkpoint = open_checkpoint(path)
        shapes, saved_at = checkpoint.shapes, (path / MANIFEST).stat().st_mtime
    kinds = ", ".join(map(meaning, (MASTER, *checkpoint.config.moments)))
    elements = sum(math.prod(shape) for shape in shapes.values())
    parameters = [(name, " x ".join(map(str, shape)) or "scalar") for name, shape in shapes.items()]
    blocks = [
        str(path),
        *columns([*_facts(checkpoint, saved_at)], right=()),
        "",
        describe(checkpoint.config).replace("# ", ""),
        "",
        f"{len(shapes)} parameters with {elements:,} elements; of each {kinds}",
        *columns(parameters, right=()),
    ]
    return "\n".join(blocks)


def _facts(checkpoint: Checkpoint, saved_at: float) -> Iterator[tuple[str, str]]:
    """Yield the facts of a checkpoint: its identity, its history and the versions that wrote it."""
    lineage, origin, state = checkpoint.lineage, checkpoint.origin, checkpoint.trainer_state
    yield "id", lineage.id
    yield "parent", lineage.parent or "none: the first of its run"
    for branch in lineage.branches:
        yield "branch", f"{branch.id} from step {branch.since:,}"
    yield "saved at", moment(saved_at)
    yield "size", size(sum(checkpoint.files.values()))
    yield "step", f"{lineage.step:,} of {checkpoint.config.train.num_steps:,}"
    yield "samples", f"{state.consumed_samples:,}"
    yield "updates", f"{checkpoint.adam_steps:,} by {type(checkpoint.config.optimizer).__name__}"
    if (loss := origin.validation_loss_nats) is not None:
        yield "validation loss", f"{loss:.6f} nats"
    for each in origin.changes:
        yield "change", f"after step {each.step:,}: {each.key} = {each.before} -> {each.after}"
    for name, sha256 in origin.data.items():
        yield name, f"SHA-256 {sha256}"
    if (made := origin.provenance) is not None:
        command = {"command": shlex.join(made.command), "in": made.directory}
        for name, text in {"started at": moment(made.at), **command, **made.facts()}.items():
            yield name, printable(text)


# ---- verify ----


NUM_THREADS = 4
"""Number of files that are read at the same time. Hashing 10 GB/s takes about one core."""
INCOMPLETE = "DAMAGED: it is not complete, or its manifest is damaged"


def verify_sources(sources: Sequence[Path | str]) -> bool:
    """Verify checkpoints; print a line for each of them and for each damaged file.

    Args:
        sources: Checkpoints, runs (all of their checkpoints), or URLs of either.

    Returns:
        True if no checkpoint is damaged.

    Raises:
        ConfigError: A source is neither.
        StoreError: A store cannot be read.
    """
    is_good = True
    for source in sources:
        each = _verified_in_store(str(source)) if is_url(str(source)) else _verified(Path(source))
        for path, problems, count in each:
            for problem in problems:
                print(f"{path}: {problem}", flush=True)
            if not problems:
                print(f"{path}: every byte is as it was written ({size(count)})", flush=True)
            is_good = is_good and not problems
    return is_good


def verify_checkpoint(path: Path) -> tuple[list[str], int]:
    """Read every byte of a checkpoint once.

    Returns:
        A message for each damaged file, and the checkpoint's size in bytes.
    """
    if not is_complete(path):
        return [f"DAMAGED: {MANIFEST}: missing"], 0
    try:
        with hold(path):
            checkpoint = open_checkpoint(path)
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                found = list(pool.map(lambda f: _verify_file(path, f), checkpoint.index.files))
    except (ConfigError, OSError) as error:
        return [_problem(error, path)], 0
    return [problem for problem in found if problem], sum(checkpoint.files.values())


def _verify_file(directory: Path, record: FileRecord) -> str | None:
    try:
        with closing(BlockReader(directory, record)) as file:
            file.verify()
    except (DamagedCheckpoint, OSError) as error:
        return _problem(error, directory)
    return None


def _verified(source: Path) -> Iterator[tuple[object, list[str], int]]:
    """Yield each checkpoint on the disk, its problems, and its size in bytes."""
    named = named_by_step(RunPaths(source).checkpoints)
    for path in named or [find_checkpoint(source)]:
        result = verify_checkpoint(path)
        # Retention may have deleted it in the meantime.
        if path.exists():
            yield path, *result


def _verified_in_store(url: str) -> Iterator[tuple[object, list[str], int]]:
    base, name = split_checkpoint(url)
    store = Store(base)
    for each in [name] if name else _stored_names(store):
        stored = store.stored(each)
        problems = [f"DAMAGED: {p}" for p in store.verify(stored)] if stored else [INCOMPLETE]
        yield f"{store.url}/{each}", problems, stored.bytes if stored else 0


def _stored_names(store: Store) -> list[str]:
    if names := store.names():
        return names
    raise ConfigError(f"{store.url}: holds no checkpoints. Give a run's checkpoint.upload_to")


def _problem(error: Exception, path: Path) -> str:
    """Return a checkpoint's problem, without its path and the remedy."""
    text = str(error).replace(f"{path}/", "").partition(". ")[0]
    # A checkpoint of another version is not damaged.
    is_damage = isinstance(error, DamagedCheckpoint | OSError)
    return f"{'DAMAGED' if is_damage else 'cannot be read'}: {text}"


# ---- prune ----


def policy_of(run: Path, keep: int | None, keep_every: int | None, keep_best: int | None) -> Policy:
    """Return which checkpoints to keep: each rule as its option says, or else as the config says.

    Raises:
        ConfigError: Neither says how many of the newest to keep.
    """
    options = {"keep": keep, "keep_every": keep_every, "keep_best": keep_best}
    given = {key: value for key, value in options.items() if value is not None}
    path = RunPaths(run).newest_config() if given.keys() < options.keys() else None
    section = load_config(path).checkpoint if path else CheckpointSection()
    rules = section.model_dump(include=set(options)) | given
    if rules["keep"] is None:
        raise ConfigError(f"{run}: its config has no checkpoint.keep. Give --keep N")
    return Policy(**rules | {"keep_every": rules["keep_every"] or None})


def prunable(run: Path, policy: Policy) -> tuple[Path, list[Path]]:
    """Return the newest checkpoint, and those that retention would delete, oldest first.

    Raises:
        ConfigError: The run has no checkpoint, or two branches of them.
    """
    check_version(run)
    found = saved_checkpoints(run)
    check_one_line(found)
    sound = [saved.path for saved in found if saved.is_sound]
    if not sound:
        raise ConfigError(f"{run}: has no complete checkpoint. Give a run's directory")
    return sound[-1], old_checkpoints(run, sound[-1], policy)


def prune(run: Path, policy: Policy) -> list[Path]:
    """Delete what the policy does not keep, after verifying the newest checkpoint completely.

    Returns:
        The deleted checkpoints. Checkpoints that a reader holds are not deleted.

    Raises:
        ConfigError: An attempt holds the run (RunBusy), or as `prunable`.
        RunFailed: The newest checkpoint is damaged, or the disk refused the deletion.
    """
    check_free(run)
    clear_removed(run)
    newest, old = prunable(run, policy)
    problems, _ = verify_checkpoint(newest) if old else ([], 0)
    if problems:
        raise RunFailed(
            f"{newest}: {problems[0]}, so nothing was deleted. Prune when the newest is good"
        )
    # An attempt may have begun, and left that checkpoint or made others, while it was verified.
    check_free(run)
    old = [path for path in prunable(run, policy)[1] if path in old]
    deleted = []
    for path in old:
        with writing(path), unheld(path) as is_unheld:
            if is_unheld:
                remove_directory(path)
                deleted.append(path)
    return deleted


# ---- upload ----


def upload_run(run: Path, url: str | None) -> list[str]:
    """Upload the checkpoints of a run that a store does not have yet.

    Args:
        run: The run's directory.
        url: The store; None for checkpoint.upload_to of the run's config.

    Returns:
        A line for each checkpoint that is still missing in the store.

    Raises:
        ConfigError: The run has no checkpoint, or no URL is known.
    """
    if not complete_checkpoints(run):
        raise ConfigError(f"{run}: has no complete checkpoint. Give a run's directory")
    path = RunPaths(run).newest_config()
    if url is None and path is not None:
        url = load_config(path).checkpoint.upload_to
    if url is None or not is_url(url):
        raise ConfigError(f"{run}: no URL of a store. Give one with --to, like file:///directory")
    return Rounds(run, Store(url), may_go_back=False).upload()

"""`pretrain checkpoint list`: the checkpoints of a run and what is known about each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.blocks import BlockReader, DamagedCheckpoint, FileRecord
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.store import Rounds, Store, split_checkpoint
from pretrain.config import ConfigError, RunFailed, load_config, writing
from pretrain.config.errors import columns, moment, size
from pretrain.rundir.checkpoints import (
    MANIFEST,
    abandoned_checkpoints,
    check_one_line,
    checkpoint_step,
    checkpoints_awaiting_evaluation,
    complete_checkpoints,
    is_complete,
    named_by_step,
    read_abandoned,
    saved_checkpoints,
)
from pretrain.rundir.files import remove_directory
from pretrain.rundir.history import old_checkpoints
from pretrain.rundir.lineage import Lineage, Policy, hold, unheld
from pretrain.rundir.lock import check_free
from pretrain.rundir.paths import RunPaths, check_version


@dataclass(frozen=True)
class Row:
    """A checkpoint in the list."""

    path: str
    step: int
    """As its name says."""
    id: str | None = None
    """None, as most of what follows, when it is damaged."""
    parent: str | None = None
    branch: str | None = None
    """The id of the branch that it lies on."""
    branch_since: int | None = None
    """The step after which that branch begins."""
    bytes: int | None = None
    saved_at: float | None = None
    """Unix seconds."""
    validation_loss_nats: float | None = None
    changes: int = 0
    """Number of keys that --allow-changed let change on the way here."""
    is_held: bool = False
    """A reader has it open, so retention passes over it."""
    awaits_evaluation: bool = False
    damage: str | None = None
    """What is wrong, as far as its small files show; the tensors are not read."""
    unread: str | None = None
    """Why this version cannot read it, which is no damage: another version saved it."""
    abandoned: str | None = None
    """The folder of RUN/abandoned that it lies in."""
    abandoned_because: str | None = None
    """Why the run turned away from it, as the folder's why.json says."""


def list_run(run: Path) -> list[Row]:
    """Return the checkpoints of a run, then those that it has turned away from, by steps each.

    Raises:
        ConfigError: It is not a run that has a checkpoint.
    """
    check_version(run)
    own = named_by_step(RunPaths(run).checkpoints)
    aside = list(abandoned_checkpoints(run))
    reasons = {folder: why.reason for folder, why in read_abandoned(run)}
    if not own and not aside:
        what = "has no checkpoints" if run.is_dir() else "no such directory"
        raise ConfigError(f"{run}: {what}. Give a run's directory (it has checkpoints/)")
    awaited = set(checkpoints_awaiting_evaluation(run))
    rows = [_row(path, awaits_evaluation=path in awaited) for path in own]
    return rows + [
        _row(path, abandoned=path.parent.name, because=reasons.get(path.parent)) for path in aside
    ]


def format_rows(run: Path | str, rows: Sequence[Row]) -> str:
    """Return the list as text.

    Args:
        run: The run's directory or URL.
        rows: Its checkpoints.
    """
    current = [row for row in rows if row.abandoned is None]
    blocks = [f"{run}: {len(current)} checkpoint{'s' * (len(current) != 1)}"]
    if current:
        blocks.append(_table(current))
    for folder in sorted({row.abandoned for row in rows if row.abandoned is not None}):
        there = [row for row in rows if row.abandoned == folder]
        why = there[0].abandoned_because or "its why.json cannot be read"
        blocks.append(f"abandoned/{folder}, which the run turned away from ({why}):")
        blocks.append(_table(there))
    if any(row.damage is None and row.unread is None for row in rows):
        blocks.append(
            "Only manifests and other small files were read. `pretrain checkpoint verify` reads "
            "every byte."
        )
    return "\n\n".join(blocks)


def _row(
    path: Path,
    awaits_evaluation: bool = False,
    abandoned: str | None = None,
    because: str | None = None,
) -> Row:
    row = Row(
        str(path),
        checkpoint_step(path.name) or 0,
        awaits_evaluation=awaits_evaluation,
        abandoned=abandoned,
        abandoned_because=because,
    )
    if not is_complete(path):
        return dataclasses.replace(row, damage=f"has no {MANIFEST}")
    try:
        opened = open_checkpoint(path)
        assert opened.index
        saved_at = (path / MANIFEST).stat().st_mtime
        with unheld(path) as is_unheld:
            is_held = not is_unheld
    except (DamagedCheckpoint, OSError) as error:
        return dataclasses.replace(row, damage=_without_remedy(error, path))
    except ConfigError as error:
        return dataclasses.replace(row, unread=_without_remedy(error, path))
    origin = opened.origin
    return dataclasses.replace(
        _with_lineage(row, opened.lineage),
        bytes=sum(opened.files.values()),
        saved_at=saved_at,
        validation_loss_nats=origin.validation_loss_nats,
        changes=len(origin.changes),
        is_held=is_held,
    )


def _with_lineage(row: Row, lineage: Lineage) -> Row:
    branch = lineage.branches[-1]
    return dataclasses.replace(
        row, id=lineage.id, parent=lineage.parent, branch=branch.id, branch_since=branch.since
    )


def _table(rows: Sequence[Row]) -> str:
    header = ("step", "id", "parent", "branch", "saved at", "size", "validation", "notes")
    lines = []
    before: str | None = None
    for row in rows:
        loss = row.validation_loss_nats
        lines.append(
            (
                f"{row.step:,}",
                row.id or "-",
                row.parent or "-",
                # A branch is named where it begins.
                f"{row.branch[:8]} from {row.branch_since:,}"
                if row.branch and row.branch != before
                else '"' * bool(row.branch),
                moment(row.saved_at) if row.saved_at else "-",
                size(row.bytes) if row.bytes is not None else "-",
                "-" if loss is None else f"{loss:.4f}",
                _notes(row),
            )
        )
        before = row.branch or before
    # Notes are of any length, so they stand last and at the left.
    return "\n".join(columns([header, *lines], right=range(5, len(header) - 1)))


def _notes(row: Row) -> str:
    notes = [f"DAMAGED: {row.damage}"] if row.damage else []
    notes += [f"cannot be read: {row.unread}"] if row.unread else []
    notes += ["held by a reader"] * row.is_held
    notes += ["awaits evaluation"] * row.awaits_evaluation
    if row.changes:
        notes.append(f"{row.changes} allowed change{'s' * (row.changes != 1)}")
    return ", ".join(notes)


# ---- verify ----
# `pretrain checkpoint verify`: read every byte of checkpoints and compare it with its digest.


NUM_THREADS = 4
"""Files that are read at once. Hashing keeps about one core busy for 10 GB/s."""


def checkpoints_at(source: Path) -> list[Path]:
    """Return the checkpoint at `source`, or all checkpoints of the run there, oldest first.

    Raises:
        ConfigError: It is neither.
    """
    if is_complete(source):
        return [source]
    if found := named_by_step(RunPaths(source).checkpoints):
        return found
    what = "neither a run nor a checkpoint" if source.exists() else "no such directory"
    raise ConfigError(
        f"{source}: {what}. Give a run's directory (it has checkpoints/) or one step-######## in it"
    )


def verify_sources(sources: Sequence[Path]) -> bool:
    """Verify checkpoints, and print a line for each and one for each damaged file.

    Args:
        sources: Runs, which mean all of their checkpoints, and checkpoints.

    Returns:
        True if all of them are as they were written.

    Raises:
        ConfigError: A source is neither.
    """
    paths = [path for source in sources for path in checkpoints_at(source)]
    damaged = unread = 0
    for path in paths:
        try:
            problems, read = verify_checkpoint(path)
        except ConfigError as error:
            unread += 1
            print(f"{path}: not verified: {_without_remedy(error, path)}", flush=True)
            continue
        damaged += bool(problems)
        _print_verified(path, problems, read)
    if damaged:
        print(f"{damaged} of {len(paths)} checkpoints {'is' if damaged == 1 else 'are'} damaged")
    return not damaged and not unread


def _print_verified(path: object, problems: Sequence[str], read: int) -> None:
    for problem in problems:
        print(f"{path}: DAMAGED: {problem}", flush=True)
    if not problems:
        print(f"{path}: every byte is as it was written ({size(read)})", flush=True)


def verify_checkpoint(path: Path) -> tuple[list[str], int]:
    """Read every byte of a checkpoint once.

    Returns:
        What is damaged, file by file, and the checkpoint's size in bytes.

    Raises:
        ConfigError: It cannot be verified: another version saved it, its name is another step's, or
            it was deleted a moment ago.
    """
    if not is_complete(path):
        return [f"{MANIFEST}: missing"], 0
    try:
        with hold(path):
            checkpoint = open_checkpoint(path)
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                found = pool.map(lambda file: _verify_file(path, file), checkpoint.index.files)
    except DamagedCheckpoint as error:
        return [_without_remedy(error, path)], 0
    return [problem for problem in found if problem], sum(checkpoint.files.values())


def _verify_file(directory: Path, record: FileRecord) -> str | None:
    try:
        with closing(BlockReader(directory, record)) as file:
            file.verify()
    except DamagedCheckpoint as error:
        return _without_remedy(error, directory)
    except OSError as error:
        return f"{record.name}: cannot be read ({error.strerror})"
    return None


def _without_remedy(error: Exception, path: Path) -> str:
    """Return a message without the path, which stands before it, and without what to do."""
    return str(error).replace(f"{path}/", "").partition(". ")[0]


# ---- `pretrain checkpoint prune`: delete a run's old checkpoints by the rules of retention ----


def policy_of(run: Path, keep: int | None, keep_every: int | None, keep_best: int | None) -> Policy:
    """Return what to keep: as the options say, else as the run's config says.

    Args:
        run: The run's directory.
        keep: --keep, or None.
        keep_every: --keep-every, or None.
        keep_best: --keep-best, or None.

    Raises:
        ConfigError: Neither says how many.
    """
    if keep is not None:
        return Policy(keep, keep_every, keep_best or 0)
    if keep_every is not None or keep_best is not None:
        raise ConfigError("--keep-every, --keep-best: only say what stays beside --keep N. Add it")
    path = RunPaths(run).newest_config()
    section = load_config(path).checkpoint if path else None
    if section is None or section.keep is None:
        raise ConfigError(
            f"{run}: its config has no checkpoint.keep, so everything is kept. Say how many of the "
            "newest checkpoints to keep (--keep N)"
        )
    return Policy(section.keep, section.keep_every, section.keep_best)


def prunable(run: Path, policy: Policy) -> tuple[Path, list[Path]]:
    """Return the newest checkpoint, and those that retention would delete, oldest first.

    Raises:
        ConfigError: The run has no checkpoint, or two lines of them.
    """
    check_version(run)
    found = saved_checkpoints(run)
    check_one_line(found)
    sound = [saved.path for saved in found if saved.is_sound]
    if not sound:
        raise ConfigError(f"{run}: has no complete checkpoint. Give a run's directory")
    return sound[-1], old_checkpoints(run, sound[-1], policy)


def describe(old: Sequence[Path]) -> str:
    """Return as text what would be deleted."""
    sizes = [sum(path.stat().st_size for path in each.iterdir()) for each in old]
    lines = [f"delete {path}  {size(count)}" for path, count in zip(old, sizes)]
    return "\n".join([*lines, f"{len(old)} checkpoints, {size(sum(sizes))}, would be deleted"])


def prune(run: Path, policy: Policy) -> list[Path]:
    """Delete what the policy does not keep, once the newest checkpoint has been read and is good.

    Args:
        run: The run's directory.
        policy: What to keep.

    Returns:
        What was deleted. What a reader holds stays.

    Raises:
        ConfigError: An attempt holds the run (RunBusy), or as `prunable`.
        RunFailed: The newest checkpoint is damaged, or the disk refused.
    """
    check_free(run)
    newest, old = prunable(run, policy)
    problems, _ = verify_checkpoint(newest) if old else ([], 0)
    if problems:
        raise RunFailed(
            f"{newest}: the newest checkpoint is damaged ({problems[0]}), so nothing was "
            "deleted. Train on, which goes back to the newest good one, then prune"
        )
    deleted = []
    for path in old:
        with writing(path), unheld(path) as is_unheld:
            if is_unheld:
                remove_directory(path)
                deleted.append(path)
    return deleted


# ---- `pretrain checkpoint list`, `verify` and `upload` for a store, which is named by its URL ----


INCOMPLETE = "not complete, or its manifest is damaged"


def list_store(url: str) -> list[Row]:
    """Return the checkpoints in a store: first the run's line, then those it turned away from.

    Raises:
        ConfigError: There are none, one is of another version, or it cannot be known which line is
            the run's.
        StoreError: The store cannot be read.
    """
    store = Store(url)
    newest = store.newest()
    names = store.names()
    if newest is None and not names:
        raise _none(url)
    line = {s.name for s in store.line_to(newest)} if newest else set()
    rows = []
    for name in names:
        stored = store.stored(name)
        row = Row(f"{store.url}/{name}", int(name.split("-")[1]))
        if stored is None:
            row = dataclasses.replace(row, damage=INCOMPLETE)
        else:
            row = dataclasses.replace(
                _with_lineage(row, stored.lineage),
                bytes=stored.bytes,
                validation_loss_nats=stored.manifest.validation_loss_nats,
                abandoned=None if name in line else "other lines",
            )
        rows.append(row)
    return rows


def verify_store(url: str) -> bool:
    """Verify the checkpoints in a store, or the one that the URL names; print a line for each.

    Returns:
        True if all are as they were written.

    Raises:
        ConfigError: There are none, or one is of another version.
        StoreError: The store cannot be read.
    """
    base, name = split_checkpoint(url)
    store = Store(base)
    names = [name] if name else store.names()
    if not names:
        raise _none(url)
    good = True
    for each in names:
        stored = store.stored(each)
        problems = store.verify(stored) if stored else [INCOMPLETE]
        _print_verified(f"{store.url}/{each}", problems, stored.bytes if stored else 0)
        good = good and not problems
    return good


def upload_run(run: Path, url: str | None) -> list[str]:
    """Upload the checkpoints of a run that are not in a store yet.

    Args:
        run: The run's directory.
        url: The store; None for that of the run's config.

    Returns:
        A line for each checkpoint that is still missing there.

    Raises:
        ConfigError: The run has no checkpoint, or no URL is known.
    """
    if not complete_checkpoints(run):
        raise ConfigError(f"{run}: has no complete checkpoint. Give a run's directory")
    path = RunPaths(run).newest_config()
    if url is None and path is not None:
        url = load_config(path).checkpoint.upload_to
    if url is None:
        raise ConfigError(f"{run}: its config has no checkpoint.upload_to. Say where to: --to URL")
    rounds = Rounds(run, Store(url))
    while rounds.upload_next():
        pass
    return rounds.missing()


def _none(url: str) -> ConfigError:
    return ConfigError(
        f"{url}: holds no checkpoints. Give what checkpoint.upload_to of the run says"
    )

"""Keep one line of descent in RUN/checkpoints: move other branches away, delete old checkpoints.

Only the holder of the run's lock does so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shutil
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pretrain.rundir.checkpoints import (
    MANIFEST,
    WHY,
    Lineage,
    Saved,
    Why,
    abandoned_checkpoints,
    check_still_holds,
    checkpoint_name,
    checkpoints_awaiting_evaluation,
    named_by_step,
    partial_attempt,
    read_lineage,
    saved_checkpoints,
    unheld,
)
from pretrain.rundir.files import (
    PARTIAL,
    REMOVED,
    flush,
    make_directory,
    new_directory,
    read_json,
    remove,
    remove_directory,
    replace_json,
)
from pretrain.rundir.metrics import Warn, copy_after, drop_after
from pretrain.rundir.paths import RunPaths, attempt_directory, attempt_numbers

# ---- Answer Ctrl-C with the steps that would be lost if the run ended at once ----


def saving_then_stopping(step: int, saved: int | None) -> str:
    """Return the line that answers a first Ctrl-C.

    Args:
        step: Steps done.
        saved: The step of the newest checkpoint; None if there is none.
    """
    count, losing = step - (saved or 0), ""
    if count > 0:
        since = "the start" if saved is None else checkpoint_name(saved)
        losing = f", losing {count} step{'s' if count > 1 else ''} since {since}"
    return f"saving, then stopping; press Ctrl-C again to leave at once{losing}"


_REMOVED = re.compile(rf"\..*[0-9a-f]{{32}}{re.escape(REMOVED)}")
_PARTIAL = re.compile(rf"\..+\.[0-9a-f]{{32}}{re.escape(PARTIAL)}")
"""Hidden names that we create (`files.remove_directory`, `new_file`, `new_directory`)."""


def clear_removed(run: Path) -> None:
    """Remove the rest of checkpoints whose deletion was interrupted. Later calls try again."""
    for path in RunPaths(run).checkpoints.glob(".*"):
        if _REMOVED.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def recover(run: Path, attempt: Path | None) -> None:
    """Clean up after earlier attempts, before the run's checkpoints are searched.

    The hidden folders of their unfinished saves are removed, so that these can no longer be
    published (see `checkpoints.check_still_holds`), and so are other files that they had not
    finished writing. Only hidden names that we create are touched.

    Args:
        run: The run's directory.
        attempt: RUN/attempts/#### of this attempt; None if there is none.

    Raises:
        Superseded: Another attempt has taken the run.
        OSError: A folder cannot be renamed; the run must then not be trained.
    """
    check_still_holds(attempt)
    number = int(attempt.name) if attempt else 0
    for path in sorted(RunPaths(run).checkpoints.glob(".*")):
        if path.is_symlink() or not path.is_dir():
            continue
        # Only folders of earlier attempts, as a later attempt may have begun since the check above.
        if (other := partial_attempt(path.name)) is not None and other < number:
            # Renamed first, so that a save that still writes to the folder loses it at once.
            path.rename(path.with_name(f".{uuid.uuid4().hex}{REMOVED}"))
    clear_removed(run)
    if attempt is None:
        return
    paths = RunPaths(run)
    # Of the attempts' folders only the last: each attempt cleans up the folder of the one before.
    for folder in (run, paths.abandoned, attempt_directory(run, number - 1)):
        for path in folder.glob(".*"):
            # Not the hidden name of run.json, which a submission may be writing right now.
            if _PARTIAL.fullmatch(path.name) and not path.name.startswith(f".{paths.version.name}"):
                with contextlib.suppress(OSError):
                    remove(path)


def settle(
    run: Path,
    resumed: Path,
    lineage: Lineage,
    passed_over: Mapping[str, str] | None = None,
    attempt: Path | None = None,
) -> Path | None:
    """Move everything away that does not lead to the checkpoint from which training continues.

    This concerns checkpoints, their evaluations, and lines of metrics.jsonl. It is called after the
    checkpoint has been loaded, so that a damaged checkpoint that is refused changes nothing.

    The checkpoints are moved last, in the order of their steps, and each move is on the disk before
    the next begins. So if the run is killed in between, either all has been moved, or the next
    start resumes from the same checkpoint as before.

    Args:
        run: The run's directory.
        resumed: The checkpoint from which training continues, here or elsewhere.
        lineage: Its ancestry; with an empty id for the initial state.
        passed_over: Name -> reason, for checkpoints that were passed over.
        attempt: RUN/attempts/#### of this attempt; None if there is none.

    Returns:
        RUN/abandoned/####, or None if nothing had to be moved.

    Raises:
        Superseded: Another attempt has taken the run; nothing was moved.
        OSError: A file cannot be moved; the next start moves the rest.
    """
    paths, passed_over = RunPaths(run), passed_over or {}
    found = saved_checkpoints(run)
    away = [saved for saved in found if not _leads_to(saved, lineage)]
    if not away:
        return None
    fork = _fork(away, lineage)
    why = Why(
        at=time.time(),
        reason=_reason(resumed, lineage, passed_over),
        id=lineage.id or None,
        step=lineage.step,
        resumed=_path_from(run.resolve(), resumed.resolve()),
        checkpoints={s.path.name: s.lineage.id if s.lineage else None for s in away},
        stayed={s.path.name: s.lineage.id for s in found if s not in away and s.lineage},
    )
    # Checked again, because loading may have taken long. Checkpoints that a new holder saves from
    # here on are not in the list.
    check_still_holds(attempt)
    folder = paths.abandoned / f"{max(attempt_numbers(paths.abandoned), default=0) + 1:04d}"
    make_directory(paths.abandoned)
    with new_directory(folder) as partial:
        replace_json(partial / WHY, dataclasses.asdict(why), durable=True, indent=2)
        copy_after(paths.metrics, fork, partial / paths.metrics.name)
    for path in named_by_step(paths.evaluations):
        if path.name in why.checkpoints or _step(path) > fork:
            make_directory(folder / "evaluations")
            path.rename(folder / "evaluations" / path.name)
    for saved in away:
        if saved is away[-1] and paths.metrics.exists():
            drop_after(paths.metrics, fork)
        saved.path.rename(folder / saved.path.name)
        flush(folder)
        flush(paths.checkpoints)
    return folder


def _path_from(run: Path, checkpoint: Path) -> str:
    inside = checkpoint.is_relative_to(run)
    return str(checkpoint.relative_to(run) if inside else checkpoint)


def keeps_lines_of(run: Path, lineage: Lineage) -> bool:
    """Return True if the lines of metrics.jsonl about a checkpoint's step are about the checkpoint.

    If they are about another branch, `settle` moves them when training resumes from it.

    Args:
        run: The run's directory.
        lineage: The ancestry of the checkpoint, here or elsewhere.
    """
    away = [saved for saved in saved_checkpoints(run) if not _leads_to(saved, lineage)]
    return not away or lineage.step <= _fork(away, lineage)


def begins_branch(run: Path, resumed: Path, lineage: Lineage) -> bool:
    """Return True if checkpoints saved after `resumed` belong to a new branch.

    They do if `resumed` is a checkpoint of another run, even if this run is a copy of it. They also
    do if the same branch already continues in RUN/checkpoints or RUN/abandoned, because two
    checkpoints of a step could not be told apart otherwise.
    """
    if resumed.resolve().parent != RunPaths(run).checkpoints.resolve():
        return True
    copied = read_json(RunPaths(run).version).get("copied")
    if isinstance(copied, list) and lineage.id in copied:
        return True
    for path in (*named_by_step(RunPaths(run).checkpoints), *abandoned_checkpoints(run)):
        other = read_lineage(path)
        # The branch of a damaged checkpoint is unknown, so only its step is compared.
        if _step(path) > lineage.step if other is None else lineage.shares_branch_beyond(other):
            return True
    return False


# ---- Decide which checkpoints to delete: the last N, every M-th and the best N are kept ----
# The decision is a pure function of what is known about the checkpoints of one line of descent.
# `remove_old` applies it.


@dataclass(frozen=True)
class Policy:
    """The keys of [checkpoint] that say which checkpoints are kept."""

    keep: int | None = None
    """The number of newest checkpoints to keep; None keeps all."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are never deleted."""
    keep_best: int = 0
    """The number of checkpoints with the lowest validation loss to keep."""


def removable(
    losses: Mapping[int, float | None], policy: Policy, wanted: Collection[int] = ()
) -> list[int]:
    """Return the steps of the checkpoints that may be deleted, in ascending order.

    The newest two are never among them. The newest is on probation until the next save; if training
    from it fails, the run continues from the one before (`attempts.poisoned`).

    Args:
        losses: Step -> validation loss in nats of complete, readable checkpoints of one line of
            descent; None for a step that was not evaluated during training.
        policy: Which checkpoints to keep.
        wanted: Steps of checkpoints that are still needed, such as those that await an evaluation.
    """
    if policy.keep is None:
        return []
    steps = sorted(losses)
    kept = {*steps[-max(policy.keep, 2) :], *wanted}
    if policy.keep_every is not None:
        kept |= {step for step in steps if step % policy.keep_every == 0}
    # Checkpoints with a loss that is nan or infinite are not among the best.
    finite = ((n, -step) for step, n in losses.items() if n is not None and math.isfinite(n))
    # If losses are equal, the later checkpoint is kept.
    kept |= {-step for _, step in sorted(finite)[: policy.keep_best]}
    return [step for step in steps if step not in kept]


def remove_old(run: Path, newest: Path, policy: Policy, warn: Warn) -> None:
    """Delete ancestors of `newest` that the policy does not keep.

    Checkpoints that are damaged, belong to another line of descent, await an evaluation or are held
    by a reader are not deleted. If a deletion fails, a warning is printed, and it is tried again
    after the next save.

    Args:
        run: The run's directory.
        newest: The checkpoint that has just been published.
        policy: Which checkpoints to keep.
        warn: Called with each deletion that fails.
    """
    for path in old_checkpoints(run, newest, policy):
        try:
            with unheld(path) as is_unheld:
                if is_unheld:
                    remove_directory(path)
        except OSError as error:
            warn("deletion", f"{path}: cannot be deleted ({error}); training goes on")


def old_checkpoints(run: Path, newest: Path, policy: Policy) -> list[Path]:
    """Return the ancestors of `newest` that the policy does not keep.

    Args:
        run: The run's directory.
        newest: The newest checkpoint, which is never among them.
        policy: Which checkpoints to keep.
    """
    lineage = read_lineage(newest)
    if lineage is None or policy.keep is None:
        return []
    line = {s.step: s.path for s in saved_checkpoints(run) if s.is_sound and _leads_to(s, lineage)}
    losses = {step: _validation_loss(path) for step, path in line.items()}
    awaited = {_step(path) for path in checkpoints_awaiting_evaluation(run, with_paused=True)}
    return [line[step] for step in removable(losses, policy, awaited)]


def _leads_to(saved: Saved, lineage: Lineage) -> bool:
    return saved.is_sound and saved.lineage is not None and saved.lineage.is_ancestor_of(lineage)


def _fork(away: list[Saved], lineage: Lineage) -> int:
    """Return the last step that the abandoned line and the continued line have in common.

    A damaged checkpoint does not tell where its line branches off. Then only the steps after the
    checkpoint from which training continues certainly do not belong to the continued line.
    """
    forks = [saved.lineage.last_common_step(lineage) for saved in away if saved.lineage]
    return min([lineage.step, *forks])


def _reason(resumed: Path, lineage: Lineage, passed_over: Mapping[str, str]) -> str:
    if passed_over:
        what = "; ".join(f"{name}: {why}" for name, why in passed_over.items())
        return f"passed over: {what}. Training goes on from step {lineage.step}, {resumed}"
    return f"training goes on from step {lineage.step}, {resumed}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _validation_loss(checkpoint: Path) -> float | None:
    loss = read_json(checkpoint / MANIFEST).get("validation_loss_nats")
    return float(loss) if isinstance(loss, int | float) and not isinstance(loss, bool) else None

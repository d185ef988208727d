"""Keep one line of checkpoints in a run: what the run turns away from leaves, what is old goes.

The holder of the run's lock alone does so.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from pretrain.rundir.checkpoints import (
    Saved,
    Why,
    abandoned_checkpoints,
    check_still_holds,
    checkpoint_name,
    checkpoints_awaiting_evaluation,
    complete_checkpoints,
    finish_set_aside,
    headless_checkpoints,
    is_complete,
    is_headless,
    named_by_step,
    partial_attempt,
    saved_checkpoints,
    set_aside,
)
from pretrain.rundir.files import REMOVED, read_json, remove_directory, say
from pretrain.rundir.lineage import (
    MANIFEST,
    Lineage,
    Policy,
    read_lineage,
    removable,
    unheld,
)
from pretrain.rundir.metrics import Warn, bring_back
from pretrain.rundir.paths import RunPaths

# ---- Say what a run would lose if it ended at once, as Ctrl-C asks and is told ----


def saving_then_stopping(step: int, saved: int | None) -> str:
    """Return the line with which a first Ctrl-C is answered.

    Args:
        step: Steps done.
        saved: The step of the newest checkpoint; None if there is none.
    """
    lost = steps_lost(step, saved)
    losing = f", losing {lost}" if lost else ""
    return f"saving, then stopping; press Ctrl-C again to leave at once{losing}"


def steps_lost(step: int, saved: int | None) -> str:
    """Return "3 steps since step-00000020", or "" where nothing would be lost.

    Args:
        step: Steps done.
        saved: The step of the newest checkpoint; None if there is none.
    """
    count = step - (saved or 0)
    if count <= 0:
        return ""
    since = "the start" if saved is None else checkpoint_name(saved)
    return f"{count} step{'s' if count > 1 else ''} since {since}"


_REMOVED = re.compile(rf"\.step-\d{{8,}}\.[0-9a-f]{{32}}{re.escape(REMOVED)}")


def recover(run: Path, attempt: Path | None) -> None:
    """Clean up after the attempts before, before the run's checkpoints are looked at.

    Hidden folders of their unfinished saves are removed, so that none of them can be published any
    more (see `fence.check_still_holds`). What a killed attempt was about to set aside is moved.
    Only folders whose hidden names are of our making are touched.

    Args:
        run: The run's directory.
        attempt: RUN/attempts/#### of this attempt; None when it has none.

    Raises:
        Superseded: Another attempt has taken the run.
        OSError: The disk refused; the run must not be trained then.
    """
    check_still_holds(attempt)
    checkpoints = RunPaths(run).checkpoints
    number = int(attempt.name) if attempt else 0
    for path in _hidden(checkpoints):
        # Of earlier attempts alone: this process may have been suspended since the check.
        if (other := partial_attempt(path.name)) is not None and other < number:
            # The rename comes first: a save that still writes to the folder loses it at once.
            _remove_later(path.rename(path.with_name(_removed_name(path))))
            name = path.name[1:].partition(".")[0]
            say(
                f"{checkpoints / name}: attempt {other} ended while it was saved; what there was "
                "of it is removed"
            )
        elif _REMOVED.fullmatch(path.name):
            _remove_later(path)
    finish_set_aside(run)


def settle(
    run: Path,
    resumed: Path,
    lineage: Lineage,
    passed_over: Mapping[str, str] | None = None,
    attempt: Path | None = None,
) -> Path | None:
    """Set aside whatever is neither the checkpoint that training goes on from nor an ancestor.

    Those are checkpoints, their evaluations, and lines of metrics.jsonl. It is called when the
    checkpoint has been loaded, so a damaged one that is refused changes nothing.

    Args:
        run: The run's directory.
        resumed: The checkpoint that training goes on from, here or elsewhere.
        lineage: Its ancestry.
        passed_over: Name -> why, of checkpoints that were passed over.
        attempt: RUN/attempts/#### of this attempt; None when it has none.

    Returns:
        RUN/abandoned/####, or None when nothing had to move.

    Raises:
        Superseded: Another attempt has taken the run; nothing was moved.
        OSError: The disk refused; the next start goes on with the move.
    """
    paths, passed_over = RunPaths(run), passed_over or {}
    headless = [Saved(path, None) for path in headless_checkpoints(run)]
    found = [*saved_checkpoints(run), *headless]
    away = [saved for saved in found if not _leads_to(saved, lineage)]
    if not away:
        return None
    fork = _fork(away, lineage)
    names = {saved.path.name for saved in away}
    evaluations = [
        path.name
        for path in (
            *named_by_step(paths.evaluations),
            *named_by_step(paths.evaluations / "claims"),
        )
        if path.name in names or (_step(path) > fork)
    ]
    why = Why(
        at=time.time(),
        reason=_reason(resumed, lineage, passed_over),
        id=lineage.id,
        step=lineage.step,
        parent=lineage.parent,
        branches=lineage.branches,
        resumed=str(resumed.resolve()),
        checkpoints={s.path.name: s.lineage.id if s.lineage else None for s in away},
        evaluations=tuple(sorted(set(evaluations))),
        metrics_after=fork,
        stayed={s.path.name: s.lineage.id for s in found if s not in away and s.lineage},
    )
    # Loading may have taken long. What a new holder saves from here on is not in the list.
    check_still_holds(attempt)
    return set_aside(run, why)


def keeps_lines_of(run: Path, lineage: Lineage) -> bool:
    """Return True if the lines of metrics.jsonl about a checkpoint's step are about it.

    Where they are another line's, `settle` moves them when training goes on from the checkpoint.

    Args:
        run: The run's directory.
        lineage: The ancestry of the checkpoint, here or elsewhere.
    """
    away = [saved for saved in saved_checkpoints(run) if not _leads_to(saved, lineage)]
    return not away or lineage.step <= _fork(away, lineage)


def bring_back_lines(run: Path, resumed: Path, step: int) -> None:
    """Bring the lines of metrics.jsonl back that were set aside with a checkpoint.

    A user who turns back to a checkpoint in RUN/abandoned goes on with its history. Its evaluations
    stay there, because their folders may be of other checkpoints of the same steps.

    Args:
        run: The run's directory, from which what does not lead to the checkpoint has been moved.
        resumed: The checkpoint that training goes on from.
        step: Its step.

    Raises:
        OSError: The disk refused; metrics.jsonl is as it was.
    """
    paths, folder = RunPaths(run), resumed.resolve().parent
    if folder.parent == paths.abandoned.resolve() and (folder / paths.metrics.name).exists():
        bring_back(paths.metrics, folder / paths.metrics.name, step)


def begins_branch(run: Path, resumed: Path, lineage: Lineage) -> bool:
    """Return True if what is saved after `resumed` belongs to a branch of its own.

    That is so for another run's checkpoint, and where the same branch already leads further, in
    RUN/checkpoints or in RUN/abandoned, so that two checkpoints of a step could not be told apart.
    """
    if resumed.resolve().parent != RunPaths(run).checkpoints.resolve():
        return True
    own = (*complete_checkpoints(run), *headless_checkpoints(run))
    for path in (*own, *abandoned_checkpoints(run)):
        other = read_lineage(path)
        # Of a damaged one nobody knows where it lies.
        is_damaged = other is None and (is_complete(path) or is_headless(path))
        if is_damaged and _step(path) > lineage.step:
            return True
        if other is not None and lineage.shares_branch_beyond(other):
            return True
    return False


def remove_old(run: Path, newest: Path, policy: Policy, warn: Warn) -> None:
    """Delete the checkpoints that the policy does not keep, of the line that leads to `newest`.

    Those of another line, damaged ones, those that wait for an evaluation and those that a reader
    holds stay. A deletion that the disk refuses is said and tried again after the next save.

    Args:
        run: The run's directory.
        newest: The checkpoint that has just been published.
        policy: What to keep.
        warn: Takes what the disk refused.
    """
    for path in old_checkpoints(run, newest, policy):
        try:
            with unheld(path) as is_unheld:
                if is_unheld:
                    remove_directory(path)
        except OSError as error:
            warn("deletion", f"{path}: cannot be deleted ({error}); training goes on")


def old_checkpoints(run: Path, newest: Path, policy: Policy) -> list[Path]:
    """Return the checkpoints of the line that leads to `newest` that the policy does not keep.

    Args:
        run: The run's directory.
        newest: The newest checkpoint, which is never among them.
        policy: What to keep.
    """
    lineage = read_lineage(newest)
    if lineage is None or policy.keep is None:
        return []
    line = {s.step: s.path for s in saved_checkpoints(run) if s.is_sound and _leads_to(s, lineage)}
    losses = {step: _validation_loss(path) for step, path in line.items()}
    awaited = {_step(path) for path in checkpoints_awaiting_evaluation(run)}
    return [line[step] for step in removable(losses, policy, awaited)]


def _leads_to(saved: Saved, lineage: Lineage) -> bool:
    return saved.is_sound and saved.lineage is not None and saved.lineage.is_ancestor_of(lineage)


def _fork(away: list[Saved], lineage: Lineage) -> int:
    """Return the last step that the line that is left and the line that is gone on have in common.

    A damaged checkpoint does not say where its line parts; only what comes after the checkpoint
    that training goes on from is then certainly not its.
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


def _hidden(checkpoints: Path) -> list[Path]:
    """Return the hidden folders in RUN/checkpoints; links and files there are not ours."""
    try:
        entries = list(os.scandir(checkpoints))
    except (FileNotFoundError, NotADirectoryError):
        return []
    hidden = (e for e in entries if e.name.startswith(".") and e.is_dir(follow_symlinks=False))
    return sorted(Path(entry.path) for entry in hidden)


def _removed_name(partial: Path) -> str:
    return f"{partial.name[: partial.name.index('.', 1)]}.{uuid.uuid4().hex}{REMOVED}"


def _remove_later(path: Path) -> None:
    """Remove a hidden folder that is not needed; if that fails, the next call tries again."""
    shutil.rmtree(path, ignore_errors=True)

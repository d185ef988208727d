"""Judge how an attempt ended: by its newest checkpoint and its ranks' own last word.

An exit code alone proves nothing: srun ends with 0 after "Timed out waiting for job step", and so
does a step that was cancelled while it saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pretrain.launcher.node.ranks import Ranks
from pretrain.rundir.attempts import AttemptRecord, read_attempt, said_done, steps_done
from pretrain.rundir.checkpoints import newest_checkpoint_step
from pretrain.rundir.lock import Attempt
from pretrain.rundir.states import WORK, ExitCode, Outcome


class Verdict(NamedTuple):
    """The meaning of the ranks' end by itself, before restarts are counted."""

    outcome: Outcome
    code: int
    reason: str
    nodes: tuple[str, ...] = ()
    """The nodes that a failure came from."""


class NotStarted(Exception):
    """The ranks of an attempt cannot be started; the message is the reason of its failure."""

    def __init__(self, reason: str, nodes: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.nodes = tuple(nodes)
        """The nodes that are to blame."""


def judge(attempt: Attempt, code: int, ranks: Ranks, num_steps: int, is_asked: bool) -> Verdict:
    """Return what the exit code of ranks that ended by themselves means.

    The order matters: a code that the ranks chose counts before the signals that were sent, and
    after a signal to stop no failure leads to another attempt.

    Args:
        attempt: The attempt.
        code: The exit code of its ranks.
        ranks: The ranks, which have ended.
        num_steps: train.num_steps.
        is_asked: True if a signal to stop was passed on to the ranks.
    """
    record = read_attempt(attempt.directory)
    at, saved = f"step {steps_done(attempt.directory)}", saved_in(record)
    save = f"saved at step {saved}" if saved is not None else f"nothing saved, at {at}"
    failure = ranks.failure
    if code == ExitCode.FINISHED:
        if has_finished(record, num_steps):
            return Verdict(Outcome.FINISHED, code, f"at step {num_steps}")
        # Exit code 0 would be taken for success.
        code = ExitCode.FAILED
        failure = f"the ranks ended with exit code 0, but {_missing(record, num_steps)}"
    if code == ExitCode.BAD_INPUT:
        return Verdict(Outcome.REFUSED, code, "bad input; see the last lines of the ranks")
    if attempt.superseded():
        # The ranks found out before the heartbeat did, as when this process was suspended.
        return Verdict(Outcome.SUPERSEDED, code, "another attempt has taken over the run")
    if code == ExitCode.NO_SPACE:
        return Verdict(Outcome.NO_SPACE, code, f"the disk is full, at {at}")
    if code == ExitCode.STOPPED:
        return Verdict(Outcome.STOPPED, code, save)
    if code == ExitCode.DIVERGED and not is_asked:
        reason = f"the ranks differ in what must be equal, at {at}; see the ranks' last lines"
        return Verdict(Outcome.DIVERGED, code, reason)
    if code == ExitCode.RESTART:
        # A signal to stop may have come while the ranks saved for a restart.
        return Verdict(Outcome.STOPPED if is_asked else Outcome.RESTART, code, save)
    if is_asked:
        return Verdict(Outcome.STOPPED, code, f"asked to stop at {at}; {save}: {failure}")
    return Verdict(Outcome.FAILED, code, f"{failure}, at {at}", ranks.nodes)


def has_finished(record: AttemptRecord, num_steps: int) -> bool:
    """Return True if a run is done: its newest checkpoint and its ranks' last word say so."""
    newest = newest_checkpoint_step(record.directory.parents[1])
    if newest is None:
        # A run that began at its last step, with another run's checkpoint, has no step to save.
        began = next((mark.step for mark in record.phases if mark.phase in WORK), num_steps)
        return said_done(record, num_steps) and began >= num_steps
    return said_done(record, num_steps) and newest >= num_steps


def saved_in(record: AttemptRecord) -> int | None:
    """Return the step of the newest checkpoint if this attempt has saved it, else None."""
    newest = newest_checkpoint_step(record.directory.parents[1])
    # Said as well: an attempt that went back may have saved the same step once more.
    is_new = newest != record.owner.checkpoint_step or any(
        mark.saved == newest for mark in record.phases
    )
    return newest if is_new else None


def _missing(record: AttemptRecord, num_steps: int) -> str:
    """Return what is missing of the proof that a run is done."""
    if not said_done(record, num_steps):
        last = record.phases[-1] if record.phases else None
        said = f'"{last.phase}", at step {last.step}' if last else "never written"
        return f"rank 0's last word was {said} of {num_steps}"
    newest = newest_checkpoint_step(record.directory.parents[1])
    return f"the newest checkpoint is {'none' if newest is None else f'of step {newest}'}"

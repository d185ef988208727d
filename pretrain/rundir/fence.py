"""The fence before publication: an attempt that has lost the run publishes nothing more."""

from __future__ import annotations

from pathlib import Path

from pretrain.config import RunFailed
from pretrain.rundir.paths import attempt_numbers


class Superseded(RunFailed):
    """Another attempt has taken this run over; whatever this one still writes is not wanted."""


def check_still_holds(attempt: Path | None) -> None:
    """Check that an attempt is the newest of its run, which is what holds the run.

    By itself the check cannot close the race: a process may be suspended right after it and wake
    when another attempt has long saved checkpoints of its own. It does together with the order in
    which a new holder works:

    1. it makes its attempt's folder, in one rename;
    2. it removes the hidden folders of unfinished saves of all other attempts
       (`pretrain.rundir.history.recover`);
    3. only then it looks for the checkpoint to go on from.

    A late publisher that has passed the check before 1 then finds one of two cases. Its rename
    comes before 2: the checkpoint is one more of the run that the new holder takes over, and 3 sees
    it. Or its rename comes after 2: what it would rename is gone, and the rename fails with ENOENT.
    A folder that is made after 2 belongs to a save that begins after 1, and the check refuses it.

    Args:
        attempt: RUN/attempts/####; None for a save that belongs to no attempt.

    Raises:
        Superseded: A newer attempt exists, or the attempt's folder is gone.
        OSError: The file server does not answer.
    """
    if attempt is None:
        return
    newest = max(attempt_numbers(attempt.parent), default=0)
    if newest != int(attempt.name):
        by = f"attempt {newest} has taken this run over" if newest else "its folder is gone"
        raise Superseded(
            f"{attempt}: {by}, because this attempt gave no sign of life. It publishes nothing "
            "more and ends"
        )

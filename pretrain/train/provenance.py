"""Record at its start what an attempt is made with, and say what changed since the last one."""

from __future__ import annotations

import sys
from pathlib import Path

from pretrain.checkpoint.manifest import Checkpoint
from pretrain.platform import device_name, versions
from pretrain.rundir.attempts import Owner
from pretrain.rundir.provenance import (
    PROVENANCE,
    Provenance,
    last_provenance,
    provenance_changes,
    write_provenance,
)
from pretrain.train.reporter import AttemptReporter


def record_provenance(
    run: Path, reporter: AttemptReporter, checkpoint: Checkpoint | None
) -> tuple[Provenance, tuple[str, ...]]:
    """Write attempts/####/provenance.json and compare it with the last start's. Rank 0 alone.

    Args:
        run: The run's directory.
        reporter: Holds the attempt.
        checkpoint: The checkpoint to resume from. It is compared with if this run has no earlier
            attempt that recorded anything.

    Returns:
        The record, and the lines that say what changed; none where nothing did.
    """
    attempt = reporter.attempt
    assert attempt is not None
    made = Provenance.here(Owner.read(attempt), sys.argv, versions(), device_name())
    try:
        write_provenance(attempt, made)
    except OSError as error:
        why = f"{attempt}: {PROVENANCE} cannot be written ({error.strerror}); training goes on"
        reporter.warn("provenance", why)
    before = last_provenance(run, int(attempt.name))
    if before is None and checkpoint is not None and checkpoint.origin.provenance is not None:
        before = str(checkpoint.path), checkpoint.origin.provenance
    changes = provenance_changes(before[1], made) if before else []
    if before is None or not changes:
        return made, ()
    return made, (f"{run}: what differs from {before[0]}:", *(f"  {c}" for c in changes))

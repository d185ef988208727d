"""The tries at a run: a directory each, which is the run's lock while the try lasts and its account afterwards.

`RUN/attempts/0001` holds owner.json (who), heartbeat (its mtime is the lease), phases.jsonl and progress (what it does)
and, when it is over, ended.json (how). Such a directory is made under another name and renamed, with owner.json and
heartbeat already in it: rename onto a directory that is not empty fails on every file system, so of many starters
exactly one gets the number. Nothing is ever deleted, so no stale lock can be broken twice. Never imports torch.
"""

from pretrain.attempts.lock import HEARTBEAT_SECONDS, LEASE_SECONDS, Attempt, RunBusy, unknown
from pretrain.attempts.records import (
    AttemptRecord,
    Ended,
    Owner,
    Phase,
    Progress,
    is_finished,
    newest_checkpoint,
    read_attempt,
    read_attempts,
    read_progress,
)

# Exit codes of `pretrain train` beside 0 (finished), 1 (failed), 2 (bad input) and 130 (Ctrl-C).
RESTART = 75  # saved on SIGUSR1: start me again (EX_TEMPFAIL of sysexits.h)
STOPPED = 80  # saved on SIGTERM: do not start me again

__all__ = [
    "HEARTBEAT_SECONDS",
    "LEASE_SECONDS",
    "RESTART",
    "STOPPED",
    "Attempt",
    "AttemptRecord",
    "Ended",
    "Owner",
    "Phase",
    "Progress",
    "RunBusy",
    "is_finished",
    "newest_checkpoint",
    "read_attempt",
    "read_attempts",
    "read_progress",
    "unknown",
]

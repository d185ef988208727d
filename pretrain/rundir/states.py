"""The words and numbers that a run's files use: phases, outcomes, exit codes, kinds of jobs."""

from __future__ import annotations

import signal
from enum import IntEnum, StrEnum

from pretrain.config import ConfigError, Diverged, NoSpace


class Phase(StrEnum):
    """The phases of an attempt, as written in phases.jsonl and progress."""

    STARTING = "starting"
    """The processes start and find each other."""
    LOADING = "loading"
    """The model is built and a checkpoint is loaded."""
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDING = "ending"
    """Everything is written; the processes are shutting down."""


WORK = (Phase.TRAINING, Phase.EVALUATING, Phase.SAVING)
"""Phases whose time counts as lost when a later attempt resumes from an earlier step."""


class Outcome(StrEnum):
    """The ways in which an attempt ends, as written in ended.json."""

    FINISHED = "finished"
    """Every step of the config is done."""
    RESTART = "restart"
    """It saved and asks to be started again, as before a time limit."""
    STOPPED = "stopped"
    """It ended because a user or Slurm asked it to."""
    FAILED = "failed"
    HUNG = "hung"
    """The watchdog ended it, because it made no progress."""
    DIVERGED = "diverged"
    """Its ranks held different values of what must be equal. It stopped without saving."""
    REFUSED = "refused"
    """Its input was wrong, so starting it again would not help."""
    GAVE_UP = "gave_up"
    """It failed once too often, and the launcher does not start another attempt."""
    SUPERSEDED = "superseded"
    """Another attempt took the run over, because this one gave no sign of life."""
    NO_SPACE = "no_space"
    """The disk is full, and would be full again."""


ENDED_WELL = (Outcome.FINISHED, Outcome.RESTART, Outcome.STOPPED)
"""Outcomes that need no explanation."""
FAILURES = (Outcome.FAILED, Outcome.HUNG, Outcome.DIVERGED)
"""Outcomes that count towards recovery.max_restarts."""
STARTED_AGAIN = (Outcome.RESTART, *FAILURES)
"""Outcomes after which the launcher or Slurm makes another attempt."""


class ExitCode(IntEnum):
    """Exit codes of `pretrain train`, by which the launcher knows how the ranks ended."""

    FINISHED = 0
    FAILED = 1
    BAD_INPUT = 2
    RESTART = 75
    """Saved on SIGUSR1, to be started again (EX_TEMPFAIL of sysexits.h)."""
    STOPPED = 80
    """Saved on SIGTERM, not to be started again."""
    DIVERGED = 81
    """Ranks differed in what must be equal; nothing was saved since."""
    NO_SPACE = 82
    """The disk is full; not to be started again before there is room."""
    INTERRUPTED = 128 + signal.SIGINT
    KILLED = 128 + signal.SIGKILL


_OUTCOMES: dict[int, Outcome] = {
    ExitCode.FINISHED: Outcome.FINISHED,
    ExitCode.BAD_INPUT: Outcome.REFUSED,
    ExitCode.RESTART: Outcome.RESTART,
    ExitCode.STOPPED: Outcome.STOPPED,
    ExitCode.DIVERGED: Outcome.DIVERGED,
    ExitCode.NO_SPACE: Outcome.NO_SPACE,
    ExitCode.INTERRUPTED: Outcome.STOPPED,
}


def outcome_of(code: int) -> Outcome:
    """Return the outcome that a process reports which ends with this exit code."""
    return _OUTCOMES.get(code, Outcome.FAILED)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a process that ends with this error."""
    if isinstance(error, ConfigError):
        return ExitCode.BAD_INPUT
    if isinstance(error, NoSpace):
        return ExitCode.NO_SPACE
    return ExitCode.DIVERGED if isinstance(error, Diverged) else ExitCode.FAILED


class JobKind(StrEnum):
    """The kinds of Slurm jobs that are sent for a run."""

    TRAIN = "train"
    EVALUATE = "evaluate"


def in_words(outcome: str) -> str:
    """Return an outcome as it is printed: "gave_up" becomes "gave up"."""
    return outcome.replace("_", " ")

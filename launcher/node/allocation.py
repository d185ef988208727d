"""The nodes and the time that a Slurm job has for its next attempt."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrain.config import RunConfig
from pretrain.launcher import slurm, slurm_nodes
from pretrain.launcher.node.preflight import check_nodes
from pretrain.launcher.node.signals import Signals
from pretrain.launcher.node.verdict import NotStarted
from pretrain.launcher.nodes import choose_nodes, count_failures, failing_nodes
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import AttemptRecord, read_attempts
from pretrain.rundir.jobs import LaunchRecord
from pretrain.rundir.lock import Attempt
from pretrain.rundir.states import Phase

STARTUP_SECONDS = 60.0
"""The time to the first step that an attempt is taken to need, before one has been measured."""
EARLY_SECONDS = 60.0
"""Slurm may send its signal so much earlier than it was told; see sbatch(1)."""
EXCLUDE = "--exclude="
"""The option of sbatch that keeps a job off nodes."""


class Allocation:
    """The nodes that this process's job holds, without those that failed."""

    def __init__(
        self, run: Path, job_id: str, launch: LaunchRecord, config: RunConfig, signals: Signals
    ) -> None:
        """Describe the job that this process runs in.

        Args:
            run: The run's directory.
            job_id: The job.
            launch: How the run is started.
            config: The run.
            signals: The signals that this process receives.
        """
        self._run, self._job_id, self._launch, self._config = run, job_id, launch, config
        self._signals = signals
        self.faults: dict[str, str] = {}
        """Nodes in which the preflight found a fault, each with the cause."""
        self._lost: dict[str, str] = {}

    # ---- nodes ----
    def nodes(self) -> list[str]:
        """Return all nodes that the job holds now: with --no-kill a dead one has been taken out."""
        state = job_state(self._job_id)
        held = state.nodes if state and state.nodes else os.environ.get("SLURM_JOB_NODELIST", "")
        try:
            return slurm_nodes.hostnames(held)
        except slurm.SlurmError:
            return []

    def unusable(self) -> dict[str, str]:
        """Return the nodes that the next attempt must not use, each with the reason."""
        return {
            # Slurm may have had no other node than one that failed in an earlier start.
            **failing_nodes([each for each in self._records() if _is_of_this_start(each)]),
            **self.faults,
            **slurm_nodes.unusable_nodes(self.nodes()),
            **self._lost,
        }

    def excluded(self) -> dict[str, str]:
        """Return the nodes that no start of this job should use again, each with the reason."""
        return {**failing_nodes(self._records()), **self.faults}

    def without(self) -> list[str]:
        """Return the nodes to exclude from the next start of this job.

        These are `excluded`, or none when Slurm could not start the job without them: it would
        hold the job forever (BadConstraints).
        """
        options, nodes = self._launch.sbatch, sorted(self.excluded())
        given = [word.removeprefix(EXCLUDE) for word in options if word.startswith(EXCLUDE)]
        option = EXCLUDE + ",".join([*given, *nodes])
        # A refusal without the option has another cause, such as a limit on waiting jobs.
        if not nodes or _can_start([*options, option]) or not _can_start(options):
            return nodes
        say(f"job {self._job_id}: may start on {', '.join(nodes)} again: Slurm has too few others")
        return []

    def lose(self, nodes: Sequence[str], reason: str) -> None:
        """Leave nodes out of this start of the job: they died, or take no task.

        Slurm itself gives such a node to no job until it answers again, so it is not excluded.

        Args:
            nodes: The nodes.
            reason: What srun said.
        """
        self._lost |= dict.fromkeys(nodes, reason)

    def check(self, attempt: Attempt) -> None:
        """Check all nodes of the job, spare ones too, and leave those with a fault out from now on.

        Args:
            attempt: The attempt that is to start on them.

        Raises:
            ConfigError: The run can start on no node, and the cause is its own.
            NoSpace: No checkpoint fits on the disk.
            RunFailed: The run's directory cannot be written to.
        """
        unusable = self.unusable()
        nodes = [node for node in self.nodes() if node not in unusable]
        self.faults |= check_nodes(
            self._launch, self._config, nodes, attempt, self._job_id, self._signals
        )

    def choose(self) -> list[str]:
        """Return the nodes of the next attempt; none where srun has to choose, as Slurm names none.

        Raises:
            NotStarted: Too few of the job's nodes can be used.
        """
        if not (held := self.nodes()):
            return []
        unusable = self.unusable()
        chosen = choose_nodes(held, self._launch.nodes, unusable, count_failures(self._records()))
        if len(chosen) < self._launch.nodes:
            raise NotStarted(self.too_few(held, unusable), tuple(unusable))
        return chosen

    def too_few(self, held: Sequence[str], unusable: Mapping[str, str]) -> str:
        """Return the sentence that says which nodes are missing, and why."""
        causes = "; ".join(f"{node}: {cause}" for node, cause in unusable.items())
        return (
            f"{self._launch.nodes} nodes are needed, and of the {len(held)} that the job holds "
            f"these cannot be used: {causes or 'none is named'}"
        )

    # ---- time ----
    def seconds_needed(self) -> float:
        """Return the time to the limit that a new attempt needs to be warned before it.

        Slurm sends the signal to save once in the life of a job, and only to processes that run
        then.
        """
        return (
            startup_seconds(read_attempts(self._run))
            + self._config.recovery.preflight_seconds
            + EARLY_SECONDS
            + lead_seconds(self._launch.sbatch)
        )

    def seconds_left(self) -> float | None:
        """Return the time to the job's limit; None when it has none, or Slurm does not answer."""
        state = job_state(self._job_id)
        return state.ends_at - time.time() if state and state.ends_at else None

    def _records(self) -> list[AttemptRecord]:
        """Return the attempts that this job has made, in all of its starts."""
        attempts = read_attempts(self._run)
        return [each for each in attempts if each.owner.slurm_job_id == self._job_id]


def restart_count() -> int:
    """Return how often Slurm had requeued the job when this process started."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def _is_of_this_start(attempt: AttemptRecord) -> bool:
    return (attempt.owner.slurm_restart_count or 0) == restart_count()


def _can_start(options: Sequence[str]) -> bool:
    """Return True unless Slurm says that a job with these options of sbatch cannot start."""
    try:
        slurm.test(options, "#!/bin/sh\n")
    except slurm.SlurmError as error:
        return isinstance(error, slurm.SlurmAway | slurm.SlurmInterrupted)
    return True


def job_state(job_id: str) -> slurm.JobState | None:
    """Return what Slurm says about a job, None when it says nothing: an attempt goes on without."""
    try:
        return (slurm.jobs([job_id]) or {}).get(job_id)
    except slurm.SlurmError:
        return None


def startup_seconds(attempts: Sequence[AttemptRecord]) -> float:
    """Return how long the last attempt that trained took to its first step."""
    for attempt in reversed(attempts):
        for mark in attempt.phases:
            if mark.phase == Phase.TRAINING:
                return max(0.0, mark.at - attempt.owner.began_at)
    return STARTUP_SECONDS


def lead_seconds(sbatch: Sequence[str]) -> float:
    """Return how long before the time limit a job was submitted to be signalled; 0 if it is not."""
    for word in sbatch:
        if match := re.fullmatch(r"--signal=(?:[BR]*:)?USR1@(\d+)", word):
            return float(match[1])
    return 0.0

"""Requeue a job whose batch host has died: `launcher guard`, a job step on other nodes.

A job that was sent with --no-kill outlives a dead node, also the one on which its batch script ran.
Slurm then leaves the job running without a batch script until its time limit (seen with 22.05), so
somebody else has to ask for its next start.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.launcher import slurm, slurm_nodes
from pretrain.launcher.node.allocation import job_state
from pretrain.launcher.node.signals import signals_blocked
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import last_heartbeat
from pretrain.rundir.jobs import job_id_of
from pretrain.rundir.lock import HEARTBEAT_SECONDS
from pretrain.rundir.paths import RunPaths, attempt_directory, attempt_numbers

STEP = "guard"
"""The name of the job step."""
GUARDS = 2
"""Nodes with a guard: one of them may be lost as well."""
SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS
"""Slurm is asked about the batch host when the launcher on it has been silent for so long."""


def guard(run: Path) -> int:
    """Watch the launcher's heartbeat, and requeue this process's job when the batch host is lost.

    Args:
        run: The run's directory.

    Returns:
        The exit code, 0, once the job has been requeued; otherwise the end of the job ends this.

    Raises:
        ConfigError: Not inside a Slurm job.
    """
    job_id = job_id_of(os.environ)
    if job_id is None:
        raise ConfigError(
            "launcher guard: SLURM_JOB_ID is not set; the jobs of `launcher submit` start it"
        )
    beat, since = _heartbeat(run), time.monotonic()
    while True:
        time.sleep(HEARTBEAT_SECONDS / 5)
        if (newest := _heartbeat(run)) != beat:
            beat, since = newest, time.monotonic()
        elif time.monotonic() - since > SILENCE_SECONDS and slurm_nodes.has_lost_batch_host(job_id):
            try:
                slurm.requeue(job_id)
            except slurm.SlurmError as error:
                # The other guard may have been faster.
                say(f"job {job_id}: lost its batch host and cannot be requeued yet ({error})")
                continue
            return 0


@contextmanager
def guarded(run: Path, job_id: str, options: Sequence[str]) -> Iterator[None]:
    """Run guards on nodes other than this one while the block runs.

    Args:
        run: The run's directory.
        job_id: The job.
        options: The job's options of sbatch; without --no-kill there is nothing to guard.
    """
    state = job_state(job_id) if "--no-kill" in options else None
    nodes = slurm_nodes.hostnames(state.nodes)[1:][-GUARDS:] if state else []
    if not nodes:
        yield
        return
    with signals_blocked():
        step = subprocess.Popen(
            _command(run, nodes, options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
    try:
        yield
    finally:
        step.terminate()


def _command(run: Path, nodes: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the srun command line that starts guards on these nodes.

    Args:
        run: The run's directory.
        nodes: The nodes.
        options: The job's options of sbatch.
    """
    has_gpus = any(option.startswith("--gpus-per-node=") for option in options)
    launcher = [sys.executable, "-m", "pretrain.launcher", "guard", str(run)]
    # Slurm's warning before the time limit goes to every process of every step.
    script = f"trap '' USR1 USR2; exec {shlex.join(launcher)}"
    return [
        "srun",
        f"--job-name={STEP}",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--mem=0",
        *(["--gpus-per-node=0"] if has_gpus else []),
        # Beside the ranks, whose processors it may use, and on what is left of its nodes.
        "--overlap",
        "--no-kill",
        "sh",
        "-c",
        script,
    ]


def _heartbeat(run: Path) -> float:
    """Return when the newest attempt last renewed its lease."""
    numbers = attempt_numbers(RunPaths(run).attempts)
    return last_heartbeat(attempt_directory(run, max(numbers))) if numbers else 0.0

"""Run one of Slurm's commands, without a shell, and tell its failures apart."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from signal import SIGTERM

from pretrain.config import ConfigError, RunFailed

COMMAND_SECONDS = 120.0
"""The longest time for one command; longer than Slurm's own timeouts."""
_AWAY = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted"
    r"|connection refused|communication connection failure|transport endpoint|in standby mode"
    # What scontrol makes of no answer at all.
    r"|unexpected message received",
    re.IGNORECASE,
)
"""Words of Slurm's commands when slurmctld does not answer. They have no exit code for it."""
_NO_CLUSTER = re.compile(
    r"could not establish a configuration source|unable to process configuration file",
    re.IGNORECASE,
)
"""Words of Slurm's commands on a machine that belongs to no cluster."""
_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PRETRAIN_ATTEMPT",
    "PRETRAIN_RENDEZVOUS",
)
"""Variables that tell a process which rank it is. sbatch hands its environment on to the job, and
the rank of a process that submits must not become the rank of the job's processes."""
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables of Slurm that say how to reach the cluster."""


class SlurmError(RunFailed):
    """A Slurm command failed. The message has the words of the command."""


class NoSlurm(ConfigError):
    """This machine has no Slurm commands, or they know of no cluster."""


class SlurmAway(SlurmError):
    """slurmctld, Slurm's controller, does not answer. A later try may succeed."""


class SlurmInterrupted(SlurmError):
    """SIGTERM ended the command, as it does when Slurm ends the job in which the command runs."""


def run_command(
    program: str, arguments: Sequence[str], script: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands and return its output.

    Args:
        program: The command.
        arguments: Its arguments.
        script: What it reads from stdin.

    Raises:
        NoSlurm: There is no such command here, or no cluster.
        SlurmAway: slurmctld does not answer.
        SlurmInterrupted: SIGTERM ended the command.
        SlurmError: The command failed otherwise.
    """
    environment = slurm_environment()
    if program == "squeue":
        # Times in unix seconds instead of a format without a time zone.
        environment["SLURM_TIME_FORMAT"] = "%s"
    try:
        answer = subprocess.run(
            [program, *arguments],
            input=script,
            stdin=subprocess.DEVNULL if script is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise NoSlurm(
            f"{program}: no such command here. Slurm's commands are on the login nodes of a "
            "cluster; `launcher local` and `launcher sweep --nproc` train on this machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(f"{program}: no answer within {COMMAND_SECONDS:.0f} s") from None
    if answer.returncode == -SIGTERM:
        raise SlurmInterrupted(f"{program}: ended by SIGTERM")
    if answer.returncode:
        words = words_of(answer.stderr or answer.stdout) or f"exit code {answer.returncode}"
        # In a job there is a cluster, so its configuration is missing for a moment only.
        if _NO_CLUSTER.search(words) and "SLURM_JOB_ID" not in os.environ:
            raise NoSlurm(
                f"{program}: there is no Slurm cluster here. Slurm's commands are installed, but "
                "find no configuration (slurm.conf, or the file that SLURM_CONF names). Log in to "
                "a cluster; `launcher local` and `launcher sweep --nproc` train on this machine"
            )
        raise (SlurmAway if _AWAY.search(words) else SlurmError)(f"{program}: {words}")
    return answer


def slurm_environment() -> dict[str, str]:
    """Return this process's environment without what would change Slurm's commands or the job.

    The SLURM_... variables of a job that this process runs in would be handed on to the new job,
    where srun takes some of them for options. A user's SQUEUE_... variables would change the output
    that is parsed here. SBATCH_... variables are options of sbatch: SBATCH_ARRAY_INX makes a job
    array of every job. Those that say where a job may run are options of the job by now
    (pretrain.launcher.cluster.with_variables).
    """
    dropped = re.compile(r"(SLURM|SQUEUE|SINFO|SRUN|SCANCEL|SBATCH|SALLOC)_")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not (name in _RANK_VARIABLES or dropped.match(name))
    }
    if "PYTHONPATH" in environment:
        # "PYTHONPATH=$PYTHONPATH:/mine" leaves an empty entry, by which Python would look for
        # modules in the job's working directory first (PYTHONSAFEPATH does not prevent that).
        entries = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
    return environment


def words_of(text: str) -> str:
    """Join the lines of an error, without what comes before the words.

    "sbatch: error: Invalid account" becomes "Invalid account".
    """
    lines = [
        re.sub(r"^\w+: (?:(?:error|fatal): )?", "", line).strip() for line in text.splitlines()
    ]
    return "; ".join(line for line in lines if line)

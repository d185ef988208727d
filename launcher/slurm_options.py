"""Name the options of sbatch and srun that the launcher sets itself, and refuse them elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence

OUR_OPTIONS = (
    "account",
    "array",
    "batch",
    "chdir",
    "constraint",
    "cpus-per-task",
    "dependency",
    "export",
    "gpus-per-node",
    "help",
    "job-name",
    "mem",
    "nodes",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "error",
    "input",
    "no-kill",
    "export-file",
    "parsable",
    "partition",
    "qos",
    "requeue",
    "signal",
    "test-only",
    "time",
    "time-min",
    "uid",
    "usage",
    "version",
    "wait",
    "wrap",
)
"""Options of sbatch that a site file may not give: most are set in `Job.arguments`, and the others
would change what the launcher relies on. sbatch also accepts any unambiguous beginning of an
option's name."""
SRUN_OPTIONS = (
    "chdir",
    "cpus-per-task",
    "error",
    "exclude",
    "export",
    "gpus-per-node",
    "input",
    "jobid",
    "job-name",
    "kill-on-bad-exit",
    "label",
    "multi-prog",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "output",
    "pty",
    "signal",
    "test-only",
    "time",
    "wait",
)
"""Options of srun that a site file may not give, for the same reasons."""


def why_refused(argument: str, ours: Sequence[str] = OUR_OPTIONS) -> str:
    """Return why an argument may not be passed on to Slurm; "" if it may.

    Args:
        argument: The argument, "--name=value" or "--name".
        ours: The options that the launcher sets itself.
    """
    if not re.fullmatch(r"--[a-z][a-z-]+(=.*)?", argument):
        return 'not an option. Write each option as one string, such as "--reservation=night"'
    if any(name.startswith(option_name(argument)) for name in ours):
        return "the launcher sets this option itself"
    return ""


def option_name(argument: str) -> str:
    """Return the name of an option: "--exclude=n1" -> "exclude"."""
    return argument.removeprefix("--").split("=")[0]

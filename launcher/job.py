"""What a job is: a site and what shall run there -> sbatch's argument list, its script, and the srun that starts ranks.

Values go into arguments as they are, into the script only quoted, and into jobs.jsonl as JSON.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import ConfigError, RunFailed, writing
from pretrain.launcher.cluster import Site, is_plain, seconds_of, share_of_memory

TEMPLATE = Path(__file__).parents[1] / "slurm" / "job.sbatch"
WAIT_SECONDS = 60  # between a rank's end and the end of those that it leaves waiting
MOST_SIGNAL_SECONDS = 65_535  # sbatch(1), --signal
NAME_LENGTH = 64
PATH_LENGTH = 3_500  # of the 4,095 bytes that Linux takes: the rest is for the files below


@dataclass(frozen=True)
class Job:
    """One sbatch. `commands` run on the first of its nodes: one, or for an array one a task."""

    name: str
    site: Site
    directory: Path
    """Where it runs: relative paths in the run's config start there."""
    logs: Path
    """An existing folder for slurm-JOB.log: what the script and slurmd say."""
    commands: tuple[tuple[str, ...], ...]
    nodes: int = 1
    tasks_per_node: int = 1
    """Ranks a node, one a GPU."""
    time_limit: str | None = None
    signal_seconds: int | None = None
    """SIGUSR1 to every rank so long before the time limit."""
    concurrent: int | None = None
    """An array: most of its tasks that run at once."""

    @property
    def num_tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def cpus_per_task(self) -> int:
        return max(1, self.site.cpus_per_node // self.site.max_tasks_per_node)

    def arguments(self) -> list[str]:
        """sbatch's options. Every value is part of one argument and starts none."""
        site = self.site
        options: dict[str, object] = {
            "job-name": self.name,
            "partition": site.partition,
            "account": site.account,
            "qos": site.qos,
            "constraint": site.constraint,
            **self._share(),
            "time": self.time_limit,
            "signal": f"USR1@{self.signal_seconds}" if self.signal_seconds else None,
            "open-mode": "append",
            "chdir": self.directory,
            # In file names Slurm replaces %j and the like; %% is a plain %.
            "output": str(self.logs).replace("%", "%%")
            + f"/slurm-{'%A_%a' if self.is_array else '%j'}.log",
            "export": "ALL",
            "array": f"0-{len(self.commands) - 1}%{self.concurrent or len(self.commands)}"
            if self.is_array
            else None,
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return ["--requeue", *given, *site.sbatch_arguments]

    def script(self) -> str:
        """The batch script. Raises RunFailed when the template is not where the project has it."""
        setup = [shlex.join(["module", "load", name]) for name in self.site.modules]
        setup += [
            f"export {name}={shlex.quote(value)}" for name, value in self._environment().items()
        ]
        values = {
            # Only a login shell is sure to know `module`.
            "SHELL": "#!/bin/bash -l" if self.site.modules else "#!/bin/bash",
            "NAME": self.name,
            "DIRECTORY": shlex.quote(str(self.directory)),
            "SETUP": "\n".join(setup),
            "COMMAND": self._command(),
        }
        try:
            template = TEMPLATE.read_text()
        except OSError as error:
            raise RunFailed(
                f"{TEMPLATE}: not readable ({error.strerror}). Install the project from its clone, "
                "with `pip install -e .`"
            ) from None
        # One pass: what a value holds is never taken for a place.
        return re.sub("@([A-Z]+)@", lambda match: values[match[1]], template)

    def step(self) -> list[str]:
        """What stands before the ranks' `python -m ...`: srun with one task a GPU, then the site's container."""
        share = [
            f"--{name}={value}"
            for name, value in self._share().items()
            if value is not None and name != "mem"
        ]
        return [
            "srun",
            *share,
            f"--ntasks={self.num_tasks}",
            "--kill-on-bad-exit=1",
            f"--wait={WAIT_SECONDS}",
            "--label",
            *self.site.container,
        ]

    @property
    def is_array(self) -> bool:
        return self.concurrent is not None or len(self.commands) > 1

    def _share(self) -> dict[str, object]:
        """The part of the cluster that it takes."""
        site = self.site
        gpus = f"{site.gpu_type}:{self.tasks_per_node}" if site.gpu_type else self.tasks_per_node
        memory = site.memory_per_node
        return {
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "gpus-per-node": gpus if site.gpus_per_node else None,
            "mem": memory and share_of_memory(memory, self.tasks_per_node, site.max_tasks_per_node),
        }

    def _environment(self) -> dict[str, str]:
        given = {"OMP_NUM_THREADS": str(self.cpus_per_task)}
        if scratch := self.site.scratch:
            given |= {
                "TMPDIR": scratch,
                "TRITON_CACHE_DIR": f"{scratch}/triton",
                "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/torchinductor",
            }
        return given | self.site.environment

    def _command(self) -> str:
        if not self.is_array:
            return f"exec {shlex.join(self.commands[0])}"
        cases = [
            f"{index}) exec {shlex.join(command)} ;;" for index, command in enumerate(self.commands)
        ]
        return "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"])


def launcher_command(*arguments: str) -> tuple[str, ...]:
    """`launcher ARGUMENTS` by the Python that runs now, which compute nodes find where the login node does."""
    return (sys.executable, "-m", "pretrain.launcher", *arguments)


def job_name(text: str) -> str:
    """A name that every Slurm tool shows as it is: words of letters, digits and ._+=- ("a b$(c)" -> "a_b_c")."""
    return re.sub(r"[^\w.+=-]+", "_", text).strip("_-")[:NAME_LENGTH] or "run"


def check_path(key: str, path: Path) -> None:
    """Raises ConfigError for a directory that a job could not use exactly as it is named."""
    text = str(path)
    if not is_plain(text):
        raise ConfigError(
            f"{key} = {text[:PATH_LENGTH]!r}: has control characters, or is not UTF-8. Choose another name"
        )
    if "\\" in text:
        raise ConfigError(
            f"{key} = {text}: Slurm drops the backslashes of a log file's path. Choose another name"
        )
    longest = max(len(part.encode()) for part in path.parts)
    if longest > os.pathconf("/", "PC_NAME_MAX") or len(text.encode()) > PATH_LENGTH:
        raise ConfigError(f"{key} = {text[:80]}...: too long for a path. Choose a shorter name")
    with writing(path):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{key} = {text}: is a file. Choose another name")


def check_time(time_limit: str | None, signal_seconds: int) -> None:
    """Raises ConfigError for a limit that leaves no time before the signal, and for a signal that Slurm cannot send."""
    if signal_seconds > MOST_SIGNAL_SECONDS:
        raise ConfigError(
            f"two checkpoints may take {signal_seconds} s, and Slurm signals at most {MOST_SIGNAL_SECONDS} s "
            f"before the time limit. Choose --save-before {MOST_SIGNAL_SECONDS}, or a faster file system"
        )
    limit = seconds_of(time_limit) if time_limit else None
    if limit is not None and limit <= signal_seconds:
        raise ConfigError(
            f"time limit {time_limit}: leaves nothing before the {signal_seconds} s that saving may take. "
            f"Ask for more than {signal_seconds // 60 + 1} minutes with --time, or for less with --save-before"
        )

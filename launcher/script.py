"""Describe a Slurm job: sbatch's arguments, the batch script, and the srun that starts the ranks.

Values that a user chose go into argument lists as they are, without a shell, and into the script
only quoted. So a directory named "$(rm -r x)" is a directory with an odd name and nothing else.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import ConfigError, RunFailed, writing
from pretrain.launcher.site import Site, is_plain, seconds_of, share_of_memory
from pretrain.launcher.slurm import option_name

TEMPLATE = Path(__file__).parents[1] / "slurm" / "job.sbatch"
"""The template of the batch script."""
WAIT_SECONDS = 60
"""srun --wait: the time between the end of the first rank and the end of ranks that still run."""
MOST_SIGNAL_SECONDS = 65_535
"""The longest time before the limit at which sbatch --signal can send a signal; see sbatch(1)."""
NAME_LENGTH = 64
"""The longest job name, in characters."""
PATH_LENGTH = 3_500
"""The longest path of a run's directory, in bytes. Linux takes 4,095; the rest is for the files
below it."""
OPTION_LENGTH = 8_000
"""The longest option in a line #SBATCH, in bytes. sbatch reads it into 8,192, unchecked."""


@dataclass(frozen=True)
class Job:
    """A job as one sbatch command submits it."""

    name: str
    site: Site
    directory: Path
    """The working directory, from which relative paths in the run's config start."""
    logs: Path
    """An existing folder for slurm-<job>.log, to which the batch script and slurmd write."""
    commands: tuple[tuple[str, ...], ...]
    """The commands that the batch script runs on the first node of the job. More than one of them
    make a job array with a task for each."""
    nodes: int = 1
    tasks_per_node: int = 1
    """Ranks per node, one on each GPU."""
    spare_nodes: int = 0
    """Nodes that the job holds beside `nodes`, on which no rank runs until another node fails."""
    time_limit: str | None = None
    """As in sbatch --time; None takes the partition's default."""
    signal_seconds: int | None = None
    """Slurm sends SIGUSR1 to every rank this long before the time limit."""
    concurrent: int | None = None
    """Makes a job array, of which at most this many tasks run at once."""
    repeats: int | None = None
    """Makes a job array with so many tasks, which all run the only command."""
    dependency: str | None = None
    """As in sbatch --dependency. It belongs to one sending, so a job that is sent again does not
    wait any more."""
    mail: str | None = None
    """The address to which Slurm sends a mail when the job has finished or given up."""

    @property
    def num_tasks(self) -> int:
        """Return the number of ranks on all nodes."""
        return self.nodes * self.tasks_per_node

    @property
    def cpus_per_task(self) -> int:
        """Return the number of cores of each rank."""
        return max(1, self.site.cpus_per_node // self.site.max_tasks_per_node)

    def arguments(self) -> list[str]:
        """Return the options of sbatch.

        Each is one --name=value, so no value can be taken for another option.
        """
        site = self.site
        log_name = "%A_%a" if self.is_array else "%j"
        # In a file name Slurm replaces %j and the like, and %% by a plain %.
        output = f"{str(self.logs).replace('%', '%%')}/slurm-{log_name}.log"
        length = self.repeats or len(self.commands)
        array = f"0-{length - 1}%{self.concurrent or length}"
        options: dict[str, object] = {
            "job-name": self.name,
            "partition": site.partition,
            "account": site.account,
            "qos": site.qos,
            "constraint": site.constraint,
            **self._share(),
            "nodes": self.nodes + self.spare_nodes,
            "time": self.time_limit,
            # Without "B:" before it, the signal goes to the job steps, which are the ranks.
            "signal": f"USR1@{self.signal_seconds}" if self.signal_seconds else None,
            # A job that was requeued must not overwrite the log of its attempt before.
            "open-mode": "append",
            "chdir": self.directory,
            "output": output,
            # The ranks need the user's environment: PATH, and secrets such as WANDB_API_KEY.
            "export": "ALL",
            "array": array if self.is_array else None,
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        # --requeue: Slurm starts the job again when one of its nodes dies, whatever the cluster's
        # default is.
        # --no-kill: with a spare node the job goes on when a node dies.
        no_kill = ["--no-kill"] if self.spare_nodes else []
        return ["--requeue", *no_kill, *given, *site.sbatch_arguments, *self._mail()]

    def waiting(self) -> list[str]:
        """Return the options of sbatch that make the job wait for others.

        A job that waits for what cannot happen any more is cancelled.
        """
        if self.dependency is None:
            return []
        return [f"--dependency={self.dependency}", "--kill-on-invalid-dep=yes"]

    def script(self) -> str:
        """Return the batch script.

        Its #SBATCH lines are `arguments`, so `sbatch` with this file alone sends the same job.
        Options on sbatch's command line go before them.

        Raises:
            ConfigError: An option cannot be written in such a line.
            RunFailed: The template is not installed.
        """
        setup = [shlex.join(["module", "load", name]) for name in self.site.modules]
        setup += [
            f"export {name}={shlex.quote(value)}" for name, value in self._environment().items()
        ]
        setup += self._private_scratch()
        values = {
            # Only a login shell is sure to know `module`.
            "SHELL": "/bin/bash -l" if self.site.modules else "/bin/bash",
            "READY": "" if self.is_launcher else "yes",
            "NAME": self.name,
            "OPTIONS": "\n".join(f"#SBATCH {_quoted(word)}" for word in self.arguments()),
            "DIRECTORY": shlex.quote(str(self.directory)),
            "SETUP": "\n".join(setup),
            "COMMAND": self._command(),
        }
        try:
            template = TEMPLATE.read_text()
        except OSError as error:
            raise RunFailed(
                f"{TEMPLATE}: not readable ({error.strerror}). Install the project from its clone "
                "with `pip install -e .`"
            ) from None
        # All fields in one pass, so that a value that contains "@COMMAND@" stays as it is.
        return re.sub("@([A-Z]+)@", lambda match: values[match[1]], template)

    def step(self) -> list[str]:
        """Return the command that starts the ranks, up to their `python -m ...`.

        That is srun with one task per GPU, then the site's container.
        """
        # A job step does not inherit these options from the job in every version of Slurm: srun
        # --cpus-per-task, for one, has to be given since 22.05. A step without --mem may use all
        # of the job's memory.
        share = [
            f"--{name}={value}"
            for name, value in self._share().items()
            if value is not None and name != "mem"
        ]
        return [
            "srun",
            *share,
            f"--ntasks={self.num_tasks}",
            # Ranks that wait for a failed one in a collective operation would never end.
            "--kill-on-bad-exit=1",
            # The same for a rank that ended with 0 too early.
            f"--wait={WAIT_SECONDS}",
            # Each line of output begins with its rank, by which `launcher logs` and SrunRanks
            # tell the ranks apart.
            "--label",
            *self._srun_arguments(),
            *self.site.container,
        ]

    def single(self) -> list[str]:
        """Return the command that starts one process where the ranks run, up to its `python -m`.

        Only srun knows its options, of which the container may be one.
        """
        if not self.site.srun_arguments:
            return list(self.site.container)
        one = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
        share = [*one, f"--cpus-per-task={self.cpus_per_task}"]
        return ["srun", *share, *self._srun_arguments(), *self.site.container]

    @property
    def is_launcher(self) -> bool:
        """Return True if the commands are `launcher`, which says when it can handle signals."""
        prefix = launcher_command()
        return all(command[: len(prefix)] == prefix for command in self.commands)

    @property
    def is_array(self) -> bool:
        """Return True if this is a job array."""
        return bool(self.concurrent or self.repeats or len(self.commands) > 1)

    def _share(self) -> dict[str, object]:
        """Return the options that say which part of the cluster the job takes."""
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

    def _srun_arguments(self) -> list[str]:
        """Return the site's options of srun.

        pyxis starts in the image's directory, where relative paths of the config mean nothing.
        """
        given = list(self.site.srun_arguments)
        names = {option_name(argument) for argument in given}
        if "container-image" in names and "container-workdir" not in names:
            given.append(f"--container-workdir={self.directory}")
        return given

    def _mail(self) -> list[str]:
        """Return the options for one mail at the end: Slurm sends none of these at a requeue.

        It sends FAIL also when a node dies, though the job starts again.
        """
        if self.mail is None:
            return []
        return [f"--mail-user={self.mail}", "--mail-type=END,FAIL,INVALID_DEPEND"]

    def _environment(self) -> dict[str, str]:
        """Return the variables that the batch script exports; the site's come last and win."""
        given = {
            "OMP_NUM_THREADS": str(self.cpus_per_task),
            # `python -m` would look for modules in the working directory first, where others may
            # have put a json.py.
            "PYTHONSAFEPATH": "1",
        }
        if own := self._own_scratch:
            given |= {
                "TMPDIR": own,
                "TRITON_CACHE_DIR": f"{own}/triton",
                "TORCHINDUCTOR_CACHE_DIR": f"{own}/torchinductor",
                "TORCH_EXTENSIONS_DIR": f"{own}/torch_extensions",
            }
        return given | self.site.environment

    @property
    def _own_scratch(self) -> str | None:
        """Return this user's folder in the site's scratch directory, which users may share.

        Compiled kernels are kept in it and executed.
        """
        return f"{self.site.scratch}/pretrain-{os.getuid()}" if self.site.scratch else None

    def _private_scratch(self) -> list[str]:
        """Return the lines of the script that make this user's scratch folder on the first node.

        The ranks make it on theirs (`pretrain.platform`), and check there what this does here.
        """
        if not self._own_scratch:
            return []
        own = shlex.quote(self._own_scratch)
        return [
            f"mkdir --mode=700 -p -- {own}",
            f"[ -O {own} ] && [ ! -L {own} ] || {{",
            f"    echo error: {own}: is not yours. Set another scratch in the site >&2",
            "    exit 2",
            "}",
            f"chmod 700 -- {own}",
        ]

    def _command(self) -> str:
        """Return the lines of the batch script that choose the command: "$@" from then on."""
        if self.repeats or not self.is_array:
            return f"set -- {shlex.join(self.commands[0])}"
        cases = [
            f"{index}) set -- {shlex.join(command)} ;;"
            for index, command in enumerate(self.commands)
        ]
        return "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"])


def _quoted(word: str) -> str:
    """Return an option as a line #SBATCH takes it (src/sbatch/opt.c of Slurm, _get_argument).

    Inside quotation marks a backslash makes the next character literal, and nothing else counts.

    Raises:
        ConfigError: The word has a line break, or is longer than sbatch's buffer.
    """
    if not is_plain(word) or len(word.encode()) > OPTION_LENGTH:
        raise ConfigError(
            f"option {word[:80]!r} of sbatch: has control characters, or more than "
            f"{OPTION_LENGTH} bytes. Choose another value"
        )
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def launcher_command(*arguments: str) -> tuple[str, ...]:
    """Return a command line that runs `launcher` with these arguments.

    It uses the Python that runs now, which compute nodes find at the same path.
    """
    return (sys.executable, "-m", "pretrain.launcher", *arguments)


def job_name(text: str) -> str:
    """Turn any text into a job name that every Slurm tool prints as it is: "a b$(c)" -> "a_b_c".

    Letters, digits and the characters . _ + = - are kept.
    """
    return re.sub(r"[^\w.+=-]+", "_", text).strip("_-")[:NAME_LENGTH] or "run"


def check_path(key: str, path: Path) -> None:
    """Check that a job can use a directory exactly as it is named.

    Args:
        key: What the directory is, for the message: run.directory.
        path: The directory.

    Raises:
        ConfigError: Slurm or the file system could not take the name, or it is a file.
    """
    text = str(path)
    if not is_plain(text):
        raise ConfigError(
            f"{key} = {text[:PATH_LENGTH]!r}: has control characters, or is not UTF-8. "
            "Choose another name"
        )
    if "\\" in text:
        raise ConfigError(
            f"{key} = {text}: Slurm drops backslashes from the path of a log file. "
            "Choose another name"
        )
    longest = max(len(part.encode()) for part in path.parts)
    if longest > os.pathconf("/", "PC_NAME_MAX") or len(text.encode()) > PATH_LENGTH:
        raise ConfigError(f"{key} = {text[:80]}...: too long for a path. Choose a shorter name")
    with writing(path):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{key} = {text}: is a file. Choose another name")


def check_time(
    time_limit: str | None, signal_seconds: int, start_seconds: int = 0, is_measured: bool = False
) -> None:
    """Check that a run has time to train before it has to save.

    Args:
        time_limit: As in sbatch --time; None for the partition's default.
        signal_seconds: The time between the signal to save and the limit.
        start_seconds: The time until the first step.
        is_measured: An attempt took this time to start; otherwise it is an estimate.

    Raises:
        ConfigError: The limit leaves no time before the signal, or Slurm cannot send the signal so
            early.
    """
    if signal_seconds > MOST_SIGNAL_SECONDS:
        raise ConfigError(
            f"two checkpoints may take {signal_seconds} s, but Slurm sends its signal at most "
            f"{MOST_SIGNAL_SECONDS} s before the time limit. Use --save-before "
            f"{MOST_SIGNAL_SECONDS}, or a faster file system"
        )
    limit = seconds_of(time_limit) if time_limit else None
    needed = start_seconds + signal_seconds
    if limit is not None and (limit < needed or limit <= signal_seconds):
        known = "as it did before" if is_measured else "an estimate, as it has not started yet"
        raise ConfigError(
            f"time limit {time_limit}: nothing would be saved, as the run takes {start_seconds} s "
            f"to start ({known}) and is asked to save {signal_seconds} s before the limit. Set at "
            f"least {needed // 60 + 1} minutes with --time, or save later with --save-before"
        )

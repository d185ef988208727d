"""Describe a job to Slurm: the options of sbatch, the batch script, and the commands of its steps.

Values that a user chose go into argument lists unchanged, and into the batch script only quoted, so
a directory named "$(rm -r x)" just has an odd name.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config import ConfigError, RunFailed
from pretrain.launcher import slurm
from pretrain.rundir.jobs import JobRecord
from pretrain.rundir.paths import JobKind

if TYPE_CHECKING:
    from pretrain.launcher.site import Site

# ---- The options of sbatch and srun that the launcher sets itself, and refuses elsewhere ----


OUR_OPTIONS = slurm.names_in(
    """
    account array batch chdir constraint cpus-per-task dependency export gpus-per-node help
    job-name mem nodes no-requeue ntasks ntasks-per-node open-mode output error input no-kill
    export-file parsable partition qos requeue signal test-only time time-min uid usage version
    wait wrap
    """
)
"""Options of sbatch that a site file may not give: most are set in `Job.arguments`, and the others
would change behavior on which the launcher relies. sbatch also accepts any unambiguous beginning of
an option's name."""
SRUN_OPTIONS = slurm.names_in(
    """
    chdir cpus-per-task error exclude export gpus-per-node input jobid job-name kill-on-bad-exit
    label multi-prog nodelist nodes ntasks ntasks-per-node output pty signal test-only time wait
    """
)
"""Options of srun that a site file may not give, for the same reasons."""
OPTIONS_OF_KEYS = {"sbatch_arguments": OUR_OPTIONS, "srun_arguments": SRUN_OPTIONS}
"""The options that each key of a site file may not give."""


def why_refused(argument: str, ours: Collection[str] = OUR_OPTIONS) -> str:
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


# ---- Times and amounts as Slurm writes them ----


_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)


def seconds_of(time_limit: str) -> int | None:
    """Convert a time limit of Slurm to seconds.

    Slurm accepts "MM", "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM" and "D-HH:MM:SS" (sbatch(1), --time).

    Returns:
        Seconds, or None for "UNLIMITED".

    Raises:
        ConfigError: The text is none of these, or its time is zero, such as "0:00".
    """
    if time_limit.upper() in ("UNLIMITED", "INFINITE"):
        return None
    # isascii, because \d also matches digits of other scripts, which sbatch does not accept.
    match = _TIME.fullmatch(time_limit) if time_limit.isascii() else None
    total = 0
    if match:
        parts = [int(part) for part in match["clock"].split(":")]
        # Without days, one or two numbers are minutes and seconds; else the first number is hours.
        begin = [] if match["days"] or len(parts) == 3 else [0]
        hours, minutes, seconds = [*begin, *parts, 0, 0][:3]
        total = ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ConfigError(
            f"time limit {time_limit!r}: not a time. Write "
            '"1-00:00:00" (days-hours:minutes:seconds), "12:00:00", or "90" for minutes'
        )
    return total


def share_of_memory(memory_per_node: str, tasks: int, of_tasks: int) -> str:
    """Return sbatch's --mem for a job that uses part of a node: ("480G", 1, 8) -> "61440M".

    Args:
        memory_per_node: The memory of a whole node, such as "480G". "0", which means all memory,
            is not divided.
        tasks: Ranks of the job on each node.
        of_tasks: Ranks on a whole node.

    Raises:
        ConfigError: The memory is not an amount.
    """
    match = _MEMORY.fullmatch(memory_per_node)
    if not match:
        raise ConfigError(
            f'memory_per_node = {memory_per_node!r}: not an amount. Write it as "480G"'
        )
    amount, unit = int(match[1]), (match[2] or "M").upper()
    if tasks == of_tasks or not amount:
        return f"{amount}{unit}" if amount else "0"
    # Slurm's units K, M, G and T are powers of 1024, and a number without a unit is in M.
    kibibytes = amount * 1024 ** "KMGT".index(unit) * tasks // of_tasks
    return f"{max(1, kibibytes // 1024)}M"


# ---- A job and its batch script ----

TEMPLATE = Path(__file__).parents[1] / "slurm" / "job.sbatch"
"""The template of the batch script."""
WAIT_SECONDS = 60
"""srun --wait: the time between the end of the first rank and the end of ranks that still run."""
NAME_LENGTH = 64
"""The longest job name, in characters."""
OPTION_LENGTH = 8_000
"""The longest option in an #SBATCH line, in bytes. sbatch reads it into an unchecked buffer of
8,192."""


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
    """The commands that the batch script runs on the first node of the job. Several commands make a
    job array with one task for each."""
    nodes: int = 1
    tasks_per_node: int = 1
    """Ranks per node, one on each GPU."""
    spare_nodes: int = 0
    """Nodes that the job holds in addition to `nodes`; no rank uses them until a node fails."""
    time_limit: str | None = None
    """As in sbatch --time; None for the partition's default."""
    signal_seconds: int | None = None
    """Slurm sends SIGUSR1 to every rank this long before the time limit."""
    concurrent: int | None = None
    """If set, the job is a job array, of which at most this many tasks run at once."""
    restarts: int = 0
    """How often the batch script starts its command again after a signal has ended the command."""
    dependency: str | None = None
    """As in sbatch --dependency. It applies to one submission, so a job that is submitted again
    does not wait any more."""
    delay_seconds: int = 0
    """The least time between submission and start. It applies to one submission, too."""

    @property
    def num_tasks(self) -> int:
        """Return the number of ranks on all nodes."""
        return self.nodes * self.tasks_per_node

    @property
    def cpus_per_task(self) -> int:
        """Return the number of cores of each rank."""
        return max(1, self.site.cpus_per_node // self.site.max_tasks_per_node)

    def record(self, job_id: str, kind: JobKind, run: Path, **own: Any) -> JobRecord:
        """Return the record of this job, or with its `own` keys of a task, for RUN/jobs.jsonl."""
        common: dict[str, Any] = {"name": self.name, "site": self.site.name}
        common |= {"nodes": self.nodes, "num_tasks": self.num_tasks, "submitted_at": time.time()}
        return JobRecord(job_id=job_id, kind=kind, run=str(run), **(common | own))

    def arguments(self) -> list[str]:
        """Return the options of sbatch.

        Each option is one string --name=value, so no value can be taken for another option.
        """
        site = self.site
        log_name = "%A_%a" if self.is_array else "%j"
        # In a file name Slurm replaces %j and similar codes, and turns %% into %.
        output = f"{str(self.logs).replace('%', '%%')}/slurm-{log_name}.log"
        length = len(self.commands)
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
            # A requeued job must not overwrite the log of its earlier attempts.
            "open-mode": "append",
            "chdir": self.directory,
            "output": output,
            # The ranks need the user's environment: PATH, and secrets such as WANDB_API_KEY.
            "export": "ALL",
            "array": array if self.is_array else None,
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        # --requeue: if a node dies, Slurm starts the job again, whatever the cluster's default.
        # --no-kill: with a spare node, the job continues if a node dies.
        no_kill = ["--no-kill"] if self.spare_nodes else []
        return ["--requeue", *no_kill, *given, *site.sbatch_arguments]

    def waiting(self) -> list[str]:
        """Return the options of sbatch that make the job wait, for other jobs or for a time.

        A job whose dependency can no longer be satisfied is cancelled.
        """
        later = [f"--begin=now+{self.delay_seconds}"] if self.delay_seconds else []
        if self.dependency is None:
            return later
        return [*later, f"--dependency={self.dependency}", "--kill-on-invalid-dep=yes"]

    def submit(self) -> str:
        """Submit the job, and return its id; see `slurm.submit_script`."""
        return slurm.submit_script([*self.waiting(), *self.arguments()], self.script())

    def test(self) -> str:
        """Ask Slurm when the job could start; see `slurm.test`."""
        return slurm.test([*self.waiting(), *self.arguments()], self.script())

    def command_line(self) -> str:
        """Return the command that submits the job, as a user would type it."""
        return shlex.join(["sbatch", *self.waiting(), *self.arguments()])

    def script(self) -> str:
        """Return the batch script.

        Its #SBATCH lines are `arguments`, so `sbatch` with this file alone submits the same job.
        Options on sbatch's command line override them.

        Raises:
            ConfigError: An option cannot be written in an #SBATCH line.
            RunFailed: The template is not installed.
        """
        setup = [shlex.join(["module", "load", name]) for name in self.site.modules]
        setup += [
            f"export {name}={shlex.quote(value)}" for name, value in self._environment().items()
        ]
        setup += self._private_scratch()
        values = {
            # `module` is certain to be defined only in a login shell.
            "SHELL": "/bin/bash -l" if self.site.modules else "/bin/bash",
            "READY": "" if self.is_launcher else "yes",
            "RESTARTS": str(self.restarts),
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
        # All fields are replaced in one pass, so that a value with "@COMMAND@" stays unchanged.
        return re.sub("@([A-Z]+)@", lambda match: values[match[1]], template)

    def step(self) -> list[str]:
        """Return the command that starts the ranks, up to their `python -m ...`.

        The command is srun with one task per GPU, then the site's container.
        """
        # Not every version of Slurm passes these options from the job to its steps: for example,
        # srun needs --cpus-per-task since 22.05. A step without --mem may use all of the job's
        # memory.
        share = [
            f"--{name}={value}"
            for name, value in self._share().items()
            if value is not None and name != "mem"
        ]
        return [
            "srun",
            *share,
            f"--ntasks={self.num_tasks}",
            # Ranks that wait for a failed rank in a collective operation would never end.
            "--kill-on-bad-exit=1",
            # The same if a rank ended with code 0 too early.
            f"--wait={WAIT_SECONDS}",
            # Each line of output begins with its rank, so that `launcher logs` and SrunRanks can
            # tell the ranks apart.
            "--label",
            # The launcher's orders go to every task.
            "--input=all",
            *self._srun_arguments(),
            *self.site.container,
        ]

    def single(self) -> list[str]:
        """Return the command that starts one process where the ranks run, up to its `python -m`.

        If the site has options of srun, srun must be used, as the container may be one of them.
        """
        if not self.site.srun_arguments:
            return list(self.site.container)
        one = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
        share = [*one, f"--cpus-per-task={self.cpus_per_task}"]
        return ["srun", *share, *self._srun_arguments(), *self.site.container]

    @property
    def is_launcher(self) -> bool:
        """Return True if the commands are `launcher`, which reports when it can handle signals."""
        prefix = launcher_command()
        return all(command[: len(prefix)] == prefix for command in self.commands)

    @property
    def is_array(self) -> bool:
        """Return True if this is a job array."""
        return bool(self.concurrent or len(self.commands) > 1)

    def _share(self) -> dict[str, object]:
        """Return the options for the share of the cluster that the job takes."""
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

        By default pyxis starts in the image's own directory, where the relative paths of the config
        do not exist.
        """
        given = list(self.site.srun_arguments)
        names = {option_name(argument) for argument in given}
        if "container-image" in names and "container-workdir" not in names:
            given.append(f"--container-workdir={self.directory}")
        return given

    def _environment(self) -> dict[str, str]:
        """Return the variables that the batch script exports; the site's override the others."""
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

        The folder must be this user's own, because it holds compiled kernels, which are executed.
        """
        return f"{self.site.scratch}/pretrain-{os.getuid()}" if self.site.scratch else None

    def _private_scratch(self) -> list[str]:
        """Return the lines of the script that make this user's scratch folder on the first node.

        The ranks make the folder on their nodes, with the same checks (`pretrain.platform`).
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
        if not self.is_array:
            return f"set -- {shlex.join(self.commands[0])}"
        cases = [
            f"{index}) set -- {shlex.join(command)} ;;"
            for index, command in enumerate(self.commands)
        ]
        return "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"])


def _quoted(word: str) -> str:
    """Quote an option for an #SBATCH line (_get_argument in Slurm's src/sbatch/opt.c).

    Inside quotation marks only the backslash is special: it makes the next character literal.

    Raises:
        ConfigError: The word has a line break, or is longer than sbatch's buffer.
    """
    if not word.isprintable() or len(word.encode()) > OPTION_LENGTH:
        raise ConfigError(
            f"option {word[:80]!r} of sbatch: has control characters, or more than "
            f"{OPTION_LENGTH} bytes. Choose another value"
        )
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def launcher_command(*arguments: str) -> tuple[str, ...]:
    """Return a command line that runs `launcher` with these arguments.

    The command uses the Python of this process, which compute nodes find at the same path.
    """
    return (sys.executable, "-m", "pretrain.launcher", *arguments)


def job_name(text: str) -> str:
    """Turn any text into a job name that every Slurm tool prints unchanged: "a b$(c)" -> "a_b_c".

    Letters, digits and the characters . _ + = - are kept.
    """
    return re.sub(r"[^\w.+=-]+", "_", text).strip("_-")[:NAME_LENGTH] or "run"


def check_path(key: str, path: Path) -> None:
    """Check that a job can use a directory exactly as it is named.

    Args:
        key: What the directory is, for the message: run.directory.
        path: The directory.

    Raises:
        ConfigError: Slurm cannot use the name.
    """
    text = str(path)
    if not text.isprintable():
        raise ConfigError(
            f"{key} = {text!r}: has control characters, or is not UTF-8. Choose another name"
        )
    if "\\" in text:
        raise ConfigError(
            f"{key} = {text}: Slurm drops backslashes from the path of a log file. "
            "Choose another name"
        )


# ---- Read the options with which a job was submitted ----


def lead_seconds(sbatch: Sequence[str]) -> float:
    """Return how many seconds before the time limit a job gets the signal to save; 0 if never."""
    return _number(r"--signal=(?:[BR]*:)?USR1@(\d+)", sbatch, 0)


def _number(option: str, words: Sequence[str], default: int) -> int:
    """Return the number in the first of some words that is an option, given as a pattern."""
    return next((int(m[1]) for word in words if (m := re.fullmatch(option, word))), default)


def survives_nodes(options: Sequence[str]) -> bool:
    """Return True if a job with these options of sbatch survives the death of a node."""
    return "--no-kill" in options


def excluding(options: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Return options of sbatch that also exclude these nodes."""
    begin = "--exclude="
    given = [word.removeprefix(begin) for word in options if word.startswith(begin)]
    return [*options, begin + ",".join([*given, *nodes])]


# ---- The commands of job steps, and how many tasks they have, on which nodes ----


def own_step(
    name: str, nodes: Sequence[str], options: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the command of a step that runs one process on each of these nodes beside the ranks.

    Args:
        name: The step's name.
        nodes: The nodes. The step shares their resources with the ranks.
        options: The job's options of sbatch.
        command: The command that the step runs.
    """
    has_gpus = any(option.startswith("--gpus-per-node=") for option in options)
    return [
        "srun",
        f"--job-name={name}",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--mem=0",
        *(["--gpus-per-node=0"] if has_gpus else []),
        "--overlap",
        "--no-kill",
        *command,
    ]


def named_step(step: Sequence[str], name: str, nodes: Sequence[str]) -> list[str]:
    """Return the command of a step with its name, and with its nodes if they are known.

    Args:
        step: srun with its options, then the command of each rank.
        name: The name of the step, by which `steps` finds it.
        nodes: Nodes of the job, in Slurm's order; by default srun chooses.
    """
    where = [f"--nodelist={','.join(nodes)}"] if nodes else []
    return [step[0], f"--job-name={name}", *where, *step[1:]]


def overlapping(step: Sequence[str]) -> list[str]:
    """Return the command of a step that starts while slurmctld counts another one as running."""
    return [step[0], "--overlap", *step[1:]]


def check_step(step: Sequence[str], name: str, nodes: Sequence[str], num_tasks: int) -> list[str]:
    """Return the command of a step that checks these nodes, without the command of its processes.

    Args:
        step: The command that starts the ranks (`Job.step`).
        name: The step's name.
        nodes: The nodes.
        num_tasks: The number of processes on all nodes.
    """
    # Options after --label may belong to the container, so ours go before them. If an option is
    # given twice, srun uses the last.
    end = list(step).index("--label") + 1 if "--label" in step else len(step)
    return [
        *step[:end],
        "--label",
        f"--job-name={name}",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={num_tasks}",
        "--distribution=block",
        # A process that fails must not end the others, which have results of their own.
        "--kill-on-bad-exit=0",
        "--wait=0",
        # Remains of this step on a broken node must not keep the ranks from starting.
        "--overlap",
        *step[end:],
    ]


def of_one_task(options: Sequence[str], index: int, name: str) -> list[str]:
    """Return the options of sbatch that submit one task of an array again, under its own name."""
    own = {"--array=": str(index), "--job-name=": name}
    return [
        next((begin + value for begin, value in own.items() if word.startswith(begin)), word)
        for word in options
    ]


def log_folder(options: Sequence[str]) -> Path:
    """Return the folder of the logs of a job with these options of sbatch."""
    output = next(word for word in options if word.startswith("--output="))
    return Path(output.partition("=")[2].replace("%%", "%")).parent


def nodes_of_ranks(step: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Return the node of each rank of a step that fills one node after another.

    Args:
        step: The command that starts the ranks.
        nodes: The nodes of the step, in Slurm's order.
    """
    tasks = _number(r"--ntasks-per-node=(\d+)", step, 0)
    return [node for node in nodes for _ in range(tasks)]


def num_tasks(step: Sequence[str]) -> int:
    """Return how many tasks a step has (`Job.step`)."""
    return _number(r"--ntasks=(\d+)", step, 1)

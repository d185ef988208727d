"""Run the ranks of an attempt, or of an evaluation, as one step of this process's Slurm job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from pretrain.config import ConfigError, writing
from pretrain.launcher import slurm
from pretrain.launcher.node.signals import signals_blocked
from pretrain.launcher.node.supervise import SIGNAL_CODE
from pretrain.launcher.terminal import say
from pretrain.rundir.files import open_own

KILL_SECONDS = 60.0
"""Time for Slurm to end the processes of a job step."""
FORWARDED_BY_SRUN = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that srun forwards to its tasks without asking slurmctld. It acts on most others itself:
SIGTERM, for one, makes it kill the tasks."""
FAILED_TASK = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.*)")
"""A line in which srun reports tasks that ended badly: "srun: error: n2: tasks 2-3: Killed"."""
NO_STEP = re.compile(
    r"srun: error: Unable to (?:create step|confirm allocation) for job \S+: "
    r"(?:Memory required by task is not available|Unable to contact slurm controller)"
)
"""A line in which srun gives up because slurmctld is away, or has just come back and does not know
yet that the step before is over."""
STEP_SECONDS, STEP_RETRY_SECONDS = 120.0, 5.0
"""For how long such an srun is started again, and the time between two tries."""
EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
"""The words of srun for a task that exited by itself."""
LOST_NODE = re.compile(
    r"srun: error: (?:Node failure on (?P<failed>\S+)$"
    r"|Task launch for \S+ failed on node (?P<silent>\S+): )"
)
"""A line in which srun says that a node died, or that no task can be started on it."""
IN_COLLECTIVE = b"distributed_c10d.py"
"""The file of torch in which a rank waits for the others."""
LABEL = re.compile(rb"\s*(\d+): ")
"""The beginning that `srun --label` gives to each line of a task: its rank, padded with spaces."""


class SrunRanks:
    """The ranks of one attempt as a step of this process's job; an implementation of `Ranks`.

    All output of srun goes to the log. What rank 0 and srun itself print also goes to the stdout of
    this process, which is the job's log.
    """

    def __init__(
        self,
        command: Sequence[str],
        job_id: str,
        name: str,
        environment: Mapping[str, str],
        log: Path,
        nodes: Sequence[str] = (),
    ) -> None:
        """Start the ranks.

        Args:
            command: srun with its options, then what each rank runs.
            job_id: The job this process runs in.
            name: The name of the job step, by which Slurm finds it.
            environment: Environment variables to add.
            log: The file to append the output to.
            nodes: The nodes of the job to start the ranks on, in Slurm's order; by default srun
                chooses.

        Raises:
            ConfigError: srun cannot be started.
            RunFailed: The log cannot be written.
        """
        self.failure = ""
        self.nodes: tuple[str, ...] = ()
        self.lost: tuple[str, ...] = ()
        """The nodes of the failure that died or take no task, as srun says."""
        self._job_id, self._name, self._log = job_id, name, log
        self._where = _nodes_of_ranks(command, nodes)
        self._dumped_from = 0
        options = [f"--job-name={name}", *([f"--nodelist={','.join(nodes)}"] if nodes else [])]
        self._command = [command[0], *options, *command[1:]]
        self._environment = dict(environment)
        self._tries_until = time.monotonic() + STEP_SECONDS
        self._next_try: float | None = None
        self._start()

    def _start(self) -> None:
        """Start srun and the thread that copies its output."""
        with writing(self._log):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            file = open_own(self._log, "ab")  # closed by _copy_output
            self._began_at = file.tell()
        try:
            with signals_blocked():
                # A process group of its own: a signal that is sent to the group of this process
                # must reach the ranks once, passed on by the supervisor.
                self._srun = subprocess.Popen(
                    self._command,
                    env={**os.environ, **self._environment},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            file.close()
            raise ConfigError(
                f"{self._command[0]}: cannot be started on this node ({error.strerror})"
            ) from None
        output = self._srun.stdout
        self._copier = threading.Thread(target=_copy_output, args=(output, file), daemon=True)
        self._copier.start()

    def poll(self) -> int | None:
        """Return None while srun runs, then 0 or the exit code of the rank that failed first.

        srun's own exit code is the highest of all tasks. It includes the tasks that srun killed
        after the first failure (137), so it would hide codes such as 75, which asks for a restart.
        """
        if self._next_try is not None:
            if time.monotonic() >= self._next_try:
                self._next_try = None
                self._start()
            return None
        code = self._srun.poll()
        if not code:
            return code
        # Wait until the log is complete: it says which rank failed first.
        self._copier.join(KILL_SECONDS)
        if time.monotonic() < self._tries_until and self._made_no_step():
            self._next_try = time.monotonic() + STEP_RETRY_SECONDS
            return None
        failure = _first_failure(self._log, SIGNAL_CODE - code if code < 0 else code)
        self.failure, self.nodes = failure.reason, failure.nodes
        self.lost = failure.nodes if failure.is_loss else ()
        return failure.code

    def _made_no_step(self) -> bool:
        """Return True if srun ended because slurmctld made no job step, and may make one soon."""
        said = _lines(self._log, self._began_at)
        return any(map(NO_STEP.match, said)) and not any(map(FAILED_TASK.match, said))

    def signal(self, number: int) -> None:
        """Send a signal to every rank, through srun where it forwards the signal.

        Other signals are sent by slurmctld. When it does not answer, that is printed and the ranks
        do not get the signal. SIGTERM is not waited for: after `scancel` Slurm has sent it to the
        ranks itself, and kills this process within KillWait, before which the end of the ranks
        must be recorded.
        """
        if number == signal.SIGUSR2:
            with contextlib.suppress(OSError):
                self._dumped_from = self._log.stat().st_size
        if number in FORWARDED_BY_SRUN:
            self._srun.send_signal(number)
            return
        step = (self._job_id, self._name, number)
        sending = threading.Thread(target=signal_step, args=step, daemon=True)
        sending.start()
        if number != signal.SIGTERM:
            sending.join()

    def have_failed(self) -> bool:
        """Return True if srun has said that a rank ended badly, and not ended the others yet."""
        return any(map(FAILED_TASK.match, _lines(self._log, self._began_at)))

    def stuck_nodes(self) -> tuple[str, ...]:
        """Return the nodes of ranks that wrote no stacks, or of the one outside a collective."""
        try:
            with open(self._log, "rb") as log:
                log.seek(self._dumped_from)
                stacks = log.read()
        except OSError:
            return ()
        return _stuck_nodes(stacks, self._where)

    def end(self) -> int:
        """Kill the ranks: srun has no grace period to offer for a single step.

        Returns:
            The exit code.
        """
        self.kill()
        return self.poll() or 0

    def kill(self) -> None:
        """Have srun kill the ranks, or slurmctld where srun does not."""
        self._next_try, self._tries_until = None, 0.0
        end_step(self._srun, self._job_id, self._name, KILL_SECONDS)
        self._copier.join(KILL_SECONDS)


def signal_step(job_id: str, name: str, number: int) -> None:
    """Have slurmctld send a signal to the processes of a job's step; print when it cannot.

    Args:
        job_id: The job.
        name: The step's name, from srun --job-name.
        number: The signal.
    """
    word = signal.Signals(number).name
    try:
        for step in slurm.steps(job_id, name):
            slurm.signal(step, word.removeprefix("SIG"))
    except slurm.SlurmAway as error:
        say(f"{word}: not sent to the ranks: {error}")
    except slurm.SlurmError:
        # The step is ending, alone or with its job; in the second case Slurm has sent the ranks a
        # signal itself.
        pass


def end_step(srun: subprocess.Popen[bytes], job_id: str, name: str, seconds: float) -> None:
    """Have srun kill the processes of its step, or slurmctld where srun does not.

    Args:
        srun: The running srun.
        job_id: The job.
        name: The step's name.
        seconds: How long either of them may take.
    """
    # srun answers SIGTERM by sending SIGKILL to its tasks on all nodes. SIGKILL to srun itself
    # would leave the tasks running. A SIGTERM that comes while srun starts its tasks may have no
    # effect (seen with tests/slurm on a busy machine), so more follow after 1, 2, 4, ... seconds.
    until, pause = time.monotonic() + seconds, 1.0
    while time.monotonic() < until:
        srun.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            srun.wait(min(pause, until - time.monotonic()))
            return
        pause *= 2
    signal_step(job_id, name, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        srun.wait(seconds)
    srun.kill()
    srun.wait()


def _copy_output(source: IO[bytes], log: IO[bytes]) -> None:
    """Copy srun's output to the log, and the lines of rank 0 and of srun to stdout, unlabelled."""
    with source, log:
        for line in source:
            label = LABEL.match(line)
            copies = [(log, line)]
            if label is None or label[1] == b"0":
                copies.append((sys.stdout.buffer, line[label.end() :] if label else line))
            for file, text in copies:
                # A full disk must not end this thread: srun would block on a full pipe, and with it
                # every rank that prints.
                with contextlib.suppress(OSError):
                    file.write(text)
                    file.flush()


class Failure(NamedTuple):
    """The failure that ended a job step first."""

    reason: str
    """One line for the user."""
    code: int
    """The exit code of what failed first."""
    nodes: tuple[str, ...] = ()
    """The nodes it came from; empty where more than one may have failed first."""
    is_loss: bool = False
    """True if the nodes died, or take no task."""


def _first_failure(log: Path, code: int) -> Failure:
    """Find out what ended a job step first, from what srun wrote into the log.

    srun reports tasks that end badly in the order in which they end. Where a node died, ranks of
    other nodes may end first, because their connections to it break.

    Args:
        log: The log of the step.
        code: The exit code of srun.
    """
    lines = _lines(log)
    # Lines that a rank prints have a label before them, so they cannot be taken for srun's.
    errors = [line for line in lines if line.startswith("srun: error: ")]
    tasks = [match for line in errors if (match := FAILED_TASK.match(line))]
    lost = [
        match["failed"] or match["silent"] for each in errors if (match := LOST_NODE.match(each))
    ]
    if lost:
        nodes = tuple(dict.fromkeys(lost))
        why = next(line for line in errors if LOST_NODE.match(line))
        where = f"{', '.join(nodes)} failed ({why.removeprefix('srun: error: ')}); see {log}"
        first = EXIT_CODE.fullmatch(tasks[0]["how"]) if tasks else None
        return Failure(where, int(first[1]) if first else code or 1, nodes, is_loss=True)
    for task in tasks[:1]:
        where = f"rank {task['ranks']} on {task['node']}"
        exited = EXIT_CODE.fullmatch(task["how"])
        if exited is None:
            how = f"{where} was ended ({task['how']}); see {log}"
            return Failure(how, code, (task["node"],))
        # A bug ends ranks on all nodes; what one node does wrong shows on its ranks alone.
        alike = {each["node"] for each in tasks if each["how"] == task["how"]}
        reason = f"{where} ended with exit code {exited[1]}; see {log}"
        return Failure(reason, int(exited[1]), tuple(alike) if len(alike) == 1 else ())
    # The last: a step may have been refused before it was created.
    why = f" ({errors[-1].removeprefix('srun: error: ')})" if errors else ""
    return Failure(f"srun ended with exit code {code}{why}; see {log}", code)


def _lines(log: Path, begin: int = 0) -> list[str]:
    """Return the lines of a log from a byte on; none when it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _nodes_of_ranks(command: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Return the node of each rank, for an srun that fills one node after the other.

    Args:
        command: The srun command line.
        nodes: The nodes of the step, in Slurm's order.
    """
    found = (re.fullmatch(r"--ntasks-per-node=(\d+)", word) for word in command)
    tasks = next((int(match[1]) for match in found if match), 0)
    return [node for node in nodes for _ in range(tasks)]


def _stuck_nodes(stacks: bytes, where: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes of the ranks that hang by themselves.

    Args:
        stacks: What the ranks wrote since they were asked for their stacks, with labels.
        where: The node of each rank.
    """
    said: dict[int, bytes] = {}
    for line in stacks.splitlines():
        if label := LABEL.match(line):
            said[int(label[1])] = said.get(int(label[1]), b"") + line[label.end() :] + b"\n"
    wrote = {rank for rank, text in said.items() if b"most recent call first" in text}
    alone = [rank for rank in range(len(where)) if rank not in wrote]
    if not alone:
        # All answer: then the culprit is the one that the others wait for.
        alone = [rank for rank in wrote if IN_COLLECTIVE not in said[rank]]
        alone = alone if len(alone) == 1 else []
    if not wrote or len(alone) == len(where):
        return ()
    return tuple(dict.fromkeys(where[rank] for rank in sorted(alone)))

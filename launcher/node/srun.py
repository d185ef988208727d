"""Run the ranks of an attempt, or of an evaluation, as one step of this process's Slurm job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

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
EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
"""How srun words a task that exited by itself."""
LABEL = re.compile(rb"\s*(\d+): ")
"""What `srun --label` puts before each line of a task: its rank, padded with spaces."""


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
    ) -> None:
        """Start the ranks.

        Args:
            command: srun with its options, then what each rank runs.
            job_id: The job this process runs in.
            name: The name of the job step, by which Slurm finds it.
            environment: Environment variables to add.
            log: The file to append the output to.

        Raises:
            ConfigError: srun cannot be started.
            RunFailed: The log cannot be written.
        """
        self.failure = ""
        self._job_id, self._name, self._log = job_id, name, log
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            file = open_own(log, "ab")  # closed by _copy_output
        try:
            with signals_blocked():
                # A process group of its own: a signal that is sent to the group of this process
                # must reach the ranks once, passed on by the supervisor.
                self._srun = subprocess.Popen(
                    [command[0], f"--job-name={name}", *command[1:]],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            file.close()
            raise ConfigError(
                f"{command[0]}: cannot be started on this node ({error.strerror})"
            ) from None
        output = self._srun.stdout
        self._copier = threading.Thread(target=_copy_output, args=(output, file), daemon=True)
        self._copier.start()

    def poll(self) -> int | None:
        """Return None while srun runs, then 0 or the exit code of the rank that failed first.

        srun's own exit code is the highest of all tasks. It includes the tasks that srun killed
        after the first failure (137), so it would hide codes such as 75, which asks for a restart.
        """
        code = self._srun.poll()
        if not code:
            return code
        # Wait until the log is complete: it says which rank failed first.
        self._copier.join(KILL_SECONDS)
        self.failure, code = _first_failure(self._log, SIGNAL_CODE - code if code < 0 else code)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to every rank, through srun where it forwards the signal.

        Other signals are sent by slurmctld. When it does not answer, that is printed and the ranks
        do not get the signal.
        """
        if number in FORWARDED_BY_SRUN:
            self._srun.send_signal(number)
            return
        name = signal.Signals(number).name
        try:
            for step in slurm.steps(self._job_id, self._name):
                slurm.signal(step, name.removeprefix("SIG"))
        except slurm.SlurmAway as error:
            say(f"{name}: not sent to the ranks: {error}")
        except slurm.SlurmError:
            # The step is ending, alone or with its job; in the second case Slurm has sent the ranks
            # a signal itself.
            pass

    def end(self) -> int:
        """Kill the ranks: srun has no grace period to offer for a single step.

        Returns:
            The exit code.
        """
        self.kill()
        return self.poll() or 0

    def kill(self) -> None:
        """Have srun kill the ranks, or slurmctld where srun does not."""
        # srun answers SIGTERM by sending SIGKILL to its tasks on all nodes. SIGKILL to srun itself
        # would leave the tasks running.
        self._srun.terminate()
        try:
            self._srun.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(KILL_SECONDS)
            self._srun.kill()
            self._srun.wait()
        self._copier.join(KILL_SECONDS)


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


def _first_failure(log: Path, code: int) -> tuple[str, int]:
    """Find out what ended a job step first, from what srun wrote into the log.

    srun reports tasks that end badly in the order in which they end.

    Args:
        log: The log of the step.
        code: The exit code of srun.

    Returns:
        What failed first, in one line, and its exit code.
    """
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    # Lines that a rank prints have a label before them, so they cannot be taken for srun's.
    errors = [line for line in lines if line.startswith("srun: error: ")]
    for line in errors:
        if match := FAILED_TASK.match(line):
            where = f"rank {match['ranks']} on {match['node']}"
            if exited := EXIT_CODE.fullmatch(match["how"]):
                return f"{where} ended with exit code {exited[1]}; see {log}", int(exited[1])
            return f"{where} was ended ({match['how']}); see {log}", code
    why = f" ({errors[0].removeprefix('srun: error: ')})" if errors else ""
    return f"srun ended with exit code {code}{why}; see {log}", code

"""A run on this machine: its processes started together and ended together, and started again when they failed.

Why not torchrun: it turns every exit code into 1, adds a traceback of its own to a plain message about bad input, and
costs an import of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from pretrain.config import ConfigError, RunConfig, dump_config
from pretrain.launcher.node.ranks import signals_held
from pretrain.launcher.node.supervise import Signals, Supervisor
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import Owner
from pretrain.rundir.checkpoints import MANIFEST, checkpoint_step, complete_checkpoints
from pretrain.rundir.lock import Attempt
from pretrain.rundir.paths import RunPaths, claim_version
from pretrain.rundir.states import ExitCode

POLL_SECONDS = 0.02
KILL_AFTER_SECONDS = 10.0  # between SIGTERM and SIGKILL
LOG_LINES_SHOWN = 20
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ASK_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run_locally(
    config: RunConfig,
    nproc: int,
    command: Sequence[str],
    arguments: Sequence[str],
    resume: str | None = None,
) -> int:
    """Runs `nproc` copies of `command` (`pretrain train`) with `arguments`, which name this config, until the run is over.

    Failed or hung ranks are started again from the newest checkpoint, within recovery.max_restarts; so are those that
    saved on SIGUSR1, which is passed on. SIGINT, SIGTERM and SIGHUP are passed on too, so that the run can save and stop; a
    second one ends it. Returns the exit code of the last attempt. Raises ConfigError, RunBusy among them.
    """
    run, logs = config.directory, RunPaths(config.directory).logs
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.directory: cannot make {logs} ({error.strerror}). Choose another"
        ) from None
    resume_from = _Resume(run, resume)
    attempt = Attempt.begin(run, Owner.here(num_processes=nproc))
    claim_version(run)
    first = attempt.number

    def start(attempt: Attempt) -> LocalStep:
        again = attempt.number > first
        frozen = attempt.directory / "config.toml"
        if again:  # the user may have edited the file since
            frozen.write_text(dump_config(config))
        argv = [*command, *([str(frozen)] if again else arguments), *resume_from.arguments(again)]
        return LocalStep(
            argv, nproc, logs, {"PRETRAIN_ATTEMPT": str(attempt.directory)}, append=again
        )

    with Signals(*ASK_TO_END) as signals:
        supervisor = Supervisor(config, signals, lambda record: record.number >= first, local=True)
        while (end := supervisor.make_attempt(attempt, start)).again:
            attempt = Attempt.begin(run, Owner.here(num_processes=nproc))
        return end.code


class _Resume:
    """The --resume of each attempt: the user's for the first, later what this series of attempts has saved."""

    def __init__(self, run: Path, first: str | None) -> None:
        self._run, self._first = run, first
        self._before = self._saved()

    def arguments(self, again: bool) -> list[str]:
        first = ["--resume", self._first] if self._first is not None else []
        if not again or self._first in (None, "auto"):
            return first
        saved = self._saved() - self._before
        if saved:
            # Not "auto": an older branch of the run may have gone further.
            newest = max((path for path, _ in saved), key=lambda p: checkpoint_step(p.name) or 0)
            return ["--resume", str(newest)]
        return ["--resume", "auto"] if self._first == "none" else first

    def _saved(self) -> set[tuple[Path, int]]:
        found = complete_checkpoints(self._run)
        return {(path, (path / MANIFEST).stat().st_mtime_ns) for path in found}


class LocalStep:
    """`nproc` copies of `command`, told their places through torch's usual environment variables.

    Rank 0 writes to this process's own stdout and stderr, rank r to `log_directory`/rank-<r>.log (after what is there,
    with `append`). When one fails the others get SIGTERM and, 10 s later, SIGKILL; when they were asked to end, each has
    those 10 s for itself. Leaves no process behind, not even when this one is killed (Linux).
    """

    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        log_directory: Path,
        environment: Mapping[str, str] | None = None,
        append: bool = False,
    ) -> None:
        self.failure = ""
        self._logs = log_directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked, self._deadline = False, 0.0
        self._failed: int | None = None
        port, die_with_parent = _free_port(), _die_with_parent()
        try:
            with signals_held():
                for rank in range(nproc):
                    place = _place(rank, nproc, port) | dict(environment or {})
                    log = open(self._log(rank) if rank else os.devnull, "ab" if append else "wb")  # noqa: SIM115
                    with log:
                        self._processes.append(
                            _start(command, place, log if rank else None, die_with_parent)
                        )
        except BaseException:
            self.kill()
            raise

    def poll(self) -> int | None:
        """None while it runs; then 0, or the exit code of the first process that failed (128 + n for signal n)."""
        codes = [process.poll() for process in self._processes]
        if self._failed is None and any(codes):
            self._failed = next(rank for rank, code in enumerate(codes) if code)
            asked = self._asked or codes[self._failed] in (ExitCode.RESTART, ExitCode.STOPPED)
            self._deadline = time.monotonic() + (KILL_AFTER_SECONDS if asked else 0)
        if None in codes and (self._failed is None or time.monotonic() < self._deadline):
            return None
        self.end()
        if self._failed is None:
            return 0
        code = self._processes[self._failed].returncode
        self._report(self._failed, code)
        return _exit_code(code)

    def signal(self, number: int) -> None:
        """To every rank that runs."""
        self._asked |= number in ASK_TO_END
        for process in self._processes:
            process.send_signal(number)

    def end(self) -> int:
        """SIGTERM to those that run, 10 s later SIGKILL; the highest exit code of all."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + KILL_AFTER_SECONDS
        while time.monotonic() < deadline and any(
            process.poll() is None for process in self._processes
        ):
            time.sleep(POLL_SECONDS)
        self.kill()
        return max(_exit_code(process.returncode) for process in self._processes)

    def kill(self) -> None:
        """SIGKILL to what is left of every rank's process group, its workers included."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def _report(self, rank: int, code: int) -> None:
        """Says which rank failed first, with the end of its log; rank 0 has none, it wrote to the terminal."""
        self.failure = f"rank {rank} " + (
            f"ended with exit code {code}"
            if code > 0
            else f"was ended by {signal.Signals(-code).name}"
        )
        if (
            code in (ExitCode.RESTART, ExitCode.STOPPED)
            or code == self._processes[0].returncode > 0
        ):
            return  # not a failure, or rank 0 has said the same on the terminal
        say(self.failure + (f"; the end of {self._log(rank)}:" if rank else ""))
        if rank:
            lines = self._log(rank).read_text(errors="replace").splitlines()
            say("\n".join(lines[-LOG_LINES_SHOWN:]))


def _place(rank: int, nproc: int, port: int) -> dict[str, str]:
    threads = (
        max(1, len(os.sched_getaffinity(0)) // nproc) if hasattr(os, "sched_getaffinity") else 1
    )
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **{k: str(v) for k, v in place.items()}}


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes] | None,
    arrange: Callable[[], None] | None,
) -> subprocess.Popen[bytes]:
    # A process group of its own: Ctrl-C on the terminal then reaches the launcher alone, which passes it on once, and
    # a rank can be killed together with its data loader's workers.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,
        preexec_fn=arrange,
    )


def _die_with_parent() -> Callable[[], None] | None:
    """What a child runs before its command, so that the kernel kills it when this process is gone (Linux alone)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return arrange


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

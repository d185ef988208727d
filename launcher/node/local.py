"""Train on this machine: start a process per rank, end them together, and restart them on failure.

This is not torchrun, because torchrun turns every exit code into 1, prints a traceback of its own
after a plain message about bad input, and imports torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import selectors
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from pretrain.config import ConfigError, RunConfig, dump_config
from pretrain.launcher import terminal
from pretrain.launcher.node.signals import Signals, signals_blocked
from pretrain.launcher.node.supervise import SIGNAL_CODE, Supervisor
from pretrain.launcher.terminal import plain_output, say
from pretrain.rundir.attempts import Owner
from pretrain.rundir.checkpoints import saved_checkpoints
from pretrain.rundir.files import make_directory, open_own, replace_file
from pretrain.rundir.jobs import LocalLaunch, write_local_launch
from pretrain.rundir.lock import Attempt
from pretrain.rundir.paths import ExitCode, RunPaths, check_apart, claim_version
from pretrain.rundir.trust import check_trusted

# ---- Copy what rank 0 prints to the terminal and, as plain text, into its log ----
# Rank 0 draws a progress bar where it finds a terminal, so it is given one where this process has
# one. The log gets whole lines without what steers a terminal, and the bar now and then.


CHUNK_BYTES = 64 * 1024
"""Bytes that are read at a time, and the longest line."""
LOOK_SECONDS = 0.1
"""From one look if the rank has ended to the next."""
BAR_SECONDS = 10.0
"""The least time between two states of a progress bar in the log."""
PIPE_BYTES = 1024 * 1024
"""The size of a pipe, which the rank may fill while this process is stopped by Ctrl-Z."""
F_SETPIPE_SZ = 1031
"""The command of fcntl(2), from linux/fcntl.h; Python's fcntl has the name on Linux alone."""
STREAMS = (1, 2)
"""The descriptors of stdout and stderr."""
_STEERING = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])"
)
"""Escape sequences of ECMA-48: colours and cursor, titles of windows, and all others."""


class RankOutput:
    """The ends of rank 0's stdout and stderr, and the thread that copies what comes out of them."""

    def __init__(self, log: IO[bytes]) -> None:
        """Make the ends for the rank: a terminal where this process has one, else a pipe.

        Args:
            log: The rank's log, unbuffered; closed by `close`.
        """
        ends = [_terminal_like(stream) or _pipe() for stream in STREAMS]
        self.ends = tuple(write for _, write in ends)
        """The descriptors that the rank gets as stdout and stderr."""
        self._copies = {
            read: (stream, _PlainLines(log)) for stream, (read, _) in zip(STREAMS, ends)
        }
        self._log = log
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True, name="rank 0's output")

    def start(self) -> None:
        """Start to copy, once all ranks have been started: a fork copies no thread."""
        self._close_ends()
        self._thread.start()

    def close(self) -> None:
        """Copy what is left, when the rank has ended, and close everything.

        Processes that the rank has left behind may hold its ends open; they are not waited for.
        """
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._close_ends()
        for read, (_, lines) in self._copies.items():
            lines.flush()
            os.close(read)
        self._copies = {}
        self._log.close()

    def _close_ends(self) -> None:
        for end in self.ends:
            os.close(end)
        self.ends = ()

    def _copy(self) -> None:
        """Copy until both streams have ended, or the rank has and nothing is left."""
        # Not select(2), which refuses descriptors from 1,024 on.
        with selectors.DefaultSelector() as left:
            for read in self._copies:
                left.register(read, selectors.EVENT_READ)
            while left.get_map():
                was_over = self._over.is_set()
                ready = left.select(0 if was_over else LOOK_SECONDS)
                if was_over and not ready:
                    return
                for key, _ in ready:
                    if not self._copy_chunk(key.fd):
                        left.unregister(key.fd)

    def _copy_chunk(self, read: int) -> bool:
        """Copy what one stream holds now.

        Returns:
            False if the stream has ended.
        """
        try:
            chunk = os.read(read, CHUNK_BYTES)
        except OSError:
            # EIO: the last process with the other end of a terminal has closed it.
            chunk = b""
        stream, lines = self._copies[read]
        if chunk:
            _resize(read, stream)
            _show(stream, chunk)
            lines.feed(chunk)
        return bool(chunk)


class _PlainLines:
    """Writes what one stream carries to a log: whole lines of plain text."""

    def __init__(self, log: IO[bytes]) -> None:
        self._log, self._rest, self._bar_at = log, b"", 0.0
        self._is_refused = False

    def feed(self, chunk: bytes) -> None:
        """Write the lines that are complete by now, and a bar that was drawn anew."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._write(line)
        # Each state of a bar begins with a carriage return, so all but the last are complete.
        *states, last = self._rest.split(b"\r")
        if states:
            self._rest = b"\r" + last
            bars = [state for state in states if state.strip()]
            if bars and time.monotonic() - self._bar_at >= BAR_SECONDS:
                self._bar_at = time.monotonic()
                self._write(bars[-1])
        if len(self._rest) > CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rest, a line without an end."""
        rest, self._rest = self._rest, b""
        if rest.strip():
            self._write(rest)

    def _write(self, line: bytes) -> None:
        # Of a progress bar, keep the last state: each one is drawn over the one before.
        text = line.rstrip(b"\r").rpartition(b"\r")[2]
        try:
            self._log.write(plain_output(_STEERING.sub(b"", text).rstrip(b" ")) + b"\n")
        except OSError as error:
            # On a full disk the terminal still gets the line, and the run goes on.
            if not self._is_refused:
                say(f"{self._log.name}: cannot be written ({error.strerror}); lines are missing")
            self._is_refused = True


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe: what is read from, and what is written to."""
    read, write = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(write, F_SETPIPE_SZ, PIPE_BYTES)
    return read, write


def _terminal_like(stream: int) -> tuple[int, int] | None:
    """Return the ends of a terminal like this process's, or None if `stream` is no terminal."""
    try:
        if not os.isatty(stream):
            return None
        read, write = os.openpty()
        attributes = termios.tcgetattr(write)
        # The real terminal translates line ends.
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(write, termios.TCSANOW, attributes)
    except OSError:
        return None
    _resize(read, stream)
    return read, write


def _resize(end: int, stream: int) -> None:
    """Give a terminal that was made for the rank the size of this process's, if both are such."""
    with contextlib.suppress(OSError):
        if os.isatty(end):
            termios.tcsetwinsize(end, termios.tcgetwinsize(stream))


def _show(stream: int, chunk: bytes) -> None:
    """Write to the terminal; one that was closed must not end the run, so it is lost then."""
    with contextlib.suppress(OSError):
        while chunk:
            try:
                chunk = chunk[os.write(stream, chunk) :]
            except BlockingIOError:
                with selectors.DefaultSelector() as writable:
                    writable.register(stream, selectors.EVENT_WRITE)
                    writable.select(1.0)


POLL_SECONDS = 0.02
"""Time between two looks at processes that were asked to end."""
KILL_AFTER_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL."""
LOG_LINES_SHOWN = 20
"""Lines of a failed rank's log that are repeated on the terminal."""
PR_SET_PDEATHSIG = 1
"""The option of prctl(2), from linux/prctl.h."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that the launcher passes on to the ranks; each asks them to end."""


def run_locally(
    config: RunConfig,
    nproc: int,
    command: Sequence[str],
    arguments: Sequence[str] | None,
    resume: str | None = None,
    signals: Signals | None = None,
    launch: LocalLaunch | None = None,
) -> int:
    """Run `nproc` copies of `command` with `arguments` until the run is over.

    Ranks that fail or hang are started again from the newest checkpoint, at most
    recovery.max_restarts times without progress. Ranks that saved on SIGUSR1 are started again as
    well. SIGINT, SIGTERM and SIGHUP are passed on, so that the run can save and stop; a second one
    ends the ranks, at once if it is SIGINT.

    Args:
        config: The run.
        nproc: Number of ranks.
        command: What each rank runs, up to its subcommand: [python, "-m", "pretrain", "train"].
        arguments: The config file and its --set options, which give `config`; None gives the ranks
            `config` as it is, whatever the files say by now.
        resume: The value of --resume for the first attempt; None leaves the option out.
        signals: Records PASSED_ON already, and none came so far; None records them from now on.
        launch: What the user called, for RUN/launch/local.json.

    Returns:
        The exit code of the last attempt.

    Raises:
        ConfigError: The run's directory cannot be made, has another layout, or lies inside
            another run's.
        RunBusy: Another process trains this run.
        RunFailed: The disk refused.
    """
    run, logs = config.directory, RunPaths(config.directory).logs
    try:
        check_trusted(run)
        check_apart(run)
        make_directory(logs)
    except OSError as error:
        raise ConfigError(
            f"run.directory: cannot create {logs} ({error.strerror}). Choose another directory"
        ) from None
    resume_option = _ResumeOption(run, resume)
    # Before the attempt begins: whoever sees it may send a signal.
    with contextlib.nullcontext(signals) if signals else Signals(*PASSED_ON) as signals:
        attempt = Attempt.begin(run, Owner.here(num_processes=nproc))
        claim_version(run)
        _record(run, launch)
        first = attempt.number

        def start(attempt: Attempt) -> LocalRanks:
            """Start the ranks of an attempt; after the first one, with the config as it was."""
            again = attempt.number > first
            config_arguments = None if again else arguments
            if config_arguments is None:
                # The user may have edited the config file, or a base of it, since it was read.
                frozen = attempt.directory / "config.toml"
                replace_file(frozen, dump_config(config))
                config_arguments = [str(frozen)]
            return LocalRanks(
                [*command, *config_arguments, *resume_option.arguments(again)],
                nproc,
                RunPaths(run),
                {
                    "PRETRAIN_ATTEMPT": str(attempt.directory),
                    "PRETRAIN_RENDEZVOUS": str(attempt.directory),
                },
                attempt.number,
            )

        supervisor = Supervisor(config, signals, lambda record: record.number >= first, local=True)
        while (end := supervisor.make_attempt(attempt, start)).again:
            attempt = Attempt.begin(run, Owner.here(num_processes=nproc))
        return end.code


def _record(run: Path, launch: LocalLaunch | None) -> None:
    """Write what the user called, which no run fails for."""
    try:
        if launch is not None:
            write_local_launch(run, launch)
    except OSError as error:
        say(f"{RunPaths(run).local_launch}: cannot be written ({error.strerror}); the run goes on")


class _ResumeOption:
    """The --resume option of each attempt.

    The first attempt gets the user's. A restart must not start from there again once this series of
    attempts has saved a checkpoint: then `auto` goes on from it, because what does not lead to it
    was set aside, and falls back where it is damaged.
    """

    def __init__(self, run: Path, first: str | None) -> None:
        self._run, self._first = run, first
        self._before = self._saved()

    def arguments(self, again: bool) -> list[str]:
        """Return the option as command-line arguments.

        Args:
            again: True for a restart.
        """
        first = ["--resume", self._first] if self._first is not None else []
        # `auto`, the default of `pretrain train`, finds the newest checkpoint by itself.
        if not again or self._first in (None, "auto"):
            return first
        if self._saved() - self._before or self._first == "none":
            return ["--resume", "auto"]
        return first

    def _saved(self) -> set[str]:
        """Return the ids of the run's complete checkpoints."""
        return {saved.lineage.id for saved in saved_checkpoints(self._run) if saved.lineage}


class LocalRanks:
    """The ranks of one attempt as processes of this machine; an implementation of `Ranks`.

    Every rank writes to RUN/logs/rank-<rank>.log, to which all attempts append; rank 0 also to the
    stdout and stderr of this process.
    When a rank fails, the others get SIGTERM and, 10 s later, SIGKILL. No process is left behind,
    on Linux not even when this process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        paths: RunPaths,
        environment: Mapping[str, str] | None = None,
        attempt: int = 1,
    ) -> None:
        """Start the ranks.

        Args:
            command: What each rank runs.
            nproc: Number of ranks.
            paths: The run's paths. RUN/logs must exist.
            environment: Environment variables to add, the same for all ranks.
            attempt: The attempt's number, which its part of the logs begins with.
        """
        self.failure = ""
        # One machine: there is no other node to choose.
        self.nodes: tuple[str, ...] = ()
        self._paths, self._attempt = paths, attempt
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output: RankOutput | None = None
        self._asked_to_end, self._deadline = False, 0.0
        self._failed_rank: int | None = None
        die_with_parent = _die_with_parent()
        try:
            with signals_blocked():
                for rank in range(nproc):
                    variables = _rank_environment(rank, nproc) | dict(environment or {})
                    with contextlib.ExitStack() as stack:
                        log = open_own(paths.rank_log(rank), "ab", buffering=0)
                        if rank:
                            stack.enter_context(log)
                            streams: tuple[int, ...] = (log.fileno(), log.fileno())
                        else:
                            self._output = RankOutput(log)
                            streams = self._output.ends
                        # A full disk is found by what the run needs.
                        with contextlib.suppress(OSError):
                            log.write(terminal.head(attempt))
                        process = _start(command, variables, streams, die_with_parent)
                    self._processes.append(process)
            assert self._output is not None
            self._output.start()
        except BaseException:
            self.kill()
            raise

    def poll(self) -> int | None:
        """Return None while the ranks run, then 0 or the exit code of the rank that failed first.

        The first failure also ends the other ranks, which wait for the failed one in a collective
        operation and would never end.
        """
        codes = [process.poll() for process in self._processes]
        if self._failed_rank is None and any(codes):
            self._failed_rank = next(rank for rank, code in enumerate(codes) if code)
            # Ranks that were asked to end, or that saved together, end one by one within moments;
            # SIGTERM would disturb them, so they get some time to do it by themselves.
            code = codes[self._failed_rank]
            is_ending = self._asked_to_end or code in (ExitCode.RESTART, ExitCode.STOPPED)
            self._deadline = time.monotonic() + (KILL_AFTER_SECONDS if is_ending else 0)
        if None in codes and (self._failed_rank is None or time.monotonic() < self._deadline):
            return None
        self.end()
        if self._failed_rank is None:
            return 0
        code = self._processes[self._failed_rank].returncode
        self._report(self._failed_rank, code)
        return _exit_code(code)

    def signal(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        self._asked_to_end |= number in PASSED_ON
        for process in self._processes:
            process.send_signal(number)

    def have_failed(self) -> bool:
        """Return False: `poll` itself ends the others when one fails."""
        return False

    def stuck_nodes(self) -> tuple[str, ...]:
        """Return nothing: there is no other node to choose."""
        return ()

    def end(self) -> int:
        """Send SIGTERM to every rank that runs and, 10 s later, SIGKILL to those that are left.

        Returns:
            The highest exit code of all ranks.
        """
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + KILL_AFTER_SECONDS
        while time.monotonic() < deadline and any(
            process.poll() is None for process in self._processes
        ):
            time.sleep(POLL_SECONDS)
        # Also when all ranks have ended: their data loader workers may be left.
        self.kill()
        return max(_exit_code(process.returncode) for process in self._processes)

    def kill(self) -> None:
        """Send SIGKILL to every rank's process group, data loader workers included."""
        for process in self._processes:
            # ProcessLookupError: the whole group has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        if self._output is not None:
            self._output.close()
            self._output = None

    def _report(self, rank: int, code: int) -> None:
        """Print which rank failed first, and the end of its log.

        Args:
            rank: The rank that failed first.
            code: Its exit code as subprocess gives it, -n for signal n.
        """
        how = (
            f"ended with exit code {code}"
            if code > 0
            else f"was ended by {signal.Signals(-code).name}"
        )
        self.failure = f"rank {rank} {how}"
        if code in (ExitCode.RESTART, ExitCode.STOPPED):
            # The rank saved a checkpoint, which is no failure.
            return
        if code == self._processes[0].returncode > 0:
            # Rank 0 failed in the same way, and its message is on the terminal already.
            return
        if not rank:
            say(self.failure)
            return
        log = self._paths.rank_log(rank)
        say(f"{self.failure}; the end of {log}:")
        found = terminal.find_attempt(log, self._attempt)
        text = log.read_bytes()[found[0] if found else 0 :].decode(errors="replace")
        lines = text.splitlines()
        say("\n".join(lines[-LOG_LINES_SHOWN:]))


def _rank_environment(rank: int, nproc: int) -> dict[str, str]:
    """Return the environment of a rank, with the variables that say which one it is.

    A MASTER_PORT of the user's is dropped: a second run on this machine would meet the first one
    there. Rank 0 finds a free port and publishes it.

    OMP_NUM_THREADS divides the cores that this process may use, unless the user has set it: by
    default every rank would start a thread per core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else nproc
    distributed = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
    }
    # Modules in the working directory are the ranks' only if they are this process's, which they
    # are under `python -m`: others may have put a json.py there.
    here = {"", os.getcwd()} & set(sys.path)
    safe_path = {} if here else {"PYTHONSAFEPATH": "1"}
    return {
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        # Python keeps back what it prints to a file or a pipe, and a killed rank would lose it.
        "PYTHONUNBUFFERED": "1",
        **safe_path,
        **{name: value for name, value in os.environ.items() if name != "MASTER_PORT"},
        **{name: str(value) for name, value in distributed.items()},
    }


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: tuple[int, ...],
    before_exec: Callable[[], None] | None,
) -> subprocess.Popen[bytes]:
    """Start a rank.

    Args:
        command: What it runs.
        environment: All of its environment variables.
        streams: The descriptors that become its stdout and stderr.
        before_exec: Called in the new process before `command` replaces it.
    """
    # A process group of its own, for two reasons. Ctrl-C on the terminal then reaches the launcher
    # alone, which passes it on once; and a rank can be killed together with its data loader
    # workers.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        process_group=0,
        preexec_fn=before_exec,
    )


def _die_with_parent() -> Callable[[], None] | None:
    """Return a function that makes the process that calls it die with this one.

    Linux offers this through prctl(2); elsewhere None is returned, and a launcher that is killed by
    SIGKILL leaves its ranks behind.
    """
    if not sys.platform.startswith("linux"):
        return None
    # Loaded here and not in the child: after a fork, little may be done safely before exec.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def die_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # If the parent died before prctl took effect, no signal will come.
        if os.getppid() != parent:
            os._exit(1)

    return die_with_parent


def _exit_code(code: int) -> int:
    """Return subprocess's -n for a process that signal n ended as a shell does, 128 + n."""
    return SIGNAL_CODE - code if code < 0 else code

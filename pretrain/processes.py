"""How the process of a command runs and ends, and the processes that it starts.

They are reached by Ctrl-C once, and die with this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from pretrain.startup import leave_on_ctrl_c, raise_on_ctrl_c

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end; each is passed on to what it runs."""
POLL_SECONDS = 0.05
"""Time between two looks at processes."""
KILL_AFTER_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL."""
PR_SET_PDEATHSIG = 1
"""The option of prctl(2), from linux/prctl.h."""


class Stopped(BaseException):
    """A user asked the command to end. Like KeyboardInterrupt it is not an Exception, so that code
    that handles errors does not swallow it."""


class Processes:
    """Start programs on behalf of a command, and end them when the command is asked to end.

    A signal that comes while a command runs is passed on to it, so that training can save; it
    raises Stopped where no command runs, the first one alone.
    """

    def __init__(self) -> None:
        self.launches: list[list[str]] = []
        """The commands that were started, in order."""
        self.stopped = False
        """True once a signal has asked to end."""
        self._running: list[subprocess.Popen[bytes]] = []
        self._busy = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the `with` block."""
        # Where a signal is ignored, as SIGHUP under nohup, it stays ignored.
        heard = [s for s in PASSED_ON if signal.getsignal(s) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in heard}
        try:
            yield
        finally:
            # A signal that comes in between is recorded, as while a command runs.
            self._busy = True
            for number, handler in before.items():
                signal.signal(number, handler)
            self._busy = False

    def run(self, commands: Sequence[Sequence[str]]) -> int:
        """Run commands at the same time until all have ended.

        When one fails, the others are ended as well: they wait for it and would never end.

        Args:
            commands: The arguments of each.

        Returns:
            0, or the exit code of the one that failed first; 128 + n for signal n.

        Raises:
            Stopped: A signal came before they were started.
        """
        if self.stopped:
            raise Stopped
        bind, self._running = dies_with_parent(), []
        # From here on a signal is recorded, and is no exception that would lose a process.
        self._busy = True
        try:
            for command in commands:
                self.launches.append(list(command))
                # In a process group of its own: Ctrl-C on the terminal reaches this process alone,
                # which passes it on once.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                    preexec_fn=bind,
                )
                self._running.append(process)
            if self.stopped:
                self._end()
            code = self._wait()
        finally:
            self._end()
            self._busy = False
        return 128 - code if code < 0 else code

    def _wait(self) -> int:
        """Return 0 when all have ended well, or the exit code of the first that did not."""
        while True:
            codes = [process.poll() for process in self._running]
            if failed := [code for code in codes if code]:
                return failed[0]
            if None not in codes:
                return 0
            time.sleep(POLL_SECONDS)

    def _end(self) -> None:
        """End what still runs: with SIGTERM, and SIGKILL after KILL_AFTER_SECONDS."""
        terminate(self._running, KILL_AFTER_SECONDS)
        for process in self._running:
            process.kill()
            process.wait()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        # The command is on its way out already after the first one, and may be writing something.
        is_first, self.stopped = not self.stopped, True
        if is_first and not self._busy:
            raise Stopped
        for process in self._running:
            process.send_signal(number)


def terminate(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Send SIGTERM to processes, and wait until they have ended, for `seconds` at most."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(each.poll() is None for each in processes):
        time.sleep(POLL_SECONDS)


def dies_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a function that makes the process that calls it get a signal when this one dies.

    It is for subprocess's preexec_fn.
    """
    # Loaded here and not in the child: after a fork, little may be done safely before exec.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def die_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, number)
        # If the parent died before prctl took effect, no signal will come.
        if os.getppid() != parent:
            os._exit(1)

    return die_with_parent


T = TypeVar("T")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread, which does not keep this process from ending.

    Returns:
        What it will return, or raise.
    """
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return answer


class Repeater(threading.Thread):
    """Call a function at once and then every few seconds, in a thread, until `stop`."""

    def __init__(self, seconds: float, function: Callable[[], object]) -> None:
        # A daemon thread, so that Ctrl-C does not wait for a call in progress.
        super().__init__(daemon=True)
        self._seconds, self._function, self._over = seconds, function, threading.Event()
        self._result: Any = None

    def run(self) -> None:
        """Run the thread; threading.Thread.start calls this."""
        while True:
            self._result = self._function()
            if self._over.wait(self._seconds):
                return

    def new(self) -> Any:
        """Return the result of the newest call that ended since `new` was last used, or None."""
        result, self._result = self._result, None
        return result

    def stop(self, seconds: float | None = None) -> None:
        """Stop calling, and wait for a call in progress, for `seconds` at most."""
        self._over.set()
        if self.is_alive():
            self.join(seconds)


@contextlib.contextmanager
def signals_blocked(*numbers: int) -> Iterator[None]:
    """Start processes inside this context with these signals blocked.

    A child inherits the signal mask of this thread through fork and exec. A signal that arrives
    while it is blocked stays pending.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- A process beside training -------------------------------------------------------------------
SENT_TO_ALL = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
"""What a launcher, Slurm or a terminal sends to all processes of a job. The training process acts
on them; the one beside it has to finish what it is doing."""


def start_beside(
    module: str, *arguments: str, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[str]:
    """Start `main()` of a module in a process beside training, whose signals it does not hear.

    Args:
        module: The module's name. Its main() gets the file to which it writes answers.
        arguments: sys.argv[1:] of the process.
        pass_fds: Descriptors that it inherits.

    Returns:
        The process, with pipes of text for stdin and for its answers, as its stdout.
    """
    # A library or a sitecustomize.py may print, so answers have a pipe of their own.
    answers, theirs = os.pipe()
    # Not `-m`, which would look in the current directory first; that is where users keep scripts.
    program = (
        f"import sys; sys.path.append(sys.argv.pop()); import {module} as m; "
        'm.main(open(int(sys.argv.pop()), "w"))'
    )
    root = str(Path(__file__).parents[1])
    try:
        with signals_blocked(*SENT_TO_ALL):
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", program, *arguments, str(theirs), root],
                stdin=subprocess.PIPE,
                text=True,
                pass_fds=[*pass_fds, theirs],
            )
    finally:
        os.close(theirs)
    process.stdout = os.fdopen(answers)
    return process


# ---- Run a command line, and turn every way in which it can end into an exit code ----------------
def run_command(module: str) -> None:
    """Run the command line `app` of a module, and end the process with its exit code.

    Exit codes: 2 and an `error: ...` line for wrong input, 1 and such a line when a run failed or
    the file system refused, 81 when ranks hold different weights, 82 when the disk is full, 83 when
    numbers are not finite, 130 after Ctrl-C. None of these shows a traceback. Any other exception
    is a bug and keeps its own.
    """
    # What a run writes is readable by its owner and group only, as under the launcher.
    os.umask(0o027)
    # Text may hold any letter, and the tokenizer's library names files in UTF-8 in any locale.
    if sys.getfilesystemencoding() != "utf-8" and "utf8" not in sys._xoptions:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    # Not above: they take most of the command's start, in which Ctrl-C would print a traceback.
    from pretrain.config import ConfigError, RunFailed
    from pretrain.config.arguments import expand_home
    from pretrain.config.errors import refusal_in, refused
    from pretrain.rundir.paths import ExitCode, exit_code_of

    app = importlib.import_module(module).app
    interrupts: list[int] = []
    try:
        raise_on_ctrl_c(interrupts)
        app(expand_home(sys.argv[1:]))
    except SystemExit as end:
        # typer ends every command with a SystemExit. After a Ctrl-C its exit code is 130 already.
        if not (end.code and interrupts):
            leave_on_ctrl_c()
            raise
        leave(ExitCode.INTERRUPTED, "interrupted")
    except BaseException as error:
        if interrupts:
            leave(ExitCode.INTERRUPTED, "interrupted")
        if (refusal := refusal_in(error)) is not None:
            error = refused(refusal)
        if isinstance(error, ConfigError | RunFailed):
            leave(exit_code_of(error), *(f"error: {line}" for line in str(error).split("\n")))
        if lost := _lost_connection(error):
            leave(
                ExitCode.FAILED,
                f"error: lost the connection to another rank ({lost}). "
                "The output of that rank says why it ended",
            )
        raise


def leave(code: int, *lines: str) -> None:
    """Print `lines` to stderr and end the process at once with `code`.

    os._exit instead of sys.exit: an orderly exit destroys the process group, which waits for ranks
    that have not failed.
    """
    prefix = _rank_prefix()
    # The reader of a pipe may be gone.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    text = "".join(f"{prefix}{line}\n" for line in lines)
    # One write, so that the lines of ranks that share a terminal do not mix.
    print(text, end="", file=sys.stderr, flush=True)
    os._exit(code)


def _rank_prefix() -> str:
    """Return "rank N: " on ranks other than 0, and nothing on rank 0 or in a single process."""
    from pretrain.config import ConfigError

    # Without pretrain.topology, or in the middle of its import, no rank has been assigned yet.
    process = getattr(sys.modules.get("pretrain.topology"), "Process", None)
    if process is None:
        return ""
    # An incomplete environment may be the very error that is being reported.
    with contextlib.suppress(ConfigError):
        if rank := process.from_environment().rank:
            return f"rank {rank}: "
    return ""


def _lost_connection(error: BaseException) -> str | None:
    """Return what gloo or NCCL says about a peer that ended; None for any other error.

    A traceback of every surviving rank would hide the message of the one rank that failed.
    """
    said = re.search(
        r"gloo/transport/\S+ ((?:Connection|Read error|Write error).*?)(?:\. |$)"
        r"|remote process exited[^.]*",
        str(error),
    )
    return (said[1] or said[0]) if isinstance(error, RuntimeError) and said else None

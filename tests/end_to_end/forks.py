"""Run a Python command line in a process that is forked, instead of one that begins anew.

The imports that a command needs take seconds of a processor, and a process that has made them hands
them to those that it forks. What is forked here becomes the program as exec would make it: its own
process id, group, arguments, environment, directory, streams and signal handlers, no other open
files, no thread, and the exit code and last words of a Python program. It shares nothing but the
imported modules, whose state is that of the process it comes from.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# The server imports this module, and is a main process.
_MAIN = multiprocessing.process.current_process()
SAID_IN = "TESTS_FORKED_PROCESSES"
"""The variable of a folder in which each process says its words and variables, which /proc has not.

The file has the name of the process id.
"""
_ALONE = ("-P", "-B", "-u")
"""Options of Python that take no value, and that change nothing here."""


def fork_programs() -> None:
    """Let subprocess fork this process for each Python program of ours, from now on.

    These are the ranks of a launcher, the process that writes a rank's checkpoints, and the
    commands of a study.
    """
    subprocess._fork_exec = _fork_or_exec  # type: ignore[attr-defined]  # a patch


def become(words: Sequence[str], environment: Mapping[str, str], *, threads: int = 1) -> NoReturn:
    """Run a Python command line in this process, which was forked for it, to the process's end.

    Args:
        words: The command line: the interpreter, its options, then a script, -m or -c, and what
            belongs to it.
        environment: All of its environment variables.
        threads: Threads of a torch that has been imported, unless OMP_NUM_THREADS says so.
    """
    if folder := environment.get(SAID_IN):
        said = [*words, *(f"{name}={value}" for name, value in environment.items())]
        with open(f"{folder}/{os.getpid()}", "w") as file:
            file.write("\0".join(said))
    # What others hold is not this process's to collect.
    gc.freeze()
    _forget_the_parent()
    os.environ.clear()
    os.environ.update(environment)
    if "torch" in sys.modules:
        number = os.environ.get("OMP_NUM_THREADS", str(threads))
        sys.modules["torch"].set_num_threads(int(number))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  as long as the process lives
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(descriptor, "wb", closefd=False)
        is_text_only = "PYTHONUNBUFFERED" in os.environ or descriptor == 2
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw),
            errors="backslashreplace" if descriptor == 2 else None,
            line_buffering=descriptor == 2,
            write_through=is_text_only,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    options = list(words[1:])
    while options[0] in _ALONE or options[0] == "-W":
        del options[: 2 if options[0] == "-W" else 1]
    kind, *rest = options
    sys.orig_argv = list(words)
    sys.argv = [kind, *rest[1:]] if kind in ("-m", "-c") else options
    if "PYTHONSAFEPATH" not in os.environ and "-P" not in words:
        first = {"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(kind))
        sys.path.insert(0, first)
    _end(_ended_with(kind, *rest))


def _ended_with(kind: str, what: str = "", *_: str) -> int:
    """Run a module (-m), a text (-c) or a script as the main program; return its exit code."""
    code: Any = 0
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind != "-c":
            runpy.run_path(kind, run_name="__main__")
        else:
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(what, "<string>", "exec"), main.__dict__)
    except SystemExit as exit_:
        code = 0 if exit_.code is None else exit_.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    return code


def _end(code: int) -> NoReturn:
    """End as the interpreter does: threads, what was registered, streams."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # what Py_FinalizeEx calls
        atexit._run_exitfuncs()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # as a child process does
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _forget_the_parent() -> None:
    """Undo what exec undoes: handlers of signals, and what is to happen when the process ends."""
    atexit._clear()
    faulthandler.disable()
    with contextlib.suppress(AttributeError, RuntimeError):
        faulthandler.unregister(signal.SIGUSR2)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    processes: Any = multiprocessing.process
    processes._current_process, processes._parent_process = _MAIN, None
    processes._children = set()
    # Not the one by which this process was made.
    multiprocessing.set_start_method(None, force=True)
    # Helpers of the parent, to which pipes lead that are closed here.
    for helper in (
        multiprocessing.resource_tracker._resource_tracker,
        multiprocessing.forkserver._forkserver,
    ):
        helper.__init__()  # type: ignore[misc]  # as if it had not been started


def _is_ours(words: Sequence[str]) -> bool:
    """Tell whether a command line is Python's, and of a module or a text of ours."""
    if words[0] != sys.executable:
        return False
    options = [word for word in words[1:] if word not in _ALONE]
    return len(options) > 1 and options[0] in ("-m", "-c") and "pretrain" in options[1]


_exec = subprocess._fork_exec  # type: ignore[attr-defined]  # what Popen calls


def _fork_or_exec(
    args: Any,
    executables: Any,
    close_fds: bool,
    pass_fds: tuple[int, ...],
    cwd: Any,
    env: Any,
    p2cread: int,
    p2cwrite: int,
    c2pread: int,
    c2pwrite: int,
    errread: int,
    errwrite: int,
    errpipe_read: int,
    errpipe_write: int,
    restore_signals: bool,
    start_new_session: bool,
    process_group: int,
    *rest: Any,
) -> int:
    """Take the place of `_posixsubprocess.fork_exec`, whose arguments these are."""
    words = [os.fsdecode(word) for word in args]
    if not _is_ours(words) or not close_fds:
        given = args, executables, close_fds, pass_fds, cwd, env, p2cread, p2cwrite, c2pread
        given += c2pwrite, errread, errwrite, errpipe_read, errpipe_write, restore_signals
        number: int = _exec(*given, start_new_session, process_group, *rest)
        return number
    variables = dict(os.environ)
    if env is not None:
        variables = dict(os.fsdecode(each).split("=", 1) for each in env)
    # What is left in the buffer would be written where the child's output goes.
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        for descriptor, wanted in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2)):
            if descriptor != -1:
                os.dup2(descriptor, wanted)
        kept = {0, 1, 2, *pass_fds} - {errpipe_write}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in kept:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        if cwd is not None:
            os.chdir(cwd)
        if start_new_session:
            os.setsid()
        if process_group >= 0:
            os.setpgid(0, process_group)
        _forget_the_parent()
        *_, preexec, _ = rest
        if preexec is not None:
            preexec()
        become(words, variables)
    except BaseException:
        traceback.print_exc()
    os._exit(1)

"""The processes of a run on this machine: start them together, end them together.

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
from collections.abc import Callable
from pathlib import Path

from pretrain.config import ConfigError

POLL_SECONDS = 0.02
KILL_AFTER_SECONDS = 10.0  # between SIGTERM and SIGKILL
LOG_LINES_SHOWN = 20
PR_SET_PDEATHSIG = 1  # linux/prctl.h
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_processes(command: list[str], nproc: int, log_directory: Path) -> int:
    """Runs `nproc` copies of `command`, told their places through torch's usual environment variables.

    Rank 0 writes to this process's own stdout and stderr, rank r to `log_directory`/rank-<r>.log. When one fails the
    others get SIGTERM and, 10 s later, SIGKILL. SIGINT, SIGTERM and SIGHUP are passed on once, so that a run can save
    and stop; a second one ends it. Returns 0, or the exit code of the first process that failed (128 + n for one that
    signal n ended). Leaves no process behind, not even when it is killed itself (Linux).
    """
    try:
        log_directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.directory: cannot make {log_directory} ({error.strerror}). Choose another") from None
    processes: list[subprocess.Popen[bytes]] = []
    received: list[int] = []
    # What is ignored already (SIGHUP under nohup) stays so.
    previous = {n: handler for n in FORWARDED if (handler := signal.getsignal(n)) is not signal.SIG_IGN}
    try:
        for number in previous:
            signal.signal(number, lambda number, frame: received.append(number))
        port, die_with_parent = _free_port(), _die_with_parent()
        for rank in range(nproc):
            processes.append(_start(command, rank, nproc, port, log_directory, die_with_parent))
        failed = _wait(processes, received)
    finally:
        _end(processes)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if failed is None:
        return max(_exit_code(p) for p in processes)  # 0, or what a second signal left
    code = processes[failed].returncode
    if code < 0 or code != processes[0].returncode:  # else rank 0 has said the same on the terminal
        _report(failed, code, _log_path(log_directory, failed))
    return _exit_code(processes[failed])


def _start(
    command: list[str],
    rank: int,
    nproc: int,
    port: int,
    log_directory: Path,
    die_with_parent: Callable[[], None] | None,
) -> subprocess.Popen[bytes]:
    threads = max(1, len(os.sched_getaffinity(0)) // nproc) if hasattr(os, "sched_getaffinity") else 1
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **{k: str(v) for k, v in place.items()}}
    # A process group of its own: Ctrl-C on the terminal then reaches the launcher alone, which passes it on once, and
    # a rank can be killed together with its data loader's workers.
    with open(_log_path(log_directory, rank) if rank else os.devnull, "wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log if rank else None,
            stderr=log if rank else None,
            process_group=0,
            preexec_fn=die_with_parent,
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


def _wait(processes: list[subprocess.Popen[bytes]], received: list[int]) -> int | None:
    """The rank that failed first; None when all ended well, or when a second signal was `received`.

    Asked to stop, ranks end at different moments and with exit codes of their own: the first to end cuts no other short.
    """
    forwarded, failed, deadline = False, None, 0.0
    while len(received) < 2:
        if received and not forwarded:
            forwarded = True
            name = signal.Signals(received[0]).name
            print(f"{name}: asked the processes to stop; a second signal ends them", file=sys.stderr, flush=True)
            for process in processes:
                process.send_signal(received[0])
        codes = [p.poll() for p in processes]
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            deadline = time.monotonic() + (KILL_AFTER_SECONDS if forwarded else 0)
        if None not in codes or (failed is not None and time.monotonic() >= deadline):
            return failed
        time.sleep(POLL_SECONDS)
    return None


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to those that still run, SIGKILL to what is left of every process group, workers included."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + KILL_AFTER_SECONDS
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(POLL_SECONDS)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    code = process.returncode
    return 128 - code if code < 0 else code


def _log_path(log_directory: Path, rank: int) -> Path:
    return log_directory / f"rank-{rank}.log"


def _report(rank: int, code: int, path: Path) -> None:
    """Says which rank failed first, with the end of its log; rank 0 has none, it wrote to the terminal."""
    how = f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    lines = (
        [f"; the end of {path}:", *path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]] if rank else [""]
    )
    print(f"rank {rank} {how}" + "\n".join(lines), file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

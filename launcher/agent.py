"""Start one rank, pass signals on to it, and report how it ends: a task of srun.

    python -m pretrain.launcher.agent COMMAND...

Slurm starts an agent for each rank and binds it to cores and GPUs, which the rank inherits. The
agent reports on its rank through srun's stdout, and receives the launcher's orders through srun's
stdin, so neither depends on slurmctld or on the messages of srun. When stdin ends, the launcher,
srun or slurmstepd is gone, or the attempt is over: the agent kills its rank and ends.

An order is one byte: the number of a signal for the rank, or HELLO. This file imports nothing
heavy, because it starts once for each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys

from pretrain.processes import SENT_TO_ALL, dies_with_parent

MODULE = "pretrain.launcher.agent"
SAYS = "rank agent: "
"""The beginning of a report on stdout, to which the rank writes as well."""
HELLO = 0
"""An order without effect. It only shows the agent that orders reach it."""
BEAT_SECONDS = 20.0
"""Time between two reports while nothing happens."""
BLOCKED_AT_START = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a process which has no handlers yet; Python takes seconds to start. A process
unblocks them itself once it can handle them: `pretrain train` before anything else
(pretrain/training/reporter.py), srun once it has started its tasks."""
NOT_STARTED = 127
"""The code of a rank whose command cannot be executed, as in a shell."""


def main(command: list[str]) -> None:
    """Run the command, and return when stdin has ended; a rank that still runs is killed."""
    waked, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # Slurm may send these to the agent alone, or to all processes of the step.
    for caught in (signal.SIGCHLD, *SENT_TO_ALL):
        # Empty handlers: the number of the signal arrives through the pipe.
        signal.signal(caught, lambda number, frame: None)
    rank = _started(command)
    _report(rank)
    heard = False
    while True:
        ready = select.select([0, waked], [], [], BEAT_SECONDS)[0]
        numbers = os.read(waked, 4096) if waked in ready else b""
        if 0 in ready:
            orders = os.read(0, 4096)
            if not orders:
                break
            heard, numbers = True, numbers + orders
        for number in numbers:
            if number not in (HELLO, signal.SIGCHLD) and rank and rank.poll() is None:
                rank.send_signal(number)
        _report(rank)
    if not heard:
        print("the ranks' container does not pass stdin on, which the launcher needs", flush=True)
    if rank:
        rank.kill()
        rank.wait()
    _report(rank)


def _started(command: list[str]) -> subprocess.Popen[bytes] | None:
    """Start the rank, which dies with this process; return None if it cannot be executed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_AT_START)
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=dies_with_parent())
    except OSError as error:
        print(f"{command[0]}: cannot be started ({error.strerror})", flush=True)
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_AT_START)


def _report(rank: subprocess.Popen[bytes] | None) -> None:
    """Report on stdout whether the rank runs, and if not, how it ended."""
    code = rank.poll() if rank else NOT_STARTED
    # In one write, so that the rank's output cannot appear in the middle of it.
    with contextlib.suppress(OSError):
        # If srun or slurmstepd is gone, stdin ends as well, and so does this process.
        os.write(1, f"{SAYS}{json.dumps({'code': code})}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])

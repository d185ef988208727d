"""Test `launcher local` with real processes.

Tested are exit codes, the ranks' environment, logs and signals, and that no process is left behind.
"""

import os
import re
import sys
from pathlib import Path

from pretrain.config import load_config
from pretrain.launcher.ranks import run_locally
from tests.end_to_end.commands import ROOT, wait_for

RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "PRETRAIN_RENDEZVOUS",
    "OMP_NUM_THREADS",
)
LAST_WORD = """
import atexit, os
from pathlib import Path
from pretrain.rundir.attempts import Attempt
attempt = Attempt.join(Path(os.environ["PRETRAIN_ATTEMPT"]))
if os.environ["RANK"] == "0":
    atexit.register(attempt.phase, "ending", 10**6)
"""
"""Lets rank 0 say at its end that all steps are done: exit code 0 alone would be a failure."""


def python(code: str) -> list[str]:
    setup = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    return [sys.executable, "-c", f"{LAST_WORD}{setup}{code}"]


def run_processes(command: list[str], nproc: int, run: Path) -> int:
    """Run a command as the ranks of a single attempt, in the run's directory `run`."""
    settings = [f"run.directory={run}", "recovery.max_restarts=0"]
    return run_locally(load_config(ROOT / "configs/demo.toml", settings), nproc, command, [])


def alive(pid: int) -> bool:
    """Return True if a process runs. A zombie has ended, and waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_every_rank_is_told_which_one_it_is_and_where_to_meet_the_others(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # Of the user's shell; two runs on this machine would meet there.
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("MASTER_ADDR", "other")
    folder = str(tmp_path)
    code = f"values = [os.environ[name] for name in {RANK_VARIABLES!r}]\n"
    code += "assert 'MASTER_PORT' not in os.environ\n"
    code += f"open({folder!r} + f'/{{rank}}', 'w').write(' '.join(values))"
    assert run_processes(python(code), 3, tmp_path) == 0
    values = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    where = f"{tmp_path}/attempts/0001"
    assert values == [[str(r), str(r), "3", "3", "127.0.0.1", where, threads] for r in range(3)]


def said(run: Path, rank: int) -> str:
    """Return what a rank's log has, without the lines with which attempts begin."""
    lines = (run / f"logs/rank-{rank}.log").read_text().splitlines(keepends=True)
    assert re.fullmatch(r"--- attempt 1, [-\d]+ [:\d]+ ---\n", lines[0])
    return "".join(line for line in lines if not line.startswith("--- attempt "))


def test_every_rank_has_a_log_and_rank_0_writes_to_the_terminal_too(tmp_path, capfd):
    """The logs of a second start are appended, and nothing that was printed last is lost."""
    run = tmp_path / "deep"
    # What goes to two pipes has an order in the log only if it is read in between.
    code = f"""
print('out', rank)
while not open(f'{run}/logs/rank-{{rank}}.log').read().endswith(f'out {{rank}}\\n'):
    time.sleep(0.01)
print('err', rank, file=sys.stderr)
"""
    last = "sys.stdout.write('last'); os.kill(os.getpid(), signal.SIGKILL)"
    assert run_processes(python(code), 3, run) == 0
    assert capfd.readouterr() == ("out 0\n", "err 0\n")
    assert run_processes(python(code + last), 1, run) == 137
    assert capfd.readouterr()[0] == "out 0\nlast"
    # Of what comes out of two pipes at once, either may be first.
    assert said(run, 0).startswith("out 0\nerr 0\nout 0\n")
    assert sorted(said(run, 0)[18:].replace("last", "")) == sorted("err 0\n")
    for rank in (1, 2):
        assert said(run, rank) == f"out {rank}\nerr {rank}\n"
    assert (run / "logs/rank-0.log").stat().st_mode & 0o007 == 0


def test_the_end_of_the_failed_ranks_log_is_shown(tmp_path, capfd):
    code = "if rank == 1:\n    print(*range(100), sep='\\n')\n    sys.exit(5)\ntime.sleep(600)"
    assert run_processes(python(code), 2, tmp_path) == 5
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"rank 1 ended with exit code 5; the end of {tmp_path}/logs/rank-1.log:"
    assert lines[1:] == [str(n) for n in range(80, 100)]


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.launcher.ranks.KILL_AFTER_SECONDS", 0.5)
    folder = str(tmp_path)
    code = f"""
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open({folder!r} + '/pid', 'w').write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists({folder!r} + '/pid') or not open({folder!r} + '/pid').read():
    time.sleep(0.01)
sys.exit(3)
"""
    assert run_processes(python(code), 2, tmp_path) == 3
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_ranks_own_children_end_with_it(tmp_path):
    folder = str(tmp_path)
    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
open({folder!r} + f'/child-{{rank}}', 'w').write(str(child.pid))
sys.exit(4 * rank)
"""
    assert run_processes(python(code), 2, tmp_path) == 4
    children = [int(path.read_text()) for path in tmp_path.glob("child-*") if path.read_text()]
    assert children
    wait_for(lambda: not any(alive(child) for child in children))

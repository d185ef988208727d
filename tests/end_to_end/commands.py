"""Run commands as a user types them, in a fresh process or in one forked from a warm server.

Importing torch and Megatron takes seconds for each process, so the server has done the imports
already. A forked command, and what it starts of ours, becomes the same program with its own
arguments, environment and file descriptors, and ends in the same way (tests/end_to_end/forks.py).
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pretrain.processes import PR_SET_PDEATHSIG
from tests.end_to_end import forks

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of every command: two ranks need no second GPU, and numbers repeat bit for bit."""
PRETRAIN = (sys.executable, "-m", "pretrain")
LAUNCHER = (sys.executable, "-c", "from pretrain.launcher.__main__ import main; main()")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

SERVER = multiprocessing.get_context("forkserver")
"""The warm server. Ranks of tests/distributed are forked from it, too."""
SERVER.set_forkserver_preload(["tests.end_to_end.preload"])


class Done(NamedTuple):
    """A command that has ended: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def fresh(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Done:
    """Run a command line in a new process, from the project's root, and wait for it."""
    return ended(started(command, environment))


def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command line as a terminal does, in a group of its own, and return its process.

    SIGINT gets its default action back: a shell that runs the tests in the background ignores it,
    and child processes inherit that.
    """
    return subprocess.Popen(
        list(command),
        cwd=ROOT,
        env=_environment(environment),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    """Send SIGINT to a command and all processes of its group, as a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


def ended(process: subprocess.Popen[str]) -> Done:
    """Wait for a process. After TIMEOUT_SECONDS, terminate it and its ranks and fail the test."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        command = " ".join(map(str, process.args))  # type: ignore[arg-type]  # started() passes a list
        raise AssertionError(f"still running after {TIMEOUT_SECONDS} s: {command}") from None
    return Done(process.returncode, out, err)


class Running:
    """A command line of Python's that is under way in a forked process, in a group of its own."""

    def __init__(
        self,
        command: Sequence[object],
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        *,
        largest_file: int | None = None,
        alone: bool = False,
    ) -> None:
        """Start it.

        Args:
            command: The words of the command line.
            environment: Variables to add to this process's.
            cwd: The directory that it starts in.
            largest_file: Writing a file beyond so many bytes fails, as on a full disk.
            alone: It has these variables and no others.
        """
        self.command = [str(word) for word in command]
        self._folder = TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        # What it has said may be asked for before it has begun.
        for path in (self._out, self._err):
            path.touch()
        variables = dict(environment or {}) if alone else _environment(environment)
        arguments = self.command, variables, (self._out, self._err), largest_file, cwd
        self._process = SERVER.Process(target=_main, args=arguments)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.command, timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the command and all processes of its group, as a terminal does."""
        os.killpg(self.pid, signal.SIGINT)

    def said(self) -> str:
        """Return what it has written to stderr so far."""
        return self._err.read_text(errors="backslashreplace")

    def ended(self) -> Done:
        """Wait for its end. After TIMEOUT_SECONDS, kill it and fail the test."""
        self._process.join(TIMEOUT_SECONDS)
        if self.poll() is None:
            self._process.kill()
            raise AssertionError(f"still running after {TIMEOUT_SECONDS} s: {self.said()}")
        out = self._out.read_text(errors="backslashreplace")
        return Done(self._process.exitcode or 0, out, self.said())


def _main(
    command: list[str],
    environment: dict[str, str],
    streams: tuple[Path, Path],
    largest_file: int | None,
    cwd: Path,
) -> None:
    """Become a command line of Python's that is started in `cwd`."""
    assert "tests.end_to_end.preload" in sys.modules, "another server than tests/conftest.py starts"
    os.setpgid(0, 0)
    # What a failing test leaves behind ends with the server, which ends with the tests.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_TRUNC), descriptor)
    os.chdir(cwd)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    forks.fork_programs()
    forks.become(command, environment)


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    return os.environ | ON_CPU | dict(more or {})


def forked(
    command: Sequence[object],
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Done:
    """Run a command line of Python's in a forked process, and wait for it."""
    return Running(command, environment, cwd).ended()


def pretrain(*arguments: object, largest_file: int | None = None, cwd: Path = ROOT) -> Done:
    """Run `pretrain` with these arguments in a forked process (see `Running`)."""
    return Running([*PRETRAIN, *arguments], cwd=cwd, largest_file=largest_file).ended()


def succeeded(done: Done) -> Done:
    """Return how a command ended; the test fails if the command did."""
    assert done.code == 0, done.text
    return done


def succeeds(*arguments: object, cwd: Path = ROOT) -> Done:
    """Run `pretrain` with these arguments; the test fails if the command does."""
    return succeeded(pretrain(*arguments, cwd=cwd))


def launcher(arguments: Sequence[object], cwd: Path, environment: Mapping[str, str]) -> Done:
    """Run `launcher` in a forked process, in `cwd`, with these variables and no others."""
    return Running([*LAUNCHER, *arguments], environment, cwd, alone=True).ended()


def ranks(
    arguments: Sequence[object],
    environments: Sequence[Mapping[str, str]],
    program: Sequence[str] = PRETRAIN,
) -> list[Done]:
    """Run `pretrain` with these arguments once in each environment, all at the same time."""
    command = [*program, *arguments]
    started_ranks = [Running(command, environment) for environment in environments]
    return [rank.ended() for rank in started_ranks]


def sets(*settings: str) -> list[str]:
    """Return settings as options, each key once: a later setting replaces an earlier one."""
    last = {setting.partition("=")[0]: setting for setting in settings}
    return [word for setting in last.values() for word in ("--set", setting)]


class Started(NamedTuple):
    """The running ranks of a command."""

    processes: list[Running]

    @property
    def process_ids(self) -> list[int]:
        """Return the process ids by rank, to send signals to."""
        return [process.pid for process in self.processes]

    def said(self, rank: int) -> str:
        """Return what a rank has written to stderr so far."""
        return self.processes[rank].said()

    def done(self) -> list[Done]:
        """Wait for all ranks to end."""
        return [process.ended() for process in self.processes]


@contextmanager
def running_ranks(arguments: Sequence[object], world_size: int) -> Iterator[Started]:
    """Run `pretrain` with these arguments on `world_size` ranks; on exit, kill those left."""
    with TemporaryDirectory() as folder:
        rendezvous = {"WORLD_SIZE": str(world_size), "PRETRAIN_RENDEZVOUS": folder}
        processes: list[Running] = []
        try:
            for rank in map(str, range(world_size)):
                environment = rendezvous | {"RANK": rank, "LOCAL_RANK": rank}
                processes.append(Running([*PRETRAIN, *arguments], environment))
            yield Started(processes)
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.ended()


def wait_for(condition: Any, seconds: float = TIMEOUT_SECONDS) -> None:
    """Return when condition() is true; fail when it is not after `seconds`.

    It may be a command of Slurm's or a look at all processes, and others want to compute: no more
    than a twentieth of a processor asks, but after a fifth of a second it is asked again.
    """
    deadline, before = time.monotonic() + seconds, _used_seconds()
    while not condition():
        assert time.monotonic() < deadline, f"the condition is not true after {seconds} s"
        time.sleep(min(max(0.02, 19 * (_used_seconds() - before)), 0.2))
        before = _used_seconds()


def _used_seconds() -> float:
    """Return the processor time of this process and of children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """Return the training loss of each step of metrics.jsonl, in nats."""
    return [record["loss_nats"] for record in metrics(run) if "evaluation" not in record]


def untimed(run: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without the fields that a clock measures."""
    timed = ("step_seconds", "data_wait_seconds", "tokens_per_second", "tflops", "peak_memory")
    timed += ("evaluation_seconds", "slowest_", "slow_since_step")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in metrics(run)]


def explained(done: Done, code: int, *words: object) -> None:
    """Check that a command failed with `code` and an error message, without a traceback.

    A line of stderr begins with "error: ", and stderr contains all of `words`.
    """
    assert done.code == code, done.text
    assert "Traceback" not in done.text, done.text
    assert any(line.startswith("error: ") for line in done.err.splitlines()), done.err
    assert all(str(word) in done.err for word in words), (words, done.err)


# ---- damage ------------------------------------------------------------------------------------
def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every path below `folder`: a write changes one."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


def copied(source: Path, target: Path) -> Path:
    """Return a fresh copy of a directory."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def replace(path: Path, content: bytes) -> None:
    """Put a new file in the place of one that may be hard-linked elsewhere."""
    path.unlink()
    path.write_bytes(content)


def executable(path: Path, text: str) -> Path:
    """Write a script that can be run, and return its path."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file, which keeps its size."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    replace(path, bytes(raw))


def truncate(path: Path) -> None:
    """Cut off the last hundred bytes of a file."""
    replace(path, path.read_bytes()[:-100])

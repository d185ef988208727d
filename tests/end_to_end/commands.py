"""Run commands as a user types them, in a fresh process or in one forked from a warm server.

Importing torch and Megatron takes seconds for each process, so the server has done the imports
already. A forked command runs the same `main()` with its own arguments, environment and file
descriptors, and ends in the same way. It shares nothing but the imported modules.
"""

from __future__ import annotations

import importlib
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
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of every command: two ranks need no second GPU, and numbers repeat bit for bit."""
PRETRAIN = (sys.executable, "-m", "pretrain")
LAUNCHER = (sys.executable, "-c", "from pretrain.launcher.main import main; main()")
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
        env=os.environ | ON_CPU | dict(environment or {}),
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


def pretrain(*arguments: object, largest_file: int | None = None, cwd: Path = ROOT) -> Done:
    """Run `pretrain` with these arguments in a forked process, in the directory `cwd`.

    Writing a file beyond `largest_file` bytes fails, as on a full disk.
    """
    return ranks(arguments, [{}], largest_file, cwd)[0]


def succeeded(done: Done) -> Done:
    """Return how a command ended; the test fails if the command did."""
    assert done.code == 0, done.text
    return done


def succeeds(*arguments: object, cwd: Path = ROOT) -> Done:
    """Run `pretrain` with these arguments; the test fails if the command does."""
    return succeeded(pretrain(*arguments, cwd=cwd))


def ranks(
    arguments: Sequence[object],
    environments: Sequence[Mapping[str, str]],
    largest_file: int | None = None,
    cwd: Path = ROOT,
) -> list[Done]:
    """Run `pretrain` with these arguments once in each environment, all at the same time."""
    with TemporaryDirectory() as folder:
        processes = [
            _start(arguments, env, Path(folder) / str(rank), largest_file, cwd)
            for rank, env in enumerate(environments)
        ]
        return [_end(process, Path(folder) / str(rank)) for rank, process in enumerate(processes)]


def sets(*settings: str) -> list[str]:
    """Return settings as options, each key once: a later setting replaces an earlier one."""
    last = {setting.partition("=")[0]: setting for setting in settings}
    return [word for setting in last.values() for word in ("--set", setting)]


class Started(NamedTuple):
    """The running ranks of a command."""

    processes: list[BaseProcess]
    folder: Path

    @property
    def process_ids(self) -> list[int]:
        """Return the process ids by rank, to send signals to."""
        return [process.pid or 0 for process in self.processes]

    def said(self, rank: int) -> str:
        """Return what a rank has written to stderr so far."""
        return (self.folder / f"{rank}.err").read_text()

    def done(self) -> list[Done]:
        """Wait for all ranks to end."""
        return [
            _end(process, self.folder / str(rank)) for rank, process in enumerate(self.processes)
        ]


@contextmanager
def running_ranks(arguments: Sequence[object], world_size: int) -> Iterator[Started]:
    """Run `pretrain` with these arguments on `world_size` ranks; on exit, kill those left."""
    with TemporaryDirectory() as folder:
        rendezvous = {"WORLD_SIZE": str(world_size), "PRETRAIN_RENDEZVOUS": folder}
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                environment = rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(_start(arguments, environment, Path(folder) / str(rank), None))
            yield Started(processes, Path(folder))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def launcher(arguments: Sequence[object], cwd: Path, environment: Mapping[str, str]) -> Done:
    """Run `launcher` in a forked process, in `cwd`, with these variables and no others."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "0"
        return _end(_start(arguments, environment, output, None, cwd, "launcher"), output)


def _start(
    arguments: Sequence[object],
    environment: Mapping[str, str],
    output: Path,
    largest_file: int | None,
    cwd: Path = ROOT,
    program: str = "pretrain",
) -> BaseProcess:
    words = [program, *map(str, arguments)]
    process = SERVER.Process(
        target=_main, args=(words, dict(environment), str(output), largest_file, str(cwd))
    )
    process.start()
    return process


def _end(process: BaseProcess, output: Path) -> Done:
    process.join(TIMEOUT_SECONDS)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(
            f"still running after {TIMEOUT_SECONDS} s: {Path(f'{output}.err').read_text()}"
        )
    out, err = (
        Path(f"{output}.{name}").read_text(errors="backslashreplace") for name in ("out", "err")
    )
    return Done(process.exitcode, out, err)


def _main(
    words: list[str],
    environment: dict[str, str],
    output: str,
    largest_file: int | None,
    cwd: str,
) -> None:
    """Become `pretrain` or `launcher` with its arguments, started in `cwd`."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(cwd)
    if words[0] == "launcher":
        os.environ.clear()
    os.environ |= environment
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    import torch

    torch.set_num_threads(1)
    sys.argv = words
    main = {"pretrain": "pretrain.cli.main", "launcher": "pretrain.launcher.main"}[words[0]]
    importlib.import_module(main).main()


def wait_for(condition: Any, seconds: float = TIMEOUT_SECONDS) -> None:
    """Return when condition() is true; fail when it is not after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition is not true after {seconds} s"
        time.sleep(0.02)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(run: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without the fields that a clock measures."""
    timed = ("step_seconds", "data_wait_seconds", "tokens_per_second", "tflops", "peak_memory")
    timed += ("evaluation_seconds", "evaluation_time_share")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in metrics(run)]


def explained(done: Done, code: int, *words: object) -> None:
    """Check that a command failed with `code` and an error message, without a traceback.

    A line of stderr begins with "error: ", and stderr contains all of `words`.
    """
    assert done.code == code, done.text
    assert "Traceback" not in done.text, done.text
    lines = done.err.splitlines()
    assert any(line.startswith("error: ") for line in lines), done.err
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


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file, which keeps its size."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    replace(path, bytes(raw))


def truncate(path: Path) -> None:
    """Cut off the last hundred bytes of a file."""
    replace(path, path.read_bytes()[:-100])

"""Commands as a user types them: in a fresh process, or in one forked from a server that has done the slow imports.

Importing torch and Megatron costs seconds a process. A forked command runs the same `main()` on its own arguments,
environment and file descriptors, and ends the same way; nothing is shared but what importing does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
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
"""The environment of every command: two processes need no second GPU, and give the same bits everywhere."""
PRETRAIN = (sys.executable, "-m", "pretrain")
LAUNCHER = (sys.executable, "-c", "from pretrain.launcher.cli import main; main()")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.end_to_end.preload"])


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def fresh(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Done:
    """Runs a command line in a process of its own, from the project's root."""
    return ended(started(command, environment))


def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """The process of a command line, as a terminal starts it: a shell's background, where the tests may run, ignores Ctrl-C."""
    return subprocess.Popen(
        list(command),
        cwd=ROOT,
        env=os.environ | ON_CPU | dict(environment or {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def ended(process: subprocess.Popen[str]) -> Done:
    """Waits for the process. One that takes too long is asked to end, and its ranks with it, and the test fails."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError(
            f"still running after {TIMEOUT_SECONDS} s: {' '.join(map(str, process.args))}"
        ) from None  # type: ignore[arg-type]
    return Done(process.returncode, out, err)


def pretrain(*arguments: object, largest_file: int | None = None) -> Done:
    """`pretrain` with these arguments, forked. Writing a file beyond `largest_file` bytes fails, as on a full disk."""
    return ranks(arguments, [{}], largest_file)[0]


def ranks(
    arguments: Sequence[object],
    environments: Sequence[Mapping[str, str]],
    largest_file: int | None = None,
) -> list[Done]:
    """`pretrain` with these arguments once in each environment, at the same time, forked."""
    with TemporaryDirectory() as folder:
        processes = [
            _start(arguments, env, Path(folder) / str(rank), largest_file)
            for rank, env in enumerate(environments)
        ]
        return [_end(process, Path(folder) / str(rank)) for rank, process in enumerate(processes)]


class Started(NamedTuple):
    """Ranks that run: `process_ids` by rank, for signals."""

    processes: list[BaseProcess]
    folder: Path

    @property
    def process_ids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def said(self, rank: int) -> str:
        """What a rank has written to stderr so far."""
        return (self.folder / f"{rank}.err").read_text()

    def done(self) -> list[Done]:
        """Waits for all ranks to end."""
        return [
            _end(process, self.folder / str(rank)) for rank, process in enumerate(self.processes)
        ]


@contextmanager
def running_ranks(arguments: Sequence[object], world_size: int) -> Iterator[Started]:
    """`pretrain` with these arguments on `world_size` ranks, forked; what still runs afterwards is killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(probe.getsockname()[1]),
        }
    with TemporaryDirectory() as folder:
        processes = [
            _start(
                arguments,
                place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                Path(folder) / str(rank),
                None,
            )
            for rank in range(world_size)
        ]
        try:
            yield Started(processes, Path(folder))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _start(
    arguments: Sequence[object],
    environment: Mapping[str, str],
    output: Path,
    largest_file: int | None,
) -> BaseProcess:
    words = [str(argument) for argument in arguments]
    process = _SERVER.Process(
        target=_main, args=(words, dict(environment), str(output), largest_file)
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
    return Done(
        process.exitcode, Path(f"{output}.out").read_text(), Path(f"{output}.err").read_text()
    )


def _main(
    arguments: list[str], environment: dict[str, str], output: str, largest_file: int | None
) -> None:
    """In the forked process: becomes `python -m pretrain ARGUMENTS` from the project's root."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(ROOT)
    os.environ |= environment
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    import torch

    torch.set_num_threads(1)
    from pretrain.cli import main

    sys.argv = ["pretrain", *arguments]
    main()


def wait_for(condition: Any, seconds: float = TIMEOUT_SECONDS) -> None:
    """Returns when condition() is true; fails when it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def explained(done: Done, code: int, *words: object) -> None:
    """`done` ended with `code` and lines that begin with "error: ", hold all of `words`, and are no traceback."""
    assert done.code == code, done.text
    assert "Traceback" not in done.text, done.text
    lines = done.err.splitlines()
    assert any(line.startswith("error: ") for line in lines), done.err
    assert all(str(word) in done.err for word in words), (words, done.err)

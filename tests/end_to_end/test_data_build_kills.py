"""A build that is killed at random moments, with all its processes, and started again.

The data set is compared, byte for byte, with one that was built in one go.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.data.build import build
from pretrain.data.build.folder import RECORD, is_done
from pretrain.data.stream import verify
from tests.conftest import mark_torture
from tests.end_to_end.commands import (
    ROOT,
    TIMEOUT_SECONDS,
    ended,
    press_ctrl_c,
    started,
    wait_for,
)

DISK_BYTES = 8_000_000
SETTINGS = [
    "data.source=text",
    "data.vocab_size=400",
    "data.tokens_per_block=1024",
    "data.tokens_per_shard=8192",
    "data.bytes_per_task=40_000",
    "cleaning.deduplicate=near",
]
PROGRAM = """
import sys
from pretrain.config import load_config
from pretrain.data.build import build
if __name__ == "__main__":
    build(load_config("configs/demo.toml", sys.argv[2:]), int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "build.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 60 documents of 2,000 words, and a copy of one."""
    folder, numbers = tmp_path_factory.mktemp("corpus"), random.Random(5)
    words = ["".join(numbers.choices("etaoinshrdlu", k=numbers.randint(2, 9))) for _ in range(3000)]
    for i in range(60):
        text = "\n".join(" ".join(numbers.choices(words, k=12)) for _ in range(170))
        (folder / f"{i:02d}.txt").write_text(text)
    shutil.copy(folder / "03.txt", folder / "77.txt")
    return folder


def settings(corpus: Path, data: Path) -> list[str]:
    return [*SETTINGS, f'data.paths=["{corpus}/*.txt"]', f"data.directory={data}"]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("reference") / "data"
    build(load_config(ROOT / "configs/demo.toml", settings(corpus, data)))
    return data


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def start(program: Path, workers: int, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(program), str(workers), *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def done_tasks(folder: Path) -> dict[str, int]:
    """Return the outputs that are whole: name -> the inode of the record, new if made again."""
    found = {}
    for record in folder.glob(f"*/*/{RECORD}"):
        if not record.parent.name.startswith(".") and is_done(record.parent):
            found[str(record.parent.relative_to(folder))] = record.stat().st_ino
    return found


def descendants_are_gone(session: int) -> bool:
    """Return True when no process of a session lives: the workers end with the builder."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            return False
    return True


@pytest.mark.parametrize(
    ("kills", "workers", "whole_group"),
    mark_torture(
        [(4, 2, True), (2, 2, False), (100, 2, True), (50, 1, True), (50, 3, False)],
        core={(4, 2, True)},
    ),
)
def test_killed_builds_go_on_to_the_same_bytes(
    program, corpus, reference, tmp_path, kills, workers, whole_group
):
    """`whole_group`: the workers are killed as well, or only the builder."""
    data, numbers = tmp_path / "data", random.Random(kills * workers)
    folder = tmp_path / ".building-data"
    words, killed, seconds = settings(corpus, data), 0, 6.0
    stages: set[str] = set()
    while killed < kills:
        before = done_tasks(folder)
        process = start(program, workers, words)
        began = time.monotonic()
        try:
            process.wait(numbers.uniform(0.0, seconds))
        except subprocess.TimeoutExpired:
            killed += 1
        else:
            assert process.returncode == 0, process.stderr.read()
            # It was faster than the kill; the next ones come earlier.
            seconds = time.monotonic() - began
        stages |= {name.split("/")[0] for name in before}
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL) if (
            process.returncode is None
        ) else None
        process.wait()
        process.stderr.close()
        wait_for(partial(descendants_are_gone, process.pid))
        if data.exists():
            assert contents(data) == contents(reference)
            shutil.rmtree(data)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            after = done_tasks(folder)
            assert before.items() <= after.items(), "a finished task was done again"
    if not data.exists():
        process = start(program, workers, words)
        assert process.wait(TIMEOUT_SECONDS) == 0, process.stderr.read()
        process.stderr.close()
    assert contents(data) == contents(reference)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    verify(data)


@pytest.mark.parametrize("begun", ["plan.jsonl", "scan"], ids=["while workers start", "in tasks"])
def test_ctrl_c_says_that_the_same_command_goes_on_and_no_more(corpus, tmp_path, begun):
    words = [word for each in settings(corpus, tmp_path / "data") for word in ("--set", each)]
    command = [sys.executable, "-m", "pretrain", "data", "build", "configs/demo.toml", *words]
    process, folder = started([*command, "--workers", "3"]), tmp_path / ".building-data"
    wait_for((folder / begun).exists)
    press_ctrl_c(process)
    done = ended(process)
    goes_on = f"{folder} keeps what is finished; the same command goes on\ninterrupted\n"
    assert (done.code, done.err) == (130, goes_on)

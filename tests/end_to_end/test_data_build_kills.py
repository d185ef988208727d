"""A build that is killed at random moments, with all its processes, and started again.

The data set is compared, byte for byte, with one that was built in one go.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
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
    PRETRAIN,
    ROOT,
    TIMEOUT_SECONDS,
    ended,
    press_ctrl_c,
    sets,
    started,
    wait_for,
)
from tests.unit.test_data_build import contents

SETTINGS = [
    "data.source=text",
    "data.vocab_size=400",
    "data.tokens_per_block=1024",
    "data.tokens_per_shard=8192",
    "data.bytes_per_task=40_000",
    "cleaning.deduplicate=near",
]


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


def start(corpus: Path, data: Path, workers: int) -> subprocess.Popen[str]:
    words = ["data", "build", "configs/demo.toml", *sets(*settings(corpus, data))]
    return started([*PRETRAIN, *words, "--workers", str(workers)])


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("reference") / "data"
    build(load_config(ROOT / "configs/demo.toml", settings(corpus, data)))
    return data


def done_tasks(folder: Path) -> dict[str, int]:
    """Return the outputs that are whole: name -> the inode of the record, new if made again."""
    found = {}
    for record in folder.glob(f"*/*/{RECORD}"):
        if not record.parent.name.startswith(".") and is_done(record.parent):
            found[str(record.parent.relative_to(folder))] = record.stat().st_ino
    return found


def descendants_are_gone(group: int) -> bool:
    """Return True when no process of a group lives: the workers end with the builder."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return False
    return True


@pytest.mark.parametrize(
    ("kills", "workers", "whole_group"),
    mark_torture(
        [(2, 2, False), (100, 2, True), (50, 1, True), (50, 3, False)],
        core={(2, 2, False)},
    ),
)
def test_killed_builds_go_on_to_the_same_bytes(
    corpus, reference, tmp_path, kills, workers, whole_group
):
    """`whole_group`: the workers are killed as well, or only the builder."""
    data, numbers = tmp_path / "data", random.Random(kills * workers)
    folder = tmp_path / ".building-data"
    killed, seconds = 0, 6.0
    while killed < kills:
        before = done_tasks(folder)
        process = start(corpus, data, workers)
        began = time.monotonic()
        try:
            process.wait(numbers.uniform(0.0, seconds))
        except subprocess.TimeoutExpired:
            killed += 1
        else:
            assert process.returncode == 0, process.stderr.read()
            # It was faster than the kill; the next ones come earlier.
            seconds = time.monotonic() - began
        if process.returncode is None:
            (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
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
        process = start(corpus, data, workers)
        assert process.wait(TIMEOUT_SECONDS) == 0, process.stderr.read()
        process.stderr.close()
    assert contents(data) == contents(reference)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    verify(data)


@pytest.mark.parametrize("begun", ["plan.jsonl", "scan"], ids=["while workers start", "in tasks"])
def test_ctrl_c_says_that_the_same_command_goes_on_and_no_more(corpus, tmp_path, begun):
    process = start(corpus, tmp_path / "data", 3)
    folder = tmp_path / ".building-data"
    wait_for((folder / begun).exists)
    press_ctrl_c(process)
    done = ended(process)
    goes_on = f"{folder} keeps what is finished; the same command goes on\ninterrupted\n"
    assert (done.code, done.err) == (130, goes_on)

"""Every file operation of a save: refused by the disk, or the power cut or a kill after it.

A run saves three times with checkpoint.keep = 1: the third save deletes the first checkpoint.
Whatever happens, what has a checkpoint's name is whole, and once a save has returned the run keeps
a checkpoint that is no older.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pretrain.checkpoint.load import load_global_state
from pretrain.checkpoint.manifest import MASTER, Origin, TrainerState, open_checkpoint
from pretrain.checkpoint.tools import prune, verify_checkpoint
from pretrain.rundir.checkpoints import (
    Branch,
    checkpoint_directory,
    checkpoints_to_resume,
    named_by_step,
)
from pretrain.rundir.files import replace_file
from pretrain.rundir.history import Policy, recover, settle
from pretrain.rundir.metrics import read_metrics
from tests.conftest import mark_torture, tiny_config
from tests.unit.disk import Disk, Killed, build
from tests.unit.saved import MOMENTS, values, write

SHAPES = {"embedding.weight": (9, 4), "layer.bias": (5,)}
STEPS = (2, 4, 6)
WORLD_SIZE = 2
CONFIG = tiny_config()
ORIGIN = Origin(branches=(Branch("b" * 16, 0),))


def save(run: Path, number: int, step: int, ranks: int = WORLD_SIZE) -> list[str]:
    """Save a step as attempt `number`, its ranks one after the other; return the warnings."""
    return write(
        run,
        step,
        ORIGIN,
        values(step, SHAPES),
        ranks,
        CONFIG,
        attempt=run / f"attempts/{number:04d}",
        keep={"keep": 1},
        identifier=f"{step:016x}",
    )


def new_run(run: Path) -> Path:
    """Make a run's directory and its first attempt, as far as a save needs them."""
    (run / "attempts/0001").mkdir(parents=True)
    return run


WHOLE = set[tuple[object, ...]]()
"""The step and all bytes of checkpoints that were found whole, which are not read again."""


def is_whole(checkpoint: Path, step: int) -> None:
    """Check that all of a checkpoint is what was saved at that step."""
    content = (step, *sorted((path.name, path.read_bytes()) for path in checkpoint.iterdir()))
    if content in WHOLE:
        return
    opened = open_checkpoint(checkpoint)
    assert verify_checkpoint(checkpoint)[0] == []
    assert opened.trainer_state == TrainerState(step, 8 * step)
    expected = values(step, SHAPES)
    for kind in (MASTER, *MOMENTS):
        for name, found in load_global_state(opened, kind).items():
            assert np.array_equal(found.numpy(), expected[f"{kind}/{name}"]), name
    WHOLE.add(content)


def is_resumable(run: Path, published: int | None, number: int = 2) -> None:
    """Check what is on the disk, then start the next attempt: it goes on, and can save.

    Args:
        run: The run's directory.
        published: The last step whose save had returned.
        number: The next attempt's.
    """
    checkpoints = run / "checkpoints"
    found = named_by_step(checkpoints)
    for path in found:
        is_whole(path, int(path.name[5:]))
    assert published is None or (found and int(found[-1].name[5:]) >= published), found
    attempt = run / f"attempts/{number:04d}"
    attempt.mkdir(parents=True)
    recover(run, attempt)
    assert checkpoints_to_resume(run) == found[::-1]
    assert not list(checkpoints.glob(".*")), "left over"
    save(run, number, 8)
    is_whole(checkpoint_directory(run, 8), 8)
    assert sorted(checkpoints.iterdir()) == [*found[-1:], checkpoint_directory(run, 8)]


def all_saves(disk: Disk) -> tuple[list[str], list[int]]:
    """Save the steps on a disk; return the warnings, and when each save had returned."""
    warnings, ends = list[str](), list[int]()
    with disk.watched():
        for step in STEPS:
            warnings += save(disk.root, 1, step)
            ends.append(len(disk.done))
    return warnings, ends


@pytest.fixture(scope="module", autouse=True)
def no_waiting() -> Iterator[None]:
    """Leave out the wait for the real disk: what an fsync does for a power cut is computed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Disk, list[int]]:
    """The saves, and when each had returned."""
    disk = Disk(new_run(tmp_path_factory.mktemp("undisturbed") / "run"))
    warnings, ends = all_saves(disk)
    left = sorted(path.name for path in (disk.root / "checkpoints").iterdir())
    assert not warnings and left == ["step-00000004", "step-00000006"]
    # Every kind of operation is seen: an operation that is not noted is not tested.
    kinds = {words.split()[0] for words, _ in disk.done}
    assert kinds == {"mkdir", "open", "write", "fsync", "rename", "unlink", "read", "list"}
    return disk, ends


def published(ends: list[int], at: int) -> int | None:
    """Return the last step whose save had returned before operation `at`."""
    return max((step for step, end in zip(STEPS, ends) if end <= at), default=None)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.torture)])
def test_a_disk_that_refuses_any_operation_harms_no_checkpoint(undisturbed, tmp_path, first):
    """What goes before the checkpoint's name is an error; what comes after it is a warning.

    One operation in two fails with ENOSPC and the others with EIO, or the other way around.
    """
    whole, ends = undisturbed
    silent = []
    for number, (words, _) in enumerate(whole.done):
        error = (errno.ENOSPC, errno.EIO)[(number + first) % 2]
        disk = Disk(new_run(tmp_path / f"{number}"), fail_at=number, error=error)
        run, warnings, raised = disk.root, [], None
        try:
            warnings, _ = all_saves(disk)
        except OSError as refused:
            raised = refused
        try:
            assert disk.has_failed
            has_name = named_by_step(run / "checkpoints")
            if raised is not None:
                assert raised.errno == error
                # Only the flush of the name comes when the checkpoint has it.
                is_flush = words in ("open checkpoints", "fsync checkpoints")
                returned = sum(end <= number for end in ends)
                assert len(has_name) == returned or is_flush, words
            elif not warnings:
                silent.append(words)
            is_resumable(run, published(ends, number))
        except Exception as failure:
            raise AssertionError(f"operation {number}, {words}, was refused") from failure
    # Who looks for what may be deleted passes over what cannot be read, which then stays.
    assert {words.split()[0] for words in silent} <= {"read"}, silent


@pytest.mark.parametrize(("seed", "draws"), mark_torture([(1, 3), (2, 60)], {(1, 3)}))
def test_a_power_cut_after_any_operation_loses_no_checkpoint(undisturbed, tmp_path, seed, draws):
    """All, as after a kill, none, and random parts of what was not flushed reach the disk."""
    disk, ends = undisturbed
    dice = random.Random(seed)
    share = 0.5
    ways = [lambda: True, lambda: False, *[lambda: dice.random() < share] * draws]
    known = set()
    for number in range(len(disk.done) + 1):
        for way, survives in enumerate(ways):
            share = dice.choice((0.1, 0.5, 0.9))
            tree = disk.after_power_cut(number, survives)
            state = (frozenset(tree.items()), published(ends, number))
            if state in known:
                continue
            known.add(state)
            # The folders of attempts were there long before.
            run = new_run(tmp_path / f"{number}-{way}")
            build(run, tree)
            try:
                is_resumable(run, published(ends, number))
            except Exception as error:
                last = disk.done[number - 1][0] if number else "nothing"
                raise AssertionError(f"cut after operation {number}, {last}; {way}") from error
    assert len(known) > len(disk.done) / 4


# ---- what a killed `checkpoint prune`, or a kill while a run turns back, leaves behind -----------
def three_saved(run: Path) -> None:
    """Make a run of three checkpoints with metrics, whose first attempt has ended."""
    (run / "attempts").mkdir()
    (run / "attempts/0001").mkdir()
    for step in STEPS:
        write(run, step, ORIGIN, values(step, SHAPES), 1, CONFIG, identifier=f"{step:016x}")
    replace_file(run / "metrics.jsonl", "".join(f'{{"step": {n}}}\n' for n in range(1, 7)))
    replace_file(run / "attempts/0001/ended.json", "{}")


def pruned(run: Path) -> None:
    prune(run, Policy(1))


def turned_back(run: Path) -> None:
    """Go on from the first checkpoint, as a start does."""
    attempt = run / f"attempts/{len(list(run.glob('attempts/0*'))) + 1:04d}"
    attempt.mkdir()
    recover(run, attempt)
    first = open_checkpoint(checkpoint_directory(run, 2))
    settle(run, first.path, first.lineage, None, attempt)


@pytest.mark.parametrize(
    ("act", "kept", "last"), [(pruned, STEPS[1:], STEPS[-1]), (turned_back, STEPS[:1], 2)]
)
def test_after_a_kill_at_any_operation_the_next_call_leaves_nothing(act, kept, last, tmp_path):
    whole = Disk(tmp_path / "whole")
    whole.root.mkdir()
    with whole.watched():
        three_saved(whole.root)
        begin = len(whole.done)
        act(whole.root)
    littered = 0
    for number, (words, _) in enumerate(whole.done[begin:], begin):
        disk = Disk(tmp_path / f"{number}", fail_at=number)
        disk.root.mkdir()
        with pytest.raises(Killed), disk.watched():
            three_saved(disk.root)
            act(disk.root)
        littered += any(disk.root.rglob(".*"))
        act(disk.root)
        found = tuple(int(path.name[5:]) for path in named_by_step(disk.root / "checkpoints"))
        assert (found, list(disk.root.rglob(".*"))) == (kept, []), words
        steps = [line["step"] for line in read_metrics(disk.root / "metrics.jsonl")]
        assert steps == list(range(1, last + 1)), words
    assert littered > 3, (len(whole.done) - begin, littered)

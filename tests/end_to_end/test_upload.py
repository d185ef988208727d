"""Checkpoints are uploaded beside training, and an empty node goes on from there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from pretrain.checkpoint.load import load_global_state
from pretrain.checkpoint.manifest import MASTER, open_checkpoint
from pretrain.checkpoint.store import Store
from pretrain.rundir.checkpoints import checkpoint_directory, complete_checkpoints
from tests.end_to_end.commands import (
    Done,
    pretrain,
    running_ranks,
    sets,
    succeeded,
    untimed,
)


def command(config: Path, run: Path, store: Path, steps: int, *options: object) -> list[object]:
    settings = [
        f"run.directory={run}", f"train.num_steps={steps}", "checkpoint.interval_steps=2",
        f"checkpoint.upload_to=file://{store}", "evaluation.interval_steps=100",
        "evaluation.lengths=[32]", "evaluation.max_tokens=512",
    ]  # fmt: skip
    return ["train", config, *sets(*settings), *options]


def train(config: Path, run: Path, store: Path, steps: int, *options: object) -> Done:
    return pretrain(*command(config, run, store, steps, *options))


def test_an_empty_node_goes_on_from_the_store_bit_for_bit(config, workspace):
    whole, run, store = (workspace / name for name in ("whole", "run", "store"))
    assert train(config, whole, workspace / "other", 6).code == 0
    done = train(config, run, store, 4)
    assert done.code == 0 and "warning" not in done.err, done.err
    assert [s.step for s in Store(f"file://{store}").checkpoints()] == [2, 4]
    identifier = json.loads((run / "run.json").read_text())["id"]
    shutil.rmtree(run)
    done = succeeded(train(config, run, store, 6))
    assert f"downloading file://{store}/step-00000004" in done.err
    assert "going on from step 4" in done.err
    a, b = (open_checkpoint(checkpoint_directory(each, 6)) for each in (whole, run))
    for kind in (MASTER, *a.config.moments):
        one, two = (load_global_state(each, kind) for each in (a, b))
        assert all(torch.equal(one[name], two[name]) for name in one)
    # The run's id and its numbers are back, too.
    assert json.loads((run / "run.json").read_text())["id"] == identifier
    assert [r["step"] for r in untimed(run) if "evaluation" not in r] == [1, 2, 3, 4, 5, 6]
    assert (a.adam_steps, a.trainer_state) == (b.adam_steps, b.trainer_state)
    assert [s.step for s in Store(f"file://{store}").checkpoints()] == [2, 4, 6]
    # By its URL, into another directory, by two processes.
    third = workspace / "third"
    words = command(config, third, store, 8, "--resume", f"file://{store}")
    with running_ranks(words, 2) as started:
        assert [done.code for done in started.done()] == [0, 0], started.said(0)
        assert started.said(0).count("downloading") == 1 and "downloading" not in started.said(1)
    assert [path.name[-1] for path in complete_checkpoints(third)] == ["6", "8"]
    assert [s.step for s in Store(f"file://{store}").checkpoints()] == [2, 4, 6, 8]
    # Whoever names a checkpoint begins a branch, as the store may hold another continuation.
    assert len(open_checkpoint(checkpoint_directory(third, 8)).lineage.branches) == 2

"""A run is itself, wherever it lies: copied, moved, removed or replaced while it trains."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pretrain.checkpoint.store import Store
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import complete_checkpoints, read_lineage
from pretrain.rundir.paths import ExitCode
from tests.end_to_end.commands import (
    LAUNCHER,
    PRETRAIN,
    Running,
    contents,
    explained,
    forked,
    metrics,
    pretrain,
    sets,
    succeeds,
    wait_for,
)

SETTINGS = (
    "evaluation.lengths=[32]",
    "evaluation.max_tokens=512",
    "evaluation.interval_steps=100000",
    "train.num_steps=100000",
)


def words(run: Path, *settings: str) -> list[str]:
    return sets(*SETTINGS, f"run.directory={run}", "checkpoint.interval_steps=40", *settings)


@contextmanager
def training(*command: object) -> Iterator[Running]:
    process = Running(list(command))
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.ended()


def saved(run: Path, count: int = 1) -> Callable[[], bool]:
    return lambda: len(complete_checkpoints(run)) >= count


def identity(run: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((run / "run.json").read_text())
    return content


def test_a_copy_of_a_run_that_trains_is_a_run_of_its_own(workspace, config):
    run, copy = workspace / "runs/original", workspace / "runs/copy"
    with training(*PRETRAIN, "train", config, *words(run)) as process:
        wait_for(saved(run, 3))
        process.send_signal(signal.SIGSTOP)
        shutil.copytree(run, copy)
        status = forked([*LAUNCHER, "status", str(copy)])
        assert status.code == 0 and "copied" in status.out and "running" not in status.out
        prune = ("checkpoint", "prune", "--keep", 2, "--yes")
        assert "deleted" in succeeds(*prune, copy).out
        explained(pretrain(*prune, run), 2, "kill")
        last = int(complete_checkpoints(copy)[-1].name[5:])
        succeeds("train", config, *words(copy, f"train.num_steps={last + 2}"))
        newest = complete_checkpoints(run)[-1]
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: process.poll() is not None or complete_checkpoints(run)[-1] != newest)
        assert process.poll() is None, process.said()
        process.send_signal(signal.SIGTERM)
        done = process.ended()
        assert done.code == ExitCode.STOPPED, done.text
    ids = identity(run)["id"], identity(copy)["id"]
    assert len(set(ids)) == 2 and identity(copy)["copy_of"] == ids[0]
    # What the two saved since lies on two branches.
    theirs, own = (read_lineage(complete_checkpoints(each)[-1]) for each in (run, copy))
    assert (
        theirs and own and not own.is_ancestor_of(theirs) and own.branches[:-1] == theirs.branches
    )


def test_a_copy_sends_nothing_to_the_original_s_store_and_wandb_run(workspace, config):
    run, copy, store, other = (workspace / "runs" / name for name in ("a", "b", "store", "other"))
    few = ("checkpoint.interval_steps=2", "logging.wandb=offline")
    to, elsewhere = (f"checkpoint.upload_to=file://{each}" for each in (store, other))
    succeeds("train", config, *words(run, *few, to, "train.num_steps=2"))
    shutil.copytree(run, copy)
    later = (to, "train.num_steps=4", "logging.wandb=disabled")
    succeeds("train", config, *words(run, *few, *later))
    before, first = contents(store), (run / "wandb_run_id").read_text()
    copied = words(copy, *few, to, "train.num_steps=4")
    remedy = f"{store}: holds the checkpoints of run {identity(run)['id']}, which {copy} is a copy"
    explained(pretrain("train", config, *copied), 2, remedy)
    assert identity(copy) == identity(run) and len(complete_checkpoints(copy)) == 1
    done = succeeds("train", config, *words(copy, *few, elsewhere, "train.num_steps=4"))
    assert done.err.count("also at W&B") == 1, done.err
    assert (run / "wandb_run_id").read_text() == first != (copy / "wandb_run_id").read_text()
    assert [each.step for each in Store(f"file://{other}").checkpoints()] == [2, 4]
    # Nothing goes to the other one by hand, either.
    assert remedy in pretrain("checkpoint", "upload", copy, "--to", f"file://{store}").text
    assert contents(store) == before


def test_a_run_that_was_moved_after_a_branch_goes_on(workspace, config):
    run, moved = workspace / "runs/branched", workspace / "runs/branched moved"
    few = ("train.num_steps=8", "checkpoint.interval_steps=4")
    succeeds("train", config, *words(run, *few))
    first = run / "checkpoints/step-00000004"
    succeeds(
        "train",
        config,
        *words(run, *few, "run.seed=5"),
        "--resume",
        first,
        "--allow-changed",
        "run.seed",
    )
    left = run / "abandoned/0001/step-00000008"
    # Killed before it saves anything, so that it is not clear what to go on from.
    argv = [
        *PRETRAIN,
        "train",
        config,
        *words(run, "checkpoint.interval_steps=100000"),
        "--resume",
        left,
    ]
    with training(*argv):
        wait_for(lambda: (run / "abandoned/0002").exists() and len(metrics(run)) > 10)
    was = identity(run)
    run.rename(moved)
    done = forked([*PRETRAIN, "train", str(config), *words(moved, *few)])
    explained(done, 2, f"--resume {moved}/abandoned/0001/step-00000008")
    succeeds(
        "train",
        config,
        *words(moved, *few, "train.num_steps=10"),
        "--resume",
        moved / left.relative_to(run),
    )
    assert identity(moved) == was and not run.exists()


@pytest.mark.parametrize("supervised", [pytest.param(False, marks=pytest.mark.torture), True])
@pytest.mark.parametrize("harm", ["moved", "removed", "replaced", "attempts"])
def test_a_directory_that_goes_away_is_said_as_what_it_is(workspace, config, harm, supervised):
    name = f"{harm}-{supervised}"
    run, other = workspace / "runs" / name, workspace / "runs" / f"{name}-moved"
    start = (
        [*LAUNCHER, "local", config, "--nproc", "1"] if supervised else [*PRETRAIN, "train", config]
    )
    with training(*start, *words(run)) as process:
        wait_for(saved(run))
        process.send_signal(signal.SIGSTOP)
        if harm == "attempts":
            shutil.rmtree(run / "attempts")
        elif harm == "removed":
            run.rename(other)
            shutil.rmtree(other)
        else:
            run.rename(other)
        if harm == "replaced":
            shutil.copytree(other, run)
        process.send_signal(signal.SIGCONT)
        done = process.ended()
    assert done.code == ExitCode.FAILED and "Traceback" not in done.text, done.text
    what = {
        "moved": f"it was moved to {other}",
        "removed": "it was moved or removed",
        "replaced": f"another directory has taken its place: it was moved to {other}",
        "attempts": f"{run}/attempts: is not there any more",
    }[harm]
    assert what in done.err and "goes on from its newest checkpoint" in done.err, done.err
    assert not any(
        w in done.err for w in ("Make room", "disk space", "has taken over", "starting again")
    )
    assert run.exists() == (harm in ("replaced", "attempts"))
    if harm in ("moved", "replaced"):
        [attempt] = read_attempts(other)
        assert attempt.ended and "moved to" in attempt.ended.reason
        assert not list(other.glob("checkpoints/.*"))
        # As told, it goes on where it lies now.
        last = int(complete_checkpoints(other)[-1].name[5:])
        succeeds("train", config, *words(other, f"train.num_steps={last + 1}"))
        steps = [r["step"] for r in metrics(other) if "evaluation" not in r]
        assert steps == list(range(1, last + 2))

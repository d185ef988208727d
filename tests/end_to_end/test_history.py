"""One history for a run: branches, damage, retention and foreign files, with real processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.rundir.checkpoints import complete_checkpoints, hold, read_lineage
from tests.end_to_end.commands import (
    Done,
    explained,
    flip,
    metrics,
    pretrain,
    sets,
    succeeded,
    succeeds,
)

SHORT = ("evaluation.lengths=[32]", "evaluation.max_tokens=512", "checkpoint.interval_steps=2")
Train = Callable[..., Done]


@pytest.fixture(scope="module")
def eight(workspace: Path, config: Path) -> Path:
    """A run of 8 steps with checkpoints after 2, 4, 6 and 8."""
    words = [w for s in (*SHORT, f"run.directory={workspace}/runs/eight") for w in ("--set", s)]
    succeeds("train", config, *words)
    return workspace / "runs/eight"


@pytest.fixture
def copy(eight: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of it that may be changed."""
    return Path(shutil.copytree(eight, eight.with_name(request.node.name[:60])))


@pytest.fixture
def train(config: Path, copy: Path) -> Train:
    """Return train(*options, num_steps=8), which trains the copy."""

    def run(*options: object, settings: tuple[str, ...] = (), **limits: int) -> Done:
        words = sets(*SHORT, f"run.directory={copy}", *settings)
        return pretrain("train", config, *words, *options, **limits)

    return run


def steps(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete_checkpoints(run)]


def step(run: Path, number: int) -> Path:
    return run / f"checkpoints/step-{number:08d}"


def trained_steps(run: Path) -> list[int]:
    return [r["step"] for r in metrics(run) if "evaluation" not in r]


def other_branch(train: Train, copy: Path, to: int = 6) -> None:
    """Go back to step 4 and train to step 6 on a new branch."""
    done = train("--resume", step(copy, 4), settings=(f"train.num_steps={to}",))
    assert done.code == 0 and "going on from step 4" in done.err, done.err


# ---- branches ------------------------------------------------------------------------------------
def test_auto_follows_the_branch_that_was_begun_last(copy, train):
    (copy / "evaluations/step-00000008").mkdir(parents=True)
    before = (copy / "metrics.jsonl").read_text().splitlines()
    other_branch(train, copy)
    assert steps(copy) == [2, 4, 6]
    aside = copy / "abandoned/0001"
    assert {path.name for path in aside.iterdir()} == {
        "why.json",
        "metrics.jsonl",
        "evaluations",
        "step-00000006",
        "step-00000008",
    }
    assert (aside / "evaluations/step-00000008").is_dir()
    assert not list((copy / "evaluations").glob("step-*"))
    kept = (aside / "metrics.jsonl").read_text().splitlines()
    assert kept == [line for line in before if json.loads(line)["step"] > 4]
    why = json.loads((aside / "why.json").read_text())
    assert (why["step"], why["id"]) == (4, read_lineage(step(copy, 4)).id)
    assert "goes on from step 4" in why["reason"]
    old, new = read_lineage(aside / "step-00000006"), read_lineage(step(copy, 6))
    assert len(new.branches) == len(old.branches) + 1 and new.branches[-1].since == 4
    assert read_lineage(step(copy, 4)).is_ancestor_of(new) and not old.is_ancestor_of(new)
    # The old branch's step 8 is further, and is not what the run goes on from.
    done = train(settings=("train.num_steps=10",))
    assert done.code == 0 and "going on from step 6, to step 10" in done.err, done.err
    assert steps(copy) == [2, 4, 6, 8, 10] and trained_steps(copy) == list(range(1, 11))
    assert len(read_lineage(step(copy, 10)).branches) == 2
    line = [read_lineage(step(copy, number)) for number in (2, 4, 6, 8, 10)]
    assert [each.parent for each in line] == [None, *(each.id for each in line[:-1])]
    # By name, what was set aside is gone on from, and what does not lead to it leaves.
    done = train("--resume", aside / "step-00000008", settings=("train.num_steps=9",))
    assert done.code == 0 and "going on from step 8, to step 9" in done.err, done.err
    assert steps(copy) == [2, 4, 9]
    assert read_lineage(aside / "step-00000008").is_ancestor_of(read_lineage(step(copy, 9)))
    assert {path.name for path in (copy / "abandoned/0002").glob("step-*")} == {
        "step-00000006",
        "step-00000008",
        "step-00000010",
    }


def test_the_evaluation_of_another_line_is_not_taken_for_its_own(copy, train, config):
    """A stopped run's step is saved before it is evaluated, which the next start makes up for."""
    evaluated = ("evaluation.interval_steps=4",)
    other_run = copy.parent / "another line"
    settings = (*SHORT, f"run.directory={other_run}", "train.num_steps=4", *evaluated)
    succeeds("train", config, *(w for s in settings for w in ("--set", s)))
    succeeded(train("--resume", step(other_run, 4), settings=evaluated))
    evaluations = [r["step"] for r in metrics(copy) if r.get("evaluation")]
    assert evaluations == [4, 8], evaluations


def test_two_lines_that_a_user_mixed_are_refused(copy, train, tmp_path):
    other_branch(train, copy)
    (copy / "abandoned/0001/step-00000008").rename(step(copy, 8))
    words = step(copy, 8), step(copy, 6), "cannot be known", f"--resume {step(copy, 8)}"
    explained(train(), 2, *words)
    for command in (["evaluate", copy], ["export", copy, tmp_path / "hf"]):
        explained(pretrain(*command), 2, *words)
    succeeded(train("--resume", step(copy, 8), settings=("train.num_steps=10",)))
    assert steps(copy) == [2, 4, 8, 10]
    assert (copy / "abandoned/0002/step-00000006").is_dir()


@pytest.mark.parametrize(("source", "name"), [(2, 8), (4, 99)])
def test_a_directory_whose_name_is_not_its_contents(copy, train, tmp_path, source, name):
    shutil.rmtree(step(copy, name), ignore_errors=True)
    shutil.copytree(step(copy, source), step(copy, name))
    words = f"{step(copy, name)}: holds step {source}", f"step-{source:08d}"
    explained(train(settings=("train.num_steps=100",)), 2, *words)
    explained(train("--resume", step(copy, name)), 2, *words)
    for command in (["evaluate", copy], ["export", step(copy, name), tmp_path / "hf"]):
        explained(pretrain(*command), 2, *words)


def test_a_checkpoint_elsewhere_after_which_nothing_was_saved(copy, train, config):
    """What the run turned away from is not gone on from silently, nor is it begun from scratch."""
    other_run = copy.parent / "other"
    settings = (*SHORT, f"run.directory={other_run}", "train.num_steps=4")
    done = succeeds("train", config, *(w for s in settings for w in ("--set", s)))
    other = step(other_run, 4)
    # The first save of the new branch fails, and so does the run.
    done = train("--resume", other, largest_file=20_000)
    assert done.code == 1, done.err
    assert steps(copy) == [] and len(list((copy / "abandoned/0001").glob("step-*"))) == 4
    explained(train(), 2, "abandoned/0001/why.json", f"--resume {other}")
    done = train("--resume", other)
    assert done.code == 0 and steps(copy) == [6, 8], done.err
    assert train(settings=("train.num_steps=9",)).code == 0


def test_a_checkpoint_turned_away_from_after_which_nothing_was_saved(copy, train):
    """The ancestors that it shares with the line before are not gone on from silently."""
    other_branch(train, copy)
    aside, further = copy / "abandoned/0001/step-00000008", ("train.num_steps=10",)
    # The first save of the new branch fails, and so does the run.
    assert train("--resume", aside, settings=further, largest_file=20_000).code == 1
    assert steps(copy) == [2, 4]
    explained(train(settings=further), 2, f"last started from {aside}", f"--resume {aside}")
    # Another one may be named; what it saves is gone on from.
    succeeded(train("--resume", step(copy, 4), settings=("train.num_steps=5",)))
    assert "going on from step 5" in succeeded(train(settings=("train.num_steps=6",))).err


# ---- damage --------------------------------------------------------------------------------------
def weights_file(checkpoint: Path) -> Path:
    """The file with this rank's tensors, in whatever format."""
    return max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)


DAMAGE = {
    "weights": lambda checkpoint: flip(weights_file(checkpoint)),
    "manifest": lambda checkpoint: (checkpoint / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_does_not_stop_the_run(copy, train, kind):
    DAMAGE[kind](step(copy, 8))
    done = succeeded(train(settings=("train.num_steps=10",)))
    assert f"{step(copy, 8)} is passed over (" in done.err and "2 steps are lost" in done.err, (
        done.err
    )
    assert steps(copy) == [2, 4, 6, 8, 10] and trained_steps(copy) == list(range(1, 11))
    why = json.loads((copy / "abandoned/0001/why.json").read_text())
    assert why["reason"].startswith("passed over: step-00000008: ") and why["step"] == 6
    assert (copy / "abandoned/0001/step-00000008").is_dir()
    assert read_lineage(step(copy, 6)).is_ancestor_of(read_lineage(step(copy, 10)))
    # Whatever the manifest was, the lost step 8 and the new one are not of one branch.
    whole = read_lineage(step(copy.with_name("eight"), 8))
    assert not whole.is_ancestor_of(read_lineage(step(copy, 10)))


# ---- steps and foreign files ---------------------------------------------------------------------
def test_foreign_things_named_like_a_save_are_left_alone(copy, train, tmp_path):
    (tmp_path / "kept").write_text("mine")
    folder = copy / "checkpoints"
    (folder / ".step-00000010.partial").write_text("mine")
    (folder / ".step-00000009.partial").symlink_to(tmp_path)
    (folder / ".step-00000010.0001-0123456789abcdef.partial").write_text("mine")
    (folder / ".step-00000010.removed").symlink_to(tmp_path)
    left_over = folder / ".step-00000010.0001-0123456789abcdee.partial"
    left_over.mkdir()
    (left_over / "rank-00000.safetensors").write_text("half")
    # A user's notes under the name of a step to come.
    step(copy, 10).mkdir()
    (step(copy, 10) / "notes.txt").write_text("mine")
    done = succeeded(train(settings=("train.num_steps=10",)))
    assert steps(copy) == [2, 4, 6, 8, 10]
    assert (copy / "abandoned/0001/step-00000010/notes.txt").read_text() == "mine"
    assert f"{step(copy, 10)} is passed over" in done.err
    assert (folder / ".step-00000010.partial").read_text() == "mine"
    assert (folder / ".step-00000010.0001-0123456789abcdef.partial").read_text() == "mine"
    assert (folder / ".step-00000010.removed").is_symlink() and (tmp_path / "kept").exists()
    assert not left_over.exists()


# ---- retention -----------------------------------------------------------------------------------
def test_retention_keeps_the_last_the_best_every_nth_and_what_is_held(copy, train):
    keep = "checkpoint.keep=1", "checkpoint.keep_every=6", "checkpoint.keep_best=1"
    evaluated = "evaluation.interval_steps=2", "checkpoint.interval_steps=1"
    with hold(step(copy, 2)):
        done = train(settings=(*keep, *evaluated, "train.num_steps=13"))
    assert done.code == 0, done.err
    losses = {
        number: json.loads((step(copy, number) / "manifest.json").read_text())
        for number in steps(copy)
    }
    # 2 was held, 4 was evaluated and saved (interval_steps = 4 before), 6 and 12 are multiples.
    assert {2, 6, 12, 13} <= set(losses)
    evaluated_here = {s: m["validation_loss_nats"] for s, m in losses.items()}
    assert evaluated_here[13] is not None and evaluated_here[12] is not None
    at = {
        r["step"]: r["loss_nats"]
        for r in metrics(copy)
        if r.get("evaluation") and r["length"] == 32
    }
    assert evaluated_here[12] == at[12] and evaluated_here[13] == at[13]
    assert len(losses) <= 5 and {12, 13} <= set(losses)
    done = train(settings=(*keep, *evaluated, "train.num_steps=14"))
    assert 2 not in steps(copy)

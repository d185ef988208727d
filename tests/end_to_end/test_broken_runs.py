"""Damaged checkpoints, and runs that cannot be resumed, evaluated or exported.

Each is refused with a message that says what is wrong and what to do, and no file changes.
"""

from __future__ import annotations

import shutil

import pytest

from pretrain.rundir.attempts import read_attempts
from tests.end_to_end.commands import (
    LAUNCHER,
    contents,
    copied,
    explained,
    flip,
    forked,
    pretrain,
)

STEP_4, STEP_8 = "checkpoints/step-00000004", "checkpoints/step-00000008"
WEIGHTS = "rank-00000.safetensors"


# ---- checkpoints ---------------------------------------------------------------------------------
SPOILED = {
    "flipped bit": (WEIGHTS, flip, ["are not what was written"]),
    "torn manifest": ("manifest.json", lambda path: path.write_text("{"), ["not a manifest"]),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_checkpoint(refused, config, run, tmp_path, name):
    file, spoil, words = SPOILED[name]
    copy = copied(run, run.with_name("damaged"))
    spoil(copy / STEP_8 / file)
    remedy = "The checkpoint is damaged: go on from an earlier one"
    for command in (["evaluate", copy], ["export", copy, tmp_path / "hf"]):
        refused(command, copy / STEP_8 / file, *words, remedy)
    assert not list(tmp_path.iterdir())
    before, attempts = contents(copy / "checkpoints"), read_attempts(copy)
    train = ["train", config, "--set", f"run.directory={copy}", "--set", "train.num_steps=12"]
    # By name; with `auto` the run goes on from the one before (tests/end_to_end/test_history.py).
    named = ["--resume", copy / STEP_8]
    explained(pretrain(*train, *named), 2, copy / STEP_8 / file, *words, remedy)
    assert contents(copy / "checkpoints") == before
    # Training begins an attempt only where the damage is found while loading, not before.
    for attempt in read_attempts(copy)[len(attempts) :]:
        assert (attempt.ended.code, attempt.ended.outcome) == (2, "refused")
        assert file in attempt.ended.reason


def test_a_run_whose_only_checkpoint_lost_its_manifest_is_not_begun_anew(refused, config, run):
    copy = copied(run, run.with_name("beheaded"))
    shutil.rmtree(copy / STEP_4)
    (copy / STEP_8 / "manifest.json").unlink()
    before = contents(copy)
    refused(
        ["train", config, "--set", f"run.directory={copy}"],
        "all of its checkpoints are damaged",
        f"{copy / STEP_8}/manifest.json: missing",
    )
    refused(
        ["train", config, "--set", f"run.directory={copy}", "--resume", "none"],
        f"{copy}: has checkpoints",
    )
    assert contents(copy) == before


# ---- what is written to --------------------------------------------------------------------------
def test_a_run_directory_that_cannot_be_one(refused, workspace, config):
    for directory in (config, config / "below"):
        refused(
            ["train", config, "--set", f"run.directory={directory}"],
            f"run.directory = {directory}",
            "Choose another",
        )
    before = contents(workspace)
    done = forked(
        [*LAUNCHER, "local", str(config), "--nproc", "2", "--set", f"run.directory={config}"]
    )
    explained(done, 2, "run.directory: cannot create", config, "Choose another")
    assert contents(workspace) == before


# ---- evaluation and export -----------------------------------------------------------------------
def test_what_is_no_run(refused, workspace, config, tmp_path):
    for path, what in (
        (tmp_path / "gone", "no such directory"),
        (workspace, "neither a run nor a checkpoint"),
        (config, "neither a run nor a checkpoint"),
    ):
        refused(["evaluate", path], f"{path}: {what}", "Give a run's directory")
        refused(["reach", path], f"{path}: {what}", "Give a run's directory")
        refused(["export", path, tmp_path / "hf"], f"{path}: {what}", "Give a run's directory")
        refused(["train", config, "--resume", path], f"{path}: {what}", "Give a run's")
    assert not list(tmp_path.iterdir())

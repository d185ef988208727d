"""Damaged checkpoints, full disks, and runs that cannot be resumed, evaluated or exported.

Each is refused with a message that says what is wrong and what to do, and no file changes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.rundir.attempts import read_attempts
from tests.end_to_end.commands import (
    LAUNCHER,
    contents,
    copied,
    explained,
    flip,
    forked,
    metrics,
    pretrain,
    sets,
    succeeds,
)

STEP_4, STEP_8 = "checkpoints/step-00000004", "checkpoints/step-00000008"
WEIGHTS = "rank-00000.safetensors"


def trained(workspace: Path, name: str, *settings: str) -> Path:
    """Train a run of two steps in runs/<name> and return its directory."""
    overrides = [
        f"run.directory={workspace}/runs/{name}",
        "train.num_steps=2",
        "evaluation.lengths=[16]",
        *settings,
    ]
    succeeds("train", workspace / "run.toml", *sets(*overrides))
    return workspace / "runs" / name


# ---- checkpoints ---------------------------------------------------------------------------------
SPOILED = {
    "flipped bit": (WEIGHTS, flip, ["are not what was written"]),
    "missing weights": (WEIGHTS, Path.unlink, ["missing"]),
    "torn state": ("state.json", lambda path: path.write_text("{"), ["1 bytes, the manifest says"]),
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


def test_resume(refused, config, run, tmp_path):
    refused(
        ["train", config, "--resume", "none"],
        f"{run}: has checkpoints",
        "--resume auto",
        "another run.directory",
    )
    refused(
        ["train", config, "--resume", tmp_path / "gone"],
        f"{tmp_path}/gone: no such directory",
        "Give a run's",
    )
    refused(
        ["train", config, "--resume", tmp_path],
        f"{tmp_path}: neither a run nor a checkpoint",
        "Give a run's",
    )


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


def test_a_full_disk_while_training(workspace, config):
    """Exit code 1 and no partial checkpoint; once there is room, the same command resumes."""
    directory = workspace / "runs/full"
    command = ["train", config, "--set", f"run.directory={directory}"]
    explained(
        pretrain(*command, largest_file=800),
        1,
        f"{directory}: cannot be written (File too large",
        "ulimit -f",
    )
    done = pretrain(*command, largest_file=20_000)
    explained(done, 1, f"{directory / STEP_4}: cannot be written", "ulimit -f")
    assert not list((directory / "checkpoints").iterdir())
    done = succeeds(*command)
    assert [r["step"] for r in metrics(directory) if "evaluation" not in r] == list(range(1, 9))


def test_a_full_disk_while_exporting(run, tmp_path):
    out = tmp_path / "hf"
    explained(
        pretrain("export", run, out, largest_file=20_000),
        1,
        f"{out}: cannot be written",
        "File too large",
    )
    assert list(tmp_path.iterdir()) == []
    succeeds("export", run, out)
    before = contents(tmp_path)
    explained(
        pretrain("export", run, out / "config.json/hf"),
        1,
        f"{out}/config.json/hf: cannot be written",
    )
    assert contents(tmp_path) == before


# ---- evaluation and export -----------------------------------------------------------------------
def test_what_is_no_run(refused, workspace, config, tmp_path):
    for path, what in (
        (tmp_path / "gone", "no such directory"),
        (workspace, "neither a run nor a checkpoint"),
        (config, "neither a run nor a checkpoint"),
    ):
        refused(["evaluate", path], f"{path}: {what}", "Give a run's directory")
        refused(["export", path, tmp_path / "hf"], f"{path}: {what}", "Give a run's directory")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lengths", "abc"], "--lengths abc: expected numbers of tokens"),
        (["--lengths", "32", "--stride", "48"], "--stride 48: longer than the shortest window of"),
        (["--set", "data.sequence_length=64"], "data.sequence_length = 64"),
    ],
)
def test_what_cannot_be_evaluated(refused, run, options, words):
    refused(["evaluate", run, *options], words)


def test_a_learned_table_has_an_end(refused, workspace):
    learned = trained(workspace, "learned", "position.method=learned")
    words = (
        "evaluation.lengths = 64",
        "the learned position table holds 32 positions",
        "Choose a shorter length",
    )
    refused(["evaluate", learned, "--lengths", "32,64"], *words)
    succeeds("evaluate", learned, "--lengths", "16,32")


def test_what_has_no_stock_class_is_not_exported(refused, workspace, tmp_path):
    source = trained(workspace, "export-t5", "position.method=t5")
    refused(
        ["export", source, tmp_path / "hf"],
        "position.method = t5: ",
        "to export, train with alibi",
    )
    assert not list(tmp_path.iterdir())


def test_an_export_replaces_nothing(refused, run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for there in (tmp_path, tmp_path / "notes.txt"):
        refused(["export", run, there], f"{there}: already exists and is not an empty folder")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"

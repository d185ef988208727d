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
    fresh,
    metrics,
    pretrain,
    sets,
    succeeds,
    truncate,
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
    "truncated": (WEIGHTS, truncate, ["bytes, the manifest says"]),
    "missing weights": (WEIGHTS, Path.unlink, ["missing"]),
    "other config": ("config.toml", flip, ["its SHA-256 is not the manifest's"]),
    "missing config": ("config.toml", Path.unlink, ["missing"]),
    "torn state": ("state.json", lambda path: path.write_text("{"), ["1 bytes, the manifest says"]),
    "torn manifest": ("manifest.json", lambda path: path.write_text("{"), ["not a manifest"]),
    "other manifest": ("manifest.json", lambda path: path.write_text("[]"), ["not a manifest"]),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_checkpoint(refused, config, run, tmp_path, name):
    file, spoil, words = SPOILED[name]
    copy = copied(run, run.with_name("damaged"))
    spoil(copy / STEP_8 / file)
    remedy = f"The checkpoint is damaged. The one before it is {copy / STEP_4}"
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


def test_the_remedy_for_a_damaged_checkpoint(config, run):
    """The remedy in the message works.

    The run resumes from the earlier checkpoint, and a new checkpoint takes the damaged one's place.
    """
    copy = copied(run, run.with_name("repaired"))
    flip(copy / STEP_8 / WEIGHTS)
    done = pretrain("train", config, "--resume", copy / STEP_4, "--set", f"run.directory={copy}")
    assert done.code == 0 and f"{copy}: going on from step 4, to step 8" in done.err, done.err
    succeeds("evaluate", copy, "--lengths", "32")
    assert (copy / STEP_8 / WEIGHTS).read_bytes() == (run / STEP_8 / WEIGHTS).read_bytes()
    assert not list((copy / "checkpoints").glob(".*"))


def test_a_damaged_checkpoint_without_an_earlier_one(refused, run):
    copy = copied(run, run.with_name("single"))
    shutil.rmtree(copy / STEP_4)
    flip(copy / STEP_8 / WEIGHTS)
    refused(["evaluate", copy], "there is no earlier one", "train anew in another run.directory")


def test_a_run_whose_only_checkpoint_lost_its_manifest_is_not_begun_anew(refused, config, run):
    copy = copied(run, run.with_name("beheaded"))
    shutil.rmtree(copy / STEP_4)
    (copy / STEP_8 / "manifest.json").unlink()
    before = contents(copy)
    refused(
        ["train", config, "--set", f"run.directory={copy}"],
        f"{copy / STEP_8}: holds weights but no manifest.json",
    )
    assert contents(copy) == before


def test_a_checkpoint_without_its_manifest(refused, run):
    """As of a run, see tests/end_to_end/test_evaluate.py."""
    copy = copied(run, run.with_name("incomplete"))
    (copy / STEP_8 / "manifest.json").unlink()
    refused(
        ["evaluate", copy / STEP_8],
        f"{copy / STEP_8}: not a complete checkpoint, it has no manifest.json",
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.hidden_size=64", ["model.hidden_size = 64", "was trained with 32"]),
        ("position.method=rotary", ["position.method = rotary", "was trained with alibi"]),
    ],
)
def test_another_model_than_the_checkpoints(refused, config, run, setting, words):
    refused(
        ["train", config, "--set", setting],
        *words,
        run / STEP_8,
        "Keep it",
        "another run.directory",
    )
    refused(["evaluate", run, "--set", setting], *words, run / STEP_8)


@pytest.mark.parametrize("setting", ["run.seed=8", "data.sequence_length=16"])
def test_another_order_of_the_data_than_the_checkpoints(refused, config, run, setting):
    key, value = setting.split("=")
    refused(
        ["train", config, "--set", setting],
        f"{key} = {value}",
        "was trained with",
        run / STEP_8,
        "Keep it",
    )


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
    done = fresh(
        [*LAUNCHER, "local", str(config), "--nproc", "2", "--set", f"run.directory={config}"]
    )
    explained(done, 2, "run.directory: cannot create", config, "Choose another")
    assert contents(workspace) == before


def test_a_forced_attention_backend_that_cannot_serve(workspace, config):
    backend = "folded"
    settings = f"model.attention_backend={backend}", f"run.directory={workspace}/runs/{backend}"
    done = pretrain("train", config, *sets(*settings))
    explained(
        done, 2, f"model.attention_backend = {backend}: ", "cannot serve", "Choose auto or sdpa"
    )


def test_a_full_disk_while_training(workspace, config):
    """Exit code 1 and no partial checkpoint; once there is room, the same command resumes."""
    directory = workspace / "runs/full"
    command = ["train", config, "--set", f"run.directory={directory}"]
    explained(
        pretrain(*command, largest_file=800),
        1,
        f"{directory}: cannot be written (File too large",
        "Make room",
    )
    done = pretrain(*command, largest_file=20_000)
    explained(done, 1, f"{directory / STEP_4}: cannot be written", "Make room")
    assert not list((directory / "checkpoints").iterdir())
    done = succeeds(*command)
    assert [r["step"] for r in metrics(directory) if "evaluation" not in r] == list(range(1, 9))


def test_a_full_disk_while_building_data(config, tmp_path):
    command = ["data", "build", config, "--set", f"data.directory={tmp_path}/data"]
    done = pretrain(*command, largest_file=50_000)
    explained(
        done, 1, f"{tmp_path}/.building-data: cannot be written (File too large)", "Make room"
    )
    assert [path.name for path in tmp_path.iterdir()] == [".building-data"]
    succeeds(*command)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_full_disk_while_exporting(run, tmp_path):
    out = tmp_path / "hf"
    succeeds("export", run, out)
    before = contents(tmp_path)
    explained(
        pretrain("export", run, out, largest_file=20_000),
        1,
        f"{out}: cannot be written",
        "File too large",
    )
    # The earlier export is still there, whole.
    assert contents(tmp_path) == before
    explained(
        pretrain("export", run, out / "config.json/hf"),
        1,
        f"{out}/config.json/hf: cannot be written",
    )
    assert contents(tmp_path) == before


def test_a_full_disk_while_reporting(run, tmp_path):
    out = tmp_path / "curve.json"
    done = pretrain("evaluate", run, "--lengths", "32", "--out", out, largest_file=2_000)
    explained(done, 1, f"{out}: cannot be written (File too large)", "Make room")
    # The numbers were printed before the report failed.
    assert "perplexity" in done.out
    assert not out.exists()


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
        (
            ["--lengths", "abc"],
            ["--lengths abc: expected numbers of tokens", "--lengths 128,256,512"],
        ),
        (["--lengths", ""], ["--lengths : expected numbers of tokens"]),
        (["--lengths", "32,0"], ["--lengths 32,0: expected lengths of 1 or more tokens"]),
        (
            ["--protocols", "foo"],
            ["--protocols foo: unknown protocol. Choose nonoverlapping or sliding"],
        ),
        (
            ["--lengths", "32,64", "--stride", "48"],
            ["--stride 48: longer than the shortest window of --lengths, 32", "Choose 32 or less"],
        ),
        (["--stride", "0"], ["--stride 0: expected 1 or more tokens"]),
        (["--max-tokens", "-5"], ["--max-tokens -5: expected 1 or more tokens"]),
        (["--out", "{folder}/report"], ["--out {folder}/report: the file name must end in .json"]),
        (
            ["--out", "{folder}/run.toml/curve.json"],
            ["--out {folder}/run.toml/curve.json", "Choose another"],
        ),
        (
            ["--set", "data.sequence_length=64"],
            ["data.sequence_length = 64", "trained at 32", "--lengths"],
        ),
    ],
)
def test_what_cannot_be_evaluated(refused, workspace, run, options, words):
    options, words = (
        [text.format(folder=workspace) for text in texts] for texts in (options, words)
    )
    refused(["evaluate", run, *options], *words)


def test_a_learned_table_has_an_end(refused, workspace):
    learned = trained(workspace, "learned", "position.method=learned")
    words = (
        "evaluation.lengths = 64",
        "the learned position table holds 32 positions",
        "Choose a shorter length",
    )
    refused(["evaluate", learned, "--lengths", "32,64"], *words)
    succeeds("evaluate", learned, "--lengths", "16,32")


@pytest.mark.parametrize("method", ["t5"])
def test_what_has_no_stock_class_is_not_exported(refused, workspace, tmp_path, method):
    source = trained(workspace, f"export-{method}", f"position.method={method}")
    refused(
        ["export", source, tmp_path / "hf"],
        f"position.method = {method}: ",
        "to export, train with alibi",
    )
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_export(refused, workspace, run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused(
        ["export", run, tmp_path],
        f"{tmp_path}: already exists and is not an earlier export",
        "Choose another folder",
    )
    refused(
        ["export", run, tmp_path / "notes.txt"],
        "already exists and is not an earlier export",
        "Choose another folder",
    )
    curve = ["--curve", tmp_path / "notes.txt"]
    refused(
        ["export", run, tmp_path / "hf", *curve],
        f"--curve {tmp_path}/notes.txt: not a curve.json",
        "evaluate --out",
    )
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"

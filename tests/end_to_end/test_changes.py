"""A resume with another config or data than the checkpoint: shown, refused, or allowed by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.checkpoint.manifest import Change, open_checkpoint
from pretrain.config import load_config
from pretrain.data.build import build
from pretrain.data.stream import TokenStream
from tests.end_to_end.commands import (
    LAUNCHER,
    copied,
    explained,
    forked,
    metrics,
    pretrain,
    sets,
    succeeds,
)
from tests.end_to_end.test_broken_runs import STEP_4, STEP_8

pytestmark = pytest.mark.usefixtures("run")
WORDS = "the crow said nothing and the wheel went round again under a red morning sky\n"


@pytest.fixture(scope="module")
def other_corpus(workspace, config, tiny_data) -> Path:
    """A data set of another text by the same tokenizer."""
    text = workspace / "crow.txt"
    text.write_text(WORDS * 200)
    return built(workspace / "crow", config, text, f"data.tokenizer={tiny_data}/tokenizer.model")


@pytest.fixture(scope="module")
def other_tokenizer(workspace, config) -> Path:
    """A data set by another tokenizer of as many pieces."""
    text = workspace / "letters.txt"
    # Words of their own, so that there are enough pairs to merge.
    text.write_text("\n".join(f"{n * n * 7919:x} {n:o}" for n in range(20_000)))
    return built(workspace / "letters", config, text)


def built(directory: Path, config: Path, text: Path, *settings: str) -> Path:
    """Build a data set of one text and return its directory."""
    source = ["data.source=text", f'data.paths=["{text}"]', f"data.directory={directory}"]
    build(load_config(config, [*source, *settings]))
    assert TokenStream(directory / "train").manifest.vocab_size == 512
    return directory


# ---- data ----------------------------------------------------------------------------------------
def test_another_corpus_is_refused_until_it_is_allowed(workspace, config, run, other_corpus):
    """The data set moves, its content changes under the same path, and the change is allowed."""
    data, moved = workspace / "moved", copied(run, workspace / "runs/moved")
    train = ["train", config, *sets(f"run.directory={moved}", f"data.directory={data}")]
    before = Path(load_config(config).data.directory)
    copied(before, data)
    done = pretrain(*train, *sets("train.num_steps=9"))
    # The same tokens at another place are no change of training.
    assert done.code == 0 and f"{moved}: going on from step 8" in done.err, done.err
    assert f"data.directory = {before} -> {data}" in done.err
    assert metrics(moved)[: len(metrics(run))] == metrics(run)
    assert not any("changed" in record for record in metrics(moved))

    copied(other_corpus, data)
    old, new = TokenStream(before / "train").identity, TokenStream(data / "train").identity
    more = [*train, *sets("train.num_steps=10")]
    explained(
        pretrain(*more),
        2,
        f"data.directory = {data}: ",
        moved / "checkpoints/step-00000009",
        old[:12],
        new[:12],
        "--allow-changed data.directory",
    )
    done = pretrain(*more, "--allow-changed", "data.directory")
    assert done.code == 0 and "allowed by --allow-changed" in done.err, done.err
    origin = open_checkpoint(moved / "checkpoints/step-00000010").origin
    assert origin.changes == (Change(9, "data.directory", old, new, 9 * 8),)
    assert origin.data["training"] == new
    # The checkpoint has the new corpus, so it is not asked about again.
    succeeds(*train, *sets("train.num_steps=11"))
    assert open_checkpoint(moved / "checkpoints/step-00000011").origin.changes == origin.changes


def test_another_tokenizer(refused, workspace, config, run, other_tokenizer, tmp_path):
    """Refused by train, evaluate and export, although the vocabulary has as many pieces."""
    old = TokenStream(Path(load_config(config).data.directory) / "train").manifest.tokenizer_sha256
    new = TokenStream(other_tokenizer / "train").manifest.tokenizer_sha256
    train = ["train", config, *sets(f"data.directory={other_tokenizer}", "train.num_steps=12")]
    words = ["data.directory = ", "its tokenizer has the SHA-256", run / STEP_8, old[:12], new[:12]]
    refused(train, *words, "--allow-changed data.tokenizer")
    refused([*train, "--allow-changed", "data.directory"], "--allow-changed data.tokenizer")
    evaluate = ["evaluate", run, *sets(f"data.directory={other_tokenizer}")]
    refused([*evaluate, "--out", tmp_path / "report/curve.json"], *words)
    # An export takes the data set from the checkpoint's config.
    data = workspace / "replaced"
    copied(Path(load_config(config).data.directory), data)
    there = copied(run, workspace / "runs/replaced")
    settings = sets(f"run.directory={there}", f"data.directory={data}", "train.num_steps=9")
    succeeds("train", config, *settings)
    copied(other_tokenizer, data)
    words[2] = there / "checkpoints/step-00000009"
    for command in (["export", there, tmp_path / "hf"], ["evaluate", there]):
        refused(command, *words)
    assert not list(tmp_path.iterdir())


def test_evaluation_on_another_corpus_says_so(config, run, other_corpus):
    evaluate = ["evaluate", run, "--lengths", "32", "--max-tokens", "256"]
    evaluate += ["--protocols", "nonoverlapping"]
    done = pretrain(*evaluate)
    assert done.code == 0 and done.err == "", done.err
    done = succeeds(*evaluate, *sets(f"data.directory={other_corpus}"))
    [line] = done.err.splitlines()
    assert f"{other_corpus}" in line and "not the validation split" in line


# ---- the config ----------------------------------------------------------------------------------
CHANGES = [
    "run.seed=8",
    "data.sequence_length=16",
    "batch.global_batch_size=16",
    "optimizer.learning_rate=0.002",
    "optimizer.clip_grad=0.5",
    "schedule.lr_decay_style=linear",
    "train.precision=bf16",
]


def test_what_changes_training_is_refused_by_name(refused, config, run):
    said = [
        f"{setting.replace('=', ' = ')}: {run / STEP_8} was trained with" for setting in CHANGES
    ]
    options = [f"--allow-changed {setting.partition('=')[0]}" for setting in CHANGES]
    refused(["train", config, *sets(*CHANGES, "train.num_steps=12")], *said, *options)
    # An earlier checkpoint is no way around it, and allowing one key allows no other.
    refused(
        [
            "train",
            config,
            "--resume",
            run / STEP_4,
            *sets(*CHANGES[:2]),
            "--allow-changed",
            "run.seed",
        ],
        f"data.sequence_length = 16: {run / STEP_4} was trained with 32",
    )


def test_what_does_not_change_training_is_free_and_shown(workspace, config, run):
    there = copied(run, workspace / "runs/free")
    free = ["batch.micro_batch_size=8", "logging.interval_steps=1", "evaluation.lengths=[32]"]
    free += ["checkpoint.interval_steps=1", "recovery.max_restarts=0", "train.num_steps=10"]
    train = ["train", config, *sets(f"run.directory={there}", *free)]
    done = succeeds(*train)
    lines = done.err.splitlines()
    begin = lines.index(f"{there}: 7 differences from {there / STEP_8}:")
    shown = [" ".join(line.split()) for line in lines[begin + 1 : begin + 8]]
    assert "batch.micro_batch_size = 4 -> 8 (may change)" in shown
    assert "train.num_steps = 8 -> 10 (may change)" in shown
    assert open_checkpoint(there / "checkpoints/step-00000010").origin.changes == ()
    assert not any("changed" in record for record in metrics(there))
    # Nothing has changed, so nothing is shown.
    again = succeeds(*train[:-2], *sets("train.num_steps=11"))
    assert [line for line in again.err.splitlines() if "->" in line] == [
        "  train.num_steps = 10 -> 11  (may change)"
    ]
    # The steps so far began with other weights, and had the rates of another plan.
    plan = ["train.num_steps=12", "schedule.lr_decay_style=linear", "model.init_method_std=1.0"]
    done = succeeds(*train[:-2], *sets(*plan), "--allow-changed", "schedule.lr_decay_style")
    said = "train.num_steps = 11 -> 12  (may change, and moves the end of the schedule: not the"
    assert said in done.err
    changes = open_checkpoint(there / "checkpoints/step-00000012").origin.changes
    new = {"init_method_std": 1.0, "lr_decay_style": "linear", "lr_end_step": 12}
    assert {c.key.partition(".")[2]: c.after for c in changes} == new


def test_an_allowed_change_is_recorded_and_not_asked_about_again(workspace, config, run):
    there = copied(run, workspace / "runs/faster")
    settings = sets(f"run.directory={there}", "optimizer.learning_rate=0.002")
    train = ["train", config, "--resume", there / STEP_4, *settings]
    allow = ["--allow-changed", "optimizer.learning_rate", "--allow-changed", "run.seed"]
    shutil.rmtree(there / STEP_8)
    # The second start repeats the first, as after a failure before the next checkpoint.
    for _ in range(2):
        shutil.rmtree(there / STEP_8, ignore_errors=True)
        done = succeeds(*train, *allow)
        assert "optimizer.learning_rate = 0.001 -> 0.002  (changes training, allowed by" in done.err
    changed = {"step": 4, "changed": {"optimizer.learning_rate": [0.001, 0.002]}}
    records = metrics(there)
    assert [record for record in records if "changed" in record] == [changed]
    steps = [record["step"] for record in records if "gradient_norm" in record]
    assert steps == list(range(1, 9))
    assert {
        record["learning_rate"]
        for record in records
        if record["step"] > 4 and "learning_rate" in record
    } == {0.002}
    expected = (Change(4, "optimizer.learning_rate", 0.001, 0.002, 4 * 8),)
    assert open_checkpoint(there / STEP_8).origin.changes == expected
    # Without the option, and with it as a requeued job repeats it.
    for steps, options in ((9, []), (10, allow)):
        done = pretrain("train", config, *settings, *sets(f"train.num_steps={steps}"), *options)
        assert done.code == 0 and "allowed" not in done.err, done.err
    assert open_checkpoint(there / "checkpoints/step-00000010").origin.changes == expected
    assert [record for record in metrics(there) if "changed" in record] == [changed]
    # Back to the first value is a change as well.
    back = ["train", config, *sets(f"run.directory={there}", "train.num_steps=11")]
    explained(pretrain(*back), 2, "optimizer.learning_rate = 0.001", "was trained with 0.002")


WRONG = {
    "optimizer.learning_rat": "no such key, did you mean optimizer.learning_rate?",
    "optimizer": "no such key",
}


@pytest.mark.parametrize("key", WRONG)
def test_what_cannot_be_allowed(refused, workspace, config, key):
    words = ["--allow-changed", key]
    refused(["train", config, *words], f"--allow-changed {key}: {WRONG[key]}")
    done = forked([*LAUNCHER, "local", config, "--nproc", 1, *words])
    explained(done, 2, f"--allow-changed {key}: {WRONG[key]}")

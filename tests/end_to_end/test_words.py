"""Word-level data and an adaptive softmax, in the commands as a user types them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.end_to_end.commands import metrics, pretrain, running_ranks, sets, succeeds
from tests.end_to_end.conftest import CONFIG

SETTINGS = sets(
    "data.tokenizer=words",
    "data.vocab_size=2000",
    "model.adaptive_cutoffs=[200, 800]",
    "model.adaptive_dropout=0.2",
    "logging.tensorboard=true",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with words.toml, whose data set is built."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "words.toml").write_text(CONFIG.format(folder=folder, data=folder / "data"))
    succeeds("data", "build", folder / "words.toml", *SETTINGS)
    return folder


@pytest.fixture(scope="module")
def run(folder) -> Path:
    """A run of two ranks up to step 4, and of one rank from there to its end."""
    command = ["train", folder / "words.toml", *SETTINGS]
    with running_ranks([*command, *sets("train.num_steps=4")], 2) as ranks:
        assert [done.code for done in ranks.done()] == [0, 0]
    succeeds(*command)
    return folder / "runs/alibi"


def test_a_run_learns_and_evaluates(run):
    records = metrics(run)
    losses = [r["loss_nats"] for r in records if "step_seconds" in r]
    assert len(losses) == 8 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    evaluations = [r for r in records if "perplexity" in r]
    assert {r["length"] for r in evaluations} == {32, 64}
    assert all(r["bits_per_byte"] is None and r["bytes"] is None for r in evaluations)


def test_perplexities_of_words_are_reported_without_bits_per_byte(run, folder):
    out = folder / "report/curve.json"
    done = succeeds("evaluate", run, "--max-tokens", 2048, "--out", out)
    assert "bits per byte unknown" in done.out and "an unknown number of bytes" in done.out
    curve = json.loads(out.read_text())["records"]
    assert all(1 < r["perplexity"] < 2000 and r["bits_per_byte"] is None for r in curve)
    # Tables of bits per byte have a column of the bytes that were scored.
    report = (out.parent / "report.md").read_text()
    assert "tokens scored" in report and "bytes scored" not in report and "nan" not in report


def test_own_text_is_scored_by_the_words_of_the_checkpoint(run, folder):
    text = folder / "own.txt"
    text.write_text("to be or not to be\nthat is the xyzzy\n")
    done = pretrain("evaluate", run, "--text", text, "--lengths", "8")
    # 10 words and two line ends.
    assert done.code == 0 and "12 tokens" in done.text, done.text

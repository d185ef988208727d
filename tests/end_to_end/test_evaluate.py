"""`pretrain evaluate` measures what it names: lengths, text, checkpoint and protocols."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import load_tokenizer
from pretrain.evaluation.records import FIELDS
from pretrain.rundir.jobs import running_code
from tests.end_to_end.commands import copied, explained, metrics, pretrain, sets, succeeds

STEP_4, STEP_8 = "checkpoints/step-00000004", "checkpoints/step-00000008"
QUICK = ["--lengths", "32", "--protocols", "nonoverlapping", "--max-tokens", "512"]


def curve(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())["records"]


# ---- lengths and text ----------------------------------------------------------------------------
def test_a_length_that_the_scored_text_cannot_fill_is_refused(refused, run, tiny_data):
    words = "--lengths 2048", "1,000 tokens of --max-tokens", "Raise --max-tokens"
    refused(["evaluate", run, "--lengths", "32,2048", "--max-tokens", "1000"], *words)
    # The lengths of the config are 32 and 64.
    words = "length 64", "40 tokens that are scored", "(--max-tokens"
    refused(["evaluate", run, "--max-tokens", "40"], *words)
    whole = len(TokenStream(tiny_data / "validation"))
    words = "length 10000000", f"{whole:,} tokens that are scored", "up to", "hold out more text"
    refused(["evaluate", run, "--lengths", "32,10000000"], *words)
    refused(["evaluate", run, "--longppl", 64], "--longppl 64: ", "Choose less")


def test_default_lengths_stop_where_the_text_ends_and_say_so(workspace, run, tmp_path):
    """The config of this copy names no lengths, so they would be 32 to 512."""
    bare = workspace / "runs/bare"
    config = (workspace / "run.toml").read_text().replace("lengths = [32, 64]\n", "")
    (workspace / "bare.toml").write_text(config)
    settings = [f"run.directory={bare}", "train.num_steps=2", "evaluation.max_tokens=300"]
    done = succeeds("train", workspace / "bare.toml", *sets(*settings))
    [said] = [line for line in done.err.splitlines() if "evaluation.lengths" in line]
    assert "512 left out" in said and "300 tokens" in said and "evaluation.max_tokens" in said
    assert [r["length"] for r in metrics(bare) if r.get("evaluation")] == [32, 64, 128, 256]
    # A run whose default lengths were cut is finished, and a second start has nothing to do.
    again = pretrain("train", workspace / "bare.toml", *sets(*settings))
    assert again.code == 0 and "nothing to train" in again.err, again.text
    out = tmp_path / "curve.json"
    done = succeeds(
        "evaluate", bare, "--protocols", "nonoverlapping", "--max-tokens", "200", "--out", out
    )
    assert [r["length"] for r in curve(out)] == [32, 64, 128]
    assert "256, 512 left out" in done.text and "200 tokens" in done.text


def test_all_of_the_text_is_scored_unless_told_otherwise(run, tiny_data, tmp_path):
    """evaluation.max_tokens = 2048 of the config bounds the evaluations while training alone."""
    whole, part = tmp_path / "whole/curve.json", tmp_path / "part/curve.json"
    options = ["--lengths", "64", "--protocols", "nonoverlapping", "--out"]
    done = succeeds("evaluate", run, *options, whole)
    stream = TokenStream(tiny_data / "validation")
    [record] = curve(whole)
    assert (record["tokens"], record["bytes"]) == (len(stream), stream.manifest.text_bytes)
    assert f"{len(stream):,} tokens" in done.out
    assert f"{stream.manifest.text_bytes:,} bytes" in done.out
    succeeds("evaluate", run, *options, part, "--max-tokens", "2048")
    [bounded] = curve(part)
    assert bounded["tokens"] == 2048
    last = [r for r in metrics(run) if r.get("evaluation") and r["step"] == 8 and r["length"] == 64]
    assert bounded["loss_nats"] == pytest.approx(last[0]["loss_nats"], rel=1e-6)
    assert last[0]["tokens"] == 2048
    succeeds("evaluate", run, *options, part, "--set", "evaluation.max_tokens=1024")
    assert [record["tokens"] for record in curve(part)] == [1024]


def test_a_stream_is_one_window_of_the_whole_text(run, refused, tmp_path):
    """In pieces of 2,048 tokens with a cache, and at once: the same losses, block by block."""
    whole, stream = tmp_path / "whole/curve.json", tmp_path / "stream/curve.json"
    text = ("--max-tokens", 5000)
    options = ["--lengths", 5000, "--protocols", "nonoverlapping", "--out", whole]
    succeeds("evaluate", run, *text, *options)
    done = succeeds("evaluate", run, *text, "--stream", "--out", stream)
    (expected,), (found,) = curve(whole), curve(stream)
    assert (found["protocol"], found["length"]) == ("stream", 5000) and "0 fetches" in done.out
    for key in ("tokens", "bytes"):
        assert found[key] == expected[key]
    for key in ("loss_nats", "loss_low", "loss_high", "bits_per_byte"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6)
    assert found["blocks"]["losses"] == pytest.approx(expected["blocks"]["losses"], rel=1e-5)
    refused(["evaluate", run, "--stream", "--lengths", "64"], "--stream: ", "no windows")
    parallel = ("--set", "parallel.pipeline_model_parallel_size=2")
    refused(["evaluate", run, "--stream", *parallel], "pipeline_model_parallel_size")


# ---- records -------------------------------------------------------------------------------------
def test_a_record_says_what_it_stands_on(run, tiny_data, tmp_path):
    out = tmp_path / "curve.json"
    succeeds("evaluate", run, "--lengths", "32,64", "--max-tokens", "1000", "--out", out)
    stream = TokenStream(tiny_data / "validation")
    documents = load_tokenizer(stream.tokenizer_path).decode(stream.read(0, 1000)).encode()
    checkpoint = open_checkpoint(run / STEP_8)
    tensors, model = checkpoint.shapes.values(), checkpoint.config.model
    # Forward and backward: 6 for each weight of a matrix, and attention's two products.
    flop = 6 * sum(math.prod(shape) for shape in tensors if len(shape) == 2)
    flop += 12 * model.num_layers * model.hidden_size * 32
    for record in curve(out):
        assert record["text"] == hashlib.sha256(documents).hexdigest()[:12]
        assert record["parameters"] == sum(map(math.prod, tensors))
        # 8 steps of 8 sequences of 32 tokens.
        assert record["trained_tokens"] == 8 * 8 * 32 and record["code"] == running_code()
        assert record["training_flop"] == 8 * 8 * 32 * flop
        assert tuple(record)[: len(FIELDS)] == FIELDS
        assert record["run"] == str(run) and record["checkpoint"] == str(run / STEP_8)
        assert (record["step"], record["seed"], record["train_length"]) == (8, 1234, 32)
        assert record["tokenizer"] == stream.manifest.tokenizer_sha256[:12]
        assert record["validation"] == stream.identity[:12]
        assert record["precision"] == "fp32" and record["processor_seconds"] > 0
        assert record["loss_low"] < record["loss_nats"] < record["loss_high"]
        # 1,000 tokens of a vocabulary of 512 are one and a half to two bytes each.
        assert 1200 < record["bytes"] < 2200
        bits = record["loss_nats"] * record["tokens"] / math.log(2) / record["bytes"]
        assert record["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    # A seed on the command line is not the one that the checkpoint was trained with.
    # The precision is the one in which it was evaluated.
    changed = ("--set", "run.seed=5", "--set", "train.precision=bf16")
    succeeds("evaluate", run, *QUICK, *changed, "--out", tmp_path / "changed/curve.json")
    [found] = curve(tmp_path / "changed/curve.json")
    assert (found["seed"], found["precision"]) == (1234, "bf16")
    events = [r for r in metrics(run) if r.get("evaluation")]
    theirs = {"loss_low", "loss_high", "bits_per_byte", "tokens", "bytes", "validation"}
    assert all(event.keys() >= theirs for event in events)
    # Given by its path, a checkpoint is still its run's; a copy elsewhere stands alone.
    alone = tmp_path / "alone"
    shutil.copytree(run / STEP_4, alone)
    succeeds("evaluate", run / STEP_4, alone, *QUICK, "--out", out)
    assert [(r["run"], r["step"]) for r in curve(out)] == [(str(run), 4), (str(alone), 4)]


def test_other_positions_are_named_and_compared_with_the_runs_own(run, tmp_path):
    out, end = tmp_path / "curve.json", ["--protocols", "nonoverlapping", "--max-tokens", "2048"]
    options = ["--lengths", "64", *end, "--out", out]
    done = succeeds("evaluate", run, *options, *sets("position.slopes={factor=0.5}"))
    own, changed = curve(out)
    assert changed["method"] == "alibi, evaluated with position.slopes = {factor = 0.5}"
    # Its own comes from its training loop, which has measured the same text at the same length.
    [event] = [r for r in metrics(run) if (r.get("length"), r["step"]) == (64, 8)]
    assert own["method"] == "alibi" and own["loss_nats"] == event["loss_nats"]
    ratio = math.exp(changed["loss_nats"] - own["loss_nats"])
    assert f"{ratio:.3f} times the run's own, {own['perplexity']:.3f}\n" in done.out
    whole = "alibi, evaluated with position.method = windowed, position.window = 9"
    # The same function in other words is the run's own, and the run has no record of this length.
    for setting, lengths, methods in (
        ("position.slopes={factor=1.0}", "64", ["alibi"]),
        ("position.method=windowed position.window=9", "96", [whole]),
    ):
        succeeds("evaluate", run, "--lengths", lengths, *end, "--out", out, *sets(*setting.split()))
        assert [record["method"] for record in curve(out)] == methods


# ---- which checkpoint ----------------------------------------------------------------------------


def test_an_older_checkpoint_is_never_taken_without_a_word(refused, run, tmp_path):
    """A newest checkpoint without its manifest is damaged like one with a flipped bit."""
    copy = copied(run, run.with_name("headless"))
    (copy / STEP_8 / "manifest.json").unlink()
    words = f"{copy / STEP_8}: has no manifest.json", "name another checkpoint"
    refused(["evaluate", copy], *words)
    refused(["export", copy, tmp_path / "hf"], *words)
    # By its name, the user has said which one.
    done = pretrain("evaluate", copy / STEP_4, *QUICK)
    assert done.code == 0 and f"{copy}: step 4 of 8" in done.out, done.text


# ---- what is in the way --------------------------------------------------------------------------
def test_files_that_are_no_report_of_ours_are_not_overwritten(run, tmp_path):
    (tmp_path / "curve.json").write_text('{"my": "notes"}')
    done = pretrain("evaluate", run, *QUICK, "--out", tmp_path / "curve.json")
    explained(done, 2, f"{tmp_path / 'curve.json'} would be overwritten", "--out", "another")
    assert (tmp_path / "curve.json").read_text() == '{"my": "notes"}'
    assert len(list(tmp_path.iterdir())) == 1
    # Before anything was scored.
    assert "perplexity" not in done.out

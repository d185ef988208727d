"""EleutherAI's lm-evaluation-harness gives the perplexity that `pretrain evaluate` gives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pretrain.data.tokenizer import load_tokenizer
from tests.end_to_end.commands import pretrain

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: pip install lm_eval accelerate"
)

LENGTH, TOKENS = 32, 1024


def score(folder: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> float:
    """Return lm-eval's bits per byte of the task in a folder, as a user computes it."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    # The task names its text from where lm-eval is started.
    monkeypatch.chdir(folder)
    model = HFLM(pretrained=".", device="cpu", dtype="float32", max_length=length, batch_size=4)
    results = lm_eval.simple_evaluate(
        model,
        tasks=["pretrain_validation"],
        task_manager=TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=0,
    )
    return float(results["results"]["pretrain_validation"]["bits_per_byte,none"])


def test_perplexity_through_lm_eval(run, tmp_path, monkeypatch):
    """On one document of whole windows, of which `pretrain evaluate` does not score the end."""
    from lm_eval.models.huggingface import HFLM

    out = tmp_path / "hf"
    done = pretrain("export", run, out, "--set", "export.task_bytes=100_000")
    assert done.code == 0 and "validation.jsonl: the first document" in done.out, done.text
    # lm-eval neither warns nor cuts off below what the model was exported for.
    limit = json.loads((out / "config.json").read_text())["max_position_embeddings"]
    assert HFLM(pretrained=str(out), device="cpu").max_length == limit >= 4 * LENGTH

    tokenizer = load_tokenizer(out / "tokenizer.model")
    [row] = (out / "validation.jsonl").read_text().splitlines()
    text = tokenizer.decode(tokenizer.encode(json.loads(row)["text"])[:TOKENS])
    assert len(tokenizer.encode(text)) == TOKENS
    (out / "validation.jsonl").write_text(json.dumps({"text": text}) + "\n")
    bits = score(out, monkeypatch, LENGTH)

    (tmp_path / "text.txt").write_bytes(text.encode())
    curve = tmp_path / "curve.json"
    window = ["--lengths", LENGTH, "--protocols", "nonoverlapping", "--max-tokens", TOKENS]
    done = pretrain("evaluate", run, "--text", tmp_path / "text.txt", *window, "--out", curve)
    assert done.code == 0, done.text
    [ours] = json.loads(curve.read_text())["records"]
    assert ours["tokens"] == TOKENS
    nats = bits * math.log(2) * len(text.encode()) / TOKENS
    # A token's loss is the difference of two sums of V = 512 terms, with an error of some 2^-24 of
    # the logits; over the mean of 1,024 tokens it averages out. Measured: 1e-8.
    assert nats == pytest.approx(ours["loss_nats"], abs=1e-6)


def test_the_task_beside_the_model_runs_as_it_was_written(run, tmp_path, monkeypatch):
    """Every document of it, short ones too, begins after the token that ends one in training."""
    out = tmp_path / "hf"
    assert pretrain("export", run, out, "--set", "export.task_bytes=3000").code == 0
    bits = score(out, monkeypatch, 4 * LENGTH)
    assert 0 < bits < 20

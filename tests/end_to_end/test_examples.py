"""The scripts in examples/ run as a user runs them, and their numbers agree with each other."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, forked, sets, succeeded, succeeds


def run(script: str, *words: object, cwd: Path = ROOT) -> str:
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, words)]
    return succeeded(forked(command, cwd=cwd)).out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("example")
    return folder, run("train.py", folder)


def test_a_model_is_trained_evaluated_and_exported_in_one_process(trained):
    _, said = trained
    assert "step 20, " in said and "computes the same function" in said
    found = re.findall(r"^(nonoverlapping|sliding) +(\d+) +([\d.]+)$", said, re.MULTILINE)
    assert [(name, int(n)) for name, n, _ in found][:4] == [
        ("nonoverlapping", n) for n in (64, 128, 256, 512)
    ]
    assert all(100 < float(value) < 1000 for _, _, value in found)


def test_an_export_is_measured_as_the_run_is(trained, tmp_path):
    """By two models: ours from the checkpoint, and transformers' from the folder, on one text."""
    folder, _ = trained
    text, out = tmp_path / "text.txt", tmp_path / "curve.json"
    text.write_text("To be, or not to be, that is the question.\n" * 30)
    said = run("evaluate_a_model.py", folder / "hf", text, 64, 256)

    words = ["--text", text, "--lengths", "64,256", "--stride", "64", "--out", out]
    succeeds("evaluate", folder / "alibi", folder / "hf", *words)
    records = json.loads(out.read_text())["records"]
    ours, stock = ([r for r in records if r["run"] == str(folder / n)] for n in ("alibi", "hf"))
    shown = re.findall(r"^(\w+) +(\d+) .* loss ([\d.]+) \[[\d., ]+\] nats$", said, re.MULTILINE)
    assert shown == [(r["protocol"], str(r["length"]), f"{r['loss_nats']:.4f}") for r in stock]
    keys = ("protocol", "stride", "length", "tokens")
    assert len(ours) == 3 and [[r[k] for k in keys] for r in stock] == [
        [r[k] for k in keys] for r in ours
    ]
    for name in ("loss_nats", "loss_low", "loss_high"):
        assert [r[name] for r in stock] == pytest.approx([r[name] for r in ours], abs=1e-4)


def test_attention_in_a_torch_model_of_ones_own_extrapolates():
    said = run("attention.py", 120)
    at = {int(n): float(loss) for n, loss in re.findall(r"tested at +(\d+): loss ([\d.]+)", said)}
    assert set(at) == {32, 64, 128}
    # Random tokens have ln 32 = 3.47 nats.
    assert at[32] < 1.5 and at[128] < 1.2 * at[32]


def test_a_position_method_of_ones_own_trains_and_is_refused_for_export(trained, tmp_path):
    folder, _ = trained
    given = {
        "position.method": "half_alibi",
        "position.share": "0.25",
        "run.directory": tmp_path / "run",
        "data.directory": folder / "data",
        "data.sequence_length": 64,
        "data.vocab_size": 1024,
        "schedule.lr_warmup_steps": 1,
        "train.num_steps": 2,
        "evaluation.lengths": "[64]",
        "evaluation.max_tokens": 2048,
    }
    settings = sets(*(f"{key}={value}" for key, value in given.items()))
    said = run("position_method.py", "config", "configs/demo.toml", *settings)
    assert 'method = "half_alibi"' in said and "heads with and without ALiBi" in said
    run("position_method.py", "train", "configs/demo.toml", *settings)
    records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [r["step"] for r in records if "evaluation" not in r] == [1, 2]


def test_a_data_source_of_ones_own_is_built_and_looked_at(tmp_path):
    lines = [f'{n},"Document {n}, with ""quotes"".\n' + f"word{n} " * 40 + '"' for n in range(30)]
    (tmp_path / "a.csv").write_text("\ufeffid,text\n" + "\n".join([*lines, "30,"]) + "\n")
    (tmp_path / "b.csv").write_bytes(b"id,text\n0,\xff\n")
    given = {
        "data.directory": tmp_path / "data",
        "data.paths": json.dumps([str(tmp_path / "*.csv")]),
        "data.source": "",
        "data.vocab_size": 300,
        "data.bytes_per_task": 1000,
        "cleaning.max_skipped_documents": 2,
    }
    settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    said = run("data_source.py", "data", "build", "configs/demo.toml", "--workers", 2, *settings)
    assert "30 documents" not in said and "29 documents" in said and "no text in the column" in said
    assert "b.csv" in said and "invalid start byte" in said
    settings += ["--set", "data.sequence_length=64"]
    assert "a.csv at offset" in succeeds("data", "show", "configs/demo.toml", *settings).out

"""Evaluate and export need a run's directory alone, from wherever they are started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pretrain.config import load_config
from tests.end_to_end.commands import explained, pretrain, succeeds
from tests.end_to_end.conftest import CONFIG

LENGTHS = ["--lengths", "32", "--protocols", "nonoverlapping", "--max-tokens", "2048"]


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_data: Path) -> Path:
    """A folder with runs/alibi, trained there on runs/data: both are relative in its config."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "runs").mkdir()
    shutil.copytree(tiny_data, folder / "runs/data")
    (folder / "run.toml").write_text(
        CONFIG.format(folder=".", data="runs/data").replace("./runs", "runs")
    )
    succeeds("train", "run.toml", cwd=folder)
    return folder


def perplexity(out: Path) -> float:
    [record] = json.loads((out / "curve.json").read_text())["records"]
    return float(record["perplexity"])


def test_from_another_directory(home, tmp_path):
    for name, cwd, run in (("here", home, "runs/alibi"), ("away", tmp_path, home / "runs/alibi")):
        out = tmp_path / name
        done = pretrain("evaluate", run, *LENGTHS, "--out", out / "curve.json", cwd=cwd)
        assert done.code == 0 and "not the validation split" not in done.err, done.text
    assert perplexity(tmp_path / "here") == perplexity(tmp_path / "away")
    done = pretrain("export", home / "runs/alibi", "hf", cwd=tmp_path)
    assert done.code == 0 and "random tokens" not in done.out, done.text


def test_moved_with_its_data(home, tmp_path):
    """The data beside the run is the run's, also where another data set has the name of it."""
    shutil.copytree(home, tmp_path / "moved")
    away = tmp_path / "away"
    (away / "runs/data/validation").mkdir(parents=True)
    (away / "runs/data/validation/manifest.json").write_text("{}")
    run = tmp_path / "moved/runs/alibi"
    succeeds("evaluate", run, *LENGTHS, cwd=away)
    shutil.rmtree(tmp_path / "moved/runs/data")
    explained(pretrain("evaluate", run, *LENGTHS, cwd=away), 2, "runs/data/validation/manifest")
    shutil.rmtree(away / "runs")
    done = pretrain("evaluate", run, *LENGTHS, cwd=away)
    explained(done, 2, tmp_path / "moved/runs/data", f"nor at {away}/runs/data", "--set data.dir")
    shutil.copytree(home / "runs/data", away / "elsewhere")
    succeeds("evaluate", run, *LENGTHS, "--set", "data.directory=elsewhere", cwd=away)


def test_the_run_alone(home, tmp_path):
    """Without any data the weights are compared on random tokens, and own text can be scored."""
    shutil.copytree(home / "runs/alibi", tmp_path / "copy")
    done = pretrain("export", "copy", "hf", cwd=tmp_path)
    assert done.code == 0 and "random tokens" in done.out, done.text
    assert not (tmp_path / "hf/validation.yaml").exists()
    assert 'tokenizer("The"' in (tmp_path / "hf/README.md").read_text()
    batch = load_config(tmp_path / "copy/config.toml").batch
    assert load_config(tmp_path / "hf/pretrain.toml").batch == batch
    assert batch.global_batch_size > 1
    (tmp_path / "c.jsonl").write_text('{"id": 1, "text": "Call me Ishmael."}\n')
    (tmp_path / "a.txt").write_text("To be, or not to be: that is the question.\n" * 20)
    (tmp_path / "b.txt").write_text("It is a truth universally acknowledged.\n" * 20)
    text = [word for name in ("a.txt", "b*.txt", "c.jsonl") for word in ("--text", name)]
    command = ["evaluate", "copy", *text, *LENGTHS]
    done = pretrain(*command, "--out", "report/curve.json", cwd=tmp_path)
    assert done.code == 0 and "--text: 3 documents, 1,676 bytes" in done.out, done.text
    [record] = json.loads((tmp_path / "report/curve.json").read_text())["records"]
    from pretrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(next((tmp_path / "hf").glob("tokenizer.model")))
    texts = [(tmp_path / name).read_text() for name in ("a.txt", "b.txt")]
    texts.append("Call me Ishmael.")
    assert record["tokens"] == sum(len(tokenizer.encode(text)) + 1 for text in texts)
    explained(pretrain("evaluate", "copy", "--text", "c.txt", cwd=tmp_path), 2, "--text = 'c.txt'")
    (tmp_path / "d.jsonl").write_text("")
    done = pretrain("evaluate", "copy", "--text", "d.jsonl", cwd=tmp_path)
    explained(done, 2, "--text = d.jsonl: no document is in these files")

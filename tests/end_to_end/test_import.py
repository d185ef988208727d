"""`pretrain import` as a user types it: a published model is evaluated, trained on and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import explained, pretrain, succeeds
from tests.unit.test_import import gpt_neox, randomise, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the settings of Pythia, saved by stock transformers."""
    # Whatever ran before: the first loss of some models is near that of a new one.
    torch.manual_seed(0)
    return saved(randomise(gpt_neox()), tmp_path_factory.mktemp("published") / "pythia")


def test_a_published_model_is_evaluated_trained_on_and_exported(folder, tiny_data, tmp_path):
    run = tmp_path / "run"
    settings = [f"data.directory={tiny_data}", "train.num_steps=2", "logging.wandb=disabled"]
    settings += [
        "evaluation.max_tokens=512",
        "evaluation.lengths=[32]",
        "logging.tensorboard=false",
    ]
    done = succeeds("import", folder, run, *[part for s in settings for part in ("--set", s)])
    assert "GPTNeoXForCausalLM computes the same function" in done.out
    assert f"{folder} -> {run} (" in done.out and "has no tokenizer.json and no" in done.out
    bounded = ("--max-tokens", "16384")
    done = succeeds(
        "evaluate", run, "--lengths", "32,128", *bounded, "--out", tmp_path / "before.json"
    )
    done = succeeds("train", run / "config.toml")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = json.loads((tmp_path / "before.json").read_text())["records"][0]["loss_nats"]
    assert [r["step"] for r in records if "gradient_norm" in r] == [1, 2]
    # The steps start from the imported weights: those of a new model give ln(512) = 6.24 nats.
    assert records[0]["loss_nats"] == pytest.approx(before, abs=0.2) and before > 6.3
    done = succeeds("export", run, tmp_path / "hf")
    assert "computes the same function" in done.out
    # The export of what was trained on can be imported, with its tokenizer.
    done = succeeds("import", tmp_path / "hf", tmp_path / "again")
    assert f"needs tokens of {tmp_path / 'again'}/tokenizer.model" in done.out


def test_a_folder_that_cannot_be_imported_is_explained(folder, tmp_path):
    explained(pretrain("import", folder, folder), 2, folder, "not an empty folder")
    explained(pretrain("import", tmp_path, tmp_path / "run"), 2, "config.json", "No such file")
    explained(pretrain("import", folder, tmp_path / "run", "--set", "x"), 2, "section.key=value")
    explained(pretrain("import", folder, folder / "config.json/run"), 1, "cannot be written")
    assert not (tmp_path / "run").exists()

"""A run whose data has a tokenizer.json: its checkpoints and exports need no data directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.data.tokenizer import load_tokenizer
from tests.end_to_end.commands import explained, pretrain, succeeds
from tests.end_to_end.test_changes import sets
from tests.unit.saved import flip
from tests.unit.test_tokenizer_json import gpt2


@pytest.fixture(scope="module")
def trained(workspace, config) -> Path:
    """A run of 2 steps on data that has been removed since."""
    gpt2().save(str(workspace / "mine.json"))
    size = load_tokenizer(workspace / "mine.json").vocab_size
    (workspace / "own.txt").write_text("To be, or not to be, that is the question.\n" * 4000)
    settings = sets(
        "data.source=text",
        f'data.paths=["{workspace}/own.txt"]',
        f"data.tokenizer={workspace}/mine.json",
        f"data.vocab_size={size}",
        f"data.directory={workspace}/json-data",
        f"run.directory={workspace}/runs/json",
        "train.num_steps=2",
    )
    succeeds("data", "build", config, *settings)
    assert (workspace / "json-data/tokenizer.json").is_file()
    succeeds("train", config, *settings)
    shutil.rmtree(workspace / "json-data")
    return workspace / "runs/json"


def test_export_and_import_without_the_data(trained, workspace, tmp_path):
    from transformers import AutoTokenizer

    done = succeeds("export", trained, tmp_path / "hf")
    assert "not here, so the models are compared on random tokens" in done.out
    assert done.out.splitlines()[-1].endswith("computes the same function")
    assert "Perplexity of random tokens, because" in (tmp_path / "hf/README.md").read_text()
    given = load_tokenizer(workspace / "mine.json")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    for text in ("To be, or not to be <|endoftext|>", "  \n\ttabs 漢字"):
        ids = theirs(text, split_special_tokens=True)["input_ids"]
        assert ids == given.encode(text).tolist()
    ids = theirs("a<|endoftext|>")["input_ids"]
    assert ids == [*given.encode("a").tolist(), given.eos_id]
    assert theirs.eos_token_id == given.eos_id
    done = succeeds("import", tmp_path / "hf", tmp_path / "again")
    assert f"pretrain data build {tmp_path}/again/config.toml" in done.out
    again = open_checkpoint(tmp_path / "again/checkpoints/step-00000000")
    assert given.fingerprint == again.origin.data["tokenizer"] in again.manifest.digests.values()
    assert (tmp_path / "again/tokenizer.json").read_bytes() == given.content
    done = succeeds("export", tmp_path / "again", tmp_path / "hf2")


def test_a_damaged_tokenizer_is_named(trained, tmp_path):
    copy = shutil.copytree(trained / "checkpoints/step-00000002", tmp_path / "step-00000002")
    flip(copy / "tokenizer.json", 100)
    done = pretrain("export", copy, tmp_path / "hf")
    explained(done, 2, copy / "tokenizer.json", "SHA-256 is not the manifest's")
    assert not (tmp_path / "hf").exists()

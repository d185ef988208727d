"""Test the model card and what lies beside it: metadata, table, prompt, the task for lm-eval."""

from __future__ import annotations

import json
import math

import huggingface_hub
import numpy as np
import pytest
import yaml

from pretrain.config import RunConfig
from pretrain.huggingface.card import (
    ExportExtras,
    prompt_of,
    validation_documents,
    write_card,
)
from pretrain.huggingface.classes import CLASSES
from tests.conftest import tiny_config

RECORD = {
    "method": "alibi",
    "protocol": "nonoverlapping",
    "stride": 64,
    "length": 64,
    "perplexity": 182.25,
    "loss_nats": math.log(182.25),
    "tokens": 640,
    "checkpoint": "step-00000010",
}
NEW = RECORD | {
    "stride": 128,
    "length": 128,
    "perplexity": 181.0,
    "loss_low": math.log(170.0),
    "loss_high": math.log(190.0),
    "bits_per_byte": 2.5,
    "tokens": 1_280,
    "validation": "0123456789ab",
}
SLIDING = RECORD | {"protocol": "sliding", "stride": 32, "length": 1024, "perplexity": 180.5}


@pytest.fixture
def card_of(tmp_path):
    """Return a function: (config, extras) -> the card."""

    def card(config: RunConfig, **extras: object) -> str:
        found = CLASSES["gpt_neox"]
        settings = found.config_class(max_position_embeddings=2048)
        write_card(tmp_path, config, found, settings, ExportExtras(**extras), "</s>")
        return (tmp_path / "README.md").read_text()

    return card


def test_what_the_hub_reads(card_of):
    """With Norwegian, which YAML takes for a boolean unless it is quoted."""
    config = tiny_config(
        run={"directory": "runs/demo/alibi"},
        export={"license": "apache-2.0", "language": ["no", "en"], "datasets": ["org/news"]},
    )
    failed = RECORD | {"length": 32, "perplexity": math.inf, "loss_nats": math.nan}
    text = card_of(config, curve=[RECORD, NEW, SLIDING, failed])
    data = huggingface_hub.ModelCard(text, ignore_metadata_errors=False).data
    assert (data.license, data.language) == ("apache-2.0", ["no", "en"])
    assert (data.datasets, data.model_name) == (["org/news"], "alibi")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    found = [(r.metric_type, r.metric_value, r.metric_args) for r in data.eval_results]
    tokens = {"protocol": "nonoverlapping", "stride": 64, "length": 64, "tokens": 640}
    longer = tokens | {"stride": 128, "length": 128, "tokens": 1_280, "validation": "0123456789ab"}
    sliding = {"protocol": "sliding", "stride": 32, "length": 1024, "tokens": 640}
    assert found == [
        ("perplexity", 182.25, tokens),
        ("perplexity", 181.0, longer),
        ("bits_per_byte", 2.5, longer),
        ("perplexity", 180.5, sliding),
    ]
    assert {r.dataset_type for r in data.eval_results} == {"org/news"}
    # Without results, no model is named for them.
    data = huggingface_hub.ModelCard(card_of(tiny_config())).data
    assert data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["alibi"],
    }


def test_the_table_says_how_many_tokens_were_scored(card_of):
    failed = RECORD | {"length": 32, "perplexity": None, "loss_low": None}
    card = card_of(tiny_config(), curve=[RECORD, NEW, SLIDING, failed], facts={"Steps": "10"})
    for row in (
        "| Steps | 10 |",
        "| tokens | alibi, nonoverlapping | alibi, sliding, stride 32 | tokens scored |",
        "| 32 | not finite |  | 640 |",
        "| 64 | 182.25 |  | 640 |",
        "| 128 | 181.00 (170.00 to 190.00) |  | 1,280 |",
        "| 1,024 |  | 180.50 | 640 |",
        "In brackets: the 95 % confidence interval",
    ):
        assert row in card


def test_the_prompt_is_of_the_validation_text(card_of):
    card = card_of(tiny_config(), documents=(" \n", 'A "quoted"\nstart, of the text and more'))
    assert 'tokenizer("A \\"quoted\\" start, of the text"' in card
    assert "the first 2 documents, 40 bytes" in card
    assert 'tokenizer("The"' in card_of(tiny_config())
    assert len(prompt_of(["\u4eac" * 500])) == 60
    assert "`</s>`" in card


class Letters:
    """A tokenizer of one id a letter."""

    def decode(self, ids: np.ndarray) -> str:
        return "".join(chr(i) for i in ids)


class Stream:
    """A split in memory."""

    eos_id = 0

    def __init__(self, text: str) -> None:
        self.ids = np.array([0 if c == "|" else ord(c) for c in text])

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, count: int) -> np.ndarray:
        assert start + count <= len(self.ids)
        return self.ids[start : start + count]


@pytest.mark.parametrize("at_once", [3, 1000])
def test_the_documents_beside_the_model(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.huggingface.card._TOKENS_AT_ONCE", at_once)
    for text, most, expected in (
        ("abcdef|gh|ijkl|", 100, ("abcdef", "gh", "ijkl")),
        ("abcdef|gh|ijkl", 100, ("abcdef", "gh", "ijkl")),
        ("abcdef|gh|ijkl|", 11, ("abcdef", "gh")),
        ("abcdef||  |ijkl|", 12, ("abcdef", "ijkl")),
        ("abcdef|gh|", 4, ("abcd",)),
        # Cut where a character ends.
        ("\u00e9\u00e9\u00e9|", 5, ("\u00e9\u00e9",)),
    ):
        assert validation_documents(Stream(text), Letters(), most) == expected, (text, most)


def test_the_task_beside_the_model(tmp_path, card_of):
    card_of(tiny_config(), documents=('a "b"\n', "\u4eac"))
    lines = (tmp_path / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"text": 'a "b"\n'}, {"text": "\u4eac"}]
    task = yaml.safe_load((tmp_path / "validation.yaml").read_text())
    assert task["dataset_kwargs"]["data_files"] == {"validation": "validation.jsonl"}
    assert task["doc_to_target"] == "{{text}}"

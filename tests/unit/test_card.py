"""Test the model card: what the Hub reads, and the table of perplexities."""

from __future__ import annotations

import math

import huggingface_hub
import pytest

from pretrain.config import RunConfig
from pretrain.huggingface.classes import CLASSES
from pretrain.huggingface.folder import write_card
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
        write_card(tmp_path, config, found, settings, "</s>", **extras)
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

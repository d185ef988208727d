"""The published numbers: each is found again under the key that the report shows for it."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

import pretrain.study
from pretrain.study import published

FILE = Path(pretrain.study.__file__).with_name("published.toml")
HAND_COPIED = {
    ("wikitext103", "alibi", 512, "nonoverlapping", 3072): 18.40,
    ("wikitext103", "alibi", 64, "nonoverlapping", 1024): 21.73,
    ("wikitext103", "sinusoidal", 3072, "nonoverlapping", 3072): 18.67,
    ("wikitext103", "rotary", 1024, "nonoverlapping", 1024): 19.33,
    ("wikitext103", "t5", 512, "sliding", 3072): 30.77,
    ("wikitext103", "sinusoidal", 512, "sliding", 1024): 204.42,
    ("wikitext103", "rotary", 512, "nonoverlapping", 712): 19.79,
    ("wikitext103", "t5", 3072, "nonoverlapping", 6072): 17.68,
    ("wikitext103_test", "alibi", 3072, "sliding", 3072): 17.66,
    ("wikitext103_test", "alibi", 512, "nonoverlapping", 3072): 19.08,
    ("bookcorpus", "alibi", 512, "nonoverlapping", 3072): 13.55,
    ("bookcorpus_test", "sinusoidal", 3072, "sliding", 3072): 11.40,
    ("cc100_roberta", "alibi", 1024, "nonoverlapping", 2048): 8.92,
    ("cc100_roberta_equal_time", "sinusoidal", 2048, "nonoverlapping", 2048): 9.01,
    ("cc100_roberta", "sinusoidal", 512, "nonoverlapping", 2048): 105.42,
}
"""Numbers as the paper prints them, typed here a second time."""


def look_up(key):
    """Follow a dotted key through the file, read without the package's loader."""
    found = tomllib.loads(FILE.read_text())
    for part in key.split("."):
        found = found[part]
    return found


@pytest.mark.parametrize("of", HAND_COPIED, ids=lambda of: "-".join(map(str, of)))
def test_numbers_are_of_the_method_and_lengths_that_the_paper_gives_them(of):
    model, *rest = of
    assert published.perplexities(model)[published.Perplexity(*rest)].value == HAND_COPIED[of]


def leaves(table, key):
    """Yield the keys of the numbers in a table of the file."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{key}.{name}")
        elif isinstance(value, float | int):
            yield f"{key}.{name}"


def test_every_number_of_the_file_can_stand_beside_one_of_a_study():
    """All but the size of the models and what their training took."""
    content = tomllib.loads(FILE.read_text())
    shown = [*published.efficiency().values()]
    shown += [n for model in published.MODELS for n in published.perplexities(model).values()]
    for number in shown:
        assert look_up(number.key) == number.value
    sizes = {"tokens", "epochs", "gpus"}
    found = {
        key
        for table in (*published.MODELS, "efficiency_v100")
        for key in leaves(content[table], table)
    }
    found = {k for k in found if k.split(".")[1] not in {*sizes, "model"}}
    found = {k for k in found if not k.endswith((".memory_gb", ".gpu_hours", ".updates"))}
    assert found == {number.key for number in shown} and len(shown) == len(found)
    assert set(content) == {"paper", "efficiency_v100", *published.MODELS}


@pytest.mark.parametrize("model", published.MODELS)
def test_records_have_the_published_numbers_and_no_interval(model):
    records = published.records(model)
    assert len(records) == len(published.perplexities(model))
    assert {r["stride"] for r in records if r["protocol"] == "sliding"} <= {1, 512}
    for record in records:
        assert math.exp(record["loss_nats"]) == pytest.approx(record["perplexity"], rel=1e-12)
        assert record["loss_low"] == record["loss_nats"] == record["loss_high"]

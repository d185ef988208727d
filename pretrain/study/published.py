"""Read the numbers that the paper published, each with its key in published.toml."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, NamedTuple

from pretrain.evaluate.curves import make_curves
from pretrain.evaluate.records import fields_of
from pretrain.study.evidence import SPEEDS, Evidence, Row

FILE = "published.toml"
MODELS = ("wikitext103", "cc100_roberta")
"""Tables of the file that hold perplexities of one model family each."""
EFFICIENCY = "efficiency_v100"
QUANTITIES = {"train_kwps": "training", "eval_kwps": "evaluation", "gb": "memory"}
"""Columns of the efficiency table -> what they measure."""


class Published(NamedTuple):
    """A published number."""

    value: float
    key: str
    """Where it stands in published.toml: "wikitext103.alibi_nonoverlapping.512.1024"."""
    status: str
    """ "text" or "transcribed": see published.toml."""


class Perplexity(NamedTuple):
    """Method, lengths and protocol that a published perplexity belongs to."""

    method: str
    train_length: int
    protocol: str
    """ "nonoverlapping" or "sliding"."""
    length: int


@functools.cache
def content() -> Mapping[str, Any]:
    """Return published.toml."""
    return tomllib.loads(resources.files("pretrain.study").joinpath(FILE).read_text("utf-8"))


@functools.cache
def perplexities(model: str) -> Mapping[Perplexity, Published]:
    """Return the published validation perplexities of a model family.

    Args:
        model: One of MODELS.
    """
    table = content()[model]
    rows = _wikitext103(table) if model == "wikitext103" else _cc100_roberta(table)
    return {of: Published(value, f"{model}.{key}", table["status"]) for of, value, key in rows}


@functools.cache
def efficiency() -> Mapping[tuple[str, int, str], Published]:
    """Return (method, training length, value of QUANTITIES) -> the published number."""
    table = content()[EFFICIENCY]
    return {
        (method, int(length), quantity): Published(
            value, f"{EFFICIENCY}.{method}.{column}.{length}", table["status"]
        )
        for method, columns in table.items()
        if isinstance(columns, dict)
        for column, quantity in QUANTITIES.items()
        for length, value in columns[column].items()
    }


@functools.cache
def training() -> Mapping[tuple[str, int, str], Published]:
    """Return (method, training length, column) of the 1.3B models -> memory or GPU-hours."""
    table = content()["cc100_roberta"]
    found = {}
    for model, row in table["equal_updates"].items():
        method, _, trained = model.rpartition("_")
        for column in ("memory_gb", "gpu_hours"):
            key = f"cc100_roberta.equal_updates.{model}.{column}"
            found[method, int(trained), column] = Published(row[column], key, table["status"])
    return found


@functools.cache
def equal_time() -> Mapping[tuple[str, int, int], Published]:
    """Return (method, training length, length) of the 1.3B models at equal time -> perplexity."""
    found = {}
    for name, value in content()["cc100_roberta"]["equal_time"].items():
        model, _, length = name.rpartition("_at_")
        method, _, trained = model.rpartition("_")
        key = f"cc100_roberta.equal_time.{name}"
        # The file's comment says so: the paper's text and summary have these.
        found[method, int(trained), int(length)] = Published(value, key, "text")
    return found


def records(model: str) -> list[dict[str, Any]]:
    """Return the published perplexities as records of an evaluation, for the tools that take them.

    The paper gives no intervals. Theirs have no width, so that the printed numbers are compared as
    they are. They are compared with each other alone, so what the paper does not say of a run is
    the same for all.

    Args:
        model: One of MODELS.
    """
    found = []
    for of, number in perplexities(model).items():
        loss = math.log(number.value)
        run = f"{model}/{of.method}-{of.train_length}"
        found.append(
            fields_of(
                {
                    **of._asdict(),
                    "run": run,
                    "checkpoint": run,
                    "step": 0,
                    "seed": 0,
                    **dict.fromkeys(("settings", "tokenizer", "validation", "precision"), model),
                    "stride": of.length if of.protocol == "nonoverlapping" else 1,
                    "perplexity": number.value,
                    "loss_nats": loss,
                    "loss_low": loss,
                    "loss_high": loss,
                    **dict.fromkeys(("bits_per_byte", "tokens", "bytes")),
                }
            )
        )
    return found


_Row = tuple[Perplexity, float, str]


def _wikitext103(table: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield the perplexities of the WikiText-103 tables with their keys below it."""
    name = "alibi_nonoverlapping"
    for trained, row in table[name].items():
        for length, value in row.items():
            of = Perplexity("alibi", int(trained), "nonoverlapping", int(length))
            yield of, value, f"{name}.{trained}.{length}"
    name = "same_length_nonoverlapping"
    for method, row in table[name].items():
        for length, value in row.items():
            of = Perplexity(method, int(length), "nonoverlapping", int(length))
            yield of, value, f"{name}.{method}.{length}"
    name = "sliding_stride1"
    for model, row in table[name].items():
        method, _, trained = model.rpartition("_")
        for length, value in row.items():
            of = Perplexity(method, int(trained), "sliding", int(length))
            yield of, value, f"{name}.{model}.{length}"


def _cc100_roberta(table: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield the perplexities of the CC100 + RoBERTa table with their keys below it."""
    name = "equal_updates"
    for model, row in table[name].items():
        method, _, trained = model.rpartition("_")
        for length, value in row["ppl"].items():
            of = Perplexity(method, int(trained), table["protocol"], int(length))
            yield of, value, f"{name}.{model}.ppl.{length}"


@functools.cache
def evidence(model: str) -> Evidence:
    """Return the published numbers as claims take them, to be judged like a study's own.

    Args:
        model: One of MODELS. The speeds and the memory are those of the WikiText-103 model.
    """
    numbers = efficiency() if model == "wikitext103" else {}
    rows = [
        Row(
            method,
            length,
            # Twice, since a single round of a study is not judged: nothing says how it varies.
            {work: (numbers[method, length, work].value,) * 2 for work in SPEEDS},
            numbers[method, length, "memory"].value,
        )
        for method, length in dict.fromkeys((method, length) for method, length, _ in numbers)
    ]
    return Evidence(make_curves(records(model)), rows, "one V100")

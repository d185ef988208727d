"""Read the numbers that the paper published, each with its key in published.toml."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from statistics import median
from typing import Any, NamedTuple

from pretrain.evaluation.judge import SPEEDS, Evidence, Row
from pretrain.evaluation.records import (
    Curve,
    Table,
    cell,
    fields_of,
    make_curves,
    relative_length,
)
from pretrain.evaluation.windows import NONOVERLAPPING, SLIDING

MODELS = (
    *("wikitext103", "wikitext103_test", "bookcorpus", "bookcorpus_test"),
    *("cc100_roberta", "cc100_roberta_equal_time", "notes"),
)
"""Tables of the file that hold perplexities of one model family on one text each."""
EFFICIENCY = "efficiency_v100"
QUANTITIES = {"train_kwps": "training", "eval_kwps": "evaluation", "gb": "memory"}
"""Column of the efficiency table -> the quantity that it measures."""


class Published(NamedTuple):
    """A published number, or the ratio of two."""

    value: float
    key: str
    """The key in published.toml: "wikitext103.alibi_nonoverlapping.512.1024"; of a ratio both,
    with " / " between them."""
    stride: int = 0
    """For a perplexity, the number of tokens from one window to the next."""


class Perplexity(NamedTuple):
    """The method, lengths and protocol of a published perplexity."""

    method: str
    train_length: int
    protocol: str
    """ "nonoverlapping" or "sliding"."""
    length: int


@functools.cache
def content() -> Mapping[str, Any]:
    """Return published.toml."""
    return tomllib.loads(
        resources.files("pretrain.study").joinpath("published.toml").read_text("utf-8")
    )


@functools.cache
def perplexities(model: str) -> Mapping[Perplexity, Published]:
    """Return the published perplexities of a model family.

    Args:
        model: One of MODELS.
    """
    found = {}
    for name, row, values in _rows(model):
        for length, value in values.get("ppl", values).items():
            method, trained = {
                "alibi_nonoverlapping": ("alibi", row),
                "same_length_nonoverlapping": (row, length),
            }.get(name) or _model(row)
            stride = name.partition("sliding_stride")[2]
            protocol = SLIDING if stride else NONOVERLAPPING
            of = Perplexity(method, int(trained), protocol, int(length))
            ppl = "ppl." if "ppl" in values else ""
            key = f"{model}.{name}.{row}.{ppl}{length}"
            found[of] = Published(value, key, int(stride or length))
    return found


def _rows(model: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (table, row, values) of a model family."""
    for name, table in content()[model].items():
        if isinstance(table, dict) and name != "model":
            yield from ((name, row, values) for row, values in table.items())


@functools.cache
def _trainings(model: str) -> Mapping[tuple[str, int], Mapping[str, Any]]:
    """Return (method, training length) -> the published cost of its training, if there is one."""
    return {_model(row): values for _, row, values in _rows(model) if "gpu_hours" in values}


def _model(name: str) -> tuple[str, int]:
    """Return method and training length of a row: "alibi_512"."""
    method, _, trained = name.rpartition("_")
    return method, int(trained)


@functools.cache
def efficiency() -> Mapping[tuple[str, int, str], Published]:
    """Return (method, training length, value of QUANTITIES) -> the published number."""
    return {
        (method, int(length), quantity): Published(
            value, f"{EFFICIENCY}.{method}.{column}.{length}"
        )
        for method, columns in content()[EFFICIENCY].items()
        if isinstance(columns, dict)
        for column, quantity in QUANTITIES.items()
        for length, value in columns[column].items()
    }


def records(model: str) -> list[dict[str, Any]]:
    """Return the published perplexities as records of an evaluation, for the code that reads these.

    The paper gives no intervals, so the intervals have no width and the printed numbers are
    compared directly. The records are compared only with each other, so all have the same value
    wherever the paper says nothing about a run. `step` is the published number of updates, or 0.

    Args:
        model: One of MODELS.
    """
    found = []
    for of, number in perplexities(model).items():
        loss, run = math.log(number.value), f"{model}/{of.method}-{of.train_length}"
        step = _trainings(model).get((of.method, of.train_length), {}).get("updates", 0)
        known = of._asdict() | {"perplexity": number.value, "step": step, "seed": 0}
        known |= dict.fromkeys(("run", "checkpoint"), run)
        known |= dict.fromkeys(("settings", "tokenizer", "validation", "precision"), model)
        known |= dict.fromkeys(("loss_nats", "loss_low", "loss_high"), loss)
        known |= dict.fromkeys(("bits_per_byte", "tokens", "bytes"))
        known["stride"] = number.stride
        found.append(fields_of(known))
    return found


@functools.cache
def evidence(model: str) -> Evidence:
    """Return the published numbers as evidence, to be judged in the same way as a study's own.

    Args:
        model: One of MODELS. The speeds and memory of "wikitext103" are those of the efficiency
            table; if GPU hours are published, the training speed is in updates per hour.
    """
    numbers = efficiency() if model == "wikitext103" else {}
    # Each number twice, since a single round is not judged, because its noise is unknown.
    rows = [
        Row(
            method,
            length,
            {work: (numbers[method, length, work].value,) * 2 for work in SPEEDS},
            numbers[method, length, "memory"].value,
        )
        for method, length in dict.fromkeys((method, length) for method, length, _ in numbers)
    ] + [
        Row(*of, {"training": (took["updates"] / took["gpu_hours"],) * 2}, took["memory_gb"])
        for of, took in _trainings(model).items()
    ]
    return Evidence(make_curves(records(model)), rows, "V100s")


# ---- Compare a study's numbers with the published ones, each of which is shown with its key ----


RATIOS_FROM = "wikitext103"
"""The model family whose ratios are shown beside a study that names no published numbers."""


def perplexity_table(curves: Sequence[Curve], model: str) -> Table:
    """Return the study's perplexities beside the published ones of the same method and lengths.

    Args:
        curves: The study's curves.
        model: Model family of the published perplexities.
    """
    header = ["method", "L", "protocol", "length", "in L", "perplexity", "published"]
    numbers, cells = perplexities(model), []
    for curve in curves:
        trained = curve.train_length
        for length in curve.records:
            if same := numbers.get(Perplexity(curve.method, trained, curve.kind, length)):
                words = [curve.name, str(trained), curve.protocol, str(length)]
                words += [relative_length(length / trained), cell(curve, length)]
                cells.append([*words, *_beside(curve.value(length).value, same, 2), same.key])
    title = "Perplexity beside the published numbers"
    return Table(title, [*header, "difference", "where in published.toml"], cells, names=3)


def cost_table(evidence: Evidence, device: str) -> Table:
    """Return the cost of each method relative to sinusoidal positions, and the published ratios.

    Args:
        evidence: The study's evidence.
        device: The device on which the costs were measured, as shown in the title.
    """
    header = ["method", "L", "what", "to sinusoidal", "rounds", "published", "difference"]
    cells = []
    for row, base in evidence.timed():
        for quantity in (*SPEEDS, "memory"):
            if not (shares := row.shares(base, quantity)):
                continue
            theirs, value = _nearest(row.method, row.train_length, quantity), median(shares)
            shown = f"{value:.3f}"
            shown += f" ({min(shares):.3f} to {max(shares):.3f})" if len(shares) > 1 else ""
            what, rounds = f"{quantity}, tokens/s", str(len(shares))
            if quantity == "memory":
                what, rounds = quantity, "-"
            words = [row.method, str(row.train_length), what, shown, rounds]
            words += _beside(value, theirs, 3)
            cells.append([*words, theirs.key if theirs else "-"])
    title = f"Speed and memory beside sinusoidal positions, measured in turns on {device}"
    return Table(title, [*header, "where in published.toml"], cells, names=3)


def _nearest(method: str, train_length: int, quantity: str) -> Published | None:
    """Return the published ratio of a method to sinusoidal positions at the nearest L."""
    numbers = efficiency()
    lengths = {length for of, length, _ in numbers if of == method}
    if not lengths:
        return None
    nearest = min(sorted(lengths), key=lambda n: abs(math.log(n / train_length)))
    above, below = (numbers[name, nearest, quantity] for name in (method, "sinusoidal"))
    return Published(above.value / below.value, f"{above.key} / {below.key}")


def _beside(value: float, theirs: Published | None, digits: int) -> list[str]:
    """Return a published number and the relative difference from it, as in "+1.5 %"."""
    if theirs is None:
        return ["-", "-"]
    share = value / theirs.value - 1
    percent = f"{100 * share:+.1f} %" if math.isfinite(share) else "-"
    return [f"{theirs.value:.{digits}f}", percent]

"""Read the results that a study has so far: the evaluations of its runs, and their costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError
from pretrain.config.run import MASKED
from pretrain.data.stream import TokenStream
from pretrain.evaluation.judge import Evidence, Gap, Row, Unigram
from pretrain.evaluation.records import (
    BLOCKS,
    Curve,
    Losses,
    Record,
    confidence_interval,
    make_curves,
    number,
    read_records,
)
from pretrain.evaluation.windows import NONOVERLAPPING, SLIDING, ScoredText
from pretrain.rundir.files import read_json, replace_json
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.study.runs import FINISHED, State, Study, StudyRun


@dataclass(frozen=True)
class Results:
    """All results from which a report is made."""

    study: Study
    states: Sequence[tuple[StudyRun, State]]
    """Every run with its state."""
    evidence: Evidence
    growth: Mapping[str, Mapping[int, Mapping[int, float]]]
    """Run -> window length -> step -> validation perplexity during training, in windows that do not
    overlap."""
    unmeasured: Sequence[str]
    """In words, the methods and lengths whose efficiency could not be measured."""


def read_results(study: Study, states: Sequence[tuple[StudyRun, State]]) -> Results:
    """Read the results that a study has so far; missing ones are empty.

    Args:
        study: The study.
        states: Every run with its state; runs of other sizes are left out.

    Raises:
        ConfigError: The evaluation is of several validation sets or tokenizers.
    """
    directory = study.directory
    records = _evaluation(study.curve, study.runs)
    measured = read_json(directory / "efficiency.json")
    unigram = parse_unigram(read_json(directory / UNIGRAM), records[0]) if records else None
    rows = [
        Row(
            row["method"],
            row["train_length"],
            {work: row[f"{key}_tokens_per_second"] for work, key in WORK.items()},
            row["peak_memory_bytes"],
        )
        for row in measured.get("rows", [])
    ]
    return Results(
        study,
        [(run, state) for run, state in states if run in study.runs],
        Evidence(make_curves(records), rows, measured.get("device", ""), unigram),
        {run.name: _growth(run.metrics) for run, state in states if state.state == FINISHED},
        [
            f"{row['method']} at L = {row['train_length']}: {row['reason']}"
            for row in measured.get("failed", [])
        ],
    )


WORK = {"training": "train", "evaluation": "evaluation"}
"""Kind of speed -> the word for it in the keys of efficiency.json."""


def _evaluation(path: Path, runs: Sequence[StudyRun]) -> list[dict[str, Any]]:
    """Return the records of the evaluation, with the study's names of runs and methods."""
    methods = {run.name: run.method for run in runs}
    found = read_records(path) if path.exists() else []
    records = [record for record in found if PurePath(record["run"]).name in methods]
    if len(texts := {(record["validation"], record["tokenizer"]) for record in records}) > 1:
        raise ConfigError(
            f"{path}: holds results of {len(texts)} validation sets or tokenizers, whose "
            "perplexities cannot be compared. Make a study of each"
        )
    for record in records:
        # Without the folder, so that a report does not depend on where the study is.
        name = PurePath(record["run"]).name
        checkpoint = f"{name}/{PurePath(record['checkpoint']).name}"
        record |= {"run": name, "method": methods[name], "checkpoint": checkpoint}
    return records


def _growth(metrics: Path) -> dict[int, dict[int, float]]:
    """Return window length -> step -> perplexity from a metrics.jsonl; {} without a file."""
    found: dict[int, dict[int, float]] = {}
    for record in filter(is_evaluation, read_metrics(metrics)):
        if record["protocol"] in (NONOVERLAPPING, MASKED):
            value = number(record["perplexity"])
            found.setdefault(record["length"], {})[record["step"]] = value
    return found


# ---- token frequencies -------------------------------------------------------------------------
# A model that has learned only how frequent each token is predicts equally well at every length,
# with any position method. Its curve is flat and says nothing about extrapolation.
UNIGRAM = "unigram.json"


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of frequencies in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def count_unigram(study: Path, stream: TokenStream, max_tokens: int | None) -> None:
    """Write STUDY/unigram.json, unless there already is one for this text.

    Args:
        study: The study's directory.
        stream: The validation text.
        max_tokens: As in the evaluation, the number of tokens that are scored; None for all.
    """
    tokens = min(len(stream), max_tokens or len(stream))
    asked = {"validation": stream.identity, "tokens": tokens}
    if read_json(study / UNIGRAM).items() >= asked.items():
        return
    ids = ScoredText(stream, max_tokens).inputs(1, tokens - 1)
    counts = np.bincount(ids, minlength=stream.manifest.vocab_size)
    replace_json(study / UNIGRAM, {**asked, "loss_nats": entropy(counts)}, indent=1)


def parse_unigram(content: Mapping[str, Any], record: Mapping[str, Any]) -> Unigram | None:
    """Return the content of STUDY/unigram.json; None if it belongs to another text than a record.

    Args:
        content: The file's content; empty without a file.
        record: Any record of the evaluation.
    """
    # Records have only the first digits of the text's SHA-256.
    same = str(content.get("validation")).startswith(record["validation"])
    if not same or content["tokens"] != record["tokens"]:
        return None
    return Unigram(content["loss_nats"], content["tokens"])


# ---- early ----
# Separate the gain of longer windows into two parts: fewer tokens with little context, and more
# context for the others.
#
# A window of k L tokens has as many early tokens as a window of L, so a text that is cut into
# longer windows has fewer of them. Three measurements score the same tokens: windows of L, windows
# of k L, and sliding windows of L, in which every token has close to L tokens of context. If
# context beyond L were of no use, windows of k L would have the loss
#
#     capped = (windows of L) / k + (1 - 1 / k) (sliding windows of L),
#
# since one in k of their tokens is at a position within a window of L, and the others have at least
# L tokens before them. The difference between windows of L and `capped` comes only from fewer early
# tokens; the difference between `capped` and windows of k L comes only from longer context.
#
# Windows of L that slide by S leave their tokens L - S to L - 1 tokens of context. If the loss
# falls with the context, `capped` is then too high: the true gain from fewer early tokens is at
# least the one shown, and the true gain from longer context is at most the one shown.


EARLY, CONTEXT, TOTAL = "fewer early tokens", "longer context", "in all"


@dataclass(frozen=True)
class Gain:
    """Gain of one curve in windows of `length` over windows of its training length."""

    curve: Curve
    length: int
    parts: Mapping[str, Gap]
    """EARLY, CONTEXT and TOTAL -> nats by which the loss falls; negative if it rises."""
    how: str
    """The windows from which the loss with L tokens of context was taken."""
    tokens: int


def gains(curves: Sequence[Curve]) -> list[Gain]:
    """Return the gains of all curves at all lengths beyond their training length.

    Args:
        curves: Curves by window length, under each protocol that was measured.
    """
    sliding: dict[str, Record] = {}
    for curve in curves:
        for record in curve.records.get(curve.train_length, ()):
            if record["protocol"] == SLIDING and 2 * record["stride"] <= record["length"]:
                shortest = sliding.setdefault(record["checkpoint"], record)
                if record["stride"] < shortest["stride"]:
                    sliding[record["checkpoint"]] = record
    found = []
    for curve in (c for c in curves if c.protocol == NONOVERLAPPING):
        at_l = curve.records.get(curve.train_length, ())
        full = [sliding[r["checkpoint"]] for r in at_l if r["checkpoint"] in sliding]
        if not full or len(full) < len(at_l):
            continue
        how = f"windows of L that slide by {full[0]['stride']}"
        for length in (n for n in curve.records if n > curve.train_length):
            beyond = curve.records[length]
            parts = [_parts(*each) for each in zip(at_l, beyond, full)]
            tokens = min(record["tokens"] for record in beyond)
            found.append(Gain(curve, length, _of_seeds(parts), how, tokens))
    return found


def _parts(at_l: Record, beyond: Record, full: Record) -> dict[str, Gap]:
    """Return the parts of one checkpoint's gain.

    Args:
        at_l: The record of windows of L that do not overlap.
        beyond: The record of longer windows.
        full: The record of sliding windows of L, which have close to L tokens of context.
    """
    share = 1 - at_l["length"] / beyond["length"]
    weights = {
        EARLY: (share, 0.0, -share),
        CONTEXT: (1 - share, -1.0, share),
        TOTAL: (1.0, -1.0, 0.0),
    }
    parts = {}
    for name, factors in weights.items():
        used = [(f, record) for f, record in zip(factors, (at_l, beyond, full)) if f]
        value = sum(f * number(record["loss_nats"]) for f, record in used)
        low, high = _interval([(f, record.get(BLOCKS)) for f, record in used])
        parts[name] = Gap(low, value, high)
    return parts


def _interval(weighted: Sequence[tuple[float, Losses | None]]) -> tuple[float, float]:
    """Return the 95 % interval of a weighted sum of losses of the same blocks; nan without them."""
    known = [(factor, blocks) for factor, blocks in weighted if blocks is not None]
    counts = known[0][1].counts if known else np.zeros(0)
    # Blocks with different numbers of tokens are not the same blocks.
    if len(known) < len(weighted) or not all(np.array_equal(b.counts, counts) for _, b in known):
        return math.nan, math.nan
    sums = np.sum([factor * blocks.losses for factor, blocks in known], axis=0)
    return confidence_interval(sums, counts)


def _of_seeds(parts: Sequence[Mapping[str, Gap]]) -> dict[str, Gap]:
    """Return the mean of the seeds, with a range that covers the ranges of all seeds."""
    found = {}
    for name in parts[0]:
        lows, values, highs = zip(*(each[name] for each in parts))
        # If a seed has no range, the common range is unknown. Checked, as min and max ignore nan.
        known = not any(map(math.isnan, lows))
        ends = (min(lows), max(highs)) if known else (math.nan, math.nan)
        found[name] = Gap(ends[0], sum(values) / len(values), ends[1])
    return found

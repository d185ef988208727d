"""Read what a study has so far: its runs, their evaluation, and what they cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError
from pretrain.config.run import MASKED
from pretrain.data.stream import TokenStream
from pretrain.evaluation.curves import Binned, Curve, make_curves, number, read_positions
from pretrain.evaluation.judge import Evidence, Gap, Row, Unigram
from pretrain.evaluation.records import KEY, BlockLosses, Record, confidence_interval, read_records
from pretrain.evaluation.windows import NONOVERLAPPING, READ_TOKENS, SLIDING
from pretrain.rundir.files import read_json, replace_json
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.study.published import MODELS

FINISHED = "finished"
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A run of a study, as study.json has it."""

    name: str
    method: str
    train_length: int
    seed: int
    directory: str
    """Relative to the study's directory."""
    state: str
    """ "finished", "failed" or "waiting"."""
    reason: str
    """Why it is not finished, or empty."""


@dataclass(frozen=True)
class Study:
    """All that a report is made of. Nothing in it depends on where the study's directory is."""

    title: str
    command: str
    published: str | None
    """Model family whose published perplexities stand beside the study's."""
    asked: str
    """study.toml, or nothing."""
    runs: Sequence[Run]
    evidence: Evidence
    positions: Mapping[tuple[str, int], Binned]
    """(checkpoint as in its record, window length) -> losses by position."""
    growth: Mapping[str, Mapping[int, Mapping[int, float]]]
    """Run -> window length -> step -> validation perplexity while it trained, in windows that do
    not overlap."""
    differences: Sequence[str]
    """In what the runs differ beside method, training length and seed, in words."""
    not_asked: Sequence[str]
    """What lies beside the runs and is none of the study file's any more, in words."""
    unmeasured: Sequence[str]
    """What the measurement of efficiency could not measure, in words."""

    @property
    def curves(self) -> Sequence[Curve]:
        return self.evidence.curves

    def runs_that(self, *, finished: bool, evaluated: bool) -> list[str]:
        """Return the names of the runs that are finished, or not, and evaluated, or not."""
        names = {source.run for curve in self.curves for source in curve.sources}
        return [
            run.name
            for run in self.runs
            if (run.state == FINISHED) == finished and (run.name in names) == evaluated
        ]


def read_study(directory: Path) -> Study:
    """Read a study's directory.

    Raises:
        ConfigError: study.json is missing, a file cannot be read, or the evaluation is of several
            validation sets or tokenizers.
    """
    path = directory / "study.json"

    def parse() -> tuple[list[Run], str | None, dict[str, Any]]:
        content = json.loads(path.read_bytes())
        said = {key: str(content[key]) for key in ("title", "command")}
        lines = {key: [*map(str, content.get(key, []))] for key in ("differences", "not_asked")}
        return [_run(row) for row in content["runs"]], content["published"], {**said, **lines}

    runs, model, said = _read(path, parse)
    if model is not None and model not in MODELS:
        raise ConfigError(
            f'{path}: published = "{model}": there are no such numbers. Choose '
            f"{' or '.join(MODELS)} in the study file, or leave it out"
        )
    records, positions = _evaluation(directory, runs)
    rows, device, unmeasured = _efficiency(directory / "efficiency.json")
    counted = directory / UNIGRAM
    known = (
        _read(counted, lambda: parse_unigram(json.loads(counted.read_bytes()), records[0]))
        if records and counted.exists()
        else None
    )
    asked = directory / "study.toml"
    return Study(
        published=model,
        asked=_read(asked, lambda: asked.read_text("utf-8")) if asked.exists() else "",
        runs=runs,
        evidence=Evidence(make_curves(records), rows, device, known),
        positions=positions,
        growth={run.name: _growth(directory / run.directory) for run in runs},
        unmeasured=unmeasured,
        **said,
    )


def _run(row: Mapping[str, Any]) -> Run:
    """Return a run of study.json."""
    name, method, directory, state = (
        str(row[key]) for key in ("name", "method", "directory", "state")
    )
    length, seed = int(row["train_length"]), int(row["seed"])
    return Run(name, method, length, seed, directory, state, str(row["reason"] or ""))


def _evaluation(
    directory: Path, runs: Sequence[Run]
) -> tuple[list[dict[str, Any]], dict[tuple[str, int], Binned]]:
    """Return the records and losses by position, which name runs as study.json does."""
    path = directory / "evaluation" / "curve.json"
    if not path.exists():
        return [], {}
    records = _read(path, lambda: read_records(path))
    for key, words in (("validation", "validation sets"), ("tokenizer", "tokenizers")):
        found = sorted({str(record[key]) for record in records})
        if len(found) > 1:
            raise ConfigError(
                f"{path}: holds results of {len(found)} {words} ({', '.join(found)}), whose "
                "perplexities cannot be compared. Make a study of each"
            )
    names: dict[str, str] = {}
    for record in records:
        run = _run_of(record, runs)
        if run is not None:
            names[record["checkpoint"]] = f"{run.name}/{PurePath(record['checkpoint']).name}"
            record |= {"run": run.name, "method": run.method}
        record["checkpoint"] = names.setdefault(record["checkpoint"], record["checkpoint"])
    table = path.with_name("positions.csv")
    positions = _read(table, lambda: read_positions(table))
    return records, {
        (names.get(at, at), length): found for (at, length), found in positions.items()
    }


def _run_of(record: Mapping[str, Any], runs: Sequence[Run]) -> Run | None:
    """Return the run of a record, whose path ends like the run's, wherever the study was then."""
    parts = PurePath(record["run"] or "").parts
    for run in runs:
        end = PurePath(run.directory).parts
        if parts[-len(end) :] == end:
            return run
    return None


def _efficiency(path: Path) -> tuple[list[Row], str, list[str]]:
    """Return the rows of efficiency.json, the device, and what failed; nothing without a file."""
    if not path.exists():
        return [], "", []

    def parse() -> tuple[list[Row], str, list[str]]:
        content = json.loads(path.read_bytes())
        failed = [
            f"{row['method']} at L = {row['train_length']}: {row['reason']}"
            for row in content.get("failed", [])
        ]
        return [_row(row) for row in content["rows"]], str(content["device"]), failed

    return _read(path, parse)


def _row(row: Mapping[str, Any]) -> Row:
    """Return a row of efficiency.json."""
    speeds = {
        "training": [float(value) for value in row["train_tokens_per_second"]],
        "evaluation": [float(value) for value in row["evaluation_tokens_per_second"]],
    }
    if not all(math.isfinite(v) and v > 0 for values in speeds.values() for v in values):
        raise ValueError(f"a speed of {row['method']} is no positive number")
    memory = row["peak_memory_bytes"]
    return Row(str(row["method"]), int(row["train_length"]), speeds, memory and float(memory))


def _growth(run: Path) -> dict[int, dict[int, float]]:
    """Return window length -> step -> perplexity of RUN/metrics.jsonl; nothing without a file."""
    path = run / "metrics.jsonl"
    found: dict[int, dict[int, float]] = {}
    for record in _read(path, lambda: [r for r in read_metrics(path) if is_evaluation(r)]):
        if record.get("protocol") in (NONOVERLAPPING, MASKED):
            length, step, value = (record.get(key) for key in ("length", "step", "perplexity"))
            if isinstance(length, int) and isinstance(step, int) and isinstance(value, int | float):
                found.setdefault(length, {})[step] = float(value)
    return found


def _read(path: Path, read: Callable[[], T]) -> T:
    """Return what `read` reads from a file.

    Raises:
        ConfigError: The file is missing or is not what a study has written.
    """
    try:
        return read()
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: does not exist, so {path.parent} is no study's directory. Name one that "
            "`pretrain study` has made"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({type(error).__name__}: {error}). `pretrain study` writes it "
            "anew once it is removed"
        ) from None


# ---- token frequencies -------------------------------------------------------------------------
# A model that has learned nothing but how frequent each token is predicts alike at every length,
# whatever its positions. Its curve is flat and says nothing of extrapolation.
UNIGRAM = "unigram.json"


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of frequencies in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def count_unigram(study: Path, stream: TokenStream, max_tokens: int | None) -> None:
    """Write STUDY/unigram.json, unless it is of this text already.

    Args:
        study: The study's directory.
        stream: The validation text.
        max_tokens: As in the evaluation: the first so many tokens are scored; None scores all.
    """
    tokens = min(len(stream), max_tokens or len(stream))
    asked = {"validation": stream.identity, "tokens": tokens}
    if read_json(study / UNIGRAM).items() >= asked.items():
        return
    counts = np.zeros(stream.vocab_size, np.int64)
    for start in range(0, tokens, READ_TOKENS):
        ids = stream.read(start, min(READ_TOKENS, tokens - start))
        counts += np.bincount(ids, minlength=stream.vocab_size)
    replace_json(study / UNIGRAM, {**asked, "loss_nats": entropy(counts)}, indent=1)


def parse_unigram(content: Mapping[str, Any], record: Mapping[str, Any]) -> Unigram | None:
    """Return what STUDY/unigram.json holds; None where it is of another text than a record.

    Args:
        content: The file's content.
        record: Any record of the evaluation.

    Raises:
        ValueError: The entropy is none that so many tokens can have; other errors where a key is
            missing or of another type.
    """
    # Records have the beginning of the text's SHA-256.
    same = str(content["validation"]).startswith(str(record["validation"]))
    if not same or content["tokens"] != record["tokens"]:
        return None
    found = Unigram(float(content["loss_nats"]), int(content["tokens"]))
    # That of tokens which all differ, with room for rounding.
    if not 0 <= found.loss_nats <= math.log(found.tokens) + 1e-9:
        raise ValueError(f"loss_nats = {found.loss_nats}: no entropy of {found.tokens} tokens")
    return found


# ---- early ----
# Separate what a longer window gains: fewer tokens with little context, or more of it for others.
#
# A window of k L tokens has as many early tokens as one of L, so a text that is cut into longer
# windows has fewer of them. Three measurements score the same tokens: windows of L, windows of k L,
# and windows of L that slide, in which every token has close to L tokens of context. Were no
# context beyond L of any use, windows of k L would have the loss
#
#     capped = (windows of L) / k + (1 - 1 / k) (sliding windows of L),
#
# since one in k of their tokens stands where a window of L has them, and the others have L tokens
# before them. From windows of L to `capped` there are only fewer early tokens; from there to what
# windows of k L really have, there is only longer context.
#
# Windows of L that slide by S leave their tokens L - S to L - 1 tokens of context. Where the loss
# falls with the context, `capped` is then too high: fewer early tokens gain at least as much as is
# shown, and longer context at most.


EARLY, CONTEXT, TOTAL = "fewer early tokens", "longer context", "in all"


@dataclass(frozen=True)
class Gain:
    """Gain of one curve in windows of `length` over windows of its training length."""

    curve: Curve
    length: int
    parts: Mapping[str, Gap]
    """EARLY, CONTEXT and TOTAL -> nats by which the loss falls; negative where it rises."""
    how: str
    """What the loss with L tokens of context was taken from."""
    tokens: int


def gains(curves: Sequence[Curve]) -> list[Gain]:
    """Return the gains of all curves at all lengths beyond their training length.

    Args:
        curves: Curves by window length, under both protocols as far as they were measured.
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
        low, high = _interval([(f, record.get(KEY)) for f, record in used])
        parts[name] = Gap(low, value, high)
    return parts


def _interval(weighted: Sequence[tuple[float, BlockLosses | None]]) -> tuple[float, float]:
    """Return the 95 % interval of a weighted sum of losses of the same blocks; nan without them."""
    known = [(factor, blocks) for factor, blocks in weighted if blocks is not None]
    counts = known[0][1].counts if known else np.zeros(0)
    # Blocks of another amount of text are not the same blocks.
    if len(known) < len(weighted) or not all(np.array_equal(b.counts, counts) for _, b in known):
        return math.nan, math.nan
    sums = np.sum([factor * blocks.losses for factor, blocks in known], axis=0)
    return confidence_interval(sums, counts)


def _of_seeds(parts: Sequence[Mapping[str, Gap]]) -> dict[str, Gap]:
    """Return the mean of the seeds with a range that holds all of theirs."""
    found = {}
    for name in parts[0]:
        lows, values, highs = zip(*(each[name] for each in parts))
        # A seed without a range leaves the range of all unknown; min and max may ignore nan.
        known = not any(map(math.isnan, lows))
        ends = (min(lows), max(highs)) if known else (math.nan, math.nan)
        found[name] = Gap(ends[0], sum(values) / len(values), ends[1])
    return found

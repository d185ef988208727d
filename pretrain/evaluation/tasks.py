"""The long-context tasks: their sequences, what is measured of them, and the report.

Everything but the model is here, without torch.

A sequence of a task has `length` inputs and as many targets, of which the last ones are scored.
Each task compares two kinds of sequences that end in the same scored tokens: one in which the
context can help, and one in which it cannot. The difference of their losses is the gain, in nats
per token: 0 means that the model makes no use of that context.

needle: 32 tokens of text stand at some depth of other text, and at its end they are repeated. The
first 8 of the repetition are the query, the loss on the other 24 is measured.

    with the needle       text text NEEDLE text text text  NEEd l e
    without               text text  text  text text text  NEEd l e      scored: l e

induction: the same with 32 random tokens, all different, whose second copy begins `distance` tokens
after the first. Nothing but copying helps here; models learn it early, with heads that can be named
(Olsson et al., "In-context Learning and Induction Heads", 2022, arXiv 2209.11895). There the second
copy is compared with the first, here with the same tokens at the same positions where they have
not been seen before, so that a model that is worse at later positions does not seem to copy less.

documents: validation documents are cut into pieces of `length` tokens. The second half of a piece
is scored twice: after all of the piece before it, and after the last L tokens of that alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError, EvaluationRequest
from pretrain.data.stream import TokenStream
from pretrain.evaluation.curves import Table, Value, length_label, number
from pretrain.evaluation.figures import FORMATS, Frame, Line
from pretrain.evaluation.records import cluster_interval, records_to_csv, records_to_json
from pretrain.evaluation.report import Page, check_ours
from pretrain.rundir.files import replace_file

# ---- Parse what `pretrain evaluate-tasks` shall measure ----


TASKS = ("needle", "induction", "documents")
"""The names of the tasks, in the order of reports."""


@dataclass(frozen=True)
class TasksRequest:
    """The options of the command."""

    tasks: tuple[str, ...]
    """Names out of TASKS, in their order."""
    lengths: tuple[int, ...] | None
    """Context lengths in tokens; None for the config's."""
    samples: int
    """Samples of every task at every length; fewer where the text has no more."""

    @staticmethod
    def parse(tasks: str, lengths: str | None, samples: int) -> TasksRequest:
        """Build a request from the values of the command-line options.

        Args:
            tasks: --tasks, for example "needle,induction".
            lengths: --lengths, for example "128,2048"; None when the option is not given.
            samples: --samples.

        Raises:
            ConfigError: When a value is not valid. The message names the option.
        """
        names = tasks.split(",")
        for name in names:
            if name not in TASKS:
                raise ConfigError(
                    f"--tasks {name}: unknown task. Choose out of {','.join(TASKS)}, separated by "
                    "commas"
                )
        if samples < 1:
            raise ConfigError(f"--samples {samples}: expected 1 or more")
        found = EvaluationRequest.parse(lengths, "nonoverlapping", None, None).lengths
        for length in found or ():
            if length < 1:
                raise ConfigError(f"--lengths {length}: expected 1 or more tokens")
        unique = None if found is None else tuple(dict.fromkeys(found))
        return TasksRequest(tuple(name for name in TASKS if name in names), unique, samples)

    def evaluation(self) -> EvaluationRequest:
        """Return what an evaluation at these lengths would be asked for."""
        return EvaluationRequest(self.lengths, ("nonoverlapping",), None, None)


PLANTED = 32
"""Tokens of a needle, and of a random sequence that is to be copied."""
QUERY = 8
"""Tokens at the beginning of a repetition that are not scored: they say what is repeated."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where a needle stands, from the beginning of the text (0) to right before the query (1)."""
CUTS = 16
"""A cut context has between L - L / CUTS and L tokens."""
SAMPLED_TOKENS = 2**20
"""Random sequences consist of tokens that occur among so many first ones of the text."""
MAX_DRAWS = 10_000
"""Draws of a place for a needle until the text is found to have none."""

Tokens = NDArray[np.int64]


class Row(NamedTuple):
    """One sequence of an arm."""

    sample: int
    """The sample that it belongs to."""
    tokens: Callable[[], Tokens]
    """Make its token ids [length + 1]: the inputs, and the target of the last one."""


@dataclass(frozen=True)
class Arm:
    """Sequences of one shape, whose scored tokens are those of the cell's other arms."""

    length: int
    """Inputs of each sequence."""
    scored: int
    """Targets at the end of each sequence that are scored."""
    rows: Sequence[Row]


@dataclass(frozen=True)
class Place:
    """One comparison of a cell: an arm whose context can help with one whose context cannot."""

    helped: str
    """Name of the arm in which the context can help."""
    alone: str
    """Name of the arm in which it cannot."""
    depth: float | None = None
    """needle: where it stands, as in DEPTHS."""
    distance: int | None = None
    """needle and induction: tokens from the beginning of the first copy to that of the second."""


@dataclass(frozen=True)
class Cell:
    """A task at one length."""

    task: str
    length: int
    samples: int
    arms: Mapping[str, Arm]
    places: Sequence[Place]
    clusters: Sequence[int]
    """The cluster of each sample, [samples]: its document, or itself where random tokens are drawn
    for each. Samples of one document depend on each other."""
    documents: int | None = None
    """needle and documents: how many the samples are from."""


@dataclass(frozen=True)
class Text:
    """The validation text, and what the tasks need to know of it."""

    stream: TokenStream
    seed: int
    """Everything that is drawn is a function of it."""
    documents: tuple[tuple[int, int], ...] = field(default=())
    """(first token, tokens without the end-of-document token) of the documents that are long
    enough for the task `documents`."""

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Return the position of each end-of-document token, and the stream's end without one."""
        return np.fromiter(_ends(self.stream), np.int64)

    def random(self, *key: int) -> np.random.Generator:
        """Return the generator that belongs to a key, whatever else has been drawn before."""
        return np.random.default_rng([self.seed, *key])


def long_documents(stream: TokenStream, least: int) -> tuple[tuple[int, int], ...]:
    """Return (first token, tokens) of each document of at least `least` tokens, in their order.

    The end-of-document token is not counted. A document that is cut off by the end of the stream
    ends there.
    """
    found, start = [], 0
    for end in _ends(stream):
        if end - start >= least:
            found.append((start, end - start))
        start = end + 1
    return tuple(found)


def _ends(stream: TokenStream) -> Iterator[int]:
    """Yield the position of each end-of-document token, and the stream's end if it has none."""
    last = -1
    for start in range(0, len(stream), SAMPLED_TOKENS):
        block = stream.read(start, min(SAMPLED_TOKENS, len(stream) - start))
        for index in np.flatnonzero(block == stream.eos_id).tolist():
            last = start + index
            yield last
    if last + 1 < len(stream):
        yield len(stream)


def make_cell(task: str, text: Text, length: int, samples: int, cut: int) -> Cell | str:
    """Return a task at one length, or the reason why it cannot be measured there.

    Args:
        task: A name out of `request.TASKS`.
        text: The text to draw from.
        length: Inputs of the longest sequences.
        samples: Sequences to measure; fewer where the text has no more.
        cut: Tokens of a cut context, for `documents`.
    """
    if task == "documents":
        return _documents(text, length, samples, cut)
    if length < 2 * PLANTED:
        return f"{2 * PLANTED} tokens are the least, to plant {PLANTED} and to repeat them"
    if length >= len(text.stream):
        return f"the validation text has only {len(text.stream)} tokens"
    places: dict[int, float | None]
    if task == "needle":
        contents = _needles(text, samples)
        last = length + 1 - 2 * PLANTED
        places = {round(depth * last): depth for depth in DEPTHS}
    else:
        contents = _random_sequences(text, samples)
        farthest = length - PLANTED
        doubling = (PLANTED * 2**n for n in range(length.bit_length()))
        distances = sorted({*(d for d in doubling if d < farthest), farthest})
        places = {length + 1 - PLANTED - distance: None for distance in distances}
    if contents is None:
        return (
            f"the validation text has no {PLANTED} tokens in a row within one document"
            if task == "needle"
            else f"the validation text has fewer than {PLANTED} different tokens"
        )
    return _planted(task, text, length, contents, places)


class Content(NamedTuple):
    """The tokens planted in one sample."""

    tokens: Tokens
    """[PLANTED]."""
    start: int | None
    """Where it stands in the text, from which it is then cut out; None if it is random."""


def _needles(text: Text, samples: int) -> list[Content] | None:
    """Draw a needle for each sample: tokens in a row of one document; None if there are none."""
    found = []
    for sample in range(samples):
        random = text.random(0, sample)
        for _ in range(MAX_DRAWS):
            start = int(random.integers(0, len(text.stream) - PLANTED + 1))
            tokens = text.stream.read(start, PLANTED)
            if text.stream.eos_id not in tokens:
                found.append(Content(tokens, start))
                break
        else:
            return None
    return found


def _random_sequences(text: Text, samples: int) -> list[Content] | None:
    """Draw tokens that all differ for each sample, from those that occur in the text."""
    stream = text.stream
    occurring = np.unique(stream.read(0, min(SAMPLED_TOKENS, len(stream))))
    occurring = occurring[occurring != stream.eos_id]
    if len(occurring) < PLANTED:
        return None
    return [
        Content(text.random(1, sample).choice(occurring, PLANTED, replace=False), None)
        for sample in range(samples)
    ]


def _planted(
    task: str,
    text: Text,
    length: int,
    contents: Sequence[Content],
    places: Mapping[int, float | None],
) -> Cell:
    """Return the cell whose sequences end in `contents`, planted before in some of the arms.

    Args:
        task: needle or induction.
        text: Where the text around is drawn from.
        length: Inputs of a sequence.
        contents: What is planted, of each sample.
        places: Index in the sequence at which it is planted -> the place's depth.
    """
    scored = PLANTED - QUERY

    def row(sample: int, place: int | None) -> Tokens:
        content = contents[sample]
        around = _text_without(text, content, length + 1 - PLANTED, (2, length, sample))
        if place is not None:
            around[place : place + PLANTED] = content.tokens
        return np.concatenate([around, content.tokens])

    def arm(place: int | None) -> Arm:
        rows = [Row(sample, partial(row, sample, place)) for sample in range(len(contents))]
        return Arm(length, scored, rows)

    arms = {"without": arm(None), **{f"at {place}": arm(place) for place in places}}
    compared = [
        Place(f"at {place}", "without", depth, length + 1 - PLANTED - place)
        for place, depth in places.items()
    ]
    # What is planted decides how well it is predicted. Random tokens are drawn for each sample.
    clusters, documents = list(range(len(contents))), None
    if task == "needle":
        clusters = np.searchsorted(text.ends, [each.start or 0 for each in contents]).tolist()
        documents = len(set(clusters))
    return Cell(task, length, len(contents), arms, compared, clusters, documents)


def _text_without(text: Text, content: Content, count: int, key: tuple[int, ...]) -> Tokens:
    """Return `count` tokens in a row from a random place of the text, `content` cut out of it."""
    stream, hole = text.stream, content.start
    width = 0 if hole is None else PLANTED
    start = int(text.random(*key).integers(0, len(stream) - width - count + 1))
    if hole is None or start + count <= hole:
        return stream.read(start, count)
    if start >= hole:
        return stream.read(start + width, count)
    before = hole - start
    after = stream.read(hole + width, count - before)
    return np.concatenate([stream.read(start, before), after])


def _documents(text: Text, length: int, samples: int, cut: int) -> Cell | str:
    """Return the task `documents` at a length, or the reason why there is none."""
    if length < 2 * cut:
        return f"{2 * cut} tokens, twice the cut context, are the least"
    pieces = [
        (number, start + at)
        for number, (start, tokens) in enumerate(text.documents)
        for at in range(0, tokens - length + 1, length)
    ]
    if not pieces:
        longest = max((tokens for _, tokens in text.documents), default=0)
        return f"no validation document has {length} tokens" + (
            f" (the longest has {longest})" if longest else ""
        )
    chosen = text.random(3, length).permutation(len(pieces))[:samples]
    chosen.sort()
    stride = max(1, cut // CUTS)
    scored = length // 2 // stride * stride

    def tokens(start: int, end: int) -> Tokens:
        """Return tokens [start, end) of the stream, which has an end of document in front."""
        if start >= 0:
            return text.stream.read(start, end - start)
        return np.concatenate([[text.stream.eos_id], text.stream.read(0, end)])

    full, short = [], []
    for sample, (_, start) in enumerate(pieces[index] for index in chosen):
        end = start + length
        # One token more than the inputs: the first is what stands before the piece.
        full.append(Row(sample, partial(tokens, start - 1, end)))
        for last in range(end - scored + stride, end + 1, stride):
            short.append(Row(sample, partial(tokens, last - cut - 1, last)))
    arms = {"full": Arm(length, scored, full), "cut": Arm(cut, stride, short)}
    place = Place("full", "cut")
    clusters = [pieces[index][0] for index in chosen]
    return Cell("documents", length, len(chosen), arms, [place], clusters, len(set(clusters)))


# ---- results ----
# Turn losses of sequences into records: means over samples, with their confidence intervals.


FIELDS = (
    "run",
    "step",
    "method",
    "seed",
    "train_length",
    "tokenizer",
    "validation",
    "precision",
    "task",
    "length",
    "depth",
    "distance",
    "measure",
    "value",
    "low",
    "high",
    "n",
    "documents",
    "tokens",
    "checkpoint",
)
"""Keys of a record in tasks.json and columns of tasks.csv."""
MEASURES = ("gain_nats", "loss_nats", "accuracy")
"""What is measured of every cell: the gain from the context, the loss with it, and the share of
scored tokens that the model then holds for the most probable ones. In nats per token."""
Record = Mapping[str, Any]
Samples = NDArray[np.float64]
Score = Callable[[Arm], NDArray[np.float64]]
"""A function of an arm that returns [rows, 2]: of each sequence the mean loss in nats, and the
share of its scored targets that the model holds for the most probable token."""


def measure(cell: Cell, score: Score) -> Iterator[dict[str, Any]]:
    """Yield the records of a cell, with the keys of FIELDS from "task" to "tokens".

    Args:
        cell: A task at one length.
        score: Scores one arm.
    """
    losses = {name: _by_sample(arm, score(arm), cell.samples) for name, arm in cell.arms.items()}
    for place in cell.places:
        helped, alone = losses[place.helped], losses[place.alone]
        # The gain is a mean of differences within samples, which share all but the context.
        values = dict(zip(MEASURES, (alone[:, 0] - helped[:, 0], helped[:, 0], helped[:, 1])))
        arm = cell.arms[place.helped]
        for name, samples in values.items():
            low, high = interval(samples, cell.clusters)
            yield {
                "task": cell.task,
                "length": cell.length,
                "depth": place.depth,
                "distance": place.distance,
                "measure": name,
                "value": float(samples.mean()),
                "low": low,
                "high": high,
                "n": len(samples),
                "documents": cell.documents,
                "tokens": len(arm.rows) * arm.scored,
            }


def _by_sample(arm: Arm, scores: NDArray[np.float64], samples: int) -> Samples:
    """Return the means [samples, 2] of [rows, 2], whose rows all score as many tokens."""
    sums, counts = np.zeros((samples, 2)), np.zeros(samples)
    owners = np.array([row.sample for row in arm.rows])
    np.add.at(sums, owners, scores)
    np.add.at(counts, owners, 1)
    return sums / counts[:, None]


def interval(samples: Samples, clusters: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the 95 % confidence interval of the mean of samples that come in clusters.

    Args:
        samples: [n] values.
        clusters: [n] the cluster of each. Samples of one document are alike, so that many of them
            know little more than one.

    Returns:
        (low, high); (None, None) with a single cluster, and (nan, nan) if a value is not finite.
    """
    if not np.isfinite(samples).all():
        return math.nan, math.nan
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    sums, counts = np.bincount(cluster, samples), np.bincount(cluster).astype(np.float64)
    low, high = cluster_interval(sums.astype(np.float64), counts)
    return (None, None) if math.isnan(low) else (low, high)


# ---- tables ----


INTERVALS = (
    "In brackets: the 95 % confidence interval of the mean of n samples, by Student's t over the "
    "documents that they are from (of random tokens: over the samples); none where all are from "
    "one document. It is about other such samples, not about another seed of the training."
)
EXPLAINED = {
    "needle": f"**needle**: {PLANTED} tokens of validation text stand at a depth of other "
    f"validation text (0: at its beginning, 1: right before the query), and are repeated at the "
    f"end. The first {QUERY} tokens of the repetition are the query, the loss is that of the other "
    f"{PLANTED - QUERY}. The gain is how much lower it is than without the needle in the context.",
    "induction": f"**induction**: the same with {PLANTED} random tokens, all different, whose two "
    "copies begin a distance apart, with text between and before. Accuracy is the share of tokens "
    "of the second copy that the model holds for the most probable ones.",
    "documents": "**documents**: the second half of pieces of validation documents. The gain is "
    "how much lower the loss is with all of the piece before each token than with the last "
    f"L tokens alone (at least L - L/{CUTS}).",
}
"""The tasks in the report."""
TABLES = (
    ("needle", "gain_nats", "depth", "needle: gain in nats per token"),
    ("induction", "gain_nats", "distance", "induction: gain in nats per token"),
    ("induction", "accuracy", "distance", "induction: accuracy on the second copy"),
    ("documents", "gain_nats", None, "documents: gain in nats per token"),
)
"""(task, measure, what rows are told apart by, title)."""


def curve_labels(records: Sequence[Record]) -> dict[Curve, str]:
    """Return a name for each run and step: the method, with both where it is not the only one."""
    methods: dict[Curve, str] = {(r["run"], r["step"]): r["method"] for r in records}
    names = list(methods.values())
    return {
        (run, step): method if names.count(method) == 1 else f"{method} ({run}, step {step})"
        for (run, step), method in methods.items()
    }


def make_tables(records: Sequence[Record]) -> list[tuple[str, Table]]:
    """Return (task, table) of what was measured: a column for each length."""
    labels = curve_labels(records)
    found = []
    for task, name, key, title in TABLES:
        own = [r for r in records if (r["task"], r["measure"]) == (task, name)]
        if not own:
            continue
        lengths = sorted({record["length"] for record in own})
        counts = sorted({record["n"] for record in own})
        if len(counts) == 1:
            title += f", n = {counts[0]}"
        documents = sorted({record["documents"] for record in own} - {None})
        if documents:
            few, many = documents[0], documents[-1]
            title += f" from {few if few == many else f'{few} to {many}'} documents"
        cells: dict[tuple[str, Any], dict[int, str]] = {}
        for record in own:
            row = labels[record["run"], record["step"]], record[key] if key else None
            cells.setdefault(row, {})[record["length"]] = _cell(record, len(counts) > 1)
        order = list(labels.values())
        rows = [
            [label, "" if place is None else f"{place:g}", *(of.get(n, "-") for n in lengths)]
            for (label, place), of in sorted(
                cells.items(), key=lambda item: (order.index(item[0][0]), item[0][1] or 0)
            )
        ]
        trained = {record["train_length"] for record in own}
        only = trained.pop() if len(trained) == 1 else None
        header = ["method", key or "", *(length_label(n, only) for n in lengths)]
        found.append((task, Table(title, header, rows, 2)))
    return found


def _cell(record: Record, with_count: bool) -> str:
    """Return a value with its interval, and its number of samples where that varies."""
    text = f"{record['value']:.3f}"
    if record["low"] is not None:
        text += f" [{record['low']:.3f}, {record['high']:.3f}]"
    return text + (f" n={record['n']}" if with_count else "")


def format_tables(records: Sequence[Record]) -> str:
    """Return all tables as plain text, with what the brackets mean."""
    parts = [table.plain() for _, table in make_tables(records)]
    return "\n\n".join([*parts, *_warnings(records), INTERVALS])


def _warnings(records: Sequence[Record]) -> list[str]:
    """Return sentences about what must not be compared."""
    different = {
        "tokenizer": "tokenizers, and nats are per token of each",
        "validation": "validation texts",
        "precision": "precisions, which is a difference of its own",
    }
    return [
        f"These runs were measured with several {words}: {', '.join(found)}."
        for key, words in different.items()
        if len(found := sorted({record[key] for record in records})) > 1
    ]


# ---- figures and files ---------------------------------------------------------------------------
Curve = tuple[str, int]
"""A run and a step."""


def _show(page: Page, records: Sequence[Record], stem: str) -> None:
    """Add figures of the gain by length and by depth, and of the accuracy by distance.

    Each panel is a task. By length a needle stands at the beginning, and copies are as far apart as
    they can be; by depth and by distance the context is the longest.
    """
    of = {task: [r for r in records if r["task"] == task] for task in TASKS}
    farthest: dict[int, int] = {}
    for r in of["induction"]:
        farthest[r["length"]] = max(farthest.get(r["length"], 0), r["distance"])
    far = [r for r in of["induction"] if r["distance"] == farthest[r["length"]]]
    lines = _lines(
        [r for r in of["needle"] if r["depth"] == 0], "length", "gain_nats", "needle at the start"
    )
    lines += _lines(far, "length", "gain_nats", "copy across the context")
    lines += _lines(of["documents"], "length", "gain_nats", "second half of documents")
    marked = {float(r["train_length"]): "" for r in records}
    by_length = Frame("Context (tokens)", GAIN, marked=marked)
    page.show(stem, "gain by length of the context", lines, _with_ticks(by_length, lines))
    if lines := _lines(_longest(of["needle"]), "depth", "gain_nats", "in the longest context"):
        by_depth = Frame("Depth of the needle (0: beginning)", GAIN, holds_zero=True)
        page.show(f"{stem}_depth", "gain by depth of the needle", lines, by_depth)
    if lines := _lines(_longest(of["induction"]), "distance", "accuracy", "in the longest context"):
        frame = _with_ticks(Frame("Tokens from one copy to the other", "Accuracy"), lines)
        page.show(f"{stem}_distance", "accuracy by distance of the copies", lines, frame)


GAIN = "Gain (nats per token)"


def _with_ticks(frame: Frame, lines: Sequence[Line]) -> Frame:
    """Return a frame with a tick at every value of x, and 0 on the y axis."""
    ticks = {x: f"{x:g}" for line in lines for x in line.xs}
    return dataclasses.replace(frame, ticks=ticks, holds_zero=True)


def _lines(records: Sequence[Record], x: str, name: str, panel: str) -> list[Line]:
    """Return a line of one measure for each checkpoint, in one panel.

    Args:
        records: Of one task.
        x: The key whose values go along the x axis.
        name: The measure.
        panel: What is shown.
    """
    lines = []
    for curve, label in curve_labels(records).items():
        own = [r for r in records if (r["run"], r["step"]) == curve and r["measure"] == name]
        own.sort(key=lambda r: float(r[x]))
        values = [Value(*(number(r[key]) for key in ("value", "low", "high"))) for r in own]
        lines.append(Line(panel, label, label, [float(r[x]) for r in own], values))
    return lines


def _longest(records: Sequence[Record]) -> list[Record]:
    """Return the records at the longest length."""
    longest = max((record["length"] for record in records), default=0)
    return [record for record in records if record["length"] == longest]


def check_out(out: Path) -> None:
    """Check that a report may be written to `out`.

    Raises:
        ConfigError: It is no .json file, or holds something else, which would be lost.
    """
    ends = ("", "_depth", "_distance")
    pictures = [out.with_name(f"{out.stem}{end}.{kind}") for end in ends for kind in FORMATS]
    check_ours(out, {"task", "measure"}, [out.with_suffix(".md"), *pictures])


def write_report(out: Path, records: Sequence[Record], left_out: Sequence[str]) -> list[str]:
    """Write FILE.json and, beside it, FILE.csv, FILE.md and the figures.

    Each file appears whole; the JSON comes last. Values that are not finite are null in it.

    Args:
        out: FILE.json, in a directory that exists.
        records: With the keys of FIELDS.
        left_out: Sentences about what was not measured.

    Returns:
        The names of the files.
    """
    page = _page(records, left_out, out.stem)
    contents = {f"{out.stem}.csv": records_to_csv(records, FIELDS)}
    for name, kinds in page.pictures.items():
        contents |= {f"{name}.{kind}": content for kind, content in kinds.items()}
    contents |= {f"{out.stem}.md": page.content(), out.name: records_to_json(records, FIELDS)}
    for name, content in contents.items():
        replace_file(out.with_name(name), content)
    return list(contents)


def _page(records: Sequence[Record], left_out: Sequence[str], stem: str) -> Page:
    """Return the report, whose figures have names that begin with `stem`."""
    tables = make_tables(records)
    lengths: Mapping[str, int] = {r["run"]: r["train_length"] for r in records}
    trained = ", ".join(f"{run} at {length}" for run, length in lengths.items())
    page = Page(
        "# Long-context tasks",
        "A gain is in nats per token; 0 means that the model makes no use of the context that "
        f"could help. L is the training length in tokens: {trained}.",
        "\n".join(f"- {EXPLAINED[task]}" for task in dict.fromkeys(task for task, _ in tables)),
        INTERVALS,
        *_warnings(records),
    )
    _show(page, records, stem)
    page.add(*(table.markdown() for _, table in tables))
    if left_out:
        page.add("## Left out", "\n".join(f"- {sentence}" for sentence in left_out))
    return page

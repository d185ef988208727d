"""Build the token sequences of the long-context tasks. Arithmetic on token ids, without torch.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError, EvaluationRequest
from pretrain.data.stream import TokenStream

# ---- Parse what `pretrain evaluate-tasks` shall measure. Imports nothing slow ----


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

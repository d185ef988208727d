"""Draw the samples of the long-context tasks: text with planted information, a query, its answer.

A sample is a sequence of `length` inputs and as many targets, of which the last ones, the answer,
are scored. Samples are a function of a seed, the length, a depth and the sample's number, so that
every checkpoint gets the same ones. The information that the answer needs is planted in the context
at a depth from 0 (the beginning of the context) to 1 (right before the query). The control lacks
this information, and is otherwise the same.

    with the needle       text text NEEDLE text text text  NEEd l e
    control               text text  text  text text text  NEEd l e      scored: l e
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import Tokenizer, load_tokenizer

SEED = 1234
"""Seed of all samples."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PLANTED = 32
"""Number of tokens of a needle, and of a random sequence to copy."""
QUERY = 8
"""Tokens at the beginning of a repetition that are not scored, because they are the query."""
SAMPLED_TOKENS = 2**20
"""Random sequences consist of tokens that occur among this many first tokens of the text."""
MAX_DRAWS = 10_000
"""Largest number of draws of a place for a needle, before the text counts as having none."""
LIST, END = " List:", " ."
"""Around a list of words. Without the end, a token of the text could continue the last word."""
WORDS_TOKENS = 2**18
"""Words of RULER's tasks are taken from this many first tokens of the text."""
WORD = re.compile(r"(?<![^\W_])[a-z]{4,8}(?![^\W_])")
Tokens = NDArray[np.int64]


class Question(NamedTuple):
    """The tokens that a sample plants, its query and its answer."""

    asked: list[Tokens]
    """Planted pieces from which the answer follows, in the order of the text."""
    others: list[Tokens]
    """Planted distractors, at other places."""
    query: Tokens
    answer: Tokens
    hole: int | None = None
    """Start of the planted tokens in the validation text, from which they are then removed."""


class Drawn(NamedTuple):
    """A sample of a task."""

    tokens: Tokens
    """[length + 1]: the inputs, and the target of the last one."""
    scored: int
    """Number of targets at the end that are the answer."""


# ---- the text, and the tasks that draw from it ---------------------------------------------------
@dataclass(frozen=True)
class Text:
    """The validation text."""

    stream: TokenStream
    seed: int = SEED

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Return the position of each end-of-document token."""
        ends = []
        for start in range(0, len(self.stream), SAMPLED_TOKENS):
            ids = self.stream.read(start, min(SAMPLED_TOKENS, len(self.stream) - start))
            ends.append(start + np.flatnonzero(ids == self.stream.manifest.eos_id))
        return np.concatenate(ends)

    @cached_property
    def occurring(self) -> Tokens:
        """Return the different tokens at the beginning of the text, ascending."""
        found: Tokens = np.unique(self.stream.read(0, min(SAMPLED_TOKENS, len(self.stream))))
        occurring: Tokens = found[found != self.stream.manifest.eos_id]
        return occurring

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the text."""
        return load_tokenizer(self.stream.tokenizer_path)

    @cached_property
    def words(self) -> list[str]:
        """Return the different words of 4 to 8 small letters at the text's beginning, sorted."""
        ids = self.stream.read(0, min(WORDS_TOKENS, len(self.stream)))
        return sorted(set(WORD.findall(self.tokenizer.decode(ids.tolist()))))

    def encode(self, *pieces: str) -> Tokens:
        """Return the tokens of pieces of text, each of which begins with white space.

        Raises:
            ConfigError: The vocabulary is one of words, and has not all of these.
        """
        ids: Tokens = np.concatenate([self.tokenizer.encode(piece) for piece in pieces])
        if self.tokenizer.unk_id in ids:
            raise ConfigError(
                f"{self.stream.tokenizer_path}: has no tokens for {''.join(pieces)[:60]!r}, which "
                "one of --tasks asks for. Choose among needle and induction"
            )
        return ids

    def enumerated(self, words: Sequence[str]) -> Tokens:
        """Return the tokens of " one, two, three"."""
        *first, last = words
        return self.encode(*(f" {word}," for word in first), f" {last}")

    def draw_words(self, random: np.random.Generator, count: int) -> list[str]:
        """Draw different words of the text."""
        if len(self.words) < count:
            raise ConfigError(
                f"{self.stream.directory}: has fewer than {count} different words of 4 to 8 Latin "
                "letters, which one of --tasks asks for. Choose among needle and induction"
            )
        return [self.words[i] for i in random.choice(len(self.words), count, replace=False)]

    def around(self, start: int, count: int, hole: int | None) -> Tokens:
        """Return `count` consecutive tokens, leaving out PLANTED tokens from `hole` on."""
        if hole is None:
            return self.stream.read(start, count)
        before = min(max(hole - start, 0), count)
        after = self.stream.read(max(hole, start) + PLANTED, count - before)
        return np.concatenate([self.stream.read(start, before), after])

    def random(self, *key: int) -> np.random.Generator:
        """Return the generator for a key, independent of earlier draws."""
        return np.random.default_rng([self.seed, *key])


class Task:
    """A task. To add one, write a subclass with `ask` and a name, and list it in TASKS."""

    name: str
    says: str
    """Description for the report."""
    number: int
    """Key of its random generators."""
    depths: tuple[float | None, ...] = DEPTHS
    """Depths of the planted information; (None,) if it is spread over the context."""
    shown = ("gain_nats", "accuracy")
    """The measures that have tables."""

    def ask(self, text: Text, random: np.random.Generator, room: int) -> Question:
        """Draw a question.

        Args:
            text: The text to draw from.
            random: Generator for the draw.
            room: Tokens of the context, for a task that fills the context.
        """
        raise NotImplementedError

    def question(self, text: Text, sample: int, room: int = 0) -> Question:
        """Return the question of a sample."""
        return self.ask(text, text.random(self.number, sample), room)

    def shortest(self, text: Text, samples: int) -> int:
        """Return the shortest context that has room for each of this many samples."""
        found = (self.question(text, sample) for sample in range(samples))
        parts = ([*q.asked, *q.others, q.query, q.answer] for q in found)
        return max(sum(map(len, pieces)) - 1 for pieces in parts)

    def draw(
        self, text: Text, length: int, depth: float | None, sample: int, *, planted: bool = True
    ) -> Drawn:
        """Return a sample.

        Args:
            text: The text to draw from.
            length: Tokens of the context.
            depth: Depth of the planted information, one of `depths`.
            sample: The sample's number.
            planted: False for the control, which lacks this information.
        """
        asked, others, query, answer, hole = self.question(text, sample, length)
        random, count = text.random(2, length, sample), length + 1 - len(query) - len(answer)
        last = len(text.stream) - (0 if hole is None else PLANTED) - count
        around = text.around(int(random.integers(0, last + 1)), count, hole)
        # Positions of the pieces in the rest of the text.
        pieces = [*asked, *others]
        free = count - sum(map(len, pieces))
        cuts = random.integers(0, free + 1, len(pieces))
        cuts[: len(asked)] = np.sort(cuts[: len(asked)]) if depth is None else round(depth * free)
        before = 0
        for index in np.argsort(cuts, kind="stable"):
            place, size = int(cuts[index]) + before, len(pieces[index])
            before += size
            if planted or index >= len(asked):
                around[place : place + size] = pieces[index]
        return Drawn(np.concatenate([around, query, answer]), len(answer))

    def cluster(self, text: Text, sample: int) -> int:
        """Return the number of a sample's cluster; samples in one cluster are not independent."""
        return sample


class Needle(Task):
    """The needle is tokens of the text, which are then removed from the surrounding text."""

    number, name = 0, "needle"
    says = (
        f"{PLANTED} tokens of validation text stand at a depth of other validation text (0: at its "
        "beginning, 1: right before the query), and are repeated at the end. The first "
        f"{QUERY} tokens of the repetition are the query, the loss is that of the other "
        f"{PLANTED - QUERY}. The gain is how much lower it is than without the needle in the "
        "context."
    )

    def ask(self, text: Text, random: np.random.Generator, room: int) -> Question:
        start = self._start(text, random)
        content = text.stream.read(start, PLANTED)
        return Question([content], [], content[:QUERY], content[QUERY:], start)

    def cluster(self, text: Text, sample: int) -> int:
        # Samples from one document are similar, so many of them add little information.
        return int(np.searchsorted(text.ends, self._start(text, text.random(self.number, sample))))

    def _start(self, text: Text, random: np.random.Generator) -> int:
        """Draw the start of a sample's needle in the text, within one document."""
        stream = text.stream
        for _ in range(MAX_DRAWS):
            start = int(random.integers(0, len(stream) - PLANTED + 1))
            if stream.manifest.eos_id not in stream.read(start, PLANTED):
                return start
        raise ConfigError(
            f"{stream.directory}: has no {PLANTED} tokens in a row within one document, which the "
            "task needle plants. Leave it out of --tasks"
        )


class Induction(Task):
    """Random tokens: nothing but copying helps, which models learn early, with heads that can be
    named (Olsson et al., "In-context Learning and Induction Heads", 2022, arXiv 2209.11895).

    That paper compares the second copy with the first. Here it is compared with the same tokens at
    the same positions without an earlier copy, so that a model that is worse at later positions
    does not appear to copy less.
    """

    number, name = 1, "induction"
    says = (
        f"the same with {PLANTED} random tokens, all different, so that nothing but copying helps. "
        "Accuracy is the share of scored tokens that the model holds for the most probable ones."
    )

    def ask(self, text: Text, random: np.random.Generator, room: int) -> Question:
        if len(text.occurring) < PLANTED:
            raise ConfigError(
                f"{text.stream.directory}: has fewer than {PLANTED} different tokens, which the "
                "task induction plants. Leave it out of --tasks"
            )
        content = random.choice(text.occurring, PLANTED, replace=False)
        return Question([content], [], content[:QUERY], content[QUERY:])


# ---- the synthetic tasks of RULER ----------------------------------------------------------------
class Ruler(Task):
    """A synthetic task of Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
    Language Models?", 2024, arXiv 2404.06654, section 3; the numbers are those of
    scripts/synthetic.yaml in github.com/NVIDIA/RULER at c3f5e3b.

    RULER's prompts begin with an instruction, and each expected string counts if it occurs anywhere
    in the answer. Here the prompt is text that a model without instruction tuning can continue, the
    haystack is validation text instead of essays, and an answer counts only as a whole: its strings
    must be in the order of the text, or for frequent words in the order of frequency. Values are
    therefore not comparable with RULER's tables.
    """

    depths: tuple[float | None, ...] = (None,)
    shown = ("exact", "gain_nats")


class MagicNumbers(Ruler):
    """Needles in a haystack: 7-digit numbers, each with a word. The query asks for one word's."""

    def __init__(self, number: int, name: str, keys: int, values: int, says: str) -> None:
        self.number, self.name, self.says = number, name, says
        self.keys, self.values = keys, values
        self.depths = DEPTHS if values == 1 else (None,)

    def ask(self, text: Text, random: np.random.Generator, room: int) -> Question:
        keys = text.draw_words(random, self.keys)
        drawn = random.choice(9_000_000, (self.keys, self.values), replace=False) + 1_000_000
        asked, *others = (
            [text.encode(f" The magic number of {key} is {value}.") for value in values]
            for key, values in zip(keys, drawn)
        )
        query = f" The magic number of {keys[0]} is"
        if self.values > 1:
            query = f" The {self.values} magic numbers of {keys[0]} are"
        answer = text.enumerated([str(value) for value in drawn[0]])
        return Question(
            asked, [needle for of_key in others for needle in of_key], text.encode(query), answer
        )


class VariableTracking(Ruler):
    """A chain of variables, each with the value of the previous one."""

    number, name, hops = 13, "vt", 4
    says = (
        f"variable tracking: {hops + 1} assignments stand somewhere in the text, in their order: "
        "of a number (VAR ABCDE = 12345.), and of the variable before (VAR FGHIJ = VAR ABCDE.). "
        "The answer is the variables that have the number."
    )

    def ask(self, text: Text, random: np.random.Generator, room: int) -> Question:
        value, names = str(random.integers(10_000, 100_000)), list[str]()
        while len(set(names)) <= self.hops:
            names = ["".join(map(chr, random.integers(65, 91, 5))) for _ in range(self.hops + 1)]
        values = [value, *(f"VAR {name}" for name in names)]
        asked = [text.encode(f" VAR {name} = {of}.") for name, of in zip(names, values)]
        query = f" The {len(names)} variables that are assigned the value {value} are"
        return Question(asked, [], text.encode(query), text.enumerated(names))


class CommonWords(Ruler):
    """Which words of a list occur more often than the others?"""

    number, name, common = 14, "cwe", 10
    says = (
        f"common words: a list, as long as the context allows, in which {common} words stand 6 "
        "times and all others once (from 4,096 tokens on, 30 and 3 times). The answer is these "
        f"{common}, in the order in which they first occur."
    )

    def ask(self, text: Text, random: np.random.Generator, room: int) -> Question:
        often, seldom = (30, 3) if room >= 4096 else (6, 1)
        # All, because the words drawn depend on how many are, and `shortest` has no room for any.
        words = text.draw_words(random, max(self.common, len(text.words)))
        chosen, found = words[: self.common], words[: self.common] * often
        query = text.encode(f" The {self.common} most common words of the list are")
        room -= len(query) + len(text.enumerated(chosen)) + len(text.encode(LIST, END))
        room -= often * len(text.encode(*(f" {word}" for word in chosen)))
        for word in words[self.common :]:
            room -= seldom * len(text.encode(f" {word}"))
            if room < 0:
                break
            found += [word] * seldom
        found = [found[i] for i in random.permutation(len(found))]
        listed = text.encode(LIST, *(f" {word}" for word in found), END)
        answer = text.enumerated(sorted(chosen, key=found.index))
        return Question([listed], [], query, answer)


class FrequentWords(Ruler):
    """Which of many words, whose frequencies fall as a power of their rank, occur most often?"""

    number, name, fewest = 15, "fwe", 40
    says = (
        "frequent words: a list, as long as the context allows, of words of 6 random letters that "
        "occur as often as 1 / rank^2, the first of which is '...'. The answer is those of rank 2 "
        "to 4, in this order."
    )

    def ask(self, text: Text, random: np.random.Generator, room: int) -> Question:
        ranks = np.arange(1, max(8, room // 50) + 1)
        words = ["".join(map(chr, random.integers(97, 123, 6))) for _ in ranks[1:]]
        tokens = [text.encode(f" {word}") for word in ("...", *words)]
        query = text.encode(" The three most frequent words of the list are")
        answer = text.enumerated(words[:3])
        room -= len(query) + len(answer) + len(text.encode(LIST, END))

        def counts(total: int) -> NDArray[np.int64]:
            # The sum of 1 / rank^2 over all ranks is pi^2 / 6.
            return (6 / np.pi**2 * total / ranks**2).astype(np.int64)

        sizes = np.array([len(each) for each in tokens])
        totals = range(max(room, 0) + 1)
        total = bisect_right(totals, room, key=lambda n: int((counts(n) * sizes).sum())) - 1
        total = max(total, self.fewest)
        # The answer is unique only if no two of these ranks have the same frequency.
        while (np.diff(counts(total)[1:5]) == 0).any():
            total -= 1
        found = np.repeat(np.arange(len(ranks)), counts(total))
        shuffled = [tokens[i] for i in random.permutation(found)]
        listed = np.concatenate([text.encode(LIST), *shuffled, text.encode(END)])
        return Question([listed], [], query, answer)


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Needle(),
        Induction(),
        MagicNumbers(
            *(10, "niah_single", 1, 1),
            "a sentence at a depth of validation text says the magic number of a word, which is "
            "asked for at the end. The answer is its 7 digits.",
        ),
        MagicNumbers(
            *(11, "niah_multikey", 4, 1),
            "the same with the numbers of 3 other words at any depths. Whoever finds all numbers "
            "and takes one of them is right in 1 of 4.",
        ),
        MagicNumbers(
            *(12, "niah_multivalue", 1, 4),
            "a word has 4 magic numbers, at any depths. The answer is all of them, in the order of "
            "the text; in any order would be right in 1 of 24.",
        ),
        VariableTracking(),
        CommonWords(),
        FrequentWords(),
    )
}
"""Name -> task."""

"""Held-out text in training, against sets of tuples of 13 words."""

import random
import sys
import tracemalloc
from itertools import groupby
from pathlib import Path

import pytest

from pretrain.data import clean
from pretrain.data.clean import LEAK_WORDS, HeldOut, sequence_hashes, word_hashes
from tests.conftest import mark_torture

SPACES = " \n\t\r\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2028\u2029\u3000"
MARKS = "¡«·»¿\u200b\u2060\ufeff、。〃" + "".join(
    map(chr, [*range(0x2010, 0x2028), *range(0x2030, 0x205F), 0x205F])
)
NOT_SPACES = ["", "\u200c", "\x00", "\ud800", "\u0301", "_", "¨"]


def separates(character: str) -> bool:
    """The definition of the end of a word, one character at a time."""
    ascii_mark = ord(character) < 128 and not ("a" <= character <= "z" or "0" <= character <= "9")
    return ascii_mark or character.isspace() or character in MARKS


def naive_words(text: str) -> list[str]:
    groups = groupby(text.lower(), key=separates)
    return ["".join(characters) for end, characters in groups if not end]


def naive_sequences(text: str) -> list[tuple[str, ...]]:
    found = naive_words(text)
    if 0 < len(found) < LEAK_WORDS:
        return [tuple(found)]
    return [tuple(found[i : i + 13]) for i in range(len(found) - 12)]


class Naive:
    """The definition, with sets of tuples."""

    def __init__(self, texts: list[str]) -> None:
        self.documents = [set(naive_sequences(text)) for text in texts]
        self.all = set().union(*self.documents)
        self.seen: set[tuple[str, ...]] = set()

    def overlap(self, text: str) -> tuple[int, int, dict[int, int]]:
        own = set(naive_sequences(text))
        shared = {n: len(own & d) for n, d in enumerate(self.documents) if own & d}
        return len(own), len(own & self.all), shared

    def is_leaked(self, text: str) -> bool:
        own, shared, by_document = self.overlap(text)
        mostly = any(n >= len(self.documents[d]) / 2 for d, n in by_document.items())
        return bool(shared) and (shared >= own / 2 or mostly)

    def note(self, text: str) -> None:
        self.seen |= self.all & set(naive_sequences(text))

    @property
    def leakage(self) -> float:
        return len(self.seen) / len(self.all) if self.all else 0.0


def a_word(rng: random.Random, vocabulary: int) -> str:
    kind = rng.random()
    if kind < 0.02:
        return "x" * rng.choice([32, 33, 1000]) + str(rng.randrange(vocabulary))
    if kind < 0.06:
        return rng.choice(NOT_SPACES) + rng.choice(["ΣΑΣ", "İ", "ß", "ẞ", "ﬁ", "a\u0301", "🙂"])
    return rng.choice(["w", "W", "É", "wö"]) + str(rng.randrange(vocabulary))


def a_text(rng: random.Random, parts: list[str], vocabulary: int) -> str:
    """Random words with pieces of other texts between them, and any white space."""
    result: list[str] = []
    for _ in range(rng.randint(0, 4)):
        result += [a_word(rng, vocabulary) for _ in range(rng.choice([0, 1, 11, 12, 13, 14, 60]))]
        if parts and rng.random() < 0.6:
            piece = rng.choice(parts).split()
            cut = sorted((rng.randint(0, len(piece)), rng.randint(0, len(piece))))
            result += rng.choice([piece, piece[cut[0] : cut[1]]])
    ends = [*SPACES, *SPACES, *MARKS, *map(chr, range(128))]
    return "".join(word + "".join(rng.choices(ends, k=rng.randint(1, 3))) for word in result)


CASES = [(seed,) for seed in range(600)]


@pytest.mark.parametrize(["seed"], mark_torture(CASES, {*CASES[:16]}))
def test_every_count_is_that_of_sets_of_tuples(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random texts that quote each other; every other case cuts texts after a few characters."""
    rng = random.Random(seed)
    monkeypatch.setattr(clean, "CHUNK", 7 if seed % 2 else 1 << 20)
    vocabulary = rng.choice([1, 2, 50, 10_000])  # of 1 and 2 words: sequences that repeat
    held_out: list[str] = []
    for _ in range(rng.randint(0, 8)):
        held_out.append(a_text(rng, held_out, vocabulary))
    HeldOut.from_texts(held_out).save(tmp_path / "held_out")
    workers, naive = [HeldOut.load(tmp_path / "held_out") for _ in range(3)], Naive(held_out)
    assert workers[0].sequences == len(naive.all)
    for number in range(40):
        text = a_text(rng, held_out, vocabulary)
        worker = workers[number % 3]
        assert worker.is_leaked(text) == naive.is_leaked(text)
        if number % 4:
            worker.note(text)
            naive.note(text)
    whole = HeldOut.load(tmp_path / "held_out")
    for worker in workers:
        worker.save_seen(tmp_path / "seen")
        whole.merge_seen((tmp_path / "seen").read_bytes())
    assert whole.leakage == pytest.approx(naive.leakage, rel=1e-12)


def test_a_document_goes_at_half_and_not_before() -> None:
    held = [f"h{n}" for n in range(112)]  # 100 sequences
    ours = HeldOut.from_texts([" ".join(held)])
    other = [f"t{n}" for n in range(1000)]
    assert ours.is_leaked(" ".join([*other, *held[:62], *other]))  # 50 of the held-out 100
    assert not ours.is_leaked(" ".join([*other, *held[:61], *other]))
    # 10 sequences are held-out ones; the document has 10 others, or 11.
    assert ours.is_leaked(" ".join([*held[:22], *other[:10]]))
    assert not ours.is_leaked(" ".join([*held[:22], *other[:11]]))


def test_every_character_is_in_a_word_or_ends_one() -> None:
    """The first 12,544 characters of Unicode and every 101st of the others, between two letters."""
    for code in [*range(0x3100), *range(0x3100, sys.maxunicode + 1, 101)]:
        text = f"a{chr(code)}b"
        assert len(word_hashes(text)) == len(naive_words(text)), hex(code)


def test_a_text_without_white_space_or_of_many_words_takes_bounded_memory() -> None:
    """16 MB of one word, and 6 MB of words: no list of all words is ever made."""
    one = "x" * (16 << 20)
    many = "word " * (1 << 20)
    tracemalloc.start()
    try:
        assert len(sequence_hashes(one, 13)) == 1
        assert tracemalloc.get_traced_memory()[1] < 3.5 * len(one)
        tracemalloc.reset_peak()
        assert len(sequence_hashes(many, 13)) == (1 << 20) - 12
        # 1M words as objects in a list would be 8 MB of pointers and 50 MB of strings.
        assert tracemalloc.get_traced_memory()[1] < 8 * len(many)
    finally:
        tracemalloc.stop()

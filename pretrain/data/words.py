"""Hash texts, and the sequences of words in them, the same way on every machine.

Cleaning compares documents by runs of words: 5-word sequences find near duplicates, 13-word
sequences find held-out text in training. Words are compared in lower case and without punctuation,
in which editions of a text differ most: a word is a maximal run of characters that are neither
white space, nor ASCII other than letters and digits, nor typographic punctuation (quotes, dashes).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]

CHUNK = 1 << 20
"""Characters that are split into words at a time, so that a text of gigabytes is no list of all its
words."""

FACTOR = 0x9E3779B97F4A7C15
"""Each word's hash is multiplied by this odd number once more than that of the word before it, so
that the order of the words counts."""

_SPACE = re.compile(r"\s")
_SEPARATOR = re.compile(
    "[\\s\xa1\xab\xb7\xbb\xbf\u200b\u2010-\u2027\u2030-\u2060\u3001-\u3003\ufeff]"
)
_ASCII = bytes(c if c >= 128 or chr(c).isalnum() else ord(" ") for c in range(256))


def document_hash(text: str) -> int:
    """Return the XXH3-64 of a text's UTF-8.

    Half of a surrogate pair, which JSON can hold, is hashed as the three bytes it would take.
    """
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


class _WordHashes(dict[bytes, int]):
    """A table from words to their hashes that fills itself and keeps the frequent ones."""

    def __missing__(self, word: bytes) -> int:
        value = xxhash.xxh3_64_intdigest(word)
        # Long words are rare, and their memory has no bound.
        if len(word) <= 32:
            if len(self) >= 1 << 18:
                self.clear()
            self[word] = value
        return value


_known = _WordHashes()


def word_hashes(text: str) -> Hashes:
    """Return the 64-bit hash of each word of a text, in order."""
    parts = [
        np.fromiter(map(_known.__getitem__, words), np.uint64, len(words))
        for words in map(_words, chunks(text))
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint64), *parts])


def _words(text: str) -> list[bytes]:
    text = text.lower()
    if not text.isascii():
        text = _SEPARATOR.sub(" ", text)
    # Separators of ASCII become spaces, in one pass over the bytes: five times as fast as re.
    return text.encode("utf-8", "surrogatepass").translate(_ASCII).split()


def chunks(text: str) -> Iterator[str]:
    """Cut a text at white space into pieces of some CHUNK characters; a word is never cut."""
    start = 0
    while len(text) - start > CHUNK:
        space = _SPACE.search(text, start + CHUNK)
        if space is None:
            break
        yield text[start : space.start()]
        start = space.start()
    yield text[start:] if start else text


def sequence_hashes(text: str, length: int) -> Hashes:
    """Return the hash of each run of `length` words of a text, in order.

    A text of fewer words counts as one sequence of all its words; a text without words has none.
    Two different sequences have equal hashes with a probability of about 2^-60.
    """
    hashes = word_hashes(text)
    length = min(length, len(hashes))
    if not length:
        return hashes
    # Sequences of n words are added up from those of n/2 words: 13 takes 5 additions, not 12.
    total = np.zeros(len(hashes) - length + 1, np.uint64)
    power, width, done = hashes, 1, 0
    while True:
        if length & width:
            total += power[done : done + len(total)] * _factor(done)
            done += width
        if width * 2 > length:
            return total
        power = power[:-width] + power[width:] * _factor(width)
        width *= 2


def _factor(exponent: int) -> np.uint64:
    return np.uint64(pow(FACTOR, exponent, 1 << 64))

"""Encode a text word by word, with a memory of the words that were encoded before.

Some tokenizers treat the parts of a text between certain boundaries one by one, whatever stands
beside them. Natural text repeats its words, so most of the work is then a look-up.

A SentencePiece BPE model begins with single characters and merges neighbours as long as the result
is a piece. Across a place that lies inside no piece nothing is ever merged, and the order of merges
on one side does not depend on the other side. `PIECES` cuts where a space follows anything but a
space, and around newlines; `fits_pieces` checks that no piece of the model lies across such a
place.

GPT-2's and Llama 3's expressions cut a text into parts, from left to right, before any merge. No
alternative in them matches a space after a character that is no white space (GPT-2's: nor a
newline), so one of their parts always begins at such a space. The parts before it do not depend on
what follows, because the only look ahead stands behind a run of white space. `GPT2` and `LLAMA3`
cut there and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

SPACE = "▁"
"""U+2581, which SentencePiece writes for a space."""
PART_CHARACTERS = 1 << 20
"""Words are cut from about as much text at once, which bounds the memory that they need."""
MAX_WORDS = 1 << 18
"""So many words are remembered; then all of them are forgotten."""
MAX_WORD_CHARACTERS = 64
"""A longer word is not remembered."""


class Cut(NamedTuple):
    """Two patterns by which a text is cut into words."""

    words: re.Pattern[str]
    """Matches word after word, without gaps."""
    end: re.Pattern[str]
    """Matches the last character of a word, where another word follows."""


PIECES = Cut(
    re.compile(rf"[ {SPACE}]*[^ \n{SPACE}]+|\n|[ {SPACE}]+"),
    re.compile(rf"\n|[^ \n{SPACE}](?=[ \n{SPACE}])"),
)
PIECES_PLAIN = PIECES._replace(words=re.compile(r" *[^ \n]+|\n| +"))
"""The same cut for text without U+2581, which takes less time to match."""

# Unicode's white space has changed over the years, and libraries differ in the separators U+001C to
# U+001F. No cut is made behind any character that one of them takes for white space.
_ODD = "\u180e\u200b\ufeff"
_WHITE, _BLACK = rf"[\s{_ODD}]", rf"[^\s{_ODD}]"


def _before(spaces: str) -> Cut:
    """Return the cut between a character that is no white space and one of `spaces`."""
    inner = f"(?:(?![{spaces}]){_WHITE}{_WHITE}*{_BLACK}*)*"
    words = f"{_WHITE}*{_BLACK}+{inner}|{_WHITE}+"
    return Cut(re.compile(words), re.compile(f"{_BLACK}(?=[{spaces}])"))


GPT2 = _before(" \n")
LLAMA3 = _before(" ")


class WordCache(dict[str, bytes]):
    """Maps words to their ids, int32 in bytes, and encodes a word when it is first asked for."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        """Remember nothing yet.

        Args:
            encode: Returns the ids of a word.
        """
        self._encode = encode

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._encode(word), np.int32).tobytes()
        if len(word) <= MAX_WORD_CHARACTERS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str, cut: Cut) -> np.ndarray:
        """Return the ids of a text, int64 [tokens].

        Args:
            text: The text.
            cut: Where to cut it.
        """
        parts = [
            b"".join(map(self.__getitem__, cut.words.findall(text, start, end)))
            for start, end in _ranges(text, cut.end)
        ]
        return np.frombuffer(b"".join(parts), np.int32).astype(np.int64)


def fits_pieces(pieces: Iterable[str]) -> bool:
    """Return True if no piece lies across a place where `PIECES` cuts."""
    across = re.compile(rf"[^{SPACE}]{SPACE}|[^\n]\n|\n[^\n]|\n\n")
    return not any(" " in piece or across.search(piece) for piece in pieces)


def _ranges(text: str, end_of_word: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of parts of a text that end with a word."""
    start = 0
    while start < len(text):
        found = end_of_word.search(text, start + PART_CHARACTERS)
        end = found.end() if found else len(text)
        yield start, end
        start = end

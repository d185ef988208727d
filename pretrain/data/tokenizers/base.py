"""Define what every tokenizer answers, and how its file is named and found."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pretrain.config import ConfigError

if TYPE_CHECKING:
    import tokenizers


MODEL, JSON, DICTIONARY = "tokenizer.model", "tokenizer.json", "tokenizer.txt"
TOKENIZER_FILES = (MODEL, JSON, DICTIONARY)
"""Under these names a tokenizer lies in a data set, a checkpoint and an export."""
MAX_BYTES = 2**30
"""A larger file is no tokenizer; Llama 3's is 17 MB."""

PROBES = (
    "",
    " ",
    "  two  spaces ",
    "\ttab\tand\nlines\r\n\n",
    "naïve café, 北京市 こんにちは",
    "🙂🙃👩\u200d👩\u200d👧 flags 🇩🇪",
    "<s> and </s> and <unk>",
    "<|endoftext|>, <|end_of_text|> and <pad>",
    "<0x41> bytes \x00\x07\x7f\ufeff",
    "1234567890 3.14159",
    "It's what they'll say, we've HEARD'S",
    "▁literal underline▁",
    "Ünïcödé e\u0301 \u200b \u00a0 \U0001f3fb",
)
"""Odd strings on which every exported tokenizer must give the ids of the original."""


class Tokenizer(ABC):
    """A tokenizer, loaded from its one file."""

    file_name: str
    """Its name in a data set or a checkpoint: one of TOKENIZER_FILES."""

    fingerprint: str
    """Hex SHA-256 digest of the file."""

    vocab_size: int
    """Highest id plus one, special and added tokens included."""

    eos_id: int
    """Id of the token that is appended to every document."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Note where the tokenizer comes from.

        Args:
            path: The file, for messages.
            content: Its bytes.
        """
        self.path, self.content = path, content
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew from the file's bytes: a pickled tokenizers.Tokenizer forgets that it is not to
        # look for special tokens.
        return type(self), (self.path, self.content)

    unk_id: int | None = None
    """Id that stands for words which `decode` cannot give back; None if there is no such id."""

    special: dict[str, int]
    """Role ("unk", "eos", "pad") -> id, of the special tokens that there are.

    A BOS is none of them: documents begin after the EOS of the one before.
    """

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [tokens], without an end-of-document token.

        The name of a special token in the text, such as "</s>", is text like any other.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Special tokens decode to nothing."""

    @abstractmethod
    def to_hugging_face(self) -> tokenizers.Tokenizer:
        """Return a new Hugging Face tokenizer with the same ids. It adds nothing to a text.

        Raises:
            ConfigError: There is none.
        """

    def check_exportable(self) -> None:
        """Check that a Hugging Face folder can hold this tokenizer, with the same ids.

        Raises:
            ConfigError: It cannot.
        """
        converted = self.to_hugging_face()
        for text in PROBES:
            ours = self.encode(text).tolist()
            theirs = converted.encode(text, add_special_tokens=False).ids
            if ours != theirs:
                raise ConfigError(
                    f"{self.path}: a Hugging Face tokenizer made of it encodes {text!r} as "
                    f"{theirs}, not as {ours}, so a model trained with it could not be exported. "
                    "Use another tokenizer"
                )

    def check_trainable(self) -> None:
        """Check that models trained with this tokenizer could be exported, or are known not to be.

        Raises:
            ConfigError: They could not, which would be found out after training.
        """
        self.check_exportable()


def find_tokenizer(directory: str | Path) -> Path:
    """Return the path of the tokenizer in a data set or a checkpoint.

    Raises:
        ConfigError: There is none.
    """
    paths = [Path(directory) / name for name in TOKENIZER_FILES]
    for path in paths:
        if path.exists():
            return path
    raise ConfigError(
        f"{paths[0]}: missing, and so are {JSON} and {DICTIONARY}: there is no tokenizer. "
        "`pretrain data build CONFIG` makes a data set with one"
    )


def read_tokenizer(path: Path) -> bytes:
    """Return the bytes of a tokenizer's file.

    Raises:
        ConfigError: It is missing, no regular file, or far too large.
    """
    try:
        if path.is_dir():
            raise ConfigError(
                f"{path}: a directory. Give the file in it: a SentencePiece .model, a Hugging "
                f"Face {JSON}, or a fairseq dict.txt"
            )
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a regular file, so not a tokenizer")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{path}: {size} bytes are no tokenizer. Give the right file")
        return path.read_bytes()
    except OSError as error:
        remedy = ""
        if isinstance(error, FileNotFoundError):
            remedy = ". Give the path of its file; models on the Hub are not looked up by name"
        raise ConfigError(f"{path}: cannot read the tokenizer ({error.strerror}){remedy}") from None


# ---- Encode a text word by word, with a memory of the words that were encoded before ----
# Some tokenizers treat the parts of a text between certain boundaries one by one, whatever stands
# beside them. Natural text repeats its words, so most of the work is then a look-up.
#
# A SentencePiece BPE model begins with single characters and merges neighbours as long as the
# result is a piece. Across a place that lies inside no piece nothing is ever merged, and the order
# of merges on one side does not depend on the other side. `PIECES` cuts where a space follows
# anything but a space, and around newlines; `fits_pieces` checks that no piece of the model lies
# across such a place.
#
# GPT-2's and Llama 3's expressions cut a text into parts, from left to right, before any merge. No
# alternative in them matches a space after a character that is no white space (GPT-2's: nor a
# newline), so one of their parts always begins at such a space. The parts before it do not depend
# on what follows, because the only look ahead stands behind a run of white space. `GPT2` and
# `LLAMA3` cut there and nowhere else.


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

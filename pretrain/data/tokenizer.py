"""Load a tokenizer: a SentencePiece model, a Hugging Face tokenizer.json, or a dict.txt of words.

tokenizer = load_tokenizer("tokenizer.json")
ids = tokenizer.encode("To be, or not to be")
"""

from __future__ import annotations

import io
import re
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretrain.config import ConfigError
from pretrain.data.clean import chunks
from pretrain.data.tokenizers.base import (
    DICTIONARY,
    TOKENIZER_FILES,
    Tokenizer,
    find_tokenizer,
    read_tokenizer,
)
from pretrain.data.tokenizers.hugging_face import JsonTokenizer
from pretrain.data.tokenizers.pieces import PieceTokenizer

if TYPE_CHECKING:
    import tokenizers

# ---- Train a SentencePiece BPE tokenizer ----
# The settings are those for which a Hugging Face tokenizer can give identical ids (see
# pretrain.data.tokenizers.pieces).


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a BPE tokenizer on the lines of texts and return the SentencePiece model's content.

    The result is a pure function of the lines. All of them are held in memory, so the caller hands
    over a sample. Empty lines are left out.

    Raises:
        ConfigError: if the text is too small for the vocabulary, or the vocabulary for the text.
    """
    # Here, because machines that only measure training need no SentencePiece.
    import sentencepiece

    # A list rather than the generator: if a bad line of the corpus raised ConfigError inside
    # SentencePiece's callback, SentencePiece would replace it with an error of its own.
    lines = (line.strip("\r") for text in texts for line in text.split("\n"))
    sample = [line for line in lines if line]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            # Characters that are no piece become byte pieces instead of <unk>.
            byte_fallback=True,
            # The next three keep the text unchanged, so that decoding gives back the exact input.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            # Runs of spaces and tabs may become pieces of their own.
            allow_whitespace_only_pieces=True,
            split_digits=True,
            # In bytes. SentencePiece's default silently drops every line longer than 4192.
            max_sentence_length=2**30,
            minloglevel=2,
        )
    except RuntimeError as error:
        explanation = _explain_training_error(str(error), sample)
        raise ConfigError(f"data.vocab_size = {vocab_size}: {explanation}") from None
    return model.getvalue()


def _explain_training_error(error: str, lines: list[str]) -> str:
    """Turn an error message of SentencePiece's trainer into what is wrong and what to do."""
    if not lines:
        return (
            "there is no text to train a tokenizer on. Raise data.tokenizer_training_bytes, or add "
            "text"
        )
    if highest := re.search(r"too high.*<= (\d+)", error):
        return (
            f"the text yields too few distinct pieces. Set it to {highest[1]} or less, or add text"
        )
    if lowest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return f"the text's characters alone need {lowest[1]} pieces. Set it well above that"
    return f"SentencePiece cannot train on this text: {error}"


__all__ = [
    "TOKENIZER_FILES",
    "Tokenizer",
    "find_tokenizer",
    "load_tokenizer",
    "train_tokenizer",
    "train_words",
]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer in a file: .txt is a dict.txt, and of others the content says what it is.

    Raises:
        ConfigError: The file cannot be read, is no tokenizer, or has no end-of-document token.
    """
    path = Path(path)
    return make_tokenizer(path, read_tokenizer(path))


def make_tokenizer(path: Path, content: bytes) -> Tokenizer:
    """Return the tokenizer whose file has a content; see `load_tokenizer`."""
    if path.suffix == ".txt":
        return WordTokenizer(path, content)
    # No SentencePiece model begins with a brace.
    if path.suffix == ".json" or content.lstrip()[:1] == b"{":
        return JsonTokenizer(path, content)
    return PieceTokenizer(path, content)


# ---- Use a vocabulary of words, as fairseq's Dictionary has it ----
# A word is what stands between white space, and every line ends with `</s>`, an empty one too. The
# ids begin with `<s>`, `<pad>`, `</s>` and `<unk>`; the words follow, the most frequent first, and
# those that are equally frequent in the order of their characters. Every other word is `<unk>`, as
# is one that is spelled so, with which corpora such as WikiText-103 mark their rare words. The file
# is fairseq's dict.txt: "word count" on a line for each word (fairseq/data/dictionary.py).
#
# The ids of a text are those of fairseq-preprocess, with two exceptions: words that are spelled as
# `<s>`, `<pad>` or `</s>` are unknown here and control tokens there.


SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNK = range(4)
MULTIPLE = 8
"""fairseq pads a vocabulary to a multiple of this with words of its own, madeupword0000 and on."""


class WordTokenizer(Tokenizer):
    """A dict.txt.

    A document is its lines; the end-of-document token is the `</s>` of its last line, so a newline
    at the end of a text is not encoded. `decode(encode(text))` has one space between words, and
    `<unk>` for words that are not in the vocabulary.
    """

    file_name = DICTIONARY
    eos_id = EOS
    unk_id = UNK

    def __init__(self, path: Path, content: bytes) -> None:
        """Load the vocabulary in `content`.

        Raises:
            ConfigError: It is no dict.txt.
        """
        super().__init__(path, content)
        self._symbols = [*SPECIAL, *_words(path, content)]
        self.vocab_size = len(self._symbols)
        self.special = {"eos": EOS, "unk": UNK, "pad": PAD}
        self._ids = _Ids(zip(self._symbols[len(SPECIAL) :], range(len(SPECIAL), self.vocab_size)))

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64 [words and line ends], without the last line's end."""
        text = _with_newlines(text)
        ids, look_up = array("i"), self._ids.__getitem__
        for chunk in chunks(text):
            for number, line in enumerate(chunk.split("\n")):
                if number:
                    ids.append(EOS)
                ids.extend(map(look_up, line.split()))
        if text.endswith("\n"):
            ids.pop()
        return np.frombuffer(ids, np.int32).astype(np.int64) if ids else np.empty(0, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids: words joined by spaces, a newline for each `</s>`."""
        lines: list[list[str]] = [[]]
        for i in ids:
            if i == EOS:
                lines.append([])
            elif i not in (BOS, PAD):
                # The model has more rows than words where its vocabulary is padded.
                lines[-1].append(self._symbols[i if i < self.vocab_size else UNK])
        return "\n".join(map(" ".join, lines))

    def check_trainable(self) -> None:
        """Do nothing: models of whole words are trained to be compared, not to be exported.

        `pretrain config` says that such a run is not exported.
        """

    def to_hugging_face(self) -> tokenizers.Tokenizer:
        """Raise ConfigError: there is none."""
        raise ConfigError(
            f"{self.path}: a vocabulary of words is not exported. To export a model, train it with "
            "a SentencePiece or Hugging Face tokenizer"
        )


def train_words(texts: Iterable[str], vocab_size: int) -> bytes:
    """Count the words of all texts, and return the content of a dict.txt.

    Args:
        texts: Documents, or parts of them that begin and end with white space.
        vocab_size: Ids of the vocabulary, the four special ones included.

    Raises:
        ConfigError: The texts have too few different words.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        for chunk in chunks(text):
            counts.update(chunk.split())
    for name in SPECIAL:
        counts.pop(name, None)
    # Half of a surrogate pair, which JSON can hold, has no UTF-8.
    known = [(word, n) for word, n in counts.items() if _has_utf8(word)]
    known.sort(key=lambda each: (-each[1], each[0]))
    words = known[: max(vocab_size - len(SPECIAL), 0)]
    most = -(-(len(words) + len(SPECIAL)) // MULTIPLE) * MULTIPLE
    if not words or vocab_size > most:
        found = f"{len(words):,} different words" if words else "no words"
        raise ConfigError(
            f"data.vocab_size = {vocab_size}: the training text has {found}. Set it to {most} or "
            "less, or add text"
        )
    made_up = (f"madeupword{number:04d}" for number in range(vocab_size))
    names = (name for name in made_up if name not in counts)
    words += [(next(names), 0) for _ in range(vocab_size - len(SPECIAL) - len(words))]
    return "".join(f"{word} {count}\n" for word, count in words).encode()


class _Ids(dict[str, int]):
    """Maps words to their ids, and others to `<unk>`."""

    def __missing__(self, word: str) -> int:
        return UNK


def _words(path: Path, content: bytes) -> list[str]:
    """Return the words of a dict.txt.

    Raises:
        ConfigError: It has another format, or a word twice.
    """
    try:
        lines = content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise _malformed(path, "not UTF-8") from None
    found: dict[str, None] = dict.fromkeys(SPECIAL)
    for number, line in enumerate(lines, start=1):
        word, space, count = line.removesuffix("\r").rpartition(" ")
        if not space or word.split() != [word] or not (count.isascii() and count.isdigit()):
            raise _malformed(path, f"line {number} is {line[:60]!r}")
        if word in found:
            raise _malformed(path, f"line {number} has {word!r} again")
        found[word] = None
    return list(found)[len(SPECIAL) :]


def _malformed(path: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"{path}: not a dict.txt of fairseq, whose lines are a word, a space and its count: "
        f'{fault}. Give another file, or data.tokenizer = "words" to count the words anew'
    )


def _with_newlines(text: str) -> str:
    """Return a text in which every line ends with a newline, as Python reads files."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _has_utf8(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True

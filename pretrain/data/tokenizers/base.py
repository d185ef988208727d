"""Define what every tokenizer answers, and how its file is named and found."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    respelled: tuple[str, ...] = ()
    """Names of special tokens that stock transformers finds in a text although told not to."""

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
        for text in self.probes():
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

    def probes(self) -> list[str]:
        """Return odd strings on which an export must give the ids of this tokenizer."""
        return [text for text in PROBES if not any(name in text for name in self.respelled)]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, as `encode` does. Uses one core."""
        return [self.encode(text) for text in texts]


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

"""Define what every tokenizer answers, and how its file is named and found."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from pretrain.config import ConfigError

MODEL, JSON = "tokenizer.model", "tokenizer.json"
TOKENIZER_FILES = (MODEL, JSON)
"""Under these names a tokenizer lies in a data set, a checkpoint and an export."""
MAX_BYTES = 2**30
"""A larger file is no tokenizer; Llama 3's is 17 MB."""


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

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [tokens], without an end-of-document token.

        The name of a special token in the text, such as "</s>", is text like any other.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Special tokens decode to nothing."""

    @abstractmethod
    def check_exportable(self) -> None:
        """Check that a Hugging Face folder can hold this tokenizer, with the same ids.

        Raises:
            ConfigError: It cannot.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, as `encode` does. Uses one core."""
        return [self.encode(text) for text in texts]


def read_tokenizer(path: Path) -> bytes:
    """Return the bytes of a tokenizer's file.

    Raises:
        ConfigError: It is missing, no regular file, or far too large.
    """
    try:
        if path.is_dir():
            raise ConfigError(
                f"{path}: a directory. Give the file in it: a SentencePiece .model, or a Hugging "
                f"Face {JSON}"
            )
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a regular file, so not a tokenizer")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{path}: {size} bytes are no tokenizer. Give the right file")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the tokenizer ({error.strerror})") from None

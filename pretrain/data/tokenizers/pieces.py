"""Use a SentencePiece model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from pretrain.config import ConfigError
from pretrain.data.tokenizers.base import MODEL, Tokenizer

_MIN_PART_CHARACTERS = 1 << 16
"""Long texts are encoded in parts of about this length.

The time and memory of SentencePiece grow faster than the length of the text: 9.5 MB at once take
four times as long as in parts.
"""


class PieceTokenizer(Tokenizer):
    """A SentencePiece model.

    With a model that `train_tokenizer` made, `decode(encode(text)) == text` holds for every text
    without U+2581, the character with which SentencePiece represents spaces.
    """

    file_name = MODEL

    def __init__(self, path: Path, content: bytes) -> None:
        """Load the model in `content`.

        Raises:
            ConfigError: It is no SentencePiece model, or has no </s> piece.
        """
        super().__init__(path, content)
        # protobuf creates the class when the module is imported, so mypy does not know it.
        self.proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        try:
            self.proto.ParseFromString(content)
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
            # An empty file passes both.
            self.vocab_size = self._processor.get_piece_size() if self.proto.pieces else 0
        except (RuntimeError, DecodeError):
            self.vocab_size = 0
        if not self.vocab_size:
            raise ConfigError(
                f"{path}: not a SentencePiece model. Give the .model file, or a Hugging Face "
                "tokenizer.json"
            )
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise ConfigError(
                f"{path}: the model has no </s> piece, which marks the end of every document. "
                "Train it without --eos_id=-1"
            )
        self._splits_at_newlines = _can_split_at_newlines(self.proto)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [tokens], without an end-of-document token."""
        parts = _split_after_newlines(text) if self._splits_at_newlines else [text]
        ids = [np.array(self._processor.encode(part), dtype=np.int64) for part in parts]
        return np.concatenate([np.empty(0, np.int64), *ids])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Control tokens decode to nothing."""
        text: str = self._processor.decode([int(i) for i in ids])
        return text

    def check_exportable(self) -> None:
        """Check that a Hugging Face tokenizer gives the same ids."""


def _can_split_at_newlines(model: Any) -> bool:
    """Return True if a text split after newlines has the same ids as the whole text.

    This holds for BPE, whose merges are local (Unigram scores the whole text), if no piece
    contains a newline and the normalizer neither adds to nor removes from the text. It is true of
    the models that `train_tokenizer` makes, and checked because data.tokenizer may name any model.

    Args:
        model: The SentencePiece ModelProto.
    """
    normalizer = model.normalizer_spec
    unchanged = not (
        normalizer.precompiled_charsmap
        or normalizer.add_dummy_prefix
        or normalizer.remove_extra_whitespaces
    )
    is_bpe = model.trainer_spec.model_type == model.trainer_spec.BPE
    return is_bpe and unchanged and not any("\n" in piece.piece for piece in model.pieces)


def _split_after_newlines(text: str) -> Iterator[str]:
    """Yield parts of a text that end after a newline.

    Each part has at least `_MIN_PART_CHARACTERS` characters, except the last.
    """
    start = 0
    while start < len(text):
        newline = text.find("\n", start + _MIN_PART_CHARACTERS)
        end = len(text) if newline < 0 else newline + 1
        yield text[start:end]
        start = end

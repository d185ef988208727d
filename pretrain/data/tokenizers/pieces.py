"""Use a SentencePiece model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from pretrain.config import ConfigError
from pretrain.data.tokenizers.base import MODEL, Tokenizer
from pretrain.data.tokenizers.conversion import NORMAL, USER_DEFINED, convert
from pretrain.data.tokenizers.words import PIECES, PIECES_PLAIN, SPACE, WordCache, fits_pieces

UNUSED = 5
"""A value of SentencePiece.Type in sentencepiece_model.proto."""


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
        # Here, because machines that only measure training need no SentencePiece.
        import sentencepiece
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        super().__init__(path, content)
        # protobuf creates the class when the module is imported, so mypy does not know it.
        self.proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        self.vocab_size = 0
        try:
            self.proto.ParseFromString(content)
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
            # An empty file is a model without pieces, about which nothing can be asked. A piece
            # that is not UTF-8 is not a str.
            if self.proto.pieces and all(isinstance(p.piece, str) for p in self.proto.pieces):
                self.vocab_size = self._processor.get_piece_size()
        except (RuntimeError, ValueError, IndexError, DecodeError):
            pass
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
        spec = self.proto.trainer_spec
        found = {"unk": spec.unk_id, "eos": self.eos_id, "pad": spec.pad_id}
        # SentencePiece marks an absent token with -1.
        self.special = {role: i for role, i in found.items() if i >= 0}
        self._words = WordCache(self._word_encoder()) if _is_local(self.proto) else None
        self._prefix = " " if self.proto.normalizer_spec.add_dummy_prefix else ""

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [tokens], without an end-of-document token."""
        if self._words is None:
            return np.array(self._processor.encode(text), dtype=np.int64)
        if text:
            text = self._prefix + text
        return self._words.encode(text, PIECES if SPACE in text else PIECES_PLAIN)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Control tokens decode to nothing."""
        text: str = self._processor.decode([int(i) for i in ids])
        return text

    def to_hugging_face(self) -> tokenizers.Tokenizer:
        """Return a Hugging Face tokenizer with the same ids; see `convert`."""
        return convert(self.path, self.proto)

    def _word_encoder(self) -> Any:
        """Return a function from a word to its ids; it adds no space before the word."""
        import sentencepiece

        proto = type(self.proto)()
        proto.CopyFrom(self.proto)
        proto.normalizer_spec.add_dummy_prefix = False
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString()).encode


def _is_local(proto: Any) -> bool:
    """Return True if a text that is cut by `PIECES` has the same ids as the whole text.

    It is true of the models that `train_tokenizer` makes, and checked because data.tokenizer may
    name any model. Unigram models score the whole text. Without byte pieces, unknown characters
    that are neighbours are one token. A piece that is not to be used is taken apart again in a way
    that depends on the rest of the text.

    Args:
        proto: The SentencePiece ModelProto.
    """
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    unchanged = normalizer.escape_whitespaces and not (
        normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces
    )
    plain = (
        trainer.model_type == trainer.BPE
        and trainer.byte_fallback
        and not trainer.treat_whitespace_as_suffix
        and not any(piece.type in (USER_DEFINED, UNUSED) for piece in proto.pieces)
    )
    return bool(
        unchanged and plain and fits_pieces(p.piece for p in proto.pieces if p.type == NORMAL)
    )

"""Use a SentencePiece model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from pretrain.config import ConfigError
from pretrain.data.tokenizers.base import (
    MODEL,
    PIECES,
    PIECES_PLAIN,
    SPACE,
    Tokenizer,
    WordCache,
    fits_pieces,
)

# ---- Convert a SentencePiece BPE model to a Hugging Face tokenizer that gives identical ids ----
# A SentencePiece BPE model stores pieces with scores, a Hugging Face BPE model a list of merges.
# The merges follow from the pieces (`_merges`). Settings under which the two libraries would
# tokenize differently are refused.


NORMAL, USER_DEFINED = 1, 4
"""Values of SentencePiece.Type in sentencepiece_model.proto."""


def convert(path: Path, proto: Any) -> tokenizers.Tokenizer:
    """Return the Hugging Face tokenizer of a SentencePiece BPE model.

    Args:
        path: Where the model is, for messages.
        proto: Its ModelProto.

    Raises:
        ConfigError: The model has settings whose ids a Hugging Face tokenizer would not reproduce.
    """
    _check_settings(path, proto)
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    tokenizer = tokenizers.Tokenizer(
        BPE(vocab, _merges(proto), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # There is no pre-tokenizer, because SentencePiece applies its merges to the whole text and not
    # word by word.
    replace = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _check_settings(path: Path, proto: Any) -> None:
    """Raise ConfigError if the two libraries would tokenize differently."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    # Setting -> (True if the model has it right, the value that can be exported).
    wanted = {
        "model_type": (trainer.model_type == trainer.BPE, "bpe"),
        "byte_fallback": (trainer.byte_fallback, True),
        "treat_whitespace_as_suffix": (not trainer.treat_whitespace_as_suffix, False),
        "normalization_rule_name": (not normalizer.precompiled_charsmap, "identity"),
        "escape_whitespaces": (normalizer.escape_whitespaces, True),
        "remove_extra_whitespaces": (not normalizer.remove_extra_whitespaces, False),
        "user_defined_symbols": (all(p.type != USER_DEFINED for p in proto.pieces), "none"),
    }
    wrong = [f"{name} must be {right}" for name, (holds, right) in wanted.items() if not holds]
    if wrong:
        raise ConfigError(
            f"{path}: a Hugging Face tokenizer would not give the same ids, so a model trained "
            f"with it could not be exported: {', '.join(wrong)}. Give the tokenizer.json that was "
            "made of it, or leave data.tokenizer out to have one trained that can be exported"
        )


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return every pair of pieces that joins into a third, in the order in which to merge them.

    SentencePiece merges the pair whose result has the highest score. Pairs with the same result are
    ordered by the ids of their parts. Special pieces are left out: "<s>" or "<0x41>" in a text must
    not be merged into them.
    """
    pieces = {p.piece: (i, p.score) for i, p in enumerate(proto.pieces) if p.type == NORMAL}
    merges = []
    for whole, (_, score) in pieces.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in pieces and right in pieces:
                merges.append((-score, pieces[left][0], pieces[right][0], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


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

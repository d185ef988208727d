"""SentencePiece BPE: text -> token ids, in the settings whose Hugging Face export gives identical ids."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from pretrain.config import ConfigError

_CHARACTERS_AT_ONCE = 1 << 16
"""SentencePiece's time and memory grow faster than the text (9.5 MB at once: four times as slow as in pieces)."""


class Tokenizer:
    """A SentencePiece model.

    `decode(encode(text)) == text` for every text without U+2581, the character SentencePiece writes spaces with.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the model at `path`. Raises ConfigError when there is none, or it has no end-of-document piece."""
        try:
            model = Path(path).read_bytes()
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            specification = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
        except OSError as error:
            raise ConfigError(f"{path}: no readable tokenizer ({error.strerror})") from None
        except RuntimeError:
            raise ConfigError(f"{path}: not a SentencePiece model. Give the .model file") from None
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.get_piece_size()
        self.eos_id: int = self._processor.eos_id()
        """Ends every document."""
        if self.eos_id < 0:
            raise ConfigError(
                f"{path}: has no </s> piece to end documents with. Train it without --eos_id=-1"
            )
        self._cuts_at_newlines = _can_cut_at_newlines(specification)

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int64 [tokens], without the end-of-document token."""
        parts = _cut(text) if self._cuts_at_newlines else [text]
        ids = [np.array(self._processor.encode(part), dtype=np.int64) for part in parts]
        return np.concatenate([np.empty(0, np.int64), *ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; control tokens have none."""
        return self._processor.decode([int(i) for i in ids])


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, max_bytes: int, total_bytes: int
) -> bytes:
    """Trains BPE with `vocab_size` pieces on the lines of `documents` and returns the model file's bytes.

    Of a corpus of `total_bytes` (UTF-8; more does no harm) it takes about `max_bytes`, evenly over its length. The
    result depends on the text alone. Raises ConfigError when the text does not fit the vocabulary size.
    """
    # A list, not the generator: SentencePiece makes an error of its own of a ConfigError raised by a bad line.
    lines = list(sample_lines(documents, min(1.0, max_bytes / max(total_bytes, 1))))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=2**30,  # bytes; the default drops every line above 4192
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(f"data.vocab_size = {vocab_size}: {_remedy(str(error), lines)}") from None
    return model.getvalue()


def sample_lines(documents: Iterable[str], fraction: float) -> Iterator[str]:
    """Lines that hold text, evenly chosen: at every point `fraction` of the bytes seen, or less by up to a line."""
    seen, taken = 0, 0
    for text in documents:
        for line in text.split("\n"):
            size = len(line.encode()) + 1
            seen += size
            if line and taken + size <= fraction * seen:
                taken += size
                yield line


def _remedy(error: str, lines: list[str]) -> str:
    if not lines:
        return "there is no text to train a tokenizer on. Raise data.tokenizer_training_bytes, or add text"
    if highest := re.search(r"too high.*<= (\d+)", error):
        return f"the text has too few distinct pieces. Set it to {highest[1]} or less, or add text"
    if lowest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return f"the text's characters alone need {lowest[1]}. Set it well above that"
    return f"SentencePiece cannot train on this text: {error}"


def _can_cut_at_newlines(model: Any) -> bool:
    """Whether text cut after newlines has the ids of the whole with `model` (a ModelProto), as with those trained here.

    It does with BPE (merges are local; Unigram scores the whole text), where no piece holds a newline and nothing is
    added to or taken from the text.
    """
    normalizer = model.normalizer_spec
    unchanged = not (
        normalizer.precompiled_charsmap
        or normalizer.add_dummy_prefix
        or normalizer.remove_extra_whitespaces
    )
    is_bpe = model.trainer_spec.model_type == model.trainer_spec.BPE
    return is_bpe and unchanged and not any("\n" in piece.piece for piece in model.pieces)


def _cut(text: str) -> Iterator[str]:
    """`text` in pieces that end after a newline; at least `_CHARACTERS_AT_ONCE` each but for the last."""
    start = 0
    while start < len(text):
        newline = text.find("\n", start + _CHARACTERS_AT_ONCE)
        end = len(text) if newline < 0 else newline + 1
        yield text[start:end]
        start = end

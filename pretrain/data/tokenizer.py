"""Train and use SentencePiece BPE tokenizers.

The training settings are those for which a Hugging Face tokenizer can give identical ids (see
pretrain.export.tokenizer).
"""

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

_MIN_PART_CHARACTERS = 1 << 16
"""Long texts are encoded in parts of about this length.

The time and memory of SentencePiece grow faster than the length of the text: 9.5 MB at once take
four times as long as in parts.
"""


class Tokenizer:
    """A SentencePiece model.

    `decode(encode(text)) == text` holds for every text without U+2581, the character with which
    SentencePiece represents spaces.
    """

    fingerprint: str
    """Hex SHA-256 digest of the model file."""

    vocab_size: int
    """Number of pieces."""

    eos_id: int
    """Id of the </s> piece, which is appended to every document."""

    def __init__(self, path: str | Path) -> None:
        """Load the model at `path`.

        Raises:
            ConfigError: if the file cannot be read, is no SentencePiece model, or has no </s>
            piece.
        """
        try:
            model = Path(path).read_bytes()
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            # protobuf creates the class when the module is imported, so mypy does not know it.
            proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot read the tokenizer model ({error.strerror})"
            ) from None
        except RuntimeError:
            raise ConfigError(f"{path}: not a SentencePiece model. Give the .model file") from None
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size = self._processor.get_piece_size()
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise ConfigError(
                f"{path}: the model has no </s> piece, which marks the end of every document. "
                "Train it without --eos_id=-1"
            )
        self._splits_at_newlines = _can_split_at_newlines(proto)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [tokens], without an end-of-document token."""
        parts = _split_after_newlines(text) if self._splits_at_newlines else [text]
        ids = [np.array(self._processor.encode(part), dtype=np.int64) for part in parts]
        return np.concatenate([np.empty(0, np.int64), *ids])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Control tokens decode to nothing."""
        text: str = self._processor.decode([int(i) for i in ids])
        return text


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, max_bytes: int, total_bytes: int
) -> bytes:
    """Train a BPE tokenizer on the lines of documents.

    The result is a pure function of the text and the arguments.

    Args:
        documents: The training text.
        vocab_size: Number of pieces, the control and byte pieces included.
        max_bytes: About how much of the text to train on, in UTF-8 bytes, taken evenly over its
            length.
        total_bytes: Size of all documents in UTF-8. An overestimate only makes the sample smaller.

    Returns:
        The contents of a SentencePiece model file.

    Raises:
        ConfigError: if the text is too small for the vocabulary, or the vocabulary for the text.
    """
    # A list rather than the generator: if a bad line of the corpus raised ConfigError inside
    # SentencePiece's callback, SentencePiece would replace it with an error of its own.
    lines = list(sample_lines(documents, min(1.0, max_bytes / max(total_bytes, 1))))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
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
        explanation = _explain_training_error(str(error), lines)
        raise ConfigError(f"data.vocab_size = {vocab_size}: {explanation}") from None
    return model.getvalue()


def sample_lines(documents: Iterable[str], fraction: float) -> Iterator[str]:
    """Yield non-empty lines, spread evenly over the documents.

    At every point, the lines taken amount to `fraction` of the bytes seen, or fall short of it by
    less than one line.
    """
    seen, taken = 0, 0
    for text in documents:
        for line in text.split("\n"):
            # Plus one for the newline.
            size = len(line.encode()) + 1
            seen += size
            if line and taken + size <= fraction * seen:
                taken += size
                yield line


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

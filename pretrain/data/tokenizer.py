"""Load a tokenizer: a SentencePiece model, a Hugging Face tokenizer.json, or a dict.txt of words.

tokenizer = load_tokenizer("tokenizer.json")
ids = tokenizer.encode("To be, or not to be")
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.data.tokenizers.base import (
    TOKENIZER_FILES,
    Tokenizer,
    find_tokenizer,
    read_tokenizer,
)
from pretrain.data.tokenizers.dictionary import WordTokenizer, train_words
from pretrain.data.tokenizers.hugging_face import JsonTokenizer
from pretrain.data.tokenizers.pieces import PieceTokenizer

# ---- Train a SentencePiece BPE tokenizer ----
# The settings are those for which a Hugging Face tokenizer can give identical ids (see
# pretrain.data.tokenizers.pieces).


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> bytes:
    """Train a BPE tokenizer on lines of text and return the SentencePiece model file's content.

    The result is a pure function of the lines. All of them are held in memory, so the caller hands
    over a sample. Empty lines, and newlines at the ends of lines, are left out.

    Raises:
        ConfigError: if the text is too small for the vocabulary, or the vocabulary for the text.
    """
    # Here, because machines that only measure training need no SentencePiece.
    import sentencepiece

    # A list rather than the generator: if a bad line of the corpus raised ConfigError inside
    # SentencePiece's callback, SentencePiece would replace it with an error of its own.
    sample = [stripped for line in lines if (stripped := line.strip("\r\n"))]
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
    content = read_tokenizer(path)
    if path.suffix == ".txt":
        return WordTokenizer(path, content)
    # No SentencePiece model begins with a brace.
    if path.suffix == ".json" or content.lstrip()[:1] == b"{":
        return JsonTokenizer(path, content)
    return PieceTokenizer(path, content)

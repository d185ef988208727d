"""Load a tokenizer: a SentencePiece model, a Hugging Face tokenizer.json, or a dict.txt of words.

tokenizer = load_tokenizer("tokenizer.json")
ids = tokenizer.encode("To be, or not to be")
"""

from __future__ import annotations

from pathlib import Path

from pretrain.data.tokenizers.base import (
    TOKENIZER_FILES,
    Tokenizer,
    find_tokenizer,
    read_tokenizer,
)
from pretrain.data.tokenizers.dictionary import WordTokenizer, train_words
from pretrain.data.tokenizers.hugging_face import JsonTokenizer
from pretrain.data.tokenizers.pieces import PieceTokenizer
from pretrain.data.tokenizers.training import train_tokenizer

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

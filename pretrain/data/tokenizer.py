"""Load a tokenizer: a SentencePiece model or a Hugging Face tokenizer.json.

tokenizer = load_tokenizer("tokenizer.json")
ids = tokenizer.encode("To be, or not to be")
"""

from __future__ import annotations

from pathlib import Path

from pretrain.config import ConfigError
from pretrain.data.tokenizers.base import TOKENIZER_FILES, Tokenizer, read_tokenizer
from pretrain.data.tokenizers.hugging_face import JsonTokenizer
from pretrain.data.tokenizers.pieces import PieceTokenizer
from pretrain.data.tokenizers.training import train_tokenizer

__all__ = ["TOKENIZER_FILES", "Tokenizer", "find_tokenizer", "load_tokenizer", "train_tokenizer"]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer in a file, whose content says of which kind it is.

    Raises:
        ConfigError: The file cannot be read, is no tokenizer, or has no end-of-document token.
    """
    path = Path(path)
    content = read_tokenizer(path)
    # No SentencePiece model begins with a brace.
    if path.suffix == ".json" or content.lstrip()[:1] == b"{":
        return JsonTokenizer(path, content)
    return PieceTokenizer(path, content)


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
        f"{paths[0]}: missing, and so is {paths[1].name}: there is no tokenizer. `pretrain data "
        "build CONFIG` makes a data set with one"
    )

"""Write a checkpoint's tokenizer, and load it: the checkpoint's own copy, or its data set's."""

from __future__ import annotations

import sys
from pathlib import Path

from pretrain.checkpoint.manifest import Checkpoint
from pretrain.config import ConfigError
from pretrain.config.trajectory import DIGITS, TOKENIZER
from pretrain.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from pretrain.rundir.files import replace_file
from pretrain.topology import Process


def tokenizer_of(checkpoint: Checkpoint, data_directory: Path) -> Tokenizer:
    """Return the tokenizer that a checkpoint was trained with.

    Checkpoints carry it, but for an imported model's that came without one. Then the data set's is
    taken, and a line on stderr says so.

    Args:
        checkpoint: The checkpoint, opened.
        data_directory: data.directory of its config.

    Raises:
        ConfigError: The data set has none, or another one.
    """
    if checkpoint.tokenizer_file is not None:
        return load_tokenizer(checkpoint.path / checkpoint.tokenizer_file)
    path = find_tokenizer(data_directory)
    tokenizer = load_tokenizer(path)
    trained = checkpoint.origin.data.get(TOKENIZER)
    if trained not in (None, tokenizer.fingerprint):
        raise ConfigError(
            f"{path}: its SHA-256 is {tokenizer.fingerprint[:DIGITS]}..., {checkpoint.path} was "
            f"trained with {str(trained)[:DIGITS]}.... Give that tokenizer's data set "
            "(data.directory)"
        )
    if Process.from_environment().rank == 0:
        said = f"{checkpoint.path}: carries no tokenizer, so {path} is used"
        print(said, file=sys.stderr, flush=True)
    return tokenizer


def put_tokenizer(tokenizer: Tokenizer | None, partial: Path) -> None:
    """Write the tokenizer to a checkpoint's hidden directory; `publish` flushes it to the disk."""
    if tokenizer is not None:
        replace_file(partial / tokenizer.file_name, tokenizer.content)

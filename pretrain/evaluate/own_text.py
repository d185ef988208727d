"""Make a data set of a user's own text files, to score checkpoints on that need no other data."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pretrain.checkpoint.manifest import open_checkpoint, with_data_set
from pretrain.checkpoint.save import tokenizer_of
from pretrain.config import ConfigError
from pretrain.config.load import check_beside
from pretrain.data.shards import ShardWriter, finish_split
from pretrain.data.sources import Corpus, Piece, Task, read
from pretrain.data.sources.base import find
from pretrain.data.tokenizer import Tokenizer
from pretrain.rundir.checkpoints import find_checkpoint
from pretrain.topology import Process

TOKENS_PER_BLOCK = 2**16


@contextlib.contextmanager
def text_data_set(
    sources: Sequence[Path], patterns: Sequence[str], overrides: Sequence[str]
) -> Iterator[str]:
    """Yield the directory of a data set of text files, which is removed at the end.

    Each file is a document, and ends with the end-of-document token.

    Args:
        sources: Run or checkpoint directories, whose own tokenizer makes the tokens.
        patterns: Names of text files, glob patterns, or URLs.
        overrides: The options --set of the command.

    Raises:
        ConfigError: A file cannot be read or is no text, or the sources have several tokenizers, or
            another data set is set.
    """
    check_beside(overrides, {"--text": (patterns[0], "data.directory")})
    tokenizer = _tokenizer(sources)
    with tempfile.TemporaryDirectory(prefix="pretrain-text-") as folder:
        _write(Path(folder), tokenizer, patterns)
        yield folder


def _tokenizer(sources: Sequence[Path]) -> Tokenizer:
    """Return the tokenizer of all sources."""
    found: dict[str, tuple[Path, Tokenizer]] = {}
    for source in sources:
        opened = open_checkpoint(find_checkpoint(source))
        config = opened.config
        if opened.tokenizer_file is None:
            # An imported model came without one; its data set has the tokenizer.
            config = with_data_set(config, opened)
        tokenizer = tokenizer_of(opened, Path(config.data.directory))
        found.setdefault(tokenizer.fingerprint, (source, tokenizer))
    (first, tokenizer), *others = found.values()
    if others:
        raise ConfigError(
            f"--text: {first} and {others[0][0]} have different tokenizers. Evaluate them one by "
            "one, and compare their bits per byte"
        )
    return tokenizer


def _write(folder: Path, tokenizer: Tokenizer, patterns: Sequence[str]) -> None:
    """Write the validation split of a data set into an empty folder, and say what is in it."""
    (folder / tokenizer.file_name).write_bytes(tokenizer.content)
    directory = folder / "validation"
    directory.mkdir()
    files = find("--text", tuple(patterns))
    corpus = Corpus("text", "text", tuple(patterns), "")
    task = Task(0, corpus.name, tuple(Piece(file.path, 0, file.size) for file in files))
    sizes = {"vocab_size": tokenizer.vocab_size, "tokens_per_block": TOKENS_PER_BLOCK}
    sizes["tokens_per_shard"] = 64 * TOKENS_PER_BLOCK
    writer = ShardWriter(directory, split="validation", corpus=corpus.name, task=0, **sizes)
    for document in read(task, corpus, skip=None):
        ids = [*tokenizer.encode(document.text).tolist(), tokenizer.eos_id]
        writer.add(np.array(ids), len(document.text.encode()))
    manifest = finish_split(
        directory,
        [writer.close()],
        split="validation",
        tokenizer=tokenizer.file_name,  # type: ignore[arg-type]  # one of TOKENIZER_FILES
        tokenizer_sha256=tokenizer.fingerprint,
        eos_id=tokenizer.eos_id,
        **sizes,
    )
    if Process.from_environment().rank == 0:
        print(
            f"--text: {len(files)} documents, {manifest.text_bytes:,} bytes, "
            f"{manifest.tokens:,} tokens with an end-of-document token after each",
            flush=True,
        )

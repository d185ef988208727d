"""Read every byte of a data set and name every file that is not as it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import xxhash
from tqdm import tqdm

from pretrain.config import ConfigError, RunFailed
from pretrain.data.checks import problems
from pretrain.data.document import Split
from pretrain.data.files import Cache, Folder, folder, missing
from pretrain.data.manifest import (
    CHECKSUMS,
    MANIFEST,
    Manifest,
    missing_data_set,
    parse_manifest,
    rebuild_advice,
)

THREADS = 8
"""Hashing is faster than one disk; several reads at once make a network file system busy."""

_CHUNK = 1 << 22


def verify(directory: str | Path, cache: Cache | None = None) -> None:
    """Check both splits of a data set and hash every file, several at a time.

    Args:
        directory: The data set, or its URL; then every byte is fetched, and none is kept.
        cache: As TokenStream's.

    Raises:
        ConfigError: naming every file that is missing or damaged.
    """
    found: list[str] = []
    splits: list[tuple[Folder, Manifest]] = []
    for split in get_args(Split):
        files = folder(f"{str(directory).rstrip('/')}/{split}", cache)
        try:
            manifest = _manifest(files)
            if manifest.split != split:
                raise ConfigError(
                    f"{files.where(MANIFEST)}: is of the {manifest.split} split. "
                    f"{rebuild_advice(files.where(MANIFEST))}"
                )
            found += map(str, problems(files, manifest))
            splits.append((files, manifest))
        except (ConfigError, RunFailed) as error:
            found.append(str(error))
    found += _damaged(splits, known=found)
    if found:
        # Both splits may miss the same tokenizer.
        raise ConfigError("\n".join(dict.fromkeys(found)))


def _manifest(files: Folder) -> Manifest:
    try:
        return parse_manifest(files.read(MANIFEST), files.where(MANIFEST))
    except FileNotFoundError:
        raise missing_data_set(files.where(MANIFEST)) from None


def _damaged(splits: list[tuple[Folder, Manifest]], known: list[str]) -> list[str]:
    """Return a message for every file whose digest is wrong, except those in `known`."""
    todo: list[tuple[Folder, str, str]] = [
        (files, name, digest)
        for files, m in splits
        for name, digest in [
            (CHECKSUMS, m.checksums_xxh3_128),
            *((shard.name, shard.xxh3_128) for shard in m.shards),
        ]
        if not any(message.startswith(f"{files.where(name)}:") for message in known)
    ]
    total = sum(m.checksums_bytes + sum(s.bytes for s in m.shards) for _, m in splits)
    # disable=None draws the bar on a terminal and nothing into a log file.
    with (
        tqdm(desc="verify", total=total, unit="B", unit_scale=True, disable=None) as bar,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        results = pool.map(lambda each: _problem(each[0], each[1], each[2], bar.update), todo)
        return [message for message in results if message]


def _problem(files: Folder, name: str, expected: str, seen: Callable[[int], object]) -> str | None:
    """Hash a file; return a message if it cannot be read or has another digest."""
    where = files.where(name)
    digest = xxhash.xxh3_128()
    try:
        for chunk in _chunks(files, name):
            digest.update(chunk)
            seen(len(chunk))
    except FileNotFoundError:
        return str(missing(where))
    except RunFailed as error:
        return str(error)
    if digest.hexdigest() == expected:
        return None
    return (
        f"{where}: damaged: its XXH3-128 is {digest.hexdigest()}, but the manifest says "
        f"{expected}. {rebuild_advice(where)}"
    )


def _chunks(files: Folder, name: str) -> Iterator[bytes]:
    with files.open(name) as file:
        while chunk := files.next(file, name, _CHUNK):
            yield chunk

"""Check a split as far as sizes and the tokenizer tell, without reading its shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from pretrain.config import ConfigError
from pretrain.data.files import Folder, missing
from pretrain.data.manifest import CHECKSUMS, MANIFEST, Manifest, rebuild_advice


def problems(files: Folder, manifest: Manifest) -> Iterator[ConfigError]:
    """Yield what is wrong with a split as far as sizes and the tokenizer tell."""
    try:
        sizes = files.sizes()
    except FileNotFoundError:
        sizes = {}
    expected = [(s.name, s.bytes) for s in manifest.shards]
    for name, size in [(CHECKSUMS, manifest.checksums_bytes), *expected]:
        where, found = files.where(name), sizes.get(name)
        if found is None:
            yield missing(where)
        elif found != size:
            problem = "truncated" if found < size else "too long"
            yield ConfigError(
                f"{where}: {problem}: {found} bytes found, {size} expected. {rebuild_advice(where)}"
            )
    parent = files.parent()
    where = parent.where(manifest.tokenizer)
    try:
        digest = hashlib.sha256(parent.read(manifest.tokenizer)).hexdigest()
    except FileNotFoundError:
        yield ConfigError(
            f"{where}: missing, but the manifest of {files.location} refers to it. "
            f"{rebuild_advice(files.where(MANIFEST))}"
        )
        return
    if digest != manifest.tokenizer_sha256:
        yield ConfigError(
            f"{where}: wrong tokenizer: its SHA-256 is {digest}, but the shards of "
            f"{files.location} were made with the tokenizer whose SHA-256 is "
            f"{manifest.tokenizer_sha256}. {rebuild_advice(files.where(MANIFEST))}"
        )

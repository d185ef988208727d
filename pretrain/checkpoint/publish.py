"""Complete a checkpoint of which all parts are written, and give it its name.

This module imports no torch: it also runs in the process that writes beside training.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.content import CONFIG, FORMAT, INDEX, REQUIRED, STATE, checksum, describe
from pretrain.checkpoint.index import Index, Part, merge
from pretrain.rundir.checkpoints import publish_checkpoint
from pretrain.rundir.files import flush_directory, flush_file, replace_file, replace_json
from pretrain.rundir.history import remove_old
from pretrain.rundir.lineage import MANIFEST
from pretrain.rundir.retention import Policy

POLL_SECONDS = 0.05
"""Between two looks for the parts of other ranks."""


@dataclass(frozen=True)
class Publication:
    """Everything needed to complete and publish a checkpoint, all of it JSON."""

    partial: str
    """The hidden directory, in which every rank writes its part."""
    final: str
    """The checkpoint's directory."""
    attempt: str | None
    """RUN/attempts/#### that must still hold the run; None for a save without an attempt."""
    keep: tuple[int | None, int | None, int]
    """checkpoint.keep, keep_every and keep_best."""
    world_size: int
    lineage: dict[str, Any]
    """The manifest's entries that say which checkpoint it is."""
    state: dict[str, Any]
    """The content of state.json."""
    config: str
    """The content of config.toml."""
    tokenizer: str | None = None
    """Name of the tokenizer's file, which lies in the hidden directory; None without one."""


class Patience:
    """News for a publisher that waits for the parts of other ranks."""

    all_written: str = ""
    """The id of the checkpoint whose parts are all on the disk."""


def publish(publication: Publication, patience: Patience | None = None) -> list[str]:
    """Wait for all parts of a checkpoint, complete it and give it its name.

    Args:
        publication: The checkpoint.
        patience: What is known of the other ranks; None when all parts are written.

    Returns:
        What went wrong without harm to the checkpoint.

    Raises:
        DamagedCheckpoint: The parts do not make a whole.
        Superseded: Another attempt has taken the run; nothing is published.
        OSError: The disk refused.
    """
    partial, identifier = Path(publication.partial), publication.lineage["id"]
    names = [Part(rank, ()).record_name for rank in range(publication.world_size)]
    # Listed, not looked up one by one: an NFS client remembers for long that a name did not exist.
    # Once all parts are known to be written, opening them asks the server.
    while patience is not None and patience.all_written != identifier:
        if set(names) <= set(os.listdir(partial)):
            break
        time.sleep(POLL_SECONDS)
    index = merge((partial / name).read_bytes() for name in names)
    _write_small_files(partial, publication, index)
    for name in names:
        (partial / name).unlink()
    flush_directory(partial)
    final = Path(publication.final)
    publish_checkpoint(
        partial, final, Path(publication.attempt) if publication.attempt is not None else None
    )
    warnings: list[str] = []
    policy = Policy(*publication.keep)
    try:
        remove_old(final.parents[1], final, policy, lambda _, message: warnings.append(message))
    except OSError as error:
        # The checkpoint is published, so the save has not failed.
        warnings.append(f"{final.parent}: old checkpoints are not deleted ({error})")
    return warnings


def _write_small_files(directory: Path, publication: Publication, index: Index) -> None:
    """Write what is not tensors, the manifest last: a checkpoint that has it is complete."""
    # Durable: a rename that survives a power cut must not publish files whose content did not.
    replace_file(directory / INDEX, index.dump(), durable=True)
    replace_json(directory / STATE, publication.state, durable=True, indent=2)
    replace_file(directory / CONFIG, publication.config, durable=True)
    files: dict[str, dict[str, Any]] = {f.name: {"bytes": f.bytes} for f in index.files}
    small = list(REQUIRED)
    if publication.tokenizer is not None:
        flush_file(directory / publication.tokenizer)
        small.append(publication.tokenizer)
    files |= {name: describe(directory / name) for name in small}
    manifest = {"format": FORMAT, **publication.lineage, "files": files}
    manifest["checksum"] = checksum(manifest)
    replace_json(directory / MANIFEST, manifest, durable=True, indent=2)

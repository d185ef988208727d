"""A checkpoint's manifest: which files belong to it, and proof that each is as it was written.

manifest.json lists every file with its size, and the SHA-256 of the small ones; index.json holds
the digests of the large ones, block by block (pretrain/checkpoint/index.py). The manifest is
written last, so a checkpoint that has one was written completely. It holds a checksum of itself.

`open_checkpoint` verifies and parses the small files once; everything that is asked about a
checkpoint later is answered by the object that it returns. The tensors are verified as they are
read. A file that the manifest does not list is refused, and no file is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pretrain.checkpoint.blocks import BlockReader, DamagedCheckpoint
from pretrain.checkpoint.content import (
    CONFIG,
    FORMAT,
    INDEX,
    MASTER,
    REQUIRED,
    STATE,
    Change,
    ManifestContent,
    Origin,
    StateContent,
    TrainerState,
    checksum,
    small_files,
)
from pretrain.checkpoint.index import FILE_NAME, Index
from pretrain.config import ConfigError, RunConfig, load_config, parse_config
from pretrain.rundir.checkpoints import MANIFEST, check_name, earlier_checkpoints
from pretrain.rundir.lineage import Lineage
from pretrain.rundir.provenance import Provenance


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose small files have been verified and parsed."""

    path: Path
    checksum: str
    """The manifest's own, which tells two saves of the same step apart."""
    files: dict[str, int]
    """Every file of the checkpoint but the manifest -> its size in bytes."""
    config: RunConfig
    """The config of the run that saved it."""
    trainer_state: TrainerState
    adam_steps: int
    """Updates made by the optimizer; fewer than steps where fp16 skipped some."""
    loss_scaler_state: dict[str, float] | None
    """fp16: the dynamic loss scaler's fields. None in other precisions."""
    lineage: Lineage
    """Its id and ancestry."""
    origin: Origin
    """What was recorded beside the state."""
    index_sha256: str
    """The SHA-256 of index.json."""
    tokenizer_file: str | None
    """Name of the tokenizer's file; None where an imported model came without."""
    tokenizer_sha256: str | None
    """The SHA-256 of that file."""

    @cached_property
    def index(self) -> Index:
        """Return the index, which says where in the files the tensors' values are.

        Raises:
            DamagedCheckpoint: index.json is damaged, or does not describe the files and tensors
                that a checkpoint has.
        """
        content = _read(self.path, INDEX, self.files[INDEX], self.index_sha256)
        try:
            index = Index.parse(content)
            self._check_index(index)
        except DamagedCheckpoint as error:
            raise _damaged(self.path / INDEX, str(error)) from None
        return index

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the global shape of every parameter by its global name."""
        prefix = f"{MASTER}/"
        return {
            name.removeprefix(prefix): tensor.shape
            for name, tensor in self.index.tensors.items()
            if name.startswith(prefix)
        }

    def is_unchanged(self) -> bool:
        """Return True if the manifest on disk is still the one that was opened.

        Another process may save the same step again meanwhile; its manifest is another one then.
        """
        return _read_manifest(self.path)[1] == self.checksum

    def verify_tensors(self, share: int = 0, shares: int = 1) -> None:
        """Read and verify all files of tensors.

        Args:
            share: Number of this share, counted from 0; usually the rank.
            shares: Number of equal shares that the files are dealt to, usually the world size.

        Raises:
            DamagedCheckpoint: A file is missing or damaged; names it and the checkpoint before.
        """
        for record in self.index.files[share::shares]:
            try:
                with closing(BlockReader(self.path, record)) as file:
                    file.verify()
            except DamagedCheckpoint as error:
                raise DamagedCheckpoint(f"{error}. {remedy(self.path)}") from None

    def load_config(
        self,
        overrides: Sequence[str] = (),
        sections: Mapping[str, dict[str, Any]] | None = None,
    ) -> RunConfig:
        """Return the saved config with changes, checked as any other.

        Args:
            overrides: "section.key=value" each, as for --set.
            sections: Whole sections that replace the saved ones, before the overrides.

        Raises:
            ConfigError: The changed config cannot work.
        """
        return load_config(self.path / CONFIG, overrides, sections)

    def _check_index(self, index: Index) -> None:
        """Check that the index names the manifest's files, and all that is saved of a parameter."""
        listed = {name: size for name, size in self.files.items() if FILE_NAME.fullmatch(name)}
        if {file.name: file.bytes for file in index.files} != listed:
            raise DamagedCheckpoint("its files are not the manifest's")
        moments = self.config.moments
        shapes: dict[str, dict[str, tuple[int, ...]]] = {kind: {} for kind in (MASTER, *moments)}
        for name, tensor in index.tensors.items():
            kind, _, parameter = name.partition("/")
            if kind not in shapes or not parameter:
                raise DamagedCheckpoint(f"{name}: not {MASTER}, {' or '.join(moments)}")
            shapes[kind][parameter] = tensor.shape
        if not shapes[MASTER] or any(shapes[kind] != shapes[MASTER] for kind in moments):
            raise DamagedCheckpoint("weights and moments are not of the same parameters")


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify and parse a checkpoint's manifest, state.json and config.toml; verify its tokenizer.

    Args:
        path: The checkpoint's directory, as `find_checkpoint` returns it.

    Raises:
        DamagedCheckpoint: A file is missing, damaged or not listed.
        ConfigError: This version does not know the format.
    """
    manifest, own_checksum = _read_manifest(path)
    _check_files(path, manifest)
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    digests = {name: manifest.files[name].sha256 or "" for name in small_files(sizes)}
    # Parsed from what was verified: each file is read once.
    config = _parse_config(path, _read(path, CONFIG, sizes[CONFIG], digests[CONFIG]))
    try:
        content = _read(path, STATE, sizes[STATE], digests[STATE])
        state = StateContent.model_validate_json(content)
    except ValidationError as error:
        raise _damaged(path / STATE, f"not a state ({_first(error)})") from None
    if state.step != manifest.step:
        raise _damaged(path / STATE, f"step {state.step}, the manifest says {manifest.step}")
    tokenizer = next((name for name in digests if name not in REQUIRED), None)
    if tokenizer is not None:
        _read(path, tokenizer, sizes[tokenizer], digests[tokenizer])
    check_name(path, manifest.step)
    return Checkpoint(
        path=path,
        checksum=own_checksum,
        files=sizes,
        config=config,
        trainer_state=state.trainer_state,
        adam_steps=state.adam_steps,
        loss_scaler_state=state.loss_scaler_state,
        lineage=manifest.lineage,
        origin=Origin(
            parent=manifest.parent,
            branches=manifest.lineage.branches,
            data=state.data,
            changes=tuple(Change(**change.model_dump()) for change in state.changes),
            validation_loss_nats=manifest.validation_loss_nats,
            provenance=Provenance.of_json(state.provenance),
        ),
        index_sha256=digests[INDEX],
        tokenizer_file=tokenizer,
        tokenizer_sha256=digests[tokenizer] if tokenizer else None,
    )


def _read_manifest(checkpoint: Path) -> tuple[ManifestContent, str]:
    """Return a checkpoint's manifest and its checksum, which has been compared."""
    path = checkpoint / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise _damaged(path, "missing") from None
    except (ValueError, RecursionError):
        raise _damaged(path, "not a manifest") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT and isinstance(found, int) and not isinstance(found, bool):
        # Not damaged: it would be wrong to go on from an earlier one.
        raise ConfigError(
            f"{path}: format = {found}, this version reads {FORMAT}. Use the version that saved it"
        )
    try:
        manifest = ManifestContent.model_validate_json(json.dumps(content))
    except (ValidationError, ValueError) as error:
        why = _first(error) if isinstance(error, ValidationError) else str(error)
        raise _damaged(path, f"not a manifest ({why})") from None
    own = checksum(content)
    if content.get("checksum") != own:
        raise _damaged(path, "its checksum is not that of its content")
    return manifest, own


def _check_files(checkpoint: Path, manifest: ManifestContent) -> None:
    """Check that the manifest lists what a checkpoint has, and that nothing else is there."""
    path, names = checkpoint / MANIFEST, manifest.files.keys()
    small = set(small_files(names))
    for name, entry in manifest.files.items():
        is_small = name in small
        if not is_small and not FILE_NAME.fullmatch(name):
            raise _damaged(path, f"lists {name!r}, which is no file of a checkpoint")
        if is_small and entry.sha256 is None:
            raise _damaged(path, f"has no SHA-256 of {name}")
    if missing := set(REQUIRED) - names:
        raise _damaged(path, f"does not list {min(missing)}")
    # An NFS client gives a file that was removed while it was open a name of this form.
    found = {name for name in os.listdir(checkpoint) if not name.startswith(".nfs")}
    if unlisted := found - names - {MANIFEST}:
        raise _damaged(
            checkpoint / ascii(min(unlisted))[1:-1],
            "not a file of this checkpoint: the manifest does not list it",
        )
    if missing := names - found:
        raise _damaged(checkpoint / min(missing), "missing")
    for name, entry in manifest.files.items():
        try:
            found_file = (checkpoint / name).stat()
        except OSError as error:
            # A link to nothing, or to itself.
            raise _damaged(checkpoint / name, f"cannot be read ({error.strerror})") from None
        if not stat.S_ISREG(found_file.st_mode):
            # To open a FIFO waits for ever, and a device may never end.
            raise _damaged(checkpoint / name, "not a regular file")
        if found_file.st_size != entry.bytes:
            raise _damaged(
                checkpoint / name,
                f"{found_file.st_size} bytes, the manifest says {entry.bytes}",
            )


def _parse_config(checkpoint: Path, content: bytes) -> RunConfig:
    """Return the config in the content of config.toml."""
    try:
        values = tomllib.loads(content.decode())
    except ValueError as error:
        raise _damaged(checkpoint / CONFIG, f"not valid TOML ({error})") from None
    return parse_config(values, str(checkpoint / CONFIG))


def _read(checkpoint: Path, name: str, size: int, sha256: str) -> bytes:
    """Return a small file's content, verified."""
    content = (checkpoint / name).read_bytes()
    if len(content) != size or hashlib.sha256(content).hexdigest() != sha256:
        raise _damaged(checkpoint / name, "its SHA-256 is not the manifest's")
    return content


def _damaged(path: Path, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path}: {reason}. {remedy(path.parent)}")


def _first(error: ValidationError) -> str:
    """Return the first thing that is wrong, with the key."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def remedy(checkpoint: Path) -> str:
    """Return the end of a message: what can be done instead of using a damaged checkpoint."""
    earlier = earlier_checkpoints(checkpoint)
    if not earlier:
        return (
            "The checkpoint is damaged, and there is no earlier one: train anew in another "
            "run.directory"
        )
    return (
        f"The checkpoint is damaged. The one before it is {earlier[-1]} (to train on from there, "
        "--resume it)"
    )

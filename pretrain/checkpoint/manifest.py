"""A checkpoint's manifest: which files belong to it, and proof that they are unchanged.

manifest.json lists every file with its size, and the SHA-256 of the small ones; index.json holds
the digests of the large ones, block by block (pretrain/checkpoint/format.py). The manifest is
written last, so a checkpoint with a manifest is complete. The manifest holds its own checksum.

`open_checkpoint` verifies and parses the small files once, and returns an object that answers all
later questions about the checkpoint. Tensors are verified when they are read. A file that the
manifest does not list is refused, and no file is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pretrain.checkpoint.format import (
    CONFIG,
    FILE_NAME,
    FORMAT,
    INDEX,
    REQUIRED,
    STATE,
    DamagedCheckpoint,
    Index,
    checksum,
)
from pretrain.config import ConfigError, RunConfig, load_config, parse_config
from pretrain.config.errors import first_problem
from pretrain.config.schema import Effect
from pretrain.config.trajectory import (
    BY_NAME,
    DIGITS,
    TOKENIZER,
    TRAINING,
    VALIDATION,
    Difference,
    check_differences,
    data_differences,
    differences,
)
from pretrain.data.order import Segment
from pretrain.data.shards import MANIFEST as DATA_MANIFEST
from pretrain.data.shards import TOKENIZER_FILES, Digest256
from pretrain.data.stream import TokenStream
from pretrain.optim.optimizers import learning_rate
from pretrain.rundir.checkpoints import MANIFEST, Branch, Lineage, Name, Natural, check_name, run_of
from pretrain.rundir.files import from_json, parse_json
from pretrain.rundir.jobs import Provenance

# ---- content ----
# Define the content of a checkpoint's small files: the manifest and the state of the trainer.
#
# The classes define the keys of the JSON files and their possible values. pydantic checks them
# strictly, so that nothing in a hostile or damaged file is trusted without a check.


MASTER = "master"
"""The fp32 weights, which are saved for every parameter, as are its `RunConfig.moments`."""


@dataclass(frozen=True)
class TrainerState:
    """The progress of training, the only state besides weights and optimizer state."""

    step: int
    """Completed optimizer steps."""
    consumed_samples: int
    """Sequences trained on or skipped: the position in the data order (data/order.py)."""
    spikes: dict[str, list[float]] | None = None
    """State of the spike policy (pretrain/optim/health.py); None without a policy."""
    segment: Segment | None = None
    """The current blend of the corpora, and how many samples of each were consumed when it began;
    None before the first start."""


@dataclass(frozen=True)
class Change:
    """A change of a key between two attempts that affects training, allowed where it must be."""

    step: Natural
    """The step of the checkpoint after which the new value applies."""
    key: str
    before: Any
    after: Any
    consumed_samples: Natural
    """Samples consumed by then."""


@dataclass(frozen=True)
class Origin:
    """The history of a saved state: ancestors, data, changes and code."""

    parent: str | None = None
    """The id of the checkpoint that was saved or loaded before this one."""
    branches: tuple[Branch, ...] = ()
    """The branches that lead here, oldest first."""
    data: dict[str, str] = field(default_factory=dict)
    """"training", "validation" and "tokenizer" -> SHA-256 of the content."""
    changes: tuple[Change, ...] = ()
    """Changes that the user allowed, oldest first."""
    validation_loss_nats: float | None = None
    """The validation loss at the training length, if it was evaluated at this step."""
    provenance: Provenance | None = None
    """Code, versions and machine of the attempt that saves the state; None if no attempt does, as
    for an imported model."""


# ---- what the files hold -------------------------------------------------------------------------
class Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class FileEntry(Strict):
    """A file in the manifest."""

    bytes: Natural
    sha256: Digest256 | None = None


class Manifest(Strict):
    """The content of manifest.json."""

    format: Literal[2]
    id: Name
    parent: Name | None
    branches: tuple[Branch, ...] = Field(min_length=1)
    step: Natural
    validation_loss_nats: float | None
    files: dict[str, FileEntry]
    checksum: str

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.id, self.step, self.parent, self.branches)

    @property
    def sizes(self) -> dict[str, int]:
        """Return every file of the checkpoint except the manifest, with its size in bytes."""
        return {name: entry.bytes for name, entry in self.files.items()}

    @property
    def digests(self) -> dict[str, str]:
        """Return the small files, which hold no tensors, with their SHA-256."""
        return {name: self.files[name].sha256 or "" for name in small_files(self.files)}

    @staticmethod
    def parse(text: bytes, where: object) -> Manifest:
        """Read the content of a manifest.json and check that it lists what a checkpoint has.

        Args:
            text: The content.
            where: The checkpoint, for messages.

        Raises:
            DamagedCheckpoint: The text is not a manifest, or has changed. The message says why.
            ConfigError: Another version wrote the checkpoint. It is not damaged, and falling back
                to an earlier checkpoint would be wrong.
        """
        content = parse_json(text)
        found = content.get("format")
        if type(found) is int and found != FORMAT:
            raise ConfigError(
                f"{where}: format = {found}, this version reads {FORMAT}. Use the version that "
                "saved it"
            )
        try:
            manifest = Manifest.model_validate_json(json.dumps(content))
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"not a manifest ({first_problem(error)})") from None
        if manifest.checksum != checksum(content):
            raise DamagedCheckpoint("its checksum is not that of its content")
        for name in manifest.files.keys() - manifest.digests.keys():
            if not FILE_NAME.fullmatch(name):
                raise DamagedCheckpoint(f"lists {name!r}, which is no file of a checkpoint")
        for name in REQUIRED:
            if name not in manifest.files:
                raise DamagedCheckpoint(f"does not list {name}")
        for name, sha256 in manifest.digests.items():
            if not sha256:
                raise DamagedCheckpoint(f"has no SHA-256 of {name}")
        return manifest


class StateContent(Strict):
    """The content of state.json."""

    step: Natural
    consumed_samples: Natural
    adam_steps: Natural
    loss_scaler_state: dict[str, float] | None = Field(alias="loss_scaler")
    data: dict[str, str]
    changes: tuple[Change, ...]
    spikes: dict[str, list[float]] | None
    segment: Segment | None
    provenance: dict[str, Any] | None

    @property
    def trainer_state(self) -> TrainerState:
        return TrainerState(self.step, self.consumed_samples, self.spikes, self.segment)


def state_content(
    trainer_state: TrainerState,
    adam_steps: int,
    loss_scaler_state: dict[str, float] | None,
    origin: Origin,
) -> dict[str, Any]:
    """Return the content of state.json.

    Args:
        trainer_state: How far training has come.
        adam_steps: Number of updates that the optimizer has made.
        loss_scaler_state: The fields of fp16's dynamic loss scaler.
        origin: History of the state.
    """
    return {
        **dataclasses.asdict(trainer_state),
        "adam_steps": adam_steps,
        "loss_scaler": loss_scaler_state,
        "data": origin.data,
        "changes": [dataclasses.asdict(change) for change in origin.changes],
        "provenance": origin.provenance and dataclasses.asdict(origin.provenance),
    }


def lineage_content(identifier: str, step: int, origin: Origin) -> dict[str, Any]:
    """Return the manifest's entries that identify the checkpoint.

    Args:
        identifier: The checkpoint's id.
        step: Completed optimizer steps.
        origin: History of its state.
    """
    return {
        "id": identifier,
        "parent": origin.parent,
        "branches": [dataclasses.asdict(branch) for branch in origin.branches],
        "step": step,
        "validation_loss_nats": origin.validation_loss_nats,
    }


def small_files(names: Iterable[str]) -> list[str]:
    """Return the files that hold no tensors. Their hashes are in the manifest."""
    return [name for name in names if name in REQUIRED or name in TOKENIZER_FILES]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose small files have been verified and parsed."""

    path: Path
    manifest: Manifest
    """Its checksum distinguishes two saves of the same step."""
    files: dict[str, int]
    """Every file of the checkpoint except the manifest -> its size in bytes."""
    config: RunConfig
    """The config of the run that saved it."""
    trainer_state: TrainerState
    adam_steps: int
    """Number of updates that the optimizer has made; fewer than steps if fp16 skipped some."""
    loss_scaler_state: dict[str, float] | None
    """The fields of fp16's dynamic loss scaler. None in other precisions."""
    lineage: Lineage
    """The checkpoint's id and ancestry."""
    origin: Origin
    """The recorded history of the state."""
    tokenizer_file: str | None
    """Name of the tokenizer's file; None for a model that was imported without one."""

    @cached_property
    def index(self) -> Index:
        """Return the index, which says where in the files the tensors' values are.

        Raises:
            DamagedCheckpoint: index.json is damaged, or does not describe the files and tensors
                that a checkpoint has.
            ConfigError: Another version wrote index.json.
        """
        content = _read(self.path, INDEX, self.files[INDEX], self.manifest.digests[INDEX])
        try:
            index = Index.parse(content, self.files)
            self._check_tensors(index)
        except DamagedCheckpoint as error:
            raise _damaged(self.path / INDEX, str(error)) from None
        except ConfigError as error:
            raise ConfigError(f"{self.path / INDEX}: {error}") from None
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

        It changes if another process saves the same step again in the meantime.
        """
        return _read_manifest(self.path).checksum == self.manifest.checksum

    def load_config(self, overrides: Sequence[str] = (), world_size: int = 1) -> RunConfig:
        """Return the saved config for processes that each hold the whole model, fully checked.

        Args:
            overrides: Changes in the form "section.key=value", as for --set.
            world_size: Number of processes.

        Raises:
            ConfigError: The changed config cannot work.
        """
        batch = {"micro_batch_size": 1, "global_batch_size": world_size}
        return load_config(self.path / CONFIG, overrides, {"parallel": {}, "batch": batch})

    def _check_tensors(self, index: Index) -> None:
        """Check that the index holds the weights and all moments of every parameter."""
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
    manifest = _read_manifest(path)
    sizes, digests = manifest.sizes, manifest.digests
    _check_files(path, sizes)
    # Parse the bytes that were verified, so that each file is read once.
    config = _parse_config(path, _read(path, CONFIG, sizes[CONFIG], digests[CONFIG]))
    try:
        content = _read(path, STATE, sizes[STATE], digests[STATE])
        state = StateContent.model_validate_json(content)
    except ValidationError as error:
        raise _damaged(path / STATE, f"not a state ({first_problem(error)})") from None
    if state.step != manifest.step:
        raise _damaged(path / STATE, f"step {state.step}, the manifest says {manifest.step}")
    tokenizer = next((name for name in digests if name not in REQUIRED), None)
    if tokenizer is not None:
        _read(path, tokenizer, sizes[tokenizer], digests[tokenizer])
    check_name(path, manifest.step)
    return Checkpoint(
        path=path,
        manifest=manifest,
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
            changes=state.changes,
            validation_loss_nats=manifest.validation_loss_nats,
            provenance=from_json(Provenance, state.provenance or {}),
        ),
        tokenizer_file=tokenizer,
    )


def _read_manifest(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest, without comparing it with the other files."""
    path = checkpoint / MANIFEST
    if path.exists() and not path.is_file():
        # Opening a FIFO would wait forever.
        raise _damaged(path, "not a regular file")
    try:
        return Manifest.parse(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        raise _damaged(path, "missing") from None
    except DamagedCheckpoint as error:
        raise _damaged(path, str(error)) from None


def _check_files(checkpoint: Path, sizes: Mapping[str, int]) -> None:
    """Check that the directory holds the files that the manifest lists, and no others."""
    names = sizes.keys()
    # NFS clients rename a file that is removed while it is open to a name of this form. A store's
    # folder of a checkpoint also has records of its run.
    found = {name for name in os.listdir(checkpoint) if not name.startswith(".nfs")}
    if unlisted := found - names - {MANIFEST, "metrics.jsonl", "run.json"}:
        raise _damaged(
            checkpoint / ascii(min(unlisted))[1:-1],
            "not a file of this checkpoint: the manifest does not list it",
        )
    if missing := names - found:
        raise _damaged(checkpoint / min(missing), "missing")
    for name, size in sizes.items():
        try:
            found_file = (checkpoint / name).stat()
        except OSError as error:
            # For example, a link to nothing or to itself.
            raise _damaged(checkpoint / name, f"cannot be read ({error.strerror})") from None
        if not stat.S_ISREG(found_file.st_mode):
            # Opening a FIFO would wait forever, and reading a device may never end.
            raise _damaged(checkpoint / name, "not a regular file")
        if found_file.st_size != size:
            reason = f"{found_file.st_size} bytes, the manifest says {size}"
            raise _damaged(checkpoint / name, reason)


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


REMEDY = "The checkpoint is damaged: go on from an earlier one"
"""The end of every message about damage."""


def _damaged(path: Path, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path}: {reason}. {REMEDY}")


# ---- Find the data set of a run from any working directory, even if both were moved ----


class NoDataSet(ConfigError):
    """The data set of a run is in none of the expected places."""


def with_data_set(config: RunConfig, checkpoint: Checkpoint) -> RunConfig:
    """Return the config with a data.directory that exists, seen from the working directory.

    A relative data.directory and a relative run.directory start at the directory in which the run
    was started. If a run's directory is /x/runs/demo and its config says runs/demo, the run was
    started in /x, or moved there together with its data. Its data is therefore looked for in /x
    first, and then in the working directory.

    Args:
        config: The checkpoint's config. If its data.directory was changed, it is used unchanged.
        checkpoint: The opened checkpoint.

    Raises:
        NoDataSet: There is no data set in either place.
    """
    given, named = config.data.directory, Path(os.path.normpath(checkpoint.config.run.directory))
    run = run_of(checkpoint.path)
    is_own = given == checkpoint.config.data.directory
    if run is None or not is_own or os.path.isabs(given) or named.is_absolute():
        return config
    depth = len(named.parts)
    found = [p for p in (run.absolute(), run.resolve()) if p.parts[-depth:] == named.parts]
    if not found or (root := found[0].parents[depth - 1]) == Path.cwd():
        # If there is no data set, opening it raises an error that says so.
        return config
    for place in (str(root / given), given):
        if os.path.isfile(os.path.join(place, "validation", DATA_MANIFEST)):
            data = config.data.model_copy(update={"directory": place})
            return config.model_copy(update={"data": data})
    raise NoDataSet(
        f"data.directory = {given}: no built data set at {root / given}, nor at "
        f"{os.path.abspath(given)}. Set its path with --set data.directory=PATH"
    )


# ---- Compare config and data with a checkpoint, before training on from it or evaluating it ----
# pretrain/config/trajectory.py decides which keys may change; this applies it to a checkpoint.


def data_hashes(streams: tuple[TokenStream, TokenStream]) -> dict[str, str]:
    """Return the hashes of the training and validation split that a checkpoint records."""
    training, validation = streams
    return {
        TRAINING: training.identity,
        VALIDATION: validation.identity,
        TOKENIZER: training.manifest.tokenizer_sha256,
    }


def check_training(
    config: RunConfig,
    data: Mapping[str, str],
    checkpoint: Checkpoint,
    allowed: Collection[str] = (),
) -> tuple[Difference, ...]:
    """Check that a run may continue from a checkpoint, and return all differences.

    Layout, logging, evaluation, saving and the number of steps may differ. Keys that change
    training or positions may differ if `allowed` names them. All other keys of the model may not.

    Args:
        config: The run.
        data: The hashes of its data: "training", "validation", "tokenizer".
        checkpoint: The opened checkpoint.
        allowed: The keys of --allow-changed.

    Raises:
        ConfigError: A difference is not allowed; the message has a line for each.
    """
    found = differences(checkpoint.config, config)
    found += data_differences(checkpoint.origin.data, data, config.data.directory)
    check_differences(found, checkpoint.path, allowed)
    return tuple(found)


def changes_of(
    found: Collection[Difference], before: RunConfig, after: RunConfig, state: TrainerState
) -> tuple[Change, ...]:
    """Return the differences that a checkpoint records: those without which its settings mislead.

    They change training or positions, or would have changed the steps taken so far. A run that is
    trained on for more steps than its cosine was planned for, and one whose config names other
    initial weights by now, are other experiments than a run that began with these values.

    Args:
        found: The differences that `check_training` returned, all of which were allowed.
        before: The config of the checkpoint.
        after: The config of the phase that continues.
        state: How far training had come when the values changed.
    """
    changes = [
        (each.key, each.before, each.after)
        for each in found
        if each.effect in BY_NAME
        # Of the OUTCOME keys, those of [model] act at step 0.
        or (each.effect is Effect.OUTCOME and each.key.startswith("model.") and state.step)
    ]
    if moves_end(before, after, state.step):
        changes.append(("schedule.lr_end_step", before.lr_end_step, after.lr_end_step))
    return tuple(Change(state.step, *change, state.consumed_samples) for change in changes)


def moves_end(before: RunConfig, after: RunConfig, steps: int) -> bool:
    """Return True if the schedule has another end, with which the steps taken have other rates."""
    return before.lr_end_step != after.lr_end_step and any(
        learning_rate(before, step) != learning_rate(after, step) for step in range(steps)
    )


def trained_tokens(
    config: RunConfig, state: TrainerState, changes: Sequence[Change]
) -> dict[int, int]:
    """Return the number of tokens that a checkpoint was trained on, by sequence length.

    Args:
        config: The checkpoint's config.
        state: How far training had come.
        changes: The changes up to there, oldest first.
    """
    length, samples = config.data.sequence_length, state.consumed_samples
    tokens: Counter[int] = Counter()
    # Backwards from the final length. The samples that are left at the end had the first length.
    for change in reversed(changes):
        if change.key == "data.sequence_length":
            tokens[length] += (samples - change.consumed_samples) * length
            samples, length = change.consumed_samples, change.before
    tokens[length] += samples * length
    return dict(tokens)


def check_model(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Check that `config` describes the model that the checkpoint's weights were trained in.

    Raises:
        ConfigError: Keys of the model differ; the message has a line for each.
    """
    found = differences(checkpoint.config, config)
    check_differences([d for d in found if d.effect is Effect.FIXED], checkpoint.path)


def check_tokenizer(stream: TokenStream, checkpoint: Checkpoint) -> None:
    """Check that a data set was made with the tokenizer that the checkpoint was trained with.

    If ids stood for other pieces, losses and exported tokenizers would be meaningless.

    Raises:
        ConfigError: The tokenizers differ.
    """
    own = checkpoint.manifest.digests.get(checkpoint.tokenizer_file or "")
    trained = checkpoint.origin.data.get(TOKENIZER, own)
    found = stream.manifest.tokenizer_sha256
    if trained not in (None, found):
        raise ConfigError(
            f"data.directory = {stream.data_set}: its tokenizer has the SHA-256 "
            f"{found[:DIGITS]}..., {checkpoint.path} was trained with {str(trained)[:DIGITS]}.... "
            "Restore the data set, or use one that was built with that tokenizer"
        )


def is_its_validation_split(stream: TokenStream, checkpoint: Checkpoint) -> bool:
    """Return False if the checkpoint's run used a different validation split in training."""
    return checkpoint.origin.data.get(VALIDATION) in (None, stream.identity)

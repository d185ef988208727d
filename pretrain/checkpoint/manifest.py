"""A checkpoint's manifest: which files belong to it, and proof that each is as it was written.

manifest.json lists every file with its size and SHA-256 and is written last, so a checkpoint that
has one was written completely. `open_checkpoint` verifies and parses the two small files,
state.json and config.toml, once; everything that is asked about a checkpoint later is answered by
the object that it returns. The tensors' files are verified by `Checkpoint.verify_tensors`, whose
work the ranks share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.rundir.checkpoints import MANIFEST, check_name, earlier_checkpoints
from pretrain.rundir.lineage import Branch, Lineage, parse_lineage

FORMAT = 2
STATE, CONFIG = "state.json", "config.toml"

Files = dict[str, dict[str, Any]]
"""A manifest's entries: file name -> {"bytes": size, "sha256": hex digest}."""


def describe(path: Path) -> dict[str, Any]:
    """Return a file's manifest entry: its size in bytes and its SHA-256."""
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


@dataclass(frozen=True)
class TrainerState:
    """The progress of training, its only state beside weights and optimizer state."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Sequences trained on, which is the whole state of the data order (pretrain/data/order.py)."""


@dataclass(frozen=True)
class Change:
    """A key that was changed between two attempts although it changes what is trained."""

    step: int
    """The step of the checkpoint after which the new value holds."""
    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Origin:
    """What a save records about where its state comes from."""

    parent: str | None = None
    """The id of the checkpoint that was saved or loaded before."""
    branches: tuple[Branch, ...] = ()
    """The branches that lead here, oldest first."""
    data: dict[str, str] = field(default_factory=dict)
    """"training", "validation" and "tokenizer" -> SHA-256 of what they hold."""
    changes: tuple[Change, ...] = ()
    """Changes that the user allowed, oldest first."""
    validation_loss_nats: float | None = None
    """The loss at the training length, if this very step was evaluated."""


class DamagedCheckpoint(ConfigError):
    """A checkpoint is not as it was written; an earlier one may be good."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose state.json and config.toml have been verified and parsed."""

    path: Path
    files: Files
    config: RunConfig
    """The config of the run that saved it."""
    trainer_state: TrainerState
    adam_steps: int
    """Updates made by Adam; fewer than steps where fp16 skipped some."""
    loss_scaler_state: dict[str, float] | None
    """fp16: the dynamic loss scaler's fields. None in other precisions."""
    shapes: dict[str, list[int]]
    """Global name of every parameter -> its global shape."""
    lineage: Lineage
    """Its id and ancestry."""
    origin: Origin
    """What was recorded beside the state."""

    def is_unchanged(self) -> bool:
        """Return True if the manifest on disk is still the one that was opened.

        Another process may save the same step again meanwhile; its files then have other digests.
        """
        return _read_manifest(self.path) == self.files

    def verify_tensors(self, share: int = 0, shares: int = 1) -> None:
        """Verify the files that were not verified at opening, before anything of them is unpickled.

        Args:
            share: Number of this share, counted from 0; usually the rank.
            shares: Number of equal shares that the files are dealt to, usually the world size.

        Raises:
            ConfigError: A file is missing or damaged; names it and the checkpoint before.
        """
        names = sorted(self.files.keys() - {STATE, CONFIG})
        for name in names[share::shares]:
            _verify_file(self.path, name, self.files)

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


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify and parse a checkpoint's state.json and config.toml.

    Args:
        path: The checkpoint's directory, as `find_checkpoint` returns it.

    Raises:
        ConfigError: A file is missing or damaged, or this version does not know the format.
    """
    files = _read_manifest(path)
    _verify_file(path, CONFIG, files)
    config = load_config(path / CONFIG)
    _verify_file(path, STATE, files)
    state = json.loads((path / STATE).read_text())
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: format {state.get('format')}, this version reads {FORMAT}. "
            "Use the version that saved it"
        )
    manifest = json.loads((path / MANIFEST).read_text())
    lineage = parse_lineage(manifest)
    if lineage is None:
        raise DamagedCheckpoint(f"{path / MANIFEST}: no ancestry. {_remedy(path)}")
    check_name(path, lineage.step)
    return Checkpoint(
        path=path,
        files=files,
        config=config,
        trainer_state=TrainerState(state["step"], state["consumed_samples"]),
        adam_steps=state["adam_steps"],
        loss_scaler_state=state["loss_scaler"],
        shapes=state["shapes"],
        lineage=lineage,
        origin=Origin(
            parent=lineage.parent,
            branches=lineage.branches,
            data=state["data"],
            changes=tuple(Change(**change) for change in state["changes"]),
            validation_loss_nats=manifest["validation_loss_nats"],
        ),
    )


def check_same_model(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Check that `config` describes the model that the checkpoint's weights were trained in.

    Layout, schedule, batch size, precision and dropout may differ, and so may the attention
    backend, which changes how scores are computed but not which.

    Raises:
        ConfigError: A key of [model] or [position] differs; names both values.
    """
    may_differ = {"attention_backend", "hidden_dropout", "attention_dropout"}
    for section in ("model", "position"):
        keys = set(type(getattr(config, section)).model_fields) - may_differ
        _check_same(config, checkpoint, section, keys)


def check_same_order(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Check that the consumed samples mean the same tokens as they did in the checkpoint's run.

    Raises:
        ConfigError: run.seed or data.sequence_length differs; names both values.
    """
    _check_same(config, checkpoint, "run", {"seed"})
    _check_same(config, checkpoint, "data", {"sequence_length"})


def _check_same(config: RunConfig, checkpoint: Checkpoint, section: str, keys: set[str]) -> None:
    for key in sorted(keys):
        now, before = (getattr(getattr(c, section), key) for c in (config, checkpoint.config))
        if now != before:
            raise ConfigError(
                f"{section}.{key} = {now}: {checkpoint.path} was trained with {before}. Keep it, "
                "or train anew in another run.directory"
            )


def _verify_file(checkpoint: Path, name: str, files: Files) -> None:
    path, expected = checkpoint / name, files.get(name)
    if expected is None:
        raise DamagedCheckpoint(
            f"{checkpoint / MANIFEST}: does not list {name}. {_remedy(checkpoint)}"
        )
    if not path.is_file():
        raise DamagedCheckpoint(f"{path}: missing. {_remedy(checkpoint)}")
    if (size := path.stat().st_size) != expected["bytes"]:
        raise DamagedCheckpoint(
            f"{path}: {size} bytes, the manifest says {expected['bytes']}. {_remedy(checkpoint)}"
        )
    if describe(path)["sha256"] != expected["sha256"]:
        raise DamagedCheckpoint(f"{path}: its SHA-256 is not the manifest's. {_remedy(checkpoint)}")


def _read_manifest(checkpoint: Path) -> Files:
    """Return the entries of a checkpoint's manifest; only the keys that a verification needs."""
    path = checkpoint / MANIFEST
    try:
        return {
            name: {key: entry[key] for key in ("bytes", "sha256")}
            for name, entry in json.loads(path.read_text())["files"].items()
        }
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing. {_remedy(checkpoint)}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedCheckpoint(f"{path}: not a manifest. {_remedy(checkpoint)}") from None


def _remedy(checkpoint: Path) -> str:
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

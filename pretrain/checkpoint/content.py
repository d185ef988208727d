"""Define the content of a checkpoint's small files: the manifest and the state of the trainer.

The classes say which keys the JSON files have and what their values may be; pydantic compares them
strictly, so that nothing a hostile or damaged file says is believed unseen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from pretrain.checkpoint.index import Natural
from pretrain.data.blend import Segment
from pretrain.data.tokenizers.base import TOKENIZER_FILES
from pretrain.rundir.lineage import Branch, Lineage
from pretrain.rundir.provenance import Provenance

FORMAT = 2
STATE, CONFIG, INDEX = "state.json", "config.toml", "index.json"
REQUIRED = (INDEX, STATE, CONFIG)
"""Every checkpoint has these small files. Those of a run have a tokenizer too: one of
TOKENIZER_FILES."""
MASTER = "master"
"""The fp32 weights; of every parameter they are saved, and the moments of `RunConfig.moments`."""

Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class TrainerState:
    """The progress of training, its only state beside weights and optimizer state."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Sequences trained on or passed over: where the order of the data stands (data/order.py)."""
    spikes: dict[str, list[float]] | None = None
    """What a spike policy has seen and done (pretrain/train/spikes.py); None without one."""
    segment: Segment | None = None
    """The present blend of the corpora, and what each had consumed when it began; None before the
    first start."""


@dataclass(frozen=True)
class Change:
    """A key that was changed between two attempts although it changes what is trained."""

    step: int
    """The step of the checkpoint after which the new value holds."""
    key: str
    before: Any
    after: Any
    consumed_samples: int
    """Samples consumed by then."""


@dataclass(frozen=True)
class Origin:
    """The history of a state, as a save records it: ancestors, data, changes and code."""

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
    provenance: Provenance | None = None
    """The code, versions and machine of the attempt that saves it; None for what no attempt saved,
    such as an imported model."""


# ---- what the files hold -------------------------------------------------------------------------
class Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class FileEntry(Strict):
    """A file in the manifest."""

    bytes: Natural
    sha256: Sha256 | None = None


class BranchEntry(Strict):
    id: Id
    since: Natural


class ManifestContent(Strict):
    """The content of manifest.json, without its checksum."""

    format: Literal[2]
    id: Id
    parent: Id | None
    branches: tuple[BranchEntry, ...] = Field(min_length=1)
    step: Natural
    validation_loss_nats: float | None
    files: dict[str, FileEntry]

    @property
    def lineage(self) -> Lineage:
        branches = tuple(Branch(branch.id, branch.since) for branch in self.branches)
        return Lineage(self.id, self.step, self.parent, branches)


class ChangeEntry(Strict):
    step: Natural
    key: str
    before: Any
    after: Any
    consumed_samples: Natural


class SegmentEntry(Strict):
    start: Natural
    samples: dict[str, Natural]
    shares: dict[str, Natural]
    consumed: dict[str, Natural]

    @model_validator(mode="after")
    def _has_each_corpus_everywhere(self) -> SegmentEntry:
        """Refuse a blend that no run can have."""
        if not self.samples.keys() == self.shares.keys() == self.consumed.keys():
            raise ValueError("samples, shares and consumed are not of the same corpora")
        if not any(self.shares.values()) or any(
            share and not self.samples[name] for name, share in self.shares.items()
        ):
            raise ValueError("a share of nothing")
        return self


class StateContent(Strict):
    """The content of state.json."""

    step: Natural
    consumed_samples: Natural
    adam_steps: Natural
    loss_scaler_state: dict[str, float] | None = Field(alias="loss_scaler")
    data: dict[str, str]
    changes: tuple[ChangeEntry, ...]
    spikes: dict[str, list[float]] | None
    segment: SegmentEntry | None
    provenance: dict[str, Any] | None

    @model_validator(mode="after")
    def _begins_in_the_past(self) -> StateContent:
        """Refuse a blend that begins later than the state."""
        if self.segment is not None and self.segment.start > self.consumed_samples:
            raise ValueError("segment: begins after consumed_samples")
        return self

    @property
    def trainer_state(self) -> TrainerState:
        segment = None if self.segment is None else Segment(**self.segment.model_dump())
        return TrainerState(self.step, self.consumed_samples, self.spikes, segment)


def state_content(
    trainer_state: TrainerState,
    adam_steps: int,
    loss_scaler_state: dict[str, float] | None,
    origin: Origin,
) -> dict[str, Any]:
    """Return the content of state.json.

    Args:
        trainer_state: How far training has come.
        adam_steps: Updates made by the optimizer.
        loss_scaler_state: fp16: the dynamic loss scaler's fields.
        origin: Where the state comes from.
    """
    return {
        **dataclasses.asdict(trainer_state),
        "adam_steps": adam_steps,
        "loss_scaler": loss_scaler_state,
        "data": origin.data,
        "changes": [dataclasses.asdict(change) for change in origin.changes],
        "provenance": None if origin.provenance is None else origin.provenance.to_json(),
    }


def lineage_content(identifier: str, step: int, origin: Origin) -> dict[str, Any]:
    """Return the manifest's entries that say which checkpoint this is.

    Args:
        identifier: The checkpoint's own id.
        step: Optimizer steps done.
        origin: Where its state comes from.
    """
    return {
        "id": identifier,
        "parent": origin.parent,
        "branches": [dataclasses.asdict(branch) for branch in origin.branches],
        "step": step,
        "validation_loss_nats": origin.validation_loss_nats,
    }


def small_files(names: Iterable[str]) -> list[str]:
    """Return the files without tensors. Their hashes are in the manifest."""
    return [name for name in names if name in REQUIRED or name in TOKENIZER_FILES]


def is_manifest(content: Mapping[str, Any]) -> bool:
    """Return True for the content of a manifest as `open_checkpoint` accepts it."""
    try:
        ManifestContent.model_validate_json(json.dumps(content))
    except (ValidationError, ValueError, RecursionError):
        return False
    return content.get("checksum") == checksum(content)


def describe(path: Path) -> dict[str, Any]:
    """Return a small file's manifest entry: its size in bytes and its SHA-256."""
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def checksum(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content, without its own checksum."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

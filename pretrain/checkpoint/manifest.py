"""Which checkpoints a run has, and whether one is whole: every file's size and SHA-256, in JSON, written last."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, RunConfig, load_config

FORMAT = 1
MANIFEST, STATE, CONFIG = "manifest.json", "state.json", "config.toml"
STEP_NAME = re.compile(r"step-\d{8}")


def step_directory(run: Path, step: int) -> Path:
    """<run>/checkpoints/step-00000100."""
    return run / "checkpoints" / f"step-{step:08d}"


def complete_checkpoints(run: Path) -> list[Path]:
    """A run's complete checkpoints, oldest first. A directory gets its name only when all of it has been written."""
    found = (run / "checkpoints").glob("step-*")
    return sorted(p for p in found if STEP_NAME.fullmatch(p.name) and (p / MANIFEST).is_file())


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or a run's newest. Raises ConfigError when there is none."""
    if (path / MANIFEST).is_file():
        return path
    if found := complete_checkpoints(path):
        return found[-1]
    what = "neither a run nor a checkpoint" if path.exists() else "no such directory"
    if STEP_NAME.fullmatch(path.name) and path.is_dir():
        what = f"not a complete checkpoint, it has no {MANIFEST}"
    raise ConfigError(
        f"{path}: {what}. Give a run's directory (it has checkpoints/) or one step-######## in it"
    )


def describe(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def write_json(path: Path, content: Any) -> None:
    """Writes JSON that a person can read."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint: step, consumed_samples, optimizer and tensor shapes.

    Raises ConfigError when it is damaged, or of a format that this version does not know.
    """
    _verify_file(checkpoint, STATE, _files(checkpoint))
    state = json.loads((checkpoint / STATE).read_text())
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"{checkpoint}: format {state.get('format')}, this version reads {FORMAT}"
        )
    return state


def load_saved_config(
    checkpoint: Path,
    overrides: Sequence[str] = (),
    sections: Mapping[str, dict[str, Any]] | None = None,
) -> RunConfig:
    """`load_config` of the config a checkpoint was saved with. Raises ConfigError also when the file is damaged."""
    _verify_file(checkpoint, CONFIG, _files(checkpoint))
    return load_config(checkpoint / CONFIG, overrides, sections)


def check_same_model(config: RunConfig, checkpoint: Path) -> None:
    """Raises ConfigError when `config` computes another function with the weights than the one they were trained in.

    Layout, schedule, batch, precision and dropout may differ.
    """
    may_differ = {"attention_backend", "hidden_dropout", "attention_dropout"}
    for section in ("model", "position"):
        _check_same(
            config,
            checkpoint,
            section,
            set(type(getattr(config, section)).model_fields) - may_differ,
        )


def check_same_order(config: RunConfig, checkpoint: Path) -> None:
    """Raises ConfigError when the count of consumed samples would mean other tokens than it did."""
    _check_same(config, checkpoint, "run", {"seed"})
    _check_same(config, checkpoint, "data", {"sequence_length"})


def _check_same(config: RunConfig, checkpoint: Path, section: str, keys: set[str]) -> None:
    saved = load_saved_config(checkpoint)
    for key in sorted(keys):
        now, before = (getattr(getattr(c, section), key) for c in (config, saved))
        if now != before:
            raise ConfigError(
                f"{section}.{key} = {now}: {checkpoint} was trained with {before}. Keep it, "
                "or train anew in another run.directory"
            )


def verify_files(checkpoint: Path, share: int = 0, shares: int = 1) -> None:
    """Checks every `shares`-th file from `share` on against the manifest, before anything of it is unpickled or loaded.

    Raises ConfigError naming the file and what to do.
    """
    files = _files(checkpoint)
    for name in sorted(files)[share::shares]:
        _verify_file(checkpoint, name, files)


def _verify_file(checkpoint: Path, name: str, files: dict[str, dict[str, Any]]) -> None:
    path, expected = checkpoint / name, files.get(name)
    if expected is None:
        raise ConfigError(f"{checkpoint / MANIFEST}: does not list {name}. {_remedy(checkpoint)}")
    if not path.is_file():
        raise ConfigError(f"{path}: missing. {_remedy(checkpoint)}")
    if (size := path.stat().st_size) != expected["bytes"]:
        raise ConfigError(
            f"{path}: {size} bytes, the manifest says {expected['bytes']}. {_remedy(checkpoint)}"
        )
    if describe(path)["sha256"] != expected["sha256"]:
        raise ConfigError(f"{path}: its SHA-256 is not the manifest's. {_remedy(checkpoint)}")


def _files(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """The manifest's entries: file name -> bytes and sha256."""
    path = checkpoint / MANIFEST
    try:
        return {
            name: {key: entry[key] for key in ("bytes", "sha256")}
            for name, entry in json.loads(path.read_text())["files"].items()
        }
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing. {_remedy(checkpoint)}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{path}: not a manifest. {_remedy(checkpoint)}") from None


def _remedy(checkpoint: Path) -> str:
    """What to do instead of using a damaged checkpoint."""
    earlier = [
        found
        for found in complete_checkpoints(checkpoint.parent.parent)
        if found.name < checkpoint.name
    ]
    if not earlier:
        return "The checkpoint is damaged, and there is no earlier one: train anew in another run.directory"
    return f"The checkpoint is damaged. The one before it is {earlier[-1]} (to train on from there, --resume it)"

"""Which checkpoints a run has, and whether one is whole: every file's size and SHA-256, in JSON, written last."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError

FORMAT = 1
MANIFEST, STATE, CONFIG = "manifest.json", "state.json", "config.toml"


def step_directory(run: Path, step: int) -> Path:
    """<run>/checkpoints/step-00000100."""
    return run / "checkpoints" / f"step-{step:08d}"


def complete_checkpoints(run: Path) -> list[Path]:
    """A run's complete checkpoints, oldest first. A directory gets its name only when all of it has been written."""
    found = (run / "checkpoints").glob("step-*")
    return sorted(p for p in found if re.fullmatch(r"step-\d{8}", p.name) and (p / MANIFEST).is_file())


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or a run's newest. Raises ConfigError when there is none."""
    if (path / MANIFEST).is_file():
        return path
    if found := complete_checkpoints(path):
        return found[-1]
    what = "neither a run nor a checkpoint" if path.exists() else "no such directory"
    raise ConfigError(f"{path}: {what}. Give a run's directory (it has checkpoints/) or one step-######## in it")


def describe(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_json(path: Path, content: Any) -> None:
    """Writes JSON that a person can read."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint: step, consumed_samples, optimizer and tensor shapes. Raises ConfigError if unknown."""
    state = json.loads((checkpoint / STATE).read_text())
    if state.get("format") != FORMAT:
        raise ConfigError(f"{checkpoint}: format {state.get('format')}, this version reads {FORMAT}")
    return state


def verify_files(checkpoint: Path, share: int = 0, shares: int = 1) -> None:
    """Checks every `shares`-th file from `share` on against the manifest, before anything of it is unpickled or loaded.

    Raises ConfigError naming the file and what to do.
    """
    files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    for name in sorted(files)[share::shares]:
        path, expected = checkpoint / name, files[name]
        remedy = "The checkpoint is damaged: resume from an earlier one with --resume PATH"
        if not path.is_file():
            raise ConfigError(f"{path}: missing. {remedy}")
        if (size := path.stat().st_size) != expected["bytes"]:
            raise ConfigError(f"{path}: {size} bytes, the manifest says {expected['bytes']}. {remedy}")
        if describe(path)["sha256"] != expected["sha256"]:
            raise ConfigError(f"{path}: its SHA-256 is not the manifest's. {remedy}")

"""Remember which files an export wrote, so that the next one replaces nothing else."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.rundir.files import read_json

MARKER = "pretrain.toml"
"""The run's resolved config. A folder that holds it is one of our exports and may be replaced."""

FILES = "pretrain.files.json"
"""The SHA-256 of every other file that the export wrote, and what it was made from."""


@dataclass(frozen=True)
class MadeFrom:
    """The source of an export, recorded once the comparison with the trained model has passed."""

    checkpoint: str
    """The id of the checkpoint."""
    max_length: int
    """The longest sequence in tokens that the export accepts."""
    split_special_tokens: bool
    """The tokenizer takes a special token's name in a text for text."""


def record_files(folder: Path, made_from: MadeFrom | None = None) -> None:
    """Write FILES into a finished export.

    Where it is there already, an export goes on writing into a folder that others may see by now:
    the files that it lists are recorded again, and no others.

    Args:
        folder: The export.
        made_from: What it was made from; None until it is proven to compute the same function.
    """
    names = read_json(folder / FILES).get("sha256") or _names(folder)
    digests = {name: _digest(folder / name) for name in names}
    # As all files of the folder, with the mode that the umask gives.
    record = {"made_from": made_from and asdict(made_from), "sha256": digests}
    (folder / FILES).write_text(json.dumps(record, indent=2) + "\n")


def is_export_of(folder: Path, checkpoint: str, length: int) -> bool:
    """Return True for an export of this checkpoint that passed its comparison, and is unchanged.

    Args:
        folder: Any folder.
        checkpoint: The checkpoint's id.
        length: The least number of tokens that it must accept.
    """
    made = read_json(folder / FILES).get("made_from")
    if not isinstance(made, dict) or made.get("checkpoint") != checkpoint:
        return False
    reach = made.get("max_length")
    if made.get("split_special_tokens") or not isinstance(reach, int) or reach < length:
        return False
    return not _faults(folder)


def check_replaceable(out: Path) -> None:
    """Check that a new export may take the place of whatever is at `out`.

    That is so for nothing at all, an empty folder, and an export that is as it was written.

    Raises:
        ConfigError: It is something else, or the export holds files that it did not write, or that
            were changed since. Names them.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MARKER).is_file():
        raise ConfigError(
            f"{out}: already exists and is not an earlier export (it has no {MARKER}). Choose "
            "another folder"
        )
    faults = _faults(out)
    if faults:
        shown = ", ".join(faults[:5]) + (f" and {len(faults) - 5} more" if faults[5:] else "")
        raise ConfigError(
            f"{out}: an earlier export, but a new one would also delete {shown}. Move that "
            "elsewhere, or choose another folder"
        )


def _faults(out: Path) -> list[str]:
    """Return the files of an export that it did not write, or that were changed since."""
    written = read_json(out / FILES).get("sha256")
    if not isinstance(written, dict):
        # The list is missing or damaged.
        written = {}
    faults = []
    for name in _names(out):
        if name == FILES:
            continue
        if name not in written:
            faults.append(f"{name} (not written by it)")
        elif _digest(out / name) != written[name]:
            faults.append(f"{name} (changed since)")
    return faults


def _names(folder: Path) -> list[str]:
    """Return the paths below a folder of all that is no folder, and of empty folders, sorted."""
    found = []
    for path, folders, files in os.walk(folder):
        below = Path(path).relative_to(folder)
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        found += [str(below / name) for name in [*files, *links]]
        if not folders and not files and Path(path) != folder:
            found.append(f"{below}/")
    return sorted(found)


def _digest(path: Path) -> str:
    """Return the hex SHA-256 of a file; "" for what is none or cannot be read."""
    try:
        if not path.is_file() or path.is_symlink():
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""

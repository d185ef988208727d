"""Find documents that stood before, exactly or nearly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from pretrain.data.words import Hashes

Mode = Literal["exact", "near"]


def duplicate_keys(text: str, mode: Mode) -> Hashes:
    """Return uint64[k]: texts that share a key at the same place are duplicates."""
    raise NotImplementedError


def save_keys(path: Path, keys: Sequence[Hashes], mode: Mode) -> None:
    """Write the keys of a task's documents, uint64[documents, k], for `find_duplicates`."""
    raise NotImplementedError


def find_duplicates(paths: Sequence[Path]) -> list[npt.NDArray[np.bool_]]:
    """Return for each task, for each of its documents, whether an earlier one shares a key.

    `paths` are the files of `save_keys` in stream order, all written with the same mode.
    """
    raise NotImplementedError

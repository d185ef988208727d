"""Find documents that stood before in the stream, exactly or nearly.

The scan computes a few 64-bit keys for each document (`duplicate_keys`) and writes those of a task
to a file (`save_keys`). `find_duplicates` then compares the keys of all tasks, without any text.
"""

from __future__ import annotations

import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from pretrain.config import ConfigError
from pretrain.data.words import Hashes, document_hash, sequence_hashes

Mode = Literal["exact", "near"]

SEQUENCE_WORDS = 5
"""Near duplicates share most of their sequences of so many words."""

BANDS, ROWS = 10, 12
"""A document has BANDS * ROWS MinHash values. Each is equal in two documents with the probability
J, the Jaccard similarity of their sets of sequences, and one band of ROWS equal values makes them
near duplicates: with the probability 1 - (1 - J ** ROWS) ** BANDS.

|  J |  0.5 |  0.6 | 0.7 | 0.75 | 0.8 | 0.85 | 0.9 | 0.95  |
|----|------|------|-----|------|-----|------|-----|-------|
|    | 0.2% | 2.2% | 13% |  28% | 51% |  78% | 96% | 99.96%|
"""

SEED = 1


def duplicate_keys(text: str, mode: Mode) -> Hashes:
    """Return the keys of a document: it is a duplicate of those that share one in the same column.

    The keys are the same in every process and on every machine. The first is the document's hash.
    For near duplicates BANDS further keys follow, from MinHash (rensa) over the 5-word sequences;
    case, punctuation and white space make no difference to them (see pretrain/data/words.py). A
    document of fewer words counts as one sequence, and one without words is a near duplicate of
    nothing.

    Args:
        text: The cleaned document.
        mode: [cleaning] deduplicate.

    Returns:
        uint64[1] for "exact", uint64[1 + BANDS] for "near".
    """
    exact = document_hash(text)
    if mode == "exact":
        return np.array([exact], np.uint64)
    sequences = sequence_hashes(text, SEQUENCE_WORDS)
    if not len(sequences):
        return np.full(1 + BANDS, exact, np.uint64)
    from rensa import RMinHash

    document = np.array([0, len(sequences)], np.uint64)
    minima = RMinHash.digest_matrix_from_flat_token_hashes(sequences, document, BANDS * ROWS, SEED)
    bands = np.array(minima.to_rows()[0], "<u4").reshape(BANDS, ROWS)
    return np.array([exact, *(xxhash.xxh3_64_intdigest(b.tobytes()) for b in bands)], np.uint64)


def save_keys(path: Path, keys: Sequence[Hashes], mode: Mode) -> None:
    """Write the keys of a task's documents in stream order, for `find_duplicates`.

    Args:
        path: Where to write a .npy file of uint64[documents, k], one column after the other.
        keys: What `duplicate_keys` returned for each document. May be empty.
        mode: The mode they were made with.
    """
    columns = 1 if mode == "exact" else 1 + BANDS
    array = np.array(keys, np.uint64).reshape(len(keys), columns)
    with path.open("wb") as file:
        # find_duplicates reads a column at a time, which in this order is one stretch of the file.
        np.save(file, np.asfortranarray(array))


def find_duplicates(paths: Sequence[Path]) -> list[npt.NDArray[np.bool_]]:
    """Return for each task and each of its documents whether an earlier document shares a key.

    Earlier means in the order of the stream, over all tasks given, so the result does not depend
    on where one task ends and the next begins. The first document of a chain of duplicates stays,
    and every later one goes, even if it resembles only documents that go.

    Memory: about 26 bytes for each document of the corpus, as one column is sorted at a time. No
    text is compared, so different documents can share a key by chance: among 300 million
    documents that happens with a probability of some 0.2 % for each column.

    Args:
        paths: The files of `save_keys` in stream order, all of one mode.

    Returns:
        bool[documents] of each file.

    Raises:
        ConfigError: A file is damaged or has other columns than the first.
    """
    if not paths:
        return []
    shapes = [_table(path).shape for path in paths]
    for path, (_, columns) in zip(paths, shapes):
        if columns != shapes[0][1]:
            raise ConfigError(
                f"{path}: {columns} keys a document, but {paths[0]} has {shapes[0][1]}. Delete "
                "both and build again"
            )
    ends = np.cumsum([documents for documents, _ in shapes])
    found = np.zeros(int(ends[-1]), np.bool_)
    keys = np.empty(int(ends[-1]), np.uint64)
    for column in range(shapes[0][1]):
        # One file is open at a time: a corpus has more tasks than a process may have open files.
        for path, part in zip(paths, np.split(keys, ends[:-1])):
            part[:] = _table(path)[:, column]
        _mark_repeated(keys, found)
    return np.split(found, ends[:-1])


def _mark_repeated(keys: Hashes, found: npt.NDArray[np.bool_]) -> None:
    """Set `found` where a key stands that also stands further in front."""
    # A stable sort puts equal keys beside each other in stream order: all but the first repeat.
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    found[order[1:][keys[1:] == keys[:-1]]] = True


def _table(path: Path) -> Hashes:
    try:
        # The header of a .npy file is Python text, so damage to it can be a syntax error.
        table = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, SyntaxError, tokenize.TokenError) as error:
        raise ConfigError(
            f"{path}: is damaged ({error}). Delete it and build again; the task that wrote it is "
            "done once more"
        ) from None
    whole = table.offset + table.nbytes == path.stat().st_size
    if table.ndim != 2 or table.dtype != np.uint64 or not whole:
        raise ConfigError(
            f"{path}: holds {table.dtype} of shape {table.shape}, or more than that, not the keys "
            "of documents. Delete it and build again; the task that wrote it is done once more"
        )
    return np.asarray(table)

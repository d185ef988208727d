"""`pretrain checkpoint consolidate`: plain safetensors by global name, for any program to read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.content import CONFIG, MASTER
from pretrain.checkpoint.manifest import Checkpoint, open_checkpoint
from pretrain.checkpoint.tools.slabs import read_slabs, slabs
from pretrain.config import ConfigError, RunFailed, dump_config, writing
from pretrain.rundir.checkpoints import find_checkpoint
from pretrain.rundir.files import FILE_MODE, flush_directory, new_directory, replace_file
from pretrain.rundir.holds import hold

DTYPES = {
    "fp32": (torch.float32, "F32"),
    "bf16": (torch.bfloat16, "BF16"),
    "fp16": (torch.float16, "F16"),
}
"""Name -> torch's dtype and safetensors' name for it."""
MAX_SHARD_BYTES = 5 * 10**9
"""Hugging Face's own limit. One tensor that is larger makes a larger file."""


@dataclass(frozen=True)
class _Entry:
    """A tensor of an output file."""

    key: str
    """Its name in the file."""
    name: str
    """The checkpoint's tensor: "<kind>/<parameter>"."""
    shape: tuple[int, ...]
    bytes: int


def consolidate(
    source: Path,
    out: Path,
    dtype: str = "fp32",
    with_optimizer: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write the weights of a checkpoint as plain safetensors, by global name, and its tokenizer.

    Above `max_shard_bytes` there are several files and an index, laid out as Hugging Face does. No
    more than a few slabs of the tensors are in memory at a time.

    Args:
        source: The checkpoint, or a run, which means its newest one.
        out: The directory to make.
        dtype: A key of DTYPES, for the weights. The moments stay fp32.
        with_optimizer: Also write the optimizer's moments, to files named optimizer*.
        max_shard_bytes: Most bytes of tensors in a file.

    Returns:
        The files.

    Raises:
        ConfigError: `out` exists, the dtype is unknown, or `source` is no good checkpoint.
        RunFailed: The disk refused, or a weight is too large for fp16.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: not one of {', '.join(DTYPES)}")
    if os.path.lexists(out):
        raise ConfigError(f"{out}: exists already. Remove it, or name another directory")
    path = find_checkpoint(source)
    if out.resolve().is_relative_to(path.resolve()):
        # A file that the manifest does not list would make the checkpoint count as damaged.
        raise ConfigError(f"{out}: lies in the checkpoint {path}. Name a directory elsewhere")
    with hold(path), writing(out):
        checkpoint = open_checkpoint(path)
        out.parent.mkdir(parents=True, exist_ok=True)
        with new_directory(out) as partial:
            _write_set(checkpoint, partial, "model", [MASTER], dtype, max_shard_bytes)
            if with_optimizer:
                moments = checkpoint.config.moments
                _write_set(checkpoint, partial, "optimizer", moments, "fp32", max_shard_bytes)
            if checkpoint.tokenizer_file is not None:
                content = (path / checkpoint.tokenizer_file).read_bytes()
                replace_file(partial / checkpoint.tokenizer_file, content, durable=True)
            replace_file(partial / CONFIG, dump_config(checkpoint.config), durable=True)
            flush_directory(partial)
    return sorted(out.iterdir())


def _write_set(
    checkpoint: Checkpoint,
    directory: Path,
    stem: str,
    kinds: Sequence[str],
    dtype: str,
    max_shard_bytes: int,
) -> None:
    """Write one or several files with the tensors of some kinds.

    Args:
        checkpoint: The checkpoint.
        directory: Where to.
        stem: The files' name begins with it.
        kinds: MASTER, or moments, whose keys name their kind.
        dtype: A key of DTYPES.
        max_shard_bytes: Most bytes of tensors in a file.
    """
    item = DTYPES[dtype][0].itemsize
    entries = [
        _Entry(
            name if kind == MASTER else f"{kind}/{name}",
            f"{kind}/{name}",
            shape,
            item * math.prod(shape),
        )
        for kind in kinds
        for name, shape in checkpoint.shapes.items()
    ]
    shards = _shards(entries, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        several = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"{stem}{several}.safetensors"
        _write_file(checkpoint, directory / name, shard, dtype)
        weight_map |= {entry.key: name for entry in shard}
    if len(shards) > 1:
        total = sum(entry.bytes for entry in entries)
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(content, indent=2) + "\n"
        replace_file(directory / f"{stem}.safetensors.index.json", text, durable=True)


def _shards(entries: Sequence[_Entry], max_bytes: int) -> list[list[_Entry]]:
    """Split tensors, in order, so that only a single large one makes a file too large."""
    shards: list[list[_Entry]] = [[]]
    room = max_bytes
    for entry in entries:
        if shards[-1] and entry.bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(entry)
        room -= entry.bytes
    return shards


def _write_file(checkpoint: Checkpoint, path: Path, entries: Sequence[_Entry], dtype: str) -> None:
    """Write a safetensors file: the length of the header, the header, then all values."""
    header: dict[str, object] = {
        # Hugging Face's loaders want to be told that the tensors are torch's.
        "__metadata__": {
            "format": "pt",
            "step": str(checkpoint.lineage.step),
            "checkpoint": checkpoint.lineage.id,
        }
    }
    start = 0
    for entry in entries:
        header[entry.key] = {
            "dtype": DTYPES[dtype][1],
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.bytes],
        }
        start += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for batch in slabs(checkpoint, [entry.name for entry in entries]):
            for slab, values in zip(batch, read_slabs(checkpoint, batch)):
                file.write(_bytes(values, dtype, slab.name))
        file.flush()
        os.fsync(file.fileno())


def _bytes(values: Tensor, dtype: str, name: str) -> Any:
    """Return values in another dtype, as they stand in a file."""
    cast = values.to(DTYPES[dtype][0])
    if dtype != "fp32" and not torch.isfinite(cast).all():
        largest = float(values.abs().max())
        raise RunFailed(f"{name}: holds {largest:g}, too large for {dtype}. Use --dtype fp32")
    return cast.contiguous().view(-1).view(torch.uint8).numpy().data

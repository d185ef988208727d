"""What `pretrain checkpoint show`, `diff` and `consolidate` do with a checkpoint's tensors."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.checkpoint.blocks import CONFIG
from pretrain.checkpoint.load import load_global_state, read_tensor
from pretrain.checkpoint.manifest import MASTER, Checkpoint, open_checkpoint
from pretrain.config import ConfigError, RunFailed, dump_config, writing
from pretrain.config.describe import describe
from pretrain.config.errors import columns, moment, size
from pretrain.config.trajectory import data_differences, differences
from pretrain.optim.optimizers import meaning
from pretrain.rundir.checkpoints import MANIFEST, find_checkpoint
from pretrain.rundir.files import (
    FILE_MODE,
    flush_directory,
    flush_file,
    new_directory,
    replace_file,
)
from pretrain.rundir.lineage import Lineage, hold
from pretrain.rundir.provenance import printable

# ---- `pretrain checkpoint show`: what a checkpoint is, where it comes from and what is in it ----


def show_source(source: Path, tensors: bool = False) -> str:
    """Return a description of a checkpoint, or of a run's newest one.

    Args:
        source: The checkpoint or the run.
        tensors: Also read all tensors, and describe their norms.

    Raises:
        ConfigError: It is neither, or the checkpoint is damaged.
    """
    path = find_checkpoint(source)
    with hold(path):
        checkpoint = open_checkpoint(path)
        norms = _norms(checkpoint) if tensors else {}
        saved_at = (path / MANIFEST).stat().st_mtime
    blocks = [
        _identity(checkpoint, saved_at),
        describe(checkpoint.config).replace("# ", ""),
        _history(checkpoint),
        _made_with(checkpoint),
        _tensors(checkpoint, norms),
        _files(checkpoint),
    ]
    return "\n\n".join(blocks)


def _identity(checkpoint: Checkpoint, saved_at: float) -> str:
    lineage, state, config = checkpoint.lineage, checkpoint.trainer_state, checkpoint.config
    tokens = state.consumed_samples * config.data.sequence_length
    loss = checkpoint.origin.validation_loss_nats
    rows = [
        ("id", lineage.id),
        ("saved at", moment(saved_at)),
        ("step", f"{lineage.step:,} of {config.train.num_steps:,}"),
        ("tokens", f"{tokens:,} ({state.consumed_samples:,} samples)"),
        ("updates", f"{checkpoint.adam_steps:,} by {type(config.optimizer).__name__}"),
        ("validation loss", "not measured at this step" if loss is None else f"{loss:.6f} nats"),
    ]
    if checkpoint.loss_scaler_state:
        scaler = ", ".join(f"{k} {v:g}" for k, v in checkpoint.loss_scaler_state.items())
        rows.append(("loss scaler", scaler))
    return "\n".join([str(checkpoint.path), *(f"{name:<16} {text}" for name, text in rows)])


def _history(checkpoint: Checkpoint) -> str:
    """Return ancestry, allowed changes and the identity of the data."""
    lineage, origin = checkpoint.lineage, checkpoint.origin
    lines = [f"parent           {lineage.parent or 'none: the first of its run'}"]
    for branch in lineage.branches:
        since = f"from step {branch.since:,}" if branch.since else "from scratch"
        lines.append(f"branch           {branch.id} {since}")
    for change in origin.changes:
        lines.append(
            f"change           after step {change.step:,}: {change.key} = {change.before} -> "
            f"{change.after}"
        )
    for name, sha256 in origin.data.items():
        lines.append(f"{name:<16} SHA-256 {sha256}")
    return "\n".join(lines)


def _made_with(checkpoint: Checkpoint) -> str:
    """Return the code, versions, machine and command line of the attempt that saved it."""
    made = checkpoint.origin.provenance
    if made is None:
        return "made with        not recorded"
    rows = {
        "started at": moment(made.at),
        "command": shlex.join(made.command),
        "in": made.directory,
        **made.facts(),
        "Slurm job": made.slurm_job_id or "none",
    }
    return "\n".join(f"{name:<16} {printable(text)}" for name, text in rows.items())


def _tensors(checkpoint: Checkpoint, norms: dict[str, float]) -> str:
    shapes = checkpoint.shapes
    elements = sum(math.prod(shape) for shape in shapes.values())
    kinds = (MASTER, *checkpoint.config.moments)
    header = ["parameter", "shape", *(f"norm of {kind}" for kind in kinds if norms)]
    rows = [
        [
            name,
            " x ".join(map(str, shape)) or "scalar",
            *(f"{norms[f'{kind}/{name}']:.6g}" for kind in kinds if norms),
        ]
        for name, shape in shapes.items()
    ]
    kept = ", ".join(map(meaning, kinds))
    summary = f"{len(shapes)} parameters with {elements:,} elements; of each {kept}"
    return "\n".join([summary, *columns([header, *rows], right=range(2, len(header)))])


def _files(checkpoint: Checkpoint) -> str:
    rows = [(name, size(count)) for name, count in sorted(checkpoint.files.items())]
    total = sum(checkpoint.files.values())
    return "\n".join(columns([("file", "size"), *rows, ("all", size(total))], right=[1]))


def _norms(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the L2 norm of every global tensor."""
    tensors = ((name, read_tensor(checkpoint, name)) for name in checkpoint.index.tensors)
    return {name: float(values.double().norm()) for name, values in tensors}


# ---- `pretrain checkpoint diff`: what two checkpoints have in common and where they differ ----


class TensorDifference(NamedTuple):
    """The difference of a tensor between two checkpoints."""

    is_equal: bool = True
    """Bit by bit."""
    max_absolute: float = 0.0
    relative: float = 0.0
    """The norm of the difference over the norm of the first checkpoint's values."""
    problem: str = ""
    """Why the values cannot be compared."""


def tensor_difference(a: Tensor, b: Tensor) -> TensorDifference:
    """Compare two fp32 tensors of the same shape."""
    if torch.equal(a.view(torch.int32), b.view(torch.int32)):
        return TensorDifference()
    difference = a.double() - b.double()
    size, norm = float(difference.norm()), float(a.double().norm())
    relative = size / norm if norm else math.inf if size else 0.0
    return TensorDifference(False, float(difference.abs().max()), relative)


@dataclass
class Comparison:
    """The differences that `compare` found."""

    relation: str
    config: list[str]
    """A line for each key that differs."""
    data: list[str]
    """A line for each part of the data that differs; of what a checkpoint does not know, too."""
    state: list[str]
    """Samples, updates and loss scale that differ."""
    tensors: dict[str, TensorDifference] = field(default_factory=dict)
    """Global tensor -> how it differs."""

    @property
    def is_same_training(self) -> bool:
        """Return True if all that training goes on from is bit-equal."""
        return not self.state and all(tensor.is_equal for tensor in self.tensors.values())


def compare_sources(first: Path, second: Path) -> Comparison:
    """Compare two checkpoints, or the newest ones of runs, and print a report.

    Raises:
        ConfigError: One is no checkpoint, or it is damaged.
    """
    paths = find_checkpoint(first), find_checkpoint(second)
    with hold(paths[0]), hold(paths[1]):
        a, b = (open_checkpoint(path) for path in paths)
        found = compare(a, b)
    print(report(a, b, found))
    return found


def compare(a: Checkpoint, b: Checkpoint) -> Comparison:
    """Compare two checkpoints, with one tensor of each in memory.

    Raises:
        DamagedCheckpoint: A block of one is not as it was written.
    """
    result = Comparison(
        relation(a.lineage, b.lineage),
        [f"{each.key} = {each.before} -> {each.after}" for each in differences(a.config, b.config)],
        _data(a, b),
        _state(a, b),
    )
    for name in sorted(a.index.tensors.keys() | b.index.tensors.keys()):
        shapes = [c.index.tensors[name].shape if name in c.index.tensors else None for c in (a, b)]
        if shapes[0] == shapes[1]:
            found = tensor_difference(read_tensor(a, name), read_tensor(b, name))
        else:
            problem = " and ".join(_shape(shape) for shape in shapes)
            found = TensorDifference(is_equal=False, problem=problem)
        result.tensors[name] = found
    return result


def relation(a: Lineage, b: Lineage) -> str:
    """Return in words how two checkpoints are related."""
    if a.id == b.id:
        return "the same checkpoint (its id is the same)"
    if a.is_ancestor_of(b):
        return f"A is an ancestor of B, {b.step - a.step:,} steps before it"
    if b.is_ancestor_of(a):
        return f"B is an ancestor of A, {a.step - b.step:,} steps before it"
    if a.branches[0].id != b.branches[0].id:
        return "unrelated: they come from two starts from scratch"
    common = a.last_common_step(b)
    if not common:
        return "siblings: they have the start from scratch in common, and no later step"
    return f"siblings: their line is the same up to step {common:,}"


def report(a: Checkpoint, b: Checkpoint, found: Comparison) -> str:
    """Return what the command prints, the summary first.

    Args:
        a: The first checkpoint.
        b: The second one.
        found: What `compare` found.
    """
    lines = [
        f"A: {a.path}, step {a.lineage.step:,}, id {a.lineage.id}",
        f"B: {b.path}, step {b.lineage.step:,}, id {b.lineage.id}",
        "",
        f"lineage  {found.relation}",
        _summary("config", found.config, "the same", "keys differ"),
        _summary("data", found.data, "the same", "differences"),
        _summary("state", found.state, "the same", "differences"),
        *_tensor_summary(found),
    ]
    for title, rows in (("config", found.config), ("data", found.data), ("state", found.state)):
        if rows:
            lines += ["", f"{title}:", *(f"  {row}" for row in rows)]
    if differing := {name: t for name, t in found.tensors.items() if not t.is_equal}:
        cells = [
            (name, t.problem or f"{t.max_absolute:.3g}", "" if t.problem else f"{t.relative:.3g}")
            for name, t in differing.items()
        ]
        lines += ["", *columns([("tensor", "largest difference", "relative to A"), *cells], [1, 2])]
    return "\n".join(lines)


def _summary(name: str, rows: list[str], none: str, some: str) -> str:
    return f"{name:<9}" + (f"{len(rows)} {some}" if rows else none)


def _tensor_summary(found: Comparison) -> list[str]:
    lines: list[str] = []
    for kind in dict.fromkeys(name.partition("/")[0] for name in found.tensors):
        own = [t for name, t in found.tensors.items() if name.startswith(f"{kind}/")]
        equal = sum(t.is_equal for t in own)
        text = f"{meaning(kind)}: {equal} of {len(own)} bit-equal"
        if differing := [t for t in own if not t.is_equal and not t.problem]:
            largest = max(t.max_absolute for t in differing)
            relative = max(t.relative for t in differing)
            text += f", largest difference {largest:.3g}, relative {relative:.3g}"
        lines.append(f"{'tensors' if not lines else '':<9}{text}")
    return lines


def _data(a: Checkpoint, b: Checkpoint) -> list[str]:
    before, after = a.origin.data, b.origin.data
    directory = b.config.data.directory
    rows = [
        f"{each.data}: SHA-256 {each.before[:12]}... -> {each.after[:12]}..."
        for each in data_differences(before, after, directory)
    ]
    for name in sorted(before.keys() ^ after.keys()):
        rows.append(f"{name}: {'A' if name in before else 'B'} alone records what it was")
    return rows


def _state(a: Checkpoint, b: Checkpoint) -> list[str]:
    values: dict[str, list[Any]] = {
        "samples": [c.trainer_state.consumed_samples for c in (a, b)],
        "updates": [c.adam_steps for c in (a, b)],
        "loss scaler": [c.loss_scaler_state for c in (a, b)],
    }
    return [f"{name}: {x} -> {y}" for name, (x, y) in values.items() if x != y]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


# ---- `pretrain checkpoint consolidate`: plain safetensors by global name -------------------------


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SHARD_BYTES = 5 * 10**9
"""Hugging Face's own limit. One tensor that is larger makes a larger file."""


def consolidate(
    source: Path,
    out: Path,
    dtype: str = "fp32",
    with_optimizer: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write the weights of a checkpoint as plain safetensors, by global name, and its tokenizer.

    Above `max_shard_bytes` there are several files and an index, laid out as Hugging Face does. The
    weights are in memory as a whole, as for an export, and so is each kind of moments.

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
        with new_directory(out) as partial:
            weights = {n: _cast(t, dtype, n) for n, t in load_global_state(checkpoint).items()}
            _write_set(checkpoint, partial, "model", weights, max_shard_bytes)
            if with_optimizer:
                moments = {
                    f"{kind}/{name}": tensor
                    for kind in checkpoint.config.moments
                    for name, tensor in load_global_state(checkpoint, kind).items()
                }
                _write_set(checkpoint, partial, "optimizer", moments, max_shard_bytes)
            if checkpoint.tokenizer_file is not None:
                content = (path / checkpoint.tokenizer_file).read_bytes()
                replace_file(partial / checkpoint.tokenizer_file, content)
            replace_file(partial / CONFIG, dump_config(checkpoint.config))
            for written in partial.iterdir():
                flush_file(written)
            flush_directory(partial)
    return sorted(out.iterdir())


def _write_set(
    checkpoint: Checkpoint, directory: Path, stem: str, tensors: dict[str, Tensor], most: int
) -> None:
    """Write tensors by their keys to files of at most so many bytes, whose names begin with `stem`.

    Raises OSError when the disk refuses.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    origin = {"step": str(checkpoint.lineage.step), "checkpoint": checkpoint.lineage.id}
    pattern = f"{stem}{{suffix}}.safetensors"
    try:
        save_torch_state_dict(
            tensors, directory, filename_pattern=pattern, max_shard_size=most, metadata=origin
        )
    except SafetensorError as error:
        # safetensors reports a full disk as an error of its own, which is not an OSError.
        raise OSError(str(error)) from error
    for path in directory.glob(f"{stem}*"):
        # safetensors makes its files readable by the owner only.
        path.chmod(FILE_MODE)


def _cast(values: Tensor, dtype: str, name: str) -> Tensor:
    """Return values in another dtype; raise RunFailed where it cannot hold one."""
    cast = values.to(DTYPES[dtype])
    # Weights of a run that diverged are shown as they are.
    if dtype != "fp32" and not torch.isfinite(cast).all():
        largest = float(values.abs().max())
        raise RunFailed(f"{name}: holds {largest:g}, too large for {dtype}. Use --dtype fp32")
    return cast

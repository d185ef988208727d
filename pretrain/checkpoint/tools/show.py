"""`pretrain checkpoint show`: what a checkpoint is, where it comes from and what is in it."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from pretrain.checkpoint.content import MASTER
from pretrain.checkpoint.manifest import Checkpoint, open_checkpoint
from pretrain.checkpoint.tools.slabs import read_slabs, slabs
from pretrain.checkpoint.tools.table import moment, size, table
from pretrain.config.describe import describe
from pretrain.rundir.checkpoints import MANIFEST, find_checkpoint
from pretrain.rundir.holds import hold
from pretrain.rundir.provenance import printable

_OPTIMIZERS = {"adamw": "Adam", "nag": "NAG"}


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
        (
            "updates",
            f"{checkpoint.adam_steps:,} by {_OPTIMIZERS[checkpoint.config.optimizer.name]}",
        ),
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
    kept = "both moments of Adam" if len(kinds) > 2 else "the momentum of NAG"
    summary = (
        f"{len(shapes)} parameters with {elements:,} elements; of each fp32 weights and {kept}"
    )
    return f"{summary}\n{table(header, rows, left=2)}"


def _files(checkpoint: Checkpoint) -> str:
    rows = [(name, size(count)) for name, count in sorted(checkpoint.files.items())]
    total = sum(checkpoint.files.values())
    return table(("file", "size"), [*rows, ("all", size(total))])


def _norms(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the L2 norm of every global tensor."""
    squares = dict.fromkeys(checkpoint.index.tensors, 0.0)
    for batch in slabs(checkpoint, checkpoint.index.tensors):
        for slab, values in zip(batch, read_slabs(checkpoint, batch)):
            squares[slab.name] += float(values.double().square().sum())
    return {name: math.sqrt(square) for name, square in squares.items()}

"""`pretrain checkpoint diff`: what two checkpoints have in common and where they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.content import MASTER
from pretrain.checkpoint.manifest import Checkpoint, open_checkpoint
from pretrain.checkpoint.tools.slabs import read_slabs, slabs
from pretrain.checkpoint.tools.table import table
from pretrain.config.trajectory import data_differences, differences
from pretrain.rundir.checkpoints import find_checkpoint
from pretrain.rundir.holds import hold
from pretrain.rundir.lineage import Lineage

_WORDS = {
    MASTER: "weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "momentum_buffer": "momentum",
}


@dataclass
class TensorDifference:
    """The differences of a tensor between two checkpoints, over all slabs compared."""

    is_equal: bool = True
    """Bit by bit."""
    max_absolute: float = 0.0
    square_difference: float = 0.0
    square: float = 0.0
    """Sum of the squares of the first checkpoint's values."""
    problem: str = ""
    """Why the values cannot be compared."""

    @property
    def relative(self) -> float:
        """Return the norm of the difference over the norm of the first checkpoint's values."""
        if not self.square_difference:
            return 0.0
        return math.sqrt(self.square_difference / self.square) if self.square else math.inf

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Take the same box of both checkpoints into account, fp32 each."""
        bits_a, bits_b = (values.view(torch.int32) for values in (a, b))
        self.square += float(a.double().square().sum())
        if torch.equal(bits_a, bits_b):
            return
        self.is_equal = False
        difference = a.double() - b.double()
        self.max_absolute = max(self.max_absolute, float(difference.abs().max()))
        self.square_difference += float(difference.square().sum())


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
    """Compare two checkpoints, with no more than a few slabs of their tensors in memory.

    Raises:
        DamagedCheckpoint: A block of one is not as it was written.
    """
    result = Comparison(
        relation(a.lineage, b.lineage),
        [f"{each.key} = {each.before} -> {each.after}" for each in differences(a.config, b.config)],
        _data(a, b),
        _state(a, b),
    )
    common = []
    for name in sorted(a.index.tensors.keys() | b.index.tensors.keys()):
        shapes = [c.index.tensors[name].shape if name in c.index.tensors else None for c in (a, b)]
        found = result.tensors[name] = TensorDifference()
        if shapes[0] == shapes[1]:
            common.append(name)
        else:
            found.is_equal = False
            found.problem = " and ".join(_shape(shape) for shape in shapes)
    for batch in slabs(a, common):
        for slab, x, y in zip(batch, read_slabs(a, batch), read_slabs(b, batch)):
            result.tensors[slab.name].add(x, y)
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
        lines += ["", table(("tensor", "largest difference", "relative to A"), cells)]
    return "\n".join(lines)


def _summary(name: str, rows: list[str], none: str, some: str) -> str:
    return f"{name:<9}" + (f"{len(rows)} {some}" if rows else none)


def _tensor_summary(found: Comparison) -> list[str]:
    lines: list[str] = []
    for kind, words in _WORDS.items():
        own = [t for name, t in found.tensors.items() if name.startswith(f"{kind}/")]
        if not own:
            continue
        equal = sum(t.is_equal for t in own)
        text = f"{words}: {equal} of {len(own)} bit-equal"
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

"""The optimizer: DeepSpeed ZeRO, gradient reductions, optimizer state and the learning rate.

This is the only package that uses DeepSpeed's attributes (tests/unit/test_leaks.py). The rest of
the project uses the methods of `ZeroOptimizer`, so a new DeepSpeed version needs changes only here.

This file decides which parameters share a bucket, from their names and sizes alone.
`pretrain.optim.buckets` applies the rule to a rank's parameters, and `pretrain plan` to ranks that
do not exist yet. It therefore imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Imported first, because the classes of `optimizers` are sections of a config.
import pretrain.config
from pretrain.positions.base import OWN

LARGEST_BUCKET = 40_000_000
"""Largest bucket in elements, Megatron's default (megatron/core/distributed/
distributed_data_parallel_config.py). In fp32 each of 128 ranks then receives 1.25 MB per bucket,
enough to use the network fully."""

FEWEST_BUCKETS = 8
"""Fewest buckets. About one is left to send when the backward pass ends: an eighth or less."""

Settings = tuple[float, float]
"""Weight decay, and factor on the learning rate."""


@dataclass(frozen=True)
class Piece:
    """The properties of a rank's parameter from which `cut` chooses its bucket."""

    name: str
    """The global name, which is unique."""

    num_elements: int

    is_late: bool
    """True if the gradient is complete only after `pretrain.optim.buckets.finalize_gradients`."""

    settings: Settings

    is_replicated: bool
    """True if every tensor rank holds the whole parameter, even if only this rank's is a copy. All
    ranks with the same parameter must have the same buckets: an element's place in its bucket
    decides the order of the sum over ranks, and with different rounding the copies would drift
    apart."""


def settings_of(config: pretrain.config.RunConfig, name: str, shape: Sequence[int]) -> Settings:
    """Return a parameter's weight decay and the factor on its learning rate.

    Matrices are decayed; biases, norms and the position method's own parameters are not.

    Args:
        config: The run.
        name: The global name.
        shape: The shape in the unsharded model.
    """
    if name.startswith(OWN):
        return 0.0, config.position_learning_rate_mult
    return config.optimizer.weight_decay if len(shape) == 2 else 0.0, 1.0


def is_late(name: str, is_partial: bool, is_shared: bool, tensor: int, pipeline: int) -> bool:
    """Return True if a gradient is complete only after `pretrain.optim.buckets.finalize_gradients`.

    This holds for a position method's parameters in every layout. All layers share them, and with
    recomputation each layer has a backward pass of its own (torch.utils.checkpoint), so the number
    of gradients per micro batch is not one.

    Args:
        name: The parameter's global name.
        is_partial: Each tensor rank computes the gradient from its own tokens.
        is_shared: It is a tied embedding.
        tensor: Number of tensor ranks.
        pipeline: Number of pipeline stages.
    """
    return name.startswith(OWN) or (is_partial and tensor > 1) or (is_shared and pipeline > 1)


def cut(pieces: Sequence[Piece], zero_stage: int = 1) -> list[list[int]]:
    """Return the buckets as lists of indices of pieces, in the order in which they are completed.

    ZeRO 2 and 3 make their own buckets. For them the lists are the parameter groups: the pieces
    with the same settings.

    Args:
        pieces: All parameters of a rank, in the order of its chunks. A backward pass completes them
            in about the reverse order.
        zero_stage: The stage of ZeRO.
    """
    if zero_stage > 1:
        groups: dict[Settings, list[int]] = {}
        for number, piece in enumerate(pieces):
            groups.setdefault(piece.settings, []).append(number)
        return [groups[settings] for settings in sorted(groups, reverse=True)]
    backward = range(len(pieces) - 1, -1, -1)
    kinds: dict[tuple[bool, Settings, bool, bool], list[int]] = {}
    for number in backward:
        piece = pieces[number]
        # Separate, because on a later stage these are copies, and the norms beside them are not.
        is_position = piece.name.startswith(OWN)
        kind = (piece.is_late, piece.settings, piece.is_replicated, is_position)
        kinds.setdefault(kind, []).append(number)
    total = sum(piece.num_elements for piece in pieces)
    largest = min(LARGEST_BUCKET, -(-total // FEWEST_BUCKETS))
    # Stages with other totals hold copies of position parameters, and must cut them equally.
    parts = [
        part
        for kind, members in kinds.items()
        for part in _cut(pieces, members, LARGEST_BUCKET if kind[-1] else largest)
    ]
    # Sort by completion, which is the order of their last parameters. These are all different, so
    # all ranks of a data-parallel group reduce in the same order.
    return sorted(parts, key=lambda part: (pieces[part[0]].is_late, -part[-1]))


def _cut(pieces: Sequence[Piece], members: list[int], largest: int) -> list[list[int]]:
    """Cut indices of pieces into parts of at most `largest` elements, or of one larger piece."""
    parts: list[list[int]] = []
    size = 0
    for number in members:
        if not parts or size + pieces[number].num_elements > largest:
            parts.append([])
            size = 0
        parts[-1].append(number)
        size += pieces[number].num_elements
    return parts

"""The optimizer: DeepSpeed ZeRO, gradient reductions, optimizer state and the learning rate.

This is the only package that knows DeepSpeed's attributes (tests/unit/test_leaks.py). The rest of
the project uses the methods of `ZeroOptimizer`, so a new DeepSpeed version is dealt with here.

This file decides which parameters share a bucket, from their names and sizes alone.
`pretrain.optim.buckets` applies it to a rank's parameters, and `pretrain plan` to those of ranks
that do not exist yet. Hence no torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# First, because a run's config holds one of the classes of `optimizers`, which are its sections.
import pretrain.config  # noqa: F401
from pretrain.positions.base import OWN

LARGEST_BUCKET = 40_000_000
"""Elements. Megatron's default (megatron/core/distributed/distributed_data_parallel_config.py):
over 128 ranks in fp32 each then receives 1.25 MB, enough to use the network fully."""

FEWEST_BUCKETS = 8
"""What is left to send when the backward pass ends is about one bucket, so at most an eighth."""

Settings = tuple[float, float]
"""Weight decay, and factor on the learning rate."""


@dataclass(frozen=True)
class Piece:
    """The properties of a rank's parameter from which `cut` chooses its bucket."""

    name: str
    """The global name, by which no two are alike."""

    num_elements: int

    is_late: bool
    """True if the gradient is complete only after `pretrain.optim.buckets.finalize_gradients`."""

    settings: Settings

    is_replicated: bool
    """True if every tensor rank holds all of it. Not if this rank holds a copy, which differs
    between ranks that hold the same parameter. Their buckets must be alike: where an element lies
    in a bucket decides in which order the sum over the ranks is taken, and the copies would drift
    apart by the rounding."""


def cut(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return the buckets as lists of numbers of pieces, in the order in which they are completed.

    Args:
        pieces: All parameters of a rank, in the order of its chunks. A backward pass completes them
            in about the reverse order.
    """
    backward = range(len(pieces) - 1, -1, -1)
    kinds: dict[tuple[bool, Settings, bool, bool], list[int]] = {}
    for number in backward:
        piece = pieces[number]
        # A later stage holds copies of these, and norms beside them are its own.
        is_position = piece.name.startswith(OWN)
        kind = (piece.is_late, piece.settings, piece.is_replicated, is_position)
        kinds.setdefault(kind, []).append(number)
    total = sum(piece.num_elements for piece in pieces)
    largest = min(LARGEST_BUCKET, -(-total // FEWEST_BUCKETS))
    parts = [part for members in kinds.values() for part in _cut(pieces, members, largest)]
    # In the order in which they are completed, which is that of their last parameters. No two have
    # the same last parameter, so all ranks of a data-parallel group reduce in the same order.
    return sorted(parts, key=lambda part: (pieces[part[0]].is_late, -part[-1]))


def _cut(pieces: Sequence[Piece], members: list[int], largest: int) -> list[list[int]]:
    """Cut numbers of pieces into parts of at most `largest` elements, or of one piece."""
    parts: list[list[int]] = []
    size = 0
    for number in members:
        if not parts or size + pieces[number].num_elements > largest:
            parts.append([])
            size = 0
        parts[-1].append(number)
        size += pieces[number].num_elements
    return parts

"""Sum a bucket's gradients over the data-parallel ranks, each of which receives its own part.

In fp32 that is a reduce-scatter. In 16 bit it is not: a reduce-scatter adds up in the data type
that it sends, and would round once for each rank. So unsummed parts have to travel, and each rank
adds up, in fp32, what the others send it (`sum_pieces`).

What crosses between nodes decides the time. A reduce-scatter has added up the gradients of a node
before they leave it, whereas unsummed parts leave for each rank of the node. Over several nodes the
sum is therefore taken in two stages: a reduce-scatter in fp32 within the node, then 16 bit between
ranks of equal number in their nodes. For 1.36B parameters on 16 nodes of 8, a node sends 2.55 GB,
where the reduce-scatter in fp32 sends 5.41 GB and a single exchange in 16 bit would send 20.43 GB
(docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain import platform
from pretrain.topology import make_groups, ranks_per_node

Wait = Callable[[], None]
"""Waits until this rank's part of a bucket holds the sums."""


class Wire(Protocol):
    """A way to sum gradients over the ranks of a group."""

    def start(self, flat: Tensor) -> Wait:
        """Start to sum a bucket.

        Args:
            flat: This rank's gradients, fp32 [elements], a multiple of the number of ranks. The
                part with this rank's number takes the sums; the others are undefined afterwards.
        """


def make_wire(group: dist.ProcessGroup, dtype: torch.dtype) -> Wire:
    """Return the way in which gradients travel. All processes together.

    Args:
        group: The data-parallel ranks.
        dtype: The data type in which gradients travel, between nodes if there are several.
    """
    if dtype == torch.float32:
        return ReduceScatter(group)
    per_node = ranks_per_node(group)
    if per_node in (1, group.size()):
        return Exchange(group, dtype)
    return TwoStages(group, dtype, per_node)


def own_part(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a flat tensor, as a view."""
    return flat.view(group.size(), -1)[group.rank()]


class ReduceScatter:
    """Sums in fp32, on the way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, flat: Tensor) -> Wait:
        """Start to sum a bucket (`Wire.start`)."""
        work = dist.reduce_scatter_tensor(
            own_part(flat, self._group), flat, group=self._group, async_op=True
        )
        return lambda: _wait(work)


class Exchange:
    """Sends every rank its part in 16 bit; sums in fp32 on arrival."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype

    def start(self, flat: Tensor) -> Wait:
        """Start to sum a bucket (`Wire.start`)."""
        return self.start_into(flat, own_part(flat, self._group))

    def start_into(self, parts: Tensor, out: Tensor) -> Wait:
        """Start to send parts and to sum those received.

        Args:
            parts: One part for each rank, fp32, any shape.
            out: Takes the sum of the parts that are for this rank, fp32 [elements].
        """
        sent = parts.to(self._dtype)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)

        def wait() -> None:
            _wait(work)
            sum_pieces(received.view(self._group.size(), -1), out)

        return wait


class TwoStages:
    """Sums in fp32 within a node, and exchanges the nodes' sums in 16 bit.

    Rank r of the group is rank r % per_node of node r // per_node.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, per_node: int) -> None:
        """Make the groups of the two stages. All processes together.

        Args:
            group: The data-parallel ranks.
            dtype: The data type between nodes.
            per_node: Ranks on a node.
        """
        self._group, self._per_node = group, per_node
        self._num_nodes = group.size() // per_node
        ranks = dist.get_process_group_ranks(group)
        node, self._number = divmod(group.rank(), per_node)
        first = node * per_node
        self._node_group, peers = make_groups(
            [ranks[first : first + per_node], ranks[self._number :: per_node]]
        )
        self._exchange = Exchange(peers, dtype)

    def start(self, flat: Tensor) -> Wait:
        """Start to sum a bucket (`Wire.start`)."""
        # The second stage waits for the first, which the backward pass must not do.
        with platform.beside():
            # From [nodes, ranks of a node, part] to [ranks of a node, nodes, part]: the rank with a
            # number receives what the ranks with its number need, on all nodes.
            by_number = flat.view(self._num_nodes, self._per_node, -1).transpose(0, 1).contiguous()
            of_node = by_number[self._number]
            _wait(
                dist.reduce_scatter_tensor(
                    of_node.view(-1), by_number.view(-1), group=self._node_group, async_op=True
                )
            )
            return self._exchange.start_into(of_node, own_part(flat, self._group))


def sum_pieces(pieces: Tensor, out: Tensor) -> None:
    """Sum what the ranks have sent, in fp32.

    Each piece has been rounded once to the data type of the wire, whose unit roundoff u is 2^-8 for
    bf16 and 2^-11 for fp16, and a sum of n terms in fp32 adds at most (n - 1) 2^-24. An element of
    the result is therefore off by at most (u + n 2^-24) times the sum of the terms' magnitudes
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2). A ring in bf16 would
    round every partial sum and reach n u.

    Args:
        pieces: One piece per rank, [ranks, elements], in the data type of the wire.
        out: Takes the sums, fp32 [elements].
    """
    torch.sum(pieces, dim=0, dtype=torch.float32, out=out)


def _wait(work: dist.Work | None) -> None:
    """Wait for a collective; on a GPU, have the present queue wait for it."""
    # None stands for a rank outside of the group, which does not occur here.
    assert work is not None
    work.wait()

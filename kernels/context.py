"""Attention of sequences that are split over the ranks of a process group (context parallelism).

Rank r of n holds positions r * S .. (r + 1) * S - 1 of every sequence: queries, keys and values. A
plan says which keys each rank's queries are given, by key head. Their owners send them in one
all-to-all, and `pretrain.kernels.dispatch.attention` computes the rank's rows from them and its own
keys, of which the queries are the last positions. The gradients of keys and values return the same
way and are added up by the owners, in fp32 at least.

All ranks know the whole plan, so each knows what it sends and receives, and none waits for one that
has nothing to send. The split is contiguous: where queries are given all keys up to their own, the
last rank has 2 - 1 / n times the mean work in attention.
"""

# Shape suffixes: S sequence (of one rank), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from pretrain.kernels.dispatch import attention


class Part(NamedTuple):
    """Key heads whose queries are given the same keys."""

    heads: slice
    """The key heads."""
    first: int
    """Position of the first key."""
    end: int
    """Position after the last key."""


class Plan(NamedTuple):
    """The keys that the queries of every rank are given."""

    parts: list[list[Part]]
    """For every rank, each key head in one part; its own positions are in all of them."""
    length: int
    """S: positions of one rank."""

    def pieces(self, sender: int, receiver: int) -> Iterator[tuple[slice, slice]]:
        """Yield what one rank sends another: rows of the sender and key heads, part by part."""
        for heads, first, end in self.parts[receiver] if sender != receiver else []:
            start = max(first - sender * self.length, 0)
            stop = min(end - sender * self.length, self.length)
            yield slice(start, max(start, stop)), heads

    def rows(self, sender: int, receiver: int) -> int:
        """Return how many keys of one head each, and as many values, one rank sends another."""
        return sum(
            (rows.stop - rows.start) * (heads.stop - heads.start)
            for rows, heads in self.pieces(sender, receiver)
        )


def context_attention(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    group: dist.ProcessGroup,
    *,
    slopes: Tensor | None = None,
    relative_attention_bias: Tensor | None = None,
    causal: bool = True,
    document_starts: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute this rank's rows of `pretrain.kernels.dispatch.attention` over whole sequences.

    All ranks of the group call it together, and their backward passes run together as well. The
    gradients of slopes and of the table are those of this rank's rows: the sum over the group is
    the whole gradient.

    Without a causal mask, rows of zeros stand for the queries after this rank's if there is a bias,
    since the kernels take queries for the last positions: all ranks together then compute up to
    n times the rows.

    Args:
        q_SBHD: This rank's queries, [S, B, H, D], with the same S on every rank.
        k_SBGD: This rank's keys, [S, B, G, D], where G divides H.
        v_SBGD: This rank's values, [S, B, G, D].
        group: The ranks that share the sequences, in the order of their positions.
        slopes: As in `attention`.
        relative_attention_bias: The same.
        causal: The same.
        document_starts: For each query of this rank, the position in the whole sequence of the
            first token of its document, int32 [B, S].
        **options: Further keyword arguments of `attention`.

    Returns:
        The output of this rank's queries, [S, B, H, D] in the dtype of q.

    Raises:
        ValueError: As `attention`.
    """
    size, rank, length = dist.get_world_size(group), dist.get_rank(group), len(q_SBHD)
    whole = slice(0, k_SBGD.shape[2])
    ends = [(r + 1 if causal else size) * length for r in range(size)]
    plan = Plan([[Part(whole, 0, end)] for end in ends], length)
    # Its own keys and values pass through the exchange, so that its backward pass runs on every
    # rank, and not only on those that have received something.
    k_SBGD, v_SBGD, received = _Exchange.apply(k_SBGD, v_SBGD, plan, group)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    whole_bias = {"slopes": slopes, "relative_attention_bias": relative_attention_bias}
    outs = []
    shared = q_SBHD.shape[2] // k_SBGD.shape[2]
    pieces = _unpack(received, plan, rank, k_SBGD)
    for number, (heads, first, end) in enumerate(plan.parts[rank]):
        own = k_SBGD[:, :, heads], v_SBGD[:, :, heads]
        given = [own if r == rank else pieces[r][number] for r in range(size)]
        k, v = (torch.cat(x) for x in zip(*given))
        query_heads = slice(heads.start * shared, heads.stop * shared)
        q = q_SBHD[:, :, query_heads]
        bias: dict[str, Any] = {
            name: x[query_heads] for name, x in whole_bias.items() if x is not None
        }
        if bias:
            q = pad(q, (0, 0, 0, 0, 0, 0, 0, end - (rank + 1) * length))
        starts = document_starts
        if starts is not None:
            starts = (starts - first).clamp(min=0)
        out = attention(q, k, v, causal=causal, document_starts=starts, **bias, **options)
        outs.append(out[:length])
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _unpack(
    received: Tensor, plan: Plan, rank: int, k_SBGD: Tensor
) -> list[list[tuple[Tensor, Tensor]]]:
    """Return keys and values that each rank has sent, part by part."""
    batch, width = k_SBGD.shape[1], k_SBGD.shape[3]
    shapes = [
        [(rows.stop - rows.start, batch, heads.stop - heads.start, width) for rows, heads in pieces]
        for pieces in (plan.pieces(sender, rank) for sender in range(len(plan.parts)))
    ]
    sizes = [torch.Size(shape).numel() for part in shapes for shape in part for _ in "kv"]
    flat = iter(torch.split(received, sizes))
    return [[(next(flat).view(shape), next(flat).view(shape)) for shape in part] for part in shapes]


class _Exchange(torch.autograd.Function):
    """Send keys and values to the ranks that the plan gives them to, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, k_SBGD: Tensor, v_SBGD: Tensor, plan: Plan, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        rank, batch, width = dist.get_rank(group), k_SBGD.shape[1], k_SBGD.shape[3]
        ranks = range(len(plan.parts))
        pieces = [piece for r in ranks for piece in plan.pieces(rank, r)]
        sent = [2 * batch * width * plan.rows(rank, r) for r in ranks]
        received = [2 * batch * width * plan.rows(r, rank) for r in ranks]
        ctx.pieces, ctx.sizes, ctx.group = pieces, (sent, received), group
        flat = [x[rows, :, heads].flatten() for rows, heads in pieces for x in (k_SBGD, v_SBGD)]
        taken = k_SBGD.new_empty(sum(received))
        dist.all_to_all_single(taken, torch.cat(flat), received, sent, group=group)
        return k_SBGD, v_SBGD, taken

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dk_SBGD: Tensor, dv_SBGD: Tensor, d_taken: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        sent, received = ctx.sizes
        returned = d_taken.new_empty(sum(sent))
        dist.all_to_all_single(returned, d_taken.contiguous(), sent, received, group=ctx.group)
        # A key can be wanted by every later rank. Sums in half precision would lose small ones.
        wide = torch.promote_types(dk_SBGD.dtype, torch.float32)
        sums = [x.to(wide, copy=True) for x in (dk_SBGD, dv_SBGD)]
        targets = [x[rows, :, heads] for rows, heads in ctx.pieces for x in sums]
        for target, gradient in zip(targets, torch.split(returned, [x.numel() for x in targets])):
            target += gradient.view(target.shape)
        dk, dv = (x.to(dk_SBGD.dtype) for x in sums)
        return dk, dv, None, None

"""Attention of sequences that are split over the ranks of a process group (context parallelism).

Rank r of n holds positions r * S .. (r + 1) * S - 1 of every sequence: queries, keys and values. A
plan lists the keys that each rank's queries get, by key head. The owners send these keys in one
all-to-all, and `pretrain.kernels.dispatch.attention` computes the rank's rows from them and the
rank's own keys. The gradients of keys and values return in the same way, and the owners sum them in
fp32 or wider. Rows that need no keys of other ranks are computed during the exchange of keys, and
their backward pass runs during the exchange of gradients.

**Without reach** (no slopes, trained slopes, dropout, no causal mask, or skip = False) queries get
all keys that the mask allows.

**With ALiBi's reach** they get the keys that can matter by the rule of `pretrain.kernels.reach`:

1. Every rank sends the largest norms of its keys and values, by tiles and key heads, to all later
   ranks, and its last keys to the next rank, whose first queries need them for their floors.
2. Every rank computes by the rule the first key that it needs, for each key head, and all ranks
   gather these numbers. The host waits for them once per call, but not in the backward pass.
3. Only these keys and values are sent.

A key that matters is used however far back it is, together with all keys in between. Heads without
reach (slope <= 0, or non-finite numbers) get all keys. The weights that are left out of a row sum
to less than 2^-23, and the error of an output is below 2^-23 (|v_i| + |out_i|): half of each for
keys that are not sent, and half for keys that the backend leaves out.

All ranks know the whole plan, so each knows what it sends and receives, and none waits for a rank
that has nothing to send. The split is contiguous: with reach all ranks have about the same work,
and usually need keys of one neighbor only. Without reach the last rank has 2 - 1 / n times the mean
work.
"""

# Shape suffixes: S sequence (of one rank), B batch, H query heads, G key heads, D width of a head,
# T tiles of keys.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from pretrain.kernels.call import ScoreFunction, of_heads
from pretrain.kernels.dispatch import attention
from pretrain.kernels.reach import FLOOR_TILE, has_values, row_norms, tiles_left_out

TILE = 64
"""Number of keys in a tile, for each of which the largest norms are exchanged; if it does not
divide S, the largest number that divides both."""


class Part(NamedTuple):
    """Key heads that share a call, because their queries get the same keys."""

    heads: slice
    """The key heads."""
    first: int
    """Position of the first key."""
    end: int
    """Position after the last key."""


class Plan(NamedTuple):
    """The keys for the queries of every rank."""

    parts: list[list[Part]]
    """For every rank, its parts: each key head is in one, and each contains the rank's own keys."""
    length: int
    """S, the number of positions of one rank."""

    def pieces(self, sender: int, receiver: int) -> Iterator[tuple[slice, slice]]:
        """Yield (rows of the sender, key heads) that one rank sends another, part by part."""
        for heads, first, end in self.parts[receiver] if sender != receiver else []:
            start = max(first - sender * self.length, 0)
            stop = min(end - sender * self.length, self.length)
            yield slice(start, max(start, stop)), heads

    def rows(self, sender: int, receiver: int) -> int:
        """Return the number of keys of one head, and of values, that a rank sends another."""
        return sum(
            (rows.stop - rows.start) * (heads.stop - heads.start)
            for rows, heads in self.pieces(sender, receiver)
        )


def plan_exact(size: int, length: int, groups: int, causal: bool = True) -> Plan:
    """Return the plan by which queries get every key that the mask allows.

    Args:
        size: Number of ranks.
        length: Positions of one rank.
        groups: Key heads.
        causal: Queries see no later keys.
    """
    ends = [(rank + 1 if causal else size) * length for rank in range(size)]
    return Plan([[Part(slice(0, groups), 0, end)] for end in ends], length)


def plan_by_reach(firsts: Sequence[Sequence[int]], length: int) -> Plan:
    """Return the plan by which causal queries get the keys from a first one on.

    Neighboring key heads share a part, and so get the same keys, if their numbers of keys from
    other ranks differ by at most a factor of two. This gives fewer and larger kernels.

    Args:
        firsts: For every rank, the first position that each key head needs.
        length: Positions of one rank.
    """
    parts: list[list[Part]] = []
    for rank, first in enumerate(firsts):
        wanted = [max(rank * length - position, 0) for position in first]
        parts.append([])
        head = 0
        for _, group in groupby(wanted, int.bit_length):
            alike = list(group)
            heads = slice(head, head + len(alike))
            parts[-1].append(Part(heads, rank * length - max(alike), (rank + 1) * length))
            head = heads.stop
    return Plan(parts, length)


def bytes_sent(
    plan: Plan, rank: int, batch: int, groups: int, width: int, element_size: int
) -> tuple[int, int]:
    """Return the bytes that a rank sends in a forward pass.

    In the backward pass it receives as many bytes as the first number, and no others.

    Args:
        plan: The plan.
        rank: The rank.
        batch: Sequences.
        groups: Key heads.
        width: Width of a head.
        element_size: Bytes of a number of q.

    Returns:
        (Bytes of keys and values; bytes of norms, last keys and first positions for the reach.)
    """
    size, length = len(plan.parts), plan.length
    rows = sum(plan.rows(rank, receiver) for receiver in range(size))
    norms = 2 * batch * groups * (length // math.gcd(length, TILE)) * (size - 1 - rank)
    last_keys = batch * groups * width * min(FLOOR_TILE, length) * (rank < size - 1)
    deciding = 4 * (norms + last_keys) + 8 * groups * (size - 1)
    return 2 * batch * width * element_size * rows, deciding


def share_of_ring(
    reaches: Sequence[float], size: int, length: int, width: int, element_size: int
) -> float:
    """Return the bytes that all ranks send in a forward pass, relative to those of a causal ring.

    In a ring all keys and values are passed on to every later rank.

    Args:
        reaches: For each key head, the largest distance of a key from a query, in tokens.
        size: Number of ranks.
        length: Positions of one rank.
        width: Width of a head.
        element_size: Bytes of a number of q.
    """
    tile, groups = math.gcd(length, TILE), len(reaches)
    begins = [rank * length for rank in range(size)]
    firsts = [[int((x - min(reach, x)) // tile * tile) for reach in reaches] for x in begins]
    halo, ring = plan_by_reach(firsts, length), plan_exact(size, length, groups)
    sent = [bytes_sent(halo, rank, 1, groups, width, element_size) for rank in range(size)]
    of_ring = [bytes_sent(ring, rank, 1, groups, width, element_size) for rank in range(size)]
    return sum(map(sum, sent)) / sum(exact for exact, _ in of_ring)


def context_attention(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    group: dist.ProcessGroup,
    *,
    slopes: Tensor | None = None,
    relative_attention_bias: Tensor | None = None,
    scores: ScoreFunction | None = None,
    causal: bool = True,
    document_starts: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute this rank's rows of `pretrain.kernels.dispatch.attention` over whole sequences.

    All ranks of the group call this together, and run their backward passes together. The gradients
    of slopes and of the table are those of this rank's rows: the sum over the group is the full
    gradient.

    Kernels assume that queries are the last positions. Without a causal mask and with a bias, rows
    of zeros therefore replace the queries after this rank's, and the first rank computes as many
    rows as a single process would.

    Args:
        q_SBHD: This rank's queries, [S, B, H, D], with the same S on every rank.
        k_SBGD: This rank's keys, [S, B, G, D], where G divides H.
        v_SBGD: This rank's values, [S, B, G, D].
        group: The ranks that share the sequences, in the order of their positions.
        slopes: As in `attention`.
        relative_attention_bias: The same.
        scores: As in `attention`. All earlier keys are sent, so that positions are correct.
        causal: As in `attention`.
        document_starts: For each query of this rank, the position in the whole sequence of the
            first token of its document, int32 [B, S].
        **options: Further keyword arguments of `attention`. skip = False exchanges all keys.

    Returns:
        The output of this rank's queries, [S, B, H, D] in the dtype of q.

    Raises:
        ValueError: As `attention`.
    """
    size, rank, length = dist.get_world_size(group), dist.get_rank(group), len(q_SBHD)
    groups, shared = k_SBGD.shape[2], q_SBHD.shape[2] // k_SBGD.shape[2]
    kept = options.get("skip") is not False and not options.get("dropout_p") and causal
    if kept and slopes is not None and has_values(q_SBHD, slopes):
        qkv = q_SBHD, k_SBGD, v_SBGD
        firsts, far = _first_keys(*qkv, slopes, options.get("scale"), document_starts, group)
        plan = plan_by_reach(firsts, length)
    else:
        plan = plan_exact(size, length, groups, causal)
        far = [length if size > 1 and (rank or not causal) else 0] * groups

    def attend(rows: slice, k: Tensor, v: Tensor, part: Part, first: int) -> Tensor:
        """Attend from rows of this rank to keys from position `first` on."""
        heads = slice(part.heads.start * shared, part.heads.stop * shared)
        terms: dict[str, Any] = {
            "slopes": slopes,
            "relative_attention_bias": relative_attention_bias,
            "scores": scores,
        }
        terms = of_heads({name: x for name, x in terms.items() if x is not None}, heads)
        q = q_SBHD[rows, :, heads]
        if terms:
            q = pad(q, (0, 0, 0, 0, 0, 0, 0, part.end - (rank + 1) * length))
        if document_starts is not None:
            terms["document_starts"] = (document_starts[:, rows] - first).clamp(min=0)
        return attention(q, k, v, causal=causal, **terms, **options)[: rows.stop - rows.start]

    transfer = _Transfer(plan, group, k_SBGD)
    k_SBGD, v_SBGD, taken = _Depart.apply(k_SBGD, v_SBGD, transfer)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    ends = [max(far[part.heads]) for part in plan.parts[rank]]
    outs: list[list[Tensor]] = []
    for part, end in zip(plan.parts[rank], ends):
        k, v = (x[:, :, part.heads] for x in (k_SBGD, v_SBGD))
        near = end < length
        outs.append([attend(slice(end, length), k, v, part, rank * length)] if near else [])
    pieces = transfer.unpack(_Arrive.apply(taken, transfer))  # type: ignore[no-untyped-call]  # as above
    for number, (part, end) in enumerate(zip(plan.parts[rank], ends)):
        if end:
            own = (x[:end, :, part.heads] for x in (k_SBGD, v_SBGD))
            before, after = pieces[:rank], pieces[rank + 1 :]
            given = [*(x[number] for x in before), own, *(x[number] for x in after)]
            k, v = (torch.cat(x) for x in zip(*given))
            outs[number].insert(0, attend(slice(0, end), k, v, part, part.first))
    return _joined([_joined(of_part, 0) for of_part in outs], 2)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@torch.no_grad()
def _first_keys(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    slopes: Tensor,
    scale: float | None,
    document_starts: Tensor | None,
    group: dist.ProcessGroup,
) -> tuple[list[list[int]], list[int]]:
    """Return the first position that each key head needs on every rank, and this rank's far rows.

    Far rows: for each key head, a number of first rows that includes all that need other ranks'
    keys.
    """
    size, rank, length = dist.get_world_size(group), dist.get_rank(group), len(q_SBHD)
    groups, tile, begin = k_SBGD.shape[2], math.gcd(length, TILE), rank * length
    wanted = any(x.requires_grad for x in (q_SBHD, k_SBGD, v_SBGD))
    own = torch.stack([row_norms(k_SBGD), row_norms(v_SBGD)])  # [2, B, G, S]
    longest, last_keys = _gather_norms(own, k_SBGD, tile, group)
    starts = document_starts
    if starts is not None:
        starts = (starts - (begin - len(last_keys))).clamp(min=0)
    scale = q_SBHD.shape[3] ** -0.5 if scale is None else scale
    left_out = tiles_left_out(
        q_SBHD, torch.cat([last_keys, k_SBGD]), (own[0], own[1]), (longest[0], longest[1]),
        slopes, scale, tile, begin + length, wanted, starts,
    )  # fmt: skip
    if document_starts is not None:
        left_out = left_out.maximum(document_starts[:, None] // tile)
    first_GS = torch.unflatten(left_out.amin(0), 0, (groups, -1)).amin(1) * tile
    row = torch.arange(1, length + 1, device=q_SBHD.device)
    far_G = ((first_GS < begin) * row).amax(1)
    gathered = far_G.new_empty(size * groups)
    dist.all_gather_into_tensor(gathered, first_GS.amin(1).clamp(max=begin), group=group)
    # Only here does the host wait for the device.
    *numbers, far = torch.cat([gathered, far_G]).view(size + 1, groups).tolist()
    return numbers, far


def _gather_norms(
    own: Tensor, k_SBGD: Tensor, tile: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the largest norms up to the end of each tile and the keys just before this rank's.

    Args:
        own: Norms of this rank's keys and values, [2, B, G, S].
        k_SBGD: This rank's keys.
        tile: Keys in a tile; divides S.
        group: The ranks.

    Returns:
        ([2, B, G, T] of this rank's and all earlier tiles, [at most FLOOR_TILE, B, G, D])
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    maxima = torch.unflatten(own, 3, (-1, tile)).amax(4)
    norms, last_keys = maxima.flatten(), k_SBGD[-FLOOR_TILE:]
    with_keys = torch.cat([norms, last_keys.flatten().float()])
    sent = [with_keys if r == rank + 1 else norms[: len(norms) * (r > rank)] for r in range(size)]
    received = [len(with_keys) if r == rank - 1 else len(norms) * (r < rank) for r in range(size)]
    taken = norms.new_empty(sum(received))
    sizes = [len(x) for x in sent]
    dist.all_to_all_single(taken, torch.cat(sent), received, sizes, group=group)
    of_ranks = torch.split(taken, received)[:rank]
    earlier = [x[: len(norms)].view_as(maxima) for x in of_ranks]
    longest = torch.cat([*earlier, maxima], dim=3).cummax(3).values
    before = taken[len(taken) - last_keys.numel() * (rank > 0) :]
    return longest, before.view(-1, *k_SBGD.shape[1:]).to(k_SBGD.dtype)


# ---- The exchange of keys and values ----


class _Transfer:
    """One exchange by a plan, with its communication in the forward or backward pass."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup, k_SBGD: Tensor) -> None:
        rank, ranks = dist.get_rank(group), range(len(plan.parts))
        self.group, (_, self.batch, _, self.width) = group, k_SBGD.shape
        self.leaving = [list(plan.pieces(rank, r)) for r in ranks]
        self.arriving = [list(plan.pieces(r, rank)) for r in ranks]
        # Each piece of keys, and one of values.
        size = 2 * self.batch * self.width
        self.sent = [size * plan.rows(rank, r) for r in ranks]
        self.received = [size * plan.rows(r, rank) for r in ranks]
        self.work: dist.Work | None = None
        self.returned = k_SBGD.new_empty(0)

    def send(self, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
        """Begin to send, and return the buffer for what is received."""
        pieces = [piece for of_rank in self.leaving for piece in of_rank]
        flat = [x[rows, :, heads].flatten() for rows, heads in pieces for x in (k_SBGD, v_SBGD)]
        taken = k_SBGD.new_empty(sum(self.received))
        self._begin(taken, torch.cat([taken[:0], *flat]), self.received, self.sent)
        return taken

    def send_back(self, d_taken: Tensor) -> None:
        """Begin to return gradients to the owners."""
        self.returned = d_taken.new_empty(sum(self.sent))
        self._begin(self.returned, d_taken.contiguous(), self.sent, self.received)

    def _begin(self, taken: Tensor, flat: Tensor, received: list[int], sent: list[int]) -> None:
        self.work = dist.all_to_all_single(
            taken, flat, received, sent, group=self.group, async_op=True
        )

    def wait(self) -> None:
        """Wait for the communication in progress."""
        assert self.work is not None
        self.work.wait()
        self.work = None

    def unpack(self, taken: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
        """Return keys and values, [rows, B, heads, D], that each rank has sent for each part."""
        shapes = [
            [
                (rows.stop - rows.start, self.batch, heads.stop - heads.start, self.width)
                for rows, heads in of_rank
            ]
            for of_rank in self.arriving
        ]
        sizes = [math.prod(shape) for of_rank in shapes for shape in of_rank for _ in "kv"]
        flat = iter(torch.split(taken, sizes))
        return [[(next(flat).view(x), next(flat).view(x)) for x in of_rank] for of_rank in shapes]

    def add_returned(self, sums: list[Tensor]) -> None:
        """Add the gradients that have returned to those of this rank's keys and values."""
        pieces = [piece for of_rank in self.leaving for piece in of_rank]
        targets = [x[rows, :, heads] for rows, heads in pieces for x in sums]
        gradients = torch.split(self.returned, [x.numel() for x in targets])
        for target, gradient in zip(targets, gradients):
            target += gradient.view(target.shape)


class _Depart(torch.autograd.Function):
    """Begin to send keys and values. The backward pass waits for the returning gradients.

    A rank's own keys and values pass through, so that the backward pass runs on every rank, and not
    only on those that have received something.
    """

    @staticmethod
    def forward(
        ctx: Any, k_SBGD: Tensor, v_SBGD: Tensor, transfer: _Transfer
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.transfer = transfer
        return k_SBGD, v_SBGD, transfer.send(k_SBGD, v_SBGD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dk_SBGD: Tensor, dv_SBGD: Tensor, d_taken: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        transfer: _Transfer = ctx.transfer
        if transfer.work is None:
            # This rank has used nothing that it received, so `_Arrive` had no backward pass.
            transfer.send_back(d_taken)
        transfer.wait()
        # Sum in fp32, because every later rank may use a key, and sums in half precision would lose
        # small gradients.
        wide = torch.promote_types(dk_SBGD.dtype, torch.float32)
        dk, dv = (x.to(wide, copy=True) for x in (dk_SBGD, dv_SBGD))
        transfer.add_returned([dk, dv])
        return dk.to(dk_SBGD.dtype), dv.to(dv_SBGD.dtype), None


class _Arrive(torch.autograd.Function):
    """Wait for keys and values. The backward pass begins to return their gradients.

    Autograd runs in reverse order, so the backward pass of everything between `_Depart` and this
    runs during the exchange of gradients.
    """

    @staticmethod
    def forward(ctx: Any, taken: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return taken

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_taken: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.send_back(d_taken)
        return d_taken, None

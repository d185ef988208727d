"""Attention of sequences split over ranks, against dense attention of whole sequences in fp64."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.kernels import context
from pretrain.kernels.context import bytes_sent, context_attention, plan_by_reach
from pretrain.kernels.reference import attention_reference
from pretrain.positions.alibi import alibi_slopes
from pretrain.topology import initialize
from tests.conftest import tiny_config
from tests.kernels.test_skipping import KINDS, rows
from tests.kernels.test_skipping import draw as draw_kind

Arguments = dict[str, Any]


def rows_of(x: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    """Return what a rank of `size` has of a tensor whose dimension `dim` is the sequence."""
    return x.chunk(size, dim)[rank].contiguous()


def group_of(size: int) -> dist.ProcessGroup:
    """Return this rank's group: each `size` ranks are one."""
    initialize(tiny_config())
    ranks = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    groups = [dist.new_group(of_group) for of_group in ranks]
    return groups[dist.get_rank() // size]


def on_rank(size: int, qkv: list[Tensor], towards: Tensor, arguments: Arguments) -> list[Tensor]:
    """Return [output, dq, dk, dv, gradient of the bias...] of this rank, in groups of `size`."""
    group = group_of(size)
    rank = dist.get_rank(group)
    inputs = [rows_of(x, rank, size).requires_grad_() for x in qkv]
    arguments = dict(arguments)
    if (starts := arguments.get("document_starts")) is not None:
        arguments["document_starts"] = rows_of(starts, rank, size, dim=1)
    terms = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    out = context_attention(*inputs, group, **arguments)
    return [
        out.detach(),
        *torch.autograd.grad((out * rows_of(towards, rank, size)).sum(), inputs + terms),
    ]


def joined(results: list[list[Tensor]], size: int) -> list[Tensor]:
    """Return the results of all ranks as one process would: rows in order, sums of terms."""
    for first in range(size, len(results), size):
        for one, other in zip(results[:size], results[first:]):
            assert all(torch.equal(x, y) for x, y in zip(one, other)), "groups differ"
    rows, sums = zip(*((result[:4], result[4:]) for result in results[:size]))
    return [torch.cat(x) for x in zip(*rows)] + [torch.stack(x).sum(0) for x in zip(*sums)]


def dense(qkv: list[Tensor], towards: Tensor, arguments: Arguments) -> list[Tensor]:
    """Return what on_rank gives, of the dense reference in fp64 on one process."""
    inputs = [x.clone().requires_grad_() for x in qkv]
    arguments = {
        name: x.detach().double().requires_grad_()
        if isinstance(x, Tensor) and x.requires_grad
        else x
        for name, x in arguments.items()
    }
    terms = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    out = attention_reference(*inputs, **arguments)
    return [out.detach(), *torch.autograd.grad((out * towards).sum(), inputs + terms)]


def draw(length: int = 96, groups: int = 4) -> tuple[list[Tensor], Tensor]:
    """Return ([q, k, v], gradient of the output) of two sequences and four heads, fp64."""
    generator = torch.Generator().manual_seed(7)
    qkv = [
        torch.randn(length, 2, heads, 16, generator=generator, dtype=torch.float64)
        for heads in (4, groups, groups)
    ]
    return qkv, torch.randn(length, 2, 4, 16, generator=generator, dtype=torch.float64)


# Documents that begin within a rank, at its border, and two ranks before.
STARTS = torch.tensor([[0] * 10 + [10] * 38 + [48] * 48, [0] * 80 + [*range(80, 96)]]).int()
TABLE = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
SLOPES_TERM = {"slopes": alibi_slopes(4).requires_grad_()}
TABLE_TERM = {
    "relative_attention_bias": TABLE.requires_grad_(),
    "relative_attention_max_distance": 40,
}
EXACT: dict[str, Arguments] = {
    "slopes": SLOPES_TERM,
    "slopes, documents": SLOPES_TERM | {"document_starts": STARTS},
    "table": TABLE_TERM,
    "none": {},
    "none, documents": {"document_starts": STARTS},
    "slopes, two-sided": SLOPES_TERM | {"causal": False},
    "table, two-sided": TABLE_TERM | {"causal": False},
    "none, two-sided": {"causal": False},
}


@pytest.mark.parametrize("case", EXACT)
def test_exact_exchange_gives_what_one_process_gives(pools, case):
    for size, groups in ((4, 4), (4, 2), (2, 1)):
        qkv, towards = draw(groups=groups)
        found = joined(pools(4).run(on_rank, size, qkv, towards, EXACT[case]), size)
        names = ["out", "dq", "dk", "dv", "d bias"]
        for name, x, y in zip(names, found, dense(qkv, towards, EXACT[case])):
            # The bias and its gradient are fp32.
            tolerance = 1e-12 if name != "d bias" else 1e-5
            torch.testing.assert_close(
                x.double(), y.double(), rtol=tolerance, atol=tolerance, msg=name
            )


def reached(size: int, qkv: list[Tensor], towards: Tensor, arguments: Arguments) -> dict[str, Any]:
    """Return what on_rank gives, the first keys that all ranks asked for, and the bytes sent."""
    sent, firsts = [0, 0], []
    decide = context._first_keys

    def counted(name: str) -> Any:
        call = getattr(dist, name)

        def count(taken: Tensor, given: Tensor, *others: Any, **named: Any) -> Any:
            peers = size - 1 if name == "all_gather_into_tensor" else 1
            sent[not named.get("async_op")] += given.nbytes * peers
            return call(taken, given, *others, **named)

        return patch.object(dist, name, count)

    def recorded(*given: Any) -> Any:
        firsts.append(decide(*given))
        return firsts[-1]

    recording = patch.object(context, "_first_keys", recorded)
    with counted("all_to_all_single"), counted("all_gather_into_tensor"), recording:
        tensors = on_rank(size, qkv, towards, arguments)
    # One call forward, whose keys and values all return as gradients to where they came from.
    return {"tensors": tensors, "firsts": firsts[0][0], "sent": sent}


def compare(
    pool: Any, size: int, qkv: list[Tensor], slopes: Tensor, **arguments: Any
) -> list[list[int]]:
    """Compare outputs and gradients with dense ones, and bytes with the plan's; return firsts."""
    towards = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(1)).double()
    arguments = {"slopes": slopes, **arguments}
    results = pool.run(reached, size, qkv, towards, arguments)
    found = joined([result["tensors"] for result in results], size)
    out, *gradients = dense(qkv, towards, arguments)
    # What `pretrain.kernels.context` states, row by row.
    noise = 1e-13 * (1 + float(rows(qkv[2]).max()))
    own = rows(qkv[2]).repeat_interleave(qkv[0].shape[2] // qkv[2].shape[2], dim=1)
    assert (rows(found[0] - out) <= 2.0**-23 * (own + rows(out)) + noise).all()
    for truth, gradient in zip(gradients, found[1:]):
        # The rounding of the sums themselves, where giant numbers cancel.
        noise = 1e-12 + 1e-16 * float(rows(qkv[2]).max() * rows(qkv[1]).max())
        assert (gradient - truth).abs().max() <= 2.0**-19 * truth.abs().max() + noise
    length, (_, batch, groups, width) = len(qkv[0]) // size, qkv[1].shape
    plan = plan_by_reach(results[0]["firsts"], length)
    row = 2 * batch * width * qkv[1].element_size()
    for rank in range(size):
        forward, deciding = bytes_sent(plan, rank, batch, groups, width, qkv[1].element_size())
        given = [part for part in plan.parts[rank] for _ in range(part.heads.stop)[part.heads]]
        backward = row * sum(rank * length - part.first for part in given)
        assert results[rank]["sent"] == [forward + backward, deciding]
        # Every head is given what it needs, and at most twice as much of others.
        for part, first in zip(given, results[rank]["firsts"][rank], strict=True):
            assert part.first <= first and rank * length - part.first <= 2 * (rank * length - first)
    return results[0]["firsts"]


SLOPES = torch.tensor([0.5, 0.125])


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_with_its_owner_does_not_matter(pools, kind):
    qkv = [x.double() for x in draw_kind(kind, 1024, 2, width=16)]
    firsts = compare(pools(4), 4, qkv, SLOPES)
    if kind in ("scale 1", "constant", "one-hot"):
        assert firsts[3][0] >= 640, "a steep head needs no more than a sliver of its neighbour"
    if kind == "giant key":
        assert firsts[3] == [0, 0], "a key that no window of fixed size would keep"


def test_few_ranks_shared_heads_and_documents(pools):
    qkv = [x.double() for x in draw_kind("scale 1", 1024, 4, width=16)]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    compare(pools(4), 2, qkv, slopes)
    qkv[1:] = [x[:, :, :2] for x in qkv[1:]]
    compare(pools(4), 4, qkv, slopes)
    starts = torch.arange(1024, dtype=torch.int32)[None]
    firsts = compare(pools(4), 4, qkv, slopes / 1000, document_starts=starts)
    assert firsts == [[rank * 256] * 2 for rank in range(4)], "documents of one token need nothing"
    firsts = compare(pools(4), 4, qkv, slopes / 1000, document_starts=starts // 400 * 400)
    assert firsts == [[0] * 2, [0] * 2, [384] * 2, [384] * 2], "400 in whole tiles"


def test_heads_without_reach_are_given_everything(pools):
    qkv = [x.double() for x in draw_kind("scale 1", 512, 3, width=16)]
    firsts = compare(pools(4), 4, qkv, torch.tensor([0.5, 0.0, -0.01]))
    assert firsts[3][0] > 0 and firsts[3][1:] == [0, 0]
    hostile = [x.clone() for x in qkv]
    hostile[1][5, 0, 0, 3] = math.nan
    slopes = torch.tensor([0.5, 0.5, 0.5])
    results = pools(4).run(reached, 4, hostile, qkv[0], {"slopes": slopes})
    out = joined([result["tensors"] for result in results], 4)[0]
    # Torch's kernel for CPUs adds -inf to a NaN, so the rows before it are NaN as well.
    assert out[5:, 0, 0].isnan().all() and out[:, 0, 1:].isfinite().all()
    # Products of 10^6 overflow fp16, in which they are never held.
    large = [(x * 300).half() for x in qkv]
    results = pools(4).run(reached, 4, large, qkv[0].half(), {"slopes": slopes})
    out = joined([result["tensors"] for result in results], 4)[0]
    torch.testing.assert_close(
        out.double(), attention_reference(*large, slopes=slopes), rtol=2.0**-9, atol=1.0
    )


def test_reach_is_that_of_the_closed_form(pools):
    """With all scores 0, a key matters while slope * distance < 24 ln 2 + at most ln N - floor."""
    q, k, v = (x.double() for x in draw_kind("scale 1", 1024, 2, width=16))
    v = v / v.norm(dim=3, keepdim=True)
    firsts = compare(pools(4), 4, [torch.zeros_like(q), k / k.norm(dim=3, keepdim=True), v], SLOPES)
    for head, slope in enumerate(SLOPES.tolist()):
        floor = math.log(sum(math.exp(-slope * distance) for distance in range(33)))
        least, most = ((24 * math.log(2) + x - floor) / slope for x in (0, math.log(1024) + 0.1))
        for rank in (1, 2, 3):
            assert least - 64 <= rank * 256 - firsts[rank][head] <= most + 64

"""Attention of sequences split over ranks, against dense attention of whole sequences in fp64."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from pretrain.kernels import context
from pretrain.kernels.context import bytes_sent, context_attention, plan_by_reach, share_of_ring
from pretrain.kernels.reference import attention_reference
from pretrain.positions.alibi import alibi_slopes
from pretrain.topology import initialize
from tests.conftest import mark_torture, tiny_config
from tests.kernels.test_dispatch import run
from tests.kernels.test_documents import BIASES, make, starts_of
from tests.kernels.test_skipping import KINDS, draw, rows

Arguments = dict[str, Any]


def own_rows(
    *qkv: Tensor, group: dist.ProcessGroup, document_starts: Tensor | None = None, **arguments: Any
) -> Tensor:
    """Return this rank's rows of attention, of what it holds of q, k and v, and zeros elsewhere."""
    size, rank, length = dist.get_world_size(group), dist.get_rank(group), len(qkv[0])
    part = length // size
    own = slice(rank * part, (rank + 1) * part)
    if document_starts is not None:
        arguments["document_starts"] = document_starts[:, own].contiguous()
    out = context_attention(*(x[own] for x in qkv), group, **arguments)
    return pad(out, (0, 0, 0, 0, 0, 0, own.start, length - own.stop))


def on_rank(size: int, qkv: list[Tensor], arguments: Arguments) -> list[Tensor]:
    """Return [output, every gradient]: this rank's share, if each `size` ranks are a group."""
    initialize(tiny_config())
    ranks = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    groups = [dist.new_group(of_group) for of_group in ranks]
    qkv = [x.detach().requires_grad_() for x in qkv]
    return run(own_rows, qkv, arguments, group=groups[dist.get_rank() // size])


def summed(results: list[list[Tensor]]) -> list[Tensor]:
    """Return what one process would give, of what each rank gives."""
    return [torch.stack(x).sum(0) for x in zip(*results)]


# Documents that begin within a rank, at its border, and two ranks before.
STARTS = starts_of([[10, 38, 48], [80, *[1] * 16]])


@pytest.mark.parametrize("extra", [{}, {"document_starts": STARTS}, {"causal": False}])
@pytest.mark.parametrize("added", BIASES)
def test_exact_exchange_gives_what_one_process_gives(pools, added, extra):
    for size, groups in ((4, 4), (2, 1)):
        qkv, arguments = make([[96], [96]], added, torch.float64, groups=groups)
        expected = run(attention_reference, qkv, arguments, **extra)
        results = pools(4).run(on_rank, size, qkv, arguments | extra)
        for first in range(0, 4, size):
            for number, x in enumerate(summed(results[first : first + size])):
                # The bias and its gradient are fp32.
                close = (
                    {"rtol": 1e-12, "atol": 1e-12} if number < 4 else {"rtol": 1e-5, "atol": 1e-5}
                )
                torch.testing.assert_close(x, expected[number], **close)


def reached(size: int, qkv: list[Tensor], arguments: Arguments) -> dict[str, Any]:
    """Return what on_rank gives, the first keys that all ranks asked for, and the bytes sent.

    The bytes are [of keys and values and of their gradients, of what decides].
    """
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
        tensors = on_rank(size, qkv, arguments)
    return {"tensors": tensors, "firsts": firsts[0][0], "sent": sent}


def compare(pool: Any, size: int, qkv: list[Tensor], slopes: Tensor, **more: Any) -> Any:
    """Compare outputs and gradients with dense ones, and bytes with the plan's; return firsts."""
    arguments = {"slopes": slopes, **more}
    results = pool.run(reached, size, qkv, arguments)
    leaves = [x.clone().requires_grad_() for x in qkv]
    found = summed([result["tensors"] for result in results[:size]])
    out, *gradients = run(attention_reference, leaves, arguments)
    # What `pretrain.kernels.context` states, row by row.
    noise = 1e-13 * (1 + float(rows(qkv[2]).max()))
    own = rows(qkv[2]).repeat_interleave(qkv[0].shape[2] // qkv[2].shape[2], dim=1)
    assert (rows(found[0] - out) <= 2.0**-23 * (own + rows(out)) + noise).all()
    for truth, gradient in zip(gradients, found[1:]):
        # The rounding of the sums themselves, where giant numbers cancel.
        noise = 1e-12 + 1e-16 * float(rows(qkv[2]).max() * rows(qkv[1]).max())
        assert (gradient - truth).abs().max() <= 2.0**-19 * truth.abs().max() + noise
    length, (_, *sizes), item = len(qkv[0]) // size, qkv[1].shape, qkv[1].element_size()
    firsts = results[0]["firsts"]
    plan = plan_by_reach(firsts, length)
    for rank in range(size):
        forward, deciding = bytes_sent(plan, rank, *sizes, item)
        given = [part for part in plan.parts[rank] for _ in range(part.heads.stop)[part.heads]]
        keys = sum(rank * length - part.first for part in given)
        # What it received, returns as gradients.
        assert results[rank]["sent"] == [forward + 2 * keys * sizes[0] * sizes[2] * item, deciding]
        # Every head is given what it needs, and at most twice as much of others.
        for part, first in zip(given, firsts[rank], strict=True):
            assert part.first <= first and rank * length - part.first <= 2 * (rank * length - first)
    return firsts


SLOPES = torch.tensor([0.5, 0.125])


# What a rank must know of others' rows. tests/kernels/test_reach.py has the bound with every kind.
CORE = {("scale 1",), ("one-hot",), ("giant key",), ("giant value",), ("giant queries",)}
CORE |= {("giant key, faint queries",)}


@pytest.mark.parametrize(("kind",), mark_torture([(kind,) for kind in KINDS], CORE))
def test_what_stays_with_its_owner_does_not_matter(pools, kind):
    qkv = [x.double() for x in draw(kind, 1024, 2, width=16)]
    firsts = compare(pools(4), 4, qkv, SLOPES)
    if kind in ("scale 1", "constant", "one-hot"):
        assert firsts[3][0] >= 640, "a steep head needs no more than a sliver of its neighbor"
    if kind == "giant key":
        assert firsts[3] == [0, 0], "a key that no window of fixed size would keep"


def test_few_ranks_shared_heads_and_documents(pools):
    qkv = [x.double() for x in draw("scale 1", 1024, 4, width=16)]
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
    qkv = [x.double() for x in draw("scale 1", 512, 3, width=16)]
    firsts = compare(pools(4), 4, qkv, torch.tensor([0.5, 0.0, -0.01]))
    assert firsts[3][0] > 0 and firsts[3][1:] == [0, 0]
    hostile = [x.clone() for x in qkv]
    hostile[1][5, 0, 0, 3] = math.nan
    slopes = torch.tensor([0.5, 0.5, 0.5])
    out = summed(pools(4).run(on_rank, 4, hostile, {"slopes": slopes}))[0]
    # Torch's kernel for CPUs adds -inf to a NaN, so the rows before it are NaN as well.
    assert out[5:, 0, 0].isnan().all() and out[:, 0, 1:].isfinite().all()
    # Products of 10^6 overflow fp16, in which they are never held.
    large = [(x * 300).half() for x in qkv]
    out = summed(pools(4).run(on_rank, 4, large, {"slopes": slopes}))[0]
    exact = attention_reference(*large, slopes=slopes)
    torch.testing.assert_close(out, exact, rtol=2.0**-9, atol=1.0)


def test_full_size_takes_a_quarter_of_a_ring_at_most():
    """65,536 tokens on 8 ranks and the published slopes, if scores differ by 100 nats at most.

    Queries and keys of the demo's model leave room for 70 at that length (ranks 3 and 7).
    """
    reaches = [(100 + 24 * math.log(2) + math.log(65_536)) / x for x in alibi_slopes(16).tolist()]
    assert 0.2 < share_of_ring(reaches, 8, 8192, width=128, element_size=2) < 0.25
    # What decides comes on top where everything is needed.
    assert 1 <= share_of_ring([math.inf] * 16, 8, 8192, width=128, element_size=2) < 1.01


def events(qkv: list[Tensor], slopes: Tensor) -> list[str]:
    """Return what a rank does in which order: send, wait, attend or go back by numbers of keys."""
    log: list[str] = []
    attend, begin, wait = context.attention, context._Transfer._begin, context._Transfer.wait

    def attended(q: Tensor, k: Tensor, *others: Any, **named: Any) -> Tensor:
        out = attend(q, k, *others, **named)
        log.append(f"{len(q)} of {len(k)}")
        out.register_hook(lambda _: log.append(f"back {len(q)} of {len(k)}"))
        return out

    def logged(name: str, call: Any) -> Any:
        return lambda *arguments: (log.append(name), call(*arguments))[1]

    with (
        patch.object(context, "attention", attended),
        patch.object(context._Transfer, "_begin", logged("send", begin)),
        patch.object(context._Transfer, "wait", logged("wait", wait)),
    ):
        on_rank(4, qkv, {"slopes": slopes})
    return log


def test_rows_that_need_nothing_are_computed_while_keys_travel(pools):
    """With scores 0 and a slope of 0.5, 32 rows or a few more look past their own rank's keys."""
    q, k, v = (x.double() for x in draw("scale 1", 1024, 1, width=16))
    first, *_, last = pools(4).run(events, [q * 0, k, v], torch.tensor([0.5]))
    assert first == ["send", "256 of 256", "wait", "back 256 of 256", "send", "wait"]
    near, far = last[1], last[3]
    rows, keys = (int(x.split()[0]) for x in (near, far))
    assert last == ["send", near, "wait", far, f"back {far}", "send", f"back {near}", "wait"]
    assert near == f"{rows} of 256" and far == f"{keys} of {64 + keys}" and rows + keys == 256
    assert 24 < keys < 64


def test_reach_is_that_of_the_closed_form(pools):
    """With all scores 0, a key matters while slope * distance < 24 ln 2 + at most ln N - floor."""
    q, k, v = (x.double() for x in draw("scale 1", 1024, 2, width=16))
    v = v / v.norm(dim=3, keepdim=True)
    firsts = compare(pools(4), 4, [torch.zeros_like(q), k / k.norm(dim=3, keepdim=True), v], SLOPES)
    for head, slope in enumerate(SLOPES.tolist()):
        floor = math.log(sum(math.exp(-slope * distance) for distance in range(33)))
        least, most = ((24 * math.log(2) + x - floor) / slope for x in (0, math.log(1024) + 0.1))
        for rank in (1, 2, 3):
            assert least - 64 <= rank * 256 - firsts[rank][head] <= most + 64

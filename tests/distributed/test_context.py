"""Attention of sequences split over ranks, against dense attention of whole sequences in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.kernels.context import context_attention
from pretrain.kernels.reference import attention_reference
from pretrain.positions.alibi import alibi_slopes
from pretrain.topology import initialize
from tests.conftest import tiny_config

Arguments = dict[str, Any]


def rows_of(x: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    """Return what a rank of `size` has of a tensor whose dimension `dim` is the sequence."""
    return x.chunk(size, dim)[rank].contiguous()


def on_rank(size: int, qkv: list[Tensor], towards: Tensor, arguments: Arguments) -> list[Tensor]:
    """Return [output, dq, dk, dv, gradient of the bias...] of this rank, in groups of `size`."""
    initialize(tiny_config())
    ranks = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    groups = [dist.new_group(of_group) for of_group in ranks]
    group = groups[dist.get_rank() // size]
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
EXACT: dict[str, Arguments] = {
    "slopes": {"slopes": alibi_slopes(4).requires_grad_()},
    "slopes, documents": {"slopes": alibi_slopes(4).requires_grad_(), "document_starts": STARTS},
    "table": {
        "relative_attention_bias": TABLE.requires_grad_(),
        "relative_attention_max_distance": 40,
    },
    "none": {},
    "none, documents": {"document_starts": STARTS},
    "slopes, two-sided": {"slopes": alibi_slopes(4).requires_grad_(), "causal": False},
    "table, two-sided": {
        "relative_attention_bias": TABLE.requires_grad_(),
        "relative_attention_max_distance": 40,
        "causal": False,
    },
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

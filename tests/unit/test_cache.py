"""A cache that forgets, against dense attention in fp64 over all keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pretrain.kernels.reference import attention_reference
from pretrain.model.cache import Kept, KeyCache

SLOPES = torch.tensor([2.0**-1, 2.0**-2, 2.0**-3, 2.0**-4])
"""Of two key heads with two query heads each."""
SHARED, WIDTH, LENGTH = 2, 8, 8192
GAP = 4.0
"""Length of queries and of keys, so that a score times the scale is at most GAP^2 / sqrt(WIDTH)."""


def rows(length: int, heads: int, seed: int) -> Tensor:
    """Return fp64 rows of one length that look everywhere."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, 2, heads, WIDTH, generator=generator, dtype=torch.float64)
    return GAP * x / x.norm(dim=-1, keepdim=True)


def qkv(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return rows(length, 4, 0), rows(length, 2, 1), rows(length, 2, 2)


def certificate(slopes: Tensor) -> list[float]:
    """The closed form of the gap between two scores, divided by the smallest slope of a group."""
    needed = 2 * GAP**2 / math.sqrt(WIDTH) + math.log(LENGTH) + 24 * math.log(2)
    return [needed / float(part.min()) if part.min() > 0 else math.inf for part in slopes.split(2)]


def passed(
    cache: KeyCache, texts: tuple[Tensor, ...], slopes: Tensor, sizes: int | list[int]
) -> tuple[Tensor, list[Kept]]:
    """Pass a text through a cache in pieces; return the output and what was kept after each."""

    def attend(q: Tensor, k: Tensor, v: Tensor, heads: slice) -> Tensor:
        return attention_reference(q, k, v, slopes=slopes[heads])

    outs, kept = [], []
    for piece in zip(*(x.split(sizes) for x in texts)):
        outs.append(cache.attend(*piece, slopes, WIDTH**-0.5, attend))
        kept.append(cache.kept())
    return torch.cat(outs), kept


def equals_dense(out: Tensor, texts: tuple[Tensor, ...], slopes: Tensor) -> None:
    """Both bounds let a row lose weights of 2^-24, each times a value and the output."""
    dense = attention_reference(*texts, slopes=slopes)
    largest = texts[2].norm(dim=-1).max()
    assert (out - dense).norm(dim=-1).max() <= 2 * 2 * 2.0**-24 * largest


@pytest.mark.parametrize(("piece", "length"), [(1, 1024), (200, LENGTH)])
def test_memory_is_constant_in_the_length_of_the_text(piece, length):
    cache, texts = KeyCache(certificate(SLOPES)), qkv(length)
    out, kept = passed(cache, texts, SLOPES, piece)
    equals_dense(out[-300:], (texts[0][-300:], *texts[1:]), SLOPES)
    assert kept[-1].fetches == 0
    # Of every key head the certificate in whole tiles, with the piece and a quarter to spare; of
    # keys and values; and the norms of tiles. Only ln N of `certificate` grows with the text.
    most_rows = sum(1.25 * (reach + 128 + piece) + 128 for reach in certificate(SLOPES))
    most = most_rows * 2 * 2 * WIDTH * 8 + 2**12
    sizes = {n: kept[n // piece - 1] for n in (length // 16, length // 4, length)}
    assert all(each.device + each.host <= most for each in sizes.values())
    assert most < sum(x.nbytes for x in texts[1:]) * {1: 0.8, 200: 0.14}[piece]


def test_a_query_for_a_key_on_the_host_brings_it_back():
    # The second key head has a query head that sees everything.
    slopes = torch.tensor([*SLOPES[:3], 0.0])
    texts = q, k, v = qkv(2400)
    # A long key, then text that cannot see it, then queries in its direction.
    q[:1800] *= 1e-3
    k[100, :, 0] *= 500
    q[1800:, :, 1] = k[100, :, 0] / 10
    out, kept = passed(KeyCache([math.inf, math.inf]), texts, slopes, [200] * 12)
    equals_dense(out, texts, slopes)
    # Before it the key was on the host, and without it the output is another one.
    assert kept[8].fetches == 0 < kept[8].host
    assert kept[-1].fetches > 0
    alone = attention_reference(q[1800:], k[128:], v[128:], slopes=slopes)
    assert (out[1800:] - alone).abs().max() > 0.1

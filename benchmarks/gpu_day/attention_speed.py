"""Time every attention kernel of `pretrain bench attention`, and the candidates beside them.

python -m benchmarks.gpu_day.attention_speed --out FILE [--seconds S] [--lengths 1024,4096]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from benchmarks.gpu_day import flash4
from benchmarks.gpu_day.candidates import attend_by
from pretrain.bench.attention import SECONDS, Attend, Case, Contestant, bench_attention
from pretrain.kernels.call import ScoreBias


def _candidate(name: str, backend: str, **options: bool) -> Contestant:
    def make(case: Case, slopes: Tensor) -> Attend:
        return lambda q, k, v: attend_by(backend)(q, k, v, slopes=slopes, **options)

    visited = _visited if backend == "flash4" and not options else None
    return Contestant(name, make, visited=visited)


def _visited(qkv: Sequence[Tensor], slopes: Tensor) -> float:
    """Return the share of the causal tiles in the lists that FlashAttention-4 is given."""
    q, k, v = qkv
    bias = ScoreBias(slopes, None, 128, True)
    counts = []
    for skip in (None, False):
        mask = flash4.block_mask(q, k, v, bias, None, skip)
        assert mask.full_kv_num_blocks is not None  # our lists always have both kinds
        counts.append((mask.kv_num_blocks + mask.full_kv_num_blocks).double().mean())
    return float(counts[0] / counts[1])


CANDIDATES = (
    _candidate("FlexAttention, ALiBi", "flex"),
    _candidate("FlashAttention-4, ALiBi", "flash4"),
    _candidate("FlashAttention-4, ALiBi, no skipping", "flash4", skip=False),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")])
    given = parser.parse_args()
    bench_attention(given.lengths, given.seconds, given.out, CANDIDATES)

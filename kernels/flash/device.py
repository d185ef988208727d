"""Device functions that the flash-attention kernels share: tiles, products, score bias, dropout.

In all device code, names that begin with a capital are pointers (`Q`, `Lse`), lower-case names are
values, and names in capitals are compile-time constants. `position` counts queries on the axis of
the keys: the queries are the last `num_queries` positions of `num_keys`, so query i stands at
position i + num_keys - num_queries. `batch_head` is batch * heads + head.
"""

# Triton compiles these functions from their source, and an annotation would change the type of an
# argument there, so they carry none but `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels import skipping

# Scores are kept in base 2: they are multiplied by log2(e) once, and exp2 is a single instruction.
LOG2E = tl.constexpr(skipping.LOG2E)

PHILOX_ROUNDS = tl.constexpr(7)
"""Rounds of Philox4x32 for dropout. Seven is the fewest that pass every test of randomness (Salmon
et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, table 2); Triton's default is 10."""

# Values of the compile-time constant BIAS: what is added to a score.
NO_BIAS = tl.constexpr(0)
# -slope * |distance|, with one slope per head.
SLOPES = tl.constexpr(1)
# An entry of the head's bias row, by distance.
ROW = tl.constexpr(2)
# The last entry of the bias row: for loops over tiles whose keys all lie at or beyond its end.
# Every score gets the same bias there, so no per-element load is needed.
ROW_END = tl.constexpr(3)


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Return the matrix product a b, accumulated in fp32.

    "ieee" keeps fp32 operands in fp32. Triton's default is TF32, which has 10 bits of mantissa.
    UPCAST is set only under the interpreter, whose bf16 product is wrong (triton issue 11584).
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_tile(
    X,  # first element of a [rows, D] matrix; only D must be dense
    start,  # first row
    stride,  # elements from one row to the next
    limit,  # number of rows that exist
    ROWS: tl.constexpr,  # rows to load
    D: tl.constexpr,  # columns that exist
    BLOCK_D: tl.constexpr,  # columns to load: D padded to a power of two
    BOUNDED: tl.constexpr,  # check rows against [0, limit)
):
    """Return rows start .. start + ROWS of X, [ROWS, BLOCK_D], zero where nothing exists.

    Zeros in padded columns add nothing to a product. Without BOUNDED the row mask is left out,
    which the inner loops over whole tiles use.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    # The start is computed in 64 bits: tokens * heads * width can exceed 2^31. Offsets within the
    # tile fit in 32 bits.
    pointers = X + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if BOUNDED:
        inside = ((start + rows >= 0) & (start + rows < limit))[:, None] & (columns < D)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif BLOCK_D != D:
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    X,  # first element of a [rows, D] matrix
    x,  # [ROWS, BLOCK_D], stored in the dtype of X
    start,  # first row
    stride,  # elements from one row to the next
    limit,  # number of rows that exist
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store x as rows start .. start + ROWS of X, leaving out what does not exist."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    pointers = X + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    inside = (start + rows < limit)[:, None] & (columns < D)[None, :]
    tl.store(pointers, x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def add_bias(
    scores,  # scaled scores, base 2
    position,  # int32 positions of the queries
    key,  # int32 positions of the keys
    slope,  # of this head, times log2(e)
    BiasRow,  # bias row of this head, times log2(e): distances -row_reach .. row_reach
    row_reach,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Return scores + bias. `position` and `key` broadcast against scores of either orientation."""
    if BIAS == SLOPES:
        # Positions are below 2^24, so both conversions and the difference are exact in fp32. Done
        # in integers, the difference would need a conversion for every element.
        distance = position.to(tl.float32) - key.to(tl.float32)
        if not CAUSAL:
            distance = tl.abs(distance)
        scores = scores - slope * distance
    elif BIAS == ROW:
        # Distances beyond the ends of the row get the bias of the nearer end.
        scores = scores + tl.load(
            BiasRow + row_reach + tl.minimum(tl.maximum(position - key, -row_reach), row_reach)
        )
    elif BIAS == ROW_END:
        scores = scores + tl.load(BiasRow + 2 * row_reach)
    return scores


@triton.jit
def load_starts(DocumentStarts, batch, query, num_queries, DOCUMENTS: tl.constexpr):
    """Return the position of the first token of each query's document, 0 without DOCUMENTS.

    Queries past the last one get 0. The starts never fall from one query to the next, so the first
    of a block is the smallest.
    """
    starts = tl.zeros_like(query)
    if DOCUMENTS:
        pointers = DocumentStarts + tl.cast(batch, tl.int64) * num_queries + query
        starts = tl.load(pointers, mask=query < num_queries, other=0)
    return starts


@triton.jit
def dropout_keeps(Seed, batch_head, query, key, dropout_p):
    """Return which weights dropout keeps, as booleans of the shape of query and key broadcast.

    The decision is a function of (seed, batch_head, query, key) alone, so forward and backward draw
    the same one whatever their block sizes. `pretrain.kernels.reference.dropout_keep` mirrors it.
    """
    bits, _, _, _ = tl.philox(tl.load(Seed), key, query, batch_head, 0, PHILOX_ROUNDS)
    # The upper 24 bits are a fraction in [0, 1) that fp32 holds exactly.
    return (bits >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24)) >= dropout_p


INTERPRETED = not isinstance(dot, triton.JITFunction)
"""True when Triton runs these kernels in its interpreter on the CPU (TRITON_INTERPRET=1)."""

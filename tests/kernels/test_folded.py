"""Test that ALiBi in extra columns of q and k is the bias itself, to a stated error.

Columns, sums and bound are compared in double precision; outputs and gradients with the dense
reference, to the tolerance of tests/kernels/test_dispatch.py.
"""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain.kernels import folded
from pretrain.kernels.call import ScoreBias
from pretrain.kernels.dispatch import attention
from pretrain.kernels.reference import attention_reference
from pretrain.positions.alibi import alibi_slopes
from tests.kernels.oracles import random_qkv
from tests.kernels.test_dispatch import CUDA, assert_exact

DTYPES = [torch.bfloat16, torch.float16]
# Slopes of 16 and of 12 heads (most are no powers of two), a very shallow one and one above 1.
SLOPES = torch.cat([alibi_slopes(16), alibi_slopes(12), torch.tensor([1e-5, 1.7])])


def score_error_bound(
    slope: float,
    scale: float,
    width: int,
    dtype: torch.dtype,
    distance: int,
    largest_product: float,
) -> float:
    """Return a bound on the error of the difference of two scores of a row, in nats.

    A score is a sum of n = D + E exact products. Adding n numbers in fp32, in any order, errs by at
    most (n - 1) u times the sum of their sizes, u = 2^-24 (Higham, "Accuracy and Stability of
    Numerical Algorithms", 2nd edition, section 4.2, to first order in u). Tensor cores may cut off
    where fp32 rounds, which makes it 2^-23. The sizes of the extra products sum to
    slope (|j - c| + base) / scale, and those of later parts of the slope are below 2^-7 of it. What
    the parts of the slope leave out changes the slope by 2^-24 (bf16) or 2^-33 (fp16) of itself,
    which errs in proportion to the distance of the two keys.

    Args:
        slope: Slope of the head.
        scale: Factor of the products q k^T.
        width: Width of a head, D.
        dtype: Dtype of q: fp16 or bf16.
        distance: Largest distance between the query and either key.
        largest_product: Largest sum over the columns of |q_d k_d|.

    Returns:
        The bound. It assumes that all roundings go one way and are of the whole sum; errors that
        occur are 200 times smaller and below 1.1e-4 nats.
    """
    furthest = distance + folded.QUERY_CHUNK // 2
    furthest += folded.POSITION_BASES[dtype]
    sizes = scale * largest_product + slope * furthest * (1 + 2.0**-7)
    sums = 2 * (width + 2 * folded.SLOPE_PARTS) * 2.0**-23 * sizes
    return sums + slope * distance * 2.0 ** -(24 if dtype == torch.bfloat16 else 33)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 1023, 16_384, 50_000])
@pytest.mark.parametrize("chunk", [1, 1024, folded.QUERY_CHUNK])
def test_positions_are_exact(dtype, keys, chunk):
    """16 x 1024 and beyond: high + low is the position, in every copy of the two columns."""
    center = keys - min(chunk, keys) // 2
    columns = folded.key_columns(keys, center, dtype, torch.device("cpu")).double()
    exact = torch.arange(keys, dtype=torch.float64) - center
    base, factor = folded.POSITION_BASES[dtype], folded.SLOPE_FACTORS[dtype]
    for part in range(folded.SLOPE_PARTS):
        high, low = columns[:, 2 * part], columns[:, 2 * part + 1]
        assert torch.equal((high + low) * factor**part, exact)
        # The two do not cancel by more than a base, so neither is much larger than the position.
        assert ((high.abs() + low.abs()) * factor**part <= exact.abs() + base).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 64**-0.5, 128**-0.5, 20**-0.5])
def test_slopes_are_exact_to_fp32(dtype, scale):
    columns = folded.query_columns(SLOPES, scale, dtype)
    assert columns.dtype == dtype and columns.isfinite().all()
    factors = folded.SLOPE_FACTORS[dtype] ** -torch.arange(folded.SLOPE_PARTS).double()
    for copy in (0, 1):
        held = (columns[:, copy::2].double() * factors).sum(dim=1) * scale
        error = (held / SLOPES.double() - 1).abs().max()
        # Three roundings to 8 or 11 bits: half a unit in the last place of the third.
        assert error <= 2.0 ** -(24 if dtype == torch.bfloat16 else 33), error


def scores_in_fp32(q, k, order):
    """Return q k^T where products are added one after the other in fp32, in the given order."""
    total = torch.zeros(len(q), len(k))
    for column in order:
        # A product of two half-precision numbers is exact in fp32.
        total += q[:, column, None].float() * k[:, column].float()
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slope", [2**-0.5, 0.04, 2**-8])
@pytest.mark.parametrize("order", ["forward", "backward"])
def test_scores_in_fp32_are_within_the_bound(dtype, slope, order):
    """A chunk of queries at the end of 16 x 1024 keys, width 128.

    Keys so far away that their weight is below 2^-24 of the row do not count. Largest errors, in
    nats: 1.0e-4, 1.2e-5 and 5.7e-6 for the three slopes, and 1.2e-3, 9.7e-5 and 4.2e-5 were the
    extra columns the first ones. Rounding a weight to fp16 errs by 4.9e-4 of it, to bf16 by 3.9e-3.
    """
    width, keys, queries = 128, 16_384, 64
    scale = width**-0.5
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(queries, width, generator=generator).to(dtype)
    k = torch.randn(keys, width, generator=generator).to(dtype)
    # The first queries of the chunk, which are furthest from its center.
    positions = torch.arange(queries) + keys - folded.QUERY_CHUNK
    center = keys - folded.QUERY_CHUNK // 2
    columns = folded.key_columns(keys, center, dtype, torch.device("cpu"))
    slope_columns = folded.query_columns(torch.tensor([slope]), scale, dtype)
    wide_q = torch.cat([q, slope_columns.expand(queries, -1)], dim=1)
    wide_k = torch.cat([k, columns], dim=1)
    indices = range(wide_q.shape[1])
    summed = scores_in_fp32(wide_q, wide_k, indices if order == "forward" else reversed(indices))

    exact = scale * (q.double() @ k.double().T)
    distance = positions[:, None] - torch.arange(keys)
    slope32 = float(torch.tensor(slope))
    exact -= slope32 * distance
    error = summed.double() * scale - exact
    # Within a row a constant does not matter: compare with the key at the query's own position.
    error -= error.gather(1, positions[:, None])
    reach = min(keys, math.ceil((24 * math.log(2) + math.log(keys) + 12) / slope))
    counts = (distance >= 0) & (distance <= reach)
    largest = float((q.double().abs() @ k.double().abs().T).max())
    bound = score_error_bound(slope, scale, width, dtype, reach, largest)
    worst = float(error[counts].abs().max())
    assert worst <= bound, (worst, bound)
    # The extra columns are the last ones for this: nothing small is added to what is already large.
    if order == "forward":
        assert worst <= 2.0**-13, worst


# queries, keys, batch, heads, key heads, width
CASES = {
    "one chunk": (331, 331, 1, 8, 8, 16),
    "no padding needed": (100, 100, 2, 4, 4, 18),
    "twelve heads, odd width": (65, 65, 2, 12, 12, 20),
    "published width": (257, 257, 1, 16, 16, 128),
    "grouped queries": (97, 97, 2, 8, 2, 16),
    "keys from before": (37, 301, 1, 8, 4, 16),
    "one query": (1, 77, 3, 8, 8, 16),
}


def make(case, dtype, device="cpu"):
    queries, keys, _, heads, *_ = CASES[case]
    generator = torch.Generator().manual_seed(queries * keys)
    qkv = random_qkv(CASES[case], generator, dtype, device)
    return qkv, {"slopes": alibi_slopes(heads).to(device)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients(case, dtype):
    qkv, arguments = make(case, dtype)
    assert_exact(attention, qkv, arguments, dtype, backend="folded")


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_chunks(dtype, monkeypatch):
    """Chunks of 64: outputs and gradients as good as with one, also with keys from before.

    A negative scale is that of negated queries.
    """

    def negated(q, k, v, **arguments):
        return attention(-q, k, v, scale=-(q.shape[3] ** -0.5), **arguments)

    monkeypatch.setattr(folded, "QUERY_CHUNK", 64)
    for case in ("one chunk", "keys from before", "grouped queries"):
        qkv, arguments = make(case, dtype)
        assert_exact(negated, qkv, arguments, dtype, backend="folded")


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_end_of_sixteen_times_the_training_length(dtype):
    """The last chunk of 16,384 keys: no worse than an fp32 bias, for steep and shallow heads."""
    keys, queries, heads, width = 16_384, 256, 4, 64
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(queries, 1, heads, width, generator=generator).to(dtype)
    k, v = (torch.randn(keys, 1, heads, width, generator=generator).to(dtype) for _ in range(2))
    slopes = torch.tensor([2**-0.5, 0.1, 0.0131, 2**-8])
    exact = attention_reference(q, k, v, slopes=slopes)
    masked = attention(q, k, v, slopes=slopes, backend="sdpa").double()
    ours = attention(q, k, v, slopes=slopes, backend="folded").double()
    for head in range(heads):
        error, unfolded = ((x - exact)[:, :, head].square().mean().sqrt() for x in (ours, masked))
        assert error <= 1.05 * unfolded, f"head {head}: {error:.3g}, with a mask {unfolded:.3g}"


def test_torch_s_unfused_path_is_never_taken():
    """It would round scores to the dtype of q. Without the fused path there is an error instead."""
    qkv, arguments = make("one chunk", torch.float16)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match=r"[Nn]o viable backend"):
        attention(*qkv, backend="folded", **arguments)
    assert torch.backends.cuda.math_sdp_enabled()


def test_columns_are_made_once_and_follow_the_slopes():
    qkv, arguments = make("one chunk", torch.float16)
    slopes = arguments["slopes"]
    first = folded._cached_query_columns(slopes, 0.25, torch.float16)
    assert folded._cached_query_columns(slopes, 0.25, torch.float16) is first
    slopes.mul_(0.5)
    again = folded._cached_query_columns(slopes, 0.25, torch.float16)
    assert torch.equal(again[:, 0], first[:, 0] / 2)
    # Made in inference mode, as an evaluation would, they serve training, too.
    with torch.inference_mode():
        fixed = torch.full((8,), 0.3)
        attention(*(x.detach()[:40] for x in qkv), slopes=slopes, backend="folded")
        attention(*(x.detach()[:40] for x in qkv), slopes=fixed, backend="folded")
    for used in (slopes, fixed):
        out = attention(*(x[:40] for x in qkv), slopes=used, backend="folded")
        torch.autograd.grad(out.sum(), qkv)


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_cuda_outputs_and_gradients(case, dtype, kernel, monkeypatch):
    """The memory-efficient kernel is the one of a V100, and runs on newer GPUs, too."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0) and (dtype == torch.bfloat16 or kernel == "FLASH_ATTENTION"):
        pytest.skip("this GPU has neither bf16 nor a flash kernel")
    narrow = kernel == "EFFICIENT_ATTENTION"
    monkeypatch.setattr(folded, "_takes_narrow_values", lambda q: narrow)
    if narrow:
        # This kernel cannot share keys among heads, which are therefore repeated for a V100.
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    qkv, arguments = make(case, dtype, "cuda")
    bias = ScoreBias(arguments["slopes"], None, 128, True)

    def attend(q, k, v, slopes):
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return folded.attention_folded(q, k, v, bias, None, 0.0)

    assert_exact(attend, qkv, arguments, dtype)

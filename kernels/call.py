"""The description of an attention call, on which the choice of a backend depends.

It holds no tensors and queries no GPU, so the choice for any GPU can be tested without one.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# ---- bias ----
# The bias that is added to attention scores: ALiBi slopes, T5's relative buckets, or nothing; or a
# function that turns scores into other scores.
#
# A distance is the position of the query minus the position of the key.
# Shape suffixes: B batch, H query heads of this rank, Q queries, K keys, D width of a head.


class ScoreFunction(NamedTuple):
    """A function of the scores, for a method whose bias is neither slopes nor a table."""

    formula: Callable[..., Tensor]
    """(the arguments of a call, *tensors) -> scores, differentiable in all tensors."""
    tensors: tuple[Tensor, ...]
    """The tensors for the formula, with the heads as axis 0, in the dtype of the scores."""
    window: int | None = None
    """A query sees only keys at distances below this, on either side; None: at any distance."""

    def of_heads(self, heads: slice) -> ScoreFunction:
        """Return the function for some of its heads."""
        return self._replace(tensors=tuple(x[heads] for x in self.tensors))

    def __call__(
        self, scores_BHQK: Tensor, q_BHQD: Tensor, k_BHKD: Tensor, queries: Tensor, keys: Tensor
    ) -> Tensor:
        """Return the scores for the softmax, [B, H, Q, K].

        The kernel masks hidden keys afterwards. The results for these must also be finite, or -inf,
        with finite gradients.

        Args:
            scores_BHQK: Products of queries and keys times their scale, fp32, or fp64 for fp64 q.
            q_BHQD: Queries, without the scale, in the same dtype.
            k_BHKD: Keys, one for each query head.
            queries: Positions of the queries, consecutive, int64 [Q].
            keys: Positions of the keys, consecutive, int64 [K].
        """
        tensors = (x.to(scores_BHQK.dtype) for x in self.tensors)
        return self.formula(scores_BHQK, q_BHQD, k_BHKD, queries, keys, *tensors)


def by_distance(
    formula: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    combine: Callable[[Tensor, Tensor], Tensor] = torch.add,
) -> ScoreFunction:
    """Return a function that changes scores by a number that depends on head and distance.

    Args:
        formula: (distances, float [N], *tensors) -> the number of each head, [H, N].
        tensors: The tensors for the formula, with the heads as axis 0.
        combine: (scores [B, H, Q, K], numbers [H, Q, K]) -> scores.
    """

    def changed(
        scores_BHQK: Tensor, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, *own: Tensor
    ) -> Tensor:
        # Compute each distance once. With the keys in reverse order, the row of query r is entries
        # r .. r + K - 1.
        length = len(queries) + len(keys) - 1
        distances = torch.arange(length, device=keys.device) + (queries[0] - keys[-1])
        numbers = formula(distances.to(scores_BHQK.dtype), *own).to(scores_BHQK.dtype)
        return combine(scores_BHQK, numbers.unfold(-1, len(keys), 1).flip(-1))

    return ScoreFunction(changed, tensors)


def products_at(q_BHQD: Tensor, rows_HND: Tensor, index_QK: Tensor) -> Tensor:
    """Return the product of each query with a row of its head that each key selects by an index.

    Args:
        q_BHQD: Queries.
        rows_HND: N rows of each head.
        index_QK: int64 in [0, N).

    Returns:
        [B, H, Q, K].
    """
    products_BHQN = q_BHQD @ rows_HND.mT
    return products_BHQN.gather(-1, index_QK.expand(*products_BHQN.shape[:3], -1))


def of_heads(terms: Mapping[str, Any], heads: slice) -> dict[str, Any]:
    """Return a position method's keyword arguments of `attention` for some of the heads."""
    return {
        name: term[heads]
        if isinstance(term, Tensor)
        else term.of_heads(heads)
        if hasattr(term, "of_heads")
        else term
        for name, term in terms.items()
    }


class ScoreBias(NamedTuple):
    """The bias for the scores of this rank's H heads: slopes, a table, a function, or none."""

    slopes: Tensor | None
    """ALiBi: [H], fp32."""
    table: Tensor | None
    """T5: [H, num_buckets]."""
    max_distance: int
    """T5: the distance at which the last bucket begins."""
    causal: bool
    scores: ScoreFunction | None = None
    """For any other method. `at` does not cover it."""

    def at(self, distances: Tensor) -> Tensor:
        """Return the bias of every head at the given distances, differentiable in slopes and table.

        The result is fp32 whatever the dtype of q, because in bf16 the biases of neighboring keys
        far from the query would round to the same number.

        Args:
            distances: [N], integers.

        Returns:
            [H, N], fp32; zeros [1, N] if there is no bias.
        """
        if self.slopes is not None:
            return -self.slopes[:, None] * distances.abs()
        if self.table is not None:
            buckets = relative_buckets(
                distances, self.table.shape[1], self.max_distance, self.causal
            )
            return self.table.float()[:, buckets]
        return torch.zeros(1, len(distances), device=distances.device)


def relative_buckets(
    distances: Tensor, num_buckets: int, max_distance: int, causal: bool
) -> Tensor:
    """Return the bucket of every distance.

    The rule is that of Raffel et al. 2020, section 2.1: the first half of the buckets hold one
    distance each; the others hold ranges that grow logarithmically up to `max_distance`, where the
    last one begins. Without a causal mask, half of all buckets are for keys after the query. The
    arithmetic is that of `T5Attention._relative_position_bucket` in transformers.

    Args:
        distances: Integers of any shape. Negative ones count as 0 under a causal mask.
        num_buckets: Number of buckets.
        max_distance: Distance at which the last bucket begins.
        causal: Attention is causal.

    Returns:
        int64 in [0, num_buckets), in the shape of `distances`.

    Raises:
        ValueError: There are too few buckets, or `max_distance` is within the exact half.
    """
    each_side = num_buckets if causal else num_buckets // 2
    exact = each_side // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"{num_buckets} relative attention buckets with max distance {max_distance}: expected "
            f"at least {2 if causal else 4} buckets, and a distance above {exact}, the number of "
            "buckets that hold one distance each"
        )
    future = 0 if causal else (distances < 0).long() * each_side
    distances = distances.clamp(min=0) if causal else distances.abs()
    octaves = torch.log(distances.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    coarse = (exact + (octaves * (each_side - exact)).long()).clamp(max=each_side - 1)
    return future + torch.where(distances < exact, distances, coarse)


NO_DOCUMENTS = "it has no mask by document"
"""The reason of the backends that cannot keep a query within its own document."""


class Call(NamedTuple):
    """The properties of an attention call on which the choice of a backend depends."""

    dtype: torch.dtype
    head_dim: int
    num_keys: int
    heads: int
    groups: int
    """Key heads."""
    bias: Literal["none", "slopes", "trained slopes", "table", "scores"]
    """What is added to the scores. "trained slopes" need a gradient; "scores" is a function."""
    causal: bool
    dropout: bool
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None on a CPU."""
    has_triton: bool
    """The package triton is installed."""
    documents: bool = False
    """Queries see no key before the start of their own document."""

    @property
    def is_cuda(self) -> bool:
        return self.capability is not None

    @property
    def dtype_name(self) -> str:
        """Return the name of the dtype as in configs, such as bf16."""
        return str(self.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")

    def older_than(self, major: int, minor: int) -> bool:
        """Return True on a GPU of a compute capability below major.minor."""
        return self.capability is not None and self.capability < (major, minor)


def describe_call(
    q_SBHD: Tensor, k_SBGD: Tensor, bias: ScoreBias, dropout_p: float, documents: bool = False
) -> Call:
    """Return the description of an attention call.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D].
        bias: Score bias and causality.
        dropout_p: Probability that a weight is dropped.
        documents: Queries see no key before the start of their own document.
    """
    capability = torch.cuda.get_device_capability(q_SBHD.device) if q_SBHD.is_cuda else None
    return Call(
        dtype=q_SBHD.dtype,
        head_dim=q_SBHD.shape[3],
        num_keys=k_SBGD.shape[0],
        heads=q_SBHD.shape[2],
        groups=k_SBGD.shape[2],
        bias=_kind(bias),
        causal=bias.causal,
        dropout=dropout_p > 0,
        capability=capability,
        has_triton=has_triton(),
        documents=documents,
    )


def _kind(bias: ScoreBias) -> Literal["none", "slopes", "trained slopes", "table", "scores"]:
    if bias.scores is not None:
        return "scores"
    if bias.table is not None:
        return "table"
    if bias.slopes is None:
        return "none"
    return "trained slopes" if bias.slopes.requires_grad else "slopes"


@cache
def has_triton() -> bool:
    """Return True if the package triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None

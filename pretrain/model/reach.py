"""How far back each head of a model with slopes can see: a certificate from the weights alone.

A head's bias is -slope * distance, and the weights limit the length of every query and key, because
their inputs are normalized. There is therefore a distance beyond which keys get no attention weight
that matters, whatever the text. docs/reach.md has the theorem and its proof; this file computes it.

**The gap.** Let u be a normalized row without gain and bias: its numbers sum to 0, and |u|^2 <= d
for d channels. With the gain and bias of the norm and those of the projection,

    q_i = A u_i + a    k_j = B u_j + b    A, B = W diag(gain) (I - 11'/d)

A row always sees its own key, so the weight of a key at a distance t is at most
exp(gap - slope * t), where gap is the largest scale * q_i . (k_j - k_i); b cancels. The best u_j
gives, for every tau > 0,

    q_i . B u_j <= sqrt(d) |B' q_i| <= (tau d + |B' q_i|^2 / tau) / 2

What remains is a quadratic function of u_i on a ball: at most (d + c^2) times the largest
eigenvalue of its matrix for (u_i, c), for every c > 0. Each tau and c give a bound. Without a, the
best tau gives the largest gap itself, since the joint range of two quadratic forms is convex
(Brickman 1961). An RMSNorm subtracts no mean, so A and B are W diag(gain). Layer 0 sees rows of an
embedding. These are compared pair by pair, except for pairs whose norms already rule them out. If
queries and keys are normalized themselves, with gains g and h and the query norm's bias b, W does
not matter: over D channels the gap is at most 2 sqrt(D) (sqrt(D) max |g h| + |h b|).

**Rounding.** rho is the unit roundoff of the model's data type. Moments of the norm are fp32, its
result is rounded to the data type, products are summed in fp32 and rounded, and so is the sum with
a bias. With R = W diag(gain), and abs of a matrix element by element, |q' - q| is at most

    E_q = (NORM_ERROR + rho) sqrt(d) |R| + rho |abs(W) abs(norm bias)|
          + d 2^-24 (sqrt(d) |abs(R)| + |abs(W) abs(norm bias)|)
          + rho (2 sqrt(d) |A| + 2 |W norm bias| + |bias|)

and the gap grows by E_q 2 sqrt(d) |B| + 2 |q'| E_k, and by the rounding of scores in fp32, at most
(D + 8) 2^-24 |q'| |k'| for each of the two.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn.functional import pad

from pretrain.config import ConfigError, RunConfig
from pretrain.kernels.reach import ABSOLUTE_SLACK, NEEDED, RELATIVE_SLACK, key_windows

NORM_ERROR = 2.0**-11
"""Error of a normalized row relative to sqrt(d) because its moments are fp32, for rows whose
numbers are at most 1,024 times sqrt(variance + epsilon)."""
PAIRS = 2**34
"""Limit on the products for comparing pairs of tokens in a head; norms bound the other pairs."""
ROWS = 256
"""Tokens that are compared with all others at once."""
SEARCH_WIDTH = 1 / 300
"""Tolerance of the search for the best tau or c, as a share of the interval. Every tau and c give a
bound; of random weights this one is within 3e-6 of what a finer search finds."""
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Unit roundoff of the data types of train.precision."""


def certificates(
    config: RunConfig,
    chunk: GPTModel,
    num_keys: int,
    done: Callable[[], object] = lambda: None,
) -> Tensor:
    """Return how far back each head can see, whatever the text.

    Valid for the model in evaluation (dropout could lengthen a row of layer 0) and for finite
    queries and keys. Collective over tensor-parallel ranks.

    Args:
        config: The run.
        chunk: A chunk of its model on this rank, with weights.
        num_keys: Largest number of keys in a row.
        done: Called after each layer.

    Returns:
        fp64 [layers of the chunk, heads of this rank], on the CPU: in every row, the weights of all
        keys farther away than this many tokens sum to less than 2^-24. Infinite for a head whose
        slope is not positive, and in layers without slopes.
    """
    tokens = _normalized_vocabulary(chunk)
    clip = math.inf if config.model.clip_qkv is None else config.model.clip_qkv
    device, heads = next(chunk.parameters()).device, chunk.position.heads
    found = torch.full((len(chunk.decoder.layers), heads.stop - heads.start), math.inf).double()
    for number, layer in enumerate(chunk.decoder.layers):
        slopes = layer.self_attention.core_attention.slopes(device)
        if slopes is not None:
            gap = _gaps(layer, clip, None if number else tokens)
            slopes = slopes.detach().double().cpu()
            found[number] = reach_of(gap, slopes, num_keys, two_sided=config.is_masked)
        done()
    return found


def check_reach(config: RunConfig) -> None:
    """Check that the heads of a model have a limited reach.

    Raises:
        ConfigError: The position method has no slopes.
    """
    if config.position.bias != "slopes" or config.position.rope() is not None:
        raise ConfigError(
            f"position.method = {config.position.method}: no limited reach is computed for "
            "it, only for a bias with slopes, like ALiBi's, in all layers"
        )


def slopes_of(chunk: GPTModel) -> Tensor:
    """Return the slopes of this rank's heads, fp64 [layers, H] on the CPU; see `check_reach`."""
    device = next(chunk.parameters()).device
    found = [layer.self_attention.core_attention.slopes(device) for layer in chunk.decoder.layers]
    return torch.stack(found).detach().double().cpu()


def reach_of(gap: Tensor, slopes: Tensor, num_keys: int, two_sided: bool) -> Tensor:
    """Return the distance beyond which all weights of a row sum to less than 2^-24.

    Args:
        gap: Largest excess of a score over that of the row's own key, without bias, fp64 [..., H].
        slopes: fp64 [H].
        num_keys: Largest number of keys in a row.
        two_sided: Keys lie on both sides of the query.
    """
    steep = slopes.clamp(min=1e-300)
    # The sum over all distances from t on is exp(-slope t) / (1 - exp(-slope)), on each side.
    tail = -(-torch.expm1(-steep)).log() + (math.log(2) if two_sided else 0)
    needed = NEEDED + ABSOLUTE_SLACK + tail.clamp(max=math.log(num_keys))
    reach = (gap + needed) / (steep * (1 - RELATIVE_SLACK))
    return torch.where((slopes > 0) & reach.isfinite(), reach, torch.inf)


class Seen(NamedTuple):
    """Reaches of a chunk's heads on one text, fp64 [layers, H] each, in tokens."""

    farthest: Tensor
    """The running bound of `pretrain.kernels.reach` for the query that reaches farthest."""
    mean: Tensor
    """The mean of that bound over all queries."""
    measured: Tensor
    """The distance beyond which the weights of every row sum to less than 2^-24."""


@torch.no_grad()
def seen(config: RunConfig, chunk: GPTModel, ids: Tensor, done: Callable[[], object]) -> Seen:
    """Pass a text through an unsharded model, and return how far its heads see.

    The attention weights are computed densely in fp64, from the model's own queries and keys.

    Args:
        config: The run.
        chunk: The whole model, in evaluation.
        ids: Token ids, int64 [S].
        done: Called after each layer.
    """
    of_layers = slopes_of(chunk)
    found: list[Seen] = []

    def look(core: Any, arguments: tuple[Any, ...]) -> None:
        (query, key, value), slopes = arguments[:3], of_layers[len(found)]
        key, value = (x.repeat_interleave(len(slopes) // x.shape[2], 2) for x in (key, value))
        scale = query.shape[3] ** -0.5
        found.append(_seen(query, key, value, slopes, scale, config.is_masked))
        done()

    cores = [layer.self_attention.core_attention for layer in chunk.decoder.layers]
    with contextlib.ExitStack() as hooks:
        for core in cores:
            hooks.enter_context(core.register_forward_pre_hook(look))
        chunk(ids[None], torch.arange(len(ids), device=ids.device)[None], None)
    return Seen(*map(torch.stack, zip(*found)))


def _seen(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float, two_sided: bool) -> Seen:
    """Return how far the heads of one layer see, fp64 [H] each; q, k and v are [S, 1, H, D]."""
    position = torch.arange(len(q), device=q.device)
    own = slopes.to(q.device)
    windows = key_windows(q, k, v, own, scale, not two_sided, queries=1, tile=1, gradients=False)
    first, end = (keys.flip(1) for keys in windows)
    distance = (position - first).maximum(end - 1 - position)
    farthest = torch.where(slopes > 0, distance.amax(1).double().cpu(), torch.inf)
    measured = []
    for head, slope in enumerate(own):
        query, key = q[:, 0, head].double(), k[:, 0, head].double()
        counts = [
            _far_rows(query[rows], key, rows, slope, scale, two_sided)
            for rows in torch.split(position, ROWS)
        ]
        measured.append(max(counts))
    return Seen(farthest, distance.double().mean(1).cpu(), torch.tensor(measured).double())


def _far_rows(
    q: Tensor, k: Tensor, rows: Tensor, slope: Tensor, scale: float, two_sided: bool
) -> int:
    """Return the distance beyond which weights sum to < 2^-24 in every row of queries [n, D]."""
    if not two_sided:
        k = k[: int(rows[-1]) + 1]
    column = torch.arange(len(k), device=k.device)
    apart = rows[:, None] - column
    scores = scale * q @ k.T - slope * apart.abs()
    if not two_sided:
        weights = scores.masked_fill_(apart < 0, -math.inf).softmax(1)
        # Count the farthest keys whose weights together are still too small to matter.
        too_far = (weights.cumsum(1) < math.exp(-NEEDED)).sum(1)
        return int((rows - too_far).max())
    weights = scores.softmax(1)
    before = pad(weights.cumsum(1), (1, 0)).gather(1, apart.clamp(min=0))
    after = pad(weights.flip(1).cumsum(1).flip(1), (0, 1))
    beyond = before + after.gather(1, (rows[:, None] + column + 1).clamp(max=len(k)))
    return int((beyond >= math.exp(-NEEDED)).sum(1).max())


# ---- The largest gap of a head -------------------------------------------------------------------
@dataclass(frozen=True)
class _Projection:
    """The map from a normalized row to a head's queries or keys, in fp64."""

    weight: Tensor
    """W diag(gain), [D, d]."""
    spread: Tensor
    """A or B: the weight, restricted to rows that sum to 0 if the norm subtracts the mean."""
    offset: Tensor
    """Output for a row of zeros, [D]: W (bias of the norm) + bias of the projection."""
    radius: float
    """Largest 2-norm of the output of `spread`: sqrt(d) |spread|."""
    error: float
    """Largest 2-norm of computed - exact output."""

    @property
    def longest(self) -> float:
        """Largest 2-norm of the computed output."""
        return self.radius + float(self.offset.norm()) + self.error

    @property
    def largest(self) -> float:
        """Largest absolute value in the computed output."""
        rows = math.sqrt(self.weight.shape[1]) * self.spread.norm(dim=1) + self.offset.abs()
        return float(rows.max()) + self.error


def _gaps(layer: Any, clip: float, tokens: Tensor | None) -> Tensor:
    """Return the largest gap of each head of a layer, fp64 [H].

    Args:
        layer: Megatron's transformer layer.
        clip: model.clip_qkv; infinite if it is not set.
        tokens: All rows that the layer can see, normalized, fp64 [V, d]; None if not known.
    """
    attention, norm = layer.self_attention, layer.input_layernorm
    heads, width = (
        attention.num_attention_heads_per_partition,
        attention.hidden_size_per_attention_head,
    )
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        return torch.full((heads,), torch.inf, dtype=torch.float64)
    scale = 1 / math.sqrt(width)
    # In each group: its query heads, then its key and its value.
    groups = attention.num_query_groups_per_partition
    shape = (groups, heads // groups + 2, width)
    linear = attention.linear_qkv
    weight = _double(linear.weight).view(*shape, -1)
    bias = torch.zeros(shape).double() if linear.bias is None else _double(linear.bias).view(shape)
    unit = UNIT[linear.weight.dtype]
    if attention.config.qk_layernorm:
        gap = _gap_of_norms(attention.q_layernorm, attention.k_layernorm, unit)
        return torch.full((heads,), scale * gap, dtype=torch.float64)
    gaps = []
    for group in range(groups):
        *queries, key = (
            _projection(weight[group, i], bias[group, i], norm, unit) for i in range(shape[1] - 1)
        )
        gaps += [scale * _gap(query, key, clip, tokens) for query in queries]
    return torch.tensor(gaps, dtype=torch.float64)


def _projection(
    weight: Tensor, bias: Tensor, norm: nn.LayerNorm | nn.RMSNorm, unit: float
) -> _Projection:
    """Return the map of a norm followed by one head's part [D, d] of the projection."""
    whole = weight * _double(norm.weight)
    d = whole.shape[1]
    shift, spread = torch.zeros(d).double(), whole
    if isinstance(norm, nn.LayerNorm):
        shift = shift if norm.bias is None else _double(norm.bias)
        spread = whole - whole.mean(1, keepdim=True)
    constant = float((weight.abs() @ shift.abs()).norm())
    offset = weight @ shift
    radius = math.sqrt(d) * _norm(spread)
    error = (
        (NORM_ERROR + unit) * math.sqrt(d) * _norm(whole)
        + unit * constant
        + d * 2.0**-24 * (math.sqrt(d) * _norm(whole.abs()) + constant)
        + unit * (2 * radius + 2 * float(offset.norm()) + float(bias.norm()))
    )
    return _Projection(whole, spread, offset + bias, radius, error)


def _gap(query: _Projection, key: _Projection, clip: float, tokens: Tensor | None) -> float:
    """Return a bound on q_i . (k_j - k_i) that includes rounding."""
    q, apart, rounding = _rounding(query, key, clip)
    if max(query.largest, key.largest) > clip:
        exact = q * apart
    elif tokens is None:
        exact = _gap_on_ball(query, key)
    else:
        exact = _gap_of_tokens(tokens @ query.weight.T + query.offset, tokens @ key.weight.T)
    return exact + rounding


def _rounding(query: _Projection, key: _Projection, clip: float) -> tuple[float, float, float]:
    """Return the largest |q_i| and |k_j - k_i|, and the effect of rounding on a gap."""
    width = len(query.offset)
    q, k = (min(each.longest, clip * math.sqrt(width)) for each in (query, key))
    apart = min(2 * (key.radius + key.error), 2 * k)
    rounding = query.error * apart + 2 * q * key.error + 2 * (width + 8) * 2.0**-24 * q * k
    return q, apart, rounding


def _gap_of_norms(query: Any, key: Any, unit: float) -> float:
    """Return the largest gap of queries and keys that are normalized themselves."""
    width = len(query.weight)
    as_it_is, nothing = torch.eye(width).double(), torch.zeros(width).double()
    q, k = (_projection(as_it_is, nothing, norm, unit) for norm in (query, key))
    root, gain = math.sqrt(width), k.weight.diagonal()
    most = root * float((q.weight.diagonal() * gain).abs().max())
    return 2 * root * (most + float((gain * q.offset).norm())) + _rounding(q, k, math.inf)[2]


def _gap_on_ball(query: _Projection, key: _Projection) -> float:
    """Return a bound on the gap of any rows of 2-norm sqrt(d), the length of normalized rows."""
    radius = math.sqrt(query.weight.shape[1])
    # Change to coordinates of the subspace that the two maps depend on.
    _, both = torch.linalg.qr(torch.cat([query.spread, key.spread]).T)
    a, b = both[:, : len(query.offset)].T, both[:, len(query.offset) :].T
    offset = query.offset[:, None]
    has_offset = bool(offset.any())

    def bound(log_tau: float, log_c: float) -> float:
        c = radius * math.exp(log_c)
        left = torch.cat([a, offset / c], 1) if has_offset else a
        right = torch.cat([b, torch.zeros_like(offset)], 1) if has_offset else b
        tau = scale * math.exp(log_tau)
        reached, own = b.T @ left, left.T @ right
        matrix = reached.T @ reached / (2 * tau) - (own + own.T) / 2
        top = max(float(torch.linalg.eigvalsh(matrix)[-1]), 0.0)
        return tau * radius**2 / 2 + (radius**2 + (c**2 if has_offset else 0)) * top

    scale = _norm(b.T @ a) + float((b.T @ offset).norm()) / radius
    if not scale:
        return 0.0
    log_tau = log_c = 0.0
    best = math.inf
    for _ in range(2 if has_offset else 1):
        log_tau, value = _least(lambda x: bound(x, log_c), -2.5, 0.2)  # noqa: B023
        best = min(best, value)
        if has_offset:
            log_c, value = _least(lambda x: bound(log_tau, x), -4.0, 4.0)  # noqa: B023
            best = min(best, value)
    return best


def _least(function: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Return where a unimodal function is smallest, and its value."""
    # Here, because importing it takes time that a run does not need to spend.
    from scipy.optimize import minimize_scalar

    options = {"xatol": SEARCH_WIDTH * (high - low)}
    found = minimize_scalar(function, bounds=(low, high), method="bounded", options=options)
    return float(found.x), float(found.fun)


def _gap_of_tokens(q: Tensor, k: Tensor) -> float:
    """Return the largest q_i . (k_j - k_i) of tokens i and j, or a bound after PAIRS products.

    Args:
        q: Queries, fp64 [V, D].
        k: Keys, fp64 [V, D].
    """
    middle = k.mean(0)
    own = (q * k).sum(1)
    most = q @ middle + q.norm(dim=1) * (k - middle).norm(dim=1).max() - own
    most, order = most.sort(descending=True)
    best = 0.0
    for number, rows in enumerate(order.split(ROWS)):
        first = number * ROWS
        if most[first] <= best or first * k.numel() > PAIRS:
            return max(best, float(most[first]))
        best = max(best, float(((q[rows] @ k.T).amax(1) - own[rows]).max()))
    return best


def _normalized_vocabulary(chunk: GPTModel) -> Tensor | None:
    """Return the normalized input of layer 0's attention for every token, fp64 [V, d].

    None if the inputs of the chunk are not rows of an embedding. Collective over tensor ranks.
    """
    position = chunk.position
    if not chunk.pre_process or position.method.adds_to_embeddings(position.config):
        return None
    words = chunk.embedding.word_embeddings
    # The rows of adaptive inputs are products, whose rounding differs between batches.
    if not isinstance(words, VocabParallelEmbedding) or not len(chunk.decoder.layers):
        return None
    device = words.weight.device
    with torch.no_grad():
        rows = words(torch.arange(words.num_embeddings, device=device)[None])
        if words.reduce_scatter_embeddings:
            rows = tensor_parallel.gather_from_sequence_parallel_region(rows).transpose(0, 1)
    norm = chunk.decoder.layers[0].input_layernorm
    of_class = (
        nn.functional.layer_norm if isinstance(norm, nn.LayerNorm) else nn.functional.rms_norm
    )
    normalized = _double(rows[0])
    # Part by part: in fp64 a large vocabulary takes gigabytes.
    for part in torch.split(normalized, 2**13):
        part.copy_(of_class(part, part.shape[1:], eps=norm.eps))
    return normalized


def _double(x: Tensor) -> Tensor:
    """Return a tensor in fp64 on the CPU."""
    return x.detach().cpu().double()


def _norm(x: Tensor) -> float:
    """Return the spectral norm of a matrix with few rows."""
    return math.sqrt(max(float(torch.linalg.eigvalsh(x @ x.T)[-1]), 0.0))

"""The certificate of a model's reach, against rows that are made to break it, weighed in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.config import RunConfig
from pretrain.model.reach import certificates, seen, slopes_of
from tests.conftest import tiny_config
from tests.distributed.tasks import _build_model_with, in_fp16_on_cpu
from tests.reference.dense_gpt import random_state

NEVER = 2.0**-24
# The largest ratio of the certificate and what is found; it includes what rounding may add.
LOOSE = {"fp32": 1.02, "fp16": 1.03, "bf16": 1.07}
# In layer 0, where few tokens exist: the best row still sees some of what is near.
LOOSE_OF_TOKENS = 1.3
# Of heads with norms of their own: the projections need not reach the worst direction. In layer 0
# they are bounded as if any row could be there.
LOOSE_OF_NORMS = 1.4
HEADS = (0, 3)
"""Heads share one formula. Of two that share keys, a first and a second; 3 is one without slope."""
MODELS = {
    "biases": {},
    "grouped": {"model": {"num_query_groups": 4, "use_bias": False}},
    "trained": {"position": {"trainable_slopes": True}, "model": {"embedding_layernorm": True}},
    "masked": {"train": {"objective": "masked"}, "model": {"normalization": "rmsnorm"}},
    "normalized heads": {"model": {"normalization": "rmsnorm", "qk_layernorm": True}},
    "layernorms of heads": {"model": {"qk_layernorm": True, "num_query_groups": 4}},
    "fp16": {"train": {"precision": "fp16"}},
    "bf16": {"train": {"precision": "bf16"}, "model": {"use_bias": False}},
}


def weights(config: RunConfig) -> dict[str, Tensor]:
    """Random weights with norms that differ, biases that matter, and slopes that are no slopes."""
    state = random_state(config, seed=3)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in state.items():
        if name.endswith("linear_qkv.bias"):
            tensor.mul_(10)
        elif name.endswith(("input_layernorm.weight", "q_layernorm.weight", "q_layernorm.bias")):
            tensor.mul_(torch.empty_like(tensor).log_normal_(0, 0.5, generator=generator))
    if "position.slopes" in state:
        state["position.slopes"][2:4] = torch.tensor([0.0, -0.1])
    return state


@pytest.mark.parametrize("name", MODELS)
def test_no_row_sees_farther_and_some_row_sees_nearly_as_far(pools, name):
    config = tiny_config(**MODELS[name])
    task, arguments = (attack, ()) if name != "fp16" else (in_fp16_on_cpu, (attack,))
    (found,) = pools(1).run(task, *arguments, config, weights(config))
    for layer, slope, reach, own, near, far in found:
        loose = LOOSE[config.train.precision] if layer else LOOSE_OF_TOKENS
        if config.model.qk_layernorm:
            loose = LOOSE_OF_NORMS
        if slope <= 0:
            assert reach == math.inf
            continue
        sides = 2 if config.is_masked else 1
        # Up to the reach stand keys that are hardly seen, and from there on the best.
        distances = math.floor(reach), math.floor(reach / loose) - 2
        outside, inside = (mass(slope, d, own, near, far, sides) for d in distances)
        assert outside < NEVER
        assert inside > NEVER or (config.model.qk_layernorm and not layer)


def mass(slope: float, reach: int, own: float, near: float, far: float, sides: int) -> float:
    """The weights beyond a distance, of one row without end."""
    distance = torch.arange(1, reach + int(200 / slope), dtype=torch.float64)
    scores = torch.where(distance > reach, far, near) - slope * distance
    total = torch.cat([torch.tensor([own]).double(), *[scores] * sides]).logsumexp(0)
    return float(sides * (scores[reach:] - total).exp().sum())


def test_tensor_ranks_have_the_certificates_of_their_heads(pools):
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    config, split = (tiny_config(**MODELS["biases"], parallel=p) for p in ({}, parallel))
    state = weights(config)
    (whole,) = pools(1).run(reaches, config, state)
    parts = pools(2).run(reaches, split, state)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["grouped", "trained", "masked"])
def test_what_is_measured_on_a_text_is_the_mass_of_its_worst_row(pools, name):
    config = tiny_config(**MODELS[name])
    ids = torch.randint(0, 512, (100,), generator=torch.Generator().manual_seed(6))
    ((found, projections, reach, slopes),) = pools(1).run(look, config, weights(config), ids)
    distance = torch.arange(100)[:, None] - torch.arange(100)
    for layer, (query, key) in enumerate(projections):
        key = key.repeat_interleave(8 // key.shape[2], dim=2)
        scores = torch.einsum("qhd,khd->hqk", query[:, 0].double(), key[:, 0].double()) / 12**0.5
        scores = scores - slopes[layer][:, None, None] * distance.abs()
        if not config.is_masked:
            scores = scores.where(distance >= 0, -math.inf)
        weights_of = scores.softmax(2)
        for head, of_head in enumerate(weights_of):
            far = [of_head.where(distance.abs() > d, 0).sum(1).max() for d in range(100)]
            expected = sum(bool(mass >= NEVER) for mass in far)
            assert found.measured[layer, head] == expected
            # Both bounds hold for this text, and the mean is one of what it is a mean of.
            assert expected <= found.farthest[layer, head] and expected <= reach[layer, head]
            assert found.mean[layer, head] <= found.farthest[layer, head]


# ---- tasks of the ranks --------------------------------------------------------------------------
def reaches(config: RunConfig, state: dict[str, Tensor]) -> Tensor:
    _, (chunk,) = _build_model_with(config, state)
    return certificates(config, chunk, 10**9)


def look(config: RunConfig, state: dict[str, Tensor], ids: Tensor) -> Any:
    """What a model's heads see of a text, its queries and keys, certificates and slopes."""
    _, (chunk,) = _build_model_with(config, state)
    chunk.eval()
    # As a method may have it: other slopes in each layer.
    terms = chunk.position.score_terms
    chunk.position.score_terms = lambda *at: {"slopes": terms(*at)["slopes"] / (1 + at[1])}
    projections: list[Any] = []
    for layer in chunk.decoder.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(
            lambda _, arguments: projections.append([x.detach() for x in arguments[:2]])
        )
    found = seen(config, chunk, ids, lambda: None)
    return found, projections, certificates(config, chunk, 100), slopes_of(chunk)


def attack(config: RunConfig, state: dict[str, Tensor]) -> list[tuple[float, ...]]:
    """Look for the worst tokens of HEADS in layers 0 and 1.

    Returns:
        (layer, slope, certificate, and the scores of the own key, the least and the largest one).
    """
    _, (chunk,) = _build_model_with(config, state)
    chunk.eval()
    reach = certificates(config, chunk, 10**9)
    slopes = chunk.position.score_terms(torch.device("cpu"), 0)["slopes"].tolist()
    vocabulary = chunk.embedding.word_embeddings(torch.arange(512)[None]).detach()[0]
    # The weights that the model has, in fp64.
    state = {name: tensor.to(vocabulary.dtype).double() for name, tensor in state.items()}
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(16, 96, generator=generator).double() for _ in slopes]
    found = []
    for number in (0, 1):
        for head in HEADS:
            q, k = maps(config, state, number, head)
            if number:
                rows = worst_rows(q, k, starts[head])
            else:
                rows = worst_tokens(q, k, vocabulary.double())
            inputs = rows.to(vocabulary.dtype)[:, None]
            query, key = projected(chunk.decoder.layers[number], inputs)
            query, key = query.double()[0, 0, head], key.double()[:, 0, head * key.shape[2] // 8]
            own, near, far = (key @ query / math.sqrt(len(query))).tolist()
            found.append((number, slopes[head], float(reach[number, head]), own, near, far))
    return found


def maps(config: RunConfig, state: dict[str, Tensor], number: int, head: int) -> tuple[Any, Any]:
    """The functions from a layer's input to a head's query and key, in fp64."""
    p = {n.removeprefix(f"decoder.layers.{number}."): t for n, t in state.items()}
    groups = config.num_query_groups
    shared = 8 // groups
    weight = p["self_attention.linear_qkv.weight"].view(groups, shared + 2, 12, 96)
    bias = p.get("self_attention.linear_qkv.bias", torch.zeros(weight[..., 0].numel()).double())
    group, bias = head // shared, bias.view(weight.shape[:3])

    def normalized(x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in p:
            return x
        if config.model.normalization == "rmsnorm":
            return p[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        norm = p[f"{name}.weight"], p.get(f"{name}.bias")
        return torch.nn.functional.layer_norm(x, x.shape[-1:], *norm)

    def of(row: int, name: str) -> Any:
        def rows(x: Tensor) -> Tensor:
            inputs = normalized(x, "input_layernorm")
            return normalized(inputs @ weight[group, row].T + bias[group, row], name)

        return rows

    return of(head % shared, "self_attention.q_layernorm"), of(shared, "self_attention.k_layernorm")


def worst_tokens(q: Any, k: Any, words: Tensor) -> Tensor:
    """The token, the one it sees least, and the one that its head prefers most to itself."""
    scores = q(words) @ k(words).T
    token = int((scores.amax(1) - scores.diagonal()).argmax())
    return words[[token, int(scores[token].argmin()), int(scores[token].argmax())]]


def worst_rows(q: Any, k: Any, start: Tensor) -> Tensor:
    """The same of all rows that there are, by ascent from several."""
    x = [start.clone().requires_grad_(), start.flip(0).clone().requires_grad_()]
    ascent = torch.optim.Adam(x, lr=0.1)
    for step in range(200):
        gap = (q(x[0]) * (k(x[1]) - k(x[0]))).sum(1)
        ascent.zero_grad()
        (-gap.sum()).backward()
        ascent.step()
        ascent.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
    best = int(gap.argmax())
    worst = x[1].detach()[best]
    return torch.stack([x[0].detach()[best], -worst, worst])


def projected(layer: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of a layer as it computes them, [S, B, heads, D] and [S, B, groups, D]."""
    seen: list[Any] = []
    hook = layer.self_attention.core_attention.register_forward_pre_hook(
        lambda _, arguments: seen.append(arguments[:2])
    )
    with torch.no_grad():
        layer(inputs, None, None)
    hook.remove()
    return seen[0]

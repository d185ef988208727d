"""Test the dense reference against computations by hand and against Hugging Face's T5."""

from __future__ import annotations

import math

import pytest
import torch

from pretrain.config import RunConfig, num_parameters
from tests.conftest import tiny_config
from tests.reference.dense_gpt import (
    DenseGPT,
    alibi_slopes,
    random_state,
    rotate,
    sinusoids,
    t5_buckets,
    train_dense,
)


def make_config(method: str = "alibi", **changes: object) -> RunConfig:
    """Return the config of a two-layer model.

    `changes` go into [model], those named position_* into [position].
    """
    model = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 12,
        "ffn_hidden_size": None,
        "make_vocab_size_divisible_by": 32,
    }
    position: dict[str, object] = {"method": method}
    for key, value in changes.items():
        section = position if key.startswith("position_") else model
        section[key.removeprefix("position_")] = value
    data = {"vocab_size": 500, "sequence_length": 64}
    lengths = {"lengths": None}
    return tiny_config(model=model, position=position, data=data, evaluation=lengths)


CASES = {
    "alibi": {},
    "alibi_trainable": {"position_trainable_slopes": True},
    "sinusoidal": {},
    "rotary": {},
    "t5": {},
    "learned": {},
    "none": {},
    "grouped": {
        "num_query_groups": 4,
        "use_bias": False,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
    },
    "relu": {"hidden_act": "relu", "ffn_hidden_size": 80},
}


def case(name: str) -> RunConfig:
    method = name if name in ("sinusoidal", "rotary", "t5", "learned", "none") else "alibi"
    return make_config(method, **CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_causal_and_counted_like_the_config(name):
    config = case(name)
    model = DenseGPT(config)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config)
    ids = torch.randint(0, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 25] = (changed[:, 25] + 1) % 500
    with torch.no_grad():
        difference = (model(ids) - model(changed)).abs().amax(dim=(0, 2))
    assert torch.equal(difference[:25], torch.zeros(25))
    # Every later token sees the change.
    assert (difference[25:] > 1e-3).all()


def test_two_tokens_by_hand():
    """Compute the second token's logits in Python's arithmetic: one layer, one head, no biases."""
    config = make_config(
        "alibi",
        num_layers=1,
        hidden_size=2,
        num_attention_heads=1,
        ffn_hidden_size=1,
        use_bias=False,
        hidden_act="relu",
    )
    model = DenseGPT(config).double()
    p = {name: value.tolist() for name, value in model.named_parameters()}
    eps = config.model.layernorm_epsilon

    def norm(x, name):
        mean = sum(x) / 2
        deviation = math.sqrt(sum((v - mean) ** 2 for v in x) / 2 + eps)
        return [(v - mean) / deviation * w for v, w in zip(x, p[f"{name}.weight"])]

    def times(name, x):
        return [sum(a * b for a, b in zip(row, x)) for row in p[f"{name}.weight"]]

    layer = "decoder.layers.0"
    # Embeddings are multiplied by the square root of the width.
    x0, x1 = ([math.sqrt(2) * v for v in p["embedding.word_embeddings.weight"][i]] for i in (7, 11))
    fused = [
        times(f"{layer}.self_attention.linear_qkv", norm(x, f"{layer}.input_layernorm"))
        for x in (x0, x1)
    ]
    q1, keys, values = fused[1][:2], [f[2:4] for f in fused], [f[4:] for f in fused]
    # ALiBi's slope of a single head.
    slope = 2.0**-8
    scores = [
        sum(a * b for a, b in zip(q1, k)) / math.sqrt(2) - slope * d for k, d in zip(keys, (1, 0))
    ]
    weights = [math.exp(s) / sum(math.exp(t) for t in scores) for s in scores]
    mixed = [weights[0] * a + weights[1] * b for a, b in zip(*values)]
    x1 = [a + b for a, b in zip(x1, times(f"{layer}.self_attention.linear_proj", mixed))]
    inner = [
        max(0.0, v)
        for v in times(f"{layer}.mlp.linear_fc1", norm(x1, f"{layer}.pre_mlp_layernorm"))
    ]
    x1 = [a + b for a, b in zip(x1, times(f"{layer}.mlp.linear_fc2", inner))]
    logits = times("embedding.word_embeddings", norm(x1, "decoder.final_layernorm"))
    ours = model(torch.tensor([[7, 11]]))[0, 1]
    # Both sides compute in fp64: some tens of operations, each with a rounding error of 1e-16.
    torch.testing.assert_close(ours, torch.tensor(logits, dtype=torch.float64), rtol=0, atol=1e-13)


def test_slopes_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(16)[0] == 2**-0.5 and alibi_slopes(16)[-1] == 2**-8
    expected = [2.0**-k for k in range(1, 9)] + [2.0 ** -(k + 0.5) for k in range(4)]
    torch.testing.assert_close(
        alibi_slopes(12), torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0
    )


def test_rotary_scores_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, dtype=torch.float64, generator=generator)
    turned_q, turned_k = (rotate(x.expand(1, 1, 50, 16), 10_000) for x in (q, k))
    scores = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    for distance in (0, 1, 7, 30):
        diagonal = torch.diagonal(scores, -distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-13)
    # They do depend on the distance.
    assert (scores[:, 0].max() - scores[:, 0].min()) > 0.1
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(1, 1, 50), rtol=1e-13, atol=0)


@pytest.mark.parametrize("form", ["fairseq", "vaswani"])
def test_sinusoids_by_hand(form):
    table = sinusoids(5, 6, form)
    for position, k in ((0, 0), (3, 1), (4, 2)):
        angle = (position + 2) / 10_000 ** (k / 2)
        if form == "vaswani":
            angle = position / 10_000 ** (k / 3)
        expected = torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64)
        torch.testing.assert_close(table[position, [k, 3 + k]], expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 256), (8, 20), (64, 1000)]
)
def test_t5_buckets_equal_hugging_face(num_buckets, max_distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(0, 3000)
    theirs = T5Attention._relative_position_bucket(-distance, False, num_buckets, max_distance)
    assert torch.equal(t5_buckets(distance, num_buckets, max_distance), theirs)


def test_training_follows_the_recipe():
    """Check the first AdamW step, lr * g / (|g| + eps) plus the decay, tensor by tensor."""
    optimizer = {"learning_rate": 1e-3, "position_learning_rate_mult": 10.0}
    config = tiny_config(position={"method": "t5"}, optimizer=optimizer)
    state = random_state(config, 3)
    ids = torch.randint(0, 500, (4, 33), generator=torch.Generator().manual_seed(1))
    losses, norms, after = train_dense(config, state, [ids] * 3, [1e-3, 1e-3, 1e-3])
    model = DenseGPT(config).load_global_state(state)
    model.loss(ids).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert losses[0] == model.loss(ids).item() and losses[2] < losses[1] < losses[0]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
    # fp32 sums against fp64.
    assert norms[0] == pytest.approx(norm, rel=1e-5)
    _, _, once = train_dense(config, state, [ids], [1e-3])
    scale = min(1.0, config.optimizer.clip_grad / norm)
    for name, before in state.items():
        is_position = name.startswith("position.")
        matrix = before.ndim == 2 and not is_position
        decayed = before * (1 - 1e-3 * config.optimizer.weight_decay) if matrix else before
        g = gradients[name] * scale
        # The table has ten times the learning rate.
        expected = decayed - (1e-2 if is_position else 1e-3) * g / (
            g.abs() + config.optimizer.adam_eps
        )
        # Steps of 1e-3 in fp32.
        torch.testing.assert_close(once[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    assert any(not torch.equal(after[name], once[name]) for name in state)

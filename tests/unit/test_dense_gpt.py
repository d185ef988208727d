"""Test the dense reference against a computation by hand.

It is an oracle: where a formula of it is wrong, the model that it is compared with fails. The model
is compared with stock classes, too (test_export.py), and so are its slopes, buckets and sinusoids.
"""

from __future__ import annotations

import math

import torch

from pretrain.config import RunConfig
from tests.conftest import tiny_config
from tests.reference.dense_gpt import DenseGPT


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

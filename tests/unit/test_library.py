"""`import pretrain` is light and typed, and its functions agree with torch and transformers."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import pretrain
from pretrain.config import ConfigError


def test_every_name_is_there_costs_no_torch_and_is_hidden_by_no_room():
    code = (
        "import sys, pretrain; names = set(pretrain.__all__) - {'attention'}; "
        "[getattr(pretrain, name) for name in names]; assert names <= set(dir(pretrain)); "
        "assert 'torch' not in sys.modules; "
        # A submodule of a function's name would take its place in the package.
        "import inspect, pretrain.cli.commands, pretrain.training, pretrain.evaluation; "
        "sys.exit(not all(inspect.isfunction(getattr(pretrain, name)) "
        "for name in pretrain.__all__ if name[0].islower()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = pretrain.trane
    assert pretrain.__version__.count(".") == 2


@pytest.mark.parametrize("layout", ["BHSD", "SBHD"])
def test_attention_is_torchs_with_a_bias_by_distance(layout):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 10, 8, requires_grad=True) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    place = torch.arange(10)
    bias = -slopes[:, None, None] * (place[:, None] - place[None]).abs()
    bias = bias.masked_fill(place[None] > place[:, None], -math.inf)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    order = (0, 1, 2, 3) if layout == "BHSD" else (2, 0, 1, 3)
    back = (0, 1, 2, 3) if layout == "BHSD" else (1, 2, 0, 3)
    given = [x.permute(order) for x in (q, k, v)]
    found = pretrain.attention(*given, layout=layout, slopes=slopes).permute(back)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="BHSD and SBHD"):
        pretrain.attention(q, k, v, layout="BSHD")


@pytest.fixture(scope="module")
def stock() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=50, n_positions=128, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config).eval()


def test_a_hugging_face_model_is_scored_as_transformers_scores_it(stock):
    ids = torch.randint(50, (81,), generator=torch.Generator().manual_seed(2))
    records = pretrain.evaluate(stock, token_ids=ids, lengths=[16, 64], stride=16)
    assert [(r["protocol"], r["length"]) for r in records] == [
        ("nonoverlapping", 16),
        ("nonoverlapping", 64),
        ("sliding", 64),
    ]
    assert all(r["tokens"] == 80 for r in records)

    def stock_loss(start: int, end: int, scored: int) -> float:
        """The summed loss of the last `scored` targets of inputs [start, end)."""
        labels = ids[start : end + 1].clone()
        labels[: end + 1 - start - scored] = -100
        with torch.no_grad():
            return stock(ids[None, start : end + 1], labels=labels[None]).loss.item() * scored

    # A window reads `length` inputs and scores the token after each; transformers shifts itself.
    by_16 = sum(stock_loss(s, s + 16, 16) for s in range(0, 80, 16)) / 80
    first = stock_loss(0, 64, 64)
    expected = [by_16, (first + stock_loss(64, 80, 16)) / 80, (first + stock_loss(16, 80, 16)) / 80]
    assert [r["loss_nats"] for r in records] == pytest.approx(expected, abs=1e-5)
    assert records[0]["perplexity"] == pytest.approx(math.exp(by_16), rel=1e-5)
    assert records[0]["loss_low"] < by_16 < records[0]["loss_high"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lengths": [100]}, "length 100: the 80 tokens"),
        ({"lengths": [16], "protocols": ["masked"]}, "nonoverlapping or sliding"),
        ({}, "needs token_ids and lengths"),
    ],
)
def test_what_cannot_be_scored_is_refused(stock, given, says):
    with pytest.raises(ConfigError, match=says):
        pretrain.evaluate(stock, token_ids=torch.zeros(81, dtype=torch.long), **given)


def test_settings_are_values_or_words():
    path = "configs/demo.toml"
    given = {"train.num_steps": 700, "evaluation.lengths": [128, 256], "model.hidden_dropout": 0.1}
    words = ["train.num_steps=700", "evaluation.lengths=[128, 256]", "model.hidden_dropout=0.1"]
    assert pretrain.load_config(path, given) == pretrain.load_config(path, words)

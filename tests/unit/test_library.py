"""`import pretrain` is light and typed, and its functions agree with torch and transformers."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional

import pretrain


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


def test_settings_are_values_or_words():
    path = "configs/demo.toml"
    lengths = np.array([128, 256])
    given = {
        "train.num_steps": np.int32(700),
        "evaluation.lengths": lengths,
        "model.hidden_dropout": 0.1,
        "data.source": None,
        "position.slopes": {"factor": np.float64(0.5)},
    }
    words = ["train.num_steps=700", "evaluation.lengths=[128, 256]", "model.hidden_dropout=0.1"]
    words += ["data.source=", "position.slopes={factor = 0.5}"]
    assert pretrain.load_config(path, given) == pretrain.load_config(path, words)

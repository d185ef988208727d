"""`pretrain bench train` draws random tokens, which cost an adaptive softmax what words do."""

from __future__ import annotations

import torch

from pretrain.bench.training import random_batches
from pretrain.config import load_config


def first_tokens(*overrides: str) -> torch.Tensor:
    """Return the tokens of the first step of 4 x 200 x 129."""
    batch = ["batch.micro_batch_size=200", "batch.global_batch_size=800"]
    config = load_config("configs/demo.toml", [*batch, "data.vocab_size=20_000", *overrides])
    return torch.cat(next(random_batches(config, 4)))


def test_tokens_of_an_adaptive_softmax_are_as_frequent_as_words():
    """Zipf's law: the first n of V ids have about log(n + 1) / log(V + 1) of the tokens."""
    tokens = first_tokens("model.adaptive_cutoffs=[2000, 8000]")
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 20_000
    for ids, share in ((1, 0.070), (2000, 0.7675), (8000, 0.9075)):
        # 103,200 draws: a standard error of 0.0013.
        assert abs((tokens < ids).double().mean().item() - share) < 0.006, ids


def test_tokens_of_other_models_are_equally_frequent():
    tokens = first_tokens()
    assert abs((tokens < 2000).double().mean().item() - 0.1) < 0.006

"""Tasks of the generation tests, which run on every rank of a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.config import RunConfig
from pretrain.model.forward import Decoder, greedy
from tests.distributed.tasks import _build_model_with


def decode(config: RunConfig, state: dict[str, Tensor], tokens: Tensor, prompt: int) -> Any:
    """Feed `prompt` tokens at once, three more at once, and each of the others alone.

    Returns:
        Logits after each piece [pieces, B, V], the bytes of the cache, and logits at the same
        places of a second text through the same cache: the tokens in reverse.
    """
    _, (chunk,) = _build_model_with(config, state)
    chunk.train()
    decoder = Decoder(chunk, *tokens.shape)
    ends = [prompt, 3] + [1] * (tokens.shape[1] - prompt - 3)
    first = torch.stack([decoder.feed(piece) for piece in tokens.split(ends, dim=1)])
    decoder.reset()
    second = torch.stack([decoder.feed(piece) for piece in tokens.flip(1).split(ends, dim=1)])
    return first, decoder.allocated_bytes(), second


def generate(config: RunConfig, state: dict[str, Tensor], prompt: Tensor, count: int) -> Tensor:
    """Generate greedily."""
    _, (chunk,) = _build_model_with(config, state)
    decoder = Decoder(chunk, len(prompt), prompt.shape[1] + count)
    return greedy(decoder, prompt, count, config.data.vocab_size)


def overfill(config: RunConfig, state: dict[str, Tensor], tokens: Tensor) -> str:
    """Return what is said of more tokens than the cache has room for."""
    _, (chunk,) = _build_model_with(config, state)
    decoder = Decoder(chunk, len(tokens), tokens.shape[1])
    decoder.feed(tokens)
    try:
        decoder.feed(tokens[:, :1])
    except ValueError as error:
        return str(error)
    return ""

"""Compare generation with a cache against an independent dense GPT that sees all tokens at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import RunConfig
from pretrain.model.forward import Decoder
from tests.conftest import tiny_config
from tests.distributed.tasks import _build_model_with
from tests.distributed.test_parallel_equals_dense import METHODS, TOLERANCE, VARIANTS
from tests.distributed.test_parallel_equals_dense import variant_config as of_variant
from tests.reference.dense_gpt import DenseGPT, random_state

LENGTH, PROMPT = 34, 20
CASES = [*((variant, 1) for variant in VARIANTS), *((method, 2) for method in METHODS)]


def variant_config(variant: str, tensor: int) -> RunConfig:
    config = of_variant(variant, 8, {"tensor_model_parallel_size": tensor})
    if config.position.method == "learned":
        position = {"method": "learned", "max_position_embeddings": LENGTH}
        parallel = config.parallel.model_dump()
        config = tiny_config(position=position, parallel=parallel, evaluation={"lengths": [32]})
    return config


def dense(config: RunConfig) -> tuple[dict[str, Tensor], DenseGPT]:
    state = random_state(config, seed=3)
    return state, DenseGPT(config).load_global_state(state)


@pytest.mark.parametrize(("variant", "tensor"), CASES)
def test_every_step_has_the_logits_of_the_whole_text(pools, variant, tensor):
    config = variant_config(variant, tensor)
    state, model = dense(config)
    tokens = torch.randint(0, 512, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    results = pools(tensor).run(decode, config, state, tokens, PROMPT)
    after = [PROMPT - 1, *range(PROMPT + 2, LENGTH)]
    for first, size, second in results:
        for found, text in ((first, tokens), (second, tokens.flip(1))):
            expected = model(text).detach()[:, after].transpose(0, 1)
            torch.testing.assert_close(found, expected, **TOLERANCE)
        # Keys and values of fp32, of 4 layers; fewer heads where grouped.
        heads = (config.model.num_query_groups or 8) // tensor
        layers = config.model.num_layers
        assert size == 2 * 4 * layers * heads * config.head_dim * 2 * LENGTH


@pytest.mark.parametrize("variant", ["alibi-grouped", "alibi-list"])
def test_a_long_text_in_pieces_has_the_losses_of_the_whole_text(pools, variant):
    config = of_variant(variant, 8, {"tensor_model_parallel_size": 2})
    state, model = dense(config)
    tokens = torch.randint(0, 512, (2, 901), generator=torch.Generator().manual_seed(5))
    logits = model(tokens[:, :-1]).detach()
    expected = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    steep, flat = pools(2).run(losses, config, state, tokens, 150)
    for found, _, _ in (steep, flat):
        torch.testing.assert_close(found, expected, **TOLERANCE)
    if variant == "alibi-grouped":
        # The other rank's slopes see nearly the whole text, and so do some of the list.
        _, kept, full = steep
        assert kept.fetches == 0 and kept.device + kept.host < 0.95 * full


@pytest.mark.parametrize("method", METHODS)
def test_greedy_generation_takes_the_most_probable_token(pools, method):
    config = variant_config(method, 1)
    state, model = dense(config)
    text = torch.randint(0, 512, (2, PROMPT), generator=torch.Generator().manual_seed(5))
    (found,) = pools(1).run(generate, config, state, text, 9)
    for _ in range(9):
        best = model(text).detach()[:, -1, : config.data.vocab_size].argmax(dim=1, keepdim=True)
        text = torch.cat([text, best], dim=1)
    assert found.tolist() == text[:, PROMPT:].tolist()


# ---- tasks of the ranks --------------------------------------------------------------------------
def decode(config: RunConfig, state: dict[str, Tensor], tokens: Tensor, prompt: int) -> Any:
    """Feed `prompt` tokens at once, three more at once, and each of the others alone.

    Returns:
        Logits after each piece [pieces, B, V], the bytes of the cache, and logits at the same
        places of a second text through the same cache: the tokens in reverse.
    """
    _, (chunk,) = _build_model_with(config, state)
    chunk.train()
    decoder = Decoder(config, chunk, *tokens.shape)
    ends = [prompt, 3] + [1] * (tokens.shape[1] - prompt - 3)
    first = torch.stack([decoder.feed(piece) for piece in tokens.split(ends, dim=1)])
    decoder.reset()
    second = torch.stack([decoder.feed(piece) for piece in tokens.flip(1).split(ends, dim=1)])
    return first, decoder.full_bytes(), second


def generate(config: RunConfig, state: dict[str, Tensor], prompt: Tensor, count: int) -> Tensor:
    """Generate greedily."""
    _, (chunk,) = _build_model_with(config, state)
    decoder = Decoder(config, chunk, len(prompt), prompt.shape[1] + count)
    generated: list[Tensor] = []
    while len(generated) < count:
        logits = decoder.feed(generated[-1] if generated else prompt)
        generated.append(logits[:, : config.data.vocab_size].argmax(dim=1, keepdim=True))
    return torch.cat(generated, dim=1)


def losses(config: RunConfig, state: dict[str, Tensor], tokens: Tensor, piece: int) -> Any:
    """Return the losses of a text that passes through in pieces, what is kept, and of all."""
    _, (chunk,) = _build_model_with(config, state)
    decoder = Decoder(config, chunk, len(tokens), tokens.shape[1] - 1)
    starts = range(0, tokens.shape[1] - 1, piece)
    found = [decoder.losses(tokens[:, start : start + piece + 1]) for start in starts]
    return torch.cat(found, dim=1), decoder.kept(), decoder.full_bytes()

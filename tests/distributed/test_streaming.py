"""Compare a text that is read in pieces with an independent dense GPT that sees it at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import RunConfig
from pretrain.model.forward import Decoder
from tests.distributed.tasks import _build_model_with
from tests.distributed.test_parallel_equals_dense import TOLERANCE, variant_config
from tests.reference.dense_gpt import DenseGPT, random_state


def dense(config: RunConfig) -> tuple[dict[str, Tensor], DenseGPT]:
    state = random_state(config, seed=3)
    return state, DenseGPT(config).load_global_state(state)


@pytest.mark.parametrize("variant", ["alibi-grouped", "alibi-list"])
def test_a_long_text_in_pieces_has_the_losses_of_the_whole_text(pools, variant):
    config = variant_config(variant, 8, {"tensor_model_parallel_size": 2})
    state, model = dense(config)
    tokens = torch.randint(0, 512, (2, 901), generator=torch.Generator().manual_seed(5))
    logits = model(tokens[:, :-1]).detach()
    expected = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    steep, flat = pools(2).run(losses, config, state, tokens, 150)
    for found, _, _ in (steep, flat):
        torch.testing.assert_close(found, expected, **TOLERANCE)
    # Keys and values in fp32 of one of the two texts.
    groups, layers = config.num_query_groups // 2, config.model.num_layers
    assert steep[2] == flat[2] == 2 * 4 * layers * groups * config.head_dim * 900
    if variant == "alibi-grouped":
        # The other rank's slopes see nearly the whole text, and so do some of the list.
        _, kept, full = steep
        assert kept.fetches == 0 and kept.device + kept.host < 0.95 * 2 * full


def losses(config: RunConfig, state: dict[str, Tensor], tokens: Tensor, piece: int) -> Any:
    """Return the losses of a text that passes through in pieces, what is kept, and of all."""
    _, (chunk,) = _build_model_with(config, state)
    decoder = Decoder(config, chunk, tokens.shape[1] - 1)
    starts = range(0, tokens.shape[1] - 1, piece)
    found = [decoder.losses(tokens[:, start : start + piece + 1]) for start in starts]
    return torch.cat(found, dim=1), decoder.kept(), decoder.full_bytes()

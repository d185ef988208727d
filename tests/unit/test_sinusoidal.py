"""Both tables of sinusoidal positions, against stock implementations and the authors' formula."""

from __future__ import annotations

import math

import pytest
import torch

from pretrain.positions.sinusoidal import sinusoidal_table

SHAPES = [(64, 6), (300, 128), (2100, 96)]


def fairseq_table(num_embeddings: int, embedding_dim: int, padding_idx: int) -> torch.Tensor:
    """Return what fairseq's SinusoidalPositionalEmbedding.get_embedding computes, in fp64.

    It is written line by line after fairseq/modules/sinusoidal_positional_embedding.py.
    """
    half_dim = embedding_dim // 2
    scale = math.log(10000) / (half_dim - 1)
    frequencies = torch.exp(torch.arange(half_dim, dtype=torch.float64) * -scale)
    angles = torch.arange(num_embeddings, dtype=torch.float64).unsqueeze(1) * frequencies
    table = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    table[padding_idx] = 0
    return table


@pytest.mark.parametrize(("length", "width"), SHAPES)
def test_the_default_table_is_the_one_of_the_authors_code(length, width):
    # fairseq's dictionary gives its padding token the index 1, and make_positions begins behind it.
    expected = fairseq_table(length + 2, width, padding_idx=1)[2:]
    found = sinusoidal_table(torch.arange(length), width, "fairseq")
    # Angles of up to 2100, each rounded to fp64 (2^-53 relative) a few times.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-12)


def test_the_default_table_is_the_one_of_a_stock_model_from_fairseq():
    from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

    stock = XGLMSinusoidalPositionalEmbedding(num_positions=300, embedding_dim=128, padding_idx=1)
    expected = stock(torch.arange(300)[None])[0].double()
    found = sinusoidal_table(torch.arange(300), 128, "fairseq")
    # Theirs is fp32: an angle of 300 is off by 2^-24 x 300, which is 2e-5.
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


def test_the_other_table_has_the_frequencies_of_the_paper():
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    expected = MarianSinusoidalPositionalEmbedding(300, 128).create_weight().double()
    found = sinusoidal_table(torch.arange(300), 128, "vaswani")
    # Theirs is computed in fp64 and rounded to fp32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)

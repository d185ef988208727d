"""Count the memory of the published 1.3B runs from the code that trained them, fairseq's.

This says why the plan, which is of other code, needs less. Origin of every line: the authors'
repository ofirpress/attention_with_linear_biases at 4b92f28, a fork of fairseq. Their command for
these runs is not published; what is deduced from the published numbers is said to be.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.study.published import content

PAGE = Path("docs/performance.md")
GIB = 2**30
LAYERS, WIDTH, HEADS, INNER = 25, 2048, 16, 8192
VOCABULARY = 50_264
TOKENS = 4096
"""Tokens that pass at once on a GPU. Deduced, by `test_the_scores_are_what_grows`."""
PARAMETERS = (
    VOCABULARY * WIDTH
    + LAYERS * (4 * WIDTH * WIDTH + 4 * WIDTH + 2 * WIDTH * INNER + INNER + WIDTH + 4 * WIDTH)
    + 2 * WIDTH
)


def scores(length: int, tokens: int = TOKENS, item: int = 2) -> int:
    """Softmax of all scores, which the product with the values saves in the training precision.

    fairseq/modules/multihead_attention.py calls torch's multi_head_attention_forward, whose softmax
    saves the same tensor.
    """
    return LAYERS * HEADS * tokens * length * item


def counted(length: int) -> dict[str, int]:
    """Bytes of a GPU when the backward pass of the loss runs, at which most is alive."""
    # fairseq/modules/transformer_layer.py: input and output of both norms, q, k, v, attention's
    # output, and the ReLU's output, which is also the second product's input (the default of
    # fairseq/models/transformer_lm.py); two statistics of each norm.
    layer = 2 * TOKENS * (8 * WIDTH + INNER) + 2 * 2 * 4 * TOKENS
    return {
        # fairseq/optim/fp16_optimizer.py, MemoryEfficientFP16Optimizer: no masters; adam.py keeps
        # moments in fp32. Deduced: masters (8 bytes more) would not have fit into 24.6 GiB.
        "state": (2 + 2 + 4 + 4) * PARAMETERS,
        # fairseq/distributed/legacy_distributed_data_parallel.py
        "buffer": 2 * 2**28,
        "scores": scores(length),
        "activations": LAYERS * layer,
        # fairseq/criterions/cross_entropy.py: log_softmax in fp32 and its gradient; the logits'.
        "loss": TOKENS * VOCABULARY * (4 + 4 + 2),
    }


def memory(length: int) -> float:
    """Published memory of sinusoidal positions; ALiBi's is 0.1 larger at 2,048, its mask."""
    value = content()["cc100_roberta"]["equal_updates"][f"sinusoidal_{length}"]["memory_gb"]
    return float(value)


def test_the_scores_are_what_grows():
    """To the rounding of the published numbers, and with no other number of tokens or bytes."""

    def fits(tokens: int, item: int) -> bool:
        return all(
            abs((scores(b, tokens, item) - scores(a, tokens, item)) / GIB - memory(b) + memory(a))
            < 0.1
            for a, b in ((512, 1024), (1024, 2048))
        )

    # What is kept of a score: 2 bytes without dropout on attention, 5 with it, 6 by fairseq's own
    # softmax in fp32.
    found = {
        (n, item) for n in (1024, 2048, 4096, 8192, 16384) for item in (2, 5, 6) if fits(n, item)
    }
    assert found == {(TOKENS, 2)}
    # ALiBi adds one mask in fp16 of all heads.
    rows = content()["cc100_roberta"]["equal_updates"]
    mask = 2 * HEADS * 2048**2 / GIB
    assert rows["alibi_2048"]["memory_gb"] - memory(2048) == pytest.approx(mask, abs=0.1)


@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_the_published_memory_is_that_of_other_code(length):
    total = sum(counted(length).values()) / GIB
    assert 0.97 < total / memory(length) < 1
    assert memory(length) - total == pytest.approx(0.73, abs=0.05)
    config = load_config(f"configs/cc100_roberta/sinusoidal_{length}.toml")
    assert (config.model.num_layers, config.model.hidden_size) == (LAYERS, WIDTH)


def test_the_page_has_the_counted_numbers():
    rows = re.findall(r"^\| .*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.M)
    columns = [counted(length) for length in (512, 1024, 2048)]
    parts = [[f"{column[name] / GIB:.2f}" for column in columns] for name in columns[0]]
    totals = [f"{sum(column.values()) / GIB:.2f}" for column in columns]
    for row in (*parts, totals, [f"{memory(length)}" for length in (512, 1024, 2048)]):
        assert tuple(row) in rows

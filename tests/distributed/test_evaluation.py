"""Perplexity against the dense reference, token by token, on any layout."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pretrain.data.stream import TokenStream
from pretrain.evaluation.perplexity import find_keys, longppl, short_protocol
from pretrain.evaluation.windows import Protocol
from tests.conftest import ALL_LAYOUTS, tiny_config
from tests.distributed import tasks
from tests.reference.dense_gpt import DenseGPT, random_state

TOKENS = 300  # no multiple of any window or batch
LENGTH = 32
# Mean of 300 losses near 6 nats, each from fp32 logits that agree within 2e-5
# (test_parallel_equals_dense.py).
LOSS = {"rel": 5e-6}
# Other layouts have one kind of parallelism of these.
CASES = [(name, 500) for name in ("one", "tp2pp2sp", "pp2vpp2cp2", "cp4", "zero3-dp2")]


def _config(data, parallel=None):
    return tiny_config(
        data={"directory": str(data)}, parallel=parallel or {}, evaluation={"max_tokens": TOKENS}
    )


def _dense(data) -> tuple[DenseGPT, torch.Tensor]:
    """Return the reference and the stream, which starts after an end-of-document token."""
    config = _config(data)
    model = DenseGPT(config).load_global_state(random_state(config, seed=3))
    ids = TokenStream(data / "validation").read(0, TOKENS)
    return model, torch.from_numpy(np.append(2, ids))


@functools.cache
def _token_losses(data, length: int) -> np.ndarray:
    """Score each token alone, with a full window of context before it."""
    model, stream = _dense(data)
    losses = []
    with torch.no_grad():
        for t in range(TOKENS):
            context = stream[max(0, t + 1 - length) : t + 1]
            losses.append(F.cross_entropy(model(context[None])[0, -1], stream[t + 1]).item())
    return np.array(losses)


def _evaluate(pools, data, layout, protocols, tokens_per_batch=96):
    processes, parallel = ALL_LAYOUTS[layout]
    config = _config(data, parallel)
    state = random_state(config, seed=3)
    return pools(processes).run(tasks.evaluate, config, state, protocols, tokens_per_batch)


def test_stride_one_scores_each_token_alone_with_its_full_window(pools, tiny_data):
    result = _evaluate(pools, tiny_data, "one", [Protocol("sliding", LENGTH, 1)])[0][0]
    assert result.tokens == TOKENS
    assert result.loss_nats == pytest.approx(_token_losses(tiny_data, LENGTH).mean(), **LOSS)
    np.testing.assert_allclose(result.by_token, _token_losses(tiny_data, LENGTH), rtol=1e-5)


def test_nonoverlapping_by_position_against_dense(pools, tiny_data):
    """Pieces of 32 tokens predicted from scratch, the last one of 300 - 9 x 32 = 12."""
    result = _evaluate(pools, tiny_data, "one", [Protocol("nonoverlapping", LENGTH, LENGTH)])[0][0]
    model, stream = _dense(tiny_data)
    by_position = [[] for _ in range(LENGTH)]
    with torch.no_grad():
        for piece in range(0, TOKENS, LENGTH):
            inputs, targets = (
                stream[piece : piece + LENGTH][: TOKENS - piece],
                stream[piece + 1 : piece + 1 + LENGTH],
            )
            for position, loss in enumerate(
                F.cross_entropy(model(inputs[None])[0], targets, reduction="none")
            ):
                by_position[position].append(loss.item())
    np.testing.assert_allclose(
        result.by_position.losses, [np.mean(p) for p in by_position], rtol=1e-5
    )
    assert result.loss_nats == pytest.approx(np.mean(np.concatenate(by_position)), **LOSS)
    assert result.by_position.counts.tolist() == [10] * 12 + [9] * 20


def test_blocks_of_the_text_against_dense(pools, tiny_data):
    """300 tokens of one document are 60 blocks of 5, whatever windows they are scored in."""
    protocols = [Protocol("sliding", LENGTH, 1), Protocol("sliding", 64, 24)]
    one, other = _evaluate(pools, tiny_data, "one", protocols)[0]
    expected = _token_losses(tiny_data, LENGTH).reshape(60, 5).sum(axis=1)
    np.testing.assert_allclose(one.by_block.losses, expected, rtol=1e-5)
    assert one.by_block.counts.tolist() == other.by_block.counts.tolist() == [5] * 60
    assert other.by_block.losses.sum() == pytest.approx(other.loss_nats * TOKENS, rel=1e-12)
    low, high = (one.record()[key] for key in ("loss_low", "loss_high"))
    assert low < one.loss_nats < high


PROTOCOLS = [
    Protocol("nonoverlapping", 32, 32),
    Protocol("sliding", 64, 24),
    Protocol("nonoverlapping", 128, 128),
]


@pytest.fixture(scope="module")
def of_one_process(pools, tiny_data):
    return _evaluate(pools, tiny_data, "one", PROTOCOLS, 96)[0]


@pytest.mark.parametrize(("layout", "batch"), [*CASES, ("one", 1), ("tp2pp2sp", 1)])
def test_every_layout_and_batch_gives_the_same(pools, tiny_data, of_one_process, layout, batch):
    """Also beyond the training length (128 = 4 L), for batches of less or more than a window."""
    for rank in _evaluate(pools, tiny_data, layout, PROTOCOLS, batch):
        for result, reference in zip(rank, of_one_process):
            assert result.tokens == TOKENS
            assert result.loss_nats == pytest.approx(reference.loss_nats, **LOSS)
            np.testing.assert_allclose(
                result.by_position.losses, reference.by_position.losses, rtol=2e-4
            )
            np.testing.assert_allclose(result.by_block.losses, reference.by_block.losses, rtol=1e-4)
            np.testing.assert_allclose(result.by_token, reference.by_token, rtol=2e-4)
            assert result.by_block.counts.tolist() == reference.by_block.counts.tolist()


@pytest.mark.parametrize("name", ["nonoverlapping", "stream"])
def test_longppl_is_that_of_the_reference(pools, tiny_data, name):
    """`find_key_token` and `compute_longppl` of longppl/longppl.py (PKU-ML/LongPPL at 1decd2a),
    whose text is one window, with a table in the place of the model's losses."""
    context, step = 16, 4
    # The loss of token t in a window from token s on.
    table = np.random.default_rng(0).exponential(2.0, (TOKENS, TOKENS)).astype(np.float32)
    keys = []
    for start in range(0, TOKENS - context, step):
        for t in range(start + context, start + context + step):
            if table[start, t] - table[0, t] > 2 and table[0, t] < 2:
                keys.append(t)
    expected = math.exp(table[0, keys].mean())
    assert len(keys) > 30

    real = _evaluate(pools, tiny_data, "one", [Protocol("nonoverlapping", TOKENS, TOKENS)])[0][0]

    def scored(protocol):
        losses = np.zeros(TOKENS, np.float32)
        for start, size, count in protocol.windows(TOKENS):
            losses[start + size - count : start + size] = table[start][start + size - count :][
                :count
            ]
        return dataclasses.replace(real, protocol=protocol, by_token=losses)

    long = scored(Protocol(name, TOKENS, TOKENS))
    found = find_keys(scored(short_protocol(context)), long, context)
    assert np.flatnonzero(found).tolist() == keys
    record = longppl(long, found, np.arange(5, TOKENS + 1, 5), context)
    assert record["longppl"] == pytest.approx(expected, rel=1e-6)
    assert (record["key_tokens"], record["short_context"]) == (len(keys), context)
    assert record["longppl_low"] < expected < record["longppl_high"]
    # In windows of 32 no token has 16 tokens before it where the window begins.
    halves = find_keys(scored(short_protocol(context)), scored(Protocol("sliding", 32, 32)), 16)
    assert halves.any() and set(np.flatnonzero(halves) % 32) <= set(range(16, 32))
    none = longppl(long, found & False, np.arange(5, TOKENS + 1, 5), context)
    assert none == {"key_tokens": 0, "short_context": context}

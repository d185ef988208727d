"""Early tokens: where the loss depends on the context alone, the parts have a closed form."""

from __future__ import annotations

import numpy as np
import pytest

from pretrain.evaluation.records import BLOCKS, Losses, make_curves
from pretrain.study.reading import CONTEXT, EARLY, TOTAL, gains
from tests.unit.report_records import make_record

L, LENGTHS, TOKENS, COUNT = 64, (64, 128, 1024), 65_536, 64


def contexts(protocol, length, stride):
    """Return how many tokens stand before each token of the text in its window."""
    t = np.arange(TOKENS)
    if protocol == "nonoverlapping":
        return t % length
    return np.where(t < length, t, length - stride + (t - length) % stride)


def measured(loss_at, stride, noise=0.0):
    """Return the curves of a model whose loss is `loss_at(context)` plus each token's own part."""
    hard = np.random.default_rng(0).normal(0, noise, TOKENS)
    records = []
    for protocol in ("nonoverlapping", "sliding"):
        for length in LENGTHS:
            if protocol == "sliding" and (stride is None or stride >= length):
                continue
            step = stride if protocol == "sliding" else length
            losses = loss_at(contexts(protocol, length, step)) + hard
            record = make_record(
                protocol=protocol,
                length=length,
                stride=step,
                train_length=L,
                perplexity=float(np.exp(losses.mean())),
                tokens=TOKENS,
            )
            sums = losses.reshape(COUNT, -1).sum(1)
            losses = Losses(sums, np.full(COUNT, TOKENS / COUNT))
            records.append(record | {BLOCKS: losses})
    return make_curves(records)


@pytest.mark.parametrize("stride", [4, 16, 32])
def test_longer_strides_shift_a_known_share_from_early_tokens_to_context(stride):
    """Context beyond L is of no use here, and yet what windows of L lack of it counts as such."""
    curves = measured(lambda c: 2 + 1 / np.sqrt(np.minimum(c, L - 1) + 1), stride=stride)
    sliding = np.mean(1 / np.sqrt(np.arange(L - stride, L) + 1))
    last = gains(curves)[-1]
    lacking = (1 - 1 / 16) * (sliding - 1 / np.sqrt(L))
    assert last.parts[CONTEXT].value == pytest.approx(lacking, abs=2e-4)
    early = (1 - 1 / 16) * (np.mean(1 / np.sqrt(np.arange(1, L + 1))) - sliding)
    assert last.parts[EARLY].value == pytest.approx(early, rel=0.01)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_the_parts_add_up_and_the_noise_of_the_text_cancels_in_them(noise):
    """Noise of the tokens is the same in all three measurements, and cancels in the parts."""

    def loss_at(context):
        return 3 - 0.1 * np.log2(context + 1)

    for gain in gains(measured(loss_at, 1, noise)):
        k = gain.length / L
        early = loss_at(np.arange(L)).mean()
        true = {EARLY: (1 - 1 / k) * (early - loss_at(L - 1))}
        true[TOTAL] = early - loss_at(np.arange(gain.length)).mean()
        true[CONTEXT] = true[TOTAL] - true[EARLY]
        for name, part in gain.parts.items():
            assert part.low - 1e-9 <= part.value <= part.high + 1e-9
            assert part.value == pytest.approx(true[name], abs=2e-3)
            assert part.high - part.low < 2e-3
        parts = gain.parts
        assert parts[EARLY].value + parts[CONTEXT].value == pytest.approx(parts[TOTAL].value)


def test_a_stride_of_L_says_nothing_of_full_context():
    assert gains(measured(lambda c: 3 - 0.1 * np.log2(c + 1), stride=48)) == []

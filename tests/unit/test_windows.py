"""Evaluation windows score every token once, with the context that the protocol promises."""

from __future__ import annotations

import pytest

from pretrain.evaluation.windows import Protocol, sliding

SIZES = [1, 2, 7, 8, 64]
# The config refuses a stride longer than the window, which would leave tokens unscored.
LENGTHS_AND_STRIDES = [(length, stride) for length in SIZES for stride in SIZES if stride <= length]


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 64, 100])
@pytest.mark.parametrize(("length", "stride"), LENGTHS_AND_STRIDES)
def test_every_token_is_scored_once_with_the_promised_context(tokens, length, stride):
    context = {}
    for window in sliding(tokens, length, stride):
        assert window.start >= 0 and window.start + window.size <= tokens and window.size <= length
        for t in range(window.start + window.size - window.scored, window.start + window.size):
            assert t not in context, f"token {t} scored twice"
            context[t] = t - window.start
    assert sorted(context) == list(range(tokens))
    for t, seen in context.items():
        if t < length:
            # The first window starts at the start of the stream.
            assert seen == t
        elif stride < length:
            assert length - stride <= seen <= length - 1
        if stride == 1:
            assert seen == min(t, length - 1)


def test_nonoverlapping_by_hand():
    assert [tuple(w) for w in Protocol("nonoverlapping", 4, 2).windows(10)] == [
        (0, 4, 4),
        (4, 4, 4),
        (8, 2, 2),
    ]


def test_sliding_by_hand():
    """9 tokens, length 4, stride 2: the first window whole, then two targets each, then one."""
    assert [tuple(w) for w in sliding(9, 4, 2)] == [(0, 4, 4), (2, 4, 2), (4, 4, 2), (5, 4, 1)]

"""The tokens that a masked model predicts, and the rules about such runs."""

from __future__ import annotations

import numpy as np
import pytest

from pretrain.config import ConfigError
from pretrain.config.run import recorded_protocol
from pretrain.data.order import SHARE, mask_samples, mask_text, num_chosen
from pretrain.evaluation.windows import Protocol, Window, choose_protocols
from tests.conftest import tiny_config

MASK = 500


def ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, MASK, shape)


def test_shares_are_those_of_bert():
    tokens = ids(2000, 128)
    inputs, chosen = mask_samples(tokens, range(2000), 7, MASK)
    assert (chosen.sum(axis=1) == num_chosen(128)).all()
    assert num_chosen(128) == round(0.15 * 128) == 19
    assert (inputs == tokens)[~chosen].all()
    # 38,000 draws: a standard error of 0.2 and 0.15 %.
    assert (inputs[chosen] == MASK).mean() == pytest.approx(0.8, abs=0.01)
    same = (inputs == tokens)[chosen].mean()
    assert same == pytest.approx(0.1 + 0.1 / MASK, abs=0.008)
    random = inputs[chosen & (inputs != MASK) & (inputs != tokens)]
    assert 0 <= random.min() < random.max() < MASK
    # Every position is chosen as often as any other: 2,000 draws, 5 standard errors.
    assert np.abs(chosen.mean(axis=0) - 19 / 128).max() < 5 * (0.15 * 0.85 / 2000) ** 0.5


def test_masks_follow_from_the_seed_and_the_sample_alone():
    tokens = ids(8, 64)
    whole = mask_samples(tokens, range(40, 48), 7, MASK)
    # In other batches, in another order.
    order = [5, 0, 7]
    part = mask_samples(tokens[order], [45, 40, 47], 7, MASK)
    for a, b in zip(whole, part):
        assert np.array_equal(a[order], b)
    for other in (
        mask_samples(tokens, range(40, 48), 8, MASK),
        mask_samples(tokens, range(8), 7, MASK),
    ):
        assert not np.array_equal(whole[1], other[1])
    # The same sample in the next epoch has another index, and other masks.
    assert not np.array_equal(whole[1][0], whole[1][1])


def test_the_masks_never_change():
    """A restart under a later version goes on with the masks of this one."""
    inputs, chosen = mask_samples(np.zeros((1, 32), np.int64), [3], 7, MASK)
    assert np.flatnonzero(chosen).tolist() == CHOSEN
    assert inputs[chosen].tolist() == INPUTS


CHOSEN = [4, 5, 8, 20, 26]
INPUTS = [500, 500, 500, 500, 500]


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_the_shortest_sample_has_a_chosen_token(length):
    _, chosen = mask_samples(ids(5, length), range(5), 7, MASK)
    assert (chosen.sum(axis=1) == 1).all()


def test_a_text_has_the_same_masks_in_whatever_pieces_it_is_read():
    tokens = ids(1003)
    inputs, chosen = mask_text(tokens, 0, MASK)
    assert chosen[:1000].sum() == SHARE * 1000
    for start, end in ((0, 1), (19, 21), (37, 512), (999, 1003)):
        piece = mask_text(tokens[start:end], start, MASK)
        assert np.array_equal(piece[0], inputs[start:end])
        assert np.array_equal(piece[1], chosen[start:end])


def test_every_window_is_whole_and_every_token_scored_once():
    for tokens in (8, 9, 11, 12, 40):
        windows = list(Protocol("masked", 8, 8).windows(tokens))
        assert all(window.size == 8 for window in windows)
        scored = [
            token for w in windows for token in range(w.start + w.size - w.scored, w.start + w.size)
        ]
        assert scored == list(range(tokens))
    assert list(Protocol("masked", 8, 8).windows(11))[-1] == Window(3, 8, 3)


def masked(**sections: dict[str, object]):
    train = {"objective": "masked", **sections.pop("train", {})}
    return tiny_config(train=train, **sections)


def test_the_mask_is_a_row_that_no_token_has():
    config = masked()
    assert (config.mask_id, config.padded_vocab_size) == (512, 576)
    assert tiny_config().padded_vocab_size == 512
    assert masked(data={"vocab_size": 511}).padded_vocab_size == 512


def test_records_are_of_a_protocol_of_their_own():
    """No table or plot puts them beside perplexities of next tokens."""
    config = masked()
    assert recorded_protocol(config, "nonoverlapping") == "masked"
    assert recorded_protocol(tiny_config(), "nonoverlapping") == "nonoverlapping"

    def asked(*protocols):
        """Return the config with the protocols of a command, which its rules do not check."""
        section = config.evaluation.model_copy(update={"protocols": protocols})
        return config.model_copy(update={"evaluation": section})

    chosen, notes = choose_protocols(asked("nonoverlapping", "sliding"), 4096)
    assert [p.key for p in chosen] == [("masked", 32, 32), ("masked", 64, 64)]
    assert notes == [
        "sliding windows are left out: a sliding window gives each token more of what is before "
        'it, and train.objective = "masked" looks both ways'
    ]
    with pytest.raises(ConfigError, match="Choose the protocol nonoverlapping"):
        choose_protocols(asked("sliding"), 4096)

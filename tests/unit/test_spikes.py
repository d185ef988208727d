"""The detector of spikes against the same rule in plain Python, number by number."""

import json
import math
import random
import statistics

import pytest
import torch

from pretrain.optim.health import SpikeDetector


def judged_in_python(pairs, threshold, window, fewest):
    """(is a spike, limits) of each (loss, norm), by the definition."""
    seen, out = [], []
    for pair in pairs:
        limits = (math.inf, math.inf)
        if len(seen) >= fewest:
            rows = list(zip(*seen[-window:]))
            limits = tuple(statistics.mean(r) + threshold * statistics.stdev(r) for r in rows)
        finite = all(map(math.isfinite, pair))
        is_spike = any(math.isfinite(v) and v > limit for v, limit in zip(pair, limits))
        if finite:
            seen.append(tuple(min(value, limit) for value, limit in zip(pair, limits)))
        out.append((is_spike, *limits))
    return out


def observe(detector, pairs):
    out = []
    for loss, norm in pairs:
        numbers = torch.tensor([loss, norm], dtype=torch.float64)
        detector.observe(numbers[0], numbers[1], skips=True)
        is_spike, *limits, _ = detector.summary.tolist()
        out.append((bool(is_spike), *limits))
    return out


def noisy(count, seed):
    numbers = random.Random(seed)
    return [(3 + numbers.gauss(0, 0.1), 1 + numbers.gauss(0, 0.05)) for _ in range(count)]


@pytest.mark.parametrize(("window", "fewest"), [(128, 64), (30, 20), (8, 8), (20, 20)])
def test_spikes_are_those_of_the_definition(window, fewest):
    pairs = noisy(3 * window, seed=1)
    spikes = {fewest + 2: (9.0, 1.0), 2 * window: (3.0, 40.0), 2 * window + 1: (3.0, 41.0)}
    not_finite = {4: (math.nan, 1.0), 2 * window + 5: (9.0, math.inf)}
    for place, pair in (spikes | not_finite | {2: (3.4, 1.0)}).items():
        pairs[place] = pair
    pairs[2 * window + 7] = (-50.0, 0.0)
    expected = judged_in_python(pairs, 6.0, window, fewest)
    actual = observe(SpikeDetector(6.0, window), pairs)
    assert [a[0] for a in actual] == [e[0] for e in expected]
    for a, e in zip(actual, expected):
        assert a[1:] == pytest.approx(e[1:], rel=1e-9)
    # What comes before `fewest` is not judged.
    found = {place for place, (is_spike, *_) in enumerate(actual) if is_spike}
    assert spikes.keys() <= found and min(found) >= fewest


def test_a_spike_does_not_hide_the_next_one_and_a_new_level_is_accepted():
    pairs = [*noisy(128, seed=2), (892.0, 1.0), (700.0, 1.0), *noisy(5, seed=3), (20.0, 1.0)]
    found = [is_spike for is_spike, *_ in observe(SpikeDetector(6.0, 128), pairs)]
    assert [place for place, is_spike in enumerate(found) if is_spike] == [128, 129, 135]
    # A loss that has doubled for good is a spike at first, and then no more.
    detector = SpikeDetector(6.0, 128)
    higher = [(loss + 3, norm) for loss, norm in noisy(128, seed=4)]
    found = [is_spike for is_spike, *_ in observe(detector, noisy(128, seed=2) + higher)][128:]
    assert found[0] and not any(found[40:]) and found == sorted(found, reverse=True)
    assert detector.to_lists()["updates_skipped"] == [sum(found)]


def test_the_state_survives_json_bit_for_bit():
    pairs = [*noisy(50, seed=5), (9.0, 1.0), *noisy(20, seed=6), (3.0, 9.0)]
    whole = SpikeDetector(6.0, 32)
    first = SpikeDetector(6.0, 32)
    expected = observe(whole, pairs)
    observe(first, pairs[:40])
    second = SpikeDetector(6.0, 32)
    second.load(json.loads(json.dumps(first.to_lists())))
    assert observe(second, pairs[40:]) == expected[40:]
    assert second.to_lists() == whole.to_lists()


def test_a_window_of_another_size_begins_anew():
    first, second = SpikeDetector(6.0, 32), SpikeDetector(6.0, 64)
    observe(first, [*noisy(40, seed=7), (9.0, 1.0)])
    second.load(first.to_lists())
    lists = second.to_lists()
    assert (lists["steps_observed"], lists["updates_skipped"]) == ([0], [1])


def test_a_forgotten_window_stays_forgotten_when_it_is_loaded_again():
    """A rollback loads the checkpoint at which a phase began a second time."""
    first, second = SpikeDetector(6.0, 32), SpikeDetector(6.0, 32)
    observe(first, noisy(40, seed=7))
    before = first.to_lists()
    second.load(before, forgets=True)
    observe(second, noisy(40, seed=8))
    later = second.to_lists()
    for lists, steps in ((before, 0), (later, 40), (json.loads(json.dumps(before)), 0)):
        second.load(lists)
        assert second.to_lists()["steps_observed"] == [steps]

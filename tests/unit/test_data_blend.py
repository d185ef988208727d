"""Test that corpora are blended at their shares, exactly, and go on where they stood."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from pydantic import ValidationError

from pretrain.config import ConfigError
from pretrain.config.schema import CorpusSection
from pretrain.data import order
from pretrain.data.order import Blend, Segment
from tests.unit.splits import blend_of, make_stream


def blend(samples: dict[str, int], shares: dict[str, int] | None = None, seed: int = 1) -> Blend:
    """Return a blend from the start of a run, by default proportional."""
    return Blend(Segment(0, samples, shares or samples, dict.fromkeys(samples, 0)), seed)


def worst_deviation(found: np.ndarray, shares: list[int]) -> float:
    """Return how far the count of any corpus is from its share, over all prefixes.

    Exact up to the last division: |count * total - p * share| / total.
    """
    total, p = sum(shares), np.arange(1, len(found) + 1)
    counts = (np.cumsum(found == number) for number in range(len(shares)))
    return max(
        int(np.abs(count * total - p * share).max()) / total
        for count, share in zip(counts, shares, strict=True)
    )


# ---- shares --------------------------------------------------------------------------------------


def test_the_split_equals_the_textbook_in_fractions():
    """Walk the tree one sample at a time with unbounded integers, at shares beyond 2^63."""
    shares = {"a": 10**13 + 7, "b": 3 * 10**12 + 1, "c": 10**11 + 3}
    found = blend(dict.fromkeys(shares, 10**9), shares)
    asked = np.concatenate([np.arange(50), 10**12 + np.arange(50), 7 * 10**17 + np.arange(50)])
    corpora, _ = found.locate(asked)
    for index, corpus in zip(asked.tolist(), corpora.tolist(), strict=True):
        before, after = found.counts(index), found.counts(index + 1)
        grown = [name for name in shares if after[name] > before[name]]
        assert grown == [found.names[corpus]]
        for name, share in shares.items():
            ideal = Fraction(index * share, sum(shares.values()))
            assert abs(before[name] - ideal) <= 1


def test_placing_samples_takes_no_more_calls_with_more_corpora(monkeypatch):
    """A call of NumPy takes the time of a hundred samples."""
    calls = []
    mix = order.mix
    monkeypatch.setattr(order, "mix", lambda values: calls.append(0) or mix(values))
    for corpora in (2, 50):
        calls.clear()
        blend({f"c{n}": 1000 + n for n in range(corpora)}).locate(np.arange(16))
        # Eight rounds, and a few times eight for the samples that fall outside their corpora.
        assert len(calls) <= 8 * 16


def test_the_blend_stays_what_it_is():
    """Recorded when blends were made; a change would reorder the data of every run with one."""
    corpora, samples = blend({"a": 5, "b": 3, "c": 2}, seed=1234).locate(np.arange(12))
    assert corpora.tolist() == RECORDED_CORPORA
    assert samples.tolist() == RECORDED_SAMPLES


RECORDED_CORPORA = [0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1]
RECORDED_SAMPLES = [2, 1, 3, 1, 0, 0, 1, 0, 4, 2, 0, 0]


# ---- passes --------------------------------------------------------------------------------------
def pairs(found: Blend, start: int, count: int) -> list[tuple[str, int]]:
    """Return (corpus, sample) of some consumed-sample indexes."""
    corpora, samples = found.locate(np.arange(start, start + count))
    return [(found.names[c], s) for c, s in zip(corpora.tolist(), samples.tolist(), strict=True)]


def test_one_pass_reads_every_sample_of_the_union_once():
    samples = {"a": 611, "b": 97, "c": 1, "d": 0, "e": 2000}
    found = blend(samples)
    total = sum(samples.values())
    union = sorted((name, s) for name, size in samples.items() for s in range(size))
    for number in range(3):
        assert sorted(pairs(found, number * total, total)) == union
    assert pairs(found, 0, total) != pairs(found, total, total)


def test_a_share_of_many_decimals_can_be_recorded(tmp_path):
    """A third, as a program writes it, makes exact shares of more than 63 bits."""
    stream = make_stream(tmp_path, {"a": 30_001, "b": 20_003, "c": 5})
    corpora = {
        "a": CorpusSection(epochs=1 / 3),
        "b": CorpusSection(epochs=2 / 3),
        "c": CorpusSection(epochs=1e-6),
    }
    found = blend_of(stream, 2, corpora, seed=0)
    assert 2**52 < sum(found.segment.shares.values()) < 2**53
    numbers = np.array(["abc".index(which) for which, _ in pairs(found, 0, 1000)])
    exact = [15_000 * 10**6, 2 * 10_001 * 10**6, 2 * 3]
    assert worst_deviation(numbers, exact) <= 1


@pytest.mark.parametrize(("key", "least", "most"), [("epochs", 1e-6, 1e6), ("weight", 1e-9, 1e15)])
def test_shares_that_nothing_can_be_computed_with_are_refused(tmp_path, key, least, most):
    for value in (0, 5e-324, math.inf, math.nan, 1e308):
        with pytest.raises(ValidationError):
            CorpusSection(**{key: value})
    stream = make_stream(tmp_path, {"a": 101, "b": 101})
    corpora = {"a": CorpusSection(**{key: least}), "b": CorpusSection(**{key: most})}
    assert {which for which, _ in pairs(blend_of(stream, 10, corpora, seed=0), 0, 20)} == {"b"}


def test_a_second_pass_is_known_when_it_begins():
    found = blend({"a": 6, "b": 3})
    seen: dict[str, int] = {}
    begun = []
    for index, (name, _) in enumerate(pairs(found, 0, 30)):
        now = found.passes_begun(index, index + 1)
        seen[name] = seen.get(name, 0) + 1
        size = {"a": 6, "b": 3}[name]
        expected = {name: seen[name] // size + 1} if seen[name] % size == 1 else {}
        assert now == {k: v for k, v in expected.items() if v > 1}
        begun += [(k, v) for k, v in now.items()]
    assert {("a", 2), ("a", 3), ("b", 2), ("b", 3)} <= set(begun)
    # A step of many samples may pass through several; the last one counts.
    assert found.passes_begun(0, 30) == {"a": 4, "b": 4}
    assert found.passes_begun(0, 9) == {}


# ---- segments ------------------------------------------------------------------------------------
@pytest.mark.parametrize("changed_at", [0, 1, 37, 500, 1300])
def test_after_a_change_every_corpus_goes_on_where_it_stood(tmp_path, changed_at):
    stream = make_stream(tmp_path, {"a": 2001, "b": 801, "c": 1401})
    weights = {
        "a": CorpusSection(weight=1),
        "b": CorpusSection(weight=5),
        "c": CorpusSection(weight=2),
    }
    first = blend_of(stream, 2, {}, seed=4)
    second = blend_of(stream, 2, weights, seed=4, before=first.segment, consumed=changed_at)
    assert second.segment.start == changed_at
    read = pairs(first, 0, changed_at) + pairs(second, changed_at, 6000)
    for name, size in first.segment.samples.items():
        mine = [s for which, s in read if which == name]
        for begin in range(0, len(mine) - size, size):
            assert sorted(mine[begin : begin + size]) == list(range(size)), name
    tail = [name for name, _ in pairs(second, changed_at, 800)]
    assert [tail.count(name) for name in "abc"] == [100, 500, 200]
    with pytest.raises(ValueError, match="begins at"):
        second.locate(np.array([changed_at - 1]))


def test_samples_of_another_length_begin_another_pass(tmp_path):
    """None repeats before all were read, and the log says what is read again."""
    stream = make_stream(tmp_path, {"a": 2001, "b": 801})
    first = blend_of(stream, 2, {}, seed=4)
    second = blend_of(stream, 8, {}, seed=4, before=first.segment, consumed=500)
    read = pairs(second, 500, 350)
    assert second.segment.samples == {"a": 250, "b": 100} and len(set(read)) == 350
    assert second.passes_begun(500, 508) == {"a": 2, "b": 2}


@pytest.mark.parametrize(("before", "after"), [("a", "ab"), ("ab", "a")])
def test_a_corpus_that_gets_or_loses_others_begins_another_pass(tmp_path, before, after):
    """Alone it has another order than among others."""
    old, new = (make_stream(tmp_path / each, dict.fromkeys(each, 201)) for each in (before, after))
    first = blend_of(old, 2, {}, seed=4)
    second = blend_of(new, 2, {}, seed=4, before=first.segment, consumed=60)
    read = [sample for name, sample in pairs(second, 60, 250) if name == "a"][:100]
    assert sorted(read) == list(range(100))


@pytest.mark.parametrize("key", ["run.seed", "data.directory", "data.sequence_length"])
def test_another_order_of_as_many_samples_begins_another_pass(tmp_path, key):
    stream = make_stream(tmp_path, {"a": 201})
    first = blend_of(stream, 2, {}, seed=4)
    since = {"before": first.segment, "consumed": 60, "changed": {key}}
    second = blend_of(stream, 2, {}, seed=5, **since)
    assert sorted(sample for _, sample in pairs(second, 60, 100)) == list(range(100))
    assert second.segment.start == 60


def test_many_corpora_are_placed_without_overflow():
    """Six shares below 2^31 whose sum is above it, against Python's integers."""
    shares = {name: 10**9 + 7 * number for number, name in enumerate("abcdef")}
    found = blend(dict.fromkeys("abcdef", 10**6), shares)
    index = np.arange(3 * 10**9, 3 * 10**9 + 20)
    corpora, _ = found.locate(index)
    for at, corpus in zip(index, corpora):
        before, after = found.counts(int(at)), found.counts(int(at) + 1)
        assert after[found.names[corpus]] == before[found.names[corpus]] + 1


def test_later_starts_know_the_segment(tmp_path):
    stream = make_stream(tmp_path, {"a": 2001, "b": 801})
    weights = {"a": CorpusSection(weight=1), "b": CorpusSection(weight=5, paths=("x",))}
    first = blend_of(stream, 2, {}, seed=4)
    second = blend_of(stream, 2, weights, seed=4, before=first.segment, consumed=100)
    # Other paths, and weights of the same ratio, are no change.
    same = {"b": CorpusSection(weight=10), "a": CorpusSection(weight=2, paths=("y",))}
    third = blend_of(stream, 2, same, seed=4, before=second.segment, consumed=333)
    assert third.segment == second.segment
    assert pairs(third, 333, 500) == pairs(second, 333, 500)
    # And back to the first shares is a change again.
    back = blend_of(stream, 2, {}, seed=4, before=third.segment, consumed=400)
    assert back.segment.start == 400 and back.segment.consumed == second.counts(400)


def test_a_blend_that_cannot_be_read_is_refused(tmp_path):
    stream = make_stream(tmp_path, {"a": 2001, "b": 8})
    names = {"a": CorpusSection(), "books": CorpusSection()}
    with pytest.raises(ConfigError, match=r"data\.corpora = a, books: .* was built from a, b\. "):
        blend_of(stream, 2, names, seed=0)
    weights = {"a": CorpusSection(weight=1), "b": CorpusSection(weight=1)}
    with pytest.raises(ConfigError, match=r"length = 8: .* 9 tokens, .* the corpus b has fewer"):
        blend_of(stream, 8, weights, seed=0)
    with pytest.raises(ConfigError, match="the corpus b has fewer"):
        blend_of(stream, 8, {"a": CorpusSection(), "b": CorpusSection(epochs=50)}, seed=0)
    # By size it has no share, so there is nothing to read.
    assert blend_of(stream, 8, {}, seed=0).segment.shares == {"a": 1, "b": 0}
    with pytest.raises(ConfigError, match=r"sequence_length = 4000: .* the corpus a, b has fewer"):
        blend_of(stream, 4000, {}, seed=0)

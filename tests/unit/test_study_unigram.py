"""Token frequencies of the scored text, against scipy and a count of its own."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pretrain.data.stream import TokenStream
from pretrain.study import reading


def test_the_entropy_is_that_of_scipy() -> None:
    counts = np.random.default_rng(1).integers(0, 50, 200)
    assert reading.entropy(counts) == pytest.approx(stats.entropy(counts), rel=1e-12)
    assert reading.entropy(np.array([0, 7, 7, 0])) == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize("most", [None, 1000])
def test_the_scored_tokens_are_counted_once_for_each_text(
    tmp_path: Path, tiny_data: Path, most: int | None
) -> None:
    stream = TokenStream(tiny_data / "validation")
    tokens = most or len(stream)
    reading.count_unigram(tmp_path, stream, most)
    file = tmp_path / reading.UNIGRAM
    counts = list(Counter(stream.read(0, tokens).tolist()).values())
    record = {"validation": stream.identity[:12], "tokens": tokens}
    known = reading.parse_unigram(json.loads(file.read_text()), record)
    assert known == pytest.approx((stats.entropy(counts), tokens), rel=1e-12)
    before = file.stat()
    reading.count_unigram(tmp_path, stream, most)
    assert file.stat() == before
    # Another text or another number of tokens: counted anew, and not taken for this one.
    reading.count_unigram(tmp_path, stream, 500)
    assert reading.parse_unigram(json.loads(file.read_text()), record) is None
    other = {"validation": "0" * 12, "tokens": 500}
    assert reading.parse_unigram(json.loads(file.read_text()), other) is None

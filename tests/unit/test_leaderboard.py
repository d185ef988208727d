"""`pretrain leaderboard`: who is ranked against whom, and what a page makes of hostile entries."""

from __future__ import annotations

import base64
import hashlib
import json
import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from pretrain.config import ConfigError
from pretrain.evaluation.leaderboard import add, build
from pretrain.evaluation.records import Losses, records_json
from tests.unit.report_records import Page, make_record

TEXT, OTHER = "aaaaaaaaaaaa", "bbbbbbbbbbbb"
HOSTILE = "<script>alert(1)</script>"
LENGTHS = 128, 512


def evaluations(loss, seed, text=TEXT, **changes):
    """The records of one checkpoint, whose blocks are hard or easy for every checkpoint alike."""
    hard = np.random.default_rng(0).normal(0, 50, 24)
    own = np.random.default_rng(seed).normal(0, 8, (len(LENGTHS), 24))
    for length, noise in zip(LENGTHS, own):
        losses = Losses(loss * 1000 + hard + noise, np.full(24, 1000.0))
        mean = losses.losses.sum() / 24_000
        record = make_record("alibi", "sliding", length, math.exp(mean), seed=seed)
        record |= {"text": text, "tokens": 24_000, "blocks": losses}
        yield record | {"bits_per_byte": mean / math.log(2) * 0.4, **changes}


@pytest.fixture
def board(tmp_path):
    """A function that adds an entry, and the directory."""

    def enter(name, records, **about):
        (tmp_path / "curve.json").write_bytes(records_json(records))
        return add(tmp_path / "board", tmp_path / "curve.json", name=name, **about)

    return enter, tmp_path / "board"


def test_rows_of_one_text_are_ranked_by_what_is_sure(board):
    enter, folder = board
    losses = {"Middle": 2.03, "Best": 2.0, "As good": 2.001, "Worst": 2.2}
    models = {n: list(evaluations(loss, seed)) for seed, (n, loss) in enumerate(losses.items())}
    for name, records in models.items():
        # Beside what one call evaluated may stand what training evaluated, which names no code.
        enter(name, [r | {"code": "1"} for r in records] + records, equal="tokens")
    enter("Other text", evaluations(1.0, 7, OTHER), equal="tokens")
    enter("Nothing said", evaluations(1.0, 8))
    enter("Text not known", evaluations(1.0, 9, None), equal="tokens")
    unknown = {"blocks": None, "loss_low": None, "loss_high": None}
    enter("Noise not known", evaluations(3.0, 10, **unknown), equal="tokens")
    ranks, order = {}, []
    for data, (rank, name, _, _, length, _, _, bits, *_) in Page(build(folder).read_text()).rows:
        ranks[name, int(length)] = rank
        order.append((data["data-text"], data["data-equal"], int(length), float(bits)))
    assert order == sorted(order) and len(order) == 2 * 8
    for i, length in enumerate(LENGTHS):
        blocks = {name: records[i]["blocks"].losses / 1000 for name, records in models.items()}
        for name, mine in blocks.items():
            # The t-test of the differences of blocks of one size, at 95 %.
            tests = (ttest_1samp(other - mine, 0) for other in blocks.values() if other is not mine)
            surely_better = sum(t.pvalue < 0.05 and t.statistic < 0 for t in tests)
            assert ranks[name, length] == str(1 + surely_better)
    # The text alone, unpaired, would not tell 2.0 from 2.03.
    assert [ranks[name, 512] for name in losses] == ["3", "1", "1", "4"]
    others = "Other text", "Nothing said", "Text not known", "Noise not known"
    assert [ranks[name, 512] for name in others] == ["1", "1", "", ""]


def test_rounding_changes_no_rank(board):
    enter, folder = board
    for name, loss in {"Run": 2.0, "Export": 2.0 - 6e-7, "Better": 2.0 - 6e-6}.items():
        enter(name, evaluations(loss, 1))
    ranks = {(name, rank) for _, (rank, name, *_) in Page(build(folder).read_text()).rows}
    assert ranks == {("Better", "1"), ("Export", "2"), ("Run", "2")}


def test_hostile_entries_are_text(board):
    enter, folder = board
    broken = {"run": '"><img src=x onerror=alert(1)>', "checkpoint": "a'; rm -rf /"}
    records = evaluations(2.0, 1, '"><b>', method="$_$", **broken)
    enter(HOSTILE, records, authors="</td></table>", link="http://a/")
    content = build(folder).read_text()
    page = Page(content)
    assert [tag for tag, _ in page.tags].count("script") == 1
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    [policy] = [given["content"] for _, given in page.tags if "http-equiv" in given]
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert page.text.count(HOSTILE) == 2 and page.text.count("</td></table>") == 2
    [picture] = [given["src"] for _, given in page.tags if "src" in given]
    assert picture.startswith("data:image/svg+xml;base64,")
    assert {given["href"] for _, given in page.tags if "href" in given} == {"http://a/"}
    assert not {"b", "link"} & {tag for tag, _ in page.tags}
    assert "'a'\"'\"'; rm -rf /'" in page.text
    assert content == build(folder).read_text()
    [diverged, *_] = evaluations(2.0, 2)
    diverged["blocks"].losses[3] = math.nan
    enter("A block that diverged", [diverged])
    assert "A block that diverged" in build(folder).read_text()


@pytest.mark.parametrize(
    ("about", "of_record", "key"),
    [
        ({"link": "javascript:alert(1)"}, {}, "link"),
        ({"verified": True}, {}, "verified"),
        ({"records": []}, {}, "records"),
        ({}, {"length": "128"}, "records.0.length"),
        ({}, {"run": {}}, "records.0.run"),
        ({}, {"perplexity": math.inf}, "records.0.perplexity"),
        ({}, {"blocks": {"losses": [1.0], "tokens": []}}, "blocks"),
        ({}, {"blocks": {"losses": [1.0], "tokens": [-1.0]}}, "blocks"),
        ({}, {"step": "6"}, "records.0.step"),
        ({}, {"length": 10**20}, "records.0.length"),
        ({}, {"bits_per_byte": 1e308}, "records.0.bits_per_byte"),
        ({}, {"checkpoint": "another"}, "several checkpoints"),
        ({}, {"length": LENGTHS[1]}, "one row twice"),
    ],
)
def test_a_file_of_wrong_form_is_named_with_its_key(board, about, of_record, key):
    enter, folder = board
    path = enter("Mine!", evaluations(2.0, 1))
    assert path.name == "mine.json"
    with pytest.raises(ConfigError, match="Choose another"):
        enter("mine", evaluations(2.0, 1))
    content = json.loads(path.read_text())
    content["records"][0] |= of_record
    path.write_text(json.dumps(content | about))
    with pytest.raises(ConfigError, match=key) as error:
        build(folder)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)

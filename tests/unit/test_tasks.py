"""The long-context tasks, against a model that copies perfectly and one that knows nothing."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from pretrain.config import ConfigError
from pretrain.data.stream import TokenStream
from pretrain.evaluation.tasks import (
    DEPTHS,
    FIELDS,
    PLANTED,
    QUERY,
    Arm,
    Cell,
    TasksRequest,
    Text,
    check_out,
    interval,
    long_documents,
    make_cell,
    measure,
    write_report,
)
from tests.unit.splits import write_split

VOCABULARY, EOS = 512, 0
CUT = 64


def make_text(folder: Path, lengths: list[int], seed: int = 1) -> Text:
    """A validation text of documents of these lengths; its tokens are random, EOS left out."""
    random = np.random.default_rng(0)
    documents = [
        np.append(random.choice(np.arange(3, VOCABULARY), length), EOS) for length in lengths
    ]
    write_split(folder, {"all": [documents]}, split="validation")
    stream = TokenStream(folder / "validation")
    return Text(stream, seed, long_documents(stream, 2 * CUT))


def uniform(arm: Arm) -> np.ndarray:
    """Score an arm with a model that gives every token of the vocabulary the same probability."""
    return np.array([[math.log(VOCABULARY), 0.0]] * len(arm.rows))


def copier(arm: Arm) -> np.ndarray:
    """Score with a model that is sure of what followed the longest context it has seen before.

    It knows nothing where the last token is new.
    """
    return np.array([copied(row.tokens(), arm) for row in arm.rows])


def copied(tokens: np.ndarray, arm: Arm) -> list[float]:
    assert tokens.shape == (arm.length + 1,) and tokens.dtype == np.int64
    losses, right = [], []
    for target in range(len(tokens) - arm.scored, len(tokens)):
        context = tokens[:target]
        longest, follower = 0, None
        for end in range(1, target):
            same = 0
            while same < end and context[end - 1 - same] == context[target - 1 - same]:
                same += 1
            if same > longest:
                longest, follower = same, tokens[end]
        if follower is None:
            losses.append(math.log(VOCABULARY))
        else:
            losses.append(0.0 if follower == tokens[target] else 20.0)
        right.append(follower == tokens[target])
    return [float(np.mean(losses)), float(np.mean(right))]


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return make_text(tmp_path, [900, 40, 300, 150])


def values(cell: Cell, score, name: str) -> list[float]:
    return [r["value"] for r in measure(cell, score) if r["measure"] == name]


@pytest.mark.parametrize("task", ["needle", "induction", "documents"])
def test_a_model_that_knows_nothing_gains_nothing(text, task):
    cell = make_cell(task, text, 128, 8, CUT)
    # documents: means over other numbers of sequences are rounded in another way.
    assert values(cell, uniform, "gain_nats") == pytest.approx([0] * len(cell.places), abs=1e-14)
    assert values(cell, uniform, "loss_nats") == pytest.approx(
        [math.log(VOCABULARY)] * len(cell.places), rel=1e-15
    )
    assert values(cell, uniform, "accuracy") == [0.0] * len(cell.places)


@pytest.mark.parametrize("task", ["needle", "induction"])
@pytest.mark.parametrize("length", [64, 128, 300])
def test_a_perfect_copier_loses_nothing_wherever_it_has_to_look(text, task, length):
    cell = make_cell(task, text, length, 6, CUT)
    assert values(cell, copier, "loss_nats") == [0.0] * len(cell.places)
    assert values(cell, copier, "accuracy") == [1.0] * len(cell.places)
    # Without the first copy it finds shorter matches at best, and is wrong.
    assert min(values(cell, copier, "gain_nats")) > 3


# ---- sequences -----------------------------------------------------------------------------------
@pytest.mark.parametrize("task", ["needle", "induction"])
def test_sequences_differ_by_what_is_planted_alone(text, task):
    length = 200
    cell = make_cell(task, text, length, 8, CUT)
    assert {arm.length for arm in cell.arms.values()} == {length}
    assert {arm.scored for arm in cell.arms.values()} == {PLANTED - QUERY}
    for place in cell.places:
        start = length + 1 - PLANTED - place.distance
        if task == "needle":
            assert start == round(place.depth * (length + 1 - 2 * PLANTED))
        pairs = zip(cell.arms[place.helped].rows, cell.arms[place.alone].rows, strict=True)
        for helped, alone in pairs:
            tokens, without = helped.tokens(), alone.tokens()
            assert helped.sample == alone.sample
            planted = slice(start, start + PLANTED)
            np.testing.assert_array_equal(tokens[planted], tokens[-PLANTED:])
            np.testing.assert_array_equal(
                np.delete(tokens, np.r_[planted]), np.delete(without, np.r_[planted])
            )
            if task == "induction":
                assert len(np.unique(tokens[-PLANTED:])) == PLANTED
            # The text around a needle is the text without it.
            windows = np.lib.stride_tricks.sliding_window_view(without[:-PLANTED], PLANTED)
            assert not (windows == tokens[-PLANTED:]).all(axis=1).any()
    depths = [place.depth for place in cell.places]
    distances = [place.distance for place in cell.places]
    assert depths == list(DEPTHS) if task == "needle" else distances == [32, 64, 128, 168]


def test_needles_are_within_documents_and_the_text_is_in_a_row(text):
    whole = text.stream.read(0, len(text.stream))
    windows = {tuple(w) for w in np.lib.stride_tricks.sliding_window_view(whole, PLANTED)}
    for row in make_cell("needle", text, 128, 20, CUT).arms["without"].rows:
        tokens = row.tokens()
        assert EOS not in tokens[-PLANTED:] and tuple(tokens[-PLANTED:]) in windows
        around = tokens[:-PLANTED]
        pieces = np.lib.stride_tricks.sliding_window_view(around, PLANTED)
        # All of it occurs in the text, but where a needle was cut out of the middle.
        strange = [tuple(piece) not in windows for piece in pieces]
        assert sum(strange) < PLANTED


def test_pieces_of_documents_are_scored_twice_at_the_same_tokens(text):
    whole = text.stream.read(0, len(text.stream))
    cell = make_cell("documents", text, 150, 20, CUT)
    # 6 pieces of the first document, 2 of the third, 1 of the last; the second is too short.
    assert (cell.samples, cell.documents) == (9, 3)
    full, cut = cell.arms["full"], cell.arms["cut"]
    assert (full.length, cut.length, cut.scored) == (150, CUT, CUT // 16)
    assert full.scored == 150 // 2 // cut.scored * cut.scored
    for row in full.rows:
        tokens = row.tokens()
        assert EOS not in tokens[1:]
        pieces = [each.tokens() for each in cut.rows if each.sample == row.sample]
        assert all(len(piece) == CUT + 1 for piece in pieces)
        np.testing.assert_array_equal(
            np.concatenate([piece[-cut.scored :] for piece in pieces]), tokens[-full.scored :]
        )
        stream = " ".join(map(str, [EOS, *whole]))
        assert all(" ".join(map(str, each)) in stream for each in [tokens, *pieces])


@pytest.mark.parametrize("task", ["needle", "induction", "documents"])
def test_what_is_drawn_depends_on_the_seed_alone(tmp_path, task):
    def rows(seed: int, samples: int, length: int = 128) -> list[list[int]]:
        found = Text(text.stream, seed, text.documents)
        cell = make_cell(task, found, length, samples, CUT)
        return [row.tokens().tolist() for row in next(iter(cell.arms.values())).rows]

    text = make_text(tmp_path, [4000, 500])
    again = rows(1, 4)
    assert again == rows(1, 4)
    assert again != rows(2, 4)
    if task != "documents":
        assert rows(1, 6)[:4] == again


def test_documents_are_found_across_reads(tmp_path, monkeypatch):
    from pretrain.evaluation import tasks as module

    lengths = [10, 129, 1, 128, 127, 300]
    text = make_text(tmp_path, lengths)
    expected = ((11, 129), (143, 128), (400, 300))
    for block in (2**20, 100, 7, 1):
        monkeypatch.setattr(module, "SAMPLED_TOKENS", block)
        assert long_documents(text.stream, 128) == expected


@pytest.mark.parametrize(
    ("task", "length", "reason"),
    [
        ("needle", 63, "64 tokens are the least"),
        ("induction", 1394, "has only 1394 tokens"),
        ("documents", 127, "128 tokens, twice the cut context"),
        ("documents", 901, "no validation document has 901 tokens (the longest has 900)"),
    ],
)
def test_what_cannot_be_measured_has_a_reason(text, task, length, reason):
    assert reason in make_cell(task, text, length, 4, CUT)
    longest = {"needle": 64, "induction": 1393, "documents": 900}[task]
    assert isinstance(make_cell(task, text, longest, 2, CUT), Cell)


def test_a_text_without_needles_says_so(tmp_path):
    text = make_text(tmp_path, [PLANTED - 1] * 20)
    assert "no 32 tokens in a row within one document" in make_cell("needle", text, 128, 2, CUT)
    few = np.append(np.tile(np.arange(1, PLANTED), 20), EOS)
    write_split(tmp_path / "few", {"all": [[few]]}, split="validation")
    text = Text(TokenStream(tmp_path / "few/validation"), 1)
    assert "fewer than 32 different tokens" in make_cell("induction", text, 128, 2, CUT)


# ---- intervals -----------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [2, 5, 64, 500])
def test_intervals_of_one_sample_a_document_are_those_of_the_t_test(n):
    from scipy.stats import ttest_1samp

    samples = np.random.default_rng(n).exponential(size=n)
    expected = ttest_1samp(samples, 0).confidence_interval(0.95)
    # A rounding of the sums.
    assert interval(samples, range(n)) == pytest.approx((expected.low, expected.high), rel=1e-10)
    # Of samples that are copies of others nothing is learned.
    copies = np.repeat(samples, 7)
    documents = np.repeat(np.arange(n), 7).tolist()
    assert interval(copies, documents) == pytest.approx(interval(samples, range(n)), rel=1e-10)


def test_needles_and_pieces_know_their_document(tmp_path):
    text = make_text(tmp_path, [300, 200, 900])
    needle = make_cell("needle", text, 128, 20, CUT)
    starts = np.cumsum([0, 301, 201])
    for sample, row in enumerate(needle.arms["without"].rows):
        tokens, found = row.tokens()[-PLANTED:], []
        for document, start in enumerate(starts):
            body = text.stream.read(int(start), [300, 200, 900][document])
            windows = np.lib.stride_tricks.sliding_window_view(body, PLANTED)
            found += [document] * bool((windows == tokens).all(axis=1).any())
        assert needle.clusters[sample] in found
    assert needle.documents == len(set(needle.clusters)) > 1
    assert make_cell("induction", text, 128, 20, CUT).clusters == list(range(20))
    [record] = [r for r in measure(needle, uniform) if r["measure"] == "loss_nats"][:1]
    assert (record["n"], record["documents"]) == (20, needle.documents)


def test_one_document_has_no_interval_and_a_loss_that_is_not_finite_shows():
    assert interval(np.ones(9), [3] * 9) == (None, None)
    assert interval(np.ones(9), range(9)) == (1.0, 1.0)
    assert all(math.isnan(end) for end in interval(np.array([1, 2, 3, 4, math.nan]), range(5)))
    assert all(math.isnan(end) for end in interval(np.array([1, 2, 3, 4, math.inf]), range(5)))


# ---- reports -------------------------------------------------------------------------------------
def records_of(text: Text, runs: list[tuple[str, str, int]]) -> list[dict]:
    found = []
    for number, (run, method, trained) in enumerate(runs):
        common = {"run": run, "step": 8, "method": method, "seed": 1, "train_length": trained}
        common |= {"tokenizer": "a" * 12, "validation": "b" * 12, "checkpoint": f"{run}/c"}
        common["precision"] = "fp32"
        for task, length in (("needle", 128), ("induction", 128), ("documents", 300)):
            cell = make_cell(task, text, length, 6, CUT)
            score = copier if number == 0 and task != "documents" else uniform
            found += [{**common, **record} for record in measure(cell, score)]
    return [{field: record[field] for field in FIELDS} for record in found]


def test_a_report_says_every_value_and_keeps_runs_apart(text, tmp_path):
    records = records_of(text, [("runs/a", "alibi", 64), ("runs/b", "alibi", 64)])
    records[0]["value"] = math.nan
    names = write_report(tmp_path / "tasks.json", records, ["needle at 9 is left out: why"])
    kinds = ("png", "svg", "pdf")
    ends = [f"{end}.{kind}" for end in ("", "_depth", "_distance") for kind in kinds]
    drawn = [f"tasks{end}" for end in ends]
    assert names == ["tasks.csv", *drawn, "tasks.md", "tasks.json"]
    kept = json.loads((tmp_path / "tasks.json").read_text())["records"]
    assert [list(record) for record in kept] == [list(FIELDS)] * len(records)
    assert kept[0]["value"] is None and kept[1:] == records[1:]
    rows = list(csv.DictReader((tmp_path / "tasks.csv").open()))
    assert len(rows) == len(records)
    assert float(rows[1]["value"]) == records[1]["value"] and rows[-1]["depth"] == ""
    page = (tmp_path / "tasks.md").read_text()
    assert "needle at 9 is left out: why" in page and "tasks.png" in page
    for run in ("runs/a", "runs/b"):
        assert f"alibi ({run}, step 8)" in page
    assert "n = 6" in page and "Student's t" in page
    assert Image.open(tmp_path / "tasks.png").size[0] > 1000
    assert ElementTree.parse(tmp_path / "tasks.svg").getroot().tag.endswith("svg")
    again = {name: (tmp_path / name).read_bytes() for name in names}
    write_report(tmp_path / "tasks.json", records, ["needle at 9 is left out: why"])
    assert {name: (tmp_path / name).read_bytes() for name in names} == again


def test_a_report_of_something_else_is_not_overwritten(tmp_path):
    check_out(tmp_path / "tasks.json")
    (tmp_path / "curve.json").write_text(
        '{"train_length": 1, "records": [{"protocol": "sliding"}]}'
    )
    (tmp_path / "notes.md").write_text("mine")
    for out, name in (("curve.json", "curve.json"), ("notes.json", "notes.md")):
        with pytest.raises(ConfigError, match=f"{name} would be overwritten"):
            check_out(tmp_path / out)


@pytest.mark.parametrize(
    ("tasks", "lengths", "samples", "word"),
    [
        ("needles", None, 4, "--tasks needles"),
        ("needle,", None, 4, "--tasks"),
        ("needle", "12k", 4, "--lengths 12k"),
        ("needle", "0", 4, "--lengths 0"),
        ("needle", None, 0, "--samples 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(tasks, lengths, samples, word):
    with pytest.raises(ConfigError, match=word):
        TasksRequest.parse(tasks, lengths, samples)
    request = TasksRequest.parse("documents,needle", "128,64,128", 4)
    assert (request.tasks, request.lengths) == (("needle", "documents"), (128, 64))

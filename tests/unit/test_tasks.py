"""The long-context tasks, against a model that copies perfectly and one that knows nothing."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import ConfigError
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import load_tokenizer
from pretrain.evaluation.records import wilson_interval
from pretrain.evaluation.task_samples import DEPTHS, PLANTED, QUERY, TASKS, Text
from pretrain.evaluation.tasks import interval, measure, write_report
from tests.unit.splits import write_split

VOCABULARY, EOS = 512, 0
COPYING = {name: TASKS[name] for name in ("needle", "induction")}
RULER = {name: task for name, task in TASKS.items() if name not in COPYING}
both = pytest.mark.parametrize("task", COPYING.values(), ids=COPYING)
ruler = pytest.mark.parametrize("task", RULER.values(), ids=RULER)


def make_text(folder: Path, lengths: list[int], seed: int = 1) -> Text:
    """A validation text of documents of these lengths; its tokens are random, EOS left out."""
    random = np.random.default_rng(0)
    documents = [
        np.append(random.choice(np.arange(3, VOCABULARY), length), EOS) for length in lengths
    ]
    write_split(folder, {"all": [documents]}, split="validation")
    return Text(TokenStream(folder / "validation"), seed)


def uniform(length: int, rows) -> np.ndarray:
    """Score with a model that gives every token of the vocabulary the same probability."""
    return np.array([[math.log(VOCABULARY), 0.0, 0.0]] * len(rows))


def copier(length: int, rows) -> np.ndarray:
    """Score with a model that is sure of what followed the longest context it has seen before.

    It knows nothing where the last token is new.
    """
    return np.array([copied(*row(), length) for row in rows])


def copied(tokens: np.ndarray, scored: int, length: int) -> list[float]:
    assert tokens.shape == (length + 1,) and tokens.dtype == np.int64
    losses, right = [], []
    for target in range(len(tokens) - scored, len(tokens)):
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
    return [float(np.mean(losses)), float(np.mean(right)), float(all(right))]


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return make_text(tmp_path, [900, 40, 300, 150])


def values(found, name: str) -> list[float]:
    return [r["value"] for r in found if r["measure"] == name]


@both
def test_a_model_that_knows_nothing_gains_nothing(text, task):
    found = list(measure(task, text, 128, 8, uniform))
    assert [r["depth"] for r in found if r["measure"] == "accuracy"] == list(DEPTHS)
    assert values(found, "gain_nats") == values(found, "accuracy") == [0] * len(DEPTHS)
    assert values(found, "loss_nats") == pytest.approx([math.log(VOCABULARY)] * len(DEPTHS))


@both
@pytest.mark.parametrize("length", [64, 300])
def test_a_perfect_copier_loses_nothing_wherever_it_has_to_look(text, task, length):
    found = list(measure(task, text, length, 4, copier))
    assert values(found, "loss_nats") == [0.0] * len(DEPTHS)
    assert values(found, "accuracy") == values(found, "exact") == [1.0] * len(DEPTHS)
    # Without the first copy it finds shorter matches at best, and is wrong.
    assert min(values(found, "gain_nats")) > 3


@both
def test_sequences_differ_by_what_is_planted_alone(text, task):
    length = 200
    for sample in range(8):
        without, scored = task.draw(text, length, 0.0, sample, planted=False)
        assert len(without) == length + 1 and scored == PLANTED - QUERY
        if task.name == "induction":
            assert len(np.unique(without[-PLANTED:])) == PLANTED
        # The text around a needle is the text without it.
        windows = np.lib.stride_tricks.sliding_window_view(without[:-PLANTED], PLANTED)
        assert not (windows == without[-PLANTED:]).all(axis=1).any()
        for depth in DEPTHS:
            tokens = task.draw(text, length, depth, sample).tokens
            start = round(depth * (length + 1 - 2 * PLANTED))
            planted = np.r_[start : start + PLANTED]
            np.testing.assert_array_equal(tokens[planted], without[-PLANTED:])
            np.testing.assert_array_equal(np.delete(tokens, planted), np.delete(without, planted))


def test_needles_are_within_documents_and_the_text_is_in_a_row(text):
    whole = text.stream.read(0, len(text.stream))
    windows = {tuple(w) for w in np.lib.stride_tricks.sliding_window_view(whole, PLANTED)}
    starts = np.cumsum([0, 901, 41, 301, 151])
    for sample in range(20):
        tokens = TASKS["needle"].draw(text, 128, 0.0, sample, planted=False).tokens
        needle = tokens[-PLANTED:]
        assert EOS not in needle and tuple(needle) in windows
        pieces = np.lib.stride_tricks.sliding_window_view(tokens[:-PLANTED], PLANTED)
        # All of it occurs in the text, but where a needle was cut out of the middle.
        assert sum(tuple(piece) not in windows for piece in pieces) < PLANTED
        # Its cluster is the document that it is from.
        document = TASKS["needle"].cluster(text, sample)
        body = whole[starts[document] : starts[document + 1]]
        of_document = np.lib.stride_tricks.sliding_window_view(body, PLANTED)
        assert (of_document == needle).all(axis=1).any()


@both
def test_what_is_drawn_depends_on_the_seed_alone(text, task):
    def drawn(seed: int) -> list[list[int]]:
        again = Text(text.stream, seed)
        return [task.draw(again, 128, 0.5, sample).tokens.tolist() for sample in range(4)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_text_without_needles_says_so(tmp_path):
    text = make_text(tmp_path, [PLANTED - 1] * 20)
    with pytest.raises(ConfigError, match="no 32 tokens in a row within one document"):
        TASKS["needle"].draw(text, 128, 0.0, 0)
    few = np.append(np.tile(np.arange(1, PLANTED), 20), EOS)
    write_split(tmp_path / "few", {"all": [[few]]}, split="validation")
    text = Text(TokenStream(tmp_path / "few/validation"))
    with pytest.raises(ConfigError, match="fewer than 32 different tokens"):
        TASKS["induction"].draw(text, 128, 0.0, 0)
    # A vocabulary of words has no numbers but its own.
    (tmp_path / "dict.txt").write_text("".join(f"{word}aaa 9\n" for word in "bcdefghijk"))
    text.__dict__["tokenizer"] = load_tokenizer(tmp_path / "dict.txt")
    with pytest.raises(
        ConfigError, match=r"has no tokens for ' The 10 most.*Choose among needle and in"
    ):
        TASKS["cwe"].draw(text, 128, None, 0)
    text.words.clear()
    with pytest.raises(ConfigError, match="fewer than 4 different words of 4 to 8 Latin letters"):
        TASKS["niah_multikey"].draw(text, 128, 0.0, 0)


@pytest.mark.parametrize("n", [2, 64])
def test_intervals_of_one_sample_a_document_are_those_of_the_t_test(n):
    from scipy.stats import ttest_1samp

    samples = np.random.default_rng(n).exponential(size=n)
    expected = ttest_1samp(samples, 0).confidence_interval(0.95)
    # A rounding of the sums.
    assert interval(samples, range(n)) == pytest.approx((expected.low, expected.high), rel=1e-10)
    # Of samples that are copies of others nothing is learned.
    copies, documents = np.repeat(samples, 7), np.repeat(np.arange(n), 7).tolist()
    assert interval(copies, documents) == pytest.approx(interval(samples, range(n)), rel=1e-10)
    assert all(map(math.isnan, interval(np.ones(9), [3] * 9)))


def test_a_report_says_every_value_and_keeps_runs_apart(text, tmp_path):
    records = []
    for run, score in (("runs/a", copier), ("runs/b", uniform)):
        common = {"run": run, "step": 8, "method": "alibi", "train_length": 64}
        for task in COPYING.values():
            records += [common | record for record in measure(task, text, 128, 6, score)]
    records[0]["value"] = math.nan
    write_report(tmp_path / "out/tasks.json", records)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files.keys() == {"tasks.json", "tasks.md", "tasks.png", "tasks.svg"}
    kept = json.loads(files["tasks.json"])["records"]
    assert kept[0]["value"] is None and kept[1:] == records[1:]
    page = files["tasks.md"].decode()
    assert "| alibi (runs/a, step 8) | 0.25 |" in page and "alibi (runs/b, step 8)" in page
    assert "induction: accuracy, n = 6" in page and "Student's t" in page
    write_report(tmp_path / "out/tasks.json", records)
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


# ---- RULER, against plain Python that reads the prompt -------------------------------------------
@pytest.fixture(scope="module")
def shakespeare(tiny_data) -> Text:
    return Text(TokenStream(tiny_data / "validation"))


def answer(name: str, prompt: str) -> list[str]:
    """Find out what the prompt asks for."""
    context, _, query = prompt.rpartition(" The ")
    if name.startswith("niah"):
        return re.findall(rf"magic number of {query.split()[-2]} is (\d+)\.", context)
    if name == "vt":
        held = query.split()[-2:-1]
        for variable, value in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", context):
            held += [variable] * (value in held)
        return held[1:]
    counts = Counter(context.rpartition(" List:")[2].split())
    if name == "cwe":
        return [word for word, _ in counts.most_common(10)]
    (dots, _), *most = counts.most_common(5)
    # The control has no list. In one, no other answer is right.
    assert dots != "..." or len({count for _, count in most}) == len(most)
    return [word for word, _ in most[:3]]


def solver(text: Text, solve):
    """Score with a model that is sure of the answer that `solve` gives to a decoded prompt."""

    def score(length: int, rows) -> np.ndarray:
        found = []
        for tokens, scored in (row() for row in rows):
            assert tokens.shape == (length + 1,)
            prompt, truth = (text.tokenizer.decode(x.tolist()) for x in np.split(tokens, [-scored]))
            right = truth.strip() == ", ".join(solve(prompt))
            found.append([0.0 if right else math.log(VOCABULARY), right, right])
        return np.array(found)

    return score


@ruler
@pytest.mark.parametrize("length", [640, 4096])
def test_whoever_reads_the_prompt_answers_and_without_what_is_asked_nobody(
    shakespeare, task, length
):
    shortest = task.shortest(shakespeare, 4)
    assert shortest < 640
    for sample in range(4):
        task.draw(shakespeare, shortest, task.depths[0], sample)
    solve = solver(shakespeare, lambda prompt: answer(task.name, prompt))
    found = list(measure(task, shakespeare, length, 4, solve))
    assert [r["depth"] for r in found if r["measure"] == "exact"] == list(task.depths)
    assert set(values(found, "exact")) == {1.0}
    # In the control the same prompt has no answer.
    assert min(values(found, "gain_nats")) == math.log(VOCABULARY)


@pytest.mark.parametrize(
    ("name", "chance"), [("niah_single", 1), ("niah_multikey", 1 / 4), ("niah_multivalue", 1 / 24)]
)
def test_chance_of_who_finds_all_numbers_and_orders_them_at_random(shakespeare, name, chance):
    random, count = np.random.default_rng(0), 200

    def guess(prompt: str) -> list[str]:
        numbers = re.findall(r"magic number of \w+ is (\d+)\.", prompt)
        return random.permutation(numbers)[: 4 if name == "niah_multivalue" else 1].tolist()

    found = list(measure(TASKS[name], shakespeare, 400, count, solver(shakespeare, guess)))
    for record in found[3::4]:
        assert record["measure"] == "exact" and record["low"] <= chance <= record["high"]


def test_intervals_of_a_share_are_wilsons():
    """At both ends the score test of the share gives exactly 5 %: 1.96 standard errors."""
    for right in (0, 1, 7, 20):
        low, high = wilson_interval(np.arange(20) < right)
        for share in {low, high} - {0.0, 1.0}:
            errors = (right / 20 - share) / (share * (1 - share) / 20) ** 0.5
            assert abs(errors) == pytest.approx(1.959963984540054, rel=1e-9)
        assert 0 <= low <= right / 20 <= high <= 1 and low < high

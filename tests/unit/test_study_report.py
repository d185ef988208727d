"""A study's report: what it says is found in the study's files, and it needs no other file."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import math
import re
import shutil

import pytest

from pretrain.config import ConfigError
from pretrain.evaluation.judge import CLAIMS, judge
from pretrain.study import published
from pretrain.study.figures import _longest_multiple, figures
from pretrain.study.reading import read_study
from pretrain.study.report import as_code, plain, to_page, write_study_report
from tests.unit.report_records import read_png
from tests.unit.study_files import (
    make_records,
    make_study,
    published_shape,
)
from tests.unit.test_study_published import look_up

TITLE = 'A *study* of <script>alert("x")</script> & [links](javascript:x)'
REASON = "CUDA out of memory | at step 3\nTraceback `x`"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of four methods, of which one run has failed, with its report."""
    directory = make_study(
        tmp_path_factory.mktemp("study") / "made-up",
        TITLE,
        {"t5-128": ("failed", REASON), "rotary-128": ("waiting", None)},
    )
    write_study_report(directory)
    return directory


@pytest.fixture(scope="module")
def text(study):
    return (study / "report" / "report.md").read_text()


def rows_of(text, title):
    """Return the rows of a Markdown table as dictionaries; equal names get numbers."""
    lines = text[text.index(f"{title}") :].split("\n\n")[1].splitlines()
    header, _, *rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]
    names = [name + str(header[:i].count(name) or "") for i, name in enumerate(header)]
    return [dict(zip(names, row)) for row in rows]


def read_csv(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


# ---- what it says --------------------------------------------------------------------------------
def test_every_published_number_is_found_in_the_file_under_the_key_beside_it(text):
    """The published columns, the ratios made of them, and those of speed and memory."""
    seen = 0
    for row in rows_of(text, "Perplexity beside the published numbers"):
        *same, ratio = row["where in published.toml"].split("; ")
        if row["published"] != "-":
            key = (same or [ratio])[0]
            assert row["published"] == f"{look_up(key):.2f}"
            ours = float(row["perplexity"].split()[0])
            assert row["difference"] == f"{100 * (ours / look_up(key) - 1):+.1f} %"
            seen += 1
        if row["published to L"] != "-":
            value, at_l = map(look_up, ratio.split(" / "))
            assert row["published to L"] == f"{value / at_l:.3f}"
            seen += 1
    assert seen > 10
    for row in rows_of(text, "Speed and memory beside sinusoidal positions"):
        if row["published"] != "-":
            value, base = map(look_up, row["where in published.toml"].split(" / "))
            assert row["published"] == f"{value / base:.3f}"
    # Numbers are of the method, lengths and protocol of their row.
    for row in rows_of(text, "Perplexity beside the published numbers"):
        if row["method"] == "alibi" and row["protocol"] == "nonoverlapping":
            key = f"wikitext103.alibi_nonoverlapping.{row['L']}.{row['length']}"
            assert row["published"] == f"{look_up(key):.2f}"


def test_perplexities_are_those_of_the_evaluation(study):
    found = {
        (row["method"], row["train_length"], row["protocol"], row["length"]): row
        for row in read_csv(study / "report" / "data" / "perplexity.csv")
    }
    failed = {("t5", 128), ("rotary", 128)}
    expected = [r for r in make_records() if (r["method"], r["train_length"]) not in failed]
    assert len(found) == len(expected)
    for record in expected:
        sliding = record["protocol"] == "sliding"
        protocol = f"sliding by {record['stride']}" if sliding else "nonoverlapping"
        lengths = str(record["train_length"]), protocol, str(record["length"])
        row = found[record["method"], *lengths]
        assert float(row["perplexity"]) == pytest.approx(record["perplexity"], rel=1e-12)
        at_l = published_shape(
            record["method"], record["train_length"], record["protocol"], record["train_length"]
        )
        assert float(row["ratio"]) == pytest.approx(record["perplexity"] / at_l, rel=1e-9)


def test_verdicts_are_those_of_the_claims_with_the_numbers_they_stand_on(study, text):
    judged = {each.claim.id: each for each in judge(read_study(study).evidence)}
    said = json.loads((study / "report" / "claims.json").read_text())
    assert [row["id"] for row in said] == [claim.id for claim in CLAIMS]
    table = rows_of(text, "Verdicts")
    for row, shown in zip(said, table):
        each = judged[row["id"]]
        assert row["verdict"] == each.verdict.value and len(row["cases"]) == len(each.cases)
        assert shown["claim"] == f"[{row['id']}](#{row['id'].lower()})"
        assert shown["verdict"] == f"**{row['verdict']}**"
        assert row["threshold_source"] and row["source"]
    # Paired block by block, the intervals are narrower than those of the two values.
    (case, _) = said[0]["cases"]
    low, value, high = (case["ratio"][key] for key in ("low", "value", "high"))
    assert value == pytest.approx(0.94) and low < value < high < low + 0.002
    assert (case["tokens"], case["seeds"]) == (50_000, 1)
    assert (
        "- alibi, L = 64: 18.80 at 128 tokens (2 L) against 20.00 at 64 tokens (L), nonoverlapping"
        in text
    )
    assert "**Passes** (one seed: its noise is not known)" in text


def test_early_tokens_and_growth_are_there(study, text):
    assert "| alibi, L = 64 | 128 tokens (2 L) | windows of L that slide by 32 | 50,000 |" in text
    gains = read_csv(study / "report" / "data" / "early_tokens.csv")
    first = {row["part"]: row for row in gains[:3]}
    parts = [float(first[name]["nats"]) for name in ("fewer early tokens", "longer context")]
    assert float(first["in all"]["nats"]) == pytest.approx(math.log(20 / 18.8), rel=1e-9)
    assert sum(parts) == pytest.approx(math.log(20 / 18.8), rel=1e-9)
    assert all(float(row["low"]) < float(row["nats"]) < float(row["high"]) for row in gains)
    growth = read_csv(study / "report" / "data" / "growth.csv")
    alibi = [row for row in growth if (row["line"], row["group"]) == ("alibi", "L = 64")]
    assert [(row["panel"], float(row["x"]), float(row["value"])) for row in alibi] == [
        ("At the training length L", 200, pytest.approx(30)),
        ("At the training length L", 400, pytest.approx(20)),
        ("At 16 L", 200, pytest.approx(28.2)),
        ("At 16 L", 400, pytest.approx(18.8)),
    ]
    # Both training lengths were evaluated up to 2,048 tokens, which is 32 L of one and 16 of the
    # other.
    assert {row["panel"] for row in growth} == {"At the training length L", "At 16 L"}
    assert "at 16 L, the longest multiple of L at which all of these runs" in text


@pytest.mark.parametrize(
    ("lengths", "multiple"),
    [
        ({("a", 64): {64, 128, 2048}, ("b", 128): {128, 2048}}, 1),
        ({("a", 64): {64, 1024, 2048}, ("b", 128): {128, 2048, 4096}}, 32),
        ({("a", 100): {100, 250, 300}, ("b", 100): {100, 250, 300}}, 3),
        ({("a", 512): {64, 128}}, 1),
        ({}, 1),
    ],
)
def test_growth_is_shown_at_one_multiple_of_all_training_lengths(lengths, multiple):
    assert _longest_multiple(lengths) == multiple


# ---- files ---------------------------------------------------------------------------------------
def test_the_data_of_a_figure_are_the_numbers_that_are_drawn(study):
    found = read_study(study)
    for name, figure in figures(found, published.costs(found.evidence)).items():
        rows = iter(read_csv(study / "report" / "data" / f"{name}.csv"))
        for line in figure.lines:
            for x, value in zip(line.xs, line.values):
                row = next(rows)
                assert (row["panel"], row["line"], row["group"]) == line[:3]
                assert (float(row["x"]), float(row["value"])) == (x, value.value)
                ends = [row[key] and float(row[key]) for key in ("low", "high")]
                assert ends == ["" if math.isnan(v) else v for v in (value.low, value.high)]
        assert next(rows, None) is None
        read_png((study / "report" / "figures" / f"{name}.png").read_bytes())
        assert b"<svg" in (study / "report" / "figures" / f"{name}.svg").read_bytes()[:2000]


class References(html.parser.HTMLParser):
    """Collects what a page loads or links, and its scripts."""

    def __init__(self):
        super().__init__()
        self.found, self.tags, self.ids = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.found += [value for key, value in attrs if key in ("src", "href", "data", "action")]
        self.ids |= {value for key, value in attrs if key == "id"}


def test_the_page_needs_no_other_file_and_runs_nothing(study):
    page = (study / "report" / "report.html").read_text()
    references = References()
    references.feed(page)
    for reference in references.found:
        anchor = reference.removeprefix("#") if reference.startswith("#") else None
        assert anchor in references.ids or reference.startswith("data:"), reference[:80]
    assert "script" not in references.tags and "url(" not in page
    assert references.tags.count("img") == 5 and references.tags.count("table") > 5
    title = "A *study* of &lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; [links]"
    assert f"<h1>{title}(javascript:x)</h1>" in page
    assert f"<title>{title}(javascript:x)</title>" in page


def files_of(directory):
    report = directory / "report"
    return {
        path.relative_to(report): path.read_bytes() for path in report.rglob("*") if path.is_file()
    }


def test_equal_results_give_equal_bytes_wherever_the_study_is(tmp_path):
    made = [
        make_study(tmp_path / name / "deep", methods=("alibi",), trained=(64,), lengths=(64, 128))
        for name in ("here", "there")
    ]
    # A study that was moved after its evaluation still knows its runs.
    shutil.move(made[1], tmp_path / "moved")
    for directory in (made[0], tmp_path / "moved"):
        # Two figures less to draw.
        (directory / "efficiency.json").unlink()
        (directory / "runs" / "alibi-64" / "metrics.jsonl").unlink()
        write_study_report(directory)
    first, second = files_of(made[0]), files_of(tmp_path / "moved")
    assert first == second and len(first) > 12
    assert not any(str(tmp_path).encode() in content for content in first.values())


# ---- what is missing -----------------------------------------------------------------------------
def test_a_study_of_nothing_yet_says_so(tmp_path):
    directory = make_study(
        tmp_path / "study",
        states={"alibi-64": ("waiting", None)},
        methods=("alibi",),
        trained=(64,),
    )
    (directory / "efficiency.json").unlink()
    write_study_report(directory)
    text = (directory / "report" / "report.md").read_text()
    assert "0 pass, 0 fail and 14 cannot be judged from these runs. Runs: 1 waiting." in text
    assert "No run has been evaluated." in text and "there is no efficiency.json" in text
    assert "![" not in text
    verdicts = json.loads((directory / "report" / "claims.json").read_text())
    assert {row["verdict"] for row in verdicts} == {"cannot be judged: not measured"}


def test_what_an_earlier_report_left_goes_and_files_of_the_user_stay(tmp_path):
    directory = make_study(
        tmp_path / "study", states={"alibi-64": ("failed", "x")}, methods=("alibi",), trained=(64,)
    )
    (directory / "efficiency.json").unlink()
    report = directory / "report"
    old = ["figures/growth.png", "data/ratio.csv"]
    for name in [*old, "figures/mine.png", "notes.md"]:
        (report / name).parent.mkdir(parents=True, exist_ok=True)
        (report / name).write_text("old")
    write_study_report(directory)
    assert [name for name in old if (report / name).exists()] == []
    assert (report / "figures" / "mine.png").exists() and (report / "notes.md").exists()


def test_runs_without_results_and_contestants_that_failed_are_named(tmp_path):
    directory = make_study(tmp_path / "study", methods=("alibi",), trained=(64,))
    content = json.loads((directory / "study.json").read_text())
    content["runs"].append(content["runs"][0] | {"name": "t5-64", "directory": "runs/t5-64"})
    (directory / "study.json").write_text(json.dumps(content))
    costs = {"device": "2 x cpu", "rounds": 1, "rows": []}
    costs["failed"] = [{"method": "t5", "train_length": 64, "reason": "out of memory"}]
    (directory / "efficiency.json").write_text(json.dumps(costs))
    found = read_study(directory)
    assert found.runs_that(finished=True, evaluated=False) == ["t5-64"]
    assert found.unmeasured == ["t5 at L = 64: out of memory"]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("study.json", None, "is no study's directory"),
        ("study.json", "{", "study.json: cannot be read (JSONDecodeError"),
        (
            "efficiency.json",
            '{"device": "cpu", "rows": [{"method": "t5", "train_length": 64, '
            '"train_tokens_per_second": [NaN], "evaluation_tokens_per_second": [1], '
            '"peak_memory_bytes": 1}]}',
            "a speed of t5 is no positive number",
        ),
        ("evaluation/curve.json", "{}", "curve.json: cannot be read (ValueError"),
        ("evaluation/positions.csv", "a,b\n1,2\n", "positions.csv: cannot be read (ValueError"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, content, said):
    directory = make_study(tmp_path / "study", methods=("alibi",), trained=(64,))
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_text(content)
    with pytest.raises(ConfigError) as refused:
        write_study_report(directory)
    assert said in str(refused.value) and not (directory / "report").exists()


def test_two_texts_and_unknown_published_numbers_are_refused(tmp_path):
    directory = make_study(tmp_path / "study", methods=("alibi",), trained=(64,))
    path = directory / "evaluation" / "curve.json"
    path.write_text(path.read_text().replace("bbbbbbbbbbbb", "dddddddddddd", 1))
    with pytest.raises(ConfigError, match="holds results of 2 validation sets"):
        read_study(directory)
    other = make_study(tmp_path / "other", published="gpt4", methods=("alibi",), trained=(64,))
    with pytest.raises(ConfigError, match='published = "gpt4": there are no such numbers'):
        read_study(other)


# ---- parts ---------------------------------------------------------------------------------------


def test_without_published_numbers_ratios_alone_stand_beside(tmp_path):
    directory = make_study(tmp_path / "study", published=None, methods=("alibi", "sinusoidal"))
    found = read_study(directory)
    rows = published.perplexities_beside(found.curves, found.published)
    assert {row.same for row in rows} == {None}
    shown = {
        (row.curve.method, row.curve.train_length, row.length): row.at_multiple
        for row in rows
        if row.curve.protocol == "nonoverlapping" and row.at_multiple
    }
    value, at_l = shown["alibi", 64, 1024]
    assert (value.key, at_l.key) == (
        "wikitext103.alibi_nonoverlapping.64.1024",
        "wikitext103.alibi_nonoverlapping.64.64",
    )
    # Sinusoidal positions were published beyond L with sliding windows alone.
    assert not any(method == "sinusoidal" for method, *_ in shown)
    table = published.perplexity_table(rows, None)
    assert "published" not in table.header and "published to L" in table.header


@pytest.mark.parametrize("name", ["a_b*c*", "<b>", "[x](y)", "`code`", "# no heading", "a\nb | c"])
def test_text_of_the_user_is_shown_as_it_is(name):
    page = to_page("t", f"x {plain(name)} y", {})
    body = page[page.index("<p>") : page.index("</p>")]
    assert body == f"<p>x {html.escape(' '.join(name.split()))} y"
    block = to_page("t", as_code(f"{name}\n```\nmore"), {})
    assert html.escape(f"{name}\n```\nmore\n", quote=False) in block

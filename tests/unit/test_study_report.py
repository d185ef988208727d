"""A study's report: what it says is found in the study's files, and it needs no other file."""

from __future__ import annotations

import dataclasses
import html
import json
import re

import pytest

from pretrain.config import ConfigError
from pretrain.evaluation.claims import CLAIMS, judge
from pretrain.evaluation.report import Page, plain
from pretrain.study.reading import read_results
from pretrain.study.report import _growth, as_code, by_compute, report, to_html, write_reports
from pretrain.study.runs import StudyFile
from tests.unit.report_records import Page as HtmlPage
from tests.unit.study_files import make_study, published_shape
from tests.unit.test_study_published import look_up

TITLE = 'A *study* of <script>alert("x")</script> & [links](javascript:x)'
REASON = "CUDA out of memory | at step 3\nTraceback `x`"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The results of four methods, of which one run has failed, with their report."""
    results = make_study(
        tmp_path_factory.mktemp("study") / "made-up",
        TITLE,
        {"t5-128": ("failed", REASON), "rotary-128": ("waiting", "")},
    )
    write_reports(results.study, [results])
    return results


def report_of(results, name):
    return (results.study.directory / "report" / name).read_text()


@pytest.fixture(scope="module")
def text(study):
    return report_of(study, "report.md")


def rows_of(text, title):
    """Return the rows of a Markdown table as dictionaries; equal names get numbers."""
    lines = text[text.index(f"{title}") :].split("\n\n")[1].splitlines()
    header, _, *rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]
    names = [name + str(header[:i].count(name) or "") for i, name in enumerate(header)]
    return [dict(zip(names, row)) for row in rows]


# ---- what it says --------------------------------------------------------------------------------
def test_every_published_number_is_found_in_the_file_under_the_key_beside_it(text):
    """The published columns, and those of speed and memory."""
    rows = rows_of(text, "Perplexity beside the published numbers")
    assert len(rows) > 5
    for row in rows:
        theirs = look_up(row["where in published.toml"])
        assert row["published"] == f"{theirs:.2f}"
        ours = float(row["perplexity"].split()[0])
        assert row["difference"] == f"{100 * (ours / theirs - 1):+.1f} %"
    for row in rows_of(text, "Speed and memory beside sinusoidal positions"):
        if row["published"] != "-":
            value, base = map(look_up, row["where in published.toml"].split(" / "))
            assert row["published"] == f"{value / base:.3f}"
    # Numbers are of the method, lengths and protocol of their row.
    for row in rows:
        if row["method"] == "alibi" and row["protocol"] == "nonoverlapping":
            key = f"wikitext103.alibi_nonoverlapping.{row['L']}.{row['length']}"
            assert row["published"] == f"{look_up(key):.2f}"


def test_verdicts_are_those_of_the_claims_with_the_numbers_they_stand_on(study, text):
    judged = {each.claim.id: each for each in judge(study.evidence)}
    said = json.loads(report_of(study, "claims.json"))
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
    _, lines, _ = _growth(study)
    alibi = [line for line in lines if line.name == "alibi" and "L = 64" in line.panel]
    assert {line.panel: {x: v.value for x, v in zip(line.xs, line.values)} for line in alibi} == {
        "L = 64, evaluated at L": pytest.approx({200: 30, 400: 20}),
        # 65,536 tokens are 1,024 L of one and 512 L of the other; 131,072 are 2,048 and 1,024.
        "L = 64, evaluated at 1,024 L": pytest.approx({200: 28.2, 400: 18.8}),
    }
    assert "at 1,024 L, the longest multiple of L at which all of these runs" in text


# ---- files ---------------------------------------------------------------------------------------
def test_the_page_needs_no_other_file_and_runs_nothing(study):
    page = report_of(study, "report.html")
    tags = HtmlPage(page).tags
    ids, names = {given.get("id") for _, given in tags}, [name for name, _ in tags]
    keys = ("src", "href", "data", "action")
    for reference in [given[key] for _, given in tags for key in keys if key in given]:
        anchor = reference.removeprefix("#") if reference.startswith("#") else ""
        assert anchor in ids or reference.startswith("data:"), reference[:80]
    # It opens with the verdicts and a figure, and what was asked comes last.
    assert page.index("<table>") < page.index("<figure>") < page.index("<h2>") < page.index("<pre>")
    assert page.index("What was asked") == page.rindex("<h2>") + len("<h2>")
    assert "script" not in names and "url(" not in page
    assert names.count("img") == 4 and names.count("table") > 5
    title = "A *study* of &lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; [links]"
    assert f"<h1>{title}(javascript:x)</h1>" in page
    assert f"<title>{title}(javascript:x)</title>" in page


# ---- what is missing -----------------------------------------------------------------------------


def test_contestants_that_failed_are_named_and_two_texts_refused(tmp_path):
    results = make_study(tmp_path / "study", methods=("alibi",), trained=(64,))
    folder = results.study.directory
    costs = {"device": "2 x cpu", "rounds": 1, "rows": []}
    costs["failed"] = [{"method": "t5", "train_length": 64, "reason": "out of memory"}]
    (folder / "efficiency.json").write_text(json.dumps(costs))
    found = read_results(results.study, results.states)
    assert found.unmeasured == ["t5 at L = 64: out of memory"]
    path = folder / "evaluation/curve.json"
    path.write_text(path.read_text().replace("bbbbbbbbbbbb", "dddddddddddd", 1))
    with pytest.raises(ConfigError, match="holds results of 2 validation sets"):
        read_results(results.study, results.states)


# ---- parts ---------------------------------------------------------------------------------------


def test_without_published_numbers_no_perplexities_stand_beside(tmp_path):
    found = make_study(tmp_path / "study", published=None, methods=("alibi",), trained=(64,))
    text = report(found, judge(found.evidence)).text()
    assert "The study names no published numbers" in text
    assert "Perplexity beside the published numbers" not in text


@pytest.mark.parametrize("name", ["a_b*c*", "<b>", "[x](y)", "`code`", "# no heading", "a\nb | c"])
def test_text_of_the_user_is_shown_as_it_is(name):
    page = to_html("t", Page(f"x {plain(name)} y"))
    body = page[page.index("<p>") : page.index("</p>")]
    assert body == f"<p>x {html.escape(' '.join(name.split()))} y"
    block = to_html("t", Page(as_code(f"{name}\n```\nmore")))
    assert html.escape(f"{name}\n```\nmore\n", quote=False) in block


# ---- several sizes -------------------------------------------------------------------------------
def test_the_gap_of_the_methods_is_shown_by_the_compute_of_each_size(tmp_path):
    """Sinusoidal positions are 0.5 % worse at L, and 2 % more at the second size."""
    parts, flop = [], {"1m": 1e13, "3m": 8e13}
    for size, worse in (("1m", 1.0), ("3m", 1.02)):

        def shape(method, *place, worse=worse):
            return published_shape(method, *place) * (worse if method == "sinusoidal" else 1)

        methods = {"methods": ("alibi", "sinusoidal"), "trained": (64,)}
        each = make_study(tmp_path / size, perplexity=shape, **methods)
        for record in (r for c in each.evidence.curves for rs in c.records.values() for r in rs):
            record["training_flop"] = flop[size]
        parts.append(dataclasses.replace(each, study=dataclasses.replace(each.study, size=size)))
    asked = StudyFile(title="Sizes", directory=str(tmp_path / "s"), sizes={"1m": [], "3m": []})
    whole = dataclasses.replace(parts[0].study, asked=asked, size="")
    page = by_compute(whole, parts)
    rows = rows_of(page.text(), "Perplexity as a ratio to that of the first method:")
    found = {(r["where"], r["size"]): (r["FLOP"], float(r["ratio"].split()[0])) for r in rows}
    at_l = "L = 64, nonoverlapping windows, at L"
    assert found[at_l, "1m"] == ("1.00e+13", pytest.approx(20.1 / 20, abs=1e-3))
    assert found[at_l, "3m"] == ("8.00e+13", pytest.approx(1.02 * 20.1 / 20, abs=1e-3))
    assert {r["method"] for r in rows} == {"sinusoidal"} and len(rows) == 2 * 2 * 5
    assert {"figures/compute.png", "figures/compute.svg"} == page.files.keys()
    assert "[3m](3m/report.md)" in page.text()
    # A size with more seeds goes on with the line.
    named = [dataclasses.replace(c, name=f"{c.name}, 2 seeds") for c in parts[1].evidence.curves]
    more = dataclasses.replace(parts[1].evidence, curves=named)
    page = by_compute(whole, [parts[0], dataclasses.replace(parts[1], evidence=more)])
    assert "2 seeds" not in page.text()
    # The base is the same method where another one comes first.
    evidence = dataclasses.replace(parts[1].evidence, curves=parts[1].evidence.curves[::-1])
    page = by_compute(whole, [parts[0], dataclasses.replace(parts[1], evidence=evidence)])
    assert "| sinusoidal | 3m |" in page.text() and "| alibi |" not in page.text()

"""Write the report of a study: its curves beside the published ones, and a verdict per claim."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from markdown_it import MarkdownIt

from pretrain.config import writing
from pretrain.evaluation.curves import (
    Table,
    full_name,
    length_in_words,
    length_table,
    relative_length,
    source_table,
)
from pretrain.evaluation.judge import Gap, Judgement, Verdict, judge
from pretrain.evaluation.records import finite_or_none, to_csv
from pretrain.evaluation.report import INTERVALS_EXPLAINED, protocols_explained
from pretrain.evaluation.windows import SLIDING
from pretrain.rundir.files import make_directory, replace_file
from pretrain.study import published, reading
from pretrain.study.figures import FORMATS, Figure, figures
from pretrain.study.published import (
    RATIOS_FROM,
    Beside,
    Cost,
    cost_table,
    perplexity_table,
)
from pretrain.study.reading import CONTEXT, EARLY, TOTAL, Gain, Study, read_study

# ---- Turn a report in Markdown into one HTML page that needs no other file ----


KINDS = {".svg": "image/svg+xml", ".csv": "text/csv", ".json": "application/json"}
"""Ending of a file that a page holds -> its media type."""


def to_page(title: str, markdown: str, files: Mapping[str, bytes]) -> str:
    """Return a page with a report's text, and with the files that it shows or links inside.

    What the text holds as HTML is shown as it is written, not run.

    Args:
        title: The page's title.
        markdown: The report.
        files: Path as in the report -> content. A figure that is shown as PNG is put in as SVG.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = parser.render(markdown)
    # The anchors that links in the Markdown name, as GitHub makes them.
    body = re.sub(r"<h3>(\w+)</h3>", lambda m: f'<h3 id="{m[1].lower()}">{m[1]}</h3>', body)
    body = re.sub(
        r'(?<=<img src=")([^"]+)\.png(?=")', lambda m: _inside(m[1] + ".svg", files), body
    )
    # A figure scrolls by itself where the page is narrower than its words can be read at.
    body = re.sub(r"<p>(<img [^>]*>)</p>", r"<figure>\1</figure>", body)
    # The figure itself is that SVG, so a link to it says nothing new.
    body = re.sub(r'<a href="[^"]+\.svg">SVG</a>, ', "", body)
    body = re.sub(
        r'<a href="([^":#]+)">',
        lambda m: f'<a download="{m[1].rpartition("/")[2]}" href="{_inside(m[1], files)}">',
        body,
    )
    style = resources.files("pretrain.study").joinpath("report.css").read_text("utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def _inside(path: str, files: Mapping[str, bytes]) -> str:
    """Return a file as a URL that holds its content; the path itself where there is no such file.

    Args:
        path: Path as in the report, escaped for HTML.
        files: Path -> content.
    """
    content = files.get(html.unescape(path))
    if content is None:
        return path
    kind = KINDS[path[path.rindex(".") :]]
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def plain(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>#&])", r"\\\1", " ".join(text.split()))


def as_code(text: str, language: str = "") -> str:
    """Return a block of code that nothing in the text can end.

    Args:
        text: The code.
        language: Its language, for colours.
    """
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


# ---- Write the sections of a study's report in Markdown ----


ONE_SEED = (
    "Where a verdict stands on one seed, only the noise of the text was considered: how far "
    "another seed of the training would move the value is not known."
)
VERDICTS_EXPLAINED = (
    "A claim fails when it fails at one training length. It cannot be judged when it lies inside "
    "the noise at one of them, where what it needs was not measured, or where a run has learned "
    "nothing: its loss at L is not below the entropy of the frequencies of the scored tokens, so "
    "that a fixed distribution would predict as well. Noise is the 95 % "
    "interval of the difference of two values, taken block by block of the text; of several seeds "
    "each of one is compared with each of the other. Thresholds are the same for every study. The "
    "column on the published numbers says how the same predicate judges the paper's own tables, "
    f"as they are printed. {ONE_SEED}"
)
EARLY_EXPLAINED = (
    "A text that is cut into windows of k L tokens has fewer tokens with little context before "
    "them than one in windows of L. At equal scored tokens, the gain of longer windows is "
    "separated into two parts. *Fewer early tokens*: what the gain would be if no context beyond "
    "L were of use, which is (1 - 1 / k) times the difference between windows of L that do not "
    "overlap and the loss with close to L tokens of context. *Longer context*: the rest. Windows "
    "of L that slide by S leave their tokens L - S to L - 1 tokens of context, so that the first "
    "part is somewhat too small and the second as much too large, the less the shorter S is. "
    "Negative values are losses."
)


def report(
    study: Study,
    judged: Sequence[Judgement],
    rows: Sequence[Beside],
    costs: Sequence[Cost],
    gains: Sequence[Gain],
    figures: Mapping[str, Figure],
) -> str:
    """Return report.md.

    Args:
        study: The study.
        judged: The verdicts.
        rows: Perplexities beside the published ones.
        costs: Speed and memory beside sinusoidal positions.
        gains: What longer windows gain.
        figures: The figures by name.
    """
    parts = [
        f"# {plain(study.title)}",
        _in_short(study, judged),
        "## What was asked",
        as_code(study.command, "sh"),
        *([as_code(study.asked, "toml")] if study.asked else []),
        "## Runs",
        *_runs(study),
        "## The published claims",
        *_claims(judged, study.published or RATIOS_FROM),
        "## Perplexity by length",
        *_perplexity(study, rows, figures),
        "## Loss by position, and early tokens",
        *_early(study, gains, figures),
        "## Speed and memory",
        *_costs(study, costs, figures),
        "## Growth over training",
        *_growth(figures),
        "## How to read it",
        protocols_explained([r for c in study.curves for rs in c.records.values() for r in rs]),
        INTERVALS_EXPLAINED,
        _source(),
        "The files in `data/` hold the exact numbers of every figure.",
    ]
    if study.curves:
        parts.append(source_table(study.curves).markdown())
    return "\n\n".join(parts) + "\n"


def _in_short(study: Study, judged: Sequence[Judgement]) -> str:
    """Return the outcome in two sentences."""
    counts = Counter(each.verdict.short for each in judged)
    states = Counter(run.state for run in study.runs)
    runs = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
    return (
        f"Of {len(judged)} published claims, {counts[Verdict.PASSES.short]} pass, "
        f"{counts[Verdict.FAILS.short]} fail and {counts[Verdict.NOISE.short]} cannot be judged "
        f"from these runs. Runs: {runs}."
    )


def _runs(study: Study) -> Iterable[str]:
    """Yield the table of runs, and what is missing of them."""
    rows = [
        [r.name, r.method, str(r.train_length), str(r.seed), r.state, plain(r.reason) or "-"]
        for r in study.runs
    ]
    header = ["run", "method", "L", "seed", "state", "reason"]
    yield Table("Runs of the study", header, rows, names=len(header)).markdown()
    if study.not_asked:
        yield (
            f"**In `runs/`, but not in the study file: {plain(', '.join(study.not_asked))}. No "
            "part of the results.**"
        )
    if study.differences:
        yield (
            "**The runs differ in more than method, training length and seed, so every comparison "
            f"below is one of that too: {plain('. '.join(study.differences))}.**"
        )
    for finished, evaluated, words in (
        (False, False, "Not in the results: {}.** The others stand alone below."),
        (False, True, "Not finished, and evaluated as far as they had come: {}.**"),
        (True, False, "Finished and not evaluated: {}.** `pretrain study` evaluates them."),
    ):
        if names := study.runs_that(finished=finished, evaluated=evaluated):
            yield "**" + words.format(", ".join(names))


# ---- claims --------------------------------------------------------------------------------------
def _claims(judged: Sequence[Judgement], model: str) -> Iterable[str]:
    """Yield the table of verdicts, and what each stands on."""
    theirs = {each.claim.id: each.verdict for each in judge(published.evidence(model))}
    rows = [
        [
            f"[{each.claim.id}](#{each.claim.id.lower()})",
            f"**{each.verdict.value}**",
            theirs[each.claim.id].value,
            each.claim.statement,
        ]
        for each in judged
    ]
    header = ["claim", "verdict", f"on the published numbers ({model})", "statement"]
    yield Table("Verdicts", header, rows, names=len(header)).markdown()
    yield VERDICTS_EXPLAINED
    yield "Every case with its numbers is in [claims.json](claims.json)."
    for each in judged:
        claim = each.claim
        yield f"### {claim.id}"
        yield (
            f"{claim.statement} **{each.verdict.value[0].upper()}{each.verdict.value[1:]}**"
            f"{_seeds(each)}."
        )
        cases = each.deciding or list(each.cases)
        lines = [f"- {case.words}{_tokens(case.tokens, case.seeds)}" for case in cases]
        others = len(each.cases) - len(cases)
        if each.verdict == Verdict.PASSES:
            # What a claim passes without: a training length, or a method of an order.
            unseen = [case.words for case in each.cases if case.verdict == Verdict.MISSING]
            lines += [f"- Not judged: {words}" for words in unseen]
            others -= len(unseen)
        if others:
            lines.append(f"- {others} other case{'s' if others > 1 else ''}: see claims.json")
        yield "\n".join(lines) or "- Nothing that it is about was measured."
        yield (
            f"Threshold: a ratio of {claim.threshold:g}. {claim.threshold_source} "
            f"Source: {claim.source}."
        )


def _seeds(judgement: Judgement) -> str:
    """Return a remark on a verdict that stands on one seed."""
    seeds = [case.seeds for case in judgement.deciding if case.seeds is not None]
    decided = judgement.verdict in (Verdict.PASSES, Verdict.FAILS)
    return " (one seed: its noise is not known)" if decided and 1 in seeds else ""


def _tokens(tokens: int | None, seeds: int | None) -> str:
    """Return what a case stands on."""
    if tokens is None or seeds is None:
        return ""
    return f" ({tokens:,} tokens scored, {seeds} seed{'s' if seeds > 1 else ''})"


# ---- numbers -------------------------------------------------------------------------------------
def _perplexity(
    study: Study, rows: Sequence[Beside], figures: Mapping[str, Figure]
) -> Iterable[str]:
    """Yield figures and tables of perplexities."""
    if not study.curves:
        yield "No run has been evaluated."
        return
    yield from _show(figures, "extrapolation")
    yield length_table(study.curves).markdown()
    yield _unigram(study)
    yield from _show(figures, "ratio")
    if study.published:
        yield (
            f"Published perplexities are those of {study.published}. The ratio to the perplexity "
            "at L carries over between models and texts; the published one is that of the same L, "
            "or of the nearest one that has the same multiple."
        )
    else:
        yield (
            "The study names no published numbers: its text or its tokenizer is another, so that "
            "perplexities are not comparable. The ratio to the perplexity at L is, and stands "
            f"beside that of {RATIOS_FROM} at the same L, or at the nearest one that has the same "
            "multiple."
        )
    shown = [row for row in rows if row.same or row.at_multiple]
    if any(row.curve.protocol.startswith(SLIDING) for row in shown):
        yield (
            "Published sliding windows move by one token. Longer strides, as in the protocol of a "
            "row, leave less context and raise the perplexity."
        )
    if shown:
        yield perplexity_table(shown, study.published).markdown()
    yield "[CSV](data/perplexity.csv), with the values that nothing published stands beside."


def _unigram(study: Study) -> str:
    """Return what the text's token frequencies alone predict, and which runs are no better."""
    known = study.evidence.unigram
    if known is None:
        return (
            "The frequencies of the scored tokens are not counted, so whether a run has learned "
            "more than these is not known. `pretrain study` counts them where the data is."
        )
    words = (
        f"Who knows the frequencies of the {known.tokens:,} scored tokens and no context has a "
        f"perplexity of {math.exp(known.loss_nats):.2f} on them ({known.loss_nats:.4f} nats a "
        "token, which is their entropy)."
    )
    why = [found for curve in study.curves if (found := study.evidence.untrained(curve))]
    if why:
        words += f" **No better at L, and so part of no claim: {plain('; '.join(why))}.**"
    return words


def _early(study: Study, gains: Sequence[Gain], figures: Mapping[str, Figure]) -> Iterable[str]:
    """Yield the figure of losses by position, and what early tokens have to do with it."""
    yield from _show(figures, "position")
    if not gains:
        yield (
            "Early tokens cannot be separated from longer context: windows longer than L, and "
            "windows of L that slide by at most half of L, are needed."
        )
        return
    yield EARLY_EXPLAINED
    rows = []
    for gain in gains:
        longest = max(each.length for each in gains if each.curve is gain.curve)
        if gain.length not in (2 * gain.curve.train_length, longest):
            continue
        at = length_in_words(gain.length, gain.curve.train_length)
        parts = [_nats(gain.parts[name]) for name in (TOTAL, EARLY, CONTEXT)]
        rows.append([full_name(gain.curve), at, gain.how, f"{gain.tokens:,}", *parts])
    header = ["curve", "windows of", "context of L from", "tokens", *(TOTAL, EARLY, CONTEXT)]
    title = "Nats per token gained over windows of L (95 % interval); all lengths are in the CSV"
    yield Table(title, header, rows, names=3).markdown()
    yield "[CSV](data/early_tokens.csv)"


def _costs(study: Study, costs: Sequence[Cost], figures: Mapping[str, Figure]) -> Iterable[str]:
    """Yield the figure and the table of speed and memory."""
    for line in study.unmeasured:
        yield f"**Not measured: {plain(line)}.**"
    if not costs:
        yield (
            "Not measured: there is no efficiency.json, or it has no sinusoidal positions to "
            "compare with."
        )
        return
    yield from _show(figures, "efficiency")
    yield cost_table(costs, plain(study.evidence.device)).markdown()
    yield (
        "In brackets are the least and the largest ratio of the rounds, each of one method's speed "
        "to sinusoidal positions' in the same round. The published numbers are of one V100."
    )


def _growth(figures: Mapping[str, Figure]) -> Iterable[str]:
    """Yield the figure of perplexity over training."""
    if "growth" not in figures:
        yield "No run has evaluated while it trained."
    yield from _show(figures, "growth")


def _show(figures: Mapping[str, Figure], name: str) -> Iterable[str]:
    """Yield a figure with its caption, if there is one."""
    if name in figures:
        caption = figures[name].caption
        yield f"![{plain(figures[name].in_words())}](figures/{name}.png)"
        yield f"{caption} [SVG](figures/{name}.svg), [CSV](data/{name}.csv)"


def _source() -> str:
    """Return where the published numbers come from."""
    paper = published.content()["paper"]
    return (
        f'Published numbers: {paper["authors"]}, "{paper["title"]}", {paper["venue"]}, '
        f"{paper['identifier']}, as carried in the package's pretrain/study/published.toml under "
        "the keys that stand beside them. They are transcribed from the paper's tables as others "
        "have copied them. How the text of the 1.3B models was cut into windows is inferred "
        "(nonoverlapping)."
    )


def _nats(part: Gap) -> str:
    """Return nats with their interval."""
    if math.isnan(part.low):
        return f"{part.value:+.4f}"
    return f"{part.value:+.4f} ({part.low:+.4f} to {part.high:+.4f})"


# ---- files ---------------------------------------------------------------------------------------
def perplexity_csv(rows: Sequence[Beside]) -> bytes:
    """Return perplexities beside the published ones, each number as it is, as CSV."""
    fields = ["method", "train_length", "protocol", "length", "perplexity", "ratio"]
    fields += ["published", "published_key", "published_ratio", "published_ratio_keys"]
    table = []
    for row in rows:
        table.append(
            [
                *(row.curve.name, row.curve.train_length, row.curve.protocol, row.length),
                row.value,
                row.to_l or "",
                *((row.same.value, row.same.key) if row.same else ("", "")),
                *((row.at_multiple.value, row.at_multiple.key) if row.at_multiple else ("", "")),
            ]
        )
    return to_csv(fields, table)


def gains_csv(gains: Sequence[Gain]) -> bytes:
    """Return what longer windows gain, of every curve and length, as CSV."""
    fields = ["method", "train_length", "length", "multiple", "tokens", "context_of_L_from"]
    fields += ["part", "nats", "low", "high"]
    rows = []
    for gain in gains:
        trained = gain.curve.train_length
        words = [gain.curve.name, trained, gain.length, relative_length(gain.length / trained)]
        for name, part in gain.parts.items():
            ends = ["" if math.isnan(end) else end for end in (part.low, part.high)]
            rows.append([*words, gain.tokens, gain.how, name, part.value, *ends])
    return to_csv(fields, rows)


FIGURES = ("extrapolation", "ratio", "position", "efficiency", "growth")
"""Names of all figures that a report may have."""
TABLES = ("perplexity", "early_tokens")
"""Names of the tables that are written as CSV beside the numbers of the figures."""

RATIO = ("low", "value", "high")
"""Keys of a case's ratio in claims.json."""


def write_study_report(directory: Path) -> None:
    """Write STUDY/report/ from what the study has so far.

    Reads STUDY/study.json, STUDY/evaluation/ and, where they are there, STUDY/efficiency.json and
    the metrics.jsonl of the runs. What is missing or has failed is said in the report. Equal files
    give an equal report, byte for byte.

    Args:
        directory: STUDY, the study's directory.

    Raises:
        ConfigError: `directory` holds no study.json, or a file in it cannot be read.
        RunFailed: The report cannot be written.
    """
    study = read_study(directory)
    judged = judge(study.evidence)
    costs = published.costs(study.evidence)
    gains = reading.gains(study.curves)
    drawn = figures(study, costs)
    assert set(drawn) <= set(FIGURES)
    rows = published.perplexities_beside(study.curves, study.published)
    text = report(study, judged, rows, costs, gains, drawn)
    files = _files(drawn)
    files["claims.json"] = claims_json(judged)
    if rows:
        files["data/perplexity.csv"] = perplexity_csv(rows)
    if gains:
        files["data/early_tokens.csv"] = gains_csv(gains)
    files["report.html"] = to_page(study.title, text, files).encode()
    # The text comes last: where it exists, the files that it shows do.
    files["report.md"] = text.encode()
    with writing(directory / "report"):
        _write(directory / "report", files)


def _files(drawn: Mapping[str, Figure]) -> dict[str, bytes]:
    """Return the files of the figures and their numbers, by their paths in the report."""
    files: dict[str, bytes] = {}
    for name, figure in drawn.items():
        pictures = figure.pictures()
        files |= {f"figures/{name}.{kind}": pictures[kind] for kind in FORMATS}
        files[f"data/{name}.csv"] = figure.csv()
    return files


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a report's files, and remove those that an earlier report of the study left.

    Files of other names, which a user may have put there, stay.
    """
    for path, content in files.items():
        make_directory((folder / path).parent)
        replace_file(folder / path, content)
    ours = {f"figures/{name}.{kind}" for name in FIGURES for kind in FORMATS}
    ours |= {f"data/{name}.csv" for name in (*FIGURES, *TABLES)}
    for name in sorted(ours - set(files)):
        (folder / name).unlink(missing_ok=True)


def claims_json(judged: Sequence[Judgement]) -> bytes:
    """Return claims.json: every claim with its verdict and all of its cases.

    An end of a ratio that is not known or not finite is null.

    Args:
        judged: The verdicts.
    """
    rows = []
    for each in judged:
        claim = {
            field.name: getattr(each.claim, field.name)
            for field in dataclasses.fields(each.claim)
            if field.name != "judge"
        }
        cases = [
            {
                "train_length": case.train_length,
                "verdict": case.verdict.value,
                "ratio": case.ratio and dict(zip(RATIO, map(finite_or_none, case.ratio))),
                "tokens": case.tokens,
                "seeds": case.seeds,
                "words": case.words,
            }
            for case in each.cases
        ]
        rows.append(claim | {"verdict": each.verdict.value, "cases": cases})
    return (json.dumps(rows, indent=1, allow_nan=False) + "\n").encode()

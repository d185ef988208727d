"""Write the report of a study: its curves beside the published ones, and a verdict per claim."""

from __future__ import annotations

import base64
import html
import itertools
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

from markdown_it import MarkdownIt

from pretrain.config import writing
from pretrain.config.run import LENGTH_FACTORS
from pretrain.evaluation.claims import Judgment, judge
from pretrain.evaluation.figures import (
    BARS,
    TOKENS_OF_A_VALUE,
    Frame,
    Line,
    in_panels,
    line_name,
    lines_by_length,
    lines_by_position,
)
from pretrain.evaluation.judge import Gap, Verdict, gap
from pretrain.evaluation.records import (
    BITS_PER_BYTE,
    Curve,
    Table,
    Value,
    finite_or_none,
    full_name,
    grouped,
    length_in_words,
    length_table,
    number,
    position_curves,
    quantities,
    relative_length,
    source_table,
    train_lengths,
)
from pretrain.evaluation.report import (
    INTERVALS_EXPLAINED,
    Page,
    plain,
    protocols_explained,
    write_files,
)
from pretrain.study import published, reading
from pretrain.study.published import RATIOS_FROM, cost_table, perplexity_table
from pretrain.study.reading import CONTEXT, EARLY, TOTAL, Results
from pretrain.study.runs import (
    FINISHED,
    Study,
    dump_study,
    other_differences,
    runs_table,
)


def write_reports(study: Study, parts: Sequence[Results]) -> None:
    """Write STUDY/report/: report.md, report.html, claims.json and figures.

    If there are several sizes, each has its own folder with these, and there is also a report of
    the gap between methods by compute. Equal results give an equal report, byte for byte.

    Args:
        study: The study.
        parts: The results so far for each of `Study.parts`.

    Raises:
        RunFailed: A report cannot be written.
    """
    for results in parts:
        judged = judge(results.evidence)
        page = report(results, judged)
        page.files["claims.json"] = claims_json(judged)
        _write(results.study, page)
    if study.asked.sizes:
        _write(study, by_compute(study, parts))


def _write(study: Study, page: Page) -> None:
    """Write a report and the files that it shows."""
    # The text is written last, so that if it exists, the files that it shows exist too.
    html_page, text = to_html(study.title, page).encode(), page.text().encode()
    with writing(study.report):
        write_files(study.report, {**page.files, "report.html": html_page, "report.md": text})


def to_html(title: str, page: Page) -> str:
    """Return a report as one HTML page that needs no other file, with its figures embedded.

    HTML in the text is shown as text, and not executed.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = re.sub(r' <a href="[^"]+\.svg">SVG</a>', "", parser.render(page.text()))
    # Add the anchors to which links in the Markdown refer, in GitHub's form.
    body = re.sub(r"<h3>(\w+)</h3>", lambda m: f'<h3 id="{m[1].lower()}">{m[1]}</h3>', body)

    def inside(match: re.Match[str]) -> str:
        content = base64.b64encode(page.files[f"{match[1]}.svg"]).decode()
        return f'<img src="data:image/svg+xml;base64,{content}"'

    body = re.sub(r'<img src="([^"]+)\.png"', inside, body)
    # In a figure element, an image scrolls by itself on pages too narrow for its text.
    body = re.sub(r"<p>(<img [^>]*>)</p>", r"<figure>\1</figure>", body)
    style = resources.files("pretrain.study").joinpath("report.css").read_text("utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def as_code(text: str) -> str:
    """Return a block of code that nothing in the text can end."""
    return textwrap.indent(text.rstrip(), "    ")


# ---- the sections ------------------------------------------------------------------------------
ONE_SEED = (
    "Where a verdict stands on one seed, only the noise of the text was considered: how far "
    "another seed of the training would move the value is not known."
)
VERDICTS_EXPLAINED = (
    "A claim fails when it fails at one training length. It cannot be judged when it lies inside "
    "the noise at one of them, where what it needs was not measured, or where a run has learned "
    "nothing: its loss at L is not below the entropy of the frequencies of the scored tokens, so "
    "that a fixed distribution would predict as well. Noise is the 95 % interval of the difference "
    "of two values: that of the text, block by block, and that of the seeds, by Student's t (in "
    "pairs for seeds that both have, if two or more), added as squares. Thresholds are the same "
    "for every study. The column on the published numbers says how the same predicate judges the "
    f"paper's own tables, as they are printed. {ONE_SEED}"
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


def report(results: Results, judged: Sequence[Judgment]) -> Page:
    """Return the report.

    Args:
        results: The results of the study so far.
        judged: The verdicts.
    """
    study, curves = results.study, results.evidence.curves
    page = Page(f"# {plain(study.title)}", _in_short(results, judged), *_warnings(results))
    page.add(_verdicts(judged, study.asked.published or RATIOS_FROM))
    if curves:
        caption = f"Perplexity by the length of validation windows. {BARS}"
        page.show("figures/extrapolation", caption, *lines_by_length(curves))
    page.add("## What each verdict stands on", *_claims(judged), "## Perplexity by length")
    if curves:
        _add_perplexity(page, results)
    else:
        page.add("No run has been evaluated.")
    page.add("## Loss by position, and early tokens")
    if positions := position_curves(curves):
        caption = (
            "Loss by position in the longest window of each curve, over ranges that widen with the "
            f"position and have {TOKENS_OF_A_VALUE} scored tokens or more."
        )
        page.show("figures/position", caption, *lines_by_position(positions))
    page.add(*_early(results))
    page.add("## Speed and memory", *_costs(results))
    page.add("## Growth over training")
    if grown := _growth(results):
        page.show("figures/growth", *grown)
    else:
        page.add("No run has evaluated while it trained.")
    records = [record for c in curves for each in c.records.values() for record in each]
    page.add("## How to read it", protocols_explained(records), INTERVALS_EXPLAINED, _source())
    page.add("## Runs", runs_table(results.states, plain).markdown())
    page.add(source_table(curves).markdown() if curves else "")
    page.add("## What was asked", as_code(study.command))
    page.add("Every key of the study file with its value:", as_code(dump_study(study.asked)))
    return page


def _in_short(results: Results, judged: Sequence[Judgment]) -> str:
    """Return the outcome in two sentences."""
    counts = Counter(each.verdict.short for each in judged)
    states = Counter(state.state for _, state in results.states)
    runs = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
    return (
        f"Of {len(judged)} claims, {counts[Verdict.PASSES.short]} pass, "
        f"{counts[Verdict.FAILS.short]} fail and {counts[Verdict.NOISE.short]} cannot be judged "
        f"from these runs. Runs: {runs}."
    )


def _warnings(results: Results) -> Iterable[str]:
    """Yield the warnings before all numbers: in what runs differ, and which are missing."""
    if differ := other_differences(results.study):
        yield (
            "**The runs differ in more than method, training length and seed, so every comparison "
            f"below is one of that too: {plain('. '.join(differ))}.**"
        )
    if names := [run.name for run, state in results.states if state.state != FINISHED]:
        yield f"**Not in the results: {', '.join(names)}.** The others stand alone below."


# ---- claims --------------------------------------------------------------------------------------
def _verdicts(judged: Sequence[Judgment], model: str) -> str:
    """Return the table of verdicts, beside those on the published numbers of a model."""
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
    return Table("Verdicts", header, rows, names=len(header)).markdown()


def _claims(judged: Sequence[Judgment]) -> Iterable[str]:
    """Yield the evidence for each verdict."""
    yield VERDICTS_EXPLAINED
    yield "Every case with its numbers is in claims.json."
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
            # Training lengths, or methods of an order, that were not measured.
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


def _seeds(judgment: Judgment) -> str:
    """Return a remark on a verdict that is based on one seed."""
    seeds = [case.seeds for case in judgment.deciding if case.seeds is not None]
    decided = judgment.verdict in (Verdict.PASSES, Verdict.FAILS)
    return " (one seed: its noise is not known)" if decided and 1 in seeds else ""


def _tokens(tokens: int | None, seeds: int | None) -> str:
    """Return how many tokens and seeds a case is based on."""
    if tokens is None or seeds is None:
        return ""
    return f" ({tokens:,} tokens scored, {seeds} seed{'s' if seeds > 1 else ''})"


# ---- numbers -------------------------------------------------------------------------------------
def _add_perplexity(page: Page, results: Results) -> None:
    """Add figures and tables of perplexities."""
    curves, model = results.evidence.curves, results.study.asked.published
    tables = [length_table(curves, each) for each in quantities(curves) if each != BITS_PER_BYTE]
    page.add(*(table.markdown() for table in tables), _unigram(results))
    lines, frame = _ratios(curves, model or RATIOS_FROM)
    if lines:
        caption = (
            "Perplexity as a ratio to that at the training length, by length in training lengths, "
            "with its 95 % interval; beside it the same of the published numbers, "
            "of each method at its training length nearest to L. Lines are cut off at "
            f"{RATIO_TOP:g}: the tables have the values."
        )
        page.show("figures/ratio", caption, lines, frame)
    if not model:
        page.add(
            "The study names no published numbers: its text or its tokenizer is another, so that "
            f"perplexities are not comparable. The ratios to L stand beside those of {RATIOS_FROM}."
        )
    elif (table := perplexity_table(curves, model)).rows:
        page.add(
            f"Published perplexities are those of {model}. Their sliding windows move by one "
            "token; longer strides leave less context and raise the perplexity.",
            table.markdown(),
        )


def _unigram(results: Results) -> str:
    """Return how well token frequencies alone predict the text, and which runs are no better."""
    evidence = results.evidence
    if (known := evidence.unigram) is None:
        return (
            "The frequencies of the scored tokens are not counted, so whether a run has learned "
            "more than these is not known. `pretrain study` counts them where the data is."
        )
    words = (
        f"Who knows the frequencies of the {known.tokens:,} scored tokens and no context has a "
        f"perplexity of {math.exp(known.loss_nats):.2f} on them ({known.loss_nats:.4f} nats a "
        "token, which is their entropy)."
    )
    why = [found for curve in evidence.curves if (found := evidence.untrained(curve))]
    if why:
        words += f" **No better at L, and so part of no claim: {plain('; '.join(why))}.**"
    return words


def _early(results: Results) -> Iterable[str]:
    """Yield the part of early tokens in the gain of longer windows."""
    gains = reading.gains(results.evidence.curves)
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
    title = "Nats per token gained over windows of L (95 % interval)"
    yield Table(title, header, rows, names=3).markdown()


def _costs(results: Results) -> Iterable[str]:
    """Yield the table of speed and memory."""
    for line in results.unmeasured:
        yield f"**Not measured: {plain(line)}.** Remove efficiency.json to measure all again."
    table = cost_table(results.evidence, plain(results.evidence.device))
    if not table.rows:
        yield (
            "Not measured: there is no efficiency.json, or it has no sinusoidal positions to "
            "compare with."
        )
        return
    yield table.markdown()
    yield (
        "In brackets are the least and the largest ratio of the rounds, each of one method's speed "
        "to sinusoidal positions' in the same round. The published numbers are of one V100."
    )


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


def claims_json(judged: Sequence[Judgment]) -> bytes:
    """Return claims.json: every claim with its verdict and all of its cases.

    An end of a ratio is null if it is unknown or not finite.

    Args:
        judged: The verdicts.
    """
    rows = []
    for each in judged:
        claim = {k: v for k, v in vars(each.claim).items() if k not in ("rule", "form")}
        ends = ("low", "value", "high")
        cases = [
            {
                "train_length": case.train_length,
                "verdict": case.verdict.value,
                "ratio": case.ratio and dict(zip(ends, map(finite_or_none, case.ratio))),
                "tokens": case.tokens,
                "seeds": case.seeds,
                "words": case.words,
            }
            for case in each.cases
        ]
        rows.append(claim | {"verdict": each.verdict.value, "cases": cases})
    return (json.dumps(rows, indent=1, allow_nan=False) + "\n").encode()


# ---- figures -----------------------------------------------------------------------------------
RATIO_TOP = 2.0
"""The upper end of the figure of ratios. A published ratio of 20 would flatten those near 1."""


def _ratios(mine: Sequence[Curve], model: str) -> tuple[list[Line], Frame]:
    """Return the lines of perplexity ratios to the value at L, of this study and of the paper."""
    lines: dict[tuple[str, str], Line] = {}
    for panel, curves in in_panels(mine).items():
        for curve in curves:
            name = line_name(curve, mine)
            both = {name: curve, f"{curve.method}, published": _nearest(curve, model)}
            for name, each in both.items():
                if each is not None and len(values := _ratios_of(each)) > 1:
                    lines[panel, name] = Line(panel, name, list(values), list(values.values()))
    xs = {x for line in lines.values() for x in line.xs}
    frame = Frame(
        "Evaluation length (in training lengths L)",
        "Perplexity / perplexity at L",
        {float(x): relative_length(x) for x in {2 ** round(math.log2(x)) for x in xs}},
        columns=len(train_lengths(mine)),
        top=RATIO_TOP,
    )
    return list(lines.values()), frame


def _nearest(curve: Curve, model: str) -> Curve | None:
    """Return the published curve beyond L whose training length is nearest to that of `curve`."""
    alike = [
        other
        for other in published.evidence(model).curves
        if (other.method, other.kind) == (curve.method, curve.kind)
        and max(other.records) > other.train_length
    ]
    trained = curve.train_length
    return min(alike, key=lambda c: abs(math.log(c.train_length / trained)), default=None)


def _ratios_of(curve: Curve) -> dict[float, Value]:
    """Return length / L -> ratio of the perplexity to that at L, for lengths of L and more."""
    trained, found = curve.train_length, {}
    for length in (n for n in curve.records if n >= trained and trained in curve.records):
        low, value, high = gap(curve, length, curve, trained).ratios()
        found[length / trained] = Value(value, low, high)
    return found


# ---- growth --------------------------------------------------------------------------------------
def _growth(results: Results) -> tuple[str, list[Line], Frame] | None:
    """Return the caption and lines of validation perplexity by step, with seeds combined."""
    growth = results.growth
    grown = [run for run in results.study.runs if growth.get(run.name)]
    groups = grouped(grown, lambda run: (run.method, run.train_length))
    lengths = {
        key: set.intersection(*(set(growth[run.name]) for run in runs))
        for key, runs in groups.items()
    }
    multiple = _longest_multiple(lengths)
    lines = []
    for times in dict.fromkeys([1, multiple]):
        for (method, trained), runs in sorted(groups.items(), key=lambda item: item[0][1]):
            length, panel = times * trained, f"L = {trained}, evaluated at {relative_length(times)}"
            if length in lengths[method, trained]:
                values = _mean([growth[run.name][length] for run in runs])
                xs = [float(step) for step in values]
                lines.append(Line(panel, method, xs, list(values.values()), len(runs) > 1))
    if not lines:
        return None
    caption = (
        "Validation perplexity over training, at the training length L, of the tokens that a run "
        "scores while it trains (evaluation.max_tokens of its config)."
    )
    if multiple > 1:
        caption += (
            f" It is also shown at {relative_length(multiple)}, the longest multiple of L at which "
            "all of these runs were evaluated while training. It is another length for each L."
        )
    columns = len({trained for _, trained in groups})
    return caption, lines, Frame("Training step", "Perplexity", columns=columns)


def _longest_multiple(lengths: Mapping[tuple[str, int], set[int]]) -> int:
    """Return the longest multiple of L at which all runs were evaluated, or 1.

    A fixed length in tokens would be far beyond L for some runs and near it for others. At the same
    multiple of their own L, runs of several training lengths have to extrapolate equally far.

    Args:
        lengths: (method, L) -> window lengths.
    """
    each = [
        {length // trained for length in found if length % trained == 0}
        for (_, trained), found in lengths.items()
    ]
    return max(set.intersection(*each), default=1) if each else 1


def _mean(by_seed: Sequence[Mapping[int, float]]) -> dict[int, Value]:
    """Return step -> the geometric mean of the seeds, with their smallest and largest values."""
    steps = sorted(set.intersection(*(set(each) for each in by_seed)))
    of_step = {step: [each[step] for each in by_seed] for step in steps}
    return {step: Value.of_seeds(values, geometric=True) for step, values in of_step.items()}


# ---- several sizes -------------------------------------------------------------------------------
SIZES_EXPLAINED = (
    "A ratio is the perplexity of a method divided by that of the first method of the same size, "
    "training length, evaluated length and protocol: above 1 the method is worse. Behind it is the "
    "range in which noise of the text and of the seeds puts it. A ratio that keeps moving one way "
    "as models grow may be another one at larger sizes."
)


def by_compute(study: Study, parts: Sequence[Results]) -> Page:
    """Return the report of several sizes: the gap between methods by the FLOP of a training.

    Args:
        study: The study.
        parts: The results so far for each size.
    """
    found: dict[tuple[str, str], dict[str, tuple[float, Gap]]] = {}
    for part in parts:
        for panel, curves in in_panels(part.evidence.curves).items():
            # The same method at all sizes, whichever runs are there.
            bases = [curve for curve in curves if curve.method == study.runs[0].method][:1]
            others = [curve for curve in curves if curve not in bases]
            for multiple, first, curve in itertools.product(LENGTH_FACTORS, bases, others):
                length = multiple * curve.train_length
                if length in curve.records and length in first.records:
                    flop = number(curve.records[length][0].get("training_flop"))
                    # By the method where that is clear: sizes may have unequal numbers of seeds.
                    is_one = [c.method for c in curves].count(curve.method) == 1
                    name = curve.method if is_one else curve.name
                    place = f"{panel}, at {relative_length(multiple)}", name
                    of = flop, gap(curve, length, first, length)
                    found.setdefault(place, {})[part.study.size] = of
    page = Page(f"# {plain(study.title)}", SIZES_EXPLAINED)
    title, lines, rows = "Perplexity as a ratio to that of the first method", [], []
    for place, of_size in found.items():
        ratios = [each.ratios() for _, each in of_size.values()]
        values = [Value(ratio, low, high) for low, ratio, high in ratios]
        lines.append(Line(*place, [flop for flop, _ in of_size.values()], values))
        for size, (flop, each) in of_size.items():
            rows.append([*place, size, f"{flop:.2e}", each.ratio_in_words()])
    if lines:
        sized = (each for of_size in found.values() for each in of_size.items())
        ticks = {flop: f"{flop:.1e}\n{size}" for size, (flop, _) in sized}
        frame = Frame("FLOP of the training", "Perplexity / that of the first method", ticks)
        page.show("figures/compute", f"{title}, by the FLOP of the training.", lines, frame)
    page.add(Table(title, ["where", "method", "size", "FLOP", "ratio"], rows, names=3).markdown())
    links = (f"[{part.study.size}]({part.study.size}/report.md)" for part in parts)
    page.add(f"The report of each size: {', '.join(links)}.", "## What was asked")
    page.add(as_code(study.command), as_code(dump_study(study.asked)))
    return page

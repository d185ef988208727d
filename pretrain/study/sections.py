"""Write the sections of a study's report in Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pretrain.evaluate.curves import relative_length
from pretrain.evaluate.report import INTERVALS_EXPLAINED, protocols_explained
from pretrain.evaluate.tables import (
    Table,
    full_name,
    length_in_words,
    length_table,
    source_table,
    to_csv,
)
from pretrain.study import claims, published
from pretrain.study.beside import RATIOS_FROM, Beside, Cost, cost_table, perplexity_table
from pretrain.study.claims import Judgement
from pretrain.study.early import CONTEXT, EARLY, TOTAL, Gain
from pretrain.study.evidence import SLIDING, Gap, Verdict
from pretrain.study.figures import Figure
from pretrain.study.pages import as_code, plain
from pretrain.study.reading import Study
from pretrain.study.scale import equal_time_table, taken_table

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
TENSORBOARD = (
    "Where the runs' configs ask for TensorBoard (`logging.tensorboard`), `tensorboard --logdir` "
    "on the folder `tensorboard/` beside this report shows the final curves, with the window "
    "length as the step, the figures and the tables. Where they ask for Weights & Biases "
    "(`logging.wandb`), the study has a run of its own there with the same. The files in `data/` "
    "hold the exact numbers of every figure."
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
        TENSORBOARD,
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
    theirs = {each.claim.id: each.verdict for each in claims.judge(published.evidence(model))}
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
    if study.published == "cc100_roberta" and (table := equal_time_table(study.curves)):
        yield table.markdown()
        yield (
            "These published numbers are of models that were trained for equally long. The runs of "
            "this study are compared after equally many steps."
        )
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
            "windows of L that slide by at most half of L (or losses by position), are needed."
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
    if study.scale:
        yield taken_table(study.scale).markdown()
        yield (
            "Memory is the peak of rank 0 in training. GPU-hours are the seconds of all training "
            'steps times the processes; "-" where starts had several numbers of them. The '
            "published ones are of 128 V100s; on other GPUs they say how large the runs were."
        )
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
                row.curve.value(row.length).value,
                row.ratio.ratios()[1] if row.ratio else "",
                *((row.same.value, row.same.key) if row.same else ("", "")),
                row.published_ratio() or "",
                " / ".join(number.key for number in row.at_multiple) if row.at_multiple else "",
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

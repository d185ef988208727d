"""Fill the table of verdicts in docs/claims.md: `python -m docs.hooks.claims`.

Statement and source come from each claim's docstring. Verdicts are those on the published numbers,
those that studies wrote to claims.json in docs/results, and those on the evaluations of which
`pretrain report` wrote docs/results/*/curve.json. The rest of the page is hand-written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pretrain.evaluation.claims import CLAIMS, judge
from pretrain.evaluation.judge import Evidence, Verdict
from pretrain.evaluation.records import grouped, make_curves, parts_of, read_records
from pretrain.study import published

PAGE = Path(__file__).parents[1] / "claims.md"
RESULTS = PAGE.parent / "results"
BEGIN, END = "<!-- verdicts -->\n", "<!-- end of verdicts -->\n"
HEADER = ("claim", "source", "on the published numbers", "on our results")

Cases = Iterable[tuple[int | None, str]]
"""(training length, verdict) of each case of a claim."""


def outcome(verdict: str, cases: Cases) -> str:
    """Return a verdict, with the training lengths that refuse it."""
    if verdict != Verdict.FAILS.value:
        return verdict.removeprefix("cannot be judged: ")
    lengths = sorted({length or 0 for length, each in cases if each == verdict})
    return f"fails at L = {', '.join(map(str, lengths))}"


def cell(outcomes: Mapping[str, str]) -> str:
    """Return outcomes by where they are from; what was not measured is left out.

    Args:
        outcomes: Model family, or folder of results -> outcome.
    """
    missing = Verdict.MISSING.value.removeprefix("cannot be judged: ")
    found = grouped(outcomes, lambda name: outcomes[name])
    return "; ".join(f"{k} ({', '.join(v)})" for k, v in found.items() if k != missing) or "-"


def on_published() -> dict[str, dict[str, str]]:
    """Return claim -> model family -> outcome."""
    found: dict[str, dict[str, str]] = {claim.id: {} for claim in CLAIMS}
    for model in published.MODELS:
        for each in judge(published.evidence(model)):
            cases = [(case.train_length, case.verdict.value) for case in each.cases]
            found[each.claim.id][model] = outcome(each.verdict.value, cases)
    return found


def on_ours() -> dict[str, dict[str, str]]:
    """Return claim -> folder of results, of a study of several sizes with the size -> outcome.

    A newer claim has none. Each text of a curve.json is judged alone.
    """
    found: dict[str, dict[str, str]] = {claim.id: {} for claim in CLAIMS}
    for path in sorted(RESULTS.rglob("claims.json")):
        study = "/".join(p for p in path.relative_to(RESULTS).parts[:-1] if p != "report")
        for row in json.loads(path.read_text()):
            cases = [(case["train_length"], case["verdict"]) for case in row["cases"]]
            found.setdefault(row["id"], {})[study] = outcome(row["verdict"], cases)
    for path in sorted(RESULTS.glob("*/curve.json")):
        for part in parts_of(make_curves(read_records(path))):
            for each in judge(Evidence(part.curves)):
                cases = [(case.train_length, case.verdict.value) for case in each.cases]
                name = path.parent.name + part.end
                found[each.claim.id][name] = outcome(each.verdict.value, cases)
    return found


def page(text: str) -> str:
    """Return the page with its table of verdicts as the code and the results have it."""
    theirs, ours = on_published(), on_ours()
    rows = [HEADER, tuple("---" for _ in HEADER)] + [
        (f"`{c.id}`: {c.statement}", c.source, cell(theirs[c.id]), cell(ours[c.id])) for c in CLAIMS
    ]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}{table}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

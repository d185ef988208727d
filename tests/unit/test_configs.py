"""Check that the shipped configs and sites are found; test_config_families.py checks them."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pretrain.cli.commands import app
from pretrain.config import ConfigError, toml
from pretrain.config.toml import shipped_configs, shipped_sites, shipped_studies

ROOT = Path(__file__).parents[2]


# ---- finding them --------------------------------------------------------------------------------
def pretrain(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_every_config_and_example_site_is_shipped_with_a_description():
    configs, studies, sites = shipped_configs(), shipped_studies(), shipped_sites()
    paths = sorted(file.path for file in configs + studies)
    assert paths == sorted(ROOT.glob("configs/**/*.toml"))
    assert [file.path for file in studies] == sorted(ROOT.glob("configs/studies/*.toml"))
    assert [file.path for file in sites] == sorted(ROOT.glob("slurm/site.*.toml"))
    for file in configs + studies + sites:
        assert file.description.endswith(".") and len(file.description) <= 98
        # A whole sentence: what follows the first line is a new paragraph.
        assert file.path.read_text().splitlines()[1] in ("#", "")


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_the_list_has_configs_and_sites_apart(monkeypatch, tmp_path, where):
    monkeypatch.chdir(ROOT if where == "root" else tmp_path)
    prefix = "" if where == "root" else f"{ROOT}/"
    text = pretrain("config", "--list")
    configs, studies, sites = text.split("\n\n")
    assert f"\n  {prefix}configs/demo.toml\n      Train short, test long" in configs
    assert f"\n  {prefix}slurm/site.v100.toml\n      A V100 cluster" in sites
    assert f"\n  {prefix}configs/studies/demo.toml\n      A study on two CPU" in studies
    assert f"{prefix}slurm/" not in configs + studies and f"{prefix}configs/" not in sites


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_the_list_tells_runs_of_a_family_from_what_they_build_on(monkeypatch, tmp_path, where):
    monkeypatch.chdir(ROOT if where == "root" else tmp_path)
    runs, bases, folder = set(), set(), None
    for line in pretrain("config", "--list").partition("\n\n")[0].splitlines():
        assert len(line) <= 98 or where == "elsewhere"
        if line.endswith("/"):
            folder = Path(line.strip()).resolve()
            found = runs
        elif line.endswith(".toml") and not line.startswith("      "):
            runs.add(Path(line.strip()).resolve())
        elif folder and ".toml" in line:
            _, label, names = line.rpartition("to build on: ")
            # What is further to the right goes on with the line above.
            if label or not line.startswith(" " * 10):
                found = bases if label else runs
            found |= {folder / name for name in names.strip().strip(",").split(", ")}
    assert runs == {file.path for file in shipped_configs() if not file.is_base}
    assert bases == {file.path for file in shipped_configs() if file.is_base}
    assert len(bases) > 5 and len(runs) > 8


def test_the_version_is_the_projects():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert pretrain("--version") == f"pretrain {version}\n"


@pytest.mark.parametrize("command", [[], ["config"], ["train"], ["data", "build"], ["bench"]])
def test_h_is_help(command):
    assert pretrain(*command, "-h") == pretrain(*command, "--help")


def test_a_clone_without_its_links_is_named(monkeypatch, tmp_path):
    """As from a zip file: pretrain/configs is then a small text file, and nothing is found."""
    (tmp_path / "configs").write_text("../configs")
    monkeypatch.setattr(toml, "PACKAGE", tmp_path)
    with pytest.raises(ConfigError, match="symbolic links"):
        toml.list_shipped()

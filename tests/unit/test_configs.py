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
def test_the_list_has_every_file_under_its_kind(monkeypatch, tmp_path, where):
    monkeypatch.chdir(ROOT if where == "root" else tmp_path)
    prefix = "" if where == "root" else f"{ROOT}/"
    blocks = pretrain("config", "--list").split("\n\n")
    configs = shipped_configs()
    kinds = (
        [file for file in configs if not file.is_base],
        [file for file in configs if file.is_base],
        shipped_studies(),
        shipped_sites(),
    )
    for block, files in zip(blocks, kinds, strict=True):
        lines = block.strip().split("\n")[1:]
        shown = [f"  {prefix}{file.path.relative_to(ROOT)}" for file in files]
        assert lines[::2] == shown
        assert lines[1::2] == [f"      {file.description}" for file in files]
    assert all(map(len, kinds))


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

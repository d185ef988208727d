"""Check the shipped configs: each loads and is listed, and the replica names its sources."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pretrain.cli import app
from pretrain.config import ConfigError, load_config, num_parameters, shipped
from pretrain.config.shipped import shipped_configs, shipped_sites, shipped_studies

ROOT = Path(__file__).parents[2]
CC100 = ROOT / "configs/cc100_roberta/alibi_1024.toml"

# Press, Smith, Lewis (arXiv 2108.12409), section 5 and appendix: the 1.3B model at 1024 tokens.
PAPER = {
    "model.num_layers": 25,
    "model.hidden_size": 2048,
    "model.num_attention_heads": 16,
    "model.ffn_hidden_size": 8192,
    "position.method": "alibi",
    "position.trainable_slopes": False,
    "parallel.world_size": 128,
    "data.sequence_length": 1024,
    "train.num_steps": 50_000,
    "evaluation.max_tokens": 649_000,
}


def flat(table: dict, prefix: str = "") -> dict[str, object]:
    """Return the values of nested tables by their dotted keys."""
    values: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values


def marked_values(path: Path) -> dict[str, tuple[object, str]]:
    """Return key -> (value, the first word of the comment behind it)."""
    values, section = {}, ""
    for line in path.read_text().splitlines():
        if header := re.fullmatch(r"\[([\w.]+)\]", line):
            section = header[1]
        elif line and not line.startswith("#"):
            pair = re.fullmatch(r"(\w+ = .*?)  # (\w+)(: .+)?", line)
            assert pair, f"no origin behind: {line}"
            [(key, value)] = tomllib.loads(pair[1]).items()
            values[f"{section}.{key}"] = (value, pair[2])
    return values


@pytest.mark.parametrize(
    "path",
    [file.path for file in shipped_configs() if not file.is_base],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_every_config_loads(path):
    config = load_config(path)
    config.layout(config.parallel.world_size or 2)  # the demo runs on two processes


def test_every_value_of_the_replica_says_where_it_comes_from():
    values = marked_values(CC100)
    assert {mark for _, mark in values.values()} == {"paper", "inferred", "chosen"}
    parsed = tomllib.loads(CC100.read_text())
    assert {key: value for key, (value, _) in values.items()} == flat(parsed)


def test_an_inferred_value_says_from_what():
    """Behind the value, or in a comment that stands above it."""
    lines = CC100.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        assert "# inferred" not in line or "# inferred: " in line or above.startswith("# "), line


def test_values_marked_paper_are_the_papers():
    assert {
        key: value for key, (value, mark) in marked_values(CC100).items() if mark == "paper"
    } == PAPER


def test_the_replica_has_the_papers_size_and_one_epoch():
    config = load_config(CC100)
    # "1.3 billion": 5 % leaves room for the vocabulary, which the paper does not state (50k rows
    # are 8 % of the total).
    assert num_parameters(config) == pytest.approx(1.3e9, rel=0.05)
    # One epoch of 461 GB in 50,000 updates at 2.1M tokens (BASE Layers): 105B tokens.
    assert config.tokens_per_step == pytest.approx(2.1e6, rel=0.01)
    assert config.tokens_per_step * config.train.num_steps == pytest.approx(105e9, rel=0.01)


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
        assert file.path.read_text().splitlines()[1] == "#"


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_the_list_has_configs_and_sites_apart(monkeypatch, tmp_path, where):
    monkeypatch.chdir(ROOT if where == "root" else tmp_path)
    prefix = "" if where == "root" else f"{ROOT}/"
    text = pretrain("config", "--list")
    configs, studies, sites = text.split("\n\n")
    assert f"\n  {prefix}configs/demo.toml\n      Train short, test long" in configs
    assert f"\n  {prefix}slurm/site.v100.toml\n      A V100 cluster" in sites
    assert f"\n  {prefix}configs/studies/demo.toml\n      A study on two CPU" in studies
    assert "slurm/" not in configs + studies and "configs/" not in sites


def test_the_version_is_the_projects():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert pretrain("--version") == f"pretrain {version}\n"


@pytest.mark.parametrize("command", [[], ["config"], ["train"], ["data", "build"], ["bench"]])
def test_h_is_help(command):
    assert pretrain(*command, "-h") == pretrain(*command, "--help")


def test_a_clone_without_its_links_is_named(monkeypatch, tmp_path):
    """As from a zip file: pretrain/configs is then a small text file, and nothing is found."""
    (tmp_path / "configs").write_text("../configs")
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path)
    with pytest.raises(ConfigError, match="symbolic links"):
        shipped.list_shipped()

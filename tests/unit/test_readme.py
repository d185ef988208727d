"""The README's walk for one's own text, as somebody who copies it would take it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.config.load import shipped
from pretrain.launcher.cli import app as launcher

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHIPPED = next(iter(shipped().values()))


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The README's config in a file, with nothing added."""
    [text] = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_the_first_commands_clone_and_start_from_there(tmp_path):
    """As written, with this repository's address; make says what it would do, and does nothing."""
    block = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)[0]
    done = subprocess.run(
        ["bash", "-euc", block.replace("ADDRESS", shlex.quote(str(ROOT)))],
        cwd=tmp_path,
        env=os.environ | {"MAKEFLAGS": "n"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "pretrain data build configs/demo.toml" in done.stdout
    assert "tests/all.sh .venv/bin/python" in done.stdout
    links = [path for path in (tmp_path / "pretrain/pretrain").iterdir() if path.is_symlink()]
    assert len(links) == 4 and all(path.is_dir() for path in links)
    guide = (ROOT / "docs/guide.md").read_text()
    needed = re.findall(r"`(apt-get install [^`]*)`", README + guide)
    assert {" ".join(command.split()) for command in needed} == {
        "apt-get install git make g++ python3-dev python3-venv"
    }
    by_ci = set(re.findall(r"missing\+=\((\S+)\)", (ROOT / ".ci/run").read_text()))
    assert by_ci - {"python3"} == {"git", "make", "g++", "python3-dev", "python3-venv"}


def test_the_config_is_whole_and_lands_on_no_other_run(mine):
    config, values = load_config(mine), tomllib.loads(mine.read_text())
    assert values["run"]["directory"] == config.run.directory
    own = {Path(config.run.directory), Path(config.data.directory)}
    assert len(SHIPPED) > 1
    for path in SHIPPED:
        other = load_config(path)
        for directory in (Path(other.run.directory), Path(other.data.directory)):
            assert not any(
                directory == each or directory in each.parents or each in directory.parents
                for each in own
            ), path


def test_every_command_of_the_walk_fits_the_config(mine):
    commands = [
        shlex.split(line.replace("\\\n", " "), comments=True)
        for line in re.findall(r"^launcher local mine\.toml(?:.*\\\n)*.*$", README, re.MULTILINE)
    ]
    assert len(commands) >= 3
    for words in commands:
        settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        load_config(mine, settings).layout(int(words[words.index("--nproc") + 1]))
    for processes in (1, 2, 4, 8, 16):
        load_config(mine).layout(processes)


def test_the_demo_s_job_is_one(tmp_path, monkeypatch, capsys):
    """As the README sends it: on the site that it copies, without Slurm, and not sent."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(tmp_path))
    [copied] = re.findall(r"^cp (slurm/\S+) slurm/site\.toml", README, re.MULTILINE)
    [command] = re.findall(r"^launcher (submit (?:.*\\\n)*.*)$", README, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    words[words.index("slurm/site.toml")] = copied
    own = ["--set", f"run.directory={tmp_path}/run", "--dry-run"]
    launcher([*words, *own], standalone_mode=False)
    assert "2 nodes x 8 ranks = tensor 1 x pipeline 1 x data 16" in capsys.readouterr().out

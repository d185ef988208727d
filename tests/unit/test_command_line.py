"""What both commands answer without a run: versions, help, completion, and words they do not know.

Each runs in a process of its own, as in a shell.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pretrain.config.arguments import expand_home

ROOT = Path(__file__).parents[2]
COMMANDS = {"pretrain": "pretrain.main", "launcher": "pretrain.launcher.main"}
# argv[0] as the installed script has it. Says at the end if the slow import was made.
SCRIPT = """
import atexit, sys
sys.argv[0] = "{name}"
atexit.register(lambda: print("torch was imported" * ("torch" in sys.modules), file=sys.stderr))
from {module} import main
main()
"""


def run(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(name=name, module=COMMANDS[name])
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert "torch was imported" not in done.stderr
    return done


@pytest.mark.parametrize("name", COMMANDS)
def test_version_and_help(name):
    assert run(name, "--version").stdout == f"{name} {version('pretrain')}\n"
    short, long = run(name, "-h"), run(name, "--help")
    assert short.returncode == 0 and short.stdout == long.stdout
    assert "--show-completion" in short.stdout and "--version" in short.stdout
    [command] = ["train" if name == "pretrain" else "local"]
    assert run(name, command, "-h").stdout == run(name, command, "--help").stdout != ""


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("pretrain", ["trian", "a.toml"], "No such command 'trian'. Did you mean 'train'?"),
        ("pretrain", ["data", "biuld"], "No such command 'biuld'. Did you mean 'build'?"),
        ("pretrain", ["train", "a.toml", "--rseume", "x"], "No such option: --rseume"),
        ("launcher", ["submti", "a.toml"], "No such command 'submti'. Did you mean 'submit'?"),
        ("launcher", ["local", "a.toml", "--nprocs", "2"], "--nproc"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_one_that_is_meant(name, words, expected):
    done = run(name, *words)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "typed", "offered"),
    [
        ("pretrain", "pretrain tr", {"train"}),
        ("pretrain", "pretrain data ", {"build", "stats", "show", "verify"}),
        ("pretrain", "pretrain train --re", {"--resume"}),
        ("launcher", "launcher s", {"submit", "sweep", "status"}),
        ("launcher", "launcher local --np", {"--nproc"}),
    ],
)
def test_a_shell_completes_words(name, typed, offered):
    words = typed.split(" ")
    done = run(
        name,
        **{f"_{name.upper()}_COMPLETE": "complete_bash"},
        COMP_WORDS=typed,
        COMP_CWORD=str(len(words) - 1),
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_completion_is_installed_for_the_shell_that_asks(name, tmp_path):
    script = tmp_path / "ask.py"
    script.write_text(SCRIPT.format(name=name, module=COMMANDS[name]))

    def in_bash(option: str) -> subprocess.CompletedProcess[str]:
        # A second command, so that bash does not replace itself and stays the parent.
        words = f"{sys.executable} {script} {option}; exit $?"
        home = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            ["bash", "-c", words], env=home, cwd=tmp_path, capture_output=True, text=True
        )

    shown = in_bash("--show-completion")
    assert shown.returncode == 0 and re.search(rf"complete .*\b{name}$", shown.stdout, re.M)
    assert in_bash("--install-completion").returncode == 0
    [installed] = tmp_path.glob(f".bash_completions/{name}.sh")
    assert shown.stdout.strip() == installed.read_text().strip()
    assert installed.name in (tmp_path / ".bashrc").read_text()


def test_the_home_directory_in_the_value_of_an_option(tmp_path):
    words = ["submit", "configs/demo.toml", "--site=~/none.toml"]
    assert f"{tmp_path}/none.toml" in run("launcher", *words, HOME=str(tmp_path)).stderr
    kept = ["a=~/x", "--set", "run.directory=~/x", "--set=run.directory=~/x", "~/x", "--out"]
    assert expand_home(kept) == kept

"""Test what both commands answer without a run: versions, help, completion, unknown words.

Each runs in a process of its own, as in a shell.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from pretrain.config.arguments import expand_home
from pretrain.rundir.paths import ExitCode

ROOT = Path(__file__).parents[2]
COMMANDS = {"pretrain": "pretrain.__main__", "launcher": "pretrain.launcher.__main__"}
MODULES = {"pretrain": "pretrain", "launcher": "pretrain.launcher"}
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


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_under_the_output_is_an_error(name):
    command = [sys.executable, "-m", MODULES[name], "--version"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    said = "error: pretrain: No space left on device. Make room or choose another place"
    assert done.returncode == ExitCode.NO_SPACE and done.stderr.startswith(said), done.stderr


def test_the_home_directory_in_the_value_of_an_option(tmp_path):
    words = ["submit", "configs/demo.toml", "--site=~/none.toml"]
    assert f"{tmp_path}/none.toml" in run("launcher", *words, HOME=str(tmp_path)).stderr
    kept = ["a=~/x", "--set", "run.directory=~/x", "--set=run.directory=~/x", "~/x", "--out"]
    assert expand_home(kept) == kept


# ---- Ctrl-C while a command starts ----
MOMENTS = 20
"""The number of moments between the first line of ours that runs and the end of the command."""

# A signal from outside comes late on a busy machine, when the command has already ended.
INTERRUPTED = """
import os, runpy, signal, sys
module, moment, file = sys.argv[1:4]
sys.argv[1:4] = []
# The tests may run in a background job, which ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
file = open(file, "ab", buffering=0)
imports = 0

def look(event, values):
    global imports
    if event == "import" and hasattr(sys.modules["__main__"], "main"):
        imports += 1
        file.write(b".")
        if imports == int(moment):
            os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(look)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Runs a command, with a Ctrl-C at one of the imports after that of its `main`."""


def ended_at(name: str, words: Sequence[str], moment: int, imports: Path) -> tuple[int, str]:
    """Return the exit code of a command, and what it printed to stderr.

    Args:
        name: The command.
        words: Its arguments.
        moment: The import at which Ctrl-C comes, from 1; 0 for none.
        imports: Gets a byte for each import.
    """
    how = [MODULES[name], str(moment), imports]
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *how, *words], cwd=ROOT, capture_output=True, text=True
    )
    return process.returncode, process.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("launcher", ["local", "configs/demo.toml", "--nproc", "1"]),
        ("pretrain", ["train", "configs/demo.toml"]),
        pytest.param("pretrain", ["config", "configs/demo.toml"], marks=pytest.mark.torture),
        pytest.param("launcher", ["status", "runs/none"], marks=pytest.mark.torture),
    ],
)
def test_ctrl_c_while_a_command_starts_shows_no_traceback(request, tmp_path, name, words):
    """At random moments of its imports, from the first one on."""
    ended_at(name, words, 0, tmp_path / "imports")
    imports = (tmp_path / "imports").stat().st_size
    assert imports > MOMENTS
    is_torture = request.node.get_closest_marker("torture") is not None
    chosen = random.Random(15)
    for _ in range(MOMENTS if is_torture else MOMENTS // 5):
        moment = chosen.randint(1, imports)
        assert ended_at(name, words, moment, tmp_path / "unread") == (130, "interrupted\n"), moment

"""Read the commands of docs/guide.md, and run them as they are written.

Above each block of the guide stands a comment that says what the tests make of it:

    <!-- test: file NAME -->   it is written to the file NAME of the workspace
    <!-- test: run -->         its commands are run, in the workspace
    <!-- test: run torture --> the same, by `make torture`
    <!-- test: slurm -->       it is run on the tests' Slurm cluster
    <!-- test: read -->        not run, but its commands and options must exist
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

from pretrain.cli.commands import app as pretrain
from pretrain.launcher.cli import app as launcher
from tests.end_to_end.commands import LAUNCHER, PRETRAIN, ROOT, Done, forked

GUIDE = ROOT / "docs" / "guide.md"
APPS = {"pretrain": pretrain, "launcher": launcher}
PROGRAMS = {"pretrain": PRETRAIN, "launcher": LAUNCHER}
OTHERS = {"make", ".", "python", "python3.11", "pip", "hf", "cp", "torchrun", "sbatch"}
"""Other programs that the guide starts."""
KINDS = {"file", "run", "slurm", "read"}
_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<test>[^\n]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A block of the guide."""

    kind: str
    """A word of KINDS; "" for a block without a comment."""
    argument: str
    """What stands behind it: the name of a file, or a condition."""
    language: str
    text: str
    line: int

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [each for each in words if each]


def blocks(text: str) -> list[Block]:
    """Return all blocks of the guide."""
    return [
        Block(
            *(match["test"] or "").partition(" ")[::2],
            match["language"],
            match["text"],
            text.count("\n", 0, match.start("text")),
        )
        for match in _BLOCK.finditer(text)
    ]


def check_words(words: list[str]) -> None:
    """Check that a command of ours, its arguments and its options exist; nothing is run.

    Raises:
        AssertionError: They do not.
    """
    if "-m" in words and words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] not in APPS:
        assert words[0] in OTHERS, words
        return
    name, rest = words[0], words[1:]
    command: Any = typer.main.get_command(APPS[name])
    while rest and rest[0] in getattr(command, "commands", {}):
        name, rest = rest[0], rest[1:]
        command = command.commands[name]
    known = getattr(command, "commands", None)
    assert known is None or rest[0].startswith("-"), f"{words}: no command {rest[0]}"
    try:
        command.make_context(name, rest)
    except typer.Exit:
        # --version and --list end the command.
        return
    except Exception as error:
        raise AssertionError(f"{words}: {error!r}") from None


class Workspace:
    """A folder like the clone that a reader of the guide works in."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = {}) -> None:
        self.folder, self.environment = folder, dict(environment)
        for name in ("configs", "slurm"):
            shutil.copytree(ROOT / name, folder / name)

    def write_files(self, found: list[Block]) -> None:
        """Write the files that the guide tells its reader to save."""
        for block in found:
            if block.kind == "file":
                (self.folder / block.argument).write_text(block.text)

    def run(self, block: Block) -> Done:
        """Run the commands of a block, which ends at the first one that fails; ours are forked."""
        out = err = ""
        for words in block.commands:
            if words[0] in PROGRAMS:
                command = [*PROGRAMS[words[0]], *words[1:]]
                done = forked(command, self.environment | {"PYTHONPATH": str(ROOT)}, self.folder)
            else:
                ran = subprocess.run(words, cwd=self.folder, capture_output=True, text=True)
                done = Done(ran.returncode, ran.stdout, ran.stderr)
            out, err = out + done.out, err + done.err
            assert done.code == 0, f"guide.md:{block.line}: {words}\n{out}{err}"
        return Done(0, out, err)

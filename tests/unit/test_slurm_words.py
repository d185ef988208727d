"""Slurm's commands, states, variables and options stand in slurm.py and slurm_job.py alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.launcher.slurm import OVER, STARTS
from pretrain.launcher.slurm_job import SRUN_OPTIONS

LAUNCHER = Path(__file__).parents[2] / "launcher"
COMMANDS = "squeue|scontrol|scancel|sinfo|sacct|sbatch|srun|slurmctld|slurmd"
STATES = {*OVER, *STARTS, "RUNNING", "SUSPENDED", "COMPLETING"} - {"FAILED"}  # ours as well
# Options that `launcher` and `pretrain` have, too.
OPTIONS = {*SRUN_OPTIONS, "overlap", "no-kill", "mem", "distribution"} - {"nodes", "time", "help"}
WORD = re.compile(
    # Not the keys `sbatch_arguments` and `srun_arguments`, the option --sbatch, or job.sbatch.
    rf"(?<![\w.-])(?:{COMMANDS})(?![\w-])"
    rf"|\b(?:{'|'.join(sorted(STATES))})\b"
    r"|\b(?:SLURM|SBATCH|SQUEUE)_"
    rf"|--(?:{'|'.join(sorted(OPTIONS))})(?![\w-])"
)


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """All strings of the code; not docstrings, nor the text that --help shows."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    told |= {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "help"
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in told:
            if isinstance(node.value, bytes):
                yield node.lineno, node.value.decode("latin-1")
            elif isinstance(node.value, str):
                yield node.lineno, node.value


def slurm_words(code: str) -> list[str]:
    return [
        f"{line}: {match[0]} in {text[:60]!r}"
        for line, text in texts(ast.parse(code))
        for match in WORD.finditer(text)
    ]


@pytest.mark.parametrize("path", sorted(LAUNCHER.rglob("*.py")), ids=lambda path: path.name)
def test_no_other_file_of_the_launcher_speaks_slurm(path: Path) -> None:
    assert path.stem in ("slurm", "slurm_job") or slurm_words(path.read_text()) == []


def test_what_is_told_to_readers_and_our_own_names_are_not_found() -> None:
    code = '"""Run sbatch."""\nOption(help="As sbatch takes it")\n'
    assert slurm_words(code + 'f("--sbatch", "sbatch_arguments", "job.sbatch", "FAILED")') == []

"""The guide's blocks are all accounted for, and every command in them exists."""

from __future__ import annotations

import pytest

from tests.end_to_end.commands import ROOT
from tests.guide import APPS, COMING, GUIDE, KINDS, Block, blocks, check_words

BLOCKS = blocks(GUIDE.read_text())


def test_the_guide_has_blocks_of_every_kind():
    assert {block.kind for block in BLOCKS if block.language != "python"} == KINDS
    assert len(BLOCKS) == GUIDE.read_text().count("\n```") // 2 > 20
    assert {block.language for block in BLOCKS} == {"sh", "toml", "python"}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line_{block.line}")
def test_every_command_and_option_of_the_guide_exists(block: Block):
    assert (block.kind in KINDS) == (block.language in ("sh", "toml"))
    if block.language == "sh" and not block.is_coming:
        assert block.commands
        for words in block.commands:
            check_words(words)


@pytest.mark.parametrize("part", COMING)
def test_nothing_that_is_here_is_passed_over(part: str):
    """A part that has come is taken off the list, so that its blocks are run."""
    if part.startswith("pretrain "):
        with pytest.raises(AssertionError):
            check_words([*part.split(), "file.toml"])
    else:
        assert not (ROOT / part).exists()


def test_a_command_or_an_option_that_does_not_exist_is_found():
    for line in (
        "pretrain trian small.toml",
        "pretrain train small.toml --stpes 3",
        "launcher submit",
        "torchrun --nproc-per-node 8 -m pretrain evaluate runs/a --lenghts 3",
        "rm -rf runs",
    ):
        with pytest.raises(AssertionError):
            check_words(line.split())


def test_the_guide_shows_every_step_of_an_experiment():
    shown = {
        " ".join(words[:2]) for block in BLOCKS for words in block.commands if words[0] in APPS
    }
    assert shown >= {
        *("pretrain config", "pretrain data", "pretrain plan", "pretrain evaluate"),
        *("pretrain study", "pretrain export", "pretrain checkpoint"),
        *("launcher local", "launcher submit", "launcher status", "launcher logs"),
        *("launcher cancel", "launcher data"),
    }


def test_jobs_of_the_guide_are_not_sent_for_the_run_that_an_earlier_step_has_finished():
    """Step 6 trains the run of small.toml to its end on the reader's own machine."""
    words = [each for block in BLOCKS if block.kind == "slurm" for each in block.commands]
    submitted = [each for each in words if each[:2] == ["launcher", "submit"]]
    assert len(submitted) >= 3
    assert all("run.directory=runs/cluster" in each for each in submitted)

"""The guide's blocks are all accounted for, and every command in them exists."""

from __future__ import annotations

import click
import pytest

from tests.guide import APPS, GUIDE, KINDS, Block, blocks, check_words

BLOCKS = blocks(GUIDE.read_text())


def test_the_guide_has_blocks_of_every_kind():
    assert {block.kind for block in BLOCKS if block.language != "python"} == KINDS
    assert len(BLOCKS) == GUIDE.read_text().count("\n```") // 2 > 20
    assert {block.language for block in BLOCKS} == {"sh", "toml", "python"}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line_{block.line}")
def test_every_command_and_option_of_the_guide_exists(block: Block):
    assert (block.kind in KINDS) == (block.language in ("sh", "toml"))
    if block.language == "sh":
        assert block.commands
        for words in block.commands:
            check_words(words)


def test_a_command_or_an_option_that_does_not_exist_is_found():
    for line in (
        "pretrain trian small.toml",
        "pretrain train small.toml --stpes 3",
        "launcher submit",
        "torchrun --nproc-per-node 8 -m pretrain evaluate runs/a --lenghts 3",
    ):
        with pytest.raises(click.ClickException):
            check_words(line.split())
    with pytest.raises(AssertionError):
        check_words(["rm", "-rf", "runs"])


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

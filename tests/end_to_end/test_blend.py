"""A run on a blend of corpora: its order, the ends of its corpora, and a change of its shares."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.checkpoint.manifest import Segment, open_checkpoint
from pretrain.data.shards import ShardWriter, finish_split
from pretrain.data.stream import TokenStream
from tests.end_to_end.commands import metrics, pretrain, succeeds

BOOKS, NEWS = 20, 30
"""Samples of the two corpora."""
TABLES = """
[data.corpora.books]
source = "text"
paths = ["{paths}"]
{books}

[data.corpora.news]
source = "text"
paths = ["{paths}"]
{news}
"""


@pytest.fixture(scope="module")
def blended(workspace: Path, tiny_data: Path) -> Path:
    """A data set of two corpora: two parts of the text of the usual one."""
    directory = workspace / "blended"
    shutil.copytree(tiny_data, directory)
    shutil.rmtree(directory / "train")
    (directory / "train").mkdir()
    source = TokenStream(tiny_data / "train")
    sizes = {"tokens_per_block": 1024, "tokens_per_shard": 1024}
    tasks, start = [], 0
    for number, (name, samples) in enumerate((("books", BOOKS), ("news", NEWS))):
        writer = ShardWriter(
            directory / "train", split="train", corpus=name, task=number, vocab_size=512, **sizes
        )
        writer.add(source.read(start, 32 * samples + 1), text_bytes=100)
        tasks.append(writer.close())
        start += 32 * samples + 1
    finish_split(
        directory / "train",
        tasks,
        split="train",
        tokenizer=source.manifest.tokenizer,
        tokenizer_sha256=source.manifest.tokenizer_sha256,
        vocab_size=512,
        eos_id=source.manifest.eos_id,
        **sizes,
    )
    return directory


def config_of(workspace: Path, config: Path, blended: Path, name: str, **shares: str) -> Path:
    """Write a config on the blended data set and return its path."""
    text = config.read_text().replace('source = "shakespeare"', "")
    text = text.replace("runs/alibi", "runs/blended")
    lines = [f'directory = "{blended}"' if "shards" in line else line for line in text.splitlines()]
    path = workspace / f"{name}.toml"
    tables = TABLES.format(paths=f"{name}.txt", **{"books": "", "news": "", **shares})
    path.write_text("\n".join(lines) + tables)
    return path


def test_shares_change_only_where_it_is_allowed_and_corpora_go_on(
    workspace, config, blended, refused
):
    run = workspace / "runs/blended"
    succeeds("train", config_of(workspace, config, blended, "first"))
    # 8 steps of 8 samples: the 21st of books comes in the 7th step, as does the 31st of news.
    begun = {r["step"]: {k: v for k, v in r.items() if "begun" in k} for r in metrics(run)}
    assert begun[7] == {"begun_pass_of_books": 2, "begun_pass_of_news": 2}
    assert sum(map(len, begun.values())) == 2
    state = open_checkpoint(run / "checkpoints/step-00000008").trainer_state
    samples = {"books": BOOKS, "news": NEWS}
    assert state.segment == Segment(0, samples, {"books": 2, "news": 3}, {"books": 0, "news": 0})

    weights = {"books": "weight = 3", "news": "weight = 1"}
    second = config_of(workspace, config, blended, "second", **weights)
    more = ["--set", "train.num_steps=10"]
    refused(["train", second, *more], "data.corpora", "--allow-changed data.corpora")
    # Other paths alone are no change.
    moved = config_of(workspace, config, blended, "moved")
    done = pretrain("train", moved, "--set", "train.num_steps=9")
    assert done.code == 0 and "data.corpora" not in done.err, done.err
    state = open_checkpoint(run / "checkpoints/step-00000009").trainer_state
    assert state.segment.start == 0

    done = succeeds("train", second, *more, "--allow-changed", "data.corpora")
    opened = open_checkpoint(run / "checkpoints/step-00000010")
    segment = Segment(72, samples, {"books": 3, "news": 1}, {"books": 29, "news": 43})
    assert opened.trainer_state.segment == segment
    assert [change.key for change in opened.origin.changes] == ["data.corpora"]
    # The next start knows it.
    done = succeeds("train", second, "--set", "train.num_steps=11")
    opened = open_checkpoint(run / "checkpoints/step-00000011")
    assert opened.trainer_state.segment == segment
    assert len(opened.origin.changes) == 1

"""Test that tasks written by anybody, and a finish killed at any point, give the same bytes."""

import hashlib
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import ConfigError
from pretrain.data import shards as shards_module
from pretrain.data.manifest import TaskShards
from pretrain.data.shards import ShardWriter, finish_split
from pretrain.data.stream import TokenStream

SIZES = {"vocab_size": 60_000, "tokens_per_block": 50, "tokens_per_shard": 100}


class Killed(BaseException):
    pass


def write_tasks(directory: Path, order=range(4)) -> list[TaskShards]:
    """Write four tasks in any order; what they hand over travels as JSON."""
    directory.mkdir(parents=True)
    done = {}
    for task in order:
        corpus = "books" if task < 2 else "web"
        writer = ShardWriter(directory, split="train", corpus=corpus, task=task, **SIZES)
        writer.add(np.random.default_rng(task).integers(0, 60_000, 120 + 70 * task), 10)
        done[task] = TaskShards.model_validate_json(writer.close().model_dump_json())
    return [done[task] for task in sorted(done)]


def finish(directory: Path, tasks: list[TaskShards]):
    return finish_split(
        directory,
        tasks,
        split="train",
        tokenizer="tokenizer.json",
        tokenizer_sha256=hashlib.sha256(b"").hexdigest(),
        eos_id=0,
        **SIZES,
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_order_in_which_tasks_are_done_does_not_matter(tmp_path):
    finish(tmp_path / "a/train", write_tasks(tmp_path / "a/train"))
    finish(tmp_path / "b/train", write_tasks(tmp_path / "b/train", [3, 1, 0, 2]))
    found = contents(tmp_path / "a/train")
    assert found == contents(tmp_path / "b/train")
    assert {name for name in found if not name.endswith(".tar")} == {
        "manifest.json",
        "checksums.bin",
    }


def test_a_finish_killed_at_any_point_is_repeated(tmp_path, monkeypatch):
    finish(tmp_path / "whole/train", write_tasks(tmp_path / "whole/train"))
    expected = contents(tmp_path / "whole/train")
    for last in count():
        directory = tmp_path / str(last) / "train"
        tasks = write_tasks(directory)
        (directory / ".books-000009-000.tar.77.partial").write_bytes(b"left by a killed task")
        steps = count()

        def step(real, steps=steps, last=last):
            def replaced(*values, **options):
                if next(steps) == last:
                    raise Killed
                return real(*values, **options)

            return replaced

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", step(Path.rename))
            patch.setattr(Path, "unlink", step(Path.unlink))
            patch.setattr(shards_module, "replace_file", step(shards_module.replace_file))
            patch.setattr(shards_module, "flush_directory", step(shards_module.flush_directory))
            try:
                finish(directory, tasks)
            except Killed:
                pass
            else:
                break
        finish(directory, tasks)
        assert contents(directory) == expected, last
        finish(directory, tasks)
        assert contents(directory) == expected, last
    # Eleven shards, four tasks.
    assert last > 15


def test_what_is_missing_or_from_other_tasks_is_not_finished(tmp_path):
    tasks = write_tasks(tmp_path / "train")
    (tmp_path / "train/web-000003-001.tar").unlink()
    with pytest.raises(ConfigError, match=r"web-000003-001\.tar: missing"):
        finish(tmp_path / "train", tasks)
    assert not (tmp_path / "train/manifest.json").exists()
    finish(tmp_path / "other/train", tasks := write_tasks(tmp_path / "other/train"))
    with pytest.raises(RuntimeError, match="finished from other tasks"):
        finish(tmp_path / "other/train", tasks[:2])


def test_a_killed_task_leaves_no_shard_and_its_repetition_the_same_bytes(tmp_path, monkeypatch):
    directory = tmp_path / "train"
    directory.mkdir()
    writer = ShardWriter(directory, split="train", corpus="web", task=0, **SIZES)
    writer.add(np.arange(80), 1)
    assert [path.name[0] for path in directory.iterdir()] == ["."]
    del writer
    again = ShardWriter(directory, split="train", corpus="web", task=0, **SIZES)
    again.add(np.arange(80), 1)
    finish(directory, [again.close()])
    (tmp_path / "tokenizer.json").write_bytes(b"")
    assert np.array_equal(TokenStream(directory).read(0, 80), np.arange(80))
    assert len(list(directory.iterdir())) == 3

"""Checkpoints that were made to do harm are refused as damaged, and nothing else happens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.blocks import BLOCK_BYTES, DamagedCheckpoint, FileRecord
from pretrain.checkpoint.index import Index
from pretrain.checkpoint.manifest import checksum, describe, open_checkpoint
from pretrain.checkpoint.store import Store
from pretrain.checkpoint.tensors import consolidate, slabs
from pretrain.config import ConfigError
from pretrain.huggingface.export import export_source
from pretrain.training.start import choose_checkpoint
from tests.conftest import tiny_config
from tests.unit.saved import after, save


def rehash(checkpoint: Path, change: Callable[[Any], Any] = lambda manifest: None) -> None:
    """Make every digest of the small files right again, then change the manifest."""
    content = json.loads((checkpoint / "manifest.json").read_text())
    for name in ("state.json", "config.toml", "index.json"):
        if (checkpoint / name).is_file():
            content["files"][name] = describe(checkpoint / name)
    change(content)
    content["checksum"] = checksum(content)
    (checkpoint / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/none", path)])
def test_what_is_no_file_is_damage_and_the_run_goes_on_before_it(make, tmp_path):
    first = save(tmp_path, 1)
    last = save(tmp_path, 2, after(first)).path
    (last / "state.json").unlink()
    make(last / "state.json")
    size = (last / "state.json").stat().st_size if (last / "state.json").exists() else 0
    rehash(last, lambda manifest: manifest["files"]["state.json"].update(bytes=size))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        open_checkpoint(last)
    config = tiny_config(run={"directory": str(tmp_path)})
    chosen, damaged = choose_checkpoint(config, "auto")
    assert chosen is not None and chosen.path == first.path and damaged[0][0] == last


@pytest.mark.parametrize(
    "write", [consolidate, lambda source, out: export_source(source, out, None)]
)
def test_nothing_is_written_into_a_checkpoint(write, tmp_path):
    checkpoint = save(tmp_path, 1).path
    with pytest.raises(ConfigError, match="lies in the checkpoint"):
        write(checkpoint, checkpoint / "plain")
    open_checkpoint(checkpoint)


def stored(tmp_path: Path, change: Callable[[Any], Any]) -> Store:
    """Two checkpoints in a store, and a change of the newest one's manifest."""
    store = Store(f"file://{tmp_path}/store")
    first = save(tmp_path / "run", 1)
    last = save(tmp_path / "run", 2, after(first))
    for checkpoint in (first, last):
        store.upload(checkpoint.path)
    store.set_newest(last.lineage)
    (folder,) = (tmp_path / "store").glob("step-00000002-*")
    rehash(folder, change)
    return store


def test_a_run_does_not_go_back_because_the_newest_is_of_another_format(tmp_path):
    with pytest.raises(ConfigError, match="format = 3"):
        stored(tmp_path, lambda manifest: manifest.update(format=3)).newest()


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(validation_loss_nats="low"),
        lambda manifest: manifest.update(parent="\x1b[2J"),
        lambda manifest: manifest["files"]["state.json"].update(bytes=10**4000),
        lambda manifest: manifest["files"]["state.json"].update(bytes=-1),
    ],
)
def test_a_manifest_in_a_store_is_checked_as_on_a_disk(change, tmp_path):
    assert [each.step for each in stored(tmp_path, change).checkpoints()] == [1]


@pytest.mark.parametrize("shape", [[2**52] * 400, [2**53 - 1, 0]])
def test_absurd_shapes_neither_crash_nor_hang(shape, tmp_path):
    checkpoint = save(tmp_path, 1).path
    content = json.loads((checkpoint / "index.json").read_text())
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        content["tensors"][f"{kind}/absurd"] = {"shape": shape, "chunks": []}
    (checkpoint / "index.json").write_text(json.dumps(content))
    rehash(checkpoint)
    opened = open_checkpoint(checkpoint)
    if len(shape) > 2:
        with pytest.raises(DamagedCheckpoint, match="shape"):
            assert opened.index
    else:
        assert list(slabs(opened, ["master/absurd"])) == []


def test_the_files_of_many_ranks_are_checked_in_linear_time():
    files = tuple(
        FileRecord(f"rank-{rank:05d}.safetensors", 0, (), BLOCK_BYTES) for rank in range(20_000)
    )
    begin = time.process_time()
    Index(files, {}).check()
    assert time.process_time() - begin < 1
    with pytest.raises(DamagedCheckpoint, match="twice"):
        Index((*files, files[0]), {}).check()

"""The files of a checkpoint: written once, verified where they are read, never believed."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from pretrain.checkpoint import format as format_module
from pretrain.checkpoint.format import (
    BLOCK_BYTES,
    BlockReader,
    BlockWriter,
    Chunk,
    DamagedCheckpoint,
    FileRecord,
    Index,
    Part,
    Piece,
    PoisonedState,
    TensorRecord,
    checksum,
    describe,
    digest,
    global_boxes,
    write_part,
)
from pretrain.checkpoint.load import Target, load_global_state, read_into
from pretrain.checkpoint.manifest import MASTER, TrainerState, open_checkpoint
from pretrain.checkpoint.store import Store
from pretrain.checkpoint.tools import verify_checkpoint
from pretrain.config import ConfigError
from pretrain.huggingface.export import export_source
from pretrain.training.start import choose_checkpoint
from tests.conftest import tiny_config
from tests.unit.saved import after, save, values


# ---- blocks --------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [BLOCK_BYTES, 1000, 40 << 20])
@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 17])
def test_blocks_are_written_once_and_read_verified(tmp_path, size, block):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    with closing(BlockWriter(tmp_path / "file", block)) as writer:
        for part in np.array_split(data, 7):
            writer.update(part)
        record = writer.finish()
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    blocks = [data[i : i + block].tobytes() for i in range(0, size, block)]
    assert list(record.blocks) == [xxhash.xxh3_128(block).hexdigest() for block in blocks]
    dice = random.Random(size)
    with closing(BlockReader(tmp_path, record)) as reader:
        for _ in range(200):
            start = dice.randint(0, size)
            count = dice.randint(0, min(size - start, 2 * BLOCK_BYTES))
            assert np.array_equal(reader.read(start, count), data[start : start + count])
        assert b"".join(piece.tobytes() for piece in reader.pieces()) == data.tobytes()
    assert digest(record, [data.tobytes()]) == record


def test_a_flipped_bit_is_found_by_whoever_reads_its_block_and_by_nobody_else(tmp_path):
    data = bytes(4 * BLOCK_BYTES)
    with closing(BlockWriter(tmp_path / "file")) as writer:
        writer.update(data)
        record = writer.finish()
    with open(tmp_path / "file", "r+b") as file:
        file.seek(2 * BLOCK_BYTES + 5)
        file.write(b"\x10")
    with closing(BlockReader(tmp_path, record)) as reader:
        reader.read(0, 2 * BLOCK_BYTES)
        reader.read(3 * BLOCK_BYTES, BLOCK_BYTES)
        with pytest.raises(DamagedCheckpoint, match="2,097,152 to 3,145,728 are not what was"):
            reader.read(2 * BLOCK_BYTES - 1, 2)
        with pytest.raises(DamagedCheckpoint):
            reader.verify()


# ---- a small checkpoint, written as two ranks would ----------------------------------------------
SHAPES = {"embedding.weight": (10, 6), "layer.bias": (7,), "layer.weight": (4, 3, 2)}
VALUES = values(0, SHAPES)


def _write(run: Path, cuts: int = 2) -> Path:
    return save(run, 3, tensors=VALUES, world_size=cuts).path


@pytest.mark.parametrize(
    ("cuts", "block_bytes"), [(1, BLOCK_BYTES), (2, 1 << 10), (5, BLOCK_BYTES), (2, 3 << 20)]
)
def test_any_box_is_read_as_it_was_written_whatever_the_cuts(
    tmp_path, monkeypatch, cuts, block_bytes
):
    """A reader takes the size of blocks that the checkpoint says."""
    with monkeypatch.context() as patch:
        patch.setattr(format_module, "BLOCK_BYTES", block_bytes)
        path = _write(tmp_path, cuts)
    checkpoint = open_checkpoint(path)
    assert checkpoint.index.files[0].block_bytes == block_bytes and not verify_checkpoint(path)[0]
    assert checkpoint.shapes == SHAPES
    assert checkpoint.trainer_state == TrainerState(3, 24)
    dice = random.Random(cuts)
    for name, shape in SHAPES.items():
        full = VALUES[f"exp_avg/{name}"]
        for _ in range(30):
            begin = tuple(dice.randrange(n) for n in shape)
            end = tuple(dice.randint(b + 1, n) for b, n in zip(begin, shape))
            box = tuple(slice(b, e) for b, e in zip(begin, end))
            got = torch.full(full[box].shape, math.nan, dtype=torch.bfloat16)
            read_into(checkpoint, [Target(f"exp_avg/{name}", begin, got)])
            assert torch.equal(got, torch.from_numpy(full[box]).bfloat16())
    whole = load_global_state(checkpoint)
    assert all(np.array_equal(whole[name], VALUES[f"{MASTER}/{name}"]) for name in SHAPES)


def test_the_page_about_checkpoints_reads_one_with_stock_safetensors(tmp_path, capsys):
    checkpoint = _write(tmp_path)
    page = Path(__file__).parents[2] / "docs/checkpoints.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    last: dict[str, Any] = {}
    exec(code.replace("CHECKPOINT", str(checkpoint)), last)
    seen = {line.split(" from ")[0] for line in capsys.readouterr().out.splitlines()}
    assert seen == VALUES.keys()
    begin, box = [int(number) for number in last["offset"].split(",")], last["box"].numpy()
    place = tuple(slice(b, b + n) for b, n in zip(begin, box.shape, strict=True))
    assert np.array_equal(VALUES[last["name"]][place], box)


@pytest.mark.parametrize(
    ("kind", "bad", "what"),
    [
        (MASTER, math.nan, "fp32 weights"),
        ("exp_avg", math.inf, "first moments"),
        ("exp_avg_sq", -math.inf, "second moments"),
    ],
)
def test_what_is_not_finite_is_not_written(tmp_path, kind, bad, what):
    values = np.zeros(5, np.float32)
    values[3] = bad
    part = Part(0, (Piece(f"{kind}/layer.bias", (5,), (((0,), (5,)),)),))
    with pytest.raises(PoisonedState, match=f"layer.bias: 1 of 5 values of its {what}"):
        write_part(tmp_path, part, [values])
    # Without its part of the index, the checkpoint cannot be published.
    assert not (tmp_path / part.record_name).exists()


# ---- budgets ----
def _written() -> int:
    """Bytes that this process has handed to write(2) so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def test_a_save_writes_each_byte_once(tmp_path, monkeypatch):
    """Of two ranks: what lies on the disk in the end, and each rank's part of the index.

    Each rank flushes its file and its part of the index; the publication flushes index, state,
    config and manifest, the directory that they are in, and the one that it appears in, which is
    made before.
    """
    flushes = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (flushes.append(descriptor), fsync(descriptor))
    )
    parts = []
    replace_file = format_module.replace_file

    def noting(path: Path, content: str, **options: Any) -> None:
        parts.append(len(content.encode()))
        replace_file(path, content, **options)

    monkeypatch.setattr(format_module, "replace_file", noting)
    before = _written()
    checkpoint = _write(tmp_path, cuts=2)
    written = _written() - before
    assert len(parts) == 2
    assert written == sum(parts) + sum(path.stat().st_size for path in checkpoint.iterdir())
    assert len(flushes) == 2 * 2 + 7


# ---- the index -----------------------------------------------------------------------------------
def _index(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Index:
    chunks = tuple(Chunk(0, 0, offset, size) for offset, size in boxes)
    file = FileRecord("rank-00000.safetensors", 4096, ("0" * 32,), BLOCK_BYTES)
    return Index((file,), {"master/x": TensorRecord(shape=shape, chunks=chunks)})


def test_a_file_is_listed_once():
    index = _index((4,), ((0,), (4,)))
    index.check()
    with pytest.raises(DamagedCheckpoint, match="twice"):
        Index((*index.files, *index.files), index.tensors).check()


def test_random_tilings_cover_and_lose_that_with_any_box_shifted():
    dice = random.Random(1)
    for _ in range(200):
        shape = tuple(dice.randint(1, 6) for _ in range(dice.randint(1, 3)))
        size = math.prod(shape)
        cuts = sorted({0, size, *(dice.randint(0, size) for _ in range(3))})
        boxes = [
            box
            for start, end in pairwise(cuts)
            for box in global_boxes([((0,) * len(shape), shape)], start, end)
        ]
        dice.shuffle(boxes)
        _index(shape, *boxes).check()
        for number in range(len(boxes)):
            with pytest.raises(DamagedCheckpoint):
                _index(shape, *boxes[:number], *boxes[number + 1 :]).check()
            if len(boxes) > 1:
                with pytest.raises(DamagedCheckpoint):
                    _index(shape, *boxes[:number], *boxes[number + 1 :], boxes[number - 1]).check()


# ---- hostile and damaged checkpoints -------------------------------------------------------------
def rehash(checkpoint: Path, change: Callable[[Any], Any] = lambda manifest: None) -> None:
    """Make every digest of the small files right again, as an attacker would, then the manifest."""
    content = json.loads((checkpoint / "manifest.json").read_text())
    for name in ("state.json", "config.toml", "index.json"):
        if (checkpoint / name).is_file():
            content["files"][name] = describe(checkpoint / name)
    change(content)
    content["checksum"] = checksum(content)
    (checkpoint / "manifest.json").write_text(json.dumps(content))


def _edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _put(*keys: Any, value: Any) -> Any:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def _drop(*keys: Any) -> Any:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


FILE = "rank-00000.safetensors"
HOSTILE = {
    # The manifest.
    "another format": ("manifest.json", _put("format", value=1), "format = 1, this version"),
    "another step": ("manifest.json", _put("step", value=4), "step 3, the manifest says 4"),
    "an odd id": ("manifest.json", _put("id", value="../../../../x"), "id: String should match"),
    "unlisted weights": ("manifest.json", _drop("files", FILE), "the manifest does not list it"),
    "unlisted index": ("manifest.json", _drop("files", "index.json"), "does not list index.json"),
    "no digest": ("manifest.json", _put("files", "state.json", value={"bytes": 5}), "no SHA-256"),
    # The state.
    "odd changes": ("state.json", _put("changes", value=[{"a": 1}]), "changes"),
    # The index.
    "no tensors": ("index.json", _put("tensors", value={}), "not of the same parameters"),
    "a tensor less": ("index.json", _drop("tensors", "exp_avg/layer.bias"), "not of the same"),
    "an odd kind": (
        "index.json",
        lambda c: c["tensors"].update({"pickle/x": c["tensors"].pop("exp_avg/layer.bias")}),
        "pickle/x: not master",
    ),
    "an absurd shape": (
        "index.json",
        _put("tensors", f"{MASTER}/absurd", value={"shape": [2**52] * 400, "chunks": []}),
        "shape",
    ),
    "a chunk less": ("index.json", _drop("tensors", "master/layer.bias", "chunks", 0), "elements"),
    "beyond the file": (
        "index.json",
        _put("tensors", "master/layer.bias", "chunks", 0, 1, value=2**40),
        "is in no file",
    ),
    "another file": (
        "index.json",
        _put("tensors", "master/layer.bias", "chunks", 0, 0, value=9),
        "is in no file",
    ),
    "a path in the index": (
        "index.json",
        _put("files", 0, "name", value="../../rank-00000.safetensors"),
        "not a name for a rank's file",
    ),
    "digests missing": ("index.json", _put("files", 0, "blocks", value=[]), "0 digests"),
    "another dtype": ("index.json", _put("dtype", value="F16"), "this version reads F32"),
    "huge blocks": ("index.json", _put("block_bytes", value=2**40), "in blocks of up to"),
    "other digests": (
        "index.json",
        _put("files", 0, "blocks", 0, value="0" * 32),
        "are not what was written",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_content_is_refused_even_when_its_digests_are_right(tmp_path, case):
    file, change, message = HOSTILE[case]
    path = _write(tmp_path)
    if file == "manifest.json":
        rehash(path, change)
    else:
        _edit(path / file, change)
        rehash(path)
    with pytest.raises(ConfigError) as caught:
        load_global_state(open_checkpoint(path))
    assert message in str(caught.value), caught.value
    assert str(tmp_path) in str(caught.value)
    is_another_version = case in ("another format", "another dtype", "huge blocks")
    assert isinstance(caught.value, DamagedCheckpoint) != is_another_version
    if not is_another_version:
        assert "The checkpoint is damaged" in str(caught.value)


def test_a_file_that_is_not_listed_is_refused(tmp_path):
    path = _write(tmp_path)
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata: not a file of this checkpoint"):
        open_checkpoint(path)
    (path / ".metadata").rename(path / ".nfs0001")
    open_checkpoint(path)


@pytest.mark.parametrize(
    "count", [60, pytest.param(2000, marks=pytest.mark.torture)], ids=["short", "full"]
)
def test_every_corruption_is_found_and_none_in_what_is_whole(tmp_path, count):
    """A flipped bit, a cut end, zeros, or two exchanged pieces, in any file at any place."""
    whole = _write(tmp_path)
    expected = {
        name: tensor.numpy() for name, tensor in load_global_state(open_checkpoint(whole)).items()
    }
    dice = random.Random(5)
    for number in range(count):
        copy = tmp_path / "copy/checkpoints" / whole.name
        shutil.copytree(whole, copy)
        path = dice.choice(sorted(copy.iterdir()))
        data = bytearray(path.read_bytes())
        at = dice.randrange(len(data))
        match number % 4:
            case 0:
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at : at + 64] = bytes(len(data[at : at + 64]))
            case 3:
                other = dice.randrange(len(data))
                data[at], data[other] = data[other], data[at]
        before = path.read_bytes()
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(copy)
            if problems := verify_checkpoint(copy)[0]:
                raise DamagedCheckpoint(problems[0])
            got = load_global_state(checkpoint)
        except ConfigError:
            assert bytes(data) != before
        else:
            # A space in the place of a line's end changes nothing that the manifest says.
            is_same = path.name == "manifest.json" and json.loads(data) == json.loads(before)
            assert is_same or bytes(data) == before, f"{path.name}, byte {at}, kind {number % 4}"
            assert all(np.array_equal(got[name], expected[name]) for name in expected)
        shutil.rmtree(tmp_path / "copy")


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


def test_nothing_is_written_into_a_checkpoint(tmp_path):
    checkpoint = save(tmp_path, 1).path
    with pytest.raises(ConfigError, match="lies in the checkpoint"):
        export_source(checkpoint, checkpoint / "plain", None)
    open_checkpoint(checkpoint)


def test_a_run_does_not_go_back_because_the_newest_is_of_another_format(tmp_path):
    store = Store(f"file://{tmp_path}/store")
    first = save(tmp_path / "run", 1)
    last = save(tmp_path / "run", 2, after(first))
    for checkpoint in (first, last):
        store.upload(checkpoint.path)
    (folder,) = (tmp_path / "store").glob("step-00000002-*")
    rehash(folder, lambda manifest: manifest.update(format=3))
    with pytest.raises(ConfigError, match="format = 3"):
        store.newest()

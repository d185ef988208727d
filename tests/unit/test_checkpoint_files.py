"""The files of a checkpoint: written once, verified where they are read, never believed."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash

from pretrain.checkpoint import index as index_module
from pretrain.checkpoint import index as part_module
from pretrain.checkpoint.blocks import (
    BLOCK_BYTES,
    BlockReader,
    BlockWriter,
    DamagedCheckpoint,
    digest,
    global_boxes,
)
from pretrain.checkpoint.index import (
    Chunk,
    Index,
    Part,
    Piece,
    PoisonedState,
    TensorRecord,
    merge,
    write_part,
)
from pretrain.checkpoint.load import Target, load_global_state, read_into
from pretrain.checkpoint.manifest import (
    MASTER,
    Origin,
    TrainerState,
    checksum,
    lineage_content,
    open_checkpoint,
    state_content,
)
from pretrain.checkpoint.writer import Publication, publish
from pretrain.config import ConfigError, dump_config
from pretrain.rundir.lineage import Branch, new_id
from tests.conftest import tiny_config


# ---- blocks --------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [BLOCK_BYTES, 1000, 40 << 20])
@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 17])
def test_blocks_are_written_once_and_read_verified(tmp_path, size, block):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    with closing(BlockWriter(tmp_path / "file", block)) as writer:
        for part in np.array_split(data, 7):
            writer.write(part)
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
        writer.write(data)
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
MOMENTS = ("exp_avg", "exp_avg_sq")
SHAPES = {"embedding.weight": (10, 6), "layer.bias": (7,), "layer.weight": (4, 3, 2)}


def _values(kind: str, name: str) -> np.ndarray:
    seed = int.from_bytes(xxhash.xxh3_64(f"{kind}/{name}".encode()).digest(), "little")
    return np.random.default_rng(seed).standard_normal(SHAPES[name]).astype(np.float32)


def _write(run: Path, cuts: int = 2, step: int = 3) -> Path:
    """Write a checkpoint whose tensors are cut into flat ranges, one for each rank."""
    final = run / f"checkpoints/step-{step:08d}"
    partial = run / "checkpoints/.partial"
    partial.mkdir(parents=True)
    for rank in range(cuts):
        pieces, values = [], []
        for name, shape in SHAPES.items():
            size = math.prod(shape)
            start, end = rank * size // cuts, (rank + 1) * size // cuts
            boxes = global_boxes(shape, start, end, (0,) * len(shape))
            for kind in (MASTER, *MOMENTS):
                pieces.append(Piece(f"{kind}/{name}", shape, boxes))
                values.append(_values(kind, name).reshape(-1)[start:end])
        write_part(partial, Part(rank, tuple(pieces)), values)
    origin = Origin(branches=(Branch("ab" * 8, 0),), data={"training": "a"})
    state = TrainerState(step, 8 * step)
    publish(
        Publication(
            partial=str(partial),
            final=str(final),
            attempt=None,
            keep=(None, None, 0),
            world_size=cuts,
            lineage=lineage_content(new_id(), step, origin),
            state=state_content(state, step, None, origin),
            config=dump_config(tiny_config()),
        )
    )
    return final


@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_any_box_is_read_as_it_was_written_whatever_the_cuts(tmp_path, cuts):
    checkpoint = open_checkpoint(_write(tmp_path, cuts))
    assert checkpoint.shapes == SHAPES
    assert checkpoint.trainer_state == TrainerState(3, 24)
    dice = random.Random(cuts)
    for name, shape in SHAPES.items():
        full = _values("exp_avg", name)
        for _ in range(30):
            begin = tuple(dice.randrange(n) for n in shape)
            end = tuple(dice.randint(b + 1, n) for b, n in zip(begin, shape))
            box = tuple(slice(b, e) for b, e in zip(begin, end))
            got = torch.full(full[box].shape, math.nan, dtype=torch.bfloat16)
            read_into(checkpoint, [Target(f"exp_avg/{name}", begin, got)])
            assert torch.equal(got, torch.from_numpy(full[box]).bfloat16())
    whole = load_global_state(checkpoint)
    assert all(np.array_equal(whole[name], _values(MASTER, name)) for name in SHAPES)


def test_stock_safetensors_reads_the_files(tmp_path):
    """Each box lies under its tensor's name and its offset."""
    checkpoint = _write(tmp_path)
    seen: dict[str, int] = {}
    for path in checkpoint.glob("*.safetensors"):
        for key, box in safetensors.numpy.load_file(path).items():
            name, _, offset = key.partition("@")
            kind, _, parameter = name.partition("/")
            begin = [int(o) for o in offset.split(",")]
            full = _values(kind, parameter)
            assert np.array_equal(
                box, full[tuple(slice(b, b + n) for b, n in zip(begin, box.shape))]
            )
            seen[name] = seen.get(name, 0) + box.size
    assert seen == {f"{k}/{n}": math.prod(s) for n, s in SHAPES.items() for k in (MASTER, *MOMENTS)}


def test_the_page_about_checkpoints_reads_one_with_stock_safetensors(tmp_path, capsys):
    checkpoint = _write(tmp_path)
    page = Path(__file__).parents[2] / "docs/checkpoints.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(code.replace("CHECKPOINT", str(checkpoint)), {})
    seen = {line.split(" from ")[0] for line in capsys.readouterr().out.splitlines()}
    assert seen == {f"{kind}/{name}" for kind in (MASTER, *MOMENTS) for name in SHAPES}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [MASTER, *MOMENTS])
def test_what_is_not_finite_is_not_written(tmp_path, bad, kind):
    values = np.zeros(5, np.float32)
    values[3] = bad
    part = Part(0, (Piece(f"{kind}/layer.bias", (5,), (((0,), (5,)),)),))
    words = {"master": "fp32 weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
    with pytest.raises(PoisonedState, match=f"layer.bias: 1 of 5 values of its {words[kind]}"):
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
    config and manifest, the directory that they are in, and the one that it appears in.
    """
    flushes = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (flushes.append(descriptor), fsync(descriptor))
    )
    parts = []
    replace_file = part_module.replace_file

    def noting(path: Path, content: str, **options: Any) -> None:
        parts.append(len(content.encode()))
        replace_file(path, content, **options)

    monkeypatch.setattr(part_module, "replace_file", noting)
    before = _written()
    checkpoint = _write(tmp_path, cuts=2)
    written = _written() - before
    assert len(parts) == 2
    assert written == sum(parts) + sum(path.stat().st_size for path in checkpoint.iterdir())
    assert len(flushes) == 2 * 2 + 6


# ---- the index -----------------------------------------------------------------------------------
def _index(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Index:
    chunks = tuple(Chunk(0, 0, offset, size) for offset, size in boxes)
    file = index_module.FileRecord("rank-00000.safetensors", 4096, ("0" * 32,), BLOCK_BYTES)
    return Index((file,), {"master/x": TensorRecord(shape=shape, chunks=chunks)})


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 3))], "6 of its 12 elements"),
        ([((0, 0), (3, 3)), ((1, 0), (1, 3))], "two files hold the same elements"),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], "two files hold the same elements"),
        ([((0, 0), (4, 4))], "is not inside of it"),
        ([((0,), (12,))], "is not inside of it"),
        ([], "0 of its 12 elements"),
    ],
)
def test_gaps_and_overlaps_are_refused(boxes, message):
    with pytest.raises(DamagedCheckpoint, match=message):
        _index((4, 3), *boxes).check()


def test_random_tilings_cover_and_lose_that_with_any_box_shifted():
    dice = random.Random(1)
    for _ in range(200):
        shape = tuple(dice.randint(1, 6) for _ in range(dice.randint(1, 3)))
        size = math.prod(shape)
        cuts = sorted({0, size, *(dice.randint(0, size) for _ in range(3))})
        boxes = [
            box
            for start, end in pairwise(cuts)
            for box in global_boxes(shape, start, end, (0,) * len(shape))
        ]
        dice.shuffle(boxes)
        _index(shape, *boxes).check()
        for number in range(len(boxes)):
            with pytest.raises(DamagedCheckpoint):
                _index(shape, *boxes[:number], *boxes[number + 1 :]).check()
            if len(boxes) > 1:
                with pytest.raises(DamagedCheckpoint):
                    _index(shape, *boxes[:number], *boxes[number + 1 :], boxes[number - 1]).check()


def test_parts_with_other_shapes_are_not_merged():
    parts = [
        Part(rank, (Piece("master/x", (2, rank + 1), (((rank, 0), (1, rank + 1)),)),))
        for rank in range(2)
    ]
    records = [
        part.record(index_module.FileRecord(part.file_name, 4096, ("0" * 32,), BLOCK_BYTES))
        for part in parts
    ]
    with pytest.raises(DamagedCheckpoint, match="master/x"):
        merge(records)


# ---- hostile and damaged checkpoints -------------------------------------------------------------
def _edit(path: Path, change: Any, rehash: bool = True) -> None:
    """Change a JSON file of a checkpoint and, as an attacker would, all digests above it."""
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))
    manifest = path.parent / "manifest.json"
    if not rehash:
        return
    content = json.loads(manifest.read_text())
    if not isinstance(content, dict):
        return
    if path != manifest:
        data = path.read_bytes()
        import hashlib

        content["files"][path.name] = {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    content["checksum"] = checksum(content)
    manifest.write_text(json.dumps(content))


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


def _segment(start: int = 0, samples: int = 5, share: int = 1) -> dict:
    """Return a blend of one corpus as state.json has it."""
    parts = {"samples": samples, "shares": share, "consumed": 0}
    return {"start": start, **{name: {"a": value} for name, value in parts.items()}}


FILE = "rank-00000.safetensors"
HOSTILE = {
    # The manifest.
    "another format": ("manifest.json", _put("format", value=1), "format = 1, this version"),
    "no format": ("manifest.json", _drop("format"), "format: Field required"),
    "format as text": ("manifest.json", _put("format", value="2"), "not a manifest"),
    "a list": ("manifest.json", lambda c: [c], "not a manifest"),
    "null": ("manifest.json", lambda c: 0, "not a manifest"),
    "step as text": ("manifest.json", _put("step", value="3"), "step: Input should be a valid int"),
    "negative step": ("manifest.json", _put("step", value=-1), "step: Input should be greater"),
    "no step": ("manifest.json", _put("step", value=None), "step: Input should be a valid int"),
    "true step": ("manifest.json", _put("step", value=True), "step: Input should be a valid int"),
    "huge step": ("manifest.json", _put("step", value=2**63), "step: Input should be less"),
    "another step": ("manifest.json", _put("step", value=4), "step 3, the manifest says 4"),
    "no id": ("manifest.json", _drop("id"), "id: Field required"),
    "an odd id": ("manifest.json", _put("id", value="../../../../x"), "id: String should match"),
    "no branches": ("manifest.json", _put("branches", value=[]), "branches: Tuple should have"),
    "odd branches": ("manifest.json", _put("branches", value={"a": 1}), "branches: Input should"),
    "no files": ("manifest.json", _drop("files"), "files: Field required"),
    "files as list": ("manifest.json", _put("files", value=[]), "files: Input should be"),
    "unlisted weights": ("manifest.json", _drop("files", FILE), "the manifest does not list it"),
    "unlisted index": ("manifest.json", _drop("files", "index.json"), "does not list index.json"),
    "an absolute name": (
        "manifest.json",
        _put("files", "/etc/passwd", value={"bytes": 1}),
        "lists '/etc/passwd'",
    ),
    "a name above": (
        "manifest.json",
        _put("files", "../rank-00001.safetensors", value={"bytes": 1}),
        "which is no file of a checkpoint",
    ),
    "a negative size": (
        "manifest.json",
        _put("files", FILE, "bytes", value=-1),
        "bytes: Input should be greater",
    ),
    "no digest": ("manifest.json", _put("files", "state.json", value={"bytes": 5}), "no SHA-256"),
    # The state.
    "state is a list": ("state.json", lambda c: [c], "not a state"),
    "samples as text": ("state.json", _put("consumed_samples", value="1"), "consumed_samples"),
    "negative samples": ("state.json", _put("consumed_samples", value=-8), "consumed_samples"),
    "no updates": ("state.json", _drop("adam_steps"), "adam_steps: Field required"),
    "odd loss scaler": ("state.json", _put("loss_scaler", value=[1]), "loss_scaler"),
    "odd changes": ("state.json", _put("changes", value=[{"a": 1}]), "changes"),
    "a blend of nothing": ("state.json", _put("segment", value=_segment(share=0)), "segment"),
    "a share of no samples": ("state.json", _put("segment", value=_segment(samples=0)), "segment"),
    "a blend of other corpora": (
        "state.json",
        _put("segment", value=_segment() | {"consumed": {"b": 0}}),
        "not of the same corpora",
    ),
    "a blend to come": ("state.json", _put("segment", value=_segment(start=10**9)), "begins after"),
    "a negative blend": ("state.json", _put("segment", value=_segment(start=-1)), "segment"),
    # The index.
    "index is a list": ("index.json", lambda c: [c], "not an index"),
    "no tensors": ("index.json", _put("tensors", value={}), "not of the same parameters"),
    "a tensor less": ("index.json", _drop("tensors", "exp_avg/layer.bias"), "not of the same"),
    "an odd kind": (
        "index.json",
        lambda c: c["tensors"].update({"pickle/x": c["tensors"].pop("exp_avg/layer.bias")}),
        "pickle/x: not master",
    ),
    "a chunk less": ("index.json", _drop("tensors", "master/layer.bias", "chunks", 0), "elements"),
    "another shape": (
        "index.json",
        _put("tensors", "master/layer.bias", "shape", value=[8]),
        "7 of its 8 elements",
    ),
    "a negative start": (
        "index.json",
        _put("tensors", "master/layer.bias", "chunks", 0, 1, value=-4),
        "not an index",
    ),
    "beyond the file": (
        "index.json",
        _put("tensors", "master/layer.bias", "chunks", 0, 1, value=2**40),
        "is in no file",
    ),
    "unaligned": (
        "index.json",
        _put("tensors", "master/layer.bias", "chunks", 0, 1, value=129),
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
    "the same file twice": (
        "index.json",
        _put("files", 1, "name", value=FILE),
        "not a name for a rank's file, or twice",
    ),
    "digests missing": ("index.json", _put("files", 0, "blocks", value=[]), "0 digests"),
    "another dtype": ("index.json", _put("dtype", value="F16"), "this version reads F32"),
    "huge blocks": ("index.json", _put("block_bytes", value=2**40), "in blocks of up to"),
    "no blocks": ("index.json", _put("block_bytes", value=0), "in blocks of up to"),
    "blocks of another size": ("index.json", _put("block_bytes", value=16), "digests of its"),
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
    _edit(path / file, change)
    with pytest.raises(ConfigError) as caught:
        load_global_state(open_checkpoint(path))
    assert message in str(caught.value), caught.value
    assert str(tmp_path) in str(caught.value)
    is_another_version = case in ("another format", "another dtype", "huge blocks", "no blocks")
    assert isinstance(caught.value, DamagedCheckpoint) != is_another_version
    if not is_another_version:
        assert "The checkpoint is damaged" in str(caught.value)


def test_a_change_without_its_digests_is_refused(tmp_path):
    for name, change in [("manifest.json", _put("step", value=4)), ("state.json", _drop("data"))]:
        path = _write(tmp_path / name)
        _edit(path / name, change, rehash=False)
        with pytest.raises(DamagedCheckpoint):
            open_checkpoint(path)


def test_a_file_that_is_not_listed_is_refused(tmp_path):
    path = _write(tmp_path)
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata: not a file of this checkpoint"):
        open_checkpoint(path)
    (path / ".metadata").rename(path / ".nfs0001")
    open_checkpoint(path)


@pytest.mark.parametrize("name", ["state.json", "config.toml", "index.json", FILE])
def test_a_missing_file_is_refused(tmp_path, name):
    path = _write(tmp_path)
    (path / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name}: missing"):
        open_checkpoint(path)


def test_the_remedy_names_the_checkpoint_before(tmp_path):
    first, second = _write(tmp_path, step=3), _write(tmp_path, step=7)
    (second / "state.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=f"The one before it is {first}"):
        open_checkpoint(second)
    shutil.rmtree(first)
    with pytest.raises(DamagedCheckpoint, match="there is no earlier one"):
        open_checkpoint(second)


CORRUPTIONS = 60


@pytest.mark.parametrize(
    "count", [CORRUPTIONS, pytest.param(2000, marks=pytest.mark.torture)], ids=["short", "full"]
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
            checkpoint.verify_tensors()
            got = load_global_state(checkpoint)
        except ConfigError:
            assert bytes(data) != before
        else:
            # A space in the place of a line's end changes nothing that the manifest says.
            is_same = path.name == "manifest.json" and json.loads(data) == json.loads(before)
            assert is_same or bytes(data) == before, f"{path.name}, byte {at}, kind {number % 4}"
            assert all(np.array_equal(got[name], expected[name]) for name in expected)
        shutil.rmtree(tmp_path / "copy")

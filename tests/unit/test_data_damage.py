"""Damage data sets in a thousand ways: verify names each, and no reader returns a wrong token."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import ConfigError
from pretrain.data.shards import Manifest
from pretrain.data.stream import TokenStream, verify
from tests.conftest import mark_torture
from tests.unit.splits import write_split

BLOCK = 3000
"""Tokens in a block: two pieces, of which the second is short."""

SPLITS = ("train", "validation")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A data set of two corpora and three tasks, and the tokens of its splits."""
    root, rng = tmp_path_factory.mktemp("sound"), np.random.default_rng(0)
    tokens = {}
    for split, scale in zip(SPLITS, (1, 0.3)):
        parts = [rng.integers(0, 60_000, int(scale * size)) for size in (20_000, 8_500, 15_000)]
        tokens[split] = np.concatenate(parts)
        write_split(
            root,
            {"books": [[parts[0]], [parts[1]]], "web": [[parts[2]]]},
            split=split,
            tokens_per_block=BLOCK,
            tokens_per_shard=3 * BLOCK,
        )
    return root, tokens


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.tar"))


def flip(path: Path, rng: np.random.Generator, low: int = 0, high: int | None = None) -> None:
    """Flip one bit between two byte offsets."""
    content = bytearray(path.read_bytes())
    content[rng.integers(low, high or len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def block_offset(path: Path, rng: np.random.Generator) -> int:
    """The offset of a block's tar header: by webdataset's keys, not by our arithmetic."""
    places = [m.start() for m in re.finditer(rb"\d{6}-\d{8}\.npy", path.read_bytes())]
    return int(rng.choice(places))


# Each damages a data set and returns the files of which one must be named, and whether tokens are.
def payload(root, rng):
    path = rng.choice(shards(root))
    start = block_offset(path, rng) + 640
    # The shortest last block has 100 tokens.
    flip(path, rng, start, start + 200)
    return [path], True


def anywhere(root, rng):
    path = rng.choice(shards(root))
    flip(path, rng)
    return [path], False


def checksums(root, rng):
    path = rng.choice(sorted(root.glob("*/checksums.bin")))
    flip(path, rng)
    return [path], True


def truncation(root, rng):
    path = rng.choice([*shards(root), *root.glob("*/checksums.bin")])
    os.truncate(path, rng.integers(path.stat().st_size))
    return [path], True


def swapped_shards(root, rng):
    """Of one size where there are two, so that sizes tell nothing."""
    split = root / rng.choice(SPLITS)
    first, second = rng.choice(sorted(split.glob("*.tar")), 2, replace=False)
    os.rename(first, root / "aside")
    os.rename(second, first)
    os.rename(root / "aside", second)
    return [first, second], True


def swapped_splits(root, rng):
    names = [path.name for path in (root / "train").iterdir()]
    for name in names:
        if (root / "validation" / name).exists() and name.startswith(("books-000000",)):
            os.rename(root / "train" / name, root / "aside")
            os.rename(root / "validation" / name, root / "train" / name)
            os.rename(root / "aside", root / "validation" / name)
    return [root / split / "books-000000.tar" for split in SPLITS], True


def swapped_directories(root, rng):
    os.rename(root / "train", root / "aside")
    os.rename(root / "validation", root / "train")
    os.rename(root / "aside", root / "validation")
    return [root / split / "manifest.json" for split in SPLITS], None


def swapped_blocks(root, rng):
    """Two full blocks of a shard trade their tokens; every tar and NumPy header stays right."""
    path = root / "train" / "books-000000.tar"
    content = bytearray(path.read_bytes())
    places = [m.start() + 640 for m in re.finditer(rb"\d{6}-\d{8}\.npy", bytes(content))]
    a, b = rng.choice(places, 2, replace=False)
    size = 2 * BLOCK
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    path.write_bytes(content)
    return [path], True


def swapped_pieces(root, rng):
    """The same checksum would fit both if a piece's place were not part of it."""
    path = root / "train" / "books-000000.tar"
    content = bytearray(path.read_bytes())
    index = np.fromfile(root / "train" / "checksums.bin", "<u8")
    a, b = 640, 640 + 512 * -(-(128 + 2 * BLOCK) // 512) + 512
    assert content[b - 128 : b - 122] == b"\x93NUMPY"
    content[a : a + 4096], content[b : b + 4096] = content[b : b + 4096], content[a : a + 4096]
    path.write_bytes(content)
    index[[0, 2]] = index[[2, 0]]
    index.tofile(root / "train" / "checksums.bin")
    return [path, root / "train" / "checksums.bin"], True


def zeroed_page(root, rng):
    path = rng.choice(shards(root))
    content = bytearray(path.read_bytes())
    start = int(rng.integers(640 // 4096, len(content) // 4096)) * 4096
    if not any(content[start : start + 4096]):
        start = 0
    content[start : start + 4096] = bytes(4096)
    path.write_bytes(content)
    return [path], False


def missing_file(root, rng):
    names = [*root.glob("*/*.tar"), *root.glob("*/*.bin"), *root.glob("*/*.json")]
    path = rng.choice(sorted([*names, root / "tokenizer.model"]))
    path.unlink()
    return [path], None


def other_tokenizer(root, rng):
    flip(root / "tokenizer.model", rng)
    return [root / "tokenizer.model"], None


def manifest_bit(root, rng):
    path = root / rng.choice(SPLITS) / "manifest.json"
    flip(path, rng)
    return [path], True


CHANGES: list[dict] = [
    {"tokens": lambda v: v + 1},
    {"tokens": lambda v: 1e300},
    {"dtype": lambda v: "object"},
    {"vocab_size": lambda v: v + 1},
    {"eos_id": lambda v: 60_000},
    {"tokens_per_block": lambda v: v // 2},
    {"split": lambda v: "test"},
    {"tokenizer": lambda v: "../../etc/passwd"},
    {"checksums_bytes": lambda v: v + 8},
    {"shards": lambda v: v[::-1]},
    {"shards": lambda v: v[:-1]},
    {"shards": lambda v: [{**v[0], "name": "../../../etc/passwd"}, *v[1:]]},
    {"shards": lambda v: [{**v[0], "tokens": v[0]["tokens"] + 1}, *v[1:]]},
    {"shards": lambda v: [{**v[0], "xxh3_128": v[1]["xxh3_128"]}, *v[1:]]},
    {"corpora": lambda v: [{**v[0], "tokens": v[0]["tokens"] + 1}, *v[1:]]},
    {"sha256": lambda v: ""},
    {"format_version": lambda v: 3},
    {"extra": lambda v: 1},
]


def manifest_value(root, rng):
    path = root / rng.choice(SPLITS) / "manifest.json"
    content = json.loads(path.read_text())
    for key, change in rng.choice(CHANGES).items():
        content[key] = change(content.get(key))
    path.write_text(json.dumps(content, indent=1) + "\n")
    return [path], True


KINDS: list[Callable] = [
    payload,
    anywhere,
    checksums,
    truncation,
    swapped_shards,
    swapped_splits,
    swapped_directories,
    swapped_blocks,
    swapped_pieces,
    zeroed_page,
    missing_file,
    other_tokenizer,
    manifest_bit,
    manifest_value,
]


def names(error: ConfigError, files: list[Path]) -> bool:
    return any(str(path) in str(error) for path in files)


def read_all(root: Path, split: str, rng: np.random.Generator) -> np.ndarray:
    """Read a split in parts of a random length, each part on its own."""
    stream = TokenStream(root / split)
    step = int(rng.integers(500, 5000))
    parts = [stream.read(at, min(step, len(stream) - at)) for at in range(0, len(stream), step)]
    return np.concatenate(parts)


def check(root: Path, tokens: dict[str, np.ndarray], seed: int) -> None:
    """Damage a copy of the data set; every error names the file, and every token is right.

    Args:
        root: The copy.
        tokens: The tokens of its splits.
        seed: Chooses the damage.
    """
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    files, touches_tokens = kind(root, rng)
    with pytest.raises(ConfigError) as caught:
        verify(root)
    assert names(caught.value, files), (kind.__name__, files, caught.value)
    errors = 0
    for split in SPLITS:
        try:
            found = read_all(root, split, rng)
        except ConfigError as error:
            errors += 1
            assert names(error, files), (kind.__name__, files, error)
        else:
            right = kind is swapped_directories or np.array_equal(found, tokens[split])
            assert right, (kind.__name__, files)
    assert errors or not touches_tokens, (kind.__name__, files)
    assert errors <= 1 or touches_tokens is None or len(files) > 1


@pytest.mark.parametrize(["first", "count"], mark_torture([(0, 60), (60, 1000)], {(0, 60)}))
def test_damaged_data_sets_are_all_named(sound, tmp_path, first, count):
    root, tokens = sound
    for seed in range(first, first + count):
        shutil.copytree(root, tmp_path / "copy")
        check(tmp_path / "copy", tokens, seed)
        shutil.rmtree(tmp_path / "copy")


def test_a_sound_data_set_passes(sound, tmp_path):
    root, tokens = sound
    verify(root)
    shutil.copytree(root, tmp_path / "copy")
    verify(tmp_path / "copy")
    for seed in range(20):
        for split in SPLITS:
            assert np.array_equal(read_all(root, split, np.random.default_rng(seed)), tokens[split])


def test_a_shard_s_name_leads_nowhere_else(sound, tmp_path):
    """Whoever writes a manifest can also sign it, and it may lie at a URL."""
    root, _ = sound
    shutil.copytree(root, tmp_path / "copy")
    path = tmp_path / "copy/train/manifest.json"
    manifest = Manifest.model_validate_json(path.read_text())
    shard = manifest.shards[0].model_copy(update={"name": "../../passwd.tar"})
    signed = manifest.model_copy(update={"shards": (shard, *manifest.shards[1:])})
    path.write_text(signed.text())
    with pytest.raises(ConfigError, match=r"not a valid manifest \(shards\.0\.name"):
        TokenStream(tmp_path / "copy/train")


def test_all_damaged_files_are_named_at_once(sound, tmp_path):
    root, _ = sound
    shutil.copytree(root, tmp_path / "copy")
    rng = np.random.default_rng(0)
    damaged = shards(tmp_path / "copy")[1::2]
    assert len(damaged) >= 4
    for path in damaged[1:]:
        flip(path, rng)
    damaged[0].unlink()
    with pytest.raises(ConfigError) as caught:
        verify(tmp_path / "copy")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(damaged)
    assert {line.split(":")[0] for line in lines} == set(map(str, damaged))

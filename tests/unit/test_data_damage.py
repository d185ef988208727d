"""Damage data sets in a thousand ways: verify names each, and no reader returns a wrong token."""

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import ConfigError
from pretrain.data.build import build
from pretrain.data.shards import Manifest, sealed
from pretrain.data.stream import TokenStream, verify
from pretrain.data.view import Origins, summary
from tests.conftest import mark_torture
from tests.unit.test_data_build import config

BLOCK = 3000
"""Tokens in a block: two pieces, of which the second is short."""

SPLITS = ("train", "validation")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A data set of two corpora and three tasks, and the tokens of its splits."""
    root, rng = tmp_path_factory.mktemp("sound"), np.random.default_rng(0)
    for name, count in {"a.books": 34, "b.books": 9, "c.web": 25}.items():
        texts = (" ".join(rng.choice(["sea", "ship", "storm", "sail"], 900)) for _ in range(count))
        (root / name).write_text("\n\n".join(texts))
    corpora = {
        name: {"source": "blank_lines", "paths": [str(root / f"*.{name}")]}
        for name in ("books", "web")
    }
    sizes = {"tokens_per_block": BLOCK, "tokens_per_shard": 3 * BLOCK, "bytes_per_task": 170_000}
    cleaning = {"decontaminate": False, "deduplicate": "none"}
    build(
        config(root, cleaning, corpora=corpora, validation_fraction=0.25, vocab_size=300, **sizes)
    )
    return root / "data", {split: stored_tokens(root / "data" / split) for split in SPLITS}


def stored_tokens(split: Path) -> np.ndarray:
    """The tokens of the tars, read without our code."""
    parts = []
    for path in sorted(split.glob("*.tar")):
        with tarfile.open(path) as tar:
            parts += [np.load(io.BytesIO(tar.extractfile(member).read())) for member in tar]
    return np.concatenate(parts)


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.tar"))


def flip(path: Path, rng: np.random.Generator, low: int = 0, high: int | None = None) -> None:
    """Flip one bit between two byte offsets."""
    content = bytearray(path.read_bytes())
    content[rng.integers(low, high or len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def block_offset(path: Path, rng: np.random.Generator) -> tuple[int, bool]:
    """A block's tar header, by webdataset's keys, not by our arithmetic; and if it is the last."""
    places = [m.start() for m in re.finditer(rb"\d{6}-\d{8}\.npy", path.read_bytes())]
    start = int(rng.choice(places))
    return start, start == places[-1]


# Each damages a data set and returns the files of which one must be named, and whether tokens are.
def payload(root, rng):
    path = rng.choice(shards(root))
    start, is_last = block_offset(path, rng)
    # The last block may have no more than a token.
    flip(path, rng, start + 640, start + 640 + (2 if is_last else 2 * BLOCK))
    return [path], True


def anywhere(root, rng):
    path = rng.choice(files_of(root))
    flip(path, rng)
    return [path], None


def truncation(root, rng):
    path = rng.choice(files_of(root))
    os.truncate(path, rng.integers(path.stat().st_size))
    return [path], None


def growth(root, rng):
    path = rng.choice(files_of(root))
    with path.open("ab") as file:
        file.write(rng.bytes(int(rng.integers(1, 5000))))
    return [path], None


def swapped_files(root, rng):
    """Any two, so that mostly one stands where another kind belongs."""
    first, second = rng.choice(files_of(root), 2, replace=False)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    # A manifest of the other split: no file beside it is as it says.
    are_manifests = first.name == second.name == "manifest.json"
    return files_of(root) if are_manifests else [first, second], None


def index_of_documents(root, rng):
    path = rng.choice(sorted(root.glob("*/documents/*")))
    flip(path, rng)
    return [path], False


def build_record(root, rng):
    """Half of the time with a number that reads as well as the right one."""
    path = root / "build.json"
    content = path.read_bytes()
    if rng.integers(2):
        flip(path, rng)
    else:
        path.write_bytes(content.replace(b'"documents": ', b'"documents": 1', 1))
    return [path], False


def other_build(root, rng):
    """build.json is that of another data set, whole and sealed."""
    other = json.loads((root / "build.json").read_text())
    del other["sha256"]
    for value in other["files"].values():
        value[1] = value[1][::-1]
    (root / "build.json").write_text(sealed(other))
    return [root / "build.json"], False


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


def missing_file(root, rng):
    path = rng.choice(files_of(root))
    path.unlink()
    return [path], None


CHANGES: list[dict] = [
    {"tokens": lambda v: 1e300},
    {"dtype": lambda v: "object"},
    {"shards": lambda v: v[::-1]},
    {"shards": lambda v: [{**v[0], "xxh3_128": v[1]["xxh3_128"]}, *v[1:]]},
    {"sha256": lambda v: ""},
    {"format_version": lambda v: 2},
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
    growth,
    swapped_files,
    index_of_documents,
    build_record,
    other_build,
    truncation,
    swapped_directories,
    swapped_blocks,
    swapped_pieces,
    missing_file,
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


def looked_at(root: Path) -> list[object]:
    """What `pretrain data stats` and `show` tell of a data set, without where it lies."""
    found: list[object] = [line.replace(str(root), "") for line in summary(str(root))]
    for split in SPLITS:
        stream = TokenStream(root / split)
        for part in Origins(stream).excerpts(0, len(stream)):
            found.append((*part[:4], part.tokens.tolist()))
    return found


def check(root: Path, tokens: dict[str, np.ndarray], shown: list[object], seed: int) -> None:
    """Damage a copy of the data set; every error names the file, and every token is right.

    Args:
        root: The copy.
        tokens: The tokens of its splits.
        shown: What is shown of it.
        seed: Chooses the damage.
    """
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    files, touches_tokens = kind(root, rng)
    with pytest.raises(ConfigError) as caught:
        verify(root)
    assert names(caught.value, files), (kind.__name__, files, caught.value)
    for line in str(caught.value).splitlines():
        assert f"remove {root} and run" in line or f"data.directory = {root}." in line
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
    try:
        right = kind is swapped_directories or looked_at(root) == shown
        assert right, (kind.__name__, files)
    except ConfigError as error:
        assert names(error, files), (kind.__name__, files, error)
    assert errors or not touches_tokens, (kind.__name__, files)
    assert errors <= 1 or touches_tokens is None or len(files) > 1


@pytest.mark.parametrize(["first", "count"], mark_torture([(0, 60), (60, 1000)], {(0, 60)}))
def test_damaged_data_sets_are_all_named(sound, tmp_path, first, count):
    root, tokens = sound
    shown = looked_at(root)
    for seed in range(first, first + count):
        shutil.copytree(root, tmp_path / "copy")
        check(tmp_path / "copy", tokens, shown, seed)
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


def test_the_tokenizer_of_another_data_set_is_refused(sound, tmp_path):
    """Also by a rank that looks at no file for the others."""
    root, _ = sound
    shutil.copytree(root, tmp_path / "copy")
    (tmp_path / "copy/tokenizer.model").write_bytes(b"another one's")
    for check_sizes in (True, False):
        with pytest.raises(ConfigError, match=r"tokenizer\.model: wrong tokenizer: its SHA-256"):
            TokenStream(tmp_path / "copy/train", check_sizes=check_sizes)


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

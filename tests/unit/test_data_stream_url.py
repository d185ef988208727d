"""Test data sets at URLs: fetched whole and once, checked on the way, kept within a bound."""

import hashlib
import multiprocessing
import os
import re
import time
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from pretrain.config import ConfigError, RunFailed
from pretrain.data.build import build
from pretrain.data.files import Cache
from pretrain.data.stream import TokenStream, open_stream, verify
from tests.conftest import tiny_config
from tests.unit.splits import TOKENIZER, write_split

OPENED: Counter[str] = Counter()
FAULTS: dict[str, Exception] = {}


class Counting(LocalFileSystem):
    """The local files under a protocol of its own, which counts the files that are opened."""

    protocol = "counting"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(re.sub(r"^counting://", "", str(path)))

    def _open(self, path, mode="rb", **options):
        name = path.rsplit("/", 1)[-1]
        if name in FAULTS:
            raise FAULTS[name]
        OPENED[name] += 1
        return super()._open(path, mode, **options)


fsspec.register_implementation("counting", Counting, clobber=True)

TOKENS = np.arange(10_000)
SHARD = 10_240
"""Size of each of the 10 shards."""


@pytest.fixture(autouse=True)
def no_faults():
    OPENED.clear()
    FAULTS.clear()


@pytest.fixture
def remote(tmp_path):
    """The URL of a data set of 10 shards of 1,000 tokens."""
    for split in ("train", "validation"):
        write_split(
            tmp_path / "data",
            {"text": [[TOKENS]]},
            split=split,
            tokens_per_block=1000,
            tokens_per_shard=1000,
        )
    return f"counting://{tmp_path}/data"


def cached(tmp_path: Path) -> list[str]:
    return sorted(
        p.name.split("-", 1)[1] for p in (tmp_path / "cache").iterdir() if p.name[0] != "."
    )


def test_a_shard_is_fetched_on_first_use_and_once(remote, tmp_path):
    cache = Cache(str(tmp_path / "cache"), 10**9)
    stream = TokenStream(f"{remote}/train", cache)
    assert OPENED == {"manifest.json": 1, "tokenizer.model": 1}
    assert np.array_equal(stream.read(1500, 1000), TOKENS[1500:2500])
    assert cached(tmp_path) == ["checksums.bin", "text-000001.tar", "text-000002.tar"]
    again = TokenStream(f"{remote}/train", cache)
    assert np.array_equal(again.read(1500, 1000), TOKENS[1500:2500])
    assert np.array_equal(again.read(0, 10_000), TOKENS)
    expected = {f"text-{n:06d}.tar": 1 for n in range(10)}
    assert {"manifest.json": 2, "tokenizer.model": 2, "checksums.bin": 1, **expected} == OPENED
    local = TokenStream(tmp_path / "data/train")
    assert (stream.identity, stream.corpora) == (local.identity, local.corpora)


def test_the_cache_keeps_to_its_bound_and_removes_the_oldest(remote, tmp_path):
    cache = Cache(str(tmp_path / "cache"), 4 * SHARD)
    stream = TokenStream(f"{remote}/train", cache)
    for shard in range(10):
        # Every use marks the first one as young again.
        for number in (0, shard):
            TokenStream(f"{remote}/train", cache).read(number * 1000, 10)
        size = sum(p.stat().st_size for p in (tmp_path / "cache").iterdir())
        assert size <= 4 * SHARD
        time.sleep(0.002)
    assert OPENED["text-000000.tar"] == 1
    assert "text-000009.tar" in cached(tmp_path) and "text-000001.tar" not in cached(tmp_path)
    # What was removed is fetched again, also by a stream that is open.
    assert np.array_equal(stream.read(0, 10_000), TOKENS)


def test_files_of_the_user_in_the_cache_directory_stay(remote, tmp_path):
    (tmp_path / "cache/sub").mkdir(parents=True)
    own = [tmp_path / "cache" / name for name in ("thesis.docx", "half.partial", "sub/notes")]
    for path in own:
        path.write_bytes(bytes(10 * SHARD))
        os.utime(path, (1, 1))
    stream = TokenStream(f"{remote}/train", Cache(str(tmp_path / "cache"), 4 * SHARD))
    assert np.array_equal(stream.read(0, 10_000), TOKENS)
    assert all(path.stat().st_size == 10 * SHARD for path in own)


def read_some(url: str, cache: Cache, seed: int, wrong) -> None:
    rng = np.random.default_rng(seed)
    stream = TokenStream(url, cache)
    for _ in range(40):
        starts = rng.integers(0, 9_000, 4)
        if not np.array_equal(stream.read_batch(starts, 500), starts[:, None] + np.arange(500)):
            wrong.value += 1


def test_processes_of_a_node_share_a_cache_that_is_too_small(remote, tmp_path):
    context = multiprocessing.get_context("fork")
    wrong = context.Value("i", 0)
    cache = Cache(str(tmp_path / "cache"), 3 * SHARD)
    workers = [
        context.Process(target=read_some, args=(f"{remote}/train", cache, seed, wrong))
        for seed in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert wrong.value == 0


@pytest.mark.parametrize("name", ["text-000003.tar", "checksums.bin"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_at_the_url_is_named_and_never_kept(remote, tmp_path, name, damage):
    path = tmp_path / "data/train" / name
    stream = TokenStream(f"{remote}/train", Cache(str(tmp_path / "cache"), 10**9))
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content[50] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-9])
    with pytest.raises(ConfigError, match=rf"^counting://.*/train/{name}: (damaged|missing)"):
        stream.read(3000, 10)
    assert name not in cached(tmp_path)
    with pytest.raises(ConfigError, match=rf"(?m)^counting://.*/train/{name}: "):
        verify(remote)


def test_a_network_that_fails_is_an_error_that_names_the_file(remote, tmp_path):
    stream = TokenStream(f"{remote}/train", Cache(str(tmp_path / "cache"), 10**9))
    FAULTS["text-000003.tar"] = ConnectionError("reset by peer")
    with pytest.raises(RunFailed, match=r"text-000003\.tar: cannot be read \(.*reset by peer"):
        stream.read(3000, 10)
    FAULTS["manifest.json"] = PermissionError(13, "Permission denied")
    with pytest.raises(RunFailed, match=r"manifest\.json: cannot be read \(Permission denied"):
        TokenStream(f"{remote}/train")


def test_a_config_reads_a_url_and_builds_none(remote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    config = tiny_config(
        data={
            "directory": remote,
            "vocab_size": 60_000,
            "cache_directory": str(tmp_path / "cache"),
        }
    )
    with pytest.raises(ConfigError, match=r"data\.directory = counting://"):
        build(config)
    assert sorted(tmp_path.iterdir()) == before
    stream = open_stream(config, "train")
    assert np.array_equal(stream.read(0, 10), TOKENS[:10])
    assert stream.data_set == remote
    path = stream.tokenizer_path
    assert path.read_bytes() == TOKENIZER and path.name.endswith("-tokenizer.model")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == stream.tokenizer_sha256

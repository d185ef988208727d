"""Test reading: any range, any layout, few descriptors, few bytes, and shards that change."""

import json
import os
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import ConfigError, RunFailed
from pretrain.data.shards import Layout, ShardWriter
from pretrain.data.stream import TokenStream
from tests.unit.splits import write_split

ROOT = Path(__file__).parents[2]


def documents(rng, count: int, longest: int, vocab_size: int = 60_000) -> list[np.ndarray]:
    return [rng.integers(0, vocab_size, rng.integers(1, longest)) for _ in range(count)]


@pytest.mark.parametrize("vocab_size", [60_000, 70_000])
@pytest.mark.parametrize("block", [50, 1024, 2048, 4096, 5000])
def test_tarfile_and_numpy_find_the_tokens_where_the_arithmetic_says(tmp_path, vocab_size, block):
    rng = np.random.default_rng(block)
    for tokens in {1, block - 1, block, block + 1, 3 * block - 7, 3 * block}:
        root = tmp_path / str(tokens)
        text = rng.integers(0, vocab_size, tokens)
        manifest = write_split(
            root,
            {"text": [[text]]},
            vocab_size=vocab_size,
            tokens_per_block=block,
            tokens_per_shard=3 * block,
        )
        layout = Layout.of(vocab_size, block)
        [shard] = manifest.shards
        path = root / "train" / shard.name
        assert path.stat().st_size == shard.bytes == layout.shard_bytes(tokens)
        with tarfile.open(path) as tar, path.open("rb") as file:
            for number, member in enumerate(tar):
                file.seek(member.offset_data)
                found = np.load(file)
                assert file.tell() - found.nbytes == number * layout.block_bytes + 640
                assert np.array_equal(found, text[number * block : (number + 1) * block])
        assert number == -(-tokens // block) - 1


@pytest.mark.parametrize("vocab_size, block", [(60_000, 50), (70_000, 3000), (512, 4096)])
def test_any_ranges_are_those_of_the_concatenated_documents(tmp_path, vocab_size, block):
    """Three corpora of several tasks with short last blocks; one task is without a document."""
    rng = np.random.default_rng(1)
    corpora = {
        name: [documents(rng, rng.integers(3, 9), 2 * block, vocab_size) for _ in range(tasks)]
        for name, tasks in {"books": 3, "web": 2, "news": 1}.items()
    }
    corpora["web"].insert(1, [])
    write_split(
        tmp_path,
        corpora,
        vocab_size=vocab_size,
        tokens_per_block=block,
        tokens_per_shard=2 * block + 1,
    )
    flat = {
        name: np.concatenate([np.concatenate(t) for t in tasks if t])
        for name, tasks in corpora.items()
    }
    expected = np.concatenate(list(flat.values()))
    stream = TokenStream(tmp_path / "train")
    assert len(stream) == len(expected)
    assert [corpus.name for corpus in stream.manifest.corpora] == list(flat)
    for corpus in stream.manifest.corpora:
        found = stream.read(stream.starts[corpus.name], corpus.tokens)
        assert np.array_equal(found, flat[corpus.name])
        assert corpus.documents == sum(len(task) for task in corpora[corpus.name])
        assert corpus.text_bytes == 3 * corpus.tokens
    for count in [0, 1, 2, 33, block - 1, block, block + 1, 2 * block + 5]:
        starts = rng.integers(0, len(expected) - count + 1, 40)
        starts[:2] = 0, len(expected) - count
        found = stream.read_batch(starts, count)
        assert found.dtype == np.int64 and found.shape == (40, count)
        assert np.array_equal(found, [expected[s : s + count] for s in starts])
    for start, count in [(-1, 1), (0, -1), (len(stream), 1), (0, len(stream) + 1)]:
        with pytest.raises(IndexError, match=f"of {len(stream)}"):
            stream.read(start, count)
    assert stream.read_batch(np.array([], np.int64), 5).shape == (0, 5)


def test_a_long_read_takes_several_calls(tmp_path):
    """A block of more pieces than one system call reads."""
    tokens = np.random.default_rng(0).integers(0, 60_000, 700_000)
    write_split(tmp_path, {"text": [[tokens]]}, tokens_per_block=600_000, tokens_per_shard=600_000)
    stream = TokenStream(tmp_path / "train")
    assert np.array_equal(stream.read(0, 700_000), tokens)
    assert np.array_equal(stream.read(1, 699_990), tokens[1:699_991])


def test_the_identity_is_that_of_the_tokens(tmp_path):
    """Neither the place nor the size of shards changes it; a token, a task or the name does."""
    tokens = np.random.default_rng(0).integers(0, 60_000, 1000)
    changed = tokens.copy()
    changed[500] ^= 1

    def identity(name, corpora, **sizes):
        write_split(tmp_path / name, corpora, **sizes)
        return TokenStream(tmp_path / name / "train").identity

    base = identity("a", {"text": [[tokens]]})
    assert identity("b", {"text": [[tokens]]}) == base
    assert identity("c", {"text": [[tokens]]}, tokens_per_shard=400) == base
    assert identity("d", {"text": [[changed]]}) != base
    assert identity("e", {"text": [[tokens[:500]], [tokens[500:]]]}) != base


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    def write(tokens):
        writer = ShardWriter(
            tmp_path,
            split="train",
            corpus="text",
            task=0,
            vocab_size=100,
            tokens_per_block=10,
            tokens_per_shard=10,
        )
        writer.add(tokens, 0)

    write(np.array([0, 99]))
    for bad in ([0, 100], [-1], [2**40]):
        with pytest.raises(ValueError, match=r"of a vocabulary of 100"):
            write(np.array(bad))
    assert list(tmp_path.iterdir()) == []


# ---- descriptors, maps, bytes --------------------------------------------------------------------
@pytest.fixture(scope="module")
def many_shards(tmp_path_factory):
    """A data set of 1,526 shards, each of one block of 50 tokens."""
    root = tmp_path_factory.mktemp("many")
    write_split(root, {"text": [[np.arange(1526 * 50) % 60_000]]}, tokens_per_shard=50)
    return root


def test_1526_shards_need_few_descriptors_and_no_maps(many_shards):
    program = """
import json, os, resource, sys, numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from pretrain.data.stream import TokenStream
stream = TokenStream(sys.argv[1])
def maps():
    return sum(".tar" in line or "checksums" in line for line in open("/proc/self/maps"))
before, most = len(os.listdir("/proc/self/fd")), 0
for step in range(200):
    starts = np.random.default_rng(step).integers(0, len(stream) - 60, 16)
    found = stream.read_batch(starts, 60)
    assert np.array_equal(found, (starts[:, None] + np.arange(60)) % 60_000)
    most = max(most, len(os.listdir("/proc/self/fd")) - before)
del stream
print(json.dumps([most, maps(), len(os.listdir("/proc/self/fd")) - before]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, many_shards / "train"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # A quarter of 64, and the checksums.
    assert json.loads(done.stdout) == [17, 0, 0]


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_opening_reads_no_shard_and_a_sample_few_bytes(tmp_path):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 60_000, 400_000)
    write_split(tmp_path, {"text": [[tokens]]}, tokens_per_block=65_536, tokens_per_shard=131_072)
    small = sum(
        (tmp_path / name).stat().st_size for name in ("train/manifest.json", "tokenizer.model")
    )
    cost = -(bytes_read() - bytes_read())
    before = bytes_read()
    stream = TokenStream(tmp_path / "train")
    assert bytes_read() - before - cost <= small + 1000
    stream.read(0, 1)
    starts = rng.integers(0, len(tokens) - 1025, 100)
    for start in starts.tolist():
        before = bytes_read()
        stream.read(start, 1025)
        # Two pieces of 4 KiB, and one more where a block ends.
        assert bytes_read() - before - cost <= 3 * 4096
    # Ranks but the first of a node look at no shard that they do not read.
    (tmp_path / "train/text-000003.tar").unlink()
    TokenStream(tmp_path / "train", check_sizes=False).read(0, 1)


def test_a_batch_costs_one_system_call_a_sample_and_hardly_any_call_of_python(tmp_path):
    """The budget of training's hot path: what is added to it for every sample is slow for all."""
    tokens = np.random.default_rng(0).integers(0, 60_000, 400_000)
    write_split(tmp_path, {"text": [[tokens]]}, tokens_per_block=65_536, tokens_per_shard=131_072)
    stream = TokenStream(tmp_path / "train")
    length, samples = 1025, 128
    starts = np.random.default_rng(1).integers(0, len(stream) - length, samples)
    crossing = (starts // 65_536 != (starts + length - 1) // 65_536) | (starts >= 5 * 65_536)
    expected = tokens[starts[:, None] + np.arange(length)]
    assert np.array_equal(stream.read_batch(starts, length), expected)
    calls = Counter()

    def count(frame, event, what):
        if event == "call":
            calls["python"] += 1
        elif event == "c_call":
            calls["other"] += 1
            calls[what.__name__] += 1

    sys.setprofile(count)
    try:
        found = stream.read_batch(starts[~crossing], length)
    finally:
        sys.setprofile(None)
    assert np.array_equal(found, expected[~crossing])
    within = int((~crossing).sum())
    # The checksums were read for the batch before.
    assert within > samples // 2 and calls["preadv"] == within and calls["pread"] == 0
    assert calls["python"] <= 10
    # bisect_right, divmod twice, len, unpack, and a checksum for each of one or two pieces.
    assert calls["other"] <= 10 * within + 20


def test_threads_and_forks_may_share_a_stream(many_shards):
    stream = TokenStream(many_shards / "train")
    wrong = []

    def read(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            starts = rng.integers(0, len(stream) - 60, 8)
            found = stream.read_batch(starts, 60)
            if not np.array_equal(found, (starts[:, None] + np.arange(60)) % 60_000):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork()
    if child == 0:
        read(99)
        os._exit(bool(wrong))
    assert os.waitpid(child, 0)[1] == 0
    assert not wrong


# ---- shards that change under a run --------------------------------------------------------------
@pytest.fixture
def open_run(tmp_path):
    """A stream of three shards, of which the first is open."""
    write_split(
        tmp_path, {"text": [[np.arange(30_000)]]}, tokens_per_block=10_000, tokens_per_shard=10_000
    )
    stream = TokenStream(tmp_path / "train")
    stream.read(0, 10)
    return stream, tmp_path / "train"


@pytest.mark.parametrize("number", [0, 1])
def test_a_shard_that_shrinks_is_named(open_run, number):
    stream, directory = open_run
    os.truncate(directory / f"text-00000{number}.tar", 9000)
    with pytest.raises(
        ConfigError,
        match=rf"text-00000{number}\.tar: damaged: block 0, 4096 bytes from byte 8832: "
        r"truncated: 168 of 4096 bytes\. `pretrain data verify` names every damaged file\. Restore",
    ):
        stream.read(number * 10_000 + 4200, 10)


def test_an_error_of_the_operating_system_names_the_file(open_run, monkeypatch):
    stream, _ = open_run

    def stale(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "preadv", stale)
    monkeypatch.setattr(os, "pread", stale)
    with pytest.raises(RunFailed, match=r"text-000000\.tar: cannot be read \(Stale file handle"):
        stream.read(0, 10)


def test_a_file_system_that_returns_less_than_there_is(open_run, monkeypatch):
    """As NFS and FUSE may: the rest is asked for again."""
    stream, _ = open_run
    several, one = os.preadv, os.pread
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: several(fd, [views[0][:1000]], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: one(fd, min(size, 1000), at))
    assert np.array_equal(stream.read(500, 9000), np.arange(500, 9500))

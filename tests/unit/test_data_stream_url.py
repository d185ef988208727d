"""Test text and data sets at URLs: read through servers that cut, refuse and have no ranges."""

import gzip
import hashlib
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from pretrain.config import ConfigError, RunFailed
from pretrain.data import files
from pretrain.data.build import build
from pretrain.data.stream import CONNECTIONS, TokenStream, open_stream, verify
from tests.conftest import tiny_config
from tests.unit.faulty_server import serving
from tests.unit.splits import TOKENIZER, write_split

TOKENS = np.random.default_rng(0).integers(0, 60_000, 100_000)
"""Ten shards of 10,000 tokens."""

FAULTS = {
    "sound": {},
    "cuts": {"cut": 0.3},
    "refuses": {"refuse": 0.3, "statuses": [500, 503, 429], "retry_after": "0.01"},
    "both": {"cut": 0.3, "refuse": 0.3, "statuses": [502, 504]},
}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """As many attempts as ever, without their minute."""
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(files, "LONGEST_WAIT_S", 0.02)


@pytest.fixture(scope="module")
def data_set(tmp_path_factory):
    """A data set of ten shards in the train split."""
    root = tmp_path_factory.mktemp("sets") / "data"
    for split in ("train", "validation"):
        write_split(
            root,
            {"text": [[TOKENS]]},
            split=split,
            tokens_per_block=5000,
            tokens_per_shard=10_000,
        )
    return root


@pytest.mark.parametrize("faults", FAULTS)
def test_a_data_set_over_http_is_the_local_one(data_set, faults, monkeypatch):
    # With 3 of 10 answers cut and 3 refused, 8 attempts fail in 0.5 % of all requests.
    monkeypatch.setattr(files, "ATTEMPTS", 20)
    with serving(data_set.parent, **FAULTS[faults]) as server:
        stream = TokenStream(f"{server.url}/data/train")
        starts = np.random.default_rng(1).integers(0, len(TOKENS) - 1025, 64)
        found = stream.read_batch(starts, 1025)
        assert np.array_equal(found, TOKENS[starts[:, None] + np.arange(1025)])
        assert np.array_equal(stream.read(0, 30_000), TOKENS[:30_000])
        assert stream.identity == TokenStream(data_set / "train").identity


def test_a_sample_fetches_the_pieces_around_it_and_no_listing(data_set):
    with serving(data_set.parent) as server:
        stream = TokenStream(f"{server.url}/data/train")
        assert server.asked == {"manifest.json": 1, "tokenizer.model": 1}
        starts = np.arange(0, 90_000, 3000)
        stream.read_batch(starts, 1025)
        shards = [name for name in server.asked if name.endswith(".tar")]
        crossing = sum(start // 5000 != (start + 1024) // 5000 for start in starts.tolist())
        assert sum(server.asked[name] for name in shards) == len(starts) + crossing
        assert sum(server.sent[name] for name in shards) <= len(starts) * 3 * 4096
        # Threads that meet may each ask for the page of checksums, and none asks again.
        asked = server.asked["checksums.bin"]
        stream.read_batch(starts, 1025)
        assert server.asked["checksums.bin"] == asked <= CONNECTIONS


def refused(status: int, **more) -> dict:
    return {"refuse": 1.0, "statuses": [status], **more}


@pytest.mark.parametrize(
    ("faults", "attempts", "error"),
    [
        (refused(503), files.ATTEMPTS, r"tar: cannot be read \(.*503.*Look at the disk, the net"),
        (refused(429, retry_after="x"), files.ATTEMPTS, r"tar: cannot be read \(.*429"),
        (refused(403), 1, r"tar: cannot be read \(.*403"),
        ({"cut": 1.0}, files.ATTEMPTS, r"tar: cannot be read \(Client\w+: .*payload"),
        ({"ranges": False}, 1, r"tar: .* does not answer with parts .*Download the data set"),
        ({"hangs": True}, files.ATTEMPTS, r"tar: cannot be read \(SocketTimeoutError: .*reading"),
    ],
)
def test_a_server_that_does_not_recover_is_an_error_that_names_the_file(
    data_set, faults, attempts, error, monkeypatch
):
    monkeypatch.setattr(files, "SILENCE_S", 0.5 if "hangs" in faults else 30)
    with serving(data_set.parent) as server:
        stream = TokenStream(f"{server.url}/data/train")
        stream.read(0, 10)  # the checksums
        server.__dict__.update(faults)
        server.asked.clear()
        with pytest.raises(RunFailed, match=error):
            stream.read(23_000, 10)
        assert server.asked["text-000002.tar"] == attempts
        if "ranges" in faults:
            with pytest.raises(ConfigError, match="bin: cannot be read: its server does not answ"):
                verify(f"{server.url}/data")


@pytest.mark.parametrize("name", ["text-000003.tar", "checksums.bin"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_at_the_url_is_named(tmp_path, name, damage):
    split = {"tokens_per_block": 5000, "tokens_per_shard": 10_000}
    for each in ("train", "validation"):
        write_split(tmp_path / "data", {"text": [[TOKENS]]}, split=each, **split)
    path = tmp_path / "data/train" / name
    place = 700 if name.endswith("tar") else 8 * 3 * 6
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content if damage == "flip" else content[:place])
    if damage == "gone":
        path.unlink()
    with serving(tmp_path) as server:
        stream = TokenStream(f"{server.url}/data/train")
        with pytest.raises(ConfigError, match=rf"^http://.*/train/.*{name}.*(damaged|missing)"):
            stream.read(30_000, 10)
        with pytest.raises(ConfigError, match=rf"(?m)^http://.*/train/{name}: (damaged|missing)"):
            verify(f"{server.url}/data")


def test_a_data_set_at_a_url_is_read_and_not_built(data_set):
    with serving(data_set.parent) as server:
        url = f"{server.url}/data"
        config = tiny_config(data={"directory": url, "vocab_size": 60_000})
        with pytest.raises(ConfigError, match=r"data\.directory = http://"):
            build(config)
        stream = open_stream(config, "train")
        assert np.array_equal(stream.read(0, 10), TOKENS[:10])
        assert stream.data_set == url
        path = stream.tokenizer_path
        assert path.read_bytes() == TOKENIZER and path.name.endswith("-tokenizer.model")
        assert hashlib.sha256(path.read_bytes()).hexdigest() == stream.tokenizer_sha256
        with pytest.raises(ConfigError, match=r"nowhere/manifest\.json: no such file"):
            TokenStream(f"{server.url}/nowhere")


# ---- sources -------------------------------------------------------------------------------------
def documents() -> list[str]:
    rng = np.random.default_rng(3)
    words = np.array(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"])
    return [f"{n} " + " ".join(rng.choice(words, rng.integers(20, 400))) for n in range(300)]


SOURCES = {
    "a.jsonl": "jsonl",
    "b.jsonl.gz": "jsonl",
    "c.txt": "blank_lines",
    "d.parquet": "parquet",
    "e.tar": "webdataset",
}


def write_sources(root: Path) -> None:
    """Write the same documents in every kind of file."""
    texts = documents()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (root / "a.jsonl").write_text(lines)
    (root / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (root / "c.txt").write_text("\n\n".join(texts))
    table = pyarrow.table({"other": texts, "text": texts})
    parquet.write_table(table, root / "d.parquet", row_group_size=50)
    with tarfile.open(root / "e.tar", "w") as tar:
        for number, text in enumerate(texts):
            (root / "member").write_text(text)
            tar.add(root / "member", f"{number:06d}.txt")


def built(where: Path, place: str) -> dict[str, bytes]:
    """Build a data set of all sources, and return the files that hold tokens and checksums."""
    data = {
        "directory": str(where),
        "corpora": {
            name[0]: {"source": source, "paths": [f"{place}/{name}"]}
            for name, source in SOURCES.items()
        },
        "vocab_size": 300,
        "bytes_per_task": 100_000,
        "tokens_per_block": 1024,
    }
    build(tiny_config(data=data, cleaning={"deduplicate": "none"}))
    found = sorted(p for p in where.rglob("*") if p.suffix in (".tar", ".bin", ".model"))
    return {str(p.relative_to(where)): p.read_bytes() for p in found}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of sources, and the local build of them."""
    root = tmp_path_factory.mktemp("text")
    write_sources(root)
    return root, built(tmp_path_factory.mktemp("local") / "data", str(root))


@pytest.mark.parametrize("faults", [FAULTS["both"], {"ranges": False, "cut": 0.2, "refuse": 0.2}])
def test_a_build_over_http_equals_the_local_one(sources, tmp_path, faults, monkeypatch):
    root, local = sources
    monkeypatch.setattr(files, "ATTEMPTS", 30)
    with serving(root, **faults) as server:
        assert built(tmp_path / "data", server.url) == local
        assert built(tmp_path / "data", server.url) == local  # up to date
        for etag, reason in (("2", "is another version than"), ("", "server tells no version")):
            server.etag = etag
            with pytest.raises(ConfigError, match=f"from other inputs: .*{reason}"):
                built(tmp_path / "data", server.url)
    with serving(tmp_path, **faults | {"ranges": True}) as server:
        verify(f"{server.url}/data")


def test_a_source_that_stays_away_ends_the_build_with_its_name(sources, tmp_path):
    root, _ = sources
    with (
        serving(root, cut=1.0) as server,
        pytest.raises(
            RunFailed, match=r"http://\S+/d\.parquet: cannot be read \(.*payload.*then start again"
        ),
    ):
        built(tmp_path / "data", server.url)


@pytest.mark.torture
def test_a_data_set_and_its_sources_in_s3_are_the_local_ones(sources, tmp_path, monkeypatch):
    """Through s3fs and a server of the protocol: pip install s3fs 'moto[server]'."""
    s3fs = pytest.importorskip("s3fs", reason="pip install s3fs 'moto[server]'")
    moto = pytest.importorskip("moto.server", reason="pip install s3fs 'moto[server]'")
    root, local = sources
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        store = s3fs.S3FileSystem(skip_instance_cache=True)
        store.mkdir("corpus")
        store.put(f"{root}/", "corpus/text/", recursive=True)
        assert built(tmp_path / "data", "s3://corpus/text") == local
        store.put(f"{tmp_path}/data/", "corpus/data/", recursive=True)
        verify("s3://corpus/data")
        there, here = (TokenStream(f"{p}/train") for p in ("s3://corpus/data", tmp_path / "data"))
        starts = np.random.default_rng(1).integers(0, len(here) - 1025, 64)
        assert np.array_equal(there.read_batch(starts, 1025), here.read_batch(starts, 1025))
        store.rm(f"corpus/data/train/{there.manifest.shards[0].name}")
        with pytest.raises(ConfigError, match=r"^s3://corpus/data/train/\S+\.tar: missing"):
            TokenStream("s3://corpus/data/train").read(0, 10)
    finally:
        server.stop()

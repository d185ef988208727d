"""Test the built data set.

Shards hold the tokens of the text, unmodified webdataset reads them, and damage is reported before
training.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import ConfigError, parse_config
from pretrain.data.build import build
from pretrain.data.shards import SplitWriter
from pretrain.data.stream import TokenStream, open_stream, verify
from pretrain.data.tokenizer import load_tokenizer

LETTERS = str.maketrans("0123456789", "aeioulnrst")
DOCUMENTS = [
    f"Document {i}: "
    + " ".join(str((i + 7) * k % 9973).translate(LETTERS) for k in range(150 + 37 * i))
    + "\nend\n"
    for i in range(12)
]

MISSING = r"missing, but the manifest of .*train refers to it\. Restore it"


def config(root: Path, **data):
    return parse_config(
        {
            "run": {"directory": str(root / "run")},
            "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
            "batch": {"micro_batch_size": 1, "global_batch_size": 1},
            "data": {
                "directory": str(root / "data"),
                "sequence_length": 16,
                "vocab_size": 310,
                "tokens_per_block": 1024,
                "tokens_per_shard": 3000,
                "validation_fraction": 0.1,
                "paths": [str(root / "*.txt")],
            }
            | data,
            "optimizer": {"learning_rate": 1e-3},
            "train": {"num_steps": 1},
        },
        "test",
    )


def write_text(root: Path) -> Path:
    for i, text in enumerate(DOCUMENTS):
        (root / f"{i:02d}.txt").write_text(text)
    return root


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = write_text(tmp_path_factory.mktemp("built"))
    build(config(root))
    return root


@pytest.fixture
def root(built, tmp_path):
    """Return the directory of a copy of the built data set, which the test may damage."""
    shutil.copytree(built / "data", tmp_path / "data")
    return tmp_path


def expected_tokens(directory: Path, documents) -> np.ndarray:
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    return np.concatenate([[*tokenizer.encode(text), tokenizer.eos_id] for text in documents])


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def refused(message: str):
    return pytest.raises(ConfigError, match=message)


def test_the_stream_is_the_documents_each_ended(built):
    for split, documents in {"train": DOCUMENTS[:-1], "validation": DOCUMENTS[-1:]}.items():
        stream = open_stream(config(built), split)
        expected = expected_tokens(built / "data", documents)
        assert np.array_equal(stream.read(0, len(stream)), expected)
        assert stream.documents == len(documents)
        assert stream.text_bytes == sum(len(text.encode()) for text in documents)


def test_any_range_reads_across_blocks_and_shards(built):
    """A shard has two blocks of 1,024 tokens. The reads cross borders of blocks and of shards."""
    stream = TokenStream(built / "data/train")
    expected = expected_tokens(built / "data", DOCUMENTS[:-1])
    assert len(json.loads((built / "data/train/manifest.json").read_text())["shards"]) >= 3
    assert len(expected) % 1024, "the last block should be a short one"
    for start in [0, 1, 1023, 1024, 2047, 2048, 3071, 4095, len(expected) - 2500]:
        for count in [0, 1, 2, 17, 1024, 1025, 2500]:
            found = stream.read(start, count)
            assert found.dtype == np.int64
            assert np.array_equal(found, expected[start : start + count])
    for start, count in [(-1, 1), (len(stream), 1), (0, len(stream) + 1)]:
        with pytest.raises(IndexError, match=f"of {len(stream)}"):
            stream.read(start, count)


def test_stock_webdataset_reads_the_same_tokens(built):
    """Read the shards without this project's code, in a process with webdataset's secure mode."""
    shards = sorted(map(str, (built / "data/train").glob("*.tar")))
    program = """
import json, sys, numpy as np, webdataset
assert webdataset.utils.enforce_security
samples = list(webdataset.WebDataset(sys.argv[1:], shardshuffle=False).decode())
print(json.dumps({"keys": [s["__key__"] for s in samples], "dtype": str(samples[0]["npy"].dtype),
                  "tokens": np.concatenate([s["npy"] for s in samples]).tolist()}))
"""
    output = subprocess.run(
        [sys.executable, "-c", program, *shards],
        env=os.environ | {"WDS_SECURE": "1"},
        capture_output=True,
        text=True,
    )
    assert output.returncode == 0, output.stderr
    found, expected = json.loads(output.stdout), expected_tokens(built / "data", DOCUMENTS[:-1])
    assert found["tokens"] == expected.tolist()
    assert found["dtype"] == "uint16"
    assert found["keys"] == [f"{block:08d}" for block in range(-(-len(expected) // 1024))]


def test_a_rebuild_gives_the_same_bytes(built, tmp_path):
    build(config(built, directory=str(tmp_path / "again")))
    assert contents(tmp_path / "again") == contents(built / "data")


def test_an_unchanged_build_does_nothing(built, capsys):
    before = {path: path.stat().st_mtime_ns for path in (built / "data").rglob("*")}
    build(config(built))
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (built / "data").rglob("*")} == before


def test_a_build_prints_what_it_made(tmp_path, capsys):
    build(config(write_text(tmp_path)))
    output = capsys.readouterr().out
    assert "tokenizer of 310 pieces" in output
    assert "train: 11 documents" in output and "validation: 1 documents" in output


def test_other_settings_are_refused_and_nothing_is_lost(built):
    before = contents(built / "data")
    with refused(
        r"data\.directory = .*data\.tokens_per_block was 1024, is 2048\. "
        r"Nothing was changed\. Choose another"
    ):
        build(config(built, tokens_per_block=2048))
    with refused(r"data\.vocab_size was 310, is 320"):
        build(config(built, vocab_size=320))
    assert contents(built / "data") == before


def test_other_text_is_refused(tmp_path):
    build(config(write_text(tmp_path)))
    (tmp_path / "03.txt").write_text("something else")
    with refused(r"the text \(names, sizes and times of its files\) was"):
        build(config(tmp_path))


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    write_text(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/thesis.txt").write_text("precious")
    with refused(r"exists, but holds no finished data set"):
        build(config(tmp_path))
    assert contents(tmp_path / "data") == {"thesis.txt": b"precious"}


def test_a_build_that_fails_midway_leaves_nothing(tmp_path):
    """The training split is complete when the validation text turns out not to be UTF-8."""
    held_out = write_text(tmp_path) / "held.out"
    held_out.write_bytes("café".encode("latin1"))
    own = config(tmp_path, validation_paths=[str(held_out)])
    before = sorted(tmp_path.iterdir())
    with refused(r"held\.out: byte 3 is not UTF-8"):
        build(own)
    assert sorted(tmp_path.iterdir()) == before
    held_out.write_text("café")
    build(own)
    verify(tmp_path / "data")


def test_an_own_tokenizer_is_used(built, tmp_path):
    write_text(tmp_path)
    own = str(built / "data/tokenizer.model")
    with refused(
        r"data\.vocab_size = 400: the model in data\.tokenizer = .* has 310 pieces\. "
        r"Set data\.vocab_size=310"
    ):
        build(config(tmp_path, tokenizer=own, vocab_size=400))
    build(config(tmp_path, tokenizer=own))
    assert (tmp_path / "data/tokenizer.model").read_bytes() == Path(own).read_bytes()
    assert contents(tmp_path / "data/train") == contents(built / "data/train")


def test_text_without_words_is_refused(tmp_path):
    write_text(tmp_path)
    (tmp_path / "empty.held").write_text("")
    with refused(r"data\.validation_paths = .*no text for the validation split"):
        build(config(tmp_path, validation_paths=[str(tmp_path / "*.held")]))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("vocab_size, dtype", [(65_536, "uint16"), (65_537, "uint32")])
def test_large_vocabularies_take_four_bytes(tmp_path, vocab_size, dtype):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    (tmp_path / "train").mkdir()
    empty = (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of no bytes
    )
    writer = SplitWriter(
        tmp_path / "train",
        tokenizer_sha256=empty,
        vocab_size=vocab_size,
        tokens_per_block=8,
        tokens_per_shard=16,
    )
    tokens = np.arange(vocab_size - 29, vocab_size)
    writer.add(tokens[:11], 5)
    writer.add(tokens[11:], 6)
    assert writer.close().dtype == dtype
    stream = TokenStream(tmp_path / "train")
    assert np.array_equal(stream.read(0, 29), tokens)
    assert (len(stream), stream.documents, stream.text_bytes) == (29, 2, 11)


def test_a_stream_travels_to_another_process_without_its_maps(built):
    stream = TokenStream(built / "data/train")
    expected = stream.read(100, 3000)
    sent = pickle.dumps(stream)
    # The tokens alone take more.
    assert len(sent) < 5_000
    assert np.array_equal(pickle.loads(sent).read(100, 3000), expected)


def test_a_sound_data_set_passes(root):
    verify(root / "data")


def test_a_truncated_shard_is_named(root):
    shard = root / "data/train/shard-000001.tar"
    size = shard.stat().st_size
    os.truncate(shard, size - 512)
    with refused(
        rf"shard-000001\.tar: truncated: {size - 512} bytes found, {size} expected\. "
        r".*pretrain data build"
    ):
        TokenStream(root / "data/train")


@pytest.mark.parametrize("position", [0.0, 0.3, 0.7, 1.0])
def test_a_flipped_bit_is_found(root, position):
    shard = root / "data/train/shard-000000.tar"
    damaged = bytearray(shard.read_bytes())
    damaged[int(position * (len(damaged) - 1))] ^= 1
    shard.write_bytes(damaged)
    with refused(
        r"shard-000000\.tar: damaged: its SHA-256 is \w{64}, but the manifest says \w{64}\."
    ):
        verify(root / "data")


def test_a_damaged_index_is_named(root):
    index = root / "data/train/index.npy"
    index.write_bytes(index.read_bytes()[:-1] + b"\1")
    with refused(r"index\.npy: damaged"):
        TokenStream(root / "data/train")


def test_the_wrong_tokenizer_is_named(root):
    with (root / "data/tokenizer.model").open("ab") as model:
        model.write(b" ")
    with refused(
        r"tokenizer\.model: wrong tokenizer: its SHA-256 is \w{64}, "
        r"but the shards of .*train were made with the tokenizer whose SHA-256 is"
    ):
        TokenStream(root / "data/train")


@pytest.mark.parametrize(
    "name, message",
    [
        ("shard-000002.tar", rf"shard-000002\.tar: {MISSING}"),
        ("index.npy", rf"index\.npy: {MISSING}"),
        ("../tokenizer.model", r"tokenizer\.model: missing, and so is tokenizer\.json"),
        (
            "manifest.json",
            r"manifest\.json: no such file, so there is no finished data set "
            r".*`pretrain data build CONFIG`",
        ),
    ],
)
def test_a_missing_file_is_named(root, name, message):
    (root / "data/train" / name).unlink()
    with refused(message):
        TokenStream(root / "data/train")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", r"manifest\.json: not a valid manifest"),
        ("{}", r"manifest\.json: not a valid manifest \(Field required\)"),
    ],
)
def test_a_broken_manifest_is_named(root, text, message):
    (root / "data/train/manifest.json").write_text(text)
    with refused(message):
        TokenStream(root / "data/train")


def test_a_manifest_of_another_version_is_refused(root):
    path = root / "data/train/manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with refused(r"format_version = 2, but this version of pretrain reads format 1"):
        TokenStream(root / "data/train")


def test_a_model_of_another_vocabulary_is_refused(built):
    with refused(
        r"data\.vocab_size = 512: the data set in data\.directory = .* has 310 pieces\. "
        r"Set data\.vocab_size=310"
    ):
        open_stream(config(built, vocab_size=512), "train")

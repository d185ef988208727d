"""Test that every document of every kind of file is found and read exactly once."""

import bz2
import codecs
import gzip
import io
import itertools
import json
import lzma
import random
import re
import tarfile
import tomllib
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from pretrain.config import ConfigError, RunFailed
from pretrain.config.schema import CorpusSection, DataSection
from pretrain.data import sources
from pretrain.data.files import find
from pretrain.data.sources import Corpus, Piece, Task, plain

PACK = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
}


def section(source, *paths, **others) -> DataSection:
    return DataSection(
        directory="unused", sequence_length=8, source=source, paths=tuple(map(str, paths)), **others
    )


def documents(data, split="train", skip=None):
    """Every document of a split, through its plan."""
    named = {corpus.name: corpus for corpus in sources.corpora(data)}
    return [
        document
        for task in sources.plan(data)[split]
        for document in sources.read(task, named[task.corpus], skip)
    ]


def texts(data, split="train", skip=None):
    return [document.text for document in documents(data, split, skip)]


def read_pieces(path, source, cuts, skip=None):
    pieces = tuple(Piece(str(path), start, end) for start, end in itertools.pairwise(cuts))
    corpus = Corpus("text", source, (), None)
    return list(sources.read(Task(0, "text", pieces), corpus, skip))


def naive_blank_lines(raw: bytes) -> list[str]:
    """The documents of a file that is held as a whole."""
    lines = raw.removeprefix(codecs.BOM_UTF8).split(b"\n")
    last = len(lines) - 1
    found = []
    groups = itertools.groupby(enumerate(lines), lambda line: not line[1].strip(b" \t\r"))
    for blank, group in groups:
        numbers, members = zip(*group)
        if not blank:
            text = b"\n".join(members)
            found.append((text if numbers[-1] == last else text.removesuffix(b"\r")).decode())
    return found


def naive_jsonl(raw: bytes) -> list[str]:
    lines = raw.decode().removeprefix("\ufeff").split("\n")
    return [json.loads(line)["text"] for line in lines if line.strip()]


# ---- Formats.


def test_parquet_reads_one_document_a_row_by_row_groups(tmp_path):
    written = [f"row {i} " + "é" * i for i in range(100)]
    # Two leaves before the text, and another column of text where it is the third leaf.
    nested = [{"x": i, "y": i} for i in range(100)]
    table = pyarrow.table({"n": nested, "body": written, "url": ["http://x"] * 100})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    encoded = table.set_column(1, "body", table["body"].dictionary_encode())
    parquet.write_table(encoded, tmp_path / "b.parquet")
    data = section("parquet", tmp_path / "*.parquet", text_field="body", bytes_per_task=500)
    tasks = sources.plan(data)["train"]
    assert len(tasks) > 5
    assert [p for t in tasks for p in t.pieces][-1][1:] == (0, 1)
    assert texts(data) == written * 2
    assert [d.offset for d in documents(data)] == [*range(100)] * 2


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))


def test_webdataset_reads_one_document_a_sample(tmp_path):
    members = [("dir.v1/a.txt", b"one"), ("dir.v1/a.cls", b"3"), ("b.jpg", b"\xff"), ("b.TXT", b"")]
    members += [("ü" * 200 + f"/{i}.txt", b"\xef\xbb\xbf%d" % i) for i in range(30)]
    write_tar(tmp_path / "a.tar", members)
    write_tar(tmp_path / "b.tar.gz", [("x.json", b'{"text": "j"}')], "w:gz")
    assert texts(section("webdataset", tmp_path / "a.tar")) == ["one", "", *map(str, range(30))]
    assert texts(section("webdataset", tmp_path / "b.tar.gz", text_field="json")) == ["j"]


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_are_read_member_after_member(tmp_path, suffix):
    pack = PACK[suffix]
    raw = "".join(f"document {i} é\n\n" for i in range(5000)).encode()
    members = [pack(raw[:7]), pack(b""), pack(raw[7:90_000]), pack(raw[90_000:])]
    padding = b"\0" * 512 if suffix in (".gz", ".xz") else b""
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(b"".join(members) + padding)
    found = documents(section("blank_lines", path, bytes_per_task=1000))
    assert [d.text for d in found] == naive_blank_lines(raw)
    assert all(raw[d.offset :].startswith(d.text.encode()) for d in found)


def test_a_file_of_zstd_long_31_is_read(tmp_path):
    # RFC 8878, 3.1: the magic number, no flags, a window of 2^31 bytes, one block as it is.
    block = (len(b"one\n\ntwo") << 3 | 1).to_bytes(3, "little")
    (tmp_path / "x.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\xa8" + block + b"one\n\ntwo")
    assert texts(section("blank_lines", tmp_path / "x.txt.zst")) == ["one", "two"]


# ---- Byte ranges.


def random_text(rng) -> bytes:
    pieces = [b"\n", b"\n\n", b"\r\n", b" ", b"\t", b"\r", b"a", b"bc", "é漢".encode(), b"\0"]
    raw = b"".join(rng.choices(pieces, weights=[6, 3, 3, 2, 1, 1, 5, 5, 2, 1], k=rng.randrange(60)))
    return (codecs.BOM_UTF8 if rng.random() < 0.3 else b"") + raw


def random_jsonl(rng) -> bytes:
    raw = b""
    for _ in range(rng.randrange(8)):
        text = "".join(rng.choices("ab\n é漢", k=rng.randrange(9)))
        raw += json.dumps({"text": text}, ensure_ascii=rng.random() < 0.5).encode()
        raw += rng.choice([b"\n", b"\r\n", b"\n\n", b"\n \n"])
    if rng.random() < 0.5:
        raw = raw.rstrip()
    return (codecs.BOM_UTF8 if rng.random() < 0.3 else b"") + raw


def check_cuts(path, source, naive, raw, cuts):
    path.write_bytes(raw)
    whole = read_pieces(path, source, [0, len(raw)])
    assert [d.text for d in whole] == naive(raw), raw
    cut = read_pieces(path, source, [0, *cuts, len(raw)])
    assert [(d.text, d.offset) for d in cut] == [(d.text, d.offset) for d in whole], (raw, cuts)
    starts = [0, *cuts]
    assert all(starts[d.piece] <= d.offset < [*cuts, len(raw)][d.piece] for d in cut)


@pytest.mark.parametrize(
    ("source", "make", "naive"),
    [("blank_lines", random_text, naive_blank_lines), ("jsonl", random_jsonl, naive_jsonl)],
)
def test_every_document_is_read_once_whatever_the_cuts(tmp_path, source, make, naive):
    rng = random.Random(1)
    for _ in range(400):
        raw = make(rng)
        cuts = sorted(rng.choices(range(len(raw) + 1), k=rng.randrange(6)))
        check_cuts(tmp_path / "x", source, naive, raw, cuts)


@pytest.mark.parametrize(
    ("source", "make"), [("blank_lines", random_text), ("jsonl", random_jsonl)]
)
def test_cuts_do_not_change_what_is_skipped(tmp_path, monkeypatch, source, make):
    """Documents are too long, broken or fine, and longer than what is read at once."""
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 12)
    monkeypatch.setattr(plain, "_CHUNK_BYTES", 3)
    rng = random.Random(2)
    path = tmp_path / "x"
    total = 0
    for _ in range(400):
        raw = bytearray(make(rng))
        for _ in range(rng.randrange(3)):
            if raw:
                raw[rng.randrange(len(raw))] = rng.choice([0xFF, 10, 32, 97])
        path.write_bytes(raw)
        cuts = sorted(rng.choices(range(len(raw) + 1), k=rng.randrange(6)))
        whole_skipped, cut_skipped = [], []
        whole = read_pieces(path, source, [0, len(raw)], whole_skipped.append)
        cut = read_pieces(path, source, [0, *cuts, len(raw)], cut_skipped.append)
        assert [(d.text, d.offset) for d in cut] == [(d.text, d.offset) for d in whole], (raw, cuts)
        assert cut_skipped == whole_skipped, (raw, cuts)
        total += len(cut_skipped)
        if source == "blank_lines":
            groups = re.split(rb"(?:(?<=\n)|^)[ \t\r]*(?:\n|$)", raw.removeprefix(codecs.BOM_UTF8))
            assert len(whole) + len(whole_skipped) == len([g for g in groups if g]), raw
    assert total > 100


# ---- Locations and plans.


def test_a_name_is_that_file_before_it_is_a_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a[1].txt", "a1.txt", "pipe:cat x", "memory:", "*"):
        (tmp_path / name).write_text(name)
    for name in ("a[1].txt", "pipe:cat x", "memory:", "*", "a[0-9].txt"):
        expected = name if name != "a[0-9].txt" else "a1.txt"
        assert texts(section("text", name)) == [expected]


def test_a_file_is_read_once_under_all_its_names(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/blob.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "real/b.txt").write_text("b")
    # A cache may keep files under other names than the links to them, whose suffix counts.
    (tmp_path / "real/sha").write_bytes(gzip.compress(b"linked"))
    (tmp_path / "linked.gz").symlink_to("real/sha")
    (tmp_path / "again").symlink_to("real")
    data = section("text", tmp_path / "**/*.gz", tmp_path / "*/b.txt", tmp_path / "again/*.gz")
    assert sorted(texts(data)) == ["b", "linked", "packed"]


def test_what_cannot_be_read_is_named_when_planning(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "sub").mkdir()
    assert texts(section("text", tmp_path / "*")) == ["a"]
    with pytest.raises(ConfigError, match=r"sub': a directory\. Name its files: "):
        find("data.paths", (str(tmp_path / "sub"),))
    (tmp_path / "b.txt").symlink_to("gone")
    for pattern in ("*.txt", "b.txt"):
        with pytest.raises(RunFailed, match=r"b\.txt: cannot be read \(No such file"):
            find("data.paths", (str(tmp_path / pattern),))


def test_validation_files_are_kept_out_of_training(tmp_path):
    for name in ("a", "b", "held", "other"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "link.txt").symlink_to("held.txt")
    names = [str(tmp_path / f"{name}.txt") for name in ("link", "other")]
    data = section("text", tmp_path / "[a-h]*.txt", validation_paths=tuple(names))
    assert (texts(data), sorted(texts(data, "validation"))) == (["a", "b"], ["held", "other"])
    with pytest.raises(
        ConfigError, match=r"data\.validation_paths = .*nothing is left to train on"
    ):
        sources.plan(section("text", names[0], validation_paths=(names[0],)))


def test_corpora_are_planned_in_order_and_validation_files_join_theirs(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"body": "l"}\n')
    (tmp_path / "held.jsonl").write_text('{"body": "h"}\n')
    (tmp_path / "prose.txt").write_text("p\n\nq")
    (tmp_path / "stray.txt").write_text("s")
    corpora = {
        "z": CorpusSection(source="jsonl", paths=(str(tmp_path / "*.jsonl"),), text_field="body"),
        "a": CorpusSection(source="blank_lines", paths=(str(tmp_path / "prose.txt"),)),
    }
    held = (str(tmp_path / "held.jsonl"),)
    data = section("text", corpora=corpora, validation_paths=held)
    tasks = sources.plan(data)["train"]
    assert [(task.number, task.corpus) for task in tasks] == [(0, "z"), (1, "a")]
    assert (texts(data), texts(data, "validation")) == (["l", "p", "q"], ["h"])
    stray = section("text", corpora=corpora, validation_paths=(str(tmp_path / "stray.txt"),))
    with pytest.raises(ConfigError, match=r"stray\.txt belongs to no corpus"):
        sources.plan(stray)


# ---- Shakespeare.


@pytest.fixture(scope="module")
def shakespeare():
    data = section("shakespeare")
    return texts(data), texts(data, "validation")


def test_shakespeare_holds_out_three_works_in_both_editions(shakespeare):
    train, validation = shakespeare
    assert len(train) == 77 - 6
    assert [text.splitlines()[0] for text in validation] == [
        "HAMLET, PRINCE OF DENMARK",
        "MACBETH",
        "THE TEMPEST",
    ]


def test_shakespeares_texts_carry_no_licence_or_header(shakespeare):
    boilerplate = re.compile(
        r"gutenberg|\be-?text\b|small print|public domain|copyright|https?:|www\.|\.txt",
        re.IGNORECASE,
    )
    for text in (*shakespeare[0], *shakespeare[1]):
        assert not boilerplate.search(text), text[:80]
        assert len(text) > 2_000


def test_the_published_corpora_are_read_from_the_documented_layout(tmp_path, monkeypatch):
    """docs/corpora.md says where files lie, and the config reads them there."""
    config = Path(__file__).parents[2] / "configs/cc100_roberta/base.toml"
    table = tomllib.loads(config.read_text())["data"]["corpora"]
    monkeypatch.chdir(tmp_path)
    for name in table:
        (tmp_path / "corpora" / name).mkdir(parents=True)
    (tmp_path / "corpora/cc100/en.txt").write_text("a\n\nb\n\n")
    (tmp_path / "corpora/cc100/00000.txt.zst").write_bytes(PACK[".zst"](b"c"))
    for name in ("books_wikipedia", "cc_news"):
        (tmp_path / f"corpora/{name}/x.jsonl").write_text('{"text": "d"}')
    write_tar(tmp_path / "corpora/openwebtext/x_data.xz", [("1-e.txt", b"e")], "w:xz")
    (tmp_path / "corpora/stories/x.txt").write_text("f")
    data = section("text", corpora={k: CorpusSection(**v) for k, v in table.items()})
    assert texts(data) == ["c", "a", "b", "d", "d", "e", "f"]


def test_only_the_file_of_a_source_knows_its_name():
    """ "text" aside, which is also the name of a corpus, a column and much else."""
    root = Path(__file__).parents[2]
    names = re.compile(rf"""["']\.?({"|".join(sources.SOURCES.keys() - {"text"})})["']""")
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for room in ("data", "config", "cli")
        for path in (root / "pretrain" / room).rglob("*.py")
        if path.parent.name != "sources"
        for line in path.read_text().splitlines()
        if names.search(line)
    ]
    assert found == []


def test_corpora_without_a_format_have_that_of_data_source():
    tables = {"a": CorpusSection(paths=("a",)), "b": CorpusSection(paths=("b",), source="jsonl")}
    for source, formats in {
        "blank_lines": ["blank_lines", "jsonl"],
        "shakespeare": [None, "jsonl"],
    }.items():
        found = sources.corpora(section(source, corpora=tables))
        assert [corpus.source for corpus in found] == formats

"""Test that bad data end in an error with file and offset, or are skipped, counted, and no more."""

import glob
import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from pretrain.config import ConfigError, RunFailed
from pretrain.data import sources
from pretrain.data.files import find
from tests.unit.test_data_sources import PACK, documents, section, texts

GOOD = [f"document {i}" for i in range(6)]


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def block(text: str) -> bytes:
    return text.encode() + b"\n\n"


BAD_DOCUMENTS = {
    "broken UTF-8": ("blank_lines", b"caf\xe9\n\n", r"byte 3 of this document is not UTF-8.*iconv"),
    "UTF-16 without a mark": ("blank_lines", b"c\0a\0" * 9 + b"\n\n", "is UTF-16"),
    "UTF-8 cut short": ("blank_lines", b"\xe6\xbc\n\n", "not UTF-8"),
    "broken UTF-8 in JSON": ("jsonl", b'{"text": "\xff"}\n', "not UTF-8"),
    "damaged JSON": ("jsonl", b"{not json\n", 'expected one JSON object with the document under "'),
    "another key": ("jsonl", b'{"txt": "x"}\n', "no key"),
    "a number": ("jsonl", b'{"text": 5}\n', "AttributeError"),
    "null": ("jsonl", b"null\n", "TypeError"),
    "a lone surrogate": ("jsonl", b'{"text": "\\ud800"}\n', "UnicodeEncodeError"),
    "deep JSON": ("jsonl", b'{"text": ' + b"[" * 200_000 + b"\n", "nested too deeply"),
    "a huge number": ("jsonl", b'{"text": "x", "n": ' + b"9" * 9999 + b"}\n", "ValueError"),
    "a mark inside": ("jsonl", b"\xef\xbb\xbf" + line("x"), "BOM"),
    "a long line": ("blank_lines", b"x" * 30_000 + b"\ny\n\n", "longer than 20000 bytes"),
    "a long line of JSON": ("jsonl", line("x" * 30_000), "longer than 20000 bytes"),
}


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 20_000)
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", 30_000)


@pytest.mark.parametrize("name", BAD_DOCUMENTS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.usefixtures("small_limits")
def test_a_bad_document_is_named_or_skipped_alone(tmp_path, name, suffix):
    source, bad, reason = BAD_DOCUMENTS[name]
    if name == "deep JSON":
        sources.MAX_DOCUMENT_BYTES = 300_000  # the fixture puts it back
    make = line if source == "jsonl" else block
    good = [make(text) for text in GOOD]
    raw = b"".join([*good[:2], bad, *good[2:4], bad, *good[4:]])
    path = tmp_path / f"bad.txt{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix else raw)
    offsets = [len(b"".join(good[:2])), len(b"".join([*good[:4], bad]))]
    for bytes_per_task in (10**9, 7):
        if suffix == "" and len(raw) > 10_000 and bytes_per_task == 7:
            bytes_per_task = len(raw) // 50
        data = section(source, path, bytes_per_task=bytes_per_task)
        with pytest.raises(ConfigError, match=f"{re.escape(str(path))}:{offsets[0]}: .*{reason}"):
            documents(data)
        skipped = []
        assert texts(data, skip=skipped.append) == GOOD
        assert [s.split(": ")[0] for s in skipped] == [f"{path}:{offset}" for offset in offsets]


@pytest.mark.parametrize("suffix", PACK)
def test_a_compressed_file_cut_anywhere_loses_its_rest_and_says_so(tmp_path, suffix):
    rng = random.Random(3)
    expected = ["".join(rng.choices("abcdefgh", k=300)) for _ in range(300)]
    raw = "\n\n".join(expected).encode()
    packed = PACK[suffix](raw[:30_000]) + PACK[suffix](raw[30_000:])
    end_of_first = len(PACK[suffix](raw[:30_000]))
    path = tmp_path / f"x{suffix}"
    cuts = [*range(11, 40), *rng.choices(range(40, len(packed)), k=60), len(packed) - 1]
    for cut in cuts:
        path.write_bytes(packed[:cut])
        skipped = []
        data = section("blank_lines", path)
        read = texts(data, skip=skipped.append)
        assert read == expected[: len(read)] and len(read) < 300
        if cut != end_of_first:
            assert len(skipped) == 1, cut
            where = re.fullmatch(
                rf"{path}:(\d+): the \{suffix} data (end too early|are damaged.*);.*", skipped[0]
            )
            assert where and len(read) * 302 <= int(where[1]) <= len(raw)
            with pytest.raises(ConfigError, match=rf"x\{suffix}:\d+: the \{suffix} data"):
                texts(data)


@pytest.mark.parametrize("suffix", PACK)
def test_a_damaged_second_member_is_not_taken_for_the_end(tmp_path, suffix):
    packed = PACK[suffix](b"one\n\n")
    path = tmp_path / f"x{suffix}"
    for rest in (b"x" + packed, b"garbage", b"\1" + packed[1:], packed[:-5] + b"\xff" * 5):
        path.write_bytes(packed + rest)
        skipped = []
        assert texts(section("blank_lines", path), skip=skipped.append)[:1] == ["one"]
        assert len(skipped) == 1


# ---- Tars.


def tar_bytes(*members) -> bytes:
    """A tar of members: (name, content) or a TarInfo without content."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                header = tarfile.TarInfo(member[0])
                header.size = len(member[1])
                tar.addfile(header, io.BytesIO(member[1]))
    return raw.getvalue()


def link(name) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return header


BAD_MEMBERS = {
    "symlink": (link("x.txt"), "is no regular file"),
    "no text": (("x.jpg", b"x"), r"the sample 'x' has no member \.txt"),
    "no extension": (("x", b"x"), r"the sample 'x' has no member \.txt"),
    "broken UTF-8": (("x.txt", b"\xff"), "byte 0 of this document is not UTF-8"),
    "long": (("x.txt", b"x" * 20_001), "longer than 20000 bytes"),
}


@pytest.mark.parametrize("name", BAD_MEMBERS)
@pytest.mark.usefixtures("small_limits")
def test_a_bad_member_of_a_tar_is_named_or_its_sample_skipped(tmp_path, name):
    member, reason = BAD_MEMBERS[name]
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(("a.txt", b"a"), member, ("b.txt", b"b")))
    data = section("webdataset", path)
    with pytest.raises(ConfigError, match=rf"x\.tar:1: .*{reason}"):
        documents(data)
    skipped = []
    assert [d[::2] for d in documents(data, skip=skipped.append)] == [("a", 0), ("b", 2)]
    assert len(skipped) == 1 and skipped[0].startswith(f"{path}:1: ")


def test_a_tar_cut_anywhere_loses_its_rest_and_says_so(tmp_path):
    members = [(f"{i:02d}.txt", bytes([97 + i]) * (i * 130)) for i in range(12)]
    whole = tar_bytes(*members)
    ends = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    path = tmp_path / "x.tar"
    for cut in range(1, ends, 37):
        path.write_bytes(whole[:cut])
        skipped = []
        read = texts(section("webdataset", path), skip=skipped.append)
        assert read == [content.decode() for _, content in members][: len(read)]
        assert len(skipped) == 1 and f"x.tar:{len(read)}: " in skipped[0], (cut, skipped)
    for cut in (ends, ends + 512, len(whole)):
        path.write_bytes(whole[:cut])
        skipped = []
        assert len(texts(section("webdataset", path), skip=skipped.append)) == (12, 11)[cut == ends]
        assert len(skipped) == (cut == ends)


def test_a_tar_with_damaged_headers_never_ends_silently(tmp_path):
    rng = random.Random(5)
    whole = tar_bytes(*[("p" * 120 + f"/{i}.txt", b"text") for i in range(10)])
    path = tmp_path / "x.tar"
    headers = [i for i in range(0, len(whole), 512) if whole[i + 257 : i + 262] == b"ustar"]
    for _ in range(150):
        raw = bytearray(whole)
        raw[rng.choice(headers) + rng.randrange(500)] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        skipped = []
        read = texts(section("webdataset", path), skip=skipped.append)
        assert skipped or read == ["text"] * 10
        assert len(skipped) <= 2


def test_a_tar_whose_headers_go_on_and_on_is_damaged(tmp_path):
    """Each long name announces another header: tarfile calls itself for every one of them."""
    chain = tarfile.TarInfo("x")
    chain.type, chain.size = tarfile.GNUTYPE_LONGNAME, 1
    (tmp_path / "x.tar").write_bytes((chain.tobuf() + b"n".ljust(512, b"\0")) * 3000)
    with pytest.raises(ConfigError, match=r"x\.tar:0: the tar is damaged"):
        texts(section("webdataset", tmp_path / "x.tar"))


def test_tars_put_together_with_cat_are_not_read_in_part(tmp_path):
    raw = tar_bytes(("a.txt", b"a"))
    (tmp_path / "x.tar").write_bytes(raw + raw)
    with pytest.raises(ConfigError, match=r"x\.tar:0: .*goes on after its end mark"):
        texts(section("webdataset", tmp_path / "x.tar"))


# ---- Parquet.


def test_bad_rows_and_columns_of_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    broken = pyarrow.array([b"a", b"\xff", None, b"b"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": broken, "n": [1, 2, 3, 4]}), path)
    data = section("parquet", path)
    with pytest.raises(ConfigError, match=r"x\.parquet:1: byte 0 of this row's text is not UTF-8"):
        texts(data)
    skipped = []
    assert texts(data, skip=skipped.append) == ["a", "b"]
    assert [s.split(": ")[0] for s in skipped] == [f"{path}:1", f"{path}:2"]
    with pytest.raises(ConfigError, match=r"x\.parquet: text_field = 'n'.*holds int64, not text"):
        sources.plan(section("parquet", path, text_field="n"))
    with pytest.raises(ConfigError, match=r"text_field = 'body'.*has the columns text, n"):
        sources.plan(section("parquet", path, text_field="body"))


def test_a_damaged_row_group_loses_its_rows_alone(tmp_path):
    path = tmp_path / "x.parquet"
    rows = [f"row {i:04d}" for i in range(3000)]
    table = pyarrow.table({"text": rows})
    parquet.write_table(table, path, row_group_size=1000, compression="gzip", use_dictionary=False)
    start = parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    raw = bytearray(path.read_bytes())
    raw[start + 200 : start + 900] = bytes(700)
    path.write_bytes(raw)
    skipped = []
    read = texts(section("parquet", path), skip=skipped.append)
    assert read == rows[:1000] + rows[2000:]
    assert len(skipped) == 1 and f"{path}:1000: this row and 999 more are damaged" in skipped[0]


# ---- Files that change, and documents without end.


def planned(data):
    return sources.plan(data)["train"], sources.corpora(data)[0]


@pytest.mark.parametrize("source", ["text", "blank_lines", "jsonl", "parquet", "webdataset"])
def test_a_file_that_vanishes_or_shrinks_after_planning_is_named(tmp_path, source):
    path = tmp_path / "x"
    if source == "parquet":
        parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path, row_group_size=1)
    elif source == "webdataset":
        path.write_bytes(tar_bytes(("a.txt", b"a")))
    else:
        path.write_bytes(line("a") * 10)
    tasks, corpus = planned(section(source, path, bytes_per_task=50))
    whole = path.read_bytes()
    if source == "parquet":
        parquet.write_table(pyarrow.table({"text": ["a"]}), path)
        shrunk = r"x:1: the file ends here, and reached to 2 "
    else:
        path.write_bytes(whole[: len(whole) // 2])
        shrunk = rf"x:{len(whole) // 2}: the file ends here, and reached to {len(whole)} "
    for skip in (None, print):
        with pytest.raises(ConfigError, match=shrunk):
            list(sources.read(tasks[-1], corpus, skip))
    path.unlink()
    for skip in (None, print):
        with pytest.raises(RunFailed, match=r"x: cannot be read \(No such file"):
            list(sources.read(tasks[-1], corpus, skip))


def test_reading_a_document_takes_a_small_multiple_of_its_size(tmp_path):
    text = ("word and " * 100 + "\n") * 8000
    text += "end"
    for name, source, raw in (
        ("a", "text", text.encode()),
        ("b.xz", "text", PACK[".xz"](text.encode())),
        ("c", "blank_lines", text.encode()),
        ("d", "jsonl", line(text)),
    ):
        (tmp_path / name).write_bytes(raw)
        data = section(source, tmp_path / name)
        tracemalloc.start()
        read = texts(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(read) == 1 and len(read[0]) == len(text)
        # An .xz file asks for a dictionary of 8 MiB.
        assert peak < 4.2 * len(text) + 2**23, name


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.usefixtures("small_limits")
def test_a_small_file_that_unpacks_to_a_huge_one_takes_no_memory(tmp_path, suffix):
    packed = PACK[suffix](b"x" * 30_000_000)
    (tmp_path / f"x{suffix}").write_bytes(packed * 3)
    for source in ("text", "blank_lines", "jsonl"):
        skipped = []
        assert texts(section(source, tmp_path / f"x{suffix}"), skip=skipped.append) == []
        assert len(skipped) == 1 and "longer than" in skipped[0]


@pytest.mark.parametrize("pattern", ["p/**/*.txt", "p/*/x.txt", "*/[ab]/*"])
def test_a_directory_that_may_not_be_listed_is_not_passed_over(pattern):
    """The corpus would lack its text. Root may list all, so another user looks."""
    code = (
        "import os, sys; from pretrain.data.files import find; os.chdir(sys.argv[1]);"
        "os.getuid() or os.setuid(65534); print(len(find('paths', (sys.argv[2],))))"
    )
    with tempfile.TemporaryDirectory() as place:
        for folder in (Path(place, "p", name) for name in "abc"):
            folder.mkdir(parents=True)
            (folder / "x.txt").write_text("text")
        Path(place).chmod(0o755)

        def look() -> subprocess.CompletedProcess[str]:
            words = [sys.executable, "-c", code, place, pattern]
            return subprocess.run(words, capture_output=True, text=True)

        assert int(look().stdout) == (2 if "[ab]" in pattern else 3)
        Path(place, "p", "b").chmod(0)
        assert re.search(r"p/b(/x.txt)?: cannot be read", look().stderr)
        # One that the pattern does not reach is none of its business.
        Path(place, "p", "b").rename(Path(place, "p", "z"))
        assert ("[ab]" in pattern) == (int(look().stdout or -1) == 1)
        Path(place, "p", "z").chmod(0o755)


def test_patterns_find_what_glob_finds_and_do_not_run_in_circles(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("t1/a.txt", "t1/.hidden/b.txt", "t2/x/y/c.txt", "t2/x/d.md", ".e.txt", "f.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")
    patterns = [
        "t*/**/*.txt",
        "**/*.txt",
        "**",
        "t2/**/y/*",
        "*/*",
        ".*",
        "t1/.h*/*",
        "t[2]/*/*.md",
    ]
    patterns += [str(tmp_path / "t2" / "**" / "*.txt"), "./t?/a.txt", "t2/**/**/c.txt"]
    for pattern in patterns:
        expected = {os.path.realpath(p) for p in glob.glob(pattern, recursive=True)}
        found = {location.identity for location in find("paths", (pattern,))}
        assert found == set(filter(os.path.isfile, expected)), pattern
    for name in ("l1", "l2", "l3"):
        Path("t2", "x", name).symlink_to("..")
    assert len(find("paths", ("t2/**/*.txt",))) == 1
    with pytest.raises(ConfigError, match="no such file"):
        find("paths", ("missing/**/*.txt",))
    os.mkfifo("pipe.txt")
    with pytest.raises(RunFailed, match=r"pipe\.txt: cannot be read \(not a regular file"):
        find("paths", ("*.txt",))
    Path("t1", "gone").symlink_to("nowhere")
    with pytest.raises(RunFailed, match="t1/gone: cannot be read"):
        find("paths", ("*/*/*.txt",))

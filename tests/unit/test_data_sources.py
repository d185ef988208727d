"""Test which documents are read and held out, and the messages about files that cannot be read."""

import json
import re

import pytest

from pretrain.config import ConfigError
from pretrain.config.schema import DataSection
from pretrain.data import sources


def section(source, *paths, **others) -> DataSection:
    return DataSection(
        directory="unused", sequence_length=8, source=source, paths=tuple(map(str, paths)), **others
    )


def split(data):
    return list(sources.documents(data, "train")), list(sources.documents(data, "validation"))


@pytest.fixture(scope="module")
def shakespeare():
    return split(section("shakespeare"))


def shingles(text):
    words = re.findall("[a-z]+", text.lower().replace("'", ""))
    return set(zip(*(words[i:] for i in range(13))))


def test_shakespeare_holds_out_three_works_in_both_editions(shakespeare):
    train, validation = shakespeare
    assert len(train) == 77 - 6
    assert [text.splitlines()[0] for text in validation] == [
        "HAMLET, PRINCE OF DENMARK",
        "MACBETH",
        "THE TEMPEST",
    ]


def test_no_passage_of_shakespeares_validation_is_in_training(shakespeare):
    """No 13 consecutive words are shared, case and punctuation aside; editions share hundreds."""
    train, validation = shakespeare
    held_out = set().union(*map(shingles, validation))
    assert len(held_out) > 60_000
    assert sum(len(held_out & shingles(text)) for text in train) == 0


def test_the_passage_check_knows_another_edition_when_it_sees_one(shakespeare):
    _, validation = shakespeare
    texts = sources.files(section("shakespeare"), "train")[0].parent
    for work, text in zip(sources.SHAKESPEARE_HELD_OUT, validation):
        assert len(shingles(text) & shingles((texts / f"{work}_gut_f.txt").read_text())) > 500


def test_shakespeares_texts_carry_no_licence_or_header(shakespeare):
    boilerplate = re.compile(
        r"gutenberg|\be-?text\b|small print|public domain|copyright|https?:|www\.|\.txt",
        re.IGNORECASE,
    )
    for text in (*shakespeare[0], *shakespeare[1]):
        assert not boilerplate.search(text), text[:80]
        assert len(text) > 2_000


def test_text_reads_one_document_a_file_sorted_bytes_unchanged(tmp_path):
    (tmp_path / "deep").mkdir()
    for name, text in {
        "b.txt": "second\r\nline",
        "a.txt": "\tfirst é\n",
        "deep/c.txt": "third",
        "d.txt": "",
        "e.md": "no",
    }.items():
        (tmp_path / name).write_bytes(text.encode())
    data = section("text", tmp_path / "**/*.txt", tmp_path / "b.txt", validation_fraction=0.2)
    assert split(data) == (["\tfirst é\n", "second\r\nline"], ["third"])


def test_the_last_documents_are_held_out(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(str(i))
    train, validation = split(section("text", tmp_path / "*.txt", validation_fraction=0.3))
    assert (train, validation) == (list("0123456"), list("789"))
    assert split(section("text", tmp_path / "*.txt", validation_fraction=0.001))[1] == ["9"]
    assert split(section("text", tmp_path / "*.txt", validation_fraction=0.999))[0] == ["0"]


def test_a_single_document_is_cut(tmp_path):
    (tmp_path / "one.txt").write_text("é" * 90 + "z" * 10)
    assert split(section("text", tmp_path / "one.txt", validation_fraction=0.1)) == (
        ["é" * 90],
        ["z" * 10],
    )


def test_validation_files_are_kept_out_of_training(tmp_path):
    for name in ("a", "b", "held"):
        (tmp_path / f"{name}.txt").write_text(name)
    data = section("text", tmp_path / "*.txt", validation_paths=(str(tmp_path / "held.txt"),))
    assert split(data) == (["a", "b"], ["held"])
    with pytest.raises(
        ConfigError, match=r"data\.validation_paths = .*nothing is left to train on"
    ):
        split(section("text", tmp_path / "held.txt", validation_paths=(str(tmp_path / "h*.txt"),)))


def test_jsonl_reads_one_document_a_line(tmp_path):
    texts = ["one\nline", "", "zwei 漢字", "three", "four"]
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines[:3]) + "\n\n")
    (tmp_path / "y.jsonl").write_text("\n".join(lines[3:]))
    assert split(section("jsonl", tmp_path / "*.jsonl", validation_fraction=0.4)) == (
        ["one\nline", "zwei 漢字"],
        ["three", "four"],
    )


@pytest.mark.parametrize(
    "line",
    ["{not json", '{"txt": "x"}', '{"text": 5}', '["text"]', "null", r'{"text": "\ud800"}'],
    ids=str,
)
def test_a_bad_jsonl_line_is_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(
        ConfigError,
        match=re.escape(f'{path}:2: expected one JSON object with the document under "text"'),
    ):
        split(section("jsonl", path))


def test_what_is_not_utf8_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin1"))
    with pytest.raises(ConfigError, match=r"latin\.txt: byte 3 is not UTF-8.*iconv"):
        split(section("text", tmp_path / "latin.txt"))


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_pattern_without_files_is_named(tmp_path, source):
    (tmp_path / "there.txt").write_text('{"text": "x"}')
    with pytest.raises(
        ConfigError, match=r"data\.paths = '.*nowhere/\*\.txt': no such file.*glob pattern"
    ):
        split(section(source, tmp_path / "there.txt", tmp_path / "nowhere/*.txt"))
    with pytest.raises(
        ConfigError, match=r"data\.validation_paths = '.*nowhere\.txt': no such file"
    ):
        split(
            section(
                source, tmp_path / "there.txt", validation_paths=(str(tmp_path / "nowhere.txt"),)
            )
        )


def test_the_fingerprint_changes_with_the_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("same size")
    data = section("text", path)
    before = sources.fingerprint(data)
    assert sources.fingerprint(data) == before
    path.write_text("same sizE")
    assert sources.fingerprint(data) != before

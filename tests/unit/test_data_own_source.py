"""Test that a source of documents is one class: .arrow files, which nothing else reads."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import ipc

from pretrain.data import sources
from pretrain.data.build import build
from pretrain.data.files import Location
from pretrain.data.sources import SOURCES, Corpus, Found, Part, Piece, Source
from pretrain.data.stream import TokenStream, verify
from tests.unit.test_data_build import DOCUMENTS, config, documents, write_jsonl

ROWS = 7


class Arrow(Source):
    """Arrow IPC files, one document a row. Their parts are record batches."""

    name = "arrow"
    endings = (".arrow", ".feather")
    text_field = "content"
    in_bytes = False

    def parts(self, corpus: Corpus, file: Location, bytes_per_task: int) -> Iterator[Part]:
        with ipc.open_file(file.path) as opened:
            for number in range(opened.num_record_batches):
                size = opened.get_batch(number).nbytes
                yield Part(Piece(file.path, number, number + 1), size)

    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        with ipc.open_file(piece.path) as opened:
            for number in range(piece.start, piece.end):
                for row, value in enumerate(opened.get_batch(number)[self.field(corpus)]):
                    text, place = value.as_py(), number * ROWS + row
                    yield Found(place, text or "", "" if text else "this row has no text")


@pytest.fixture
def arrow(monkeypatch):
    monkeypatch.setitem(SOURCES, Arrow.name, Arrow())


def write_arrow(path, texts, field="content"):
    table = pyarrow.table({field: texts, "other": [*range(len(texts))]})
    with ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=ROWS)


@pytest.mark.usefixtures("arrow")
@pytest.mark.parametrize("named", [True, False])
def test_a_corpus_of_an_own_source_is_planned_cut_built_and_read_back(tmp_path, named):
    """It stands beside a corpus of lines, and is found by its name or by the ends of its files'."""
    written = [f"{text} {i}" for i, text in enumerate(DOCUMENTS * 5)]
    for number in range(2):
        write_arrow(tmp_path / f"{number}.arrow", written[number * 30 : number * 30 + 30])
    write_jsonl(tmp_path / "a.jsonl", ["Another corpus. " * 20, "Its second document. " * 20])
    rows = {"paths": [str(tmp_path / "*.arrow")]} | ({"source": "arrow"} if named else {})
    lines = {"paths": [str(tmp_path / "a.jsonl")]}
    corpora = {"rows": rows, "lines": lines}
    run = config(tmp_path, {"decontaminate": False}, corpora=corpora, bytes_per_task=10_000)
    tasks = [task for task in sources.plan(run.data)["train"] if task.corpus == "rows"]
    assert len(tasks) > 3
    build(run)
    verify(tmp_path / "data")
    train, validation = (TokenStream(tmp_path / f"data/{s}") for s in ("train", "validation"))
    held_out = documents(tmp_path / "data/validation")
    kept = documents(tmp_path / "data/train")[: train.corpora[0].documents]
    assert [text for text in written if text not in held_out] == kept
    assert len(kept) + validation.corpora[0].documents == len(written)
    # Where each came from, by the row that the source says.
    index = np.concatenate(
        [np.load(p) for p in sorted((tmp_path / "data/train/documents").glob("rows-*"))]
    )
    assert len(index) == len(kept) and int(index["offset"].max()) <= 30


@pytest.mark.usefixtures("arrow")
def test_the_options_and_faults_of_an_own_source_are_its_own(tmp_path):
    write_arrow(tmp_path / "a.feather", ["one", None, "three"], field="body")
    data = config(tmp_path, paths=[str(tmp_path / "a.feather")], text_field="body").data
    [task], [corpus] = sources.plan(data)["train"], sources.corpora(data)
    skipped: list[str] = []
    read = [document.text for document in sources.read(task, corpus, skipped.append)]
    assert read == ["one", "three"]
    assert skipped == [f"{tmp_path}/a.feather:1: this row has no text"]


def test_only_the_file_of_a_source_knows_its_name():
    """ "text" aside, which is also the name of a corpus, a column and much else."""
    root = Path(__file__).parents[2]
    names = re.compile(rf"""["']\.?({"|".join(SOURCES.keys() - {"text"})})["']""")
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for room in ("data", "config", "cli")
        for path in (root / "pretrain" / room).rglob("*.py")
        if path.parent.name != "sources"
        for line in path.read_text().splitlines()
        if names.search(line)
    ]
    assert found == []

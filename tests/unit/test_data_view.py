"""Look at a data set: every token is traced to the document and file that it comes from."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pretrain.cli.commands import app
from pretrain.config import RunConfig, dump_config
from pretrain.data import view
from pretrain.data.build import build
from pretrain.data.stream import open_stream
from pretrain.data.tokenizer import load_tokenizer
from pretrain.data.view import Excerpt, Origins, _heading, _shortened
from tests.unit.test_data_build import config as config_of


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Build two corpora, in several tasks each, and return the run's config."""
    root = tmp_path_factory.mktemp("view")
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), 5)) for _ in range(300)]
    for number in range(4):
        pages = [" ".join(rng.choice(words, rng.integers(20, 90))) for _ in range(40)]
        (root / f"pages-{number}.txt").write_text("\n\n".join(pages))
        (root / f"book-{number}.text").write_text("\n".join(rng.choice(words, 2000)))
    corpora = {
        "pages": {"source": "blank_lines", "paths": [str(root / "pages-*.txt")]},
        "books": {"paths": [str(root / "book-*.text")], "epochs": 2.0},
    }
    sizes = {"sequence_length": 64, "vocab_size": 320, "tokens_per_shard": 2048}
    sizes |= {"bytes_per_task": 9000, "validation_fraction": 0.05}
    run = config_of(root, corpora=corpora, **sizes)
    build(run)
    return run


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_token_is_traced_to_its_document(config, split):
    """The text at the named offset of the named file, tokenized anew, is what stands there."""
    stream = open_stream(config, split)
    tokenizer = load_tokenizer(stream.tokenizer_path)
    found = list(Origins(stream).excerpts(0, len(stream)))
    assert len(found) == stream.manifest.documents and all(part.is_begin for part in found)
    position = 0
    for part in found:
        assert part.start == position
        raw = Path(part.source).read_bytes()[part.offset :]
        text = (raw.split(b"\n\n")[0] if part.corpus == "pages" else raw).decode()
        assert [*tokenizer.encode(text), tokenizer.eos_id] == part.tokens.tolist()
        position += len(part.tokens)
    assert position == len(stream)


def test_any_range_holds_parts_of_the_same_documents(config):
    stream = open_stream(config, "train")
    origins = Origins(stream)
    whole = {(p.source, p.offset): p for p in origins.excerpts(0, len(stream))}
    for start in np.random.default_rng(1).integers(0, len(stream) - 700, 30).tolist():
        parts = list(origins.excerpts(start, 700))
        assert np.array_equal(np.concatenate([p.tokens for p in parts]), stream.read(start, 700))
        for part in parts:
            all_of_it = whole[part.source, part.offset]
            assert part.corpus == all_of_it.corpus
            assert part.is_begin == (part.start == all_of_it.start)


def test_show_prints_the_text_and_where_it_is_from(config, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    arguments = ["data", "show", str(file), "--corpus", "pages", "--num", "4", "--seed", "3"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert len(re.findall(r"^== train, pages: sample ", shown.output, re.M)) == 4
    lines = shown.output.split("\n")
    heading = next(n for n, line in enumerate(lines) if line.startswith("-- pages"))
    path, offset = re.search(r", (/\S+) at offset ([\d,]+) \(", lines[heading]).groups()
    document = Path(path).read_bytes()[int(offset.replace(",", "")) :].split(b"\n\n")[0].decode()
    assert lines[heading + 1].strip()[:60] in document
    options = {"corpus": "pages", "count": 4, "characters": 400}
    third, other = (list(view.shown_samples(config, "train", seed=s, **options)) for s in (3, 4))
    assert shown.output == "\n".join([*third, ""]) and third != other


def test_a_terminal_is_not_controlled_by_a_corpus(config, monkeypatch):

    assert "\x1b" not in _shortened("a\x1b[2Jb\ttab\n\u202e", 100)
    part = Excerpt("pages", "a\x1b[2Jb\nc", 0, 0, np.empty(0), True)
    assert "\ufffd[2Jb\ufffdc at offset 0 " in _heading(part)
    assert _shortened("x" * 500, 100).count("x") == 100


def test_stats_counts_what_is_there(config):
    train = open_stream(config, "train").manifest
    sizes = {c.name: (c.tokens - 1) // 64 for c in train.corpora}
    ideal = sizes["books"] * 2 / (sizes["books"] * 2 + sizes["pages"])
    text = "\n".join(view.stats(config))
    assert f"books: {ideal:.1%} of the training samples" in text
    assert f"train: {train.documents:,} documents, {train.text_bytes:,} bytes of text" in text
    assert "13-word sequences are also in training" in text

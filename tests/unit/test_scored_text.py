"""The bytes of the text that is scored, against the source text and against single tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pretrain.data.shards import ShardWriter, finish_split
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from pretrain.evaluation.windows import ScoredText, text_bytes
from tests.unit.splits import make_stream, write_split
from tests.unit.test_tokenizer_json import KINDS

DOCUMENTS = [
    "To be, or not to be: that is the question.\n\n  Whether 'tis nobler",
    "naïve café 北京市 🙂 </s> <|endoftext|> <0x41>",
    " begins with a space and ends with one ",
    "🙃",
    "",
    "the quick brown fox jumps over the lazy dog",
]
"""Characters of one to four bytes, some not in any vocabulary, and names of special tokens."""


def sentencepiece(folder: Path) -> Path:
    content = train_tokenizer([*DOCUMENTS, "the lazy dog is quick " * 20], 400)
    (folder / "tokenizer.model").write_bytes(content)
    return folder / "tokenizer.model"


def hugging_face(kind: str, folder: Path) -> Path:
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def ids_of(tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([[*tokenizer.encode(text), tokenizer.eos_id] for text in DOCUMENTS])


@pytest.fixture(params=["sentencepiece", "gpt2", "llama2"])
def tokenizer(request, tmp_path) -> Tokenizer:
    make = sentencepiece if request.param == "sentencepiece" else None
    return load_tokenizer(make(tmp_path) if make else hugging_face(request.param, tmp_path))


def bytes_of_token(tokenizer: Tokenizer, number: int) -> int:
    """Return a token's own bytes by its spelling, without decoding anything."""
    piece = tokenizer.to_hugging_face().id_to_token(int(number))
    if number in tokenizer.special.values():
        return 0
    if len(piece) == 6 and piece.startswith("<0x"):
        return 1
    # GPT-2 spells every byte as one character.
    spells_bytes = "Ġ" in tokenizer.to_hugging_face().get_vocab()
    return len(piece if spells_bytes else piece.replace("▁", " ").encode())


def test_whole_documents_have_the_bytes_of_their_text(tokenizer):
    assert text_bytes(tokenizer, ids_of(tokenizer)) == sum(len(d.encode()) for d in DOCUMENTS)


def test_any_beginning_has_the_bytes_of_its_tokens(tokenizer):
    ids = ids_of(tokenizer)
    exact, added = np.array([bytes_of_token(tokenizer, i) for i in ids]), 0
    starts = {0, *(np.flatnonzero(ids == tokenizer.eos_id) + 1).tolist()}
    # Llama 2 puts a space before the first word of each document, which is no text.
    is_prefixed = sum(bytes_of_token(tokenizer, i) for i in tokenizer.encode("x")) > 1
    for count in range(1, len(ids) + 1):
        first = count - 1
        added += first in starts and is_prefixed and ids[first] != tokenizer.eos_id
        expected = int(exact[:count].sum()) - added
        assert abs(text_bytes(tokenizer, ids[:count]) - expected) <= 3, count


def test_the_whole_split_has_the_bytes_that_were_built(tiny_data, monkeypatch):
    """Found two ways: counted from the source's text at the build, and decoded from its tokens.
    With one token that stands for unknown text, they are not known."""
    stream = TokenStream(tiny_data / "validation")
    tokenizer = load_tokenizer(stream.tokenizer_path)
    ids = stream.read(0, len(stream))
    assert text_bytes(tokenizer, ids) == stream.manifest.text_bytes == ScoredText(stream).bytes
    part = ScoredText(stream, 5000)
    assert part.bytes == text_bytes(tokenizer, ids[:5000])
    # A text whose bytes are counted is that much of the split's text.
    assert part.bytes / stream.manifest.text_bytes == pytest.approx(5000 / len(stream), rel=0.1)
    ids[7] = tokenizer.special["unk"]
    monkeypatch.setattr(stream, "read", lambda start, count: ids[start : start + count])
    assert ScoredText(stream).bytes == ScoredText(stream, 5000).bytes == 0


def test_every_corpus_is_scored_at_its_share(tmp_path):
    text = ScoredText(make_stream(tmp_path, {"a": 30, "b": 70, "c": 1}), 20)
    assert text.inputs(1, 19).tolist() == [*range(5), *range(30, 44), 100]


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(60_000, 2), (70_000, 4)])
def test_inputs_begin_after_an_end_of_document(tmp_path, vocab_size, itemsize, monkeypatch):
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, vocab_size, 40) for _ in range(20)]
    write_split(tmp_path, {"text": [documents]}, vocab_size=vocab_size)
    # Several reads.
    monkeypatch.setattr("pretrain.evaluation.windows.READ_TOKENS", 96)
    text = ScoredText(TokenStream(tmp_path / "train"))
    whole = np.concatenate([[0], *documents])
    assert text.tokens == text.total == 800
    assert text.inputs(0, 800).tolist() == whole.tolist()
    assert text.inputs(7, 3).tolist() == whole[7:11].tolist()
    assert text.inputs(0, 800).itemsize == itemsize
    assert text.block_ends[-1] == 800


def test_a_character_that_a_share_cuts_changes_no_other_corpus(tmp_path):
    """A decoder replaces every byte of a run of byte tokens in which one character is cut."""
    tokenizer = load_tokenizer(hugging_face("llama2", tmp_path))
    texts = ("東西南北" * 40, "北" * 60)
    parts = [np.array([*tokenizer.encode(text), tokenizer.eos_id]) for text in texts]
    directory, done = tmp_path / "validation", []
    directory.mkdir()
    sizes = {"vocab_size": tokenizer.vocab_size, "tokens_per_block": 50, "tokens_per_shard": 999}
    for number, ids in enumerate(parts):
        writer = ShardWriter(
            directory, split="validation", corpus=f"c{number}", task=number, **sizes
        )
        writer.add(ids, text_bytes=1)
        done.append(writer.close())
    named = {"tokenizer": "tokenizer.json", "tokenizer_sha256": tokenizer.fingerprint}
    finish_split(directory, done, split="validation", eos_id=tokenizer.eos_id, **named, **sizes)
    stream = TokenStream(directory)
    for tokens in range(200, 206):
        share = tokens * len(parts[0]) // len(stream)
        cut = parts[0][:share], parts[1][: tokens - share]
        assert ScoredText(stream, tokens).bytes == sum(text_bytes(tokenizer, x) for x in cut)

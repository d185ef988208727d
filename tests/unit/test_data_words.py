"""Test the vocabulary of words against fairseq's Dictionary, which is written again here.

fairseq/data/dictionary.py (finalize, encode_line, save), fairseq/tokenizer.py (tokenize_line) and
the counts of `fairseq-preprocess`.
"""

from __future__ import annotations

import io
import math
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from pretrain.config import ConfigError, load_config, parse_config
from pretrain.data.build import build
from pretrain.data.stream import open_stream
from pretrain.data.tokenizer import load_tokenizer, train_words

TEXT = (
    " \n = Valkyria = \n \n"
    + "".join(f" the {i % 40} @-@ <unk> game , of w{i % 400} \n" for i in range(1200))
    + " naïve\u00a0café 北京 \t x\x0by\n"
)


class FairseqDictionary:
    """fairseq's Dictionary, as far as `fairseq-preprocess --only-source` uses it."""

    special = ("<s>", "<pad>", "</s>", "<unk>")

    def __init__(self, text: str, nwords: int = -1, padding_factor: int = 8) -> None:
        counter: Counter[str] = Counter()
        for line in self.lines(text):
            counter.update([*self.tokenize(line), "</s>"])
        words = {w: n for w, n in sorted(counter.items()) if w not in self.special}
        limit = nwords - 4 if nwords > 0 else None
        self.symbols = [*self.special]
        self.counts = [0] * 4
        for word, count in Counter(words).most_common(limit):
            self.symbols.append(word)
            self.counts.append(count)
        number = 0
        while len(self.symbols) % padding_factor:
            self.symbols.append(f"madeupword{number:04d}")
            self.counts.append(0)
            number += 1
        self.index = {word: i for i, word in enumerate(self.symbols)}

    @staticmethod
    def lines(text: str) -> list[str]:
        return list(io.StringIO(text, newline=None))

    @staticmethod
    def tokenize(line: str) -> list[str]:
        return re.sub(r"\s+", " ", line).strip().split()

    def encode(self, text: str) -> list[int]:
        ids = []
        for line in self.lines(text):
            ids += [self.index.get(word, 3) for word in self.tokenize(line)] + [2]
        return ids

    def dict_txt(self) -> bytes:
        pairs = zip(self.symbols[4:], self.counts[4:])
        return "".join(f"{word} {count}\n" for word, count in pairs).encode()


def tokenizer_of(tmp_path: Path, content: bytes):
    path = tmp_path / "dict.txt"
    path.write_bytes(content)
    return load_tokenizer(path)


def test_words_in_another_encoding_are_refused(tmp_path):
    """They would be words that no text has, and all of these <unk>."""
    with pytest.raises(ConfigError, match=r"dict\.txt: byte 3 is not UTF-8.*iconv"):
        tokenizer_of(tmp_path, "caf\u00e9 10\nthe 9\n".encode("latin1"))


@pytest.mark.parametrize("limit", [None, 64, 100])
def test_the_file_and_the_ids_are_those_of_fairseq(tmp_path, limit):
    expected = FairseqDictionary(TEXT, limit or -1)
    size = len(expected.symbols)
    if limit is not None:
        # fairseq rounds the number that it is given up, and so does who gives it to us.
        size, expected = limit, FairseqDictionary(TEXT, limit, padding_factor=1)
    content = train_words([TEXT], size)
    assert content == expected.dict_txt()
    tokenizer = tokenizer_of(tmp_path, content)
    assert tokenizer.vocab_size == size == len(expected.symbols)
    for text in (TEXT, "the\ngame", "\n", "\n\n the", "a\r\nb\rc\n", "x\x0by  z\u2028 the"):
        ids = [*tokenizer.encode(text).tolist(), tokenizer.eos_id]
        assert ids == expected.encode(text), repr(text)


def test_a_vocabulary_that_the_text_cannot_fill_is_refused():
    words = len(FairseqDictionary(TEXT, padding_factor=1).symbols)
    most = math.ceil(words / 8) * 8
    assert len(train_words([TEXT], most).splitlines()) == most - 4
    with pytest.raises(ConfigError, match=f"{words - 4} different words. Set it to {most} or less"):
        train_words([TEXT], most + 1)
    with pytest.raises(ConfigError, match="has no words"):
        train_words([" \n <unk> </s>"], 400)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"the 5\n\nof 4\n", "line 2 is ''"),
        (b"the 5\nof\n", "line 2 is 'of'"),
        (b"the -5\n", "line 1 is 'the -5'"),
        (b"the 5\nthe 4\n", "line 2 is 'the 4'"),
        (b"the 5\n</s> 4\n", "line 2 is '</s> 4'"),
        (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "line 1 is ''"),
    ],
)
def test_a_file_that_is_no_dictionary_is_refused(tmp_path, content, fault):
    with pytest.raises(ConfigError, match=re.escape(fault)):
        tokenizer_of(tmp_path, content)


def corpus_config(tmp_path: Path, *settings: str):
    """Return a config over two files of words, one held out."""
    (tmp_path / "train.txt").write_text(TEXT)
    (tmp_path / "valid.txt").write_text(" the game \n \n of nothing known \n")
    return load_config(
        "configs/demo.toml",
        [
            "data.source=text",
            f'data.paths=["{tmp_path}/train.txt"]',
            f'data.validation_paths=["{tmp_path}/valid.txt"]',
            "data.tokenizer=words",
            # One document is not to be left out for what it has in common with the other.
            "cleaning.decontaminate=false",
            f"data.directory={tmp_path}/data",
            "data.vocab_size=456",
            *settings,
        ],
    )


def test_a_data_set_has_the_tokens_of_fairseq_preprocess(tmp_path):
    expected = FairseqDictionary(TEXT)
    config = corpus_config(tmp_path, f"data.vocab_size={len(expected.symbols)}")
    # Much less than the text: words are counted in all of it.
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"tokenizer_training_bytes": 1000})}
    )
    build(config)
    directory = Path(config.data.directory)
    assert (directory / "tokenizer.txt").read_bytes() == expected.dict_txt()
    for split, text in (("train", TEXT), ("validation", (tmp_path / "valid.txt").read_text())):
        stream = open_stream(config, split)
        assert stream.read(0, len(stream)).tolist() == expected.encode(text)
    # Line ends count, as in the published perplexities of words.
    assert len(open_stream(config, "validation")) == 5 + 3


def test_words_of_held_out_text_are_not_counted(tmp_path):
    words = {f"own{i:03d}" for i in range(400)}
    (tmp_path / "all.txt").write_text("\n\n".join(f"the {word}" for word in sorted(words)))
    settings = [
        "data.source=blank_lines",
        f'data.paths=["{tmp_path}/all.txt"]',
        "data.validation_fraction=0.1",
        "data.tokenizer=words",
        "cleaning.decontaminate=false",
        f"data.directory={tmp_path}/data",
        # Room for the words of the training text, of which there are about 361, and for few more.
        "data.vocab_size=368",
    ]
    build(config := load_config("configs/demo.toml", settings))
    tokenizer = load_tokenizer(Path(config.data.directory) / "tokenizer.txt")
    streams = [open_stream(config, split) for split in ("train", "validation")]
    train, held_out = (set(tokenizer.decode(s.read(0, len(s))).split()) for s in streams)
    assert "<unk>" not in train and len(train & words) > 350
    assert held_out <= {"the", "<unk>"}


def test_the_config_of_the_documentation_is_one(tmp_path):
    text = (Path(__file__).parents[2] / "docs/corpora.md").read_text()
    [block] = re.findall(r"```toml\n(.*?267_744.*?)```", text, re.DOTALL)
    values = tomllib.loads(Path("configs/demo.toml").read_text())
    given = tomllib.loads(block)
    values["data"] = given["data"] | {"directory": "data", "sequence_length": 512}
    values["cleaning"] = given["cleaning"]
    values["model"]["make_vocab_size_divisible_by"] = 8
    config = parse_config(values, "docs/corpora.md")
    assert (config.data.tokenizer, config.padded_vocab_size) == ("words", 267_744)
    assert not config.cleaning.decontaminate

"""Load a tokenizer: a SentencePiece model, a Hugging Face tokenizer.json, or a dict.txt of words.

tokenizer = load_tokenizer("tokenizer.json")
ids = tokenizer.encode("To be, or not to be")
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from pretrain.config import ConfigError
from pretrain.data.clean import WordCache, chunks, ranges
from pretrain.data.shards import DICTIONARY, JSON, MODEL, TOKENIZER_FILES

PROBES = (
    "",
    " ",
    "  two  spaces ",
    "\ttab\tand\nlines\r\n\n",
    "naïve café, 北京市 こんにちは",
    "🙂🙃👩\u200d👩\u200d👧 flags 🇩🇪",
    "<s> and </s> and <unk>",
    "<|endoftext|>, <|end_of_text|> and <pad>",
    "<0x41> bytes \x00\x07\x7f\ufeff",
    "1234567890 3.14159",
    "It's what they'll say, we've HEARD'S",
    "▁literal underline▁",
    "Ünïcödé e\u0301 \u200b \u00a0 \U0001f3fb",
)
"""Unusual strings for which every exported tokenizer must give the ids of the original."""


class Tokenizer(ABC):
    """A tokenizer, loaded from a single file."""

    file_name: str
    """Name of its file in a data set or a checkpoint: one of TOKENIZER_FILES."""

    fingerprint: str
    """Hex SHA-256 digest of the file."""

    vocab_size: int
    """Highest id plus one, special and added tokens included."""

    eos_id: int
    """Id of the token that is appended to every document."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Store the path and the fingerprint.

        Args:
            path: The file, for messages.
            content: Its bytes.
        """
        self.path, self.content = path, content
        self.fingerprint = hashlib.sha256(content).hexdigest()

    special: dict[str, int]
    """Role ("unk", "eos", "pad") -> id, for the special tokens that exist.

    There is no BOS, because each document begins after the EOS of the previous one.
    """

    @property
    def unk_id(self) -> int | None:
        """Return the id of unknown text, which `decode` cannot restore; None if there is none."""
        found = self.special.get("unk")
        # GPT-2's vocabulary of bytes, which knows every text, names its end of text here.
        return None if found == self.eos_id else found

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [tokens], without an end-of-document token.

        The name of a special token in the text, such as "</s>", is encoded as plain text.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Special tokens decode to nothing."""

    @abstractmethod
    def to_hugging_face(self) -> tokenizers.Tokenizer:
        """Return a new Hugging Face tokenizer with the same ids, which adds no tokens to a text.

        Raises:
            ConfigError: No Hugging Face tokenizer gives the same ids.
        """

    def check_exportable(self) -> None:
        """Check that a Hugging Face folder can hold this tokenizer, with the same ids.

        Raises:
            ConfigError: It cannot.
        """
        converted = self.to_hugging_face()
        for text in PROBES:
            ours = self.encode(text).tolist()
            theirs = converted.encode(text, add_special_tokens=False).ids
            if ours != theirs:
                raise ConfigError(
                    f"{self.path}: a Hugging Face tokenizer made of it encodes {text!r} as "
                    f"{theirs}, not as {ours}, so a model trained with it could not be exported. "
                    "Use another tokenizer"
                )

    def check_trainable(self) -> None:
        """Check that models trained with this tokenizer can be exported, if they are meant to be.

        Raises:
            ConfigError: They cannot, which would otherwise be found only after training.
        """
        self.check_exportable()


def find_tokenizer(directory: str | Path) -> Path:
    """Return the path of the tokenizer in a data set or a checkpoint.

    Raises:
        ConfigError: There is none.
    """
    paths = [Path(directory) / name for name in TOKENIZER_FILES]
    for path in paths:
        if path.exists():
            return path
    raise ConfigError(
        f"{paths[0]}: missing, and so are {JSON} and {DICTIONARY}: there is no tokenizer. "
        "`pretrain data build CONFIG` makes a data set with one"
    )


def _read(path: Path) -> bytes:
    """Return the bytes of a tokenizer's file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the tokenizer ({error.strerror}). Give the path of its file; "
            "models on the Hub are not looked up by name"
        ) from None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer: .txt files are dict.txt; for other files the content decides the kind.

    Raises:
        ConfigError: The file cannot be read, is not a tokenizer, or has no end-of-document token.
    """
    path = Path(path)
    content = _read(path)
    if path.suffix == ".txt":
        return WordTokenizer(path, content)
    # JSON begins with a brace, and a SentencePiece model never does.
    if path.suffix == ".json" or content.lstrip()[:1] == b"{":
        return JsonTokenizer(path, content)
    return PieceTokenizer(path, content)


# ---- Encode a text word by word, with a cache of encoded words ----
# Natural text repeats its words, so most of the work becomes a look-up.
#
# A SentencePiece BPE model begins with single characters and merges neighbors as long as the result
# is a piece. If no piece contains a certain boundary, nothing is ever merged across it, and the
# merges on its two sides are independent. `WORD` cuts where a space follows anything but a space,
# and around newlines; `fits_pieces` checks that no piece of the model contains such a boundary.


SPACE = "▁"
"""U+2581, which SentencePiece uses for a space."""
PART_CHARACTERS = 1 << 20
"""Approximate characters that are cut into words at once, to limit memory."""


WORD = re.compile(rf"[ {SPACE}]*[^ \n{SPACE}]+|\n|[ {SPACE}]+")
"""Matches word after word, without gaps."""
PLAIN_WORD = re.compile(r" *[^ \n]+|\n| +")
"""The same for text without U+2581, which is faster."""
END_OF_WORD = re.compile(rf"\n|[^ \n{SPACE}](?=[ \n{SPACE}])")
"""Matches the last character of a word, where another word follows."""


def encode_words(text: str, known: WordCache[str, bytes]) -> np.ndarray:
    """Return the ids of a text, int64 [tokens]; `known` maps a word to its ids, int32 in bytes."""
    words = WORD if SPACE in text else PLAIN_WORD
    parts = [
        b"".join(map(known.__getitem__, words.findall(text, start, end)))
        for start, end in ranges(text, END_OF_WORD, PART_CHARACTERS)
    ]
    return np.frombuffer(b"".join(parts), np.int32).astype(np.int64)


def fits_pieces(pieces: Iterable[str]) -> bool:
    """Return True if no piece contains a boundary at which `WORD` cuts."""
    across = re.compile(rf"[^{SPACE}]{SPACE}|[^\n]\n|\n[^\n]|\n\n")
    return not any(" " in piece or across.search(piece) for piece in pieces)


# ---- Convert a SentencePiece BPE model to a Hugging Face tokenizer that gives identical ids ----
# A SentencePiece BPE model stores pieces with scores, and a Hugging Face BPE model stores a list of
# merges, which follows from the pieces (`_merges`). Settings with which the two libraries would
# tokenize differently are refused.


NORMAL, USER_DEFINED, UNUSED = 1, 4, 5
"""Values of SentencePiece.Type in sentencepiece_model.proto."""


def convert(proto: Any) -> tokenizers.Tokenizer:
    """Return the Hugging Face tokenizer of the ModelProto of a SentencePiece BPE model."""
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    tokenizer = tokenizers.Tokenizer(
        BPE(vocab, _merges(proto), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # No pre-tokenizer, because SentencePiece applies its merges to the whole text and not word by
    # word.
    replace = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _check_settings(path: Path, proto: Any) -> None:
    """Raise ConfigError if the two libraries, or `encode_words`, would tokenize differently.

    For example, a piece of type UNUSED is split again in a way that depends on the rest of the
    text.
    """
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    is_local = fits_pieces(p.piece for p in proto.pieces if p.type == NORMAL)
    # Setting -> (whether the model has the required value, that value).
    wanted = {
        "model_type": (trainer.model_type == trainer.BPE, "bpe"),
        "byte_fallback": (trainer.byte_fallback, True),
        "treat_whitespace_as_suffix": (not trainer.treat_whitespace_as_suffix, False),
        "normalization_rule_name": (not normalizer.precompiled_charsmap, "identity"),
        "escape_whitespaces": (normalizer.escape_whitespaces, True),
        "remove_extra_whitespaces": (not normalizer.remove_extra_whitespaces, False),
        "user_defined_symbols": (all(p.type != USER_DEFINED for p in proto.pieces), "none"),
        "unused pieces": (all(p.type != UNUSED for p in proto.pieces), "none"),
        "pieces with a space behind a letter": (is_local, "none"),
    }
    wrong = [f"{name} must be {right}" for name, (holds, right) in wanted.items() if not holds]
    if wrong:
        raise ConfigError(
            f"{path}: a Hugging Face tokenizer would not give the same ids, so a model trained "
            f"with it could not be exported: {', '.join(wrong)}. Give the tokenizer.json that was "
            "made of it, or leave data.tokenizer out to have one trained that can be exported"
        )


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return every pair of pieces that joins into a third, in the order in which to merge them.

    SentencePiece merges the pair whose result has the highest score. Pairs with the same result are
    ordered by the ids of their parts. Special pieces are left out: "<s>" or "<0x41>" in a text must
    not be merged into them.
    """
    pieces = {p.piece: (i, p.score) for i, p in enumerate(proto.pieces) if p.type == NORMAL}
    merges = []
    for whole, (_, score) in pieces.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in pieces and right in pieces:
                merges.append((-score, pieces[left][0], pieces[right][0], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


class PieceTokenizer(Tokenizer):
    """A SentencePiece model.

    With a model from `train_tokenizer`, `decode(encode(text)) == text` holds for every text without
    U+2581, the character with which SentencePiece represents spaces.
    """

    file_name = MODEL

    def __init__(self, path: Path, content: bytes) -> None:
        """Load the model in `content`.

        Raises:
            ConfigError: It is not a SentencePiece model, has no </s> piece, or has settings whose
                ids a Hugging Face tokenizer would not reproduce.
        """
        # Imported here, because machines that only time training need no SentencePiece.
        import sentencepiece
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        super().__init__(path, content)
        # protobuf creates the class when the module is imported, so mypy does not know it.
        self.proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        self.vocab_size = 0
        try:
            self.proto.ParseFromString(content)
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
            # An empty file parses as a model without pieces, which the processor cannot use. A
            # piece that is not UTF-8 is not a str.
            if self.proto.pieces and all(isinstance(p.piece, str) for p in self.proto.pieces):
                self.vocab_size = self._processor.get_piece_size()
        except (RuntimeError, ValueError, IndexError, DecodeError):
            pass
        if not self.vocab_size:
            raise ConfigError(
                f"{path}: not a SentencePiece model. Give the .model file, or a Hugging Face "
                "tokenizer.json"
            )
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise ConfigError(
                f"{path}: the model has no </s> piece, which marks the end of every document. "
                "Train it without --eos_id=-1"
            )
        spec = self.proto.trainer_spec
        found = {"unk": spec.unk_id, "eos": self.eos_id, "pad": spec.pad_id}
        # SentencePiece marks an absent token with -1.
        self.special = {role: i for role, i in found.items() if i >= 0}
        _check_settings(path, self.proto)
        self._words = self._word_cache()
        self._prefix = " " if self.proto.normalizer_spec.add_dummy_prefix else ""

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [tokens], without an end-of-document token."""
        return encode_words(self._prefix + text if text else text, self._words)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Control tokens decode to nothing."""
        text: str = self._processor.decode([int(i) for i in ids])
        return text

    def to_hugging_face(self) -> tokenizers.Tokenizer:
        """Return a Hugging Face tokenizer with the same ids; see `convert`."""
        return convert(self.proto)

    def _word_cache(self) -> WordCache[str, bytes]:
        """Return a cache from words to their ids, int32 in bytes, with no space before a word."""
        import sentencepiece

        proto = type(self.proto)()
        proto.CopyFrom(self.proto)
        proto.normalizer_spec.add_dummy_prefix = False
        words = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        return WordCache(lambda word: np.array(words.encode(word), np.int32).tobytes())


# ---- Train a SentencePiece BPE tokenizer ----
# The settings are those for which a Hugging Face tokenizer can give identical ids (see `convert`).


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a BPE tokenizer on the lines of texts and return the SentencePiece model's content.

    The result is a pure function of the lines. All lines are held in memory, so the caller passes a
    sample. Empty lines are left out.

    Raises:
        ConfigError: The text is too small for the vocabulary, or the vocabulary for the text.
    """
    # Imported here, because machines that only time training need no SentencePiece.
    import sentencepiece

    # A list rather than a generator: if a bad line of the corpus raised ConfigError inside
    # SentencePiece's callback, SentencePiece would replace it with its own error.
    lines = (line.strip("\r") for text in texts for line in text.split("\n"))
    sample = [line for line in lines if line]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            # Characters that are no piece become byte pieces instead of <unk>.
            byte_fallback=True,
            # The next three keep the text unchanged, so that decoding restores the exact input.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            # Runs of spaces and tabs may become pieces.
            allow_whitespace_only_pieces=True,
            split_digits=True,
            # In bytes. SentencePiece's default silently drops every line longer than 4192.
            max_sentence_length=2**30,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"data.vocab_size = {vocab_size}: SentencePiece cannot train a tokenizer of this size "
            f"on {len(sample):,} lines ({error}). Set another size, or add text"
        ) from None
    return model.getvalue()


# ---- Use a Hugging Face tokenizer.json, as published with GPT-2, Llama and most other models ----
# Documents are plain data, so settings of the file for chat or single sentences are not used: no
# tokens are added at either end, nothing is truncated or padded, and the name of a special token in
# a document is plain text.


EOS_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Names for the token that ends a document. The first one among a file's special tokens is used; if
there is none, the first one in the file. A vocabulary may have others of them as plain tokens."""
PAD_NAMES = (
    "<pad>", "<|padding|>", "<|pad|>", "<|finetune_right_pad_id|>", "[PAD]",
)  # fmt: skip
"""Names for the padding token. The first one among a file's special tokens is used."""

_LETTERS = "\u00e9\u0416\u4eac"
"""Letters of Latin, Cyrillic and Chinese."""


class JsonTokenizer(Tokenizer):
    """A Hugging Face tokenizer.json.

    `decode(encode(text)) == text` holds for byte-level models such as GPT-2's and Llama 3's. Others
    may normalize a text, or have no token for some characters.
    """

    file_name = JSON

    def __init__(self, path: Path, content: bytes) -> None:
        """Load the tokenizer in `content`.

        Raises:
            ConfigError: It is not a tokenizer.json, or has no token that ends a document.
        """
        super().__init__(path, content)
        try:
            settings = json.loads(content)
            settings["added_tokens"] = settings.get("added_tokens") or []
            # With dropout the ids would be random.
            settings["model"]["dropout"] = None
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise _not_json(path, error) from None
        settings |= {"truncation": None, "padding": None, "post_processor": None}
        vocabulary = _load(path, settings).get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        special = {each.get("content") for each in settings["added_tokens"] if each.get("special")}
        names = sorted(EOS_NAMES, key=lambda name: name not in special)
        eos = next((name for name in names if name in vocabulary), "")
        if not eos:
            raise ConfigError(
                f"{path}: has no token that marks the end of a document, such as "
                f"{' or '.join(EOS_NAMES[:3])}. Add one to its added_tokens"
            )
        self.eos_id = vocabulary[eos]
        # A token that is not marked as special would be recognized in a text.
        _mark_special(settings, eos, self.eos_id)
        self._settings = settings
        self._processor = _load(path, settings)
        self._check_encodes()
        self.special = {"eos": self.eos_id}
        control = {t["content"]: int(t["id"]) for t in settings["added_tokens"] if t["special"]}
        if pad := next((name for name in PAD_NAMES if name in control), ""):
            self.special["pad"] = control[pad]
        unknown = settings["model"].get("unk_id")
        unknown = vocabulary.get(settings["model"].get("unk_token"), unknown)
        if unknown is not None:
            self.special["unk"] = unknown
        self._check_names(settings)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [tokens], without an end-of-document token."""
        return np.array(self._encode(text), np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Special tokens decode to nothing."""
        text: str = self._processor.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def to_hugging_face(self) -> tokenizers.Tokenizer:
        """Return the tokenizer as the library loads it."""
        return _load(self.path, self._settings)

    def _check_encodes(self) -> None:
        """Raise ConfigError if there are characters that the tokenizer has no token for."""
        try:
            # A BPE model without an unknown token drops characters that it does not know.
            left_out = [letter for letter in _LETTERS if not self._encode(letter)]
        except Exception as error:
            left_out = [str(error)]
        if left_out:
            raise ConfigError(
                f"{self.path}: has no token for all that a corpus may hold ({left_out[0]}). Use "
                "another tokenizer, or give its model an unk_token"
            )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _check_names(self, settings: dict[str, Any]) -> None:
        """Raise ConfigError if a text can spell a special token, as in Unigram models.

        These match the names of special tokens like any other piece of the vocabulary.
        """
        for token in settings["added_tokens"]:
            # The unknown token is exempt: texts may encode to it, and it controls nothing.
            if not token["special"] or token["id"] == self.special.get("unk"):
                continue
            if token["id"] in self._encode(f"a{token['content']}b"):
                raise ConfigError(
                    f"{self.path}: {token['content']} in a text would become the special token, so "
                    "a document could end or pad itself. Use another tokenizer"
                )


def _load(path: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer that the content of a tokenizer.json describes.

    Raises:
        ConfigError: The library does not understand it.
    """
    try:
        processor = tokenizers.Tokenizer.from_str(json.dumps(settings))
    except Exception as error:
        raise _not_json(path, error) from None
    processor.encode_special_tokens = True
    return processor


def _not_json(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path}: not a Hugging Face tokenizer.json ({error}). Give the file of that name, whole, "
        "or a SentencePiece .model"
    )


def _mark_special(settings: dict[str, Any], name: str, number: int) -> None:
    """Turn a token of the vocabulary into a special added token."""
    for token in settings["added_tokens"]:
        if token["content"] == name:
            token["special"] = True
            return
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    token = {"id": number, "content": name, **dict.fromkeys(flags, False), "special": True}
    settings["added_tokens"].append(token)


# ---- Use a vocabulary of words, like fairseq's Dictionary ----
# White space separates words, and every line ends with `</s>`, even an empty one. The ids begin
# with `<s>`, `<pad>`, `</s>` and `<unk>`. The words follow, ordered by decreasing frequency and
# then by their characters. All other words become `<unk>`, as does the word "<unk>", with which
# corpora such as WikiText-103 mark rare words. The file is fairseq's dict.txt, which has a line
# "word count" for each word (fairseq/data/dictionary.py).
#
# The ids of a text are those of fairseq-preprocess, except that the words `<s>`, `<pad>` and `</s>`
# are unknown here and control tokens there.


SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNK = range(4)
_HALF = re.compile("[\ud800-\udfff]")
MULTIPLE = 8
"""fairseq pads a vocabulary to a multiple of this, with words madeupword0000, 0001, ..."""


class WordTokenizer(Tokenizer):
    """A dict.txt.

    A document is its lines; the end-of-document token is the `</s>` of its last line, so a newline
    at the end of a text is not encoded. `decode(encode(text))` has one space between words, and
    `<unk>` for words that are not in the vocabulary.
    """

    file_name = DICTIONARY
    eos_id = EOS

    def __init__(self, path: Path, content: bytes) -> None:
        """Load the vocabulary in `content`.

        Raises:
            ConfigError: It is no dict.txt.
        """
        super().__init__(path, content)
        self._symbols = [*SPECIAL, *_words(path, content)]
        self.vocab_size = len(self._symbols)
        self.special = {"eos": EOS, "unk": UNK, "pad": PAD}
        self._ids = _Ids(zip(self._symbols[len(SPECIAL) :], range(len(SPECIAL), self.vocab_size)))

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64 [words and line ends], without the last line's end."""
        # Treat line ends as Python does when it reads text files.
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        ids, look_up = array("i"), self._ids.__getitem__
        for chunk in chunks(text):
            for number, line in enumerate(chunk.split("\n")):
                if number:
                    ids.append(EOS)
                ids.extend(map(look_up, line.split()))
        if text.endswith("\n"):
            ids.pop()
        return np.frombuffer(ids, np.int32).astype(np.int64) if ids else np.empty(0, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids: words joined by spaces, a newline for each `</s>`."""
        lines: list[list[str]] = [[]]
        for i in ids:
            if i == EOS:
                lines.append([])
            elif i not in (BOS, PAD):
                # A padded vocabulary has ids beyond its words.
                lines[-1].append(self._symbols[i if i < self.vocab_size else UNK])
        return "\n".join(map(" ".join, lines))

    def check_trainable(self) -> None:
        """Do nothing: models of whole words are for comparisons, not for export.

        `pretrain config` says that such a run is not exported.
        """

    def to_hugging_face(self) -> tokenizers.Tokenizer:
        """Raise ConfigError: there is none."""
        raise ConfigError(
            f"{self.path}: a vocabulary of words is not exported. To export a model, train it with "
            "a SentencePiece or Hugging Face tokenizer"
        )


def train_words(texts: Iterable[str], vocab_size: int) -> bytes:
    """Count the words of all texts, and return the content of a dict.txt.

    Args:
        texts: Documents, or parts of documents that begin and end with white space.
        vocab_size: Number of ids, including the four special ones.

    Raises:
        ConfigError: The texts have too few different words.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        for chunk in chunks(text):
            counts.update(chunk.split())
    for name in SPECIAL:
        counts.pop(name, None)
    # Without lone surrogates, which JSON can hold but UTF-8 cannot.
    known = [(word, n) for word, n in counts.items() if not _HALF.search(word)]
    known.sort(key=lambda each: (-each[1], each[0]))
    words = known[: max(vocab_size - len(SPECIAL), 0)]
    most = -(-(len(words) + len(SPECIAL)) // MULTIPLE) * MULTIPLE
    if not words or vocab_size > most:
        found = f"{len(words):,} different words" if words else "no words"
        raise ConfigError(
            f"data.vocab_size = {vocab_size}: the training text has {found}. Set it to {most} or "
            "less, or add text"
        )
    made_up = (f"madeupword{number:04d}" for number in range(vocab_size))
    names = (name for name in made_up if name not in counts)
    words += [(next(names), 0) for _ in range(vocab_size - len(SPECIAL) - len(words))]
    return "".join(f"{word} {count}\n" for word, count in words).encode()


class _Ids(dict[str, int]):
    """Maps words to their ids, and others to `<unk>`."""

    def __missing__(self, word: str) -> int:
        return UNK


def _words(path: Path, content: bytes) -> list[str]:
    """Return the words of a dict.txt.

    Raises:
        ConfigError: The file has another format, or a word twice.
    """
    try:
        lines = content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8. Convert it, as in `iconv -f latin1 -t utf-8`"
        ) from None
    found: dict[str, None] = dict.fromkeys(SPECIAL)
    for number, line in enumerate(lines, start=1):
        word, space, count = line.removesuffix("\r").rpartition(" ")
        is_entry = space and word.split() == [word] and count.isascii() and count.isdigit()
        if not is_entry or word in found:
            raise ConfigError(
                f"{path}: not a dict.txt of fairseq, whose lines are a word, which stands in no "
                f"other line, a space and its count: line {number} is {line[:60]!r}. Give another "
                'file, or data.tokenizer = "words" to count the words anew'
            )
        found[word] = None
    return list(found)[len(SPECIAL) :]

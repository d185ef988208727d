"""Use a Hugging Face tokenizer.json, as published with GPT-2, Llama and most other models.

Documents are data, so what stands in the file for chat or for single sentences is not used: no
token is added at the beginning or the end, nothing is cut off or padded, and the name of a special
token in a document is text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from pretrain.config import ConfigError
from pretrain.data.tokenizers.base import GPT2, JSON, LLAMA3, PROBES, Cut, Tokenizer, WordCache

EOS_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Names of the token that ends a document. The first that a file has is used."""
PAD_NAMES = (
    "<pad>", "<|padding|>", "<|pad|>", "<|finetune_right_pad_id|>", "[PAD]",
)  # fmt: skip
"""Names of the token that pads. The first that is among a file's special tokens is used."""

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
_LLAMA3_EXPRESSION = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_EXPRESSION = _LLAMA3_EXPRESSION.replace("{1,3}", "")


_LETTERS = "\u00e9\u0416\u4eac"
"""Letters of Latin, Cyrillic and Chinese."""


class JsonTokenizer(Tokenizer):
    """A Hugging Face tokenizer.json.

    `decode(encode(text)) == text` holds for byte-level models such as GPT-2's and Llama 3's. Others
    may normalise a text, or have no token for some of its characters.
    """

    file_name = JSON

    def __init__(self, path: Path, content: bytes) -> None:
        """Load the tokenizer in `content`.

        Raises:
            ConfigError: It is no tokenizer.json, or has no token that ends a document.
        """
        super().__init__(path, content)
        settings = _parse(path, content)
        self._processor = _load(path, json.dumps(settings))
        vocabulary = self._processor.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        eos = next((name for name in EOS_NAMES if name in vocabulary), "")
        if not eos:
            raise ConfigError(
                f"{path}: has no token that marks the end of a document, such as "
                f"{' or '.join(EOS_NAMES[:3])}. Add one to its added_tokens"
            )
        self.eos_id = vocabulary[eos]
        # What is not marked as special would be found in a text.
        _mark_special(settings, eos, self.eos_id)
        self._settings = settings
        self._processor = _load(path, json.dumps(settings))
        _check_ids(path, settings, self._processor)
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
        self._cut = _cut(settings)
        self._words = WordCache(self._encode)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 [tokens], without an end-of-document token."""
        if self._cut is not None:
            return self._words.encode(text, self._cut)
        return np.array(self._encode(text), np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Special tokens decode to nothing."""
        text: str = self._processor.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def to_hugging_face(self) -> tokenizers.Tokenizer:
        """Return the tokenizer as the library loads it."""
        return _load(self.path, json.dumps(self._settings))

    def _check_encodes(self) -> None:
        """Raise ConfigError if there are characters that the tokenizer has no token for."""
        for text in PROBES:
            try:
                self._encode(text)
            except Exception as error:
                raise ConfigError(
                    f"{self.path}: cannot encode {text!r} ({error}), and a corpus may hold "
                    "anything. Use another tokenizer"
                ) from None
        for letter in _LETTERS:
            # A BPE model without an unknown token leaves out what it does not know.
            if not self._encode(letter):
                raise ConfigError(
                    f"{self.path}: has no token for {letter!r} and leaves it out without a word, "
                    "so that a corpus would lose text. Use another tokenizer, or give its model an "
                    "unk_token"
                )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _check_names(self, settings: dict[str, Any]) -> None:
        """Raise ConfigError if a text can spell a special token, as it can in Unigram models.

        They match the names in their vocabulary like any other piece.
        """
        for token in settings["added_tokens"]:
            # Any character may be unknown, and that is no control token.
            if not token["special"] or token["id"] == self.special.get("unk"):
                continue
            if token["id"] in self._encode(f"a{token['content']}b"):
                raise ConfigError(
                    f"{self.path}: {token['content']} in a text would become the special token, so "
                    "a document could end or pad itself. Use another tokenizer"
                )


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    """Return the content of a tokenizer.json, without what is not for documents.

    Raises:
        ConfigError: It is not JSON, or JSON of something else.
    """
    try:
        settings: dict[str, Any] = json.loads(content)
        is_tokenizer = isinstance(settings, dict) and isinstance(settings.get("model"), dict)
    except (ValueError, RecursionError):
        is_tokenizer = False
    if not is_tokenizer:
        raise ConfigError(
            f"{path}: not a Hugging Face tokenizer.json. Give the file of that name, whole, or a "
            "SentencePiece .model"
        )
    found = settings.get("added_tokens") or []
    settings["added_tokens"] = found
    settings |= {"truncation": None, "padding": None, "post_processor": None}
    # Dropout would make other ids each time.
    settings["model"]["dropout"] = None
    return settings


def _load(path: Path, text: str) -> tokenizers.Tokenizer:
    """Return the tokenizer that a JSON text describes.

    Raises:
        ConfigError: The library does not understand it.
    """
    try:
        processor = tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A panic of Rust is no Exception.
        raise ConfigError(
            f"{path}: not a Hugging Face tokenizer.json ({error}). Restore it from a copy"
        ) from None
    processor.encode_special_tokens = True
    return processor


def _mark_special(settings: dict[str, Any], name: str, number: int) -> None:
    """Make a token of the vocabulary an added token that is special."""
    for token in settings["added_tokens"]:
        if token["content"] == name:
            token["special"] = True
            return
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    token = {"id": number, "content": name, **dict.fromkeys(flags, False), "special": True}
    settings["added_tokens"].append(token)


def _check_ids(path: Path, settings: dict[str, Any], processor: tokenizers.Tokenizer) -> None:
    """Check that added tokens have the ids that the file says; the library may choose others."""
    for token in settings["added_tokens"]:
        if (found := processor.token_to_id(token["content"])) != token["id"]:
            raise ConfigError(
                f"{path}: added_tokens says that {token['content']} has the id {token['id']}, but "
                f"with this vocabulary it is {found}. Restore it from a copy"
            )


def _cut(settings: dict[str, Any]) -> Cut | None:
    """Return where a text may be cut without a change of its ids; None if that is not known."""
    if settings.get("normalizer") or not all(t["special"] for t in settings["added_tokens"]):
        return None
    if settings["model"].get("type") != "BPE":
        return None
    before = settings.get("pre_tokenizer")
    if _is_byte_level(before, use_regex=True):
        return GPT2
    steps = before.get("pretokenizers", []) if isinstance(before, dict) else []
    if len(steps) == 2 and _is_byte_level(steps[1], use_regex=False):
        for expression in (_LLAMA3_EXPRESSION, _QWEN2_EXPRESSION):
            pattern = {"Regex": expression}
            split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            if steps[0] == split:
                return LLAMA3
    return None


def _is_byte_level(step: Any, use_regex: bool) -> bool:
    if not isinstance(step, dict):
        return False
    # Where it is not said, GPT-2's expression is used.
    wanted = {**_BYTE_LEVEL, "use_regex": use_regex}
    return {"use_regex": True, **step, "trim_offsets": 0} == {**wanted, "trim_offsets": 0}

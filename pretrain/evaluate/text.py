"""The text that an evaluation scores: its tokens in memory, its bytes, and its blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.base import DICTIONARY
from pretrain.evaluate.records import block_ends

READ_TOKENS = 1 << 20
"""Tokens that are read at once: what is read has 8 bytes a token, and what is kept 2 or 4."""
_CUT = "\N{REPLACEMENT CHARACTER}"
"""A tokenizer decodes the first bytes of a character whose last ones are missing to this."""


class ScoredText:
    """The first tokens of a validation split.

    Args:
        stream: The split.
        max_tokens: Score at most so many tokens; None scores all.
    """

    def __init__(self, stream: TokenStream, max_tokens: int | None = None) -> None:
        self.total = len(stream)
        """Tokens of the whole split."""
        self.tokens = min(self.total, max_tokens or self.total)
        """Tokens that are scored."""
        self.tokenizer, self.validation = stream.tokenizer_sha256, stream.identity
        """The SHA-256 of the tokenizer and of the split."""
        # A damaged byte anywhere in the text is found here, on every rank alike, and not by one of
        # them in the middle of an evaluation.
        self._ids = np.empty(self.tokens + 1, np.min_scalar_type(stream.vocab_size))
        # An end-of-document token in front gives the first token a context as well.
        self._ids[0] = stream.eos_id
        for start in range(0, self.tokens, READ_TOKENS):
            count = min(READ_TOKENS, self.tokens - start)
            self._ids[start + 1 : start + 1 + count] = stream.read(start, count)
        self.block_ends = block_ends(self._ids[1:], stream.eos_id)
        """Where the blocks end of which `pretrain.evaluate.records` makes an interval."""
        self.bytes = stream.text_bytes
        """Bytes of the scored text in UTF-8; 0 where they are not known."""
        if stream.manifest.tokenizer == DICTIONARY or self.tokens < self.total:
            tokenizer = load_tokenizer(stream.tokenizer_path)
            if tokenizer.unk_id is not None and (self._ids[1:] == tokenizer.unk_id).any():
                # Unknown words are not predicted, so the loss does not give the bits of the text.
                self.bytes = 0
            else:
                self.bytes = text_bytes(tokenizer, self._ids[1:])

    def inputs(self, start: int, size: int) -> NDArray[np.generic]:
        """Return inputs [start, start + size) and the target after the last, [size + 1]."""
        return self._ids[start : start + size + 1]


def text_bytes(tokenizer: Tokenizer, ids: NDArray[np.generic]) -> int:
    """Return the bytes of the text of token ids, in UTF-8.

    Documents are decoded one by one, because a tokenizer may treat the first word of a text in its
    own way. End-of-document tokens and other special tokens have no bytes. Of a character that the
    end of the ids cuts, each token counts as one byte, which may be wrong by three bytes at most.
    For a tokenizer that changes text (lower case, say), these are the bytes of the changed text: of
    a vocabulary of words, one space between words and a newline for each `</s>`, which ends a line.

    Args:
        tokenizer: The tokenizer.
        ids: Token ids of documents, each ended by the tokenizer's end-of-document token; the last
            one may be cut.
    """
    if tokenizer.file_name == DICTIONARY:
        return len(tokenizer.decode(ids.tolist()).encode())
    *documents, last = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id) + 1)
    whole = (len(tokenizer.decode(document[:-1].tolist()).encode()) for document in documents)
    return sum(whole) + _bytes_of_beginning(tokenizer, last.tolist())


def _bytes_of_beginning(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Return the bytes of the beginning of a document, which may end within a character."""
    count, text = len(ids), tokenizer.decode(ids)
    # A character has four bytes at most, so three tokens at most hold a part of one.
    while text.endswith(_CUT) and len(ids) - count < 3:
        count -= 1
        text = tokenizer.decode(ids[:count])
    return len(text.encode()) + len(ids) - count

"""Refuse a [data] section that no data set can be built from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrain.config.data_schema import (
    LEAST_TRAINED,
    LEAST_WORDS,
    WORDS,
    CorpusSection,
    DataSection,
)
from pretrain.config.refusal import Refusal

if TYPE_CHECKING:
    # RunConfig.layout applies these rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig


DOCUMENT_BACKENDS = ("auto", "triton", "sdpa", "reference")
"""Values of model.attention_backend that serve data.per_document_attention."""


def check_data(c: RunConfig) -> Iterator[Refusal]:
    """Check that every corpus has the files it needs, and that a shard holds a block."""
    d = c.data
    yield from _vocabulary(d)
    if d.corpora:
        yield from _corpora(d)
    else:
        yield from _corpus("data", d)
    if d.source == "shakespeare" and d.validation_paths:
        yield Refusal(
            "data.validation_paths",
            list(d.validation_paths),
            'data.source = "shakespeare" comes with its own text',
            'Remove the key, or set data.source = "text"',
        )
    if d.tokens_per_shard < d.tokens_per_block:
        yield Refusal(
            "data.tokens_per_shard",
            d.tokens_per_shard,
            f"less than one block of data.tokens_per_block = {d.tokens_per_block}",
            f"Choose {d.tokens_per_block} or more, or lower data.tokens_per_block",
        )
    if d.per_document_attention and d.tokenizer == WORDS:
        yield Refusal(
            "data.per_document_attention",
            True,
            f'with data.tokenizer = "{WORDS}" the token that ends a document ends each line',
            "Remove the key, or use another tokenizer",
        )
    backend = c.model.attention_backend
    if d.per_document_attention and backend not in DOCUMENT_BACKENDS:
        yield Refusal(
            "data.per_document_attention",
            True,
            f'model.attention_backend = "{backend}" has no mask by document',
            'Set model.attention_backend = "auto" or "triton", or remove the key',
        )


def _vocabulary(d: DataSection) -> Iterator[Refusal]:
    """Check that a vocabulary that is made of the text holds what every such vocabulary has.

    One that is given in a file has as many pieces as it has.
    """
    if d.tokenizer is None and d.vocab_size < LEAST_TRAINED:
        yield Refusal(
            "data.vocab_size",
            d.vocab_size,
            "a SentencePiece BPE that is trained on the text has 256 byte pieces, three control "
            "pieces and the text's characters",
            f'Choose {LEAST_TRAINED} or more, or set data.tokenizer = "{WORDS}" or to a file',
        )
    if d.tokenizer == WORDS and d.vocab_size < LEAST_WORDS:
        yield Refusal(
            "data.vocab_size",
            d.vocab_size,
            f'data.tokenizer = "{WORDS}" begins with four words of its own, as fairseq does',
            f"Choose {LEAST_WORDS} or more",
        )


def _corpus(prefix: str, corpus: DataSection | CorpusSection) -> Iterator[Refusal]:
    """Check that a corpus has paths if it needs them, and none if it has its own text.

    Args:
        prefix: What its keys begin with: "data" or "data.corpora.NAME".
        corpus: The section.
    """
    if corpus.source != "shakespeare" and not corpus.paths:
        yield Refusal(
            f"{prefix}.paths",
            [],
            f'{prefix}.source = "{corpus.source}" reads files, and none are given',
            f'Set files or glob patterns, as in {prefix}.paths = ["corpus/**/*.txt"]',
        )
    if corpus.source == "shakespeare" and corpus.paths:
        yield Refusal(
            f"{prefix}.paths",
            list(corpus.paths),
            f'{prefix}.source = "shakespeare" comes with its own text',
            f'Remove the key, or set {prefix}.source = "text"',
        )


def _corpora(d: DataSection) -> Iterator[Refusal]:
    """Check the names of the corpora and that their shares are told in one way."""
    for key, value in (("data.paths", list(d.paths)), ("data.text_field", d.text_field)):
        if value:
            yield Refusal(
                key,
                value,
                "data.corpora is set too, and a data set has either one corpus or a table of them",
                f"Set {key.removeprefix('data.')} in the table [data.corpora.NAME] of a file "
                f"instead, where NAME is one of {', '.join(d.corpora)} or a further corpus; or "
                "remove data.corpora",
            )
    for name, corpus in d.corpora.items():
        if not re.fullmatch(r"[a-z0-9][a-z0-9_]{0,63}", name):
            yield Refusal(
                "data.corpora",
                name,
                "the name of a corpus is part of file names",
                "Use lower-case letters, digits and underscores, at most 64 of them",
            )
        yield from _corpus(f"data.corpora.{name}", corpus)
    have_weight = [name for name, corpus in d.corpora.items() if corpus.weight is not None]
    have_epochs = [name for name, corpus in d.corpora.items() if corpus.epochs is not None]
    if have_weight and (have_epochs or len(have_weight) < len(d.corpora)):
        without = sorted({*d.corpora} - {*have_weight}) or have_epochs
        yield Refusal(
            f"data.corpora.{have_weight[0]}.weight",
            d.corpora[have_weight[0]].weight,
            f"{', '.join(without)} {'have' if len(without) > 1 else 'has'} no weight, or epochs",
            "Give every corpus a weight and none epochs, or use epochs alone",
        )

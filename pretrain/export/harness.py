"""Put validation text beside an exported model, as a task for EleutherAI's lm-evaluation-harness.

lm-eval scores each document by itself: the first token after the BOS, which is the token that ended
the document before in training, and every window but the last without overlap. For a document of a
multiple of `max_length` tokens that is the loss of nonoverlapping windows (`evaluate.windows`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import Tokenizer

NAME = "pretrain_validation"
TRUST = ",trust_remote_code=True"
"""What lm-eval's --model_args need for a folder whose class is not stock."""
TASK, TEXT = "validation.yaml", "validation.jsonl"
"""The task and its documents. lm-eval takes the path of the latter from where it is started."""

_TASK = """\
# lm_eval --model hf --model_args pretrained=.,dtype=float32,max_length={length}{trust} \\
#     --tasks {name} --include_path .
#
# Start it in this folder. {text} holds {content}, of the run's validation text.
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {text}
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
    aggregation: bits_per_byte
    higher_is_better: false
  - metric: byte_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
  - metric: word_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
metadata:
  version: 1.0
"""
_TOKENS_AT_ONCE = 2**16


def validation_documents(
    stream: TokenStream, tokenizer: Tokenizer, most_bytes: int
) -> tuple[str, ...]:
    """Return the texts of the first documents of a split, as many as fit.

    Args:
        stream: The validation split.
        tokenizer: The tokenizer that its tokens were made with.
        most_bytes: Bytes that the texts may have together in UTF-8. A first document that is larger
            is cut off there.
    """
    texts: list[str] = []
    left = most_bytes
    for ids in _documents(stream, most_bytes):
        text = tokenizer.decode(ids)
        size = len(text.encode())
        if size > left:
            if not texts:
                texts.append(text.encode()[:left].decode(errors="ignore"))
            break
        texts.append(text)
        left -= size
    return tuple(text for text in texts if text.strip())


def _documents(stream: TokenStream, most_tokens: int) -> Iterator[np.ndarray]:
    """Yield the tokens of each document of a split without its EOS.

    Of a document with more than `most_tokens` tokens no more need be read than that.
    """
    begun: list[np.ndarray] = []
    for start in range(0, len(stream), _TOKENS_AT_ONCE):
        ids = stream.read(start, min(_TOKENS_AT_ONCE, len(stream) - start))
        first = 0
        for end in np.flatnonzero(ids == stream.eos_id).tolist():
            yield np.concatenate([*begun, ids[first:end]])
            begun, first = [], end + 1
        begun.append(ids[first:])
        if sum(map(len, begun)) > most_tokens:
            break
    yield np.concatenate(begun)


def write_task(
    folder: Path, documents: Sequence[str], length: int, *, is_stock: bool = True
) -> None:
    """Write the task and its documents into an export.

    Args:
        folder: The export.
        documents: Texts of the documents.
        length: Window in tokens of the command in the task's comment: the training length.
        is_stock: False if the folder's class is not stock, which the command must allow.
    """
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    (folder / TEXT).write_text("".join(lines), encoding="utf-8")
    trust = "" if is_stock else TRUST
    content = describe(documents)
    task = _TASK.format(name=NAME, text=TEXT, length=length, trust=trust, content=content)
    (folder / TASK).write_text(task, encoding="utf-8")


def describe(documents: Sequence[str]) -> str:
    """Return how many documents these are, and their size."""
    count = (
        "the first document" if len(documents) == 1 else f"the first {len(documents):,} documents"
    )
    return f"{count}, {sum(len(text.encode(errors='replace')) for text in documents):,} bytes"


def prompt_of(documents: Sequence[str]) -> str:
    """Return the first words of the documents' text, to begin a continuation with."""
    words = next((text.split() for text in documents if text.split()), ["The"])
    # Text without spaces, as Chinese, is one word.
    return " ".join(words[:6])[:60].replace("```", "")

"""Write the model card (README.md) of an exported model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config import RunConfig, num_parameters
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import Tokenizer
from pretrain.evaluation.curves import Table
from pretrain.huggingface.base import HuggingFaceClass

# ---- harness ----
# Put validation text beside an exported model, as a task for EleutherAI's lm-evaluation-harness.
#
# lm-eval scores each document by itself: the first token after the BOS, which is the token that
# ended the document before in training, and every window but the last without overlap. For a
# document of a multiple of `max_length` tokens that is the loss of nonoverlapping windows
# (`evaluate.windows`).


CARD, NAME = "README.md", "pretrain_validation"
TASK, TEXT = "validation.yaml", "validation.jsonl"
"""The task and its documents. lm-eval takes the path of the latter from where it is started."""

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


@dataclass(frozen=True)
class ExportExtras:
    """The contents of an export beside the model."""

    curve: Sequence[Mapping[str, Any]] = ()
    """Evaluation records for the model card, as `pretrain evaluate` makes them. Empty leaves
    the table of perplexities out."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name -> value of further rows in the model card's table of properties."""
    documents: Sequence[str] = ()
    """Validation text for the task of lm-eval, whose first words are the model card's prompt."""


def write_card(
    folder: Path,
    config: RunConfig,
    target: HuggingFaceClass,
    settings: Any,
    extras: ExportExtras,
    eos: str,
) -> None:
    """Write the model card, with the metadata block that the Hub reads, and the task for lm-eval.

    Args:
        folder: The export.
        config: The run's resolved config.
        target: Class that the model was exported as.
        settings: Its transformers config.
        extras: What else there is to say.
        eos: Name of the token that ends a document.
    """
    method, m = config.position.method, config.model
    length, documents = config.data.sequence_length, extras.documents
    longest = getattr(settings, target.length_key)
    rows = {
        "Class": f"`{target.name}`",
        "Position method": method,
        "Parameters": f"{num_parameters(config):,}",
        "Layers, hidden size, heads": f"{m.num_layers}, {m.hidden_size}, {m.num_attention_heads}",
        "Training length": f"{length} tokens",
        "Exported for": f"up to {longest} tokens",
        "Vocabulary": f"{config.data.vocab_size:,} pieces, padded to {config.padded_vocab_size:,}",
        **extras.facts,
    }
    if config.data.per_document_attention:
        rows["Documents"] = (
            "each was trained on as if it stood alone, so give the model one at a time"
        )
    values = {
        "metadata": metadata(config, extras.curve),
        "title": config.position.title or method,
        "about": config.position.about,
        "length": length,
        "rows": rows,
        "own": target.stock,
        "prompt": json.dumps(prompt_of(documents), ensure_ascii=False),
        "note": target.note(config, settings).rstrip(),
        "eos": eos,
        "curve": curve_table(extras.curve),
        "intervals": any(_interval(record) for record in extras.curve),
        "documents": describe(documents) if documents else "",
        **{"text": TEXT, "task": TASK, "name": NAME},
    }
    (folder / CARD).write_text(_filled("card.md.jinja", values), encoding="utf-8")
    if documents:
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
        (folder / TEXT).write_text("".join(lines), encoding="utf-8")
        (folder / TASK).write_text(_filled("validation.yaml.jinja", values), encoding="utf-8")


def _filled(name: str, values: Mapping[str, Any]) -> str:
    """Return a template of this folder with the values."""
    # Imported here: only an export needs it.
    import jinja2

    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(text).render(values)


def metadata(config: RunConfig, curve: Sequence[Mapping[str, Any]]) -> str:
    """Return the metadata that the Hub reads, as YAML: with perplexities as a model-index.

    Args:
        config: The run's resolved config.
        curve: Evaluation records. Those that are not finite are left out.
    """
    from huggingface_hub import ModelCardData

    results = [result for record in curve for result in _results(config, record)]
    data = ModelCardData(
        language=list(config.export.language) or None,
        license=config.export.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[config.position.method],
        datasets=list(config.export.datasets) or None,
        model_name=Path(config.run.directory).name or "model",
        eval_results=results or None,
    )
    if not results:
        # It names a model for its results only.
        data.model_name = None
    return data.to_yaml().strip()


def _results(config: RunConfig, record: Mapping[str, Any]) -> list[Any]:
    """Return the entries of the model-index that one evaluation record makes.

    Args:
        config: The run's resolved config.
        record: The record.
    """
    from huggingface_hub import EvalResult

    datasets, length = config.export.datasets, record["length"]
    keys = ("protocol", "stride", "length", "tokens", "tokenizer", "validation")
    found = []
    for key, title in (("perplexity", "Perplexity per token"), ("bits_per_byte", "Bits per byte")):
        value = record.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=datasets[0] if datasets else "text",
                dataset_name=f"{datasets[0]}, held-out part" if datasets else "validation text",
                dataset_split="validation",
                metric_type=key,
                metric_value=value,
                metric_name=f"{title} in windows of {length} tokens, {record['protocol']}",
                metric_args={k: record[k] for k in keys if record.get(k) is not None},
            )
        )
    return found


def curve_table(curve: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of perplexities: a row for each length, a column for each curve.

    Columns are in the order in which their first records appear. The last says how many tokens the
    numbers of a row stand on.
    """
    if not curve:
        return ""
    cells = {(_column(r), r["length"]): _cell(r) for r in curve}
    titles = list(dict.fromkeys(column for column, _ in cells))
    rows = []
    for length in sorted({r["length"] for r in curve}):
        scored = dict.fromkeys(f"{r['tokens']:,}" for r in curve if r["length"] == length)
        found = [cells.get((title, length), "") for title in titles]
        rows.append([f"{length:,}", *found, " / ".join(scored)])
    title = "Perplexity of the validation text, read in windows of so many tokens"
    return Table(title, ["tokens", *titles, "tokens scored"], rows, names=0).markdown()


def _cell(record: Mapping[str, Any]) -> str:
    """Return a record's perplexity, with its confidence interval where that is known."""
    perplexity = record["perplexity"]
    # metrics.jsonl has null for what is not finite.
    if perplexity is None or not math.isfinite(perplexity):
        return "not finite"
    return f"{perplexity:.2f}{_interval(record)}"


def _interval(record: Mapping[str, Any]) -> str:
    """Return the confidence interval of a record's perplexity in brackets; "" where it is unknown.

    That is so where the text has too few blocks.
    """
    ends = [record.get(key) for key in ("loss_low", "loss_high")]
    finite = [math.exp(end) for end in ends if isinstance(end, int | float) and end < 700]
    return f" ({finite[0]:.2f} to {finite[1]:.2f})" if len(finite) == 2 else ""


def _column(record: Mapping[str, Any]) -> str:
    """Return the title of a record's column: method, protocol and, if it slides, the stride.

    A nonoverlapping window's stride is its length, so there it would give each row its own column.
    """
    title = f"{record['method']}, {record['protocol']}"
    if record["protocol"] == "sliding":
        return f"{title}, stride {record['stride']}"
    return title

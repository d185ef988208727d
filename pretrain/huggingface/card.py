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
from pretrain.huggingface.table import SLOPES, Target

# ---- harness ----
# Put validation text beside an exported model, as a task for EleutherAI's lm-evaluation-harness.
#
# lm-eval scores each document by itself: the first token after the BOS, which is the token that
# ended the document before in training, and every window but the last without overlap. For a
# document of a multiple of `max_length` tokens that is the loss of nonoverlapping windows
# (`evaluate.windows`).


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


_BLOOM = """\
Stock transformers adds Bloom's ALiBi biases in the dtype of the weights, which in bfloat16 and
float16 rounds them too much. To load it in 16 bit, give `trust_remote_code=True`: this folder
brings along a class that computes scores and biases in float32."""
_NEUTRAL = """\
Bloom applies a LayerNorm to its embeddings, which this model does not have. The export neutralises
it: the embeddings are stored multiplied by a small power of two, which the weight of that LayerNorm
undoes, and the residual stream by 8, for which `layer_norm_epsilon` is multiplied by 64. Do not
fine-tune this copy.

"""
_OWN_SLOPES = """\
The slopes of ALiBi are those in `slopes` of config.json{trained}: {slopes}. Stock {stock} would
compute others, so stock loaders refuse this folder, and the class that it brings along has to be
allowed with `trust_remote_code=True`. Its scores and biases are in float32.

"""
_ENDS = """\
It computes no token beyond; `pretrain export --max-length N` makes an export that reaches N."""
_MPT = """\
Sequences can be at most as many tokens long as `max_seq_len` in config.json says, which can be
raised there."""
_SINUSOIDAL = f"""\
The sinusoidal positions are stored as a table of position embeddings, so sequences can be at most
`max_position_embeddings` tokens long. {_ENDS}"""
_LEARNED = "Sequences can be at most `max_position_embeddings` tokens long, as in training."
_GPT_NEOX = """\
Rotary embeddings are applied to {percent:g} % of each head. Attention and MLP are {order}
(`use_parallel_residual`)."""

_USAGE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder with this file
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = AutoModelForCausalLM.from_pretrained(folder{trust})
text = tokenizer({prompt}, return_tensors="pt")
output = model.generate(**text, max_new_tokens=40, do_sample=True, top_k=40)
print(tokenizer.decode(output[0]))
```"""

_TEXT_BEGINS = """\
In training every document followed the token `{eos}`, which therefore is both BOS and EOS; the
tokenizer adds neither. {spelled}"""
_FOUND = "A special token's name in a text is that token."
_SPLIT = """\
A special token's name in a text is text (`split_special_tokens`), so special tokens have to be
given as ids."""

_HARNESS = """\
## Evaluate it with lm-evaluation-harness

`{task}` is a task that scores {content}, of the validation text
(`{text}`). Each document is scored by itself, and not, as in the table, as a part of
one long text; its end is not scored. In this folder:

```sh
lm_eval --model hf --model_args pretrained=.,dtype=float32,max_length={length}{trust} \\
    --tasks {name} --include_path .
```
"""


@dataclass(frozen=True)
class ExportExtras:
    """The contents of an export beside the model, and its way with special tokens."""

    curve: Sequence[Mapping[str, Any]] = ()
    """Evaluation records for the model card, as `pretrain evaluate` makes them. Empty leaves
    the table of perplexities out."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name -> value of further rows in the model card's table of properties."""
    documents: Sequence[str] = ()
    """Validation text for the task of lm-eval, whose first words are the model card's prompt."""
    slopes: Sequence[float] = ()
    """The slopes of all heads, where no stock class computes them."""
    split_special_tokens: bool = False
    """As given to `export.tokenizer.fast_tokenizer`."""


def model_card(
    config: RunConfig, target: Target, extras: ExportExtras, max_length: int, eos: str
) -> str:
    """Return the model card as Markdown, with the metadata block that the Hub reads.

    Args:
        config: The run's resolved config.
        target: Class that the model was exported as.
        extras: What else there is to say.
        max_length: Longest sequence, in tokens, that the model was exported for.
        eos: Name of the token that ends a document.
    """
    method, m = config.position.method, config.model
    length = config.data.sequence_length
    rows = {
        "Class": f"`{target.class_name}`",
        "Position method": method,
        "Parameters": f"{num_parameters(config):,}",
        "Layers, hidden size, heads": f"{m.num_layers}, {m.hidden_size}, {m.num_attention_heads}",
        "Training length": f"{length} tokens",
        **_documents_row(config),
        "Exported for": f"up to {max_length} tokens",
        "Vocabulary": f"{config.data.vocab_size:,} pieces, padded to {config.padded_vocab_size:,}",
        **extras.facts,
    }
    prompt = prompt_of(extras.documents)
    title = config.position.title or method
    spelled = _SPLIT if extras.split_special_tokens else _FOUND
    lines = [
        "---",
        metadata(config, extras.curve),
        "---",
        "",
        f"# Language model with {title} positions, trained at {length} tokens",
        "",
        f"A decoder-only language model, which continues a text.{config.position.about}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        _USAGE.format(
            prompt=json.dumps(prompt, ensure_ascii=False),
            trust=", trust_remote_code=True" if target.stock else "",
        ),
        "",
        _note(config, target, extras.slopes),
        "",
        _TEXT_BEGINS.format(eos=eos, spelled=spelled),
        "",
        *_curve_table(extras.curve),
    ]
    if extras.documents:
        described = describe(extras.documents)
        names = {"text": TEXT, "task": TASK, "name": NAME}
        trust = TRUST if target.stock else ""
        lines.append(_HARNESS.format(content=described, length=length, trust=trust, **names))
    return "\n".join(lines)


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


def _documents_row(config: RunConfig) -> dict[str, str]:
    """Return the row that says that training parted documents; empty if it did not."""
    if not config.data.per_document_attention:
        return {}
    return {
        "Documents": "each was trained on as if it stood alone, so give the model one at a time"
    }


def _note(config: RunConfig, target: Target, slopes: Sequence[float]) -> str:
    """Return what a user must know about how the class holds this model (see export/targets.py).

    Args:
        config: The run's resolved config.
        target: Class that the model was exported as.
        slopes: The slopes of all heads, if the class is not stock.
    """
    m, p = config.model, config.position
    rope = p.rope()
    if target.stock:
        own = _OWN_SLOPES.format(
            trained=", as training left them" if SLOPES in p.tensors(config) else "",
            slopes=", ".join(f"{slope:.4g}" for slope in slopes),
            stock={"bloom": "Bloom", "mpt": "MPT"}[target.stock],
        )
        if target.stock == "mpt":
            return own + _MPT
        return own.rstrip() if m.embedding_layernorm else own + _NEUTRAL.rstrip()
    notes = {
        "bloom": _BLOOM if m.embedding_layernorm else _NEUTRAL + _BLOOM,
        "mpt": _MPT,
        "opt": _SINUSOIDAL if p.table_end(config) is None else _LEARNED,
        "gpt_neox": _GPT_NEOX.format(
            percent=100 * rope.percent if rope else 0,
            order="parallel" if m.parallel_residual else "sequential",
        ),
    }
    return notes[target.model_type]


def _curve_table(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of perplexities: a row for each length, a column for each curve.

    Columns are in the order in which their first records appear. The last says how many tokens the
    numbers of a row stand on.
    """
    if not curve:
        return []
    cells = {(_column(r), r["length"]): _cell(r) for r in curve}
    titles = list(dict.fromkeys(column for column, _ in cells))
    lines = ["## Validation perplexity by length", ""]
    lines += [f"| tokens | {' | '.join(titles)} | tokens scored |"]
    lines += ["|---:|" + "---:|" * (len(titles) + 1)]
    for length in sorted({r["length"] for r in curve}):
        row = [cells.get((title, length), "") for title in titles]
        scored = dict.fromkeys(f"{r['tokens']:,}" for r in curve if r["length"] == length)
        lines.append(f"| {length:,} | {' | '.join(row)} | {' / '.join(scored)} |")
    lines.append("")
    if any(_interval(r) for r in curve):
        lines += ["In brackets: the 95 % confidence interval, for other text of the same kind.", ""]
    return lines


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

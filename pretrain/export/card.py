"""Write the model card (README.md) of an exported model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.config import RunConfig, num_parameters
from pretrain.export.targets import Target

_BLOOM = """\
Stock transformers adds Bloom's ALiBi biases in the dtype of the weights, which in bfloat16 and
float16 rounds them too much. To load it in 16 bit, give `trust_remote_code=True`: this folder
brings along a class that computes scores and biases in float32."""
_NEUTRALISED = (
    """\
Bloom applies a LayerNorm to its embeddings, which this model does not have. The export neutralises
it: the embeddings are stored multiplied by a small power of two, which the weight of that LayerNorm
undoes, and the residual stream by 8, for which `layer_norm_epsilon` is multiplied by 64. Do not
fine-tune this copy.

"""
    + _BLOOM
)
_ENDS = """\
It computes no token beyond; `pretrain export --max-length N` makes an export that reaches N."""
_MPT = """\
Sequences can be at most `max_seq_len` tokens long, a number that can be raised in config.json."""
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
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
text = tokenizer("To be, or", return_tensors="pt")
print(tokenizer.decode(model.generate(**text, max_new_tokens=40)[0]))
```"""


def model_card(
    config: RunConfig,
    target: Target,
    curve: Sequence[Mapping[str, Any]],
    facts: Mapping[str, str],
    max_length: int,
) -> str:
    """Return the model card as Markdown, with the metadata block that the Hub reads.

    Args:
        config: The run's resolved config.
        target: Class that the model was exported as.
        curve: Evaluation records with method, protocol, stride, length and perplexity. Empty leaves
            the table of perplexities out.
        facts: Name -> value of further rows in the table of properties.
        max_length: Longest sequence, in tokens, that the model was exported for.
    """
    method, m = config.position.method, config.model
    length = config.data.sequence_length
    rows = {
        "Class": f"`{target.class_name}`",
        "Position method": method,
        "Parameters": f"{num_parameters(config):,}",
        "Layers, hidden size, heads": f"{m.num_layers}, {m.hidden_size}, {m.num_attention_heads}",
        "Training length": f"{length} tokens",
        **_documents(config),
        "Exported for": f"up to {max_length} tokens",
        "Vocabulary": f"{config.data.vocab_size:,} pieces, padded to {config.padded_vocab_size:,}",
        **facts,
    }
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: [{method}]",
        "---",
        "",
        f"# Language model with {method} positions, trained at {length} tokens",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        _USAGE,
        "",
        _note(config, target),
        "",
    ]
    return "\n".join(lines + _curve_table(curve))


def _documents(config: RunConfig) -> dict[str, str]:
    """Return the row that says that training parted documents; empty if it did not."""
    if not config.data.per_document_attention:
        return {}
    return {
        "Documents": "each was trained on as if it stood alone, so give the model one at a time"
    }


def _note(config: RunConfig, target: Target) -> str:
    """Return what a user must know about how the class holds this model (see export/targets.py)."""
    m, p = config.model, config.position
    notes = {
        "bloom": _BLOOM if m.embedding_layernorm else _NEUTRALISED,
        "mpt": _MPT,
        "opt": _LEARNED if p.method == "learned" else _SINUSOIDAL,
        "gpt_neox": _GPT_NEOX.format(
            percent=100 * p.rotary_percent,
            order="parallel" if m.parallel_residual else "sequential",
        ),
    }
    return notes[target.model_type]


def _curve_table(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of perplexities: a row for each length, a column for each curve.

    Columns are in the order in which their first records appear.
    """
    if not curve:
        return []
    cells = {(_column(r), r["length"]): f"{r['perplexity']:.2f}" for r in curve}
    titles = list(dict.fromkeys(column for column, _ in cells))
    lines = ["## Validation perplexity by length", ""]
    lines += [f"| tokens | {' | '.join(titles)} |", "|---:|" + "---:|" * len(titles)]
    for length in sorted({r["length"] for r in curve}):
        row = [cells.get((title, length), "") for title in titles]
        lines.append(f"| {length:,} | {' | '.join(row)} |")
    return [*lines, ""]


def _column(record: Mapping[str, Any]) -> str:
    """Return the title of a record's column: method, protocol and, if it slides, the stride.

    A nonoverlapping window's stride is its length, so there it would give each row its own column.
    """
    title = f"{record['method']}, {record['protocol']}"
    if record["protocol"] == "sliding" and "stride" in record:
        return f"{title}, stride {record['stride']}"
    return title

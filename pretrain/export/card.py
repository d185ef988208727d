"""The README.md of an exported model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.config import RunConfig, num_parameters
from pretrain.export.targets import Target

_NOTES = {
    "bloom": "Bloom normalises its embeddings and this model does not, so that LayerNorm is neutralised: the\n"
    "embeddings are stored times 2^-20, and its weight is sqrt(eps) x 2^20. Keep the weights in float32\n"
    "(float16 overflows, and Bloom rounds its position biases to the dtype of the weights), and do not\n"
    "fine-tune this copy.",
    "mpt": "bfloat16 is safe: MPT keeps its position biases in float32. `max_seq_len` is the longest sequence it\n"
    "takes.",
    "opt": "The sinusoids are stored as a table, which ends at `max_position_embeddings`; the embeddings are\n"
    "stored times sqrt(hidden_size).",
    "gpt_neox": "Rotary embeddings act on the whole head, and attention and MLP follow each other.",
}


def model_card(
    config: RunConfig,
    target: Target,
    curve: Sequence[Mapping[str, Any]],
    facts: Mapping[str, str],
    max_length: int,
) -> str:
    """Markdown. `curve`: records with method, protocol, stride, length, perplexity; `facts`: more rows of the table."""
    m = config.model
    rows = {
        "class": f"`{target.class_name}`",
        "positions": config.position.method,
        "parameters": f"{num_parameters(config):,}",
        "layers, hidden size, heads": f"{m.num_layers}, {m.hidden_size}, {m.num_attention_heads}",
        "trained at": f"{config.data.sequence_length} tokens",
        "exported for": f"up to {max_length} tokens",
        "vocabulary": f"{config.data.vocab_size:,} pieces, padded to {config.padded_vocab_size:,}",
        **facts,
    }
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: [{config.position.method}]",
        "---",
        "",
        f"# {config.position.method} language model, trained at {config.data.sequence_length} tokens",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "."  # where this file lies',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        'text = tokenizer("To be, or", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**text, max_new_tokens=40)[0]))",
        "```",
        "",
        _NOTES[target.model_type],
        "",
    ]
    return "\n".join(lines + _curve_table(curve))


def _curve_table(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row a length, one column a method and protocol (with each stride, if it slides), in order of appearance."""
    if not curve:
        return []
    cells = {(_column(r), r["length"]): f"{r['perplexity']:.2f}" for r in curve}
    titles = list(dict.fromkeys(column for column, _ in cells))
    lines = ["## Validation perplexity by length", ""]
    lines += [f"| tokens | {' | '.join(titles)} |", "|---:|" + "---:|" * len(titles)]
    for length in sorted({r["length"] for r in curve}):
        lines.append(
            f"| {length:,} | {' | '.join(cells.get((title, length), '') for title in titles)} |"
        )
    return [*lines, ""]


def _column(record: Mapping[str, Any]) -> str:
    """A nonoverlapping record's stride is its length, so it names no column."""
    stride = (
        f", stride {record['stride']}"
        if record["protocol"] == "sliding" and "stride" in record
        else ""
    )
    return f"{record['method']}, {record['protocol']}{stride}"

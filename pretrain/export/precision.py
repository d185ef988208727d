"""Write on the model card in which precisions an export may be loaded, as it was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pretrain.config import RunConfig
from pretrain.config.exports import export_class, vllm_reasons
from pretrain.export.parity import STOCK, ParityReport, PrecisionParity

CARD = "README.md"
_TITLE = "## Precision"
_RANDOM = "random tokens, because the run's data was not at hand"


def add_precisions(
    folder: Path, config: RunConfig, report: ParityReport, *, is_text: bool = True
) -> None:
    """Add the section to the model card of an export.

    Args:
        folder: The export, with its card.
        config: The run's config.
        report: The comparison of the export with the trained model.
        is_text: False if they were compared on random tokens.
    """
    card = folder / CARD
    text = card.read_text(encoding="utf-8").rstrip()
    card.write_text(f"{text}\n\n{_section(config, report, is_text)}", encoding="utf-8")


def _section(config: RunConfig, report: ParityReport, is_text: bool) -> str:
    """Return the section: verdicts, and perplexities beside those of the trained model."""
    # Those of random tokens are far above any text's, and say nothing of how good the model is.
    what = "a piece of validation text" if is_text else _RANDOM
    longest = max(row.length for row in report.lengths)
    lines = [
        _TITLE,
        "",
        f"The weights are float32. Perplexity of {what}, by the trained model and by this "
        f"folder, at up to {longest:,} tokens:",
        "",
        "| loaded as | tokens | scored | trained model | this folder | difference |",
        "|---|---:|---:|---:|---:|---:|",
        *_rows(report),
        "",
        "Whether it is the trained model when it is loaded so:",
        "",
        *_verdicts(report),
    ]
    lines += [f"- vLLM: {reason}." for reason in vllm_reasons(config, export_class(config))]
    return "\n".join([*lines, ""])


def _rows(report: ParityReport) -> Iterator[str]:
    """Yield the rows of the table."""
    scored = {row.length: row.num_tokens for row in report.lengths}
    measured = [
        ("fp32", [(r.length, r.perplexity, r.exported_perplexity) for r in report.lengths]),
        *((_name(row), list(row.perplexities)) for row in report.precisions),
    ]
    for name, perplexities in measured:
        for length, ours, theirs in perplexities:
            cells = f"{length:,} | {scored[length]:,} | {ours:.2f} | {theirs:.2f}"
            yield f"| {name} | {cells} | {theirs / ours - 1:+.2%} |"


def _verdicts(report: ParityReport) -> Iterator[str]:
    """Yield "bf16: yes" or "bf16: no", for each way to load the folder."""
    yield f"- fp32: {'yes' if report.passed else 'no'}"
    for row in report.precisions:
        yield f"- {_name(row)}: {'yes' if row.passed else f'no, do not load it in {row.precision}'}"


def _name(row: PrecisionParity) -> str:
    """Return the precision, and how to load the folder if not with the stock class."""
    return row.precision if row.loader == STOCK else f"{row.precision} with `{row.loader}`"

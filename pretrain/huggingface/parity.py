"""Check that an exported model computes the same function as the model that was trained.

`transformers` loads the export as a user would and runs in fp32, and its logits are compared
with those of our own model on validation text, at the training length and beyond. The perplexity of
the same text is also measured in bf16 and fp16, in which the export's users run it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import ConfigError, RunConfig
from pretrain.config.describe import export_class, vllm_reasons
from pretrain.huggingface.table import is_own, model_class

PERPLEXITY_TOLERANCE = 1e-4
"""Largest relative difference of the perplexities: both print the same four digits."""
PRECISION_TOLERANCE = 5e-3
"""Largest relative difference of a perplexity in 16 bit from ours in fp32. Rounding of weights and
activations costs about a tenth of it, and rounded ALiBi biases twenty percent and more."""
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The 16-bit formats, by the names of train.precision."""
STOCK = "stock transformers"
TRUSTED = "trust_remote_code=True"
"""Ways to load a folder: with the stock class, or with the class in the folder."""


@dataclass(frozen=True)
class LengthParity:
    """The comparison at one sequence length."""

    length: int
    """Tokens in each sequence."""
    num_tokens: int
    """Number of predictions that were compared."""
    max_logit_difference: float
    logit_tolerance: float
    perplexity: float
    exported_perplexity: float

    @property
    def passed(self) -> bool:
        """Return True if logits and perplexity agree within tolerance; never for a NaN."""
        same_loss = abs(self.exported_perplexity / self.perplexity - 1) <= PERPLEXITY_TOLERANCE
        return self.max_logit_difference <= self.logit_tolerance and same_loss


@dataclass(frozen=True)
class PrecisionParity:
    """The perplexities of the export in a 16-bit format, compared with ours in fp32."""

    precision: str
    """ "bf16" or "fp16"."""
    loader: str
    """STOCK or TRUSTED."""
    perplexities: tuple[tuple[int, float, float], ...]
    """(length, our perplexity in fp32, the export's), of each length in tokens."""

    @property
    def differences(self) -> tuple[float, ...]:
        """Return the relative difference at each length."""
        return tuple(theirs / ours - 1 for _, ours, theirs in self.perplexities)

    @property
    def passed(self) -> bool:
        """Return True if they agree within tolerance at every length; never for a NaN."""
        return all(abs(difference) <= PRECISION_TOLERANCE for difference in self.differences)

    def format(self) -> str:
        """Return a line for the terminal."""
        parts = [
            f"{theirs:.4f} at {length:,} tokens ({difference:+.2%})"
            for (length, _, theirs), difference in zip(
                self.perplexities, self.differences, strict=True
            )
        ]
        verdict = "agrees" if self.passed else f"DIFFERS: do not load it in {self.precision} so"
        return f"{self.precision}, {self.loader}: perplexity {', '.join(parts)}; {verdict}"


@dataclass(frozen=True)
class ParityReport:
    """The comparison of an exported model with the trained one, at several lengths."""

    class_name: str
    """The class that loaded the folder."""
    lengths: tuple[LengthParity, ...]
    precisions: tuple[PrecisionParity, ...] = ()
    """The comparison in 16 bit, which does not decide whether the export succeeded."""
    where: str = "in stock transformers"
    """Where that class comes from."""
    warning: str = "DIFFERS from the trained model: do not use this export"
    """What is said when the models do not agree."""

    @property
    def passed(self) -> bool:
        """Return True if the models agree at every length."""
        return all(row.passed for row in self.lengths)

    def format(self) -> str:
        """Return a table for the terminal, with the verdict in its last line."""
        columns = (
            f"{'max logit diff':>16}  {'tolerance':>9}  {'perplexity':>10}  {'transformers':>12}"
        )
        lines = [f"{'tokens':>8}  {columns}"]
        for r in self.lengths:
            logits = f"{r.max_logit_difference:>16.1e}  {r.logit_tolerance:>9.1e}"
            perplexities = f"{r.perplexity:>10.4f}  {r.exported_perplexity:>12.4f}"
            mark = "" if r.passed else "  differs"
            lines.append(f"{r.length:>8}  {logits}  {perplexities}{mark}")
        verdict = "computes the same function" if self.passed else self.warning
        lines += [row.format() for row in self.precisions]
        return "\n".join([*lines, f"{self.class_name} {self.where} {verdict}"])


@torch.no_grad()
def check_parity(
    logits_fn: Callable[[Tensor], Tensor],
    hf_dir: str | Path,
    ids_by_length: Sequence[Tensor],
    *,
    precisions: Sequence[str] = (),
) -> ParityReport:
    """Compare fp32 logits and perplexity of our model and of the exported one.

    Args:
        logits_fn: Maps token ids [1, T] to our model's logits [1, T, V] in fp32, computed from fp32
            weights whatever precision the run trained in.
        hf_dir: Exported model.
        ids_by_length: For each length T, token ids [N, T]. They are run one row at a time, so that
            long sequences fit into memory.
        precisions: 16-bit formats in which the export's perplexity is measured too.

    Returns:
        The comparison at each length, in the order given.

    Raises:
        ConfigError: There is no exported model in `hf_dir`.
    """
    from transformers.utils.logging import disable_progress_bar

    # Loading takes seconds, and a progress bar would fill a log file.
    disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
    folder = Path(hf_dir)
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{hf_dir}: not an exported model (no config.json). `pretrain export` writes one"
        )
    # The first way is the one with the class of the whole folder.
    model = _load(folder, _loaders(folder)[0], torch.float32)
    lengths = tuple(_compare(logits_fn, model, ids) for ids in ids_by_length)
    name = type(model).__name__
    # One model in memory at a time.
    del model
    # Of few tokens, the perplexity is the same to every digit as that of the comparison in fp32.
    rows = [
        PrecisionParity(precision, loader, tuple(_perplexities(model, ids_by_length, lengths)))
        for loader in _loaders(folder)
        for precision in precisions
        for model in [_load(folder, loader, PRECISIONS[precision])]
    ]
    where = "in stock transformers" if STOCK in _loaders(folder) else "in the folder"
    return ParityReport(name, lengths, tuple(rows), where)


def _loaders(folder: Path) -> list[str]:
    """Return the ways to load a folder that there are."""
    settings = json.loads((folder / "config.json").read_text())
    if is_own(settings.get("model_type")):
        return [TRUSTED]
    return [STOCK, TRUSTED] if "auto_map" in settings else [STOCK]


def _load(folder: Path, loader: str, dtype: torch.dtype) -> Any:
    """Return the exported model on the CPU.

    Args:
        folder: The export.
        loader: STOCK, or TRUSTED for the class in the folder.
        dtype: Of the weights.
    """
    from pretrain.huggingface.modeling_bloom_fp32_scores import BloomFp32ScoresForCausalLM

    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    kind = model_class(model_type)
    if loader == TRUSTED and not is_own(model_type):
        kind = BloomFp32ScoresForCausalLM
    return kind.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def _perplexities(
    model: Any, ids_by_length: Sequence[Tensor], lengths: Sequence[LengthParity]
) -> Iterator[tuple[int, float, float]]:
    """Yield the length, our perplexity and the model's, for each length.

    Args:
        model: The exported model, on the CPU.
        ids_by_length: Token ids [N, T] of each length.
        lengths: The comparison in fp32 on the same ids.
    """
    for ids, row in zip(ids_by_length, lengths, strict=True):
        nats = 0.0
        for sequence in ids.long().cpu().unsqueeze(1).unbind(0):
            nats += _summed_loss(model(sequence, use_cache=False).logits.float(), sequence)
        yield row.length, row.perplexity, _exp(nats / row.num_tokens)


def _compare(logits_fn: Callable[[Tensor], Tensor], model: Any, ids: Tensor) -> LengthParity:
    """Compare the two models on token ids [N, T].

    Args:
        logits_fn: Maps token ids [1, T] to our model's logits [1, T, V].
        model: The exported model, on the CPU.
        ids: [N, T] token ids.
    """
    length = ids.shape[1]
    difference = largest = nats = exported_nats = 0.0
    for row in ids.long().unsqueeze(1).unbind(0):
        ours, theirs = logits_fn(row).cpu(), model(row.cpu(), use_cache=False).logits
        difference = _max_or_nan(difference, (ours - theirs).abs().max().item())
        largest = _max_or_nan(largest, ours.abs().max().item())
        nats += _summed_loss(ours, row.cpu())
        exported_nats += _summed_loss(theirs, row.cpu())
    # Both models compute the same sums in another order. Rounding contributes at most 2^-24 of the
    # result for each term, on either side, and the longest sums have T terms (attention) or
    # hidden_size terms (linear layers). Positions add an error of the same size: an ALiBi bias or
    # a rotary angle near position T is rounded by T x 2^-24. The largest difference seen was a
    # sixth of this bound. In the perplexity the rounding averages out.
    tolerance = 2.0**-23 * max(length, model.config.hidden_size) * largest
    scored = ids.shape[0] * (length - 1)
    perplexities = _exp(nats / scored), _exp(exported_nats / scored)
    return LengthParity(length, scored, difference, tolerance, *perplexities)


def _summed_loss(logits: Tensor, ids: Tensor) -> float:
    """Return the summed loss in nats of tokens 1 .. T - 1 of ids [1, T] under logits [1, T, V]."""
    return F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()


def _exp(nats: float) -> float:
    """Return the perplexity of a loss in nats; infinity where it is beyond a float."""
    return math.exp(nats) if not nats > 700 else math.inf


def _max_or_nan(a: float, b: float) -> float:
    """Return the larger value, or nan if either is nan; max() would depend on their order."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


# ---- Write on the model card in which precisions an export may be loaded, as it was measured ----


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

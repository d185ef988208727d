"""Is the exported model the same function? Stock `transformers` in fp32 against our own logits, on real text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import ConfigError

PERPLEXITY_TOLERANCE = 1e-4
"""Relative: both perplexities print the same four digits."""


@dataclass(frozen=True)
class LengthParity:
    """What was seen at one length."""

    length: int
    num_tokens: int
    """Predictions scored."""
    max_logit_difference: float
    logit_tolerance: float
    perplexity: float
    exported_perplexity: float

    @property
    def passed(self) -> bool:
        """False for NaN as well."""
        same_loss = abs(self.exported_perplexity / self.perplexity - 1) <= PERPLEXITY_TOLERANCE
        return self.max_logit_difference <= self.logit_tolerance and same_loss


@dataclass(frozen=True)
class ParityReport:
    """Ours against the exported model, length by length."""

    class_name: str
    lengths: tuple[LengthParity, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.lengths)

    def format(self) -> str:
        """A table for the terminal, the verdict on its last line."""
        lines = [
            f"{'tokens':>8}  {'logits differ by':>16}  {'tolerance':>9}  {'perplexity':>10}  {'exported':>10}"
        ]
        for r in self.lengths:
            lines.append(
                f"{r.length:>8}  {r.max_logit_difference:>16.1e}  {r.logit_tolerance:>9.1e}  {r.perplexity:>10.4f}  "
                f"{r.exported_perplexity:>10.4f}{'' if r.passed else '  differs'}"
            )
        verdict = (
            "computes the same function"
            if self.passed
            else "DIFFERS from the trained model: do not use the export"
        )
        return "\n".join([*lines, f"{self.class_name} in stock transformers {verdict}"])


@torch.no_grad()
def check_parity(
    logits_fn: Callable[[Tensor], Tensor], hf_dir: str | Path, ids_by_length: Sequence[Tensor]
) -> ParityReport:
    """Compares fp32 logits and perplexity on each of `ids_by_length` ([N, T] token ids, T the length), a row at a time.

    `logits_fn`: ids [1, T] -> our logits [1, T, V] in fp32, from fp32 weights whatever the run trained in. The logits
    may differ by 2^-23 x max(T, hidden size) x the largest logit: the rounding of sums that long, 2^-24 a term, on
    both sides. Positions enter alike: a bias or an angle near T is rounded at T x 2^-24. (Seen: up to a sixth of it.)
    The rounding averages out in the perplexity, which must agree to 1e-4.

    Raises ConfigError when there is no exported model in `hf_dir`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # loading takes seconds, and a bar fills a log
    if not Path(hf_dir, "config.json").exists():
        raise ConfigError(
            f"{hf_dir}: no exported model (config.json) there. `pretrain export` writes one"
        )
    model = AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=torch.float32, local_files_only=True
    ).eval()
    rows = []
    for ids in ids_by_length:
        length, difference, largest, nats, exported_nats = ids.shape[1], 0.0, 0.0, 0.0, 0.0
        for row in ids.long().split(1):
            ours, theirs = logits_fn(row).cpu(), model(row.cpu(), use_cache=False).logits
            difference = _larger(difference, (ours - theirs).abs().max().item())
            largest = _larger(largest, ours.abs().max().item())
            nats, exported_nats = (
                nats + _nats(ours, row.cpu()),
                exported_nats + _nats(theirs, row.cpu()),
            )
        scored = ids.shape[0] * (length - 1)
        tolerance = 2.0**-23 * max(length, model.config.hidden_size) * largest
        perplexities = math.exp(nats / scored), math.exp(exported_nats / scored)
        rows.append(LengthParity(length, scored, difference, tolerance, *perplexities))
    return ParityReport(type(model).__name__, tuple(rows))


def _nats(logits: Tensor, ids: Tensor) -> float:
    """Summed loss of predicting ids [1, T] from the left, the first token excepted."""
    return F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()


def _larger(a: float, b: float) -> float:
    """max that keeps a NaN, wherever it stands."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)

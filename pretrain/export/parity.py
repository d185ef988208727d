"""Check that an exported model computes the same function as the model that was trained.

Stock `transformers` loads the export as a user would and runs in fp32, and its logits are compared
with those of our own model on validation text, at the training length and beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import ConfigError

PERPLEXITY_TOLERANCE = 1e-4
"""Largest relative difference of the perplexities: both print the same four digits."""


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
class ParityReport:
    """The comparison of an exported model with the trained one, at several lengths."""

    class_name: str
    """The transformers class that loaded the folder."""
    lengths: tuple[LengthParity, ...]
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
        return "\n".join([*lines, f"{self.class_name} in stock transformers {verdict}"])


@torch.no_grad()
def check_parity(
    logits_fn: Callable[[Tensor], Tensor], hf_dir: str | Path, ids_by_length: Sequence[Tensor]
) -> ParityReport:
    """Compare fp32 logits and perplexity of our model and of the exported one.

    Args:
        logits_fn: Maps token ids [1, T] to our model's logits [1, T, V] in fp32, computed from fp32
            weights whatever precision the run trained in.
        hf_dir: Exported model.
        ids_by_length: For each length T, token ids [N, T]. They are run one row at a time, so that
            long sequences fit into memory.

    Returns:
        The comparison at each length, in the order given.

    Raises:
        ConfigError: There is no exported model in `hf_dir`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    # Loading takes seconds, and a progress bar would fill a log file.
    disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
    if not Path(hf_dir, "config.json").exists():
        raise ConfigError(
            f"{hf_dir}: not an exported model (no config.json). `pretrain export` writes one"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=torch.float32, local_files_only=True
    )
    model.eval()
    lengths = tuple(_compare(logits_fn, model, ids) for ids in ids_by_length)
    return ParityReport(type(model).__name__, lengths)


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
    perplexities = math.exp(nats / scored), math.exp(exported_nats / scored)
    return LengthParity(length, scored, difference, tolerance, *perplexities)


def _summed_loss(logits: Tensor, ids: Tensor) -> float:
    """Return the summed loss in nats of tokens 1 .. T - 1 of ids [1, T] under logits [1, T, V]."""
    return F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()


def _max_or_nan(a: float, b: float) -> float:
    """Return the larger value, or nan if either is nan; max() would depend on their order."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)

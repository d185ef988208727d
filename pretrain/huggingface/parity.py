"""Check that an exported model computes the same function as the model that was trained.

`transformers` loads the export as a user would and runs it in fp32. Its logits are compared with
those of our own model on validation text, at the training length and beyond. The perplexity of the
same text is also measured in bf16 and fp16, in which users run the export.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.evaluation.records import Table, bounded_exp
from pretrain.huggingface.classes import CLASSES
from pretrain.platform import release_memory

PRECISION_TOLERANCE = 5e-3
"""Largest allowed relative difference between a perplexity in 16 bit and ours in fp32. Rounding of
weights and activations causes about a tenth of it; rounded ALiBi biases change the perplexity by
twenty percent and more."""
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The 16-bit formats, by the names of train.precision."""


@dataclass(frozen=True)
class Parity:
    """The comparison with the trained model in fp32, in one format at one sequence length."""

    precision: str
    """ "fp32", "bf16" or "fp16"."""
    length: int
    """Tokens in each sequence."""
    num_tokens: int
    """Number of predictions that were compared."""
    perplexity: float
    """Ours, in fp32."""
    exported_perplexity: float
    max_logit_difference: float = 0.0
    logit_tolerance: float = math.inf
    """Largest allowed difference of logits; infinite in 16 bit, where logits are not compared."""

    @property
    def difference(self) -> float:
        """Return the relative difference of the perplexities."""
        return self.exported_perplexity / self.perplexity - 1

    @property
    def passed(self) -> bool:
        """Return True if the two agree within tolerance; False for a NaN."""
        if self.precision in PRECISIONS:
            return abs(self.difference) <= PRECISION_TOLERANCE
        # If logits change by at most d, a loss changes by at most 2 d: the target's logit by d, and
        # the logarithm of the sum by d. A bound on logits therefore bounds perplexity too. A
        # separate bound on it would refuse correct models with large losses, as on random tokens.
        return self.max_logit_difference <= self.logit_tolerance


@dataclass(frozen=True)
class ParityReport:
    """The comparison of a Hugging Face model with ours, at several lengths."""

    class_name: str
    """The class that loaded the folder."""
    rows: tuple[Parity, ...]

    @property
    def passed(self) -> bool:
        """Return True if the models agree at every length in fp32; 16 bit does not count."""
        return all(row.passed for row in self.rows if row.precision not in PRECISIONS)

    def table(self, title: str) -> Table:
        """Return the comparison as a table under a title."""
        header = ["loaded as", "tokens", "scored", "trained model", "this folder", "difference"]
        header += ["logits differ by", "allowed"]
        cells = []
        for row in self.rows:
            perplexities = f"{row.perplexity:.4f}", f"{row.exported_perplexity:.4f}"
            logits = f"{row.max_logit_difference:.1e}", f"{row.logit_tolerance:.1e}"
            counts = f"{row.length:,}", f"{row.num_tokens:,}"
            cells.append([row.precision, *counts, *perplexities, f"{row.difference:+.2%}"])
            cells[-1] += ["", ""] if row.precision in PRECISIONS else logits
        return Table(title, header, cells, names=1)

    def verdicts(self) -> list[str]:
        """Return "bf16: yes" or "bf16: no, ...", for each format."""
        found = []
        for precision, rows in groupby(self.rows, lambda row: row.precision):
            passed = all(row.passed for row in rows)
            said = "yes" if passed else f"no, do not load it in {precision}"
            found.append(f"{precision}: {said}")
        return found

    def format(self) -> str:
        """Return a table for the terminal, with the verdict in its last line."""
        table = self.table("Perplexity, and the largest difference of logits").plain()
        verdict = "computes the same function" if self.passed else "DIFFERS: do not use this folder"
        return "\n".join([table, *self.verdicts(), f"{self.class_name} {verdict}"])


@torch.no_grad()
def check_parity(
    logits_fn: Callable[[Tensor], Tensor],
    folder: Path,
    ids_by_length: Sequence[Tensor],
    *,
    precisions: Sequence[str] = (),
) -> ParityReport:
    """Compare fp32 logits and perplexity of our model and of a Hugging Face folder's.

    Args:
        logits_fn: Maps token ids [1, T] to our model's logits [1, T, V] in fp32, computed from fp32
            weights, whatever precision the run trained in.
        folder: The folder.
        ids_by_length: For each length T, token ids [N, T]. They are run one row at a time, so that
            long sequences fit into memory.
        precisions: 16-bit formats in which the folder's perplexity is measured too.
    """
    found = CLASSES[json.loads((folder / "config.json").read_text())["model_type"]]
    model = found.load(folder, dtype=torch.float32).eval()
    name = type(model).__name__
    width = model.config.hidden_size

    def model_logits(one: Tensor) -> Tensor:
        return model(one, use_cache=False).logits  # type: ignore[no-any-return]  # untyped in transformers

    rows = [compare(logits_fn, model_logits, ids, width) for ids in ids_by_length]
    ours = list(zip(ids_by_length, rows, strict=True))
    for precision in precisions:
        # Keep only one model in memory.
        del model
        release_memory()
        model = found.load(folder, dtype=PRECISIONS[precision]).eval()
        for ids, row in ours:
            nats = sum(_summed_loss(model_logits(one), one) for one in _sequences(ids))
            theirs = bounded_exp(nats / row.num_tokens)
            rows.append(Parity(precision, row.length, row.num_tokens, row.perplexity, theirs))
    return ParityReport(name, tuple(rows))


@torch.no_grad()
def compare(
    logits_fn: Callable[[Tensor], Tensor],
    theirs_fn: Callable[[Tensor], Tensor],
    ids: Tensor,
    width: int,
    rounding: float = 0.0,
) -> Parity:
    """Compare our model with another program's in fp32, one sequence at a time.

    Args:
        logits_fn: As for `check_parity`.
        theirs_fn: The same function of the other program.
        ids: Token ids [N, T].
        width: hidden_size.
        rounding: Error allowed beyond fp32 rounding, relative to the largest logit.
    """
    length = ids.shape[1]
    differences, sizes, nats, exported_nats = [], [], 0.0, 0.0
    for one in _sequences(ids):
        ours, theirs = logits_fn(one.to(ids.device)).cpu(), theirs_fn(one)
        differences.append((ours - theirs).abs().max())
        sizes.append(ours.abs().max())
        nats += _summed_loss(ours, one)
        exported_nats += _summed_loss(theirs, one)
    # The models compute the same sums in different orders. In each model, rounding contributes at
    # most 2^-24 of the result per term, and the longest sums have T terms (attention) or
    # hidden_size terms (linear layers). Positions add an error of the same size: an ALiBi bias or
    # a rotary angle near position T is rounded by T x 2^-24. The largest difference seen was a
    # sixth of this bound. In the perplexity, rounding errors average out.
    largest = torch.stack(sizes).max().item()
    tolerance = (2.0**-23 * max(length, width) + rounding) * largest
    scored = ids.shape[0] * (length - 1)
    perplexities = bounded_exp(nats / scored), bounded_exp(exported_nats / scored)
    # torch's max returns NaN if any number is NaN, unlike Python's.
    difference = torch.stack(differences).max().item()
    return Parity("fp32", length, scored, *perplexities, difference, tolerance)


def _sequences(ids: Tensor) -> tuple[Tensor, ...]:
    """Return token ids [N, T] as N tensors [1, T] in the host's memory."""
    return ids.long().cpu().unsqueeze(1).unbind(0)


def _summed_loss(logits: Tensor, ids: Tensor) -> float:
    """Return the summed loss in nats of tokens 1 .. T - 1 of ids [1, T] under logits [1, T, V]."""
    return F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum").item()

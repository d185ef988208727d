"""Check that an exported model computes the same function as the model that was trained.

`transformers` loads the export as a user would and runs in fp32, and its logits are compared
with those of our own model on validation text, at the training length and beyond. The perplexity of
the same text is also measured in bf16 and fp16, in which the export's users run it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import ConfigError, RunConfig
from pretrain.evaluation.curves import Table
from pretrain.huggingface.card import CARD
from pretrain.huggingface.classes import CLASSES, class_of

PERPLEXITY_TOLERANCE = 1e-4
"""Largest relative difference of the perplexities in fp32: both print the same four digits."""
PRECISION_TOLERANCE = 5e-3
"""Largest relative difference of a perplexity in 16 bit from ours in fp32. Rounding of weights and
activations costs about a tenth of it, and rounded ALiBi biases twenty percent and more."""
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The 16-bit formats, by the names of train.precision."""
STOCK = "stock transformers"
TRUSTED = "trust_remote_code=True"
"""Ways to load a folder: with the stock class, or with the class in the folder."""


@dataclass(frozen=True)
class Parity:
    """The comparison with the trained model in fp32, in one format at one sequence length."""

    precision: str
    """ "fp32", "bf16" or "fp16"."""
    loader: str
    """STOCK or TRUSTED."""
    length: int
    """Tokens in each sequence."""
    num_tokens: int
    """Number of predictions that were compared."""
    perplexity: float
    """Ours, in fp32."""
    exported_perplexity: float
    max_logit_difference: float = 0.0
    logit_tolerance: float = math.inf
    """Logits are compared in fp32 only."""

    @property
    def name(self) -> str:
        """Return the precision, and how to load the folder if not with the stock class."""
        return self.precision if self.loader == STOCK else f"{self.precision} with `{self.loader}`"

    @property
    def difference(self) -> float:
        """Return the relative difference of the perplexities."""
        return self.exported_perplexity / self.perplexity - 1

    @property
    def passed(self) -> bool:
        """Return True if logits and perplexity agree within tolerance; never for a NaN."""
        tolerance = PRECISION_TOLERANCE if self.precision in PRECISIONS else PERPLEXITY_TOLERANCE
        same_logits = self.max_logit_difference <= self.logit_tolerance
        return same_logits and abs(self.difference) <= tolerance


@dataclass(frozen=True)
class ParityReport:
    """The comparison of an exported model with the trained one, at several lengths."""

    class_name: str
    """The class that loaded the folder."""
    rows: tuple[Parity, ...]
    where: str = "in stock transformers"
    """Where that class comes from."""
    warning: str = "DIFFERS from the trained model: do not use this export"
    """What is said when the models do not agree."""

    @property
    def passed(self) -> bool:
        """Return True if the models agree at every length. 16 bit does not decide."""
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
            cells.append([row.name, *counts, *perplexities, f"{row.difference:+.2%}"])
            cells[-1] += ["", ""] if row.precision in PRECISIONS else logits
        return Table(title, header, cells, names=1)

    def verdicts(self) -> list[str]:
        """Return "bf16: yes" or "bf16: no, ...", for each way to load the folder."""
        found = []
        for name, rows in groupby(self.rows, lambda row: row.name):
            of_name = list(rows)
            passed = all(row.passed for row in of_name)
            said = "yes" if passed else f"no, do not load it in {of_name[0].precision}"
            found.append(f"{name}: {said}")
        return found

    def format(self) -> str:
        """Return a table for the terminal, with the verdict in its last line."""
        table = self.table("Perplexity, and the largest difference of logits").plain()
        verdict = "computes the same function" if self.passed else self.warning
        last = f"{self.class_name} {self.where} {verdict}"
        return "\n".join([table, *self.verdicts(), last])


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
    folder = Path(hf_dir)
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{hf_dir}: not an exported model (no config.json). `pretrain export` writes one"
        )
    settings = json.loads((folder / "config.json").read_text())
    found = CLASSES[settings["model_type"]]
    # A folder of this class that is not an export of ours brings no code of ours along. The first
    # way is the one with the class of the whole folder.
    has_code = found.code and "auto_map" in settings
    loaders = [TRUSTED] if found.stock else [STOCK, TRUSTED] if has_code else [STOCK]
    model = found.load(folder, with_code=loaders[0] == TRUSTED, dtype=torch.float32).eval()
    rows = [_compare(logits_fn, model, loaders[0], ids) for ids in ids_by_length]
    ours = [(row.perplexity, row.num_tokens) for row in rows]
    name = type(model).__name__
    # One model in memory at a time.
    del model
    for loader in loaders:
        for precision in precisions:
            model = found.load(
                folder, with_code=loader == TRUSTED, dtype=PRECISIONS[precision]
            ).eval()
            for ids, (perplexity, scored) in zip(ids_by_length, ours, strict=True):
                theirs = _exp(_summed_losses(model, ids) / scored)
                rows.append(Parity(precision, loader, ids.shape[1], scored, perplexity, theirs))
            del model
    where = "in stock transformers" if STOCK in loaders else "in the folder"
    return ParityReport(name, tuple(rows), where)


def _compare(logits_fn: Callable[[Tensor], Tensor], model: Any, loader: str, ids: Tensor) -> Parity:
    """Compare the two models in fp32 on token ids [N, T], one sequence at a time."""
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
    return Parity("fp32", loader, length, scored, *perplexities, difference, tolerance)


def _summed_losses(model: Any, ids: Tensor) -> float:
    """Return the summed loss in nats of a transformers model on token ids [N, T]."""
    rows = ids.long().cpu().unsqueeze(1).unbind(0)
    return sum(_summed_loss(model(row, use_cache=False).logits.float(), row) for row in rows)


def _summed_loss(logits: Tensor, ids: Tensor) -> float:
    """Return the summed loss in nats of tokens 1 .. T - 1 of ids [1, T] under logits [1, T, V]."""
    return F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()


def _exp(nats: float) -> float:
    """Return the perplexity of a loss in nats; infinity where it is beyond a float."""
    return math.exp(nats) if not nats > 700 else math.inf


def _max_or_nan(a: float, b: float) -> float:
    """Return the larger value, or nan if either is nan; max() would depend on their order."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def add_precisions(
    folder: Path, config: RunConfig, report: ParityReport, *, is_text: bool = True
) -> None:
    """Write on the model card of an export in which precisions it may be loaded, as was measured.

    Args:
        folder: The export, with its card.
        config: The run's config.
        report: The comparison of the export with the trained model.
        is_text: False if they were compared on random tokens.
    """
    # Those of random tokens are far above any text's, and say nothing of how good the model is.
    random = "random tokens, because the run's data was not at hand"
    what = "a piece of validation text" if is_text else random
    lines = [
        "## Precision",
        "",
        report.table(
            f"The weights are float32. Perplexity of {what}, by the trained model and by this "
            "folder"
        ).markdown(),
        "",
        "Whether it is the trained model when it is loaded so:",
        "",
        *(f"- {verdict}" for verdict in report.verdicts()),
        *(f"- vLLM: {reason}." for reason in class_of(config).vllm_reasons(config)),
    ]
    card = folder / CARD
    text = "\n".join([card.read_text(encoding="utf-8").rstrip(), "", *lines, ""])
    card.write_text(text, encoding="utf-8")

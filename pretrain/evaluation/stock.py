"""Score a text with a Hugging Face model, in the windows that our own models are scored in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pretrain.config import ConfigError
from pretrain.evaluation.perplexity import Evaluation
from pretrain.evaluation.records import PositionLosses
from pretrain.evaluation.windows import Protocol, Window, block_ends

TOKENS_PER_BATCH = 8192
"""Tokens that a forward pass reads, rounded down to whole windows (at least one)."""


def evaluate_stock(
    model: Any,
    token_ids: Sequence[int] | Tensor,
    lengths: Sequence[int],
    protocols: Sequence[str],
    stride: int | None = None,
    max_tokens: int | None = None,
    eos_id: int | None = None,
) -> list[dict[str, Any]]:
    """Measure perplexity at several lengths with a transformers model that predicts next tokens.

    Args:
        model: Called as model(input_ids=[B, T]).logits, [B, T, vocabulary].
        token_ids: The text, [T + 1]. The first token is context and is not scored.
        lengths: Window lengths in tokens.
        protocols: "nonoverlapping" and "sliding".
        stride: Tokens from one sliding window to the next; None for the shortest length.
        max_tokens: Score at most so many tokens.
        eos_id: Token that ends documents, where blocks for the interval prefer to end; None for
            that of the model's config.

    Returns:
        Records with the keys of `records.FIELDS` that say what was measured.

    Raises:
        ConfigError: The text is shorter than a length, or a protocol is not one of the two.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long).flatten()
    tokens = min(len(ids) - 1, max_tokens or len(ids))
    if wrong := [n for n in lengths if not 0 < n <= tokens]:
        raise ConfigError(f"lengths = {wrong}: the text has {tokens} tokens to score")
    if set(protocols) - {"nonoverlapping", "sliding"}:
        raise ConfigError(f"protocols = {list(protocols)}: there are nonoverlapping and sliding")
    eos = eos_id if eos_id is not None else getattr(model.config, "eos_token_id", None)
    # A list of several ends, as some configs have, chooses none of them for the blocks.
    ends = block_ends(ids[1 : tokens + 1].numpy(), eos if isinstance(eos, int) else -1)
    step = stride or min(lengths)
    records = []
    for name in protocols:
        for length in sorted(set(lengths)):
            protocol = Protocol(name, length, min(step, length))
            if name == "sliding" and protocol.stride == length and "nonoverlapping" in protocols:
                # The same windows.
                continue
            records.append(_evaluate(model, ids, tokens, protocol, ends).record())
    return records


def _evaluate(model: Any, ids: Tensor, tokens: int, protocol: Protocol, ends: Any) -> Evaluation:
    """Score every token once under one protocol."""
    losses = np.zeros(tokens)
    sums, counts = np.zeros(protocol.length), np.zeros(protocol.length, dtype=np.int64)
    was_training = model.training
    model.eval()
    try:
        batch: list[Window] = []
        for window in [*protocol.windows(tokens), None]:
            full = len(batch) * protocol.length + protocol.length > max(
                TOKENS_PER_BATCH, protocol.length
            )
            if batch and (window is None or full or window.size != batch[0].size):
                for each, row in zip(batch, _losses(model, ids, batch)):
                    first = each.size - each.scored
                    losses[each.start + first : each.start + each.size] = row[first:]
                    sums[first : each.size] += row[first:]
                    counts[first : each.size] += 1
                batch = []
            if window is not None:
                batch.append(window)
    finally:
        model.train(was_training)
    block_losses = np.add.reduceat(losses, [0, *ends[:-1]])
    with np.errstate(invalid="ignore"):
        by_position = PositionLosses(sums / counts, counts)
    block_tokens = np.diff([0, *ends]).astype(np.float64)
    mean = float(losses.sum() / tokens)
    return Evaluation(protocol, mean, tokens, 0, by_position, block_losses, block_tokens)


@torch.no_grad()
def _losses(model: Any, ids: Tensor, windows: Sequence[Window]) -> Any:
    """Return the losses of windows of one size in nats, [windows, size], fp64."""
    rows = torch.stack([ids[w.start : w.start + w.size + 1] for w in windows])
    rows = rows.to(next(model.parameters()).device)
    logits = model(input_ids=rows[:, :-1]).logits.float()
    flat = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return flat.double().view(len(windows), -1).cpu().numpy()

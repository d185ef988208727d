"""Refuse adaptive inputs and an adaptive softmax that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from pretrain.config.refusal import Refusal

if TYPE_CHECKING:
    # RunConfig.layout applies these rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig


def check_adaptive(c: RunConfig) -> Iterator[Refusal]:
    """Check the clusters of words, and that one rank holds all of them."""
    m, p = c.model, c.parallel
    if m.adaptive_cutoffs is None:
        yield from _unused(c)
        return
    cutoffs = list(m.adaptive_cutoffs)
    if not cutoffs or any(a >= b for a, b in pairwise([*cutoffs, c.data.vocab_size])):
        yield Refusal(
            "model.adaptive_cutoffs",
            cutoffs,
            "not the rising first ids of one or more tails of a vocabulary of data.vocab_size = "
            f"{c.data.vocab_size}",
            f"Choose rising numbers below {c.data.vocab_size}, or remove the key",
        )
    if m.adaptive_factor ** len(cutoffs) > m.hidden_size:
        yield Refusal(
            "model.adaptive_factor",
            m.adaptive_factor,
            f"leaves no channel of model.hidden_size = {m.hidden_size} to the last of "
            f"{len(cutoffs)} tails",
            "Lower it, or give model.adaptive_cutoffs fewer numbers",
        )
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(p, key)) > 1:
            yield Refusal(
                f"parallel.{key}",
                size,
                "every rank needs all of the adaptive inputs and the adaptive softmax of "
                "model.adaptive_cutoffs",
                f"Set parallel.{key} = 1; data parallelism and parallel.zero_stage work",
            )


def _unused(c: RunConfig) -> Iterator[Refusal]:
    """Refuse settings of an adaptive softmax without one."""
    for name in ("adaptive_factor", "adaptive_dropout"):
        value = getattr(c.model, name)
        if value != type(c.model).model_fields[name].default:
            yield Refusal(
                f"model.{name}",
                value,
                "there is no adaptive softmax",
                "Remove the key, or set model.adaptive_cutoffs",
            )

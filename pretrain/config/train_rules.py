"""Refuse steps to profile that a run does not take, and what a masked objective cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrain.config.refusal import Refusal

if TYPE_CHECKING:
    # RunConfig.layout applies these rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig


def check_profile(c: RunConfig) -> Iterator[Refusal]:
    """Check that the run has the steps of train.profile_steps."""
    if c.train.profile_steps is None:
        return
    first, last = c.train.profile_steps
    if not first <= last <= c.train.num_steps:
        yield Refusal(
            "train.profile_steps",
            [first, last],
            "not the first and the last of some steps of a run of train.num_steps = "
            f"{c.train.num_steps}",
            f"Choose [first, last] within 1 to {c.train.num_steps}, or remove the key",
        )


def check_objective(c: RunConfig) -> Iterator[Refusal]:
    """Check that nothing of a run with masked tokens needs a causal mask."""
    if not c.is_masked:
        return
    causal = 'Set train.objective = "next_token"'
    if c.data.per_document_attention:
        yield Refusal(
            "data.per_document_attention",
            True,
            'documents are parted under a causal mask, and train.objective = "masked" looks both '
            "ways",
            f"Remove the key. {causal} to train within documents",
        )
    if c.model.adaptive_cutoffs is not None:
        yield Refusal(
            "model.adaptive_cutoffs",
            list(c.model.adaptive_cutoffs),
            'its rows are words, and train.objective = "masked" needs one for the mask',
            f"Remove the key. {causal} to train with an adaptive softmax",
        )
    if c.position.method == "t5" and c.position.relative_attention_num_buckets < 4:
        yield Refusal(
            "position.relative_attention_num_buckets",
            c.position.relative_attention_num_buckets,
            'with train.objective = "masked" half of the buckets are for the tokens that follow',
            "Choose 4 or more",
        )
    if "sliding" in c.evaluation.protocols:
        yield Refusal(
            "evaluation.protocols",
            list(c.evaluation.protocols),
            "a sliding window gives each token more of what is before it, and train.objective = "
            '"masked" looks both ways',
            'Set evaluation.protocols = ["nonoverlapping"], or remove the key',
        )

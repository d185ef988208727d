"""Refuse settings of an optimizer that the run does not have, and a warm-up that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrain.config.refusal import Refusal

if TYPE_CHECKING:
    # RunConfig.layout applies these rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig

OWN_KEYS = {"adamw": ("adam_beta1", "adam_beta2", "adam_eps"), "nag": ("momentum",)}
"""optimizer.name -> keys of [optimizer] that it alone reads."""


def check_optimizer(c: RunConfig) -> Iterator[Refusal]:
    """Check that [optimizer] has keys of its own optimizer, and no decay beyond zero."""
    o = c.optimizer
    if o.name == "nag" and o.learning_rate * o.weight_decay >= 1:
        # AdamW's rates are far from this. NAG's are not, and the default decay is AdamW's.
        yield Refusal(
            "optimizer.weight_decay",
            o.weight_decay,
            f"each update multiplies matrices by 1 - {o.learning_rate} x {o.weight_decay}, which "
            "leaves nothing of them",
            f"Choose less than {1 / o.learning_rate:.3g}, or 0 as the published runs",
        )
    for name, keys in OWN_KEYS.items():
        for key in keys if name != o.name else ():
            value = getattr(o, key)
            if value != type(o).model_fields[key].default:
                yield Refusal(
                    f"optimizer.{key}",
                    value,
                    f'optimizer.name = "{o.name}" does not read it',
                    f'Remove the key, or set optimizer.name = "{name}"',
                )


def check_warmup_init(c: RunConfig) -> Iterator[Refusal]:
    """Check that the warm-up begins somewhere below the peak."""
    begin, peak = c.schedule.lr_warmup_init, c.optimizer.learning_rate
    if not begin:
        return
    if not c.schedule.lr_warmup_steps:
        yield Refusal(
            "schedule.lr_warmup_init",
            begin,
            "there is no warm-up",
            "Remove the key, or set schedule.lr_warmup_steps",
        )
    elif begin > peak:
        yield Refusal(
            "schedule.lr_warmup_init",
            begin,
            f"above optimizer.learning_rate = {peak}, which the warm-up leads to",
            f"Choose {peak} or less",
        )

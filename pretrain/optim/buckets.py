"""Divide a rank's parameters into buckets, the units of reduction, update and gathering at ZeRO 1.

A bucket becomes one parameter group of AdamW. DeepSpeed lays each group out in one flat tensor and
cuts it evenly over the data-parallel ranks, so every rank owns a part of every bucket, and a bucket
can be reduce-scattered as soon as its gradients are complete. Megatron's own distributed optimizer
divides its buckets in the same way (megatron/core/distributed/param_and_grad_buffer.py), but its
buckets mix parameters with and without weight decay, which DeepSpeed's groups cannot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from pretrain.config import RunConfig
from pretrain.model.parameters import Named
from pretrain.optim.cutting import Piece, Settings, cut
from pretrain.optim.gradients import is_completed_late


@dataclass(frozen=True)
class Bucket:
    """Parameters that are laid out together, reduced together and updated alike."""

    parameters: list[nn.Parameter]

    weight_decay: float

    lr_mult: float
    """Factor on the learning rate; the name is Megatron's (megatron/core/optimizer)."""

    is_late: bool
    """True if the gradients are complete only after `finalize_gradients`, so that their reduction
    cannot start within the backward pass."""

    is_copy: bool
    """True if another tensor rank or pipeline stage holds the same parameters, and counts them in
    the global norm."""


def plan_buckets(config: RunConfig, parameters: Iterable[Named]) -> list[Bucket]:
    """Return the buckets of a rank, in the order in which the backward pass completes them.

    Args:
        config: The run; its weight decay and factors on the learning rate.
        parameters: All parameters of this rank, in the order of its chunks. A backward pass
            completes them in about the reverse order.
    """
    members = list(parameters)
    pieces = [
        Piece(
            named.name,
            named.parameter.numel(),
            is_completed_late(named),
            _settings(config, named),
            is_replicated=named.shape == named.global_shape,
        )
        for named in members
    ]
    return [
        Bucket(
            [members[number].parameter for number in part],
            *pieces[part[0]].settings,
            is_late=pieces[part[0]].is_late,
            is_copy=_is_copy([members[number] for number in part]),
        )
        for part in cut(pieces)
    ]


def plan_groups(config: RunConfig, parameters: Iterable[Named]) -> list[Bucket]:
    """Return the parameters in groups of equal settings, for ZeRO 2 and 3, which cut buckets.

    Args:
        config: The run; its weight decay and factors on the learning rate.
        parameters: All parameters of this rank.
    """
    groups: dict[Settings, list[nn.Parameter]] = {}
    for named in parameters:
        groups.setdefault(_settings(config, named), []).append(named.parameter)
    return [
        Bucket(groups[settings], *settings, is_late=False, is_copy=False)
        for settings in sorted(groups, reverse=True)
    ]


def _settings(config: RunConfig, named: Named) -> Settings:
    """Return a parameter's weight decay and the factor on its learning rate.

    Matrices are decayed; biases, norms and what the position method learns per head are not.
    """
    if named.name.startswith("position."):
        return 0.0, config.optimizer.position_learning_rate_mult
    return config.optimizer.weight_decay if len(named.global_shape) == 2 else 0.0, 1.0


def _is_copy(members: list[Named]) -> bool:
    """Return True if the members are copies: all are or none is, since they are of one kind."""
    [is_copy] = {named.is_copy for named in members}
    return is_copy

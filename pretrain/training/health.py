"""Stop a run whose state is poisoned, or whose ranks no longer train the same model.

The ranks compare checksums of all that they must hold alike (pretrain/optim/health.py) and of their
counters, and see that masters and moments are finite and of a size that training can make. In the
usual case that is one kernel for each tensor, one small all-reduce for each group of ranks and one
for all, and one wait of the host. Only when something is wrong do the ranks exchange what it is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain import platform
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import ConfigError, Diverged, Poisoned, RunFailed
from pretrain.config.trajectory import DIGITS
from pretrain.optim.health import (
    Copies,
    checksum,
    find_copies,
    implausible_state,
    state_is_plausible,
    update_counts,
)
from pretrain.rundir.files import say
from pretrain.topology import host_name
from pretrain.training.spikes import Spike
from pretrain.training.start import Run
from pretrain.training.step import Hook

MOST_LINES = 5
"""Parameters that a message names; of the others it says how many there are."""
COUNTERS = ("steps done", "samples consumed", "fewest updates", "most updates", "loss window")
"""What all ranks count alike."""


@dataclass(frozen=True)
class Findings:
    """The findings of a check on this rank, on the device."""

    copies: list[Copies]
    checksums: list[Tensor]
    """Of each of `copies`, int64 [tensors]."""
    differs: list[Tensor]
    """Of each of `copies`, a boolean [tensors]: the ranks of the group hold different values."""
    counters: Tensor
    """int64 [COUNTERS]"""
    verdict: Tensor
    """int64 [2], the same on all ranks: 1 if some state is implausible, 1 if ranks differ."""


def check_health(run: Run) -> None:
    """Check that the state is finite on all ranks, and equal where it must be. All together.

    Raises:
        Poisoned: On every rank, if a master or a moment of one is not finite, or too large to be
            true.
        Diverged: On every rank, if ranks hold different values of what must be equal.
    """
    findings = inspect(run)
    poisoned, differs = platform.Readback(findings.verdict).numbers()
    if poisoned:
        raise Poisoned(_explain_poison(run))
    if differs:
        raise Diverged(_explain_difference(run, findings))


def check_same_data(data: Mapping[str, str], directory: str) -> None:
    """Check that all ranks read the same data. All ranks together, before anything is written.

    Each node may have a data set of its own in the same place. Pipeline stages would then train on
    the inputs of one and the targets of another, and no loss would tell.

    Args:
        data: The hashes of this rank's data; see `data_hashes` in checkpoint/manifest.py.
        directory: This rank's data.directory.

    Raises:
        ConfigError: On every rank, if the hashes differ.
    """
    gathered = _gather((host_name(), directory, dict(data)))
    host, first, expected = gathered[0]
    for rank, (other, found, hashes) in enumerate(gathered):
        if differs := [name for name in expected if hashes[name] != expected[name]]:
            name = differs[0]
            raise ConfigError(
                f"data.directory = {found} on rank {rank} ({other}): the SHA-256 for {name} is "
                f"{hashes[name][:DIGITS]}..., that of {first} on rank 0 ({host}) is "
                f"{expected[name][:DIGITS]}.... Copy one data set to every node, or put it where "
                "all nodes see it"
            )


@torch.no_grad()
def inspect(run: Run) -> Findings:
    """Queue a check on the device, without waiting for it. All ranks together."""
    run.optimizer.wait_for_weights()
    copies = find_copies(run.optimizer)
    checksums = [each.checksums() for each in copies]
    differs = [_differs(sums, each.group) for sums, each in zip(checksums, copies)]
    counters = _counters(run)
    flags = [any_.any() for any_ in differs]
    poisoned = ~state_is_plausible(run.optimizer)
    flag = torch.stack(flags).any() if flags else torch.zeros_like(poisoned)
    # One message for all ranks: the flags, and the counters' largest and smallest values.
    message = torch.cat([torch.stack([poisoned, flag]).long(), counters, -counters])
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    poison, difference, bounds = message[0], message[1], message[2:].view(2, -1)
    unequal = (bounds[0] + bounds[1]).ne(0).any().long()
    verdict = torch.stack([poison, difference | unequal])
    return Findings(copies, checksums, differs, counters, verdict)


def _differs(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return where the ranks of a group hold different values; boolean, shaped like `values`."""
    # The smallest is the negative of the largest negative, which saves a second reduction.
    bounds = torch.stack([values, -values])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    return (bounds[0] + bounds[1]).ne(0)


def _counters(run: Run) -> Tensor:
    """Return what all ranks count alike, int64 [COUNTERS], on the device."""
    state = run.state
    host = platform.to_device(torch.tensor([state.step, state.consumed_samples]))
    seen = None if run.spikes is None else run.spikes.detector.state
    window = torch.zeros_like(host[:1]) if seen is None else checksum(seen)[None]
    return torch.cat([host, update_counts(run.optimizer), window])


def _explain_poison(run: Run) -> str:
    """Return the message about state that is not finite. All ranks together."""
    everyone = _gather((dist.get_rank(), host_name(), implausible_state(run.optimizer)))
    lines = [f"rank {rank} ({host}): {name}" for rank, host, names in everyone for name in names]
    return (
        f"after step {run.state.step} the optimizer's state is not finite or too large to be true: "
        f"{_some(lines)}. Nothing "
        "is saved. Start again from the last checkpoint, which was checked. If it happens again at "
        "the same step, lower optimizer.learning_rate; if always on one host, leave that host out"
    )


def _explain_difference(run: Run, findings: Findings) -> str:
    """Return the message that says what differs, and on which ranks. All ranks together."""
    mine: dict[tuple[tuple[int, ...], str], int] = {}
    for copies, sums, differs in zip(findings.copies, findings.checksums, findings.differs):
        ranks = tuple(dist.get_process_group_ranks(copies.group))
        rows = zip(copies.tensors, sums.tolist(), differs.tolist())
        mine |= {(ranks, name): value for name, value, is_odd in rows if is_odd}
    everyone = tuple(range(dist.get_world_size()))
    mine |= {(everyone, n): v for n, v in zip(COUNTERS, findings.counters.tolist())}
    gathered = _gather((host_name(), mine))
    hosts = [host for host, _ in gathered]
    values: dict[tuple[tuple[int, ...], str], dict[int, int]] = {}
    for rank, (_, items) in enumerate(gathered):
        for key, value in items.items():
            values.setdefault(key, {})[rank] = value
    groups: dict[str, list[dict[int, int]]] = {}
    for (_, name), by_rank in values.items():
        if len(set(by_rank.values())) > 1:
            groups.setdefault(name, []).append(by_rank)
    lines = [f"{name}: {_name_the_odd(each, hosts)}" for name, each in groups.items()]
    return (
        f"after step {run.state.step} ranks differ in what must be equal. {_some(lines)}. Nothing "
        "is saved. Start again from the last checkpoint, before which the ranks were equal. If it "
        "is always the same host, suspect its memory or GPU and leave it out"
    )


def _name_the_odd(groups: list[dict[int, int]], hosts: list[str]) -> str:
    """Return which ranks differ from most others, or that there is no majority.

    Args:
        groups: The value on each rank, for each group of ranks in which values differ.
        hosts: The host of every rank.
    """
    suspects = [_suspects(by_rank) for by_rank in groups]
    # A rank that differs in its data-parallel and in its tensor group is the one in both, even
    # where each group is a pair that has no majority.
    odd = set.intersection(*suspects) or set.union(*suspects)
    names = ", ".join(f"{rank} ({hosts[rank]})" for rank in sorted(odd))
    if any(len(odd) == len(by_rank) for by_rank in groups):
        return f"no majority among ranks {names}"
    ranks = len(set().union(*groups))
    return f"rank{'s' * (len(odd) > 1)} {names} of {ranks} differ{'s' * (len(odd) == 1)}"


def _suspects(by_rank: dict[int, int]) -> set[int]:
    """Return the ranks of a group whose value is not that of the majority; without one, all."""
    [(common, count), *_] = Counter(by_rank.values()).most_common()
    has_majority = 2 * count > len(by_rank)
    return {rank for rank, value in by_rank.items() if value != common or not has_majority}


def _some(lines: list[str]) -> str:
    """Return the first lines in one, and how many there are beyond."""
    more = len(lines) - MOST_LINES
    return "; ".join(lines[:MOST_LINES]) + (f"; and {more} more" if more > 0 else "")


def _gather(own: Any) -> list[Any]:
    """Return what every rank passes, in the order of ranks. All ranks together."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


# ---- rollback ----
# Take a run back to its newest checkpoint after a spike, and on with the data that follows it.
#
# Chowdhery et al. 2022 (PaLM, section 5.1) went back about 100 steps before a spike and skipped 200
# to 500 batches, and the spike did not return: it takes the data and the state of the model
# together. Here the run goes back to its newest checkpoint, and skips all samples from there up to
# and including the spike's. Steps are counted from the checkpoint again; `consumed_samples` goes
# on.


def roll_back(run: Run, spike: Spike, hooks: Sequence[Hook]) -> None:
    """Restore the newest checkpoint into `run`, and pass over the data. All ranks together.

    Args:
        run: The run; steps after the checkpoint have been taken.
        spike: What was seen, the same on every rank.
        hooks: The run's hooks.

    Raises:
        RunFailed: There is no checkpoint, it cannot be loaded, or the run has gone back to it too
            often.
    """
    assert run.spikes is not None
    # A save may be under way beside training: its checkpoint is then the newest.
    for hook in hooks:
        hook.before_rollback(run)
    paths = [path for hook in hooks if (path := hook.newest_checkpoint(run)) is not None]
    if not paths:
        raise RunFailed(
            f"{spike}. There is no checkpoint to go back to. Start again with a lower "
            "optimizer.learning_rate or a longer schedule.lr_warmup_steps, or save earlier "
            "(checkpoint.interval_steps)"
        )
    try:
        checkpoint = open_checkpoint(paths[-1])
        run.spikes.check_rollback(spike, checkpoint.trainer_state.step)
        # The weights of the last update are still being gathered into what is overwritten.
        run.optimizer.wait_for_weights()
        restored = load_checkpoint(checkpoint, run.optimizer)
    # The command's input was right: at the next start, an earlier checkpoint may be good.
    except ConfigError as error:
        raise RunFailed(f"{spike}. {error}") from None
    run.state = dataclasses.replace(
        restored,
        consumed_samples=spike.state.consumed_samples,
        # The data goes on in the present blend, which may have begun after the checkpoint.
        segment=spike.state.segment,
    )
    run.spikes.went_back(spike, restored)
    for hook in hooks:
        hook.after_rollback(run)
    if run.topology.is_main:
        skipped = spike.state.consumed_samples - restored.consumed_samples
        say(f"{spike}; back to step {restored.step}, and on after the {skipped} samples since")

"""Define the tasks that damage the state of a run, or its data, and see what the run does."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain import platform
from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.rundir.paths import RunPaths, exit_code_of
from pretrain.topology import Process, initialize
from tests.distributed.tasks import loaded_run


@contextlib.contextmanager
def after_step(number: int, act: Callable[[Any], None]) -> Iterator[None]:
    """Call act(run) on every rank when step `number` (from 1) has been queued, once."""
    from pretrain.training import loop

    queue_step, done = loop.queue_step, False

    def queue_and_act(run: Any, *args: Any) -> Any:
        nonlocal done
        step = queue_step(run, *args)
        if run.state.step == number and not done:
            done = True
            run.optimizer.wait_for_weights()
            act(run)
        return step

    with patch.object(loop, "queue_step", queue_and_act):
        yield


def tensor_of(run: Any, name: str, kind: str) -> Tensor | None:
    """Return this rank's part of a parameter's weight, master or moment; None if it has none."""
    from pretrain.optim.health import _own_weight

    if kind == "weight":
        [named] = [n for n in run.optimizer.parameters if n.name == name] or [None]
        return None if named is None else _own_weight(run.optimizer, named)
    parts = [f.tensors[kind] for f in run.optimizer.state().fragments if f.named.name == name]
    return parts[0] if parts else None


def outcome(config: RunConfig, resume: str = "auto") -> dict[str, Any]:
    """Train a run.

    Returns:
        "code": the exit code that `pretrain train` would end with; "error": the message; "saved":
        names of its checkpoints; "said": what this rank printed.
    """
    from pretrain.training.loop import train

    code, error, said = 0, "", io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            code = train(config, resume)
    except RunFailed as failure:
        code, error = int(exit_code_of(failure)), str(failure)
    checkpoints = RunPaths(config.directory).checkpoints
    # Rank 0 may still publish what was saved before.
    dist.barrier()
    saved = sorted(p.name for p in checkpoints.iterdir()) if checkpoints.is_dir() else []
    return {"code": code, "error": error, "saved": saved, "said": said.getvalue()}


class Flip(NamedTuple):
    """A bit of one element that flips on one rank."""

    after: int
    """Steps done when it flips; that of a gradient or an activation flips during the next step."""
    rank: int
    what: str
    """"weight", "master", a moment, "gradient", "activation" or "host copy"."""
    bit: int
    """0 is the lowest bit of the fraction, 30 the highest of the exponent; of 16 bit the like."""
    name: str = ""
    """Parameter; a weight matrix of the rank where it is empty."""
    times: int = 1
    """It flips this many times, each time that the step is taken."""


def flip(tensor: Tensor, bit: int, index: int = 0) -> None:
    """Flip one bit of one element of a tensor."""
    flat = tensor.detach().view(-1)[index : index + 1]
    two = flat.element_size() == 2
    bits = flat.view(torch.int16 if two else torch.int32)
    bits.bitwise_xor_(1 << (bit - 16 if two else bit))


def _matrix(run: Any) -> Any:
    """Return a weight matrix of this rank of which it keeps a part of the state."""
    kept = {f.named.name for f in run.optimizer.state().fragments if not f.named.is_copy}
    return next(
        n for n in run.optimizer.parameters if n.name in kept and "linear_fc1.weight" in n.name
    )


def train_flipped(config: RunConfig, flips: list[Flip]) -> dict[str, Any]:
    """Train a run in which bits flip.

    Returns:
        That of `outcome`, and "flips": how many flipped on this rank.
    """
    from pretrain.training import loop

    rank = Process.from_environment().rank
    left = {each: each.times for each in flips if each.rank == rank}
    queue_step, count = loop.queue_step, 0
    state: dict[str, Any] = {}

    def due(run: Any, whats: tuple[str, ...]) -> list[Flip]:
        nonlocal count
        found = [f for f, n in left.items() if n and f.after == run.state.step and f.what in whats]
        for each in found:
            left[each] -= 1
            count += 1
        return found

    def in_passes(run: Any, each: Flip) -> Any:
        """Flip once, in the first micro batch of the step."""
        named, done = _matrix(run), list[int]()

        def once(tensor: Tensor) -> None:
            if not done:
                done.append(1)
                flip(tensor, each.bit, tensor.numel() // 2)

        if each.what == "gradient":
            # Gradients are added up elsewhere at stage 1.
            return named.parameter.register_post_accumulate_grad_hook(
                lambda p: once(getattr(p, "main_grad", p.grad))
            )

        def damage(module: Any, inputs: Any, output: Any) -> Any:
            if done or not torch.is_grad_enabled():
                return None
            # The output may be a view that torch lets nobody write to.
            damaged = output[0].clone()
            once(damaged)
            return (damaged, *output[1:])

        layer = next(m for m in run.chunks[0].modules() if type(m).__name__ == "SelfAttention")
        return layer.register_forward_hook(damage)

    def with_flips(run: Any, *args: Any) -> Any:
        state["run"] = run
        for each in due(run, ("weight", "master", *run.config.moments)):
            run.optimizer.wait_for_weights()
            run.optimizer.before_change()
            tensor = tensor_of(run, each.name or _matrix(run).name, each.what)
            assert tensor is not None
            flip(tensor, each.bit)
        handles = [in_passes(run, each) for each in due(run, ("gradient", "activation"))]
        try:
            return queue_step(run, *args)
        finally:
            for handle in handles:
                handle.remove()

    class Copy(platform.HostCopy):
        def __init__(self, sources: list[Tensor], targets: list[Tensor]) -> None:
            self._flips, self._targets = due(state["run"], ("host copy",)), targets
            super().__init__(sources, targets)

        def wait(self) -> None:
            super().wait()
            while self._flips:
                flip(max(self._targets, key=len), self._flips.pop().bit)

    with (
        patch.object(loop, "queue_step", with_flips),
        patch.object(platform, "HostCopy", Copy),
    ):
        return {**outcome(config), "flips": count}


@contextlib.contextmanager
def unchanged_by_steps() -> Iterator[dict[int, bool]]:
    """Yield, by step, True if the step left this rank's masters, moments and weights as they were.

    The result grows while a run trains.
    """
    from pretrain.training import loop

    queue_step, seen = loop.queue_step, dict[int, bool]()

    def snapshot(run: Any) -> list[Tensor]:
        run.optimizer.wait_for_weights()
        state = [t for f in run.optimizer.state().fragments for t in f.tensors.values()]
        return [t.clone() for t in [*state, *(n.parameter.data for n in run.optimizer.parameters)]]

    def compared(run: Any, *args: Any) -> Any:
        before = snapshot(run)
        step = queue_step(run, *args)
        same = all(torch.equal(a, b) for a, b in zip(before, snapshot(run), strict=True))
        seen[run.state.step] = same
        return step

    with patch.object(loop, "queue_step", compared):
        yield seen


def train_damaged(
    config: RunConfig, step: int, rank: int, name: str, kind: str, value: float | None
) -> dict[str, Any]:
    """Train a run, and damage one element on one rank after a step.

    Args:
        config: The run's config.
        step: The step, counted from 1.
        rank: The rank; -1 for all.
        name: Global name of the parameter.
        kind: "weight", "master", "exp_avg" or "exp_avg_sq".
        value: What the element becomes; None flips its lowest bit.

    Returns:
        That of `outcome`, and "damaged": True if this rank held the element.
    """
    damaged = False

    def damage(run: Any) -> None:
        nonlocal damaged
        tensor = tensor_of(run, name, kind) if rank in (-1, dist.get_rank()) else None
        if tensor is None:
            return
        damaged = True
        if value is None:
            flip(tensor, 16 if tensor.element_size() == 2 else 0)
        else:
            tensor.view(-1)[0] = value

    with after_step(step, damage):
        found = outcome(config)
    return {**found, "damaged": damaged}


def train_with_a_bad_gradient(config: RunConfig, step: int, value: float) -> dict[str, Any]:
    """Train a run in which one weight's gradient on one rank is not finite in one step.

    Args:
        config: The run's config.
        step: The step, counted from 1.
        value: The gradient's value.

    Returns:
        That of `outcome`, and "unchanged": that of `unchanged_by_steps`.
    """
    from pretrain.training import loop

    forward_backward, calls = loop.forward_backward, 0

    def poisoned(chunks: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        bias = next(n for n in optimizer.parameters if n.name.endswith("linear_qkv.bias"))
        is_bad = calls == step and dist.get_rank() == 0
        handle = bias.parameter.register_hook(
            lambda gradient: torch.full_like(gradient, value) if is_bad else None
        )
        losses = forward_backward(chunks, optimizer, *given, **named)
        handle.remove()
        return losses

    with unchanged_by_steps() as unchanged, patch.object(loop, "forward_backward", poisoned):
        return {**outcome(config), "unchanged": unchanged}


def train_scaled(
    config: RunConfig, step: int, factor: float, noise: float = 0.0, rank: int | None = None
) -> dict[str, Any]:
    """Train a run whose gradients are multiplied by a factor in a step, whenever it is taken.

    Args:
        config: The run's config.
        step: The step, counted from 1.
        factor: The factor.
        noise: By how much gradients differ each time that any step is computed, relative to them.
        rank: The rank of which they differ; None for all.
    """
    from pretrain.training import loop

    forward_backward, queue_step = loop.forward_backward, loop.queue_step
    is_due, drawn = False, torch.Generator()
    # As of a kernel whose threads add up in the order in which they come.
    drawn.seed()

    def queued(run: Any, *args: Any) -> Any:
        nonlocal is_due
        is_due = run.state.step + 1 == step
        return queue_step(run, *args)

    def scaled(chunks: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
        is_noisy = noise > 0 and rank in (None, dist.get_rank())

        def changed(gradient: Tensor) -> Tensor:
            if is_noisy:
                gradient = gradient * (1 + noise * torch.randn(gradient.shape, generator=drawn))
            return gradient * factor if is_due else gradient

        handles = [
            named.parameter.register_hook(changed)
            for named in optimizer.parameters * (is_due or is_noisy)
        ]
        losses = forward_backward(chunks, optimizer, *given, **named)
        for handle in handles:
            handle.remove()
        return losses

    with (
        patch.object(loop, "queue_step", queued),
        patch.object(loop, "forward_backward", scaled),
    ):
        return outcome(config)


def check_every_step(config: RunConfig, steps: list[Tensor]) -> int:
    """Train on given batches and check the ranks' health after every step.

    Args:
        config: The run's config.
        steps: Token ids of the global batches, each [global batch, S + 1].

    Returns:
        The number of tensors that this rank has compared.
    """
    from pretrain.training.hooks import check_health, inspect
    from pretrain.training.loop import queue_step

    run = build_run(config)
    share = run.topology.layout.data, run.topology.data_rank
    batches = (
        list(tokens.chunk(share[0])[share[1]].split(config.batch.micro_batch_size))
        for tokens in steps
    )
    check_health(run)
    for _ in steps:
        queue_step(run, batches, platform.Moment()).read()
        check_health(run)
    return sum(len(copies.tensors) for copies in inspect(run).copies)


def build_run(config: RunConfig) -> Any:
    """Return a run with initial weights and without data."""
    from pretrain.plan.simulation import run_without_data
    from pretrain.training.start import _spike_detector

    topology = initialize(config)
    # New memory holds NaN instead of what happens to lie there, such as ZeRO 3's padding.
    torch.use_deterministic_algorithms(True, warn_only=True)
    run = run_without_data(config, topology)
    torch.use_deterministic_algorithms(False)
    run.spikes = _spike_detector(config, run.state, forgets=False)
    return run


@contextlib.contextmanager
def bad_data(first: int, last: int) -> Iterator[None]:
    """Replace a stretch of the data by one repeated token, whenever it is read.

    Args:
        first: Samples consumed after the first bad global batch.
        last: Samples consumed after the last one.
    """
    from pretrain.training import loop

    step_batches = loop.step_batches

    def batches(run: Any) -> Iterator[list[Tensor]]:
        consumed = run.state.consumed_samples
        for micro_batches in step_batches(run):
            consumed += run.config.batch.global_batch_size
            is_bad = first <= consumed <= last
            yield [torch.full_like(b, 7) if is_bad else b for b in micro_batches]

    with patch.object(loop, "step_batches", batches):
        yield


def train_on_bad_data(
    config: RunConfig, first: int, last: int, resume: str = "auto"
) -> dict[str, Any]:
    """Train a run on data of which a stretch is bad, and compare the state before and after it.

    Args:
        config: The run's config.
        first: As in `bad_data`.
        last: As in `bad_data`.
        resume: Value of --resume.

    Returns:
        That of `outcome`, and "unchanged": that of `unchanged_by_steps`.
    """
    with bad_data(first, last), unchanged_by_steps() as unchanged:
        return {**outcome(config, resume), "unchanged": unchanged}


def losses_from(config: RunConfig, resume: str, consumed_samples: int, steps: int) -> list[float]:
    """Resume a checkpoint at another place of the data, and return the losses of its next steps.

    Args:
        config: The run's config.
        resume: Path of the checkpoint.
        consumed_samples: Samples consumed before the first step.
        steps: Number of steps.
    """

    from pretrain.training.loop import queue_step, step_batches

    run = loaded_run(config, resume)
    run.state = dataclasses.replace(run.state, consumed_samples=consumed_samples)
    batches = step_batches(run)
    return [queue_step(run, batches, platform.Moment()).read()["loss_nats"] for _ in range(steps)]


def train_on_own_data(config: RunConfig, directories: list[str]) -> dict[str, Any]:
    """Train a run in which each rank reads a data set of its own.

    Args:
        config: The run's config.
        directories: data.directory of each rank.

    Returns:
        "error": the message of the refusal; "written": True if the run's directory was made.
    """
    from pretrain.training.loop import train

    data = config.data.model_copy(
        update={"directory": directories[Process.from_environment().rank]}
    )
    error = ""
    try:
        train(config.model_copy(update={"data": data}))
    except ConfigError as refusal:
        error = str(refusal)
    dist.barrier()
    return {"error": error, "written": config.directory.exists()}

"""The training loop. What happens beside a step (log, evaluate, save) is a hook's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from pretrain import platform, topology
from pretrain.checkpoint.manifest import CONFIG
from pretrain.checkpoint.save import Progress
from pretrain.config import RunConfig, RunFailed, dump_config, writing
from pretrain.data.loader import batches
from pretrain.optim.schedule import learning_rate
from pretrain.topology import Topology
from pretrain.train.account import Account
from pretrain.train.hooks import make_hooks
from pretrain.train.start import Run, Standing, load, prepare, take
from pretrain.train.step import agree, average_loss, forward_backward, seed_step
from pretrain.train.stopping import EXIT_CODES, Requests


def train(config: RunConfig, resume: str = "auto", requests: Requests | None = None) -> int:
    """Trains to train.num_steps, or until all ranks agree on what `requests` noted; returns the exit code, on every rank.

    `resume` is auto (newest complete checkpoint, or from scratch), none, or a path. Raises ConfigError for bad input
    before anything is written, RunFailed when the loss is no longer finite.
    """
    streams, place = prepare(config, resume)
    with Account() as account:
        standing = topology.on_main(place, lambda: take(config, resume, account))
        if place.is_main:
            print(_outlook(config, place, standing), file=sys.stderr, flush=True)
        if standing.is_finished(config):
            account.phase("ending", standing.step)
            account.end(0, _finished(standing.step))
            return 0
        account.phase("loading", standing.step)
        run = load(config, streams, place, standing, requests or Requests(), account)
        if place.is_main:
            with writing(config.directory):
                (config.directory / CONFIG).write_text(dump_config(config))
        account.phase("training", run.progress.step)
        _train_steps(run)
        return _ended(run)


def _train_steps(run: Run) -> None:
    steps = step_batches(run)
    hooks = make_hooks(run)
    try:
        agree(run.requests)  # a signal may have come before the first step
        for hook in hooks:
            hook.at_start(run)
        while run.progress.step < run.config.train.num_steps and not run.requests.agreed:
            record = train_step(run, steps)
            for hook in hooks:
                hook.after_step(run, record)
            run.account.progress(run.progress.step)
        run.account.phase("ending", run.progress.step)
    finally:
        for hook in hooks:
            hook.close()


def train_step(run: Run, steps: Iterator[list[Tensor]]) -> dict[str, float]:
    """One optimizer step; returns what is measured about it."""
    begin = time.perf_counter()
    micro_batches = next(steps)
    waited = time.perf_counter() - begin
    step, rate = run.progress.step, learning_rate(run.config, run.progress.step)
    seed_step(run.config, run.topology, step)
    losses = forward_backward(run.chunks, run.optimizer, micro_batches)
    try:
        norm = run.optimizer.step(rate)
    except RunFailed as failure:
        raise RunFailed(f"step {step + 1}: {failure}") from None
    loss = average_loss(losses, run.topology, run.requests)
    run.progress = Progress(
        step + 1, run.progress.consumed_samples + run.config.batch.global_batch_size
    )
    platform.synchronize()
    return {
        "step": run.progress.step,
        "loss_nats": loss,
        "gradient_norm": norm,
        "learning_rate": rate,
        "step_seconds": time.perf_counter() - begin,
        "data_wait_seconds": waited,
    }


def step_batches(run: Run) -> Iterator[list[Tensor]]:
    """This rank's micro batches, step by step, from where the run stands."""
    c = run.config
    return batches(
        run.training_stream,
        seed=c.run.seed,
        sequence_length=c.data.sequence_length,
        global_batch_size=c.batch.global_batch_size,
        micro_batch_size=c.batch.micro_batch_size,
        data_parallel_rank=run.topology.data_rank,
        data_parallel_size=run.topology.layout.data,
        consumed_samples=run.progress.consumed_samples,
        num_workers=c.data.num_workers,
    )


def _outlook(config: RunConfig, place: Topology, standing: Standing) -> str:
    """Where the run stands and what is left, in a line."""
    directory, step, last = config.directory, standing.step, config.train.num_steps
    if standing.is_finished(config):
        return f"{directory}: already at step {step} of {last}; nothing to train"
    shares = f"tensor {place.layout.tensor} x pipeline {place.layout.pipeline} x data {place.layout.data}"
    if step >= last:
        return f"{directory}: at step {step} of {last}, whose evaluation is left; {shares}"
    begin = f"going on from step {step}" if step else "from scratch"
    return f"{directory}: {begin}, to step {last}; {shares}"


def _finished(step: int) -> str:
    return f"all {step} steps are done"


def _ended(run: Run) -> int:
    """Says how the run ended; returns the exit code, on all ranks at the same moment."""
    asked, step = run.requests.agreed, run.progress.step
    if asked is None:
        run.account.end(0, _finished(step))
        return 0
    code = EXIT_CODES[asked]
    reason = (
        f"{asked.name}: step {step} is saved" if step else f"{asked.name} before the first step"
    )
    if run.topology.is_main:
        print(
            f"{run.config.directory}: {reason}; the same command goes on from there",
            file=sys.stderr,
            flush=True,
        )
    run.account.end(code, reason)
    dist.barrier()
    return code

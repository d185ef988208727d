"""The training loop. What happens beside a step (log, evaluate, save) is a hook's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain import platform, topology
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manifest import (
    CONFIG,
    check_same_model,
    check_same_order,
    complete_checkpoints,
    find_checkpoint,
)
from pretrain.checkpoint.save import Progress
from pretrain.config import ConfigError, RunConfig, RunFailed, dump_config, writing
from pretrain.data.loader import batches
from pretrain.data.stream import TokenStream, open_stream
from pretrain.model.checks import check_positions
from pretrain.model.gpt import build_model
from pretrain.optim.schedule import learning_rate
from pretrain.optim.zero import ZeroOptimizer
from pretrain.topology import Topology
from pretrain.train.hooks import make_hooks
from pretrain.train.step import average_loss, forward_backward, seed_step


@dataclass
class Run:
    """A run in this process: what the hooks are shown after every step."""

    config: RunConfig
    topology: Topology
    chunks: list[GPTModel]
    optimizer: ZeroOptimizer
    training_stream: TokenStream
    validation_stream: TokenStream
    progress: Progress


def train(config: RunConfig, resume: str = "auto") -> Progress:
    """Trains to train.num_steps. `resume` is auto (newest complete checkpoint, or from scratch), none, or a path.

    Raises ConfigError for bad input before anything is written, RunFailed when the loss is no longer finite.
    """
    run = start(config, resume)
    if run.topology.is_main:
        print(_outlook(run), file=sys.stderr, flush=True)
    if run.progress.step >= config.train.num_steps:
        return run.progress
    if run.topology.is_main:
        with writing(config.directory):
            (config.directory / CONFIG).write_text(dump_config(config))
    steps = step_batches(run)
    hooks = make_hooks(run)
    try:
        while run.progress.step < config.train.num_steps:
            record = train_step(run, steps)
            for hook in hooks:
                hook.after_step(run, record)
    finally:
        for hook in hooks:
            hook.close()
    return run.progress


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
    loss = average_loss(losses, run.topology)
    run.progress = Progress(step + 1, run.progress.consumed_samples + run.config.batch.global_batch_size)
    platform.synchronize()
    return {
        "step": run.progress.step, "loss_nats": loss, "gradient_norm": norm, "learning_rate": rate,
        "step_seconds": time.perf_counter() - begin, "data_wait_seconds": waited,
    }  # fmt: skip


def step_batches(run: Run) -> Iterator[list[Tensor]]:
    """This rank's micro batches, step by step, from where the run stands."""
    c = run.config
    return batches(
        run.training_stream, seed=c.run.seed, sequence_length=c.data.sequence_length,
        global_batch_size=c.batch.global_batch_size, micro_batch_size=c.batch.micro_batch_size,
        data_parallel_rank=run.topology.data_rank, data_parallel_size=run.topology.layout.data,
        consumed_samples=run.progress.consumed_samples, num_workers=c.data.num_workers,
    )  # fmt: skip


def start(config: RunConfig, resume: str = "auto") -> Run:
    """Joins the other processes, opens the data, builds the model and its optimizer, loads what `resume` says."""
    streams = open_stream(config, "train"), open_stream(config, "validation")
    checkpoint = checkpoint_to_resume(config, resume)
    place = topology.initialize(config)
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.directory = {config.directory}: cannot be made ({error.strerror}). Choose another"
        ) from None
    chunks = build_model(config)
    check_positions(config, chunks)
    optimizer = ZeroOptimizer(config, place, chunks)
    progress = load_checkpoint(checkpoint, optimizer) if checkpoint else Progress(0, 0)
    return Run(config, place, chunks, optimizer, *streams, progress)


def _outlook(run: Run) -> str:
    """Where the run stands and what is left, in a line."""
    directory, step, last = run.config.directory, run.progress.step, run.config.train.num_steps
    if step >= last:
        return f"{directory}: already at step {step} of {last}; nothing to train"
    layout = run.topology.layout
    shares = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
    begin = f"going on from step {step}" if step else "from scratch"
    return f"{directory}: {begin}, to step {last}; {shares}"


def checkpoint_to_resume(config: RunConfig, resume: str) -> Path | None:
    """The checkpoint that `resume` names. Raises ConfigError when it is another model's, or would be written over."""
    if resume == "none":
        if complete_checkpoints(config.directory):
            raise ConfigError(f"{config.directory}: has checkpoints, and --resume none would write over them. Resume "
                              "(--resume auto), remove them, or set another run.directory")  # fmt: skip
        return None
    if resume == "auto":
        found = complete_checkpoints(config.directory)
        checkpoint = found[-1] if found else None
    else:
        checkpoint = find_checkpoint(Path(resume))
    if checkpoint is not None:
        check_same_model(config, checkpoint)
        check_same_order(config, checkpoint)
    return checkpoint

"""From a config to a run that can take its next step: which checkpoint to go on from, whose the run is, what is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from pretrain import topology
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manifest import (
    check_same_model,
    check_same_order,
    complete_checkpoints,
    find_checkpoint,
    read_state,
)
from pretrain.checkpoint.save import Progress, recover
from pretrain.config import ConfigError, RunConfig
from pretrain.data.stream import TokenStream, open_stream
from pretrain.evaluate.perplexity import Protocol
from pretrain.model.checks import check_positions
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.rundir.metrics import evaluations_at
from pretrain.rundir.paths import RunPaths
from pretrain.topology import Topology
from pretrain.train.account import Account
from pretrain.train.stopping import Requests

Streams = tuple[TokenStream, TokenStream]
"""Training and validation."""


@dataclass(frozen=True)
class Standing:
    """Where a run stands before it is loaded."""

    checkpoint: Path | None = None
    """What to go on from; None: from scratch."""
    step: int = 0
    """Steps done."""
    unevaluated: tuple[Protocol, ...] = ()
    """What an evaluation after `step` still owes, because a run was stopped in it."""
    saved: int | None = 0
    """The step of this run that is on disk already: 0 from scratch, None when the checkpoint is another run's."""

    def is_finished(self, config: RunConfig) -> bool:
        """True when there is no step to take and nothing to evaluate."""
        return self.step >= config.train.num_steps and not self.unevaluated


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
    standing: Standing
    requests: Requests
    account: Account


def prepare(config: RunConfig, resume: str) -> tuple[Streams, Topology]:
    """Opens the data and joins the other processes, so that bad input is refused before anything is written."""
    streams = open_stream(config, "train"), open_stream(config, "validation")
    checkpoint_to_resume(config, resume)
    return streams, topology.initialize(config)


def take(config: RunConfig, resume: str, account: Account) -> Standing:
    """Rank 0: makes the run this process's own, then sees where it stands. A finished run is left as it is.

    Raises ConfigError, RunBusy among them.
    """
    joined = topology.supervised_attempt()
    standing = find_standing(config, resume)
    if standing.is_finished(config) and joined is None:
        return standing
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.directory = {config.directory}: cannot be made ({error.strerror}). Choose another"
        ) from None
    if joined is not None:
        account.join(joined)
    else:
        account.begin(config.directory, topology.owner())
    recover(config.directory)
    return find_standing(config, resume)  # another process may have trained it a moment ago


def load(
    config: RunConfig,
    streams: Streams,
    place: Topology,
    standing: Standing,
    requests: Requests,
    account: Account,
) -> Run:
    """Builds the model and its optimizer and loads the checkpoint. All ranks together."""
    if place.is_main:
        _show_log("pretrain.kernels")  # which attention backend was chosen, and why
    chunks = build_model(config)
    check_positions(config, chunks)
    optimizer = ZeroOptimizer(config, place, chunks)
    progress = (
        load_checkpoint(standing.checkpoint, optimizer) if standing.checkpoint else Progress(0, 0)
    )
    return Run(config, place, chunks, optimizer, *streams, progress, standing, requests, account)


def _show_log(name: str) -> None:
    logger = logging.getLogger(name)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)


def find_standing(config: RunConfig, resume: str) -> Standing:
    """Reads where the run stands; errors as `checkpoint_to_resume`."""
    checkpoint = checkpoint_to_resume(config, resume)
    if checkpoint is None:
        return Standing()
    step = read_state(checkpoint)["step"]
    done = evaluations_at(RunPaths(config.directory).metrics, step)
    owed = (
        tuple(p for p in protocols(config) if p.key not in done)
        if is_evaluated_after(config, step)
        else ()
    )
    own = checkpoint.resolve().parent == (config.directory / "checkpoints").resolve()
    return Standing(checkpoint, step, owed, step if own else None)


def protocols(config: RunConfig) -> list[Protocol]:
    """What the evaluations in the loop measure."""
    return [
        Protocol(name, length, config.evaluation_stride)
        for name in config.evaluation.protocols
        for length in config.evaluation_lengths
    ]


def is_evaluated_after(config: RunConfig, step: int) -> bool:
    """True after every evaluation.interval_steps and after the last step."""
    last = config.train.num_steps
    return 0 < step <= last and (step % config.evaluation.interval_steps == 0 or step == last)


def checkpoint_to_resume(config: RunConfig, resume: str) -> Path | None:
    """The checkpoint that `resume` names. Raises ConfigError when it is another model's, or would be written over."""
    if resume == "none":
        if complete_checkpoints(config.directory):
            raise ConfigError(
                f"{config.directory}: has checkpoints, and --resume none would write over them. Resume "
                "(--resume auto), remove them, or set another run.directory"
            )
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

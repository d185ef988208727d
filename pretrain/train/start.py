"""The start of a run: which checkpoint to resume from, taking the run's lock, building and loading.

The order matters. Wrong input is refused before processes join and before anything is written;
the run's directory is written to only by the process that has taken it; and the checkpoint to
resume from is looked for once more after that, because another process may have trained the run
until a moment ago.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manifest import (
    Checkpoint,
    Origin,
    TrainerState,
    check_same_model,
    check_same_order,
    open_checkpoint,
)
from pretrain.checkpoint.save import recover
from pretrain.checkpoint.store import is_url
from pretrain.config import ConfigError, RunConfig
from pretrain.data.stream import TokenStream, open_stream
from pretrain.evaluate.perplexity import Protocol
from pretrain.model.checks import check_positions
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.rundir.checkpoints import complete_checkpoints, find_checkpoint
from pretrain.rundir.lineage import Branch, new_id
from pretrain.rundir.metrics import evaluations_at
from pretrain.rundir.paths import RunPaths
from pretrain.topology import Topology, owner, supervised_attempt
from pretrain.topology import initialize as initialize_topology
from pretrain.train.reporter import AttemptReporter
from pretrain.train.stopping import Requests

Streams = tuple[TokenStream, TokenStream]
"""The training and the validation split."""


@dataclass(frozen=True)
class StartPoint:
    """Where a run starts from, known before anything is built."""

    checkpoint: Checkpoint | None = None
    """The checkpoint to resume from; None to start from scratch."""
    step: int = 0
    """Optimizer steps done."""
    pending_evaluations: tuple[Protocol, ...] = ()
    """Evaluations due after `step` that this run has not completed."""
    saved_step: int | None = 0
    """The step of which this run has a checkpoint: 0 from scratch (there is nothing to save), None
    when the checkpoint belongs to another run."""

    def origin(self) -> Origin:
        """Return what the next save records about where its state comes from."""
        if self.checkpoint is None:
            return Origin(branches=(Branch(new_id(), 0),))
        lineage = self.checkpoint.lineage
        return dataclasses.replace(
            self.checkpoint.origin, parent=lineage.id, validation_loss_nats=None
        )

    def is_finished(self, config: RunConfig) -> bool:
        """Return True if there is no step to take and nothing to evaluate."""
        return self.step >= config.train.num_steps and not self.pending_evaluations


@dataclass
class Run:
    """A run in this process: what the loop works on and the hooks are given after every step."""

    config: RunConfig
    topology: Topology
    chunks: list[GPTModel]
    optimizer: ZeroOptimizer
    training_stream: TokenStream
    validation_stream: TokenStream
    state: TrainerState
    """How far training has come; replaced after every step."""
    start_point: StartPoint
    requests: Requests
    reporter: AttemptReporter
    origin: Origin = field(default_factory=Origin)
    """What the next save records about where its state comes from."""


def prepare(config: RunConfig, resume: str) -> tuple[Streams, Topology, Checkpoint | None]:
    """Check the input and join the other processes. Nothing is written.

    Args:
        config: The run.
        resume: "auto", "none" or a path; see `checkpoint_to_resume`.

    Returns:
        The token streams, the layout of the processes, and the checkpoint to resume from, opened.

    Raises:
        ConfigError: The data, the checkpoint or the layout cannot be used.
    """
    streams = open_stream(config, "train"), open_stream(config, "validation")
    # Every process checks, because one that has joined waits for those that have not.
    checkpoint = checkpoint_to_resume(config, resume)
    return streams, initialize_topology(config), checkpoint


def take_run(
    config: RunConfig, resume: str, reporter: AttemptReporter, opened: Checkpoint | None
) -> StartPoint:
    """Make the run this process's own and find where it starts from. Rank 0 alone.

    A finished run is not taken, so that starting it again leaves no trace.

    Args:
        config: The run.
        resume: "auto", "none" or a path; see `checkpoint_to_resume`.
        reporter: Holds the run's lock from now on.
        opened: The checkpoint that `prepare` opened.

    Raises:
        ConfigError: run.directory cannot be made, or (RunBusy) another process trains the run.
    """
    supervised = supervised_attempt()
    start_point = find_start_point(config, resume, opened)
    if start_point.is_finished(config) and supervised is None:
        return start_point
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.directory = {config.directory}: cannot be made ({error.strerror}). Choose another"
        ) from None
    if supervised is not None:
        reporter.join(supervised)
    else:
        reporter.begin(config.directory, owner())
    recover(config.directory)
    # Once more: until the lock was taken, another process may have trained the run.
    return find_start_point(config, resume, start_point.checkpoint)


def load_run(
    config: RunConfig,
    streams: Streams,
    topology: Topology,
    start_point: StartPoint,
    requests: Requests,
    reporter: AttemptReporter,
) -> Run:
    """Build the model and its optimizer and load the checkpoint. All ranks together.

    Args:
        config: The run.
        streams: The training and the validation split.
        topology: The layout of the processes.
        start_point: Where the run starts from; the same on every rank.
        requests: What this process is asked to do while it trains.
        reporter: Tells the supervisor of phases and progress; writes on rank 0 alone.

    Raises:
        ConfigError: The checkpoint does not fit the model or is damaged.
        RunFailed: Attention does not add the positions that the config asks for.
    """
    if topology.is_main:
        # The log lines that say which attention backend was chosen, and what is fused.
        _show_log("pretrain.kernels")
        _show_log("pretrain.model")
    chunks = build_model(config)
    check_positions(config, chunks)
    optimizer = ZeroOptimizer(config, topology, chunks)
    if start_point.checkpoint is None:
        state = TrainerState(step=0, consumed_samples=0)
    else:
        state = load_checkpoint(start_point.checkpoint, optimizer)
    return Run(
        config,
        topology,
        chunks,
        optimizer,
        *streams,
        state,
        start_point,
        requests,
        reporter,
        start_point.origin(),
    )


def find_start_point(
    config: RunConfig, resume: str, opened: Checkpoint | None = None
) -> StartPoint:
    """Find where the run starts from.

    Args:
        config: The run.
        resume: "auto", "none" or a path; see `checkpoint_to_resume`.
        opened: A checkpoint that `checkpoint_to_resume` has returned before.

    Raises:
        ConfigError: As `checkpoint_to_resume`.
    """
    checkpoint = checkpoint_to_resume(config, resume, opened)
    if checkpoint is None:
        return StartPoint()
    step = checkpoint.trainer_state.step
    pending: tuple[Protocol, ...] = ()
    # A step is evaluated before it is saved, so nothing is pending unless the run was stopped
    # during the evaluation, or its metrics are in another run's directory.
    if is_evaluated_after(config, step):
        done = evaluations_at(RunPaths(config.directory).metrics, step)
        pending = tuple(p for p in protocols(config) if p.key not in done)
    own_checkpoints = RunPaths(config.directory).checkpoints.resolve()
    is_own = checkpoint.path.resolve().parent == own_checkpoints
    return StartPoint(checkpoint, step, pending, step if is_own else None)


def protocols(config: RunConfig) -> list[Protocol]:
    """Return what the evaluations during training measure: every protocol at every length."""
    return [
        Protocol(name, length, config.evaluation_stride)
        for name in config.evaluation.protocols
        for length in config.evaluation_lengths
    ]


def is_evaluated_after(config: RunConfig, step: int) -> bool:
    """Return True every evaluation.interval_steps steps and after the last step."""
    last = config.train.num_steps
    return 0 < step <= last and (step % config.evaluation.interval_steps == 0 or step == last)


def checkpoint_to_resume(
    config: RunConfig, resume: str, opened: Checkpoint | None = None
) -> Checkpoint | None:
    """Open the checkpoint to resume from and check that the run can go on from it.

    Args:
        config: The run.
        resume: "auto" for the newest complete checkpoint of the run, or from scratch if it has
            none; "none" to start from scratch; else the path of a run or a checkpoint.
        opened: What this function returned before. It is returned again, without reading its files
            anew, if it is still the checkpoint to resume from.

    Returns:
        The checkpoint, or None to start from scratch.

    Raises:
        ConfigError: There is no such checkpoint, it is damaged, it belongs to another model or
            another order of the data, or starting from scratch would write over it.
    """
    if is_url(resume):
        # It is downloaded when the processes have joined (`pretrain.train.upload.bring`).
        return None
    if resume == "none":
        if complete_checkpoints(config.directory):
            raise ConfigError(
                f"{config.directory}: has checkpoints, and --resume none would write over them. "
                "Resume (--resume auto), remove them, or set another run.directory"
            )
        return None
    if resume == "auto":
        found = complete_checkpoints(config.directory)
        path = found[-1] if found else None
    else:
        path = find_checkpoint(Path(resume))
    if path is None:
        return None
    if opened is not None and opened.path == path and opened.is_unchanged():
        return opened
    checkpoint = open_checkpoint(path)
    check_same_model(config, checkpoint)
    check_same_order(config, checkpoint)
    return checkpoint


def _show_log(name: str) -> None:
    """Print a logger's lines of level INFO, which Python drops otherwise."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)

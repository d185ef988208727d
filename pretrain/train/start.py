"""Start a run: check its input, take its lock, build the model and load the checkpoint.

The order matters. Wrong input is refused before processes join and before anything is written;
the run's directory is written to only by the process that has taken it; the checkpoint to resume
from is looked for once more after that, because another process may have trained the run until a
moment ago; and what the run turns away from is set aside only when that checkpoint has been loaded.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from pretrain.checkpoint.blocks import DamagedCheckpoint
from pretrain.checkpoint.changes import check_training, data_hashes
from pretrain.checkpoint.content import Origin, TrainerState
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manifest import Checkpoint
from pretrain.config import ConfigError, RunConfig, writing
from pretrain.data.blend import Blend, segment_of
from pretrain.data.stream import TokenStream, open_stream
from pretrain.data.tokenizer import load_tokenizer
from pretrain.evaluate.windows import Protocol
from pretrain.model.checks import check_positions
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.rundir.checkpoints import checkpoint_step, no_checkpoints
from pretrain.rundir.files import make_directory
from pretrain.rundir.history import bring_back_lines, recover, settle
from pretrain.topology import Topology, on_main, owner, supervised_attempt
from pretrain.topology import initialize as initialize_topology
from pretrain.train.choice import Damaged, choose_checkpoint, first_sentence
from pretrain.train.provenance import record_provenance
from pretrain.train.reporter import AttemptReporter
from pretrain.train.spikes import SpikeWatch
from pretrain.train.start_point import StartPoint, evaluations_of, find_start_point
from pretrain.train.stopping import Requests

Streams = tuple[TokenStream, TokenStream]
"""The training and the validation split."""


@dataclass
class Run:
    """A run in this process, which the loop works on and hands to its hooks."""

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
    spikes: SpikeWatch | None = None
    """Judges every step by train.spike_policy; None if that is "none"."""
    eos_id: int | None = None
    """End-of-document token, if data.per_document_attention; else None."""

    @property
    def blend(self) -> Blend:
        """Return the blend of the corpora, which `state.segment` records."""
        assert self.state.segment is not None
        return Blend(self.state.segment, self.config.run.seed)


def prepare(
    config: RunConfig, resume: str, allowed: Collection[str] = ()
) -> tuple[Streams, Topology, Checkpoint | None]:
    """Check the input and join the other processes. Nothing is written.

    Args:
        config: The run.
        resume: "auto", "none" or a path; see `choose_checkpoint`.
        allowed: Keys that may change although they change training.

    Returns:
        The token streams, the layout of the processes, and the checkpoint to resume from, opened.

    Raises:
        ConfigError: The data, the checkpoint or the layout cannot be used.
    """
    streams = open_stream(config, "train"), open_stream(config, "validation")
    # What was trained with a tokenizer that no export can hold would be found out after training.
    load_tokenizer(streams[0].tokenizer_path).check_trainable()
    # Every process checks, because one that has joined waits for those that have not.
    segment_of(config, streams[0])
    evaluations_of(config, streams[1])
    checkpoint, _ = choose_checkpoint(config, resume)
    if checkpoint is not None:
        check_training(config, data_hashes(streams), checkpoint, allowed)
    return streams, initialize_topology(config), checkpoint


def take_run(
    config: RunConfig,
    resume: str,
    reporter: AttemptReporter,
    opened: Checkpoint | None,
    data: dict[str, str],
    allowed: Collection[str] = (),
    evaluations: Sequence[Protocol] = (),
) -> StartPoint:
    """Make the run this process's own and find where it starts from. Rank 0 alone.

    A finished run is not taken, so that starting it again leaves no trace.

    Args:
        config: The run.
        resume: "auto", "none" or a path; see `choose_checkpoint`.
        reporter: Holds the run's lock from now on.
        opened: The checkpoint that `prepare` opened.
        data: The hashes of the run's data; see `data_hashes`.
        allowed: Keys that may change although they change training.
        evaluations: What every evaluation of this run measures; see `evaluations_of`.

    Raises:
        ConfigError: run.directory cannot be made, or (RunBusy) another process trains the run.
    """
    supervised = supervised_attempt()
    start_point = find_start_point(
        config, resume, opened, data, allowed, evaluations=tuple(evaluations)
    )
    if start_point.is_finished(config) and supervised is None:
        return start_point
    try:
        make_directory(config.directory)
    except OSError as error:
        raise ConfigError(
            f"run.directory = {config.directory}: cannot be made ({error.strerror}). Choose another"
        ) from None
    if supervised is not None:
        reporter.join(supervised, config.recovery.hang_seconds)
    else:
        reporter.begin(config.directory, owner())
    with writing(config.directory):
        recover(config.directory, reporter.attempt)
    # Once more: until the lock was taken, another process may have trained the run.
    start_point = find_start_point(
        config, resume, start_point.checkpoint, data, allowed, evaluations=tuple(evaluations)
    )
    _say_damaged(start_point)
    if start_point.is_automatic and start_point.checkpoint is not None:
        _say(*no_checkpoints(config.directory, start_point.checkpoint.path))
    made, changes = record_provenance(config.directory, reporter, start_point.checkpoint)
    return dataclasses.replace(start_point, provenance=made, provenance_changes=changes)


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
    state, start_point = _load(config, topology, start_point, optimizer)
    segment = segment_of(config, streams[0], state.segment, state.consumed_samples)
    state = dataclasses.replace(state, segment=segment)
    on_main(topology, lambda: _settle(config, start_point, reporter.attempt))
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
        None if config.train.spike_policy == "none" else SpikeWatch(config, state.spikes),
        streams[0].eos_id if config.data.per_document_attention else None,
    )


def _load(
    config: RunConfig, topology: Topology, start_point: StartPoint, optimizer: ZeroOptimizer
) -> tuple[TrainerState, StartPoint]:
    """Load the checkpoint, or with `auto` the newest one before it that is not damaged.

    All ranks together: damage is raised on all of them.

    Args:
        config: The run.
        topology: The layout of the processes.
        start_point: Where the run is to start from.
        optimizer: The newly built optimizer; its model is loaded with it.

    Returns:
        How far training had come, and where the run starts from.
    """
    while start_point.checkpoint is not None:
        try:
            return load_checkpoint(start_point.checkpoint, optimizer), start_point
        except DamagedCheckpoint as damage:
            if not start_point.is_automatic:
                raise
            damaged = (*start_point.damaged, (start_point.checkpoint.path, str(damage)))
            start_point = on_main(topology, partial(_fall_back, config, start_point, damaged))
    return TrainerState(step=0, consumed_samples=0), start_point


def _fall_back(config: RunConfig, before: StartPoint, damaged: Damaged) -> StartPoint:
    """Find where the run starts from when these checkpoints are passed over, and say so.

    Args:
        config: The run.
        before: Where it was to start from.
        damaged: The checkpoints to pass over, and why.
    """
    start_point = find_start_point(
        config, "auto", None, before.data, before.allowed, damaged, before.evaluations
    )
    _say_damaged(start_point)
    return dataclasses.replace(
        start_point,
        provenance=before.provenance,
        provenance_changes=before.provenance_changes,
    )


def _say_damaged(start_point: StartPoint) -> None:
    """Print which newer checkpoints are damaged and how many steps are lost with them."""
    for path, damage in start_point.damaged:
        lost = (checkpoint_step(path.name) or 0) - start_point.step
        _say(
            f"warning: {path} is damaged ({first_sentence(damage)}) and set aside; training goes "
            f"on from step {start_point.step}, {lost} steps are lost and trained again"
        )


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _settle(config: RunConfig, start_point: StartPoint, attempt: Path | None) -> None:
    """Set aside what the run turns away from. Rank 0 alone, when the checkpoint is loaded."""
    if start_point.checkpoint is None:
        return
    path, lineage = start_point.checkpoint.path, start_point.checkpoint.lineage
    damaged = {damaged.name: first_sentence(why) for damaged, why in start_point.damaged}
    with writing(config.directory):
        folder = settle(config.directory, path, lineage, damaged, attempt)
        bring_back_lines(config.directory, path, lineage.step)
    if folder is not None:
        names = ", ".join(sorted(found.name for found in folder.glob("step-*")))
        _say(
            f"{config.directory}: {names} moved to {folder}, because training goes on from step "
            f"{start_point.step}"
        )


def _show_log(name: str) -> None:
    """Print a logger's lines of level INFO, which Python drops otherwise."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)

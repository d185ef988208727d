"""Start a run: check its input, take its lock, build the model and load the checkpoint.

The order matters. Wrong input is refused before processes join and before anything is written. Only
the process that has locked the run writes to its directory. It then searches again for the
checkpoint to resume from, because another process may have trained the run until a moment ago.
Checkpoints of other branches are set aside only after that checkpoint has been loaded.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.models.gpt import GPTModel

from pretrain import platform
from pretrain.checkpoint.format import DamagedCheckpoint
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manifest import (
    Checkpoint,
    Origin,
    TrainerState,
    changes_of,
    check_training,
    data_hashes,
    open_checkpoint,
)
from pretrain.config import ConfigError, RunConfig, RunFailed, load_config, writing
from pretrain.config.errors import say
from pretrain.config.run import RunPhase, is_url
from pretrain.config.trajectory import (
    BY_NAME,
    DIGITS,
    Difference,
    check_differences,
    differences,
    scheduled_changes,
)
from pretrain.data.order import Blend, segment_of
from pretrain.data.stream import TokenStream, open_stream, wrong_sizes
from pretrain.data.tokenizer import load_tokenizer
from pretrain.evaluation.windows import Protocol, choose_protocols
from pretrain.model.attention import check_positions
from pretrain.model.gpt import build_model
from pretrain.optim.health import SpikeDetector
from pretrain.optim.zero import ZeroOptimizer
from pretrain.platform import device_name, versions
from pretrain.rundir.attempts import Owner, poisoned, read_attempts
from pretrain.rundir.checkpoints import (
    Branch,
    checkpoint_step,
    checkpoints_to_resume,
    find_checkpoint,
    new_id,
    saved_checkpoints,
)
from pretrain.rundir.files import make_directory
from pretrain.rundir.history import begins_branch, keeps_lines_of, recover, settle
from pretrain.rundir.jobs import PROVENANCE, Provenance, check_num_steps, write_provenance
from pretrain.rundir.metrics import evaluations_at
from pretrain.rundir.paths import RunPaths
from pretrain.topology import (
    Topology,
    first_problem,
    gather,
    host_name,
    on_main,
    owner,
    supervised_attempt,
)
from pretrain.topology import initialize as initialize_topology
from pretrain.training.metrics import StepMetrics
from pretrain.training.reporter import AttemptReporter, Requests
from pretrain.training.stragglers import StepTimes

if TYPE_CHECKING:
    from pretrain.training.replay import Ledger

# ---- Choose the checkpoint from which a run resumes ----


PassedOver = tuple[tuple[Path, str], ...]
"""Checkpoints that are passed over, each with the message that says why."""


def choose_checkpoint(
    config: RunConfig,
    resume: str,
    opened: Checkpoint | None = None,
    passed_over: PassedOver = (),
) -> tuple[Checkpoint | None, PassedOver]:
    """Open the checkpoint to resume from. `check_training` checks whether the run may resume there.

    Args:
        config: The run.
        resume: "auto" for the run's newest checkpoint that is not damaged, or from scratch if it
            has none at all; "none" to start from scratch; else the path of a run or a checkpoint.
        opened: The checkpoint that this function returned before. It is returned again, without
            reading its files again, if it is still the checkpoint to resume from.
        passed_over: Checkpoints that `auto` must pass over, because loading them failed.

    Returns:
        The checkpoint, or None to start from scratch; and the checkpoints that were passed over,
        because they are damaged or poisoned.

    Raises:
        ConfigError: There is no such checkpoint, it is damaged, or starting from scratch would
            overwrite it.
    """
    run = config.directory
    # Damaged ones count too, because they would be in the way of saves of the same steps.
    if resume == "none" and saved_checkpoints(run):
        raise ConfigError(
            f"{run}: has checkpoints, and --resume none would write over them. "
            "Resume (--resume auto), remove them, or set another run.directory"
        )
    # What a URL names is downloaded after the processes have joined (`bring`).
    if resume == "none" or is_url(resume):
        return None, ()
    if resume != "auto":
        return _open(find_checkpoint(Path(resume)), opened), ()
    left_out = poisoned(run, read_attempts(run)) | dict(passed_over)
    for path in checkpoints_to_resume(run):
        if path in left_out:
            continue
        try:
            return _open(path, opened), tuple(left_out.items())
        except DamagedCheckpoint as damage:
            left_out[path] = str(damage)
    if left_out:
        # Do not start from scratch, which could throw away weeks of training.
        lines = "".join(f"\n{path}: {first_sentence(why)}" for path, why in left_out.items())
        raise ConfigError(
            f"{run}: all of its checkpoints are damaged. Restore one of them, --resume one that is "
            f"elsewhere, or train anew in another run.directory{lines}"
        )
    return None, ()


def _open(path: Path, opened: Checkpoint | None) -> Checkpoint:
    """Return the checkpoint at `path`; `opened` if that is the same, unchanged checkpoint."""
    if opened is not None and opened.path == path and opened.is_unchanged():
        return opened
    return open_checkpoint(path)


def first_sentence(damage: str) -> str:
    """Return the first sentence of a message about damage; the others tell the user what to do."""
    return damage.partition(". ")[0]


def record_provenance(reporter: AttemptReporter) -> Provenance:
    """Write attempts/####/provenance.json: code, packages, device and command. Rank 0 alone."""
    attempt = reporter.attempt
    assert attempt is not None
    made = Provenance.here(Owner.read(attempt), sys.argv, versions(), device_name())
    try:
        write_provenance(attempt, made)
    except OSError as error:
        why = f"{attempt}: {PROVENANCE} cannot be written ({error.strerror}); training goes on"
        reporter.warn("provenance", why)
    return made


# ---- start point ----
# Find the checkpoint and step that a run starts from, and the evaluations that are pending.
#
# This is decided from files alone, before anything is built.


Evaluations = tuple[tuple[Protocol, ...], ...]
"""For each phase of a run, the protocols and lengths that every evaluation measures."""


@dataclass(frozen=True)
class StartPoint:
    """The checkpoint, step and pending evaluations that a run starts from."""

    checkpoint: Checkpoint | None = None
    """The checkpoint to resume from; None to start from scratch."""
    step: int = 0
    """Optimizer steps done."""
    phase: int = 1
    """The number of the phase that continues from the checkpoint; see `RunConfig.parts`."""
    evaluations: Evaluations = ((),)
    """The protocols and lengths that every evaluation measures, by phase."""
    pending_evaluations: tuple[Protocol, ...] = ()
    """Evaluations due after `step` that this run has not completed."""
    saved_step: int | None = 0
    """The step of which this run has a checkpoint: 0 from scratch (there is nothing to save), None
    if the checkpoint belongs to another run."""
    data: dict[str, str] = field(default_factory=dict)
    """The hashes of the run's data; see `data_hashes` in checkpoint/manifest.py."""
    differences: tuple[Difference, ...] = ()
    """Differences from the checkpoint's config and data, all of which are free or were allowed."""
    allowed: tuple[str, ...] = ()
    """Keys that may change although they change training."""
    begins_branch: bool = False
    """Checkpoints saved from here on belong to a new branch."""
    is_automatic: bool = False
    """The checkpoint was found by `auto`, so an earlier one may take its place."""
    passed_over: PassedOver = ()
    """Newer checkpoints that are passed over, and why."""
    provenance: Provenance | None = None
    """The code, packages and device of this attempt; None if there is nothing left to do."""

    def origin(self, config: RunConfig) -> Origin:
        """Return what the next save records about the origin of its state.

        Args:
            config: The run's config in the phase that continues.
        """
        if self.checkpoint is None:
            branch = Branch(new_id(), 0)
            return Origin(branches=(branch,), data=self.data, provenance=self.provenance)
        before, lineage = self.checkpoint.origin, self.checkpoint.lineage
        branches = lineage.branches
        if self.begins_branch:
            branches = (*branches, Branch(new_id(), lineage.step))
        trained, state = self.checkpoint.config, self.checkpoint.trainer_state
        changes = changes_of(self.differences, trained, config, state)
        return dataclasses.replace(
            before,
            parent=lineage.id,
            branches=branches,
            data=self.data,
            changes=(*before.changes, *changes),
            validation_loss_nats=None,
            provenance=self.provenance,
        )

    def is_finished(self, config: RunConfig) -> bool:
        """Return True if there is no step to take and nothing to evaluate."""
        return self.step >= config.train.num_steps and not self.pending_evaluations


def find_start_point(
    config: RunConfig, resume: str, known: StartPoint, evaluated: int | None = None
) -> StartPoint:
    """Find where the run starts from, and the phase that continues there.

    Args:
        config: The run.
        resume: "auto", "none" or a path; see `choose_checkpoint`.
        known: The facts that hold for any start: the hashes of the data, the keys that may change,
            the evaluations and the provenance. Also the checkpoint that was opened before, and the
            checkpoints that `auto` must pass over.
        evaluated: The step for which this process has already done the evaluation.

    Raises:
        ConfigError: As in `choose_checkpoint`; or a difference from the checkpoint is not allowed,
            or the checkpoint has done more steps than train.num_steps.
    """
    parts, evaluations = config.parts, known.evaluations
    evaluations = evaluations if len(evaluations) == len(parts) else ((),) * len(parts)
    checkpoint, passed_over = choose_checkpoint(config, resume, known.checkpoint, known.passed_over)
    known = StartPoint(
        evaluations=evaluations,
        data=known.data,
        allowed=known.allowed,
        provenance=known.provenance,
    )
    if checkpoint is None:
        return known
    step, last = checkpoint.trainer_state.step, config.train.num_steps
    check_num_steps(config, checkpoint.path, step)
    phase = config.phase_after(step)
    # At a border the evaluation belongs to the phase that ends there. An interrupted evaluation is
    # done with the config of that phase before the next phase begins.
    ended = parts[phase.number - 2] if phase.number > 1 and step == phase.first else phase
    pending: tuple[Protocol, ...] = ()
    # A step is evaluated before it is saved, so nothing is pending unless the run was stopped
    # during the evaluation, or its metrics are in another run's directory.
    if step != evaluated and is_evaluated_after(ended.config, step):
        done = evaluations_at(RunPaths(config.directory).metrics, step)
        # Records of another branch do not count, because they are moved away when training
        # continues from this checkpoint. A finished run does not continue, so its records stay.
        if step < last and not keeps_lines_of(config.directory, checkpoint.lineage):
            done = set()
        pending = tuple(p for p in evaluations[ended.number - 1] if p.key not in done)
    phase = ended if pending else phase
    differences = _check_going_on(config, phase, known.data, checkpoint, known.allowed)
    own_checkpoints = RunPaths(config.directory).checkpoints.resolve()
    is_own = checkpoint.path.resolve().parent == own_checkpoints
    return dataclasses.replace(
        known,
        checkpoint=checkpoint,
        step=step,
        phase=phase.number,
        pending_evaluations=pending,
        saved_step=step if is_own else None,
        differences=differences,
        # A checkpoint that was named may have been continued where this disk does not show it.
        begins_branch=resume != "auto"
        or begins_branch(config.directory, checkpoint.path, checkpoint.lineage),
        is_automatic=resume == "auto",
        passed_over=passed_over,
    )


def _check_going_on(
    config: RunConfig,
    phase: RunPhase,
    data: Mapping[str, str],
    checkpoint: Checkpoint,
    allowed: Collection[str],
) -> tuple[Difference, ...]:
    """Return the differences of a phase from a checkpoint, as `check_training` does.

    The changes with which a phase begins are allowed at its first step.
    """
    step, recorded = checkpoint.trainer_state.step, RunPaths(config.directory).config
    before = load_config(recorded).parts if config.phases and recorded.exists() else ()
    for old, new in zip(before, config.parts):
        # A phase that goes on is compared below. The last one may, also after it has ended.
        if min(old.end, new.end) > step or (old is before[-1] and old.end == step < new.end):
            break
        if old.end != new.end:
            raise ConfigError(
                f"phase {new.number}: ends at step {new.end}, and ended at {old.end} when it was "
                f"trained ({recorded}). Keep it, or train anew in another run.directory"
            )
        found = differences(old.config, new.config)
        check_differences(found, f"{recorded}, phase {new.number},", allowed)
    scheduled = scheduled_changes(config, step)
    return check_training(phase.config, data, checkpoint, {*allowed, *scheduled})


def evaluations_of(config: RunConfig, validation: TokenStream) -> tuple[Evaluations, list[str]]:
    """Return what every evaluation of a run measures, and lines about what is left out.

    Raises:
        ConfigError: The validation text is shorter than one window.
    """
    total, found, notes = len(validation), [], dict[str, None]()
    for part in (phase.config for phase in config.parts):
        protocols, said = choose_protocols(part, total)
        found.append(protocols)
        notes |= dict.fromkeys(said)
    return tuple(found), list(notes)


def is_evaluated_after(config: RunConfig, step: int) -> bool:
    """Return True every evaluation.interval_steps steps and after the last step."""
    last = config.train.num_steps
    return 0 < step <= last and (step % config.evaluation.interval_steps == 0 or step == last)


Streams = tuple[TokenStream, TokenStream]
"""The training and the validation split."""


@dataclass
class Run:
    """A run in this process, which the loop works on and hands to its hooks."""

    config: RunConfig
    """The config of the current phase; without phases, the run's."""
    whole: RunConfig
    """The config of the run, with all phases."""
    topology: Topology
    chunks: list[GPTModel]
    optimizer: ZeroOptimizer
    training_stream: TokenStream
    validation_stream: TokenStream
    state: TrainerState
    """The counts of steps and samples and what belongs to them; replaced after every step."""
    start_point: StartPoint
    requests: Requests
    reporter: AttemptReporter
    origin: Origin = field(default_factory=Origin)
    """What the next save records about the origin of its state."""
    spikes: SpikeDetector | None = None
    """Judges every step by train.spike_policy; None if that is "none"."""
    eos_id: int | None = None
    """End-of-document token, if data.per_document_attention; else None."""
    metrics: StepMetrics = field(default_factory=StepMetrics)
    """The values given to `record_metric` on this rank."""
    times: StepTimes = field(default_factory=StepTimes)
    """The seconds that this rank was busy in its steps."""
    ledger: Ledger | None = None
    """The states to which the run can go back, and the numbers to compare; None before training."""

    @property
    def is_over(self) -> bool:
        """Return True if the processes end: all phases are done, or the ranks agreed to stop."""
        return self.requests.agreed is not None or self.state.step >= self.whole.train.num_steps

    @property
    def phase_is_over(self) -> bool:
        """Return True if no step follows in this phase, or the ranks agreed to stop."""
        return self.requests.agreed is not None or self.state.step >= self.config.train.num_steps

    def release(self) -> None:
        """Free the memory of model and optimizer, before the next phase builds its own."""
        self.optimizer.release()
        self.ledger = None
        self.chunks.clear()
        del self.optimizer
        gc.collect()
        platform.empty_cache()

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
    # The sizes are checked later, by one rank of each node (`check_sizes`).
    train = open_stream(config, "train", check_sizes=False)
    streams = train, open_stream(config, "validation", check_sizes=False)
    # Otherwise a tokenizer that no export can hold would be noticed only after training.
    load_tokenizer(streams[0].tokenizer_path).check_trainable()
    # Every process checks before it joins, because processes that have joined wait for the others.
    for each in config.parts:
        segment_of(each.config, streams[0])
    evaluations_of(config, streams[1])
    checkpoint, _ = choose_checkpoint(config, resume)
    if checkpoint is not None:
        phase = config.phase_after(checkpoint.trainer_state.step)
        _check_going_on(config, phase, data_hashes(streams), checkpoint, allowed)
    return streams, initialize_topology(config), checkpoint


def check_sizes(topology: Topology, streams: Streams) -> None:
    """Check the size of every file of the data, on one rank of each node. All ranks together.

    If every rank did so, 1,024 ranks would look at 39,000 shards 40 million times.

    Raises:
        ConfigError: On every rank, if a file is missing or has another size.
        RunFailed: On every rank, if the folder cannot be read.
    """
    hosts = gather(host_name(), str)
    problem: ConfigError | RunFailed | None = None
    if hosts.index(host_name()) == topology.rank:
        try:
            found = (wrong_sizes(stream.directory, stream.manifest) for stream in streams)
            problem = next(chain(*found), None)
        except RunFailed as error:
            problem = error
    if (first := first_problem(problem)) is not None:
        raise first


def check_same_data(data: Mapping[str, str], directory: str) -> None:
    """Check that all ranks read the same data. All ranks together, before anything is written.

    Nodes may have different data sets at the same path. Pipeline stages would then train on the
    inputs of one data set and the targets of another, and the loss would not show it.

    Args:
        data: The hashes of this rank's data; see `data_hashes` in checkpoint/manifest.py.
        directory: This rank's data.directory.

    Raises:
        ConfigError: On every rank, if the hashes differ.
    """
    gathered = gather((host_name(), directory, dict(data)), tuple[str, str, dict[str, str]])
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


def take_run(
    config: RunConfig, resume: str, reporter: AttemptReporter, known: StartPoint
) -> StartPoint:
    """Lock the run for this process and find where it starts from. Rank 0 alone.

    A finished run is not locked, so that starting it again leaves no trace.

    Args:
        config: The run.
        resume: "auto", "none" or a path; see `choose_checkpoint`.
        reporter: Holds the run's lock from now on.
        known: As in `find_start_point`, with the checkpoint that `prepare` opened.

    Raises:
        ConfigError: run.directory cannot be made, or (RunBusy) another process trains the run.
    """
    supervised = supervised_attempt()
    start_point = find_start_point(config, resume, known)
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
    # Searched again, because another process may have trained the run until the lock was taken.
    known = dataclasses.replace(known, checkpoint=start_point.checkpoint)
    start_point = find_start_point(config, resume, known)
    _say_passed_over(start_point)
    return dataclasses.replace(start_point, provenance=record_provenance(reporter))


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
        config: The run, with all phases.
        streams: The training and the validation split.
        topology: The layout of the processes.
        start_point: Where the run starts from; the same on every rank.
        requests: Requests that signals make to this process while it trains.
        reporter: Reports phases and progress to the supervisor; writes only on rank 0.

    Raises:
        ConfigError: The checkpoint does not fit the model or is damaged.
        RunFailed: Attention does not add the positions that the config asks for.
    """
    if topology.is_main:
        # For the line about the chosen attention backend: by default Python drops the level INFO.
        log = logging.getLogger("pretrain.kernels")
        if not log.handlers:
            log.addHandler(logging.StreamHandler())
            log.setLevel(logging.INFO)
    built = None
    while built is None:
        part = config.parts[start_point.phase - 1].config
        chunks = build_model(part)
        check_positions(part, chunks, config.parts[start_point.phase :])
        optimizer = ZeroOptimizer(part, topology, chunks)
        built, start_point = _load(config, topology, start_point, optimizer)
        if built is None:
            optimizer.release()
    changed = {each.key for each in start_point.differences if each.effect in BY_NAME}
    segment = segment_of(part, streams[0], built.segment, built.consumed_samples, changed)
    state = dataclasses.replace(built, segment=segment)
    on_main(topology, lambda: _settle(config, start_point, reporter.attempt))
    return Run(
        part,
        config,
        topology,
        chunks,
        optimizer,
        *streams,
        state,
        start_point,
        requests,
        reporter,
        start_point.origin(part),
        _spike_detector(part, state, forgets=bool(changed)),
        streams[0].manifest.eos_id if part.data.per_document_attention else None,
    )


def _spike_detector(config: RunConfig, state: TrainerState, forgets: bool) -> SpikeDetector | None:
    """Return the detector that judges every step, with its state from the checkpoint.

    Args:
        config: The run.
        state: The state of training.
        forgets: Forget the window of earlier steps, because keys that affect training have changed
            and losses may jump.
    """
    train = config.train
    if train.spike_policy == "none":
        return None
    detector = SpikeDetector(train.spike_threshold, train.spike_window_steps)
    detector.load(state.spikes, forgets=forgets)
    return detector


def _load(
    config: RunConfig, topology: Topology, start_point: StartPoint, optimizer: ZeroOptimizer
) -> tuple[TrainerState | None, StartPoint]:
    """Load the checkpoint, or with `auto` the newest one before it that is not damaged.

    All ranks together: if the checkpoint is damaged, the error is raised on all of them.

    Args:
        config: The run, with all phases.
        topology: The layout of the processes.
        start_point: Where the run is to start from.
        optimizer: The newly built optimizer; its model is loaded with it.

    Returns:
        The loaded state of training, and where the run starts from. The state is None if the start
        lies in another phase, whose model has to be built first.
    """
    phase = start_point.phase
    part = config.parts[phase - 1].config
    while start_point.checkpoint is not None and start_point.phase == phase:
        try:
            return load_checkpoint(start_point.checkpoint, optimizer, part), start_point
        except DamagedCheckpoint as damage:
            if not start_point.is_automatic:
                raise
            left_out = (*start_point.passed_over, (start_point.checkpoint.path, str(damage)))
            known = dataclasses.replace(start_point, checkpoint=None, passed_over=left_out)
            find = partial(find_start_point, config, "auto", known)
            start_point = on_main(topology, find, StartPoint)
            if topology.is_main:
                _say_passed_over(start_point)
    if start_point.phase != phase:
        return None, start_point
    return TrainerState(step=0, consumed_samples=0), start_point


def _say_passed_over(start_point: StartPoint) -> None:
    """Print which newer checkpoints are passed over and how many steps are lost with them."""
    for path, why in start_point.passed_over:
        lost = (checkpoint_step(path.name) or 0) - start_point.step
        say(
            f"warning: {path} is passed over ({first_sentence(why)}) and set aside; training goes "
            f"on from step {start_point.step}, {lost} steps are lost and trained again"
        )


def _settle(config: RunConfig, start_point: StartPoint, attempt: Path | None) -> None:
    """Set aside checkpoints of other branches. Rank 0 alone, once the checkpoint is loaded."""
    if start_point.checkpoint is None:
        return
    path, lineage = start_point.checkpoint.path, start_point.checkpoint.lineage
    passed_over = {each.name: first_sentence(why) for each, why in start_point.passed_over}
    with writing(config.directory):
        folder = settle(config.directory, path, lineage, passed_over, attempt)
    if folder is not None:
        names = ", ".join(sorted(found.name for found in folder.glob("step-*")))
        say(
            f"{config.directory}: {names} moved to {folder}, because training goes on from step "
            f"{start_point.step}"
        )

"""Find the checkpoint and step that a run starts from, and the evaluations that are pending.

This is decided from files alone, before anything is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field

from pretrain.checkpoint.changes import changes_of, check_training
from pretrain.checkpoint.content import Origin
from pretrain.checkpoint.manifest import Checkpoint
from pretrain.config import ConfigError, RunConfig
from pretrain.config.trajectory import Difference
from pretrain.data.stream import TokenStream
from pretrain.evaluate.protocols import choose_protocols
from pretrain.evaluate.windows import Protocol
from pretrain.rundir.history import begins_branch, keeps_lines_of
from pretrain.rundir.lineage import Branch, new_id
from pretrain.rundir.metrics import evaluations_at
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.provenance import Provenance
from pretrain.train.choice import Damaged, choose_checkpoint


@dataclass(frozen=True)
class StartPoint:
    """The checkpoint, step and pending evaluations that a run starts from."""

    checkpoint: Checkpoint | None = None
    """The checkpoint to resume from; None to start from scratch."""
    step: int = 0
    """Optimizer steps done."""
    evaluations: tuple[Protocol, ...] = ()
    """What every evaluation of this run measures."""
    pending_evaluations: tuple[Protocol, ...] = ()
    """Evaluations due after `step` that this run has not completed. They may have been left out on
    purpose (`pretrain.train.time_share`), which is decided again, and alike."""
    saved_step: int | None = 0
    """The step of which this run has a checkpoint: 0 from scratch (there is nothing to save), None
    when the checkpoint belongs to another run."""
    data: dict[str, str] = field(default_factory=dict)
    """The hashes of the run's data; see `data_hashes` in checkpoint/changes.py."""
    differences: tuple[Difference, ...] = ()
    """What differs from the checkpoint's config and data; all of it is free or was allowed."""
    allowed: tuple[str, ...] = ()
    """Keys that may change although they change training."""
    begins_branch: bool = False
    """What is saved from here on belongs to a branch of its own."""
    is_automatic: bool = False
    """The checkpoint was found by `auto`, so an earlier one may take its place."""
    damaged: Damaged = ()
    """Newer checkpoints that cannot be used, and why."""
    provenance: Provenance | None = None
    """What this attempt is made with; None if there is nothing left to do."""
    provenance_changes: tuple[str, ...] = ()
    """Lines that say what of it changed since the last start."""

    def origin(self) -> Origin:
        """Return what the next save records about where its state comes from."""
        if self.checkpoint is None:
            branch = Branch(new_id(), 0)
            return Origin(branches=(branch,), data=self.data, provenance=self.provenance)
        before, lineage = self.checkpoint.origin, self.checkpoint.lineage
        branches = lineage.branches
        if self.begins_branch:
            branches = (*branches, Branch(new_id(), lineage.step))
        return dataclasses.replace(
            before,
            parent=lineage.id,
            branches=branches,
            data=self.data,
            changes=(*before.changes, *changes_of(self.differences, self.checkpoint.trainer_state)),
            validation_loss_nats=None,
            provenance=self.provenance,
        )

    def is_finished(self, config: RunConfig) -> bool:
        """Return True if there is no step to take and nothing to evaluate."""
        return self.step >= config.train.num_steps and not self.pending_evaluations


def find_start_point(
    config: RunConfig,
    resume: str,
    opened: Checkpoint | None,
    data: dict[str, str],
    allowed: Collection[str] = (),
    damaged: Damaged = (),
    evaluations: tuple[Protocol, ...] = (),
) -> StartPoint:
    """Find where the run starts from.

    Args:
        config: The run.
        resume: "auto", "none" or a path; see `choose_checkpoint`.
        opened: A checkpoint that `choose_checkpoint` has returned before.
        data: The hashes of the run's data; see `data_hashes`.
        allowed: Keys that may change although they change training.
        damaged: Checkpoints that `auto` must pass over, and why.
        evaluations: What every evaluation of this run measures; see `evaluations_of`.

    Raises:
        ConfigError: As `choose_checkpoint`, a difference from the checkpoint is not allowed, or the
            checkpoint has done more steps than train.num_steps.
    """
    checkpoint, damaged = choose_checkpoint(config, resume, opened, damaged)
    if checkpoint is None:
        return StartPoint(data=data, allowed=tuple(allowed), evaluations=evaluations)
    step, last = checkpoint.trainer_state.step, config.train.num_steps
    if step > last:
        raise ConfigError(
            f"train.num_steps = {last}: {checkpoint.path} has done {step} steps already. Set "
            f"{step} or more, or --resume an earlier checkpoint"
        )
    differences = check_training(config, data, checkpoint, allowed)
    pending: tuple[Protocol, ...] = ()
    # A step is evaluated before it is saved, so nothing is pending unless the run was stopped
    # during the evaluation, or its metrics are in another run's directory.
    if is_evaluated_after(config, step):
        done = evaluations_at(RunPaths(config.directory).metrics, step)
        # Records of another branch do not count: they are moved away when training goes on from
        # this checkpoint. A finished run does not train on, so its records stay.
        if step < last and not keeps_lines_of(config.directory, checkpoint.lineage):
            done = set()
        pending = tuple(p for p in evaluations if p.key not in done)
    own_checkpoints = RunPaths(config.directory).checkpoints.resolve()
    is_own = checkpoint.path.resolve().parent == own_checkpoints
    return StartPoint(
        checkpoint,
        step,
        evaluations,
        pending,
        step if is_own else None,
        data,
        differences,
        tuple(allowed),
        begins_branch(config.directory, checkpoint.path, checkpoint.lineage),
        resume == "auto",
        damaged,
    )


def evaluations_of(
    config: RunConfig, validation: TokenStream
) -> tuple[tuple[Protocol, ...], list[str]]:
    """Return what every evaluation of a run measures, and lines that say what is left out.

    Raises:
        ConfigError: The validation text is shorter than one window.
    """
    total = len(validation)
    tokens = min(total, config.evaluation.max_tokens or total)
    return choose_protocols(config, config.evaluation.protocols, tokens, total)


def is_evaluated_after(config: RunConfig, step: int) -> bool:
    """Return True every evaluation.interval_steps steps and after the last step.

    In between, `pretrain.train.time_share` may leave an evaluation out.
    """
    last = config.train.num_steps
    return 0 < step <= last and (step % config.evaluation_interval_steps == 0 or step == last)

"""The hooks that the loop calls around its steps: logging, profiles, health, saving and uploads.

`pretrain.train.hook` has the interface.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from pretrain import platform
from pretrain.checkpoint.save import Saver
from pretrain.checkpoint.uploader import Uploader
from pretrain.config import num_parameters
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.model.flops import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.rundir.checkpoints import check_room, checkpoint_directory
from pretrain.rundir.metrics import Record
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import Phase
from pretrain.train.evaluation_hook import EvaluationHook
from pretrain.train.health import check_health
from pretrain.train.hook import Hook
from pretrain.train.metrics import PASS, MetricsWriter
from pretrain.train.profile import Profiler
from pretrain.train.start import Run
from pretrain.train.step import agree
from pretrain.train.upload import Patience


def make_hooks(run: Run) -> list[Hook]:
    """Return a run's hooks in the order in which they are called.

    A step is logged and evaluated before it is saved. A checkpoint thus means that its step's
    numbers are on disk, and what a resumed run finds undone is only an evaluation that was broken
    off (`find_start_point`). Its health is checked right before it is saved.
    """
    tokenizer = load_tokenizer(run.validation_stream.tokenizer_path)
    writer = None
    if run.topology.is_main:
        writer = MetricsWriter(run.config, run.config.directory, run.state.step, run.origin.changes)
    saver = CheckpointHook(run, writer, tokenizer)
    return [
        # First, so that what follows the last step that it records is not in the trace.
        ProfileHook(run),
        LoggingHook(run, writer),
        EvaluationHook(run, writer),
        HealthHook(saver),
        saver,
        UploadHook(run),
    ]


class LoggingHook(Hook):
    """Pass records of steps, with rates, and of changes to the writer; on rank 0 alone."""

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        self.writer = writer
        self.peak_tflops_per_second = peak_tflops_per_second(platform.device_name())
        self.blend = run.blend
        self.sequence_length = length = run.config.data.sequence_length
        # Suffix of the metric's name -> FLOPs of one token. Two conventions are in use: all of the
        # attention scores (PaLM), or only the causal half (Megatron-LM). See model/flops.py.
        self.flops_per_token = {
            "": flops_per_token(run.config, length, causal=False),
            "_causal": flops_per_token(run.config, length, causal=True),
        }

    def at_start(self, run: Run) -> None:
        """Log what was allowed to change at the step that training goes on from."""
        step = run.state.step
        changed = {c.key: [c.before, c.after] for c in run.origin.changes if c.step == step}
        if self.writer is not None and changed:
            self.writer.changed({"step": step, "changed": changed})

    def after_step(self, run: Run, record: Record) -> None:
        """Log one step. tokens_per_second is the whole job's; TFLOP/s and MFU are per device."""
        if self.writer is None:
            return
        size, consumed = record["global_batch_size"], record["consumed_samples"]
        rate = size * self.sequence_length / record["step_seconds"]
        rate_per_device = rate / run.topology.layout.world_size
        record["tokens_per_second"] = rate
        for suffix, flops in self.flops_per_token.items():
            record[f"tflops_per_second{suffix}"] = flops * rate_per_device / 1e12
            if self.peak_tflops_per_second:
                record[f"model_flops_utilization{suffix}"] = model_flops_utilization(
                    rate_per_device, flops, self.peak_tflops_per_second
                )
        record["peak_memory_bytes"] = platform.peak_memory_bytes()
        for corpus, number in self.blend.passes_begun(consumed - size, consumed).items():
            record[f"{PASS}{corpus}"] = number
        self.writer.step(record)

    def after_rollback(self, run: Run) -> None:
        """Drop the records of the steps that are taken again."""
        if self.writer is not None:
            self.writer.go_back(run.state.step)
        # `go_back` has dropped the record of the changes, which still hold.
        self.at_start(run)

    def close(self) -> None:
        """Close the writer, which the evaluation hook shares."""
        if self.writer is not None:
            self.writer.close()


class ProfileHook(Hook):
    """Record the steps of train.profile_steps; on rank 0 alone."""

    def __init__(self, run: Run) -> None:
        self.profiler = Profiler(run.config, run.topology.is_main, run.reporter.warn)

    def before_step(self, run: Run) -> None:
        """Begin to record, if the next step is to be, and mark where it begins."""
        self.profiler.begin_step(run.state.step + 1)

    def is_due(self, run: Run) -> bool:
        """Return True around the steps, so that they are recorded whole and no others."""
        return run.state.step in self.profiler.borders

    def between_steps(self, run: Run) -> None:
        """Write what was recorded after the last of the steps."""
        if run.state.step == max(self.profiler.borders, default=None):
            self.profiler.end()

    def before_rollback(self, run: Run) -> None:
        """Write what was recorded: the steps that follow are others."""
        self.profiler.end()

    def close(self) -> None:
        """Write what was recorded of a run that is stopped meanwhile."""
        self.profiler.end()


class HealthHook(Hook):
    """Check the health of all ranks every train.consistency_interval_steps and before each save."""

    def __init__(self, saver: Hook) -> None:
        """Check whenever `saver` is due, which comes next in the order of hooks."""
        self.saver = saver

    def at_start(self, run: Run) -> None:
        """Check what was built or loaded, before anything is trained on it."""
        check_health(run)

    def is_due(self, run: Run) -> bool:
        """Return True if the step is to be checked."""
        interval = run.config.train.consistency_interval_steps
        is_regular = interval > 0 and run.state.step % interval == 0
        return is_regular or self.saver.is_due(run)

    def between_steps(self, run: Run) -> None:
        """Check if it is due. All ranks together; RunFailed or Diverged on all of them."""
        if self.is_due(run):
            check_health(run)


class CheckpointHook(Hook):
    """Save every checkpoint.interval_steps, after the last step, and when the run is stopped."""

    def __init__(self, run: Run, writer: MetricsWriter | None, tokenizer: Tokenizer) -> None:
        self.saved_step = run.start_point.saved_step
        self.writer = writer
        self.reported_step: int | None = None
        self.saver = Saver(
            run.config,
            run.topology,
            run.optimizer,
            run.reporter.attempt,
            run.reporter.warn,
            tokenizer,
        )
        run.requests.has_problem = lambda: self.saver.has_problem

    def at_start(self, run: Run) -> None:
        """Save a run that is stopped before its first step, unless it has that step on disk.

        It has not if it began with another run's checkpoint.
        """
        if run.requests.agreed:
            self._save(run)

    def after_step(self, run: Run, record: Record) -> None:
        """Report that a checkpoint was published beside training."""
        if not run.topology.is_main:
            return
        published = self.saver.published_step
        if published is not None and published != self.reported_step:
            run.reporter.phase(Phase.TRAINING, record["step"], saved=published)
            self.reported_step = published

    def is_due(self, run: Run) -> bool:
        """Return True if the step is to be saved, or a save has failed."""
        return run.requests.problem_agreed or self._is_save_due(run)

    def between_steps(self, run: Run) -> None:
        """Save if it is due. All ranks together."""
        step, last = run.state.step, run.config.train.num_steps
        if run.requests.problem_agreed:
            # Raises the problem on every rank.
            self.saver.finish()
        if self._is_save_due(run):
            self._save(run)
        # A request may have come while saving, which can take minutes. The run then stops here,
        # rather than one step and a second save later. A rank votes as soon as its own part of the
        # save is over; what it is asked after that is voted on with the next step.
        if self.saved_step == step < last and not run.requests.agreed:
            agree(run.requests)
        if self._is_last(run) and self.saver.is_busy:
            with run.reporter.during(Phase.SAVING, step, saved=self.saved_step):
                self.saver.finish()

    def close(self) -> None:
        """End the process that writes."""
        self.saver.close()

    def _is_save_due(self, run: Run) -> bool:
        step, config = run.state.step, run.config
        is_last = step == config.train.num_steps
        is_regular = step % config.checkpoint.interval_steps == 0
        return bool(run.requests.agreed) or is_regular or is_last

    def _is_last(self, run: Run) -> bool:
        """Return True if the processes end after this step: its checkpoint is waited for."""
        return bool(run.requests.agreed) or run.state.step >= run.config.train.num_steps

    def before_rollback(self, run: Run) -> None:
        """Wait for the save under way: its checkpoint is the newest."""
        self.saver.finish()

    def newest_checkpoint(self, run: Run) -> Path | None:
        """Return the checkpoint that this process saved last, or else the one it began with."""
        if self.saved_step:
            return checkpoint_directory(run.config.directory, self.saved_step)
        began_with = run.start_point.checkpoint
        return began_with.path if began_with is not None else None

    def _save(self, run: Run) -> None:
        """Save the run at its present step, once."""
        step = run.state.step
        if step == self.saved_step:
            return
        waits = self._is_last(run) or not self.saver.is_asynchronous
        with run.reporter.during(Phase.SAVING, step, saved=step if waits else None):
            identifier = self.saver.begin(run.state, run.origin, lambda: self._prepare(run))
            if waits:
                self.saver.finish()
        run.origin = dataclasses.replace(run.origin, parent=identifier, validation_loss_nats=None)
        self.saved_step = step

    def _prepare(self, run: Run) -> None:
        """Check that there is room for a checkpoint, and put all numbers so far on the disk."""
        paths = RunPaths(run.config.directory)
        check_room(paths.checkpoints, run.config.state_bytes * num_parameters(run.config))
        if self.writer is not None:
            self.writer.flush()


class UploadHook(Hook):
    """Upload every checkpoint beside training; a failure warns and is tried again."""

    def __init__(self, run: Run) -> None:
        """Start the process that uploads, on rank 0, if checkpoint.upload_to is set."""
        self.run, self.is_over = run, False
        url = run.config.checkpoint.upload_to
        self.uploader = None
        if url is not None and run.topology.is_main:
            self.uploader = Uploader(run.config.directory, url)

    def after_step(self, run: Run, record: Record) -> None:
        """Warn if the process that uploads has ended."""
        if self.uploader is not None:
            self.uploader.check()

    def close(self) -> None:
        """Upload what is missing if the run has ended as it should; say what could not be."""
        if self.uploader is None:
            return
        run, config = self.run, self.run.config
        has_stopped = run.requests.agreed and not run.requests.is_leaving
        if run.state.step < config.train.num_steps and not has_stopped:
            # It failed. The next start makes up for what is not uploaded.
            self.uploader.close()
            return
        missing = self.uploader.finish(Patience(run).may_wait)
        for line in missing:
            print(f"warning: {line}", file=sys.stderr)
        if missing:
            print(
                f"warning: {config.directory}: these checkpoints are on the disk but not in "
                f"{config.checkpoint.upload_to}. Upload them with `pretrain checkpoint upload "
                f"{config.directory}`",
                file=sys.stderr,
                flush=True,
            )

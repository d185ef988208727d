"""What the loop calls around its steps: logging, evaluation and saving.

Numbers of a step reach the hooks while the device works on the next one. A hook that needs the
model as it stands after a step says that it is due, and is called between two steps.

Hooks read the run and never steer it, with one exception: a request to stop has to be agreed on by
all ranks, and where a hook runs for long it has the ranks agree in between. An evaluation does so
before each of its passes and is broken off when they have agreed; a save does so when it is done.
A stopped run then saves its step, and the evaluation is done at the next start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from pretrain import platform
from pretrain.checkpoint.save import save_checkpoint
from pretrain.config import num_parameters
from pretrain.data.manifest import TOKENIZER
from pretrain.data.tokenizer import Tokenizer
from pretrain.evaluate.perplexity import Evaluator, Protocol
from pretrain.model.flops import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.rundir.checkpoints import check_room
from pretrain.rundir.lineage import read_lineage
from pretrain.rundir.metrics import Record
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import Phase
from pretrain.topology import on_main
from pretrain.train.metrics import MetricsWriter
from pretrain.train.start import Run, is_evaluated_after, protocols
from pretrain.train.step import agree
from pretrain.train.stopping import Interrupted

STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: the fp32 master and Adam's two moments."""


class Hook:
    """The interface that the loop calls on every rank. Each hook overrides what it needs."""

    def at_start(self, run: Run) -> None:
        """Finish the work that the previous attempt left undone at this step."""

    def after_step(self, run: Run, record: Record) -> None:
        """Act on a step's numbers (`QueuedStep.read`), while the next step may be under way."""

    def is_due(self, run: Run) -> bool:
        """Return True if the hook has to act before the next step begins, alike on all ranks."""
        return False

    def between_steps(self, run: Run) -> None:
        """Act with no step under way. Called on all hooks as soon as one of them is due."""

    def close(self) -> None:
        """Release what the hook holds; called once, also after a failure."""


def make_hooks(run: Run) -> list[Hook]:
    """Return a run's hooks in the order in which they are called.

    A step is logged and evaluated before it is saved. A checkpoint thus means that its step's
    numbers are on disk, and what a resumed run finds undone is only an evaluation that was broken
    off (`find_start_point`).
    """
    writer = None
    if run.topology.is_main:
        writer = MetricsWriter(run.config, run.config.directory, run.state.step)
    return [LoggingHook(run, writer), EvaluationHook(run, writer), CheckpointHook(run, writer)]


class LoggingHook(Hook):
    """Add rates to a step's record and pass it to the writer; on rank 0 alone."""

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        self.writer = writer
        self.peak_tflops_per_second = peak_tflops_per_second(platform.device_name())
        length = run.config.data.sequence_length
        # Suffix of the metric's name -> FLOPs of one token. Two conventions are in use: all of the
        # attention scores (PaLM), or only the causal half (Megatron-LM). See model/flops.py.
        self.flops_per_token = {
            "": flops_per_token(run.config, length, causal=False),
            "_causal": flops_per_token(run.config, length, causal=True),
        }

    def after_step(self, run: Run, record: Record) -> None:
        """Log one step. tokens_per_second is the whole job's; TFLOP/s and MFU are per device."""
        if self.writer is None:
            return
        rate = run.config.tokens_per_step / record["step_seconds"]
        rate_per_device = rate / run.topology.layout.world_size
        record["tokens_per_second"] = rate
        for suffix, flops in self.flops_per_token.items():
            record[f"tflops_per_second{suffix}"] = flops * rate_per_device / 1e12
            if self.peak_tflops_per_second:
                record[f"model_flops_utilization{suffix}"] = model_flops_utilization(
                    rate_per_device, flops, self.peak_tflops_per_second
                )
        record["peak_memory_bytes"] = platform.peak_memory_bytes()
        self.writer.step(record)

    def close(self) -> None:
        """Close the writer, which the evaluation hook shares."""
        if self.writer is not None:
            self.writer.close()


class EvaluationHook(Hook):
    """Measure perplexity at several lengths, every evaluation.interval_steps and at the end."""

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        config = run.config
        self.writer = writer
        self.evaluator = Evaluator(
            run.chunks,
            run.topology,
            run.validation_stream,
            Tokenizer(config.data_directory / TOKENIZER).eos_id,
            tokens_per_batch=config.evaluation.tokens_per_batch,
            max_tokens=config.evaluation.max_tokens,
            schedule_module=run.optimizer.schedule_module,
        )

    def at_start(self, run: Run) -> None:
        """Do the evaluations that the previous attempt was stopped in."""
        self._evaluate(run, run.start_point.pending_evaluations)

    def is_due(self, run: Run) -> bool:
        """Return True if the step is to be evaluated."""
        return is_evaluated_after(run.config, run.state.step)

    def between_steps(self, run: Run) -> None:
        """Evaluate if it is due. All ranks score; rank 0 writes."""
        # A loss of an earlier step says nothing about the checkpoint of this one.
        run.origin = dataclasses.replace(run.origin, validation_loss_nats=None)
        if self.is_due(run):
            self._evaluate(run, protocols(run.config))

    def _evaluate(self, run: Run, pending: Sequence[Protocol]) -> None:
        """Evaluate and write all of `pending`, or nothing if the ranks agree to stop meanwhile."""
        if not pending or run.requests.agreed:
            return
        step = run.state.step

        def before_pass() -> None:
            run.reporter.progress(step)
            agree(run.requests)
            if run.requests.agreed:
                raise Interrupted

        # All results are written at once or not at all, so that the metrics never hold a part of
        # an evaluation: what was scored before a stop is dropped and done again.
        with run.reporter.during(Phase.EVALUATING, step), contextlib.suppress(Interrupted):
            results = [
                self.evaluator.evaluate(protocol, before_pass=before_pass) for protocol in pending
            ]
            if self.writer is not None:
                self.writer.evaluation(
                    [{"step": step, "evaluation": True, **result.record()} for result in results]
                )
            trained = "nonoverlapping", run.config.data.sequence_length
            for result in results:
                is_trained = (result.protocol.name, result.protocol.length) == trained
                if is_trained and math.isfinite(result.loss_nats):
                    run.origin = dataclasses.replace(
                        run.origin, validation_loss_nats=result.loss_nats
                    )


class CheckpointHook(Hook):
    """Save every checkpoint.interval_steps, after the last step, and when the run is stopped."""

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        self.saved_step = run.start_point.saved_step
        self.writer = writer

    def at_start(self, run: Run) -> None:
        """Save a run that is stopped before its first step, unless it has that step on disk.

        It has not if it began with another run's checkpoint.
        """
        if run.requests.agreed:
            self._save(run)

    def is_due(self, run: Run) -> bool:
        """Return True if the step is to be saved."""
        step, config = run.state.step, run.config
        is_last = step == config.train.num_steps
        is_regular = step % config.checkpoint.interval_steps == 0
        return bool(run.requests.agreed) or is_regular or is_last

    def between_steps(self, run: Run) -> None:
        """Save if it is due. All ranks together."""
        step, last = run.state.step, run.config.train.num_steps
        if self.is_due(run):
            self._save(run)
        # A request may have come while saving, which can take minutes. The run then stops here,
        # rather than one step and a second save later.
        if self.saved_step == step < last and not run.requests.agreed:
            agree(run.requests)

    def _save(self, run: Run) -> None:
        """Save the run at its present step, once."""
        step = run.state.step
        if step == self.saved_step:
            return
        with run.reporter.during(Phase.SAVING, step, saved=step):
            # Refused on all ranks before anything is written.
            on_main(run.topology, lambda: self._prepare(run))
            saved = save_checkpoint(
                run.config,
                run.topology,
                run.optimizer,
                run.state,
                run.origin,
                run.reporter.attempt,
                run.reporter.warn,
            )
        if run.topology.is_main and (lineage := read_lineage(saved)) is not None:
            run.origin = dataclasses.replace(
                run.origin, parent=lineage.id, validation_loss_nats=None
            )
        self.saved_step = step

    def _prepare(self, run: Run) -> None:
        """Check that there is room for a checkpoint, and put all numbers so far on the disk."""
        paths = RunPaths(run.config.directory)
        check_room(paths.checkpoints, STATE_BYTES * num_parameters(run.config))
        if self.writer is not None:
            self.writer.flush()

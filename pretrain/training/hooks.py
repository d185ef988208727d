"""The hooks that the loop calls around its steps: logging, profiles, health, saving and uploads.

`pretrain.training.step` has the interface.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain import platform
from pretrain.checkpoint.save import Saver
from pretrain.checkpoint.store import Uploader
from pretrain.config import RunConfig, num_parameters
from pretrain.config.run import recorded_protocol
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.evaluation.perplexity import Evaluator, check_memory
from pretrain.evaluation.records import HASH_DIGITS
from pretrain.evaluation.windows import Protocol, ScoredText
from pretrain.model.flops import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.rundir.checkpoints import check_room, checkpoint_directory
from pretrain.rundir.files import say
from pretrain.rundir.metrics import CHANGED, EVALUATION, Record, is_evaluation, read_metrics
from pretrain.rundir.paths import Phase, RunPaths
from pretrain.topology import on_main
from pretrain.training.health import check_health
from pretrain.training.metrics import PASS, MetricsWriter
from pretrain.training.profile import ProfileHook
from pretrain.training.reporter import Interrupted
from pretrain.training.start import Run, is_evaluated_after
from pretrain.training.step import Hook, agree
from pretrain.training.upload import Patience

# ---- time share ----
# Bound the time of the evaluations in the training loop by a share of the time of training.
#
# An evaluation scores the same tokens whenever it is done, so that the points of a curve, and the
# curves of several runs, stay comparable. What adapts is how often: an evaluation that would take
# too much is left out, and the next one is due an interval later.
#
# The decision follows from the run's metrics.jsonl alone, which holds the seconds of every step and
# every evaluation. A restart therefore decides as the run did before.


SECONDS, SHARE = "evaluation_seconds", "evaluation_time_share"
"""Keys of an evaluation's record: what this protocol and length took, and what all evaluations of
the run so far have taken, as a share of the seconds in training steps."""


@dataclass(frozen=True)
class Spent:
    """Seconds that a run has spent up to a step."""

    training: float = 0.0
    """In training steps; steps that were lost and taken again count once."""
    evaluations: float = 0.0
    """In evaluations."""
    newest: float | None = None
    """In the newest evaluation, all lengths together; None before the first one."""
    samples: int = 0
    """Sequences of the training steps."""

    @staticmethod
    def of(path: Path, step: int) -> Spent:
        """Add up the records of a metrics.jsonl.

        Args:
            path: The file; a missing one is empty.
            step: The last step that counts.
        """
        training, evaluations, samples = 0.0, {0: 0.0}, 0
        for record in read_metrics(path):
            number = record["step"]
            if number > step:
                continue
            if is_evaluation(record):
                seconds = evaluations.get(number, 0.0) + _number(record, SECONDS)
                evaluations[number] = seconds
            training += _number(record, "step_seconds")
            samples += int(_number(record, "global_batch_size"))
        newest = evaluations[max(evaluations)]
        return Spent(training, sum(evaluations.values()), newest or None, samples)

    def share(self, further: float = 0.0) -> float:
        """Return the share of the training steps' seconds that evaluations have taken.

        Args:
            further: Seconds of an evaluation to add.
        """
        total = self.evaluations + further
        return total / self.training if self.training else float(total > 0)

    def next_evaluation(
        self, config: RunConfig, protocols: Sequence[Protocol], tokens: int
    ) -> float:
        """Return the seconds that another evaluation will take: as many as the newest one.

        Before the first one they are estimated from the training steps. A forward pass has a third
        of the operations of a step, and as many tokens pass through the model as the windows hold.

        Args:
            config: The run.
            protocols: What is measured.
            tokens: Tokens that are scored.
        """
        if self.newest is not None:
            return self.newest
        length = config.data.sequence_length
        trained = self.samples * length * flops_per_token(config, length, causal=False)
        flops = 0.0
        for protocol in protocols:
            _, stride, window = protocol.key
            passing = tokens * window / stride
            flops += passing * flops_per_token(config, window, causal=False) / 3
        return self.training * flops / trained if trained else 0.0


def refusal(
    config: RunConfig, protocols: Sequence[Protocol], tokens: int, step: int, spent: Spent
) -> str | None:
    """Return why the evaluation after a step is left out, or None if it may be done.

    The last step is always evaluated.

    Args:
        config: The run.
        protocols: What is measured.
        tokens: Tokens that are scored.
        step: The step.
        spent: What the run has spent up to it.
    """
    limit = config.evaluation_time_share
    if limit is None or step >= config.train.num_steps:
        return None
    needed = spent.next_evaluation(config, protocols, tokens)
    share = spent.share(needed)
    if share <= limit:
        return None
    return (
        f"evaluation after step {step} left out: with its {needed:.3g} s, evaluations would take "
        f"{share:.2%} of the {spent.training:.3g} s of training so far "
        f"(evaluation.max_time_share = {limit:g}). The last step is evaluated in any case; a lower "
        "evaluation.max_tokens leaves time for more"
    )


def _number(record: Record, key: str) -> float:
    """Return a value of a record, or 0 where it is missing or damaged."""
    value = record.get(key)
    return value if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0


# ---- The hook that evaluates a run while it trains ----


class EvaluationHook(Hook):
    """Measure perplexity at several lengths, every evaluation.interval_steps and at the end.

    An evaluation between may be left out, where evaluation.max_time_share bounds their time.
    """

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        config, text = run.config.evaluation, run.validation_stream
        self.writer = writer
        self.clock = time.perf_counter
        self.metrics = RunPaths(run.config.directory).metrics
        # Checked at the start, because the first evaluation may be thousands of steps later.
        check_memory(run.config, run.topology, run.start_point.evaluations)
        self.evaluator = Evaluator(
            run.chunks,
            run.topology,
            ScoredText(text, config.max_tokens),
            tokens_per_batch=config.tokens_per_batch,
            schedule_module=run.optimizer.schedule_module,
            mask_id=run.config.mask_id if run.config.is_masked else None,
        )
        self.common = {
            EVALUATION: True,
            "tokenizer": text.tokenizer_sha256[:HASH_DIGITS],
            "validation": text.identity[:HASH_DIGITS],
        }

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
            self._evaluate(run, run.start_point.evaluations)

    def _evaluate(self, run: Run, pending: Sequence[Protocol]) -> None:
        """Evaluate and write all of `pending`, or nothing if the ranks agree to stop meanwhile."""
        step = run.state.step
        if not pending or run.requests.agreed or self._is_left_out(run):
            return

        def before_pass() -> None:
            run.reporter.progress(step)
            agree(run.requests)
            if run.requests.agreed:
                raise Interrupted

        # All results are written at once or not at all, so that the metrics never hold a part of
        # an evaluation: what was scored before a stop is dropped and done again.
        with run.reporter.during(Phase.EVALUATING, step), contextlib.suppress(Interrupted):
            results, seconds = [], []
            for protocol in pending:
                begin = self.clock()
                results.append(self.evaluator.evaluate(protocol, before_pass=before_pass))
                seconds.append(self.clock() - begin)
            if self.writer is not None:
                share = Spent.of(self.metrics, step).share(sum(seconds))
                self.writer.evaluation(
                    [
                        {"step": step, **self.common, **result.record(), SECONDS: own, SHARE: share}
                        for result, own in zip(results, seconds)
                    ]
                )
            trained = (
                recorded_protocol(run.config, "nonoverlapping"),
                run.config.data.sequence_length,
            )
            for result in results:
                is_trained = (result.protocol.name, result.protocol.length) == trained
                if is_trained and math.isfinite(result.loss_nats):
                    run.origin = dataclasses.replace(
                        run.origin, validation_loss_nats=result.loss_nats
                    )

    def _is_left_out(self, run: Run) -> bool:
        """Return True if the time for an evaluation is not there, alike on all ranks.

        Rank 0 decides, which has the metrics, and says so.
        """
        if run.config.evaluation_time_share is None:
            return False
        step, tokens = run.state.step, self.evaluator.text.tokens
        protocols = run.start_point.evaluations

        def why() -> str | None:
            spent = Spent.of(self.metrics, step)
            return refusal(run.config, protocols, tokens, step, spent)

        reason = on_main(run.topology, why)
        if reason is not None and run.topology.is_main:
            say(reason)
        return reason is not None


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
            self.writer.changed({"step": step, CHANGED: changed})

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
        say(*(f"warning: {line}" for line in missing))
        if missing:
            say(
                f"warning: {config.directory}: these checkpoints are on the disk but not in "
                f"{config.checkpoint.upload_to}. Upload them with `pretrain checkpoint upload "
                f"{config.directory}`"
            )

"""The hooks that the loop calls around its steps: logging, profiles, health, saving and uploads.

`pretrain.training.step` has the interface.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain import platform
from pretrain.checkpoint.save import Saver
from pretrain.checkpoint.store import Uploader
from pretrain.config import Diverged, Poisoned, num_parameters
from pretrain.config.errors import say
from pretrain.config.run import recorded_protocol
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.evaluation.perplexity import Evaluator, check_memory
from pretrain.evaluation.records import HASH_DIGITS
from pretrain.evaluation.windows import Protocol, ScoredText
from pretrain.model import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.optim.health import (
    Copies,
    checksum,
    find_copies,
    implausible_state,
    largest_magnitudes,
    plausible_limits,
    update_counts,
)
from pretrain.rundir.checkpoints import check_room, checkpoint_directory, checkpoint_step
from pretrain.rundir.files import make_directory
from pretrain.rundir.history import saving_then_stopping
from pretrain.rundir.metrics import CHANGED, EVALUATION, PHASE, Record
from pretrain.rundir.paths import Phase, RunPaths
from pretrain.topology import gather, host_name
from pretrain.training.metrics import PASS, MetricsWriter
from pretrain.training.replay import Point, ReplayHook, note_poisoned_start
from pretrain.training.reporter import Interrupted, no_problem
from pretrain.training.start import Run, is_evaluated_after
from pretrain.training.step import Hook, agree
from pretrain.training.stragglers import SHARED, Stragglers, places, window_steps

VIEWER = "https://ui.perfetto.dev"
"""Shows a trace in the browser without sending it anywhere."""
SECONDS = "evaluation_seconds"
"""Key of an evaluation's record: the time for this protocol and length, in seconds."""


class EvaluationHook(Hook):
    """Measure perplexity at several lengths, every evaluation.interval_steps and at the end."""

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        config, text = run.config.evaluation, run.validation_stream
        self.writer = writer
        # Checked at the start, because the first evaluation may be thousands of steps later.
        self.protocols = run.start_point.evaluations[run.start_point.phase - 1]
        check_memory(run.config, run.topology, self.protocols)
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
            "tokenizer": text.manifest.tokenizer_sha256[:HASH_DIGITS],
            "validation": text.identity[:HASH_DIGITS],
        }

    def at_start(self, run: Run) -> None:
        """Do the evaluations that the previous attempt did not complete."""
        self._evaluate(run, run.start_point.pending_evaluations)

    def is_due(self, run: Run) -> bool:
        """Return True if an evaluation follows this step."""
        return is_evaluated_after(run.config, run.state.step)

    def between_steps(self, run: Run) -> None:
        """Evaluate if it is due. All ranks score; rank 0 writes."""
        # The next checkpoint must not record the validation loss of an earlier step.
        run.origin = dataclasses.replace(run.origin, validation_loss_nats=None)
        if self.is_due(run):
            self._evaluate(run, self.protocols)

    def _evaluate(self, run: Run, pending: Sequence[Protocol]) -> None:
        """Evaluate and write all of `pending`, or nothing if the ranks agree to stop during it."""
        step = run.state.step
        if not pending or run.requests.agreed:
            return

        def before_pass() -> None:
            run.reporter.progress(step)
            agree(run.requests)
            if run.requests.agreed:
                raise Interrupted

        # All results are written at once or not at all, so that the metrics never hold a part of
        # an evaluation. After a stop, the results so far are dropped and computed again.
        with run.reporter.during(Phase.EVALUATING, step), contextlib.suppress(Interrupted):
            results, seconds = [], []
            for protocol in pending:
                begin = time.perf_counter()
                results.append(self.evaluator.evaluate(protocol, before_pass=before_pass))
                seconds.append(time.perf_counter() - begin)
            if self.writer is not None:
                self.writer.evaluation(
                    [
                        {"step": step, **self.common, **result.record(), SECONDS: own}
                        for result, own in zip(results, seconds)
                    ]
                )
            trained = recorded_protocol(run.config, "nonoverlapping")
            for result in results:
                protocol, loss = result.protocol, result.loss_nats
                is_trained = protocol.length == run.config.data.sequence_length
                if is_trained and protocol.name == trained and math.isfinite(loss):
                    run.origin = dataclasses.replace(run.origin, validation_loss_nats=loss)


def make_hooks(run: Run) -> list[Hook]:
    """Return a run's hooks in the order in which they are called.

    A step is logged and evaluated before it is saved. If there is a checkpoint, the numbers of its
    step are therefore on disk, and a resumed run has nothing to catch up on but an interrupted
    evaluation (`find_start_point`). The state's health is checked right before it is saved.
    """
    tokenizer = load_tokenizer(run.validation_stream.tokenizer_path)
    writer = None
    if run.topology.is_main:
        writer = MetricsWriter(run.whole, run.config.directory, run.state.step)
    stragglers = Stragglers(places(run.topology), window_steps(run.topology))
    saver = CheckpointHook(run, writer, tokenizer)
    return [
        # First, so that the trace ends before the other hooks act on the last recorded step.
        ProfileHook(run),
        LoggingHook(run, writer, stragglers),
        EvaluationHook(run, writer),
        HealthHook(saver),
        saver,
        UploadHook(run),
        ReplayHook(),
    ]


class ProfileHook(Hook):
    """Record the steps of train.profile_steps with torch.profiler, on rank 0.

    The trace shows every operation of the host and every kernel of the device on one time line,
    with memory allocations. Profiling changes no result, and a full disk does not end the run.
    """

    def __init__(self, run: Run) -> None:
        self._first, self._last = run.config.train.profile_steps or (0, 0)
        self._profiler: torch.profiler.profile | None = None

    def is_due(self, run: Run) -> bool:
        """Return True right before and after the steps, on all ranks, so that they are complete."""
        return self._last > 0 and run.state.step in (self._first - 1, self._last)

    def before_step(self, run: Run) -> None:
        """Begin to record before the first of the steps, and mark the beginning of the others."""
        if self._profiler is not None:
            self._profiler.step()
        elif run.topology.is_main and run.state.step + 1 == self._first:
            self._profiler = torch.profiler.profile(
                # Each step is a span of the trace.
                schedule=lambda step: torch.profiler.ProfilerAction.RECORD,
                record_shapes=True,
                profile_memory=True,
            )
            self._profiler.start()

    def between_steps(self, run: Run) -> None:
        """Write the trace after the last of the steps."""
        if run.state.step == self._last:
            self.at_end(run)

    def at_end(self, run: Run) -> None:
        """Write the trace, if the run was stopped within the steps."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        # A gloo collective that ends after the recording writes its end into memory that torch has
        # freed, which kills the process (torch 2.13.0). So wait first. A failed run, which may have
        # unfinished collectives, writes no trace.
        run.optimizer.wait_for_weights()
        platform.synchronize()
        profiler.stop()
        folder = RunPaths(run.config.directory).profile
        path = folder / f"step-{self._first:08d}-{run.state.step:08d}.rank0.json.gz"
        try:
            make_directory(folder)
            profiler.export_chrome_trace(str(path))
            say(f"profile of steps {self._first} to {run.state.step}: {path}; open it at {VIEWER}")
        except OSError as error:
            run.reporter.warn("profile", f"{path}: no profile ({error}); training goes on")


class LoggingHook(Hook):
    """Pass records of steps, with rates, and of changes to the writer; on rank 0 alone."""

    def __init__(self, run: Run, writer: MetricsWriter | None, stragglers: Stragglers) -> None:
        self.writer, self.stragglers = writer, stragglers
        self.peak_tflops_per_second = peak_tflops_per_second(platform.device_name())
        self.blend = run.blend
        self.sequence_length = length = run.config.data.sequence_length
        # Suffix of the metric's name -> FLOPs of one token. Two conventions are in use: all of the
        # attention scores (PaLM), or only the causal half (Megatron-LM).
        self.flops_per_token = {
            "": flops_per_token(run.config, length, causal=False),
            "_causal": flops_per_token(run.config, length, causal=True),
        }

    def at_start(self, run: Run) -> None:
        """Log keys whose change was allowed at the step from which training continues."""
        step = run.state.step
        changed = {c.key: [c.before, c.after] for c in run.origin.changes if c.step == step}
        phases = run.whole.parts
        phase = phases[run.start_point.phase - 1]
        border = {PHASE: phase.number} if len(phases) > 1 and step == phase.first else {}
        if self.writer is not None and (changed or border):
            # Only to metrics.jsonl, because the other destinations accept only numbers.
            self.writer.file.write({"step": step, **border, CHANGED: changed})

    def after_step(self, run: Run, record: Record) -> None:
        """Log one step. tokens_per_second is the whole job's; TFLOP/s and MFU are per device."""
        if self.writer is None:
            return
        size, consumed = record["global_batch_size"], record["consumed_samples"]
        if shared := record.pop(SHARED, None):
            judged, line = self.stragglers.judge(record["step"], shared)
            record.update(judged)
            if line:
                say(line)
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

    def before_rollback(self, run: Run) -> None:
        """Close metrics.jsonl with all records so far, some of which will be set aside."""
        if self.writer is not None:
            self.writer.file.close()

    def after_rollback(self, run: Run) -> None:
        """Drop the records of the steps that will be taken again."""
        if self.writer is not None:
            self.writer.go_back(run.state.step)
        # `go_back` has dropped the record of changed keys, which is still valid.
        self.at_start(run)

    def close(self) -> None:
        """Close the writer, which the evaluation hook shares."""
        if self.writer is not None:
            self.writer.close()


# ---- Stop a run whose state is poisoned, or whose ranks no longer train the same model ----
# The ranks compare checksums of all tensors that must be equal on them (pretrain/optim/health.py)
# and of their counters, and check that masters and moments are finite. If all is well, this costs
# one kernel for each tensor, one small all-reduce for each group of ranks, one for all ranks, and
# one wait of the host. Only if something is wrong do the ranks exchange details.


MOST_LINES = 5
"""The most parameters that a message names; it only counts the others."""
COUNTERS = ("steps done", "samples consumed", "fewest updates", "most updates", "loss window")
"""Counters that must be equal on all ranks."""


@dataclass(frozen=True)
class Findings:
    """The findings of a check on this rank, on the device."""

    limits: Tensor
    """Limits of masters and moments; see `plausible_limits`."""
    copies: list[Copies]
    checksums: list[Tensor]
    """For each of `copies`, int64 [tensors]."""
    differs: list[Tensor]
    """For each of `copies`, boolean [tensors]: the ranks of the group hold different values."""
    counters: Tensor
    """int64 [COUNTERS]"""
    verdict: Tensor
    """int64 [2], the same on all ranks: 1 if some state is implausible, 1 if ranks differ."""


def check_health(run: Run) -> None:
    """Check that the state is finite on all ranks, and equal where it must be. All ranks together.

    Raises:
        Poisoned: On every rank, if a master or a moment on one rank is not finite, or is too large
            to be plausible.
        Diverged: On every rank, if values differ between ranks that must be equal.
    """
    findings = inspect(run)
    poisoned, differs = platform.Readback(findings.verdict).numbers()
    if poisoned:
        raise _poison(run, findings)
    if differs:
        raise _difference(run, findings)


@torch.no_grad()
def inspect(run: Run) -> Findings:
    """Queue a check on the device, without waiting for its result. All ranks together."""
    run.optimizer.wait_for_weights()
    copies = find_copies(run.optimizer)
    checksums = [each.checksums() for each in copies]
    differs = [_differs(sums, each.group) for sums, each in zip(checksums, copies)]
    counters = _counters(run)
    flags = [any_.any() for any_ in differs]
    largest, ledger = largest_magnitudes(run.optimizer), run.ledger
    limits = plausible_limits(run.optimizer, ledger.largest_proven if ledger else None)
    # A nan counts as poisoned, because <= is false for it.
    poisoned = ~(largest <= limits).all()
    if ledger is not None:
        ledger.saw(run.state.step, largest)
    flag = torch.stack(flags).any() if flags else torch.zeros_like(poisoned)
    # One message for all ranks: the flags, and the counters' largest and smallest values.
    message = torch.cat([torch.stack([poisoned, flag]).long(), counters, -counters])
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    poison, difference, bounds = message[0], message[1], message[2:].view(2, -1)
    unequal = (bounds[0] + bounds[1]).ne(0).any().long()
    verdict = torch.stack([poison, difference | unequal])
    return Findings(limits, copies, checksums, differs, counters, verdict)


def _differs(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return where the ranks of a group hold different values; boolean, shaped like `values`."""
    # min(x) = -max(-x), so one reduction gives both the largest and the smallest value.
    bounds = torch.stack([values, -values])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    return (bounds[0] + bounds[1]).ne(0)


def _counters(run: Run) -> Tensor:
    """Return the counters that must be equal on all ranks, int64 [COUNTERS], on the device."""
    state = run.state
    host = platform.to_device(torch.tensor([state.step, state.consumed_samples]))
    seen = None if run.spikes is None else run.spikes.state
    window = torch.zeros_like(host[:1]) if seen is None else checksum(seen)[None]
    return torch.cat([host, update_counts(run.optimizer), window])


def _poison(run: Run, findings: Findings) -> Poisoned:
    """Return the error about state that is not finite. All ranks together."""
    own = implausible_state(run.optimizer, findings.limits)
    everyone = gather((dist.get_rank(), host_name(), own), tuple[int, str, list[str]])
    lines = [f"rank {rank} ({host}): {name}" for rank, host, names in everyone for name in names]
    return Poisoned(
        f"after step {run.state.step} the optimizer's state is not finite or too large to be true: "
        f"{_some(lines)}",
        "Nothing is saved. Start again from the last checkpoint, which was checked; if it is "
        "always on one host, leave that host out",
        [rank for rank, _, names in everyone if names],
    )


_Copied = tuple[tuple[int, ...], str]
"""The ranks that hold a tensor, and its name."""


def _difference(run: Run, findings: Findings) -> Diverged:
    """Return the error that names what differs, and on which ranks. All ranks together."""
    mine: dict[_Copied, int] = {}
    for copies, sums, differs in zip(findings.copies, findings.checksums, findings.differs):
        ranks = tuple(dist.get_process_group_ranks(copies.group))
        rows = zip(copies.tensors, sums.tolist(), differs.tolist())
        mine |= {(ranks, name): value for name, value, is_odd in rows if is_odd}
    everyone = tuple(range(dist.get_world_size()))
    mine |= {(everyone, n): v for n, v in zip(COUNTERS, findings.counters.tolist())}
    told = gather((host_name(), list(mine.items())), tuple[str, list[tuple[_Copied, int]]])
    gathered = [(host, dict(items)) for host, items in told]
    lines, guilty = [], set[int]()
    for ranks, name in dict.fromkeys(key for _, items in gathered for key in items):
        by_rank = {rank: gathered[rank][1][ranks, name] for rank in ranks}
        [(common, count), *others] = Counter(by_rank.values()).most_common()
        has_majority = 2 * count > len(by_rank)
        odd = [rank for rank, value in by_rank.items() if value != common or not has_majority]
        named = ", ".join(f"{rank} ({gathered[rank][0]})" for rank in odd)
        if others:
            guilty |= set(odd)
        if others and has_majority:
            lines.append(f"{name}: ranks {named} differ from the others")
        elif others:
            lines.append(f"{name}: no majority among ranks {named}")
    return Diverged(
        f"after step {run.state.step} ranks differ in what must be equal. {_some(lines)}",
        "Nothing is saved. Start again from the last checkpoint, before which the ranks were "
        "equal. If it is always the same host, suspect its memory or GPU and leave it out",
        sorted(guilty),
    )


def _some(lines: list[str]) -> str:
    """Join the first lines into one, and append how many more there are."""
    more = len(lines) - MOST_LINES
    return "; ".join(lines[:MOST_LINES]) + (f"; and {more} more" if more > 0 else "")


class HealthHook(Hook):
    """Check the health of all ranks every train.consistency_interval_steps and before each save."""

    def __init__(self, saver: Hook) -> None:
        """Check whenever `saver` is due, which must be the next hook."""
        self.saver = saver

    def at_start(self, run: Run) -> None:
        """Check the state that was built or loaded, before training changes it."""
        try:
            check_health(run)
        except Poisoned as found:
            note_poisoned_start(run, found)
            raise

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

        def on_interrupt() -> str:
            """Return the answer to Ctrl-C; only rank 0 has one, as a terminal signals all ranks."""
            began_with = run.start_point.checkpoint
            before = checkpoint_step(began_with.path.name) if began_with is not None else None
            line = saving_then_stopping(run.state.step, self.saved_step or before)
            return line if run.topology.is_main else ""

        run.requests.on_interrupt = on_interrupt

    def at_start(self, run: Run) -> None:
        """Save a run that is stopped before its first step, unless that step is already on disk.

        The step is not on disk if the run began with another run's checkpoint.
        """
        if run.requests.agreed:
            self._save(run)

    def after_step(self, run: Run, record: Record) -> None:
        """Report a checkpoint that was published while training continued."""
        if not run.topology.is_main:
            return
        published = self.saver.published_step
        if published is not None and published != self.reported_step:
            run.reporter.phase(Phase.TRAINING, record["step"], saved=published)
            self.reported_step = published

    def is_due(self, run: Run) -> bool:
        """Return True if this step must be saved, or if a save has failed."""
        return run.requests.problem_agreed or self._is_save_due(run)

    def between_steps(self, run: Run) -> None:
        """Save if it is due. All ranks together."""
        step, last = run.state.step, run.config.train.num_steps
        if run.requests.problem_agreed:
            # Raises the problem on every rank.
            self.saver.finish()
        if self._is_save_due(run):
            self._save(run)
        # A request may have come during the save, which can take minutes. The run then stops here,
        # rather than one step and a second save later. A rank votes as soon as its own part of the
        # save is over; later requests are voted on with the next step.
        if self.saved_step == step < last and not run.requests.agreed:
            agree(run.requests)
        # A save of the last step must be awaited.
        if run.phase_is_over and self.saver.is_busy:
            with run.reporter.during(Phase.SAVING, step, saved=self.saved_step):
                self.saver.finish()

    def newest_checkpoint(self, run: Run) -> Path | None:
        """Return the checkpoint that this process saved last, or else the one it began with."""
        # A checkpoint that is still being written is the newest, so wait for it.
        self.saver.finish()
        if self.saved_step:
            return checkpoint_directory(run.config.directory, self.saved_step)
        began_with = run.start_point.checkpoint
        return began_with.path if began_with is not None else None

    def after_rollback(self, run: Run) -> None:
        """Make sure that the steps that will be taken again are also saved again."""
        began = run.start_point
        self.saved_step = began.saved_step if run.state.step == began.step else run.state.step

    def at_end(self, run: Run) -> None:
        """Leave Ctrl-C to Python again, because everything is saved."""
        run.requests.on_interrupt = None
        run.requests.has_problem = no_problem

    def close(self) -> None:
        """End the process that writes checkpoints."""
        self.saver.close()

    def _is_save_due(self, run: Run) -> bool:
        is_regular = run.state.step % run.config.checkpoint.interval_steps == 0
        return is_regular or run.phase_is_over

    def _save(self, run: Run) -> None:
        """Save the run at its current step, unless it has been saved."""
        step = run.state.step
        if step == self.saved_step:
            return
        waits = run.phase_is_over or not self.saver.is_asynchronous
        with run.reporter.during(Phase.SAVING, step, saved=step if waits else None):
            identifier = self.saver.begin(run.state, run.origin, lambda: self._prepare(run))
            if waits:
                self.saver.finish()
        run.origin = dataclasses.replace(run.origin, parent=identifier, validation_loss_nats=None)
        self.saved_step = step
        if run.ledger is not None:
            path = checkpoint_directory(run.config.directory, step)
            run.ledger.saved(Point(path, run.state, run.origin))

    def _prepare(self, run: Run) -> None:
        """Check that there is room for a checkpoint, and flush all metrics so far to the disk."""
        paths = RunPaths(run.config.directory)
        check_room(paths.checkpoints, run.config.state_bytes * num_parameters(run.config))
        if self.writer is not None:
            self.writer.file.flush()


STOP_SECONDS = 30.0
"""How long a run that is asked to stop waits for an upload; the next start does the rest."""


class UploadHook(Hook):
    """Upload every checkpoint while training continues; a failed upload warns and is retried."""

    def __init__(self, run: Run) -> None:
        """Start the uploading process, on rank 0, if checkpoint.upload_to is set."""
        self.run = run
        self._asked_at: float | None = None
        url = run.config.checkpoint.upload_to
        self.uploader = None
        if url is not None and run.topology.is_main:
            self.uploader = Uploader(run.config.directory, url)

    def after_step(self, run: Run, record: Record) -> None:
        """Warn if the uploading process has ended."""
        if self.uploader is not None:
            self.uploader.check()

    def close(self) -> None:
        """After a normal end of the run, upload missing checkpoints; warn about any left over."""
        if self.uploader is None:
            return
        run, config = self.run, self.run.config
        has_stopped = run.requests.agreed and not run.requests.is_leaving
        if run.state.step < run.whole.train.num_steps and not has_stopped:
            # Another phase follows, or the run has failed. The next start uploads what is missing.
            self.uploader.close()
            return
        missing = self.uploader.finish(self._may_wait)
        say(*(f"warning: {line}" for line in missing))
        if missing:
            say(
                f"warning: {config.directory}: these checkpoints are on the disk but not in "
                f"{config.checkpoint.upload_to}. Upload them with `pretrain checkpoint upload "
                f"{config.directory}`"
            )

    def _may_wait(self) -> bool:
        """Return True until the run is asked to stop, and for STOP_SECONDS after that."""
        # Reported as progress, so that the watchdog does not take the wait for a hang.
        self.run.reporter.progress(self.run.state.step)
        if self._asked_at is None and any(self.run.requests.votes()[:-1]):
            self._asked_at = time.monotonic()
        return self._asked_at is None or time.monotonic() - self._asked_at < STOP_SECONDS

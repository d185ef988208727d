"""The training loop. Everything besides a step (logging, evaluation, saving) is left to hooks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from pretrain import platform
from pretrain.checkpoint.load import bring, check_store, load_checkpoint
from pretrain.checkpoint.manifest import TrainerState, data_hashes, moves_end, open_checkpoint
from pretrain.config import (
    ConfigError,
    Poisoned,
    RunConfig,
    RunFailed,
    Unsound,
    dump_config,
    writing,
)
from pretrain.config.errors import say
from pretrain.config.trajectory import MOVED_END, describe_differences, scheduled_changes
from pretrain.data.order import batches
from pretrain.model.forward import Batch
from pretrain.optim.health import Resting, memory_check_interval
from pretrain.optim.optimizers import learning_rate
from pretrain.rundir.checkpoints import checkpoint_directory
from pretrain.rundir.files import replace_file
from pretrain.rundir.metrics import PHASE, collecting
from pretrain.rundir.paths import Phase, RunPaths
from pretrain.topology import Topology, on_main, supervised_attempt
from pretrain.training.hooks import make_hooks
from pretrain.training.metrics import check_wandb
from pretrain.training.replay import Ledger, Point, replay
from pretrain.training.reporter import EXIT_CODES, AttemptReporter, Requests
from pretrain.training.start import (
    Run,
    StartPoint,
    Streams,
    check_same_data,
    check_sizes,
    evaluations_of,
    find_start_point,
    load_run,
    prepare,
    take_run,
)
from pretrain.training.step import (
    Hook,
    Jump,
    QueuedStep,
    Spike,
    agree,
    computed_bits,
    forward_backward,
    masked_batches,
    seed_step,
    update,
)


def train(
    config: RunConfig,
    resume: str = "auto",
    requests: Requests | None = None,
    allowed: Collection[str] = (),
) -> int:
    """Train a run to train.num_steps, or until all ranks agree to stop. All ranks together.

    Args:
        config: The run.
        resume: "auto" for the newest complete checkpoint or, if there is none, from scratch;
            "none" to start from scratch; else the path of a run or a checkpoint, or the URL of a
            store or of a checkpoint in it.
        requests: Requests that signals make to this process. None: it listens to no signals.
        allowed: Keys that may differ from the checkpoint's although they change training.

    Returns:
        The process's exit code, the same on every rank: 0 when the run is finished.

    Raises:
        ConfigError: The input is wrong; nothing has been written.
        RunFailed: The run cannot continue, for example because its gradients are not finite.
    """
    check_wandb(config)
    check_store(config, resume)
    streams, topology, checkpoint = prepare(config, resume, allowed)
    data = data_hashes(streams)
    check_same_data(data, config.data.directory)
    check_sizes(topology, streams)
    resume = bring(config, topology, resume)
    evaluations, notes = evaluations_of(config, streams[1])
    known = StartPoint(checkpoint, evaluations=evaluations, data=data, allowed=tuple(allowed))
    with AttemptReporter() as reporter:
        start_point = on_main(
            topology, lambda: take_run(config, resume, reporter, known), StartPoint
        )
        if topology.is_main:
            say(_outlook(config, topology, start_point), *notes)
        if start_point.is_finished(config):
            reporter.phase(Phase.ENDING, start_point.step)
            reporter.end(0, _finished(start_point.step))
            return 0
        reporter.phase(Phase.LOADING, start_point.step)
        run = load_run(config, streams, topology, start_point, requests or Requests(), reporter)
        # Written after loading, which may still refuse the config: until then the directory keeps
        # the config with which it was trained.
        if topology.is_main:
            with writing(config.directory):
                replace_file(RunPaths(config.directory).config, dump_config(config))
        _train_steps(run)
        while not run.is_over:
            run = _next_phase(run, streams)
            _train_steps(run)
        code = _end(run)
        run.release()
        return code


def _next_phase(run: Run, streams: Streams) -> Run:
    """Return the run in its next phase, from the checkpoint at the border. All ranks together.

    The next phase starts in the same way as a resumed run, so that a run that is killed and started
    again cannot differ from an uninterrupted one.

    Args:
        run: The run in the phase that has ended. It must not be used any more.
        streams: The training and the validation split.
    """
    before, config, topology = run.start_point, run.whole, run.topology
    requests, reporter = run.requests, run.reporter
    reporter.phase(Phase.LOADING, run.state.step)

    def find() -> StartPoint:
        resume, own = "auto", checkpoint_directory(config.directory, run.state.step)
        if before.checkpoint is not None and not own.exists():
            # The run has not saved this step: it began from another run's checkpoint, right with
            # the last evaluation of the previous phase.
            resume = str(before.checkpoint.path)
        # Checkpoints that were passed over have been set aside by now.
        return find_start_point(config, resume, replace(before, passed_over=()), run.state.step)

    start_point = on_main(topology, find, StartPoint)
    if topology.is_main:
        say(_outlook(config, topology, start_point))
    run.release()
    return load_run(config, streams, topology, start_point, requests, reporter)


def _train_steps(run: Run) -> None:
    """Take steps and call the hooks until the run is finished or all ranks agree to stop."""
    run.ledger = begin_ledger(run)
    hooks = make_hooks(run)
    try:
        # From here on the lines of metrics.jsonl are this attempt's (rundir.attempts.steps_done).
        run.reporter.phase(Phase.TRAINING, run.state.step)
        # A signal may have come before the first step, whose loss would carry the votes.
        agree(run.requests)
        for hook in hooks:
            hook.at_start(run)
        run.ledger.take_memory(run.state.step)
        while not run.phase_is_over:
            try:
                with contextlib.closing(step_batches(run)) as steps:
                    _take_steps(run, hooks, steps)
            except (Spike, Unsound) as trouble:
                if not replay(run, hooks, trouble):
                    _act(run, hooks, trouble)
        # Every rank waits, so that no collective is unfinished when the processes end.
        run.optimizer.wait_for_weights()
        for hook in hooks:
            hook.at_end(run)
        if run.is_over:
            run.reporter.phase(Phase.ENDING, run.state.step)
    finally:
        for hook in hooks:
            hook.close()


def begin_ledger(run: Run) -> Ledger:
    """Return the ledger with the state from which the run begins to train."""
    interval = memory_check_interval(run.config, run.topology.layout.replicas)
    began = run.start_point.checkpoint
    # Only needed for the initial state; the loss scaler's fields are the same on all ranks.
    point = Point(began.path if began else None, run.state, run.origin, run.optimizer.scaler_fields)
    resting = Resting(run.optimizer, interval) if run.config.recovery.replay else None
    # At stages 2 and 3 DeepSpeed sends gradients during the backward pass, so a step cannot be
    # computed twice.
    can_repeat = run.optimizer.stage == 1
    return Ledger(point, resting, run.config.recovery.repeat_interval_steps if can_repeat else None)


def _act(run: Run, hooks: Sequence[Hook], trouble: Spike | Unsound) -> None:
    """Act on a failed check if nothing can be replayed, or if a replay failed in the same way."""
    if not isinstance(trouble, Spike):
        raise trouble
    if isinstance(trouble, Jump):
        return
    if run.config.train.spike_policy == "rollback":
        _roll_back(run, hooks, trouble)
        return
    raise RunFailed(
        f"{trouble}. Nothing after it is saved. Resume from the last checkpoint with a lower "
        'optimizer.learning_rate, with train.spike_policy = "skip" or "rollback", or, if it was '
        "not a spike, with a higher train.spike_threshold"
    )


def _take_steps(run: Run, hooks: Sequence[Hook], steps: Iterator[list[Tensor]]) -> None:
    """Take steps from the run's current state until it is over. Raises `Spike`.

    A step's numbers are read and logged after the next step has been queued, so that the device
    does not wait for the host. If a hook is due, they are read at once, because the hook needs the
    step to be over.
    """
    begin, unread = platform.Moment(), None
    while not run.phase_is_over:
        for hook in hooks:
            hook.before_step(run)
        queued = queue_step(run, steps, begin)
        if unread is not None:
            _report(run, hooks, unread)
        begin, unread = queued.end, queued
        if any(hook.is_due(run) for hook in hooks):
            _report(run, hooks, unread)
            if run.spikes is not None:
                run.state = replace(run.state, spikes=run.spikes.to_lists())
            for hook in hooks:
                hook.between_steps(run)
            begin, unread = platform.Moment(), None


def _report(run: Run, hooks: Sequence[Hook], step: QueuedStep) -> None:
    """Wait for a step's numbers, and pass them on."""
    record = step.read()
    for hook in hooks:
        hook.after_step(run, record)
    run.reporter.progress(record["step"])


def _roll_back(run: Run, hooks: Sequence[Hook], spike: Spike) -> None:
    """Restore the newest checkpoint into `run`, and skip the data since. All ranks together.

    Chowdhery et al. 2022 (PaLM, section 5.1) went back about 100 steps before a spike and skipped
    200 to 500 batches, and the spike did not return: the cause was the combination of the data and
    the state of the model. Here the run goes back to its newest checkpoint, and skips all samples
    from there up to and including those of the spike. Steps are counted from the checkpoint again;
    `consumed_samples` keeps counting.

    Args:
        run: The run; steps after the checkpoint have been taken.
        hooks: The run's hooks.
        spike: The spike, the same on every rank.

    Raises:
        Poisoned: The run has gone back to this checkpoint train.spike_max_rollbacks times.
        RunFailed: There is no checkpoint, or it cannot be loaded.
    """
    assert run.spikes is not None
    path = next(filter(None, (hook.newest_checkpoint(run) for hook in hooks)), None)
    if path is None:
        raise RunFailed(
            f"{spike}. There is no checkpoint to go back to. Start again with a lower "
            "optimizer.learning_rate or a longer schedule.lr_warmup_steps, or save earlier "
            "(checkpoint.interval_steps)"
        )
    before, most = run.spikes.rollbacks, run.config.train.spike_max_rollbacks
    try:
        checkpoint = open_checkpoint(path)
        step = checkpoint.trainer_state.step
        if (times := sum(to == step for _, to in before)) >= most:
            raise Poisoned(
                f"{spike}. The run has gone back to step {step} {times} times already "
                f"(train.spike_max_rollbacks = {most}), so it is not the data. Resume from an "
                "earlier checkpoint, or with a lower optimizer.learning_rate"
            )
        # The weights of the last update may still be arriving in the tensors that are overwritten.
        run.optimizer.wait_for_weights()
        restored = load_checkpoint(checkpoint, run.optimizer, run.config)
    # Not a ConfigError, since the command's input was right: the next start may use an earlier
    # checkpoint.
    except ConfigError as error:
        raise RunFailed(f"{spike}. {error}") from None
    # The data continues in the current blend, which may have begun after the checkpoint.
    consumed, segment = spike.state.consumed_samples, spike.state.segment
    run.state = replace(restored, consumed_samples=consumed, segment=segment)
    run.spikes.load(restored.spikes)
    run.spikes.rollbacks = [*before, (spike.state.step, step)]
    if run.ledger is not None:
        state = replace(run.state, spikes=run.spikes.to_lists())
        run.ledger.restart(Point(path, state, run.origin))
    for hook in hooks:
        hook.after_rollback(run)
    if run.topology.is_main:
        skipped = consumed - restored.consumed_samples
        say(f"{spike}; back to step {step}, and on after the {skipped} samples since")


def queue_step(run: Run, steps: Iterator[list[Tensor]], begin: platform.Moment) -> QueuedStep:
    """Queue one optimizer step on the device. All ranks together.

    Args:
        run: The run; its `state` is replaced.
        steps: This rank's micro batches, step by step.
        begin: When the step before ended.

    Returns:
        The step, whose numbers are still to be read.
    """
    step = run.state.step
    rate = learning_rate(run.config, step)
    with collecting(run.metrics.collect), run.times.measuring(run.topology, step + 1):
        asked = time.perf_counter()
        batches = next(steps)
        data_wait = time.perf_counter() - asked
        losses, repeats = _compute(run, _as_trained(run, batches))
        updated = update(run, losses, rate, repeats)
    before = run.state
    size = run.config.batch_size_at(before.consumed_samples)
    run.state = TrainerState(step + 1, before.consumed_samples + size, segment=before.segment)
    record = {
        "step": step + 1,
        "learning_rate": rate,
        "global_batch_size": size,
        "consumed_samples": run.state.consumed_samples,
        "data_wait_seconds": data_wait,
    }
    if (mult := run.config.position_learning_rate_mult) != 1:
        record["position_learning_rate"] = rate * mult
    if run.whole.phases:
        record[PHASE] = run.start_point.phase
    if run.optimizer.loss_scale is not None:
        record["loss_scale"] = run.optimizer.loss_scale
    if run.spikes is not None and run.config.train.spike_policy == "rollback":
        record["rollbacks"] = len(run.spikes.rollbacks)
        if run.spikes.rollbacks and run.spikes.rollbacks[-1][1] == step:
            record["rolled_back_from_step"] = run.spikes.rollbacks[-1][0]
    return QueuedStep(run, updated, begin, record)


def _compute(run: Run, batches: Sequence[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """Return a step's losses, and if it is computed twice the `computed_bits` of both times."""
    step, repeats = run.state.step, list[Tensor]()
    if run.ledger is None or not run.ledger.is_repeated(step):
        seed_step(run.config, run.topology, step)
        return forward_backward(run.chunks, run.optimizer, batches, run.eos_id), repeats
    # The first computation records no metrics. Holding gradients back does not change their bits.
    for collect in (lambda *_: None, run.metrics.collect):
        seed_step(run.config, run.topology, step)
        with collecting(collect):
            losses = forward_backward(
                run.chunks, run.optimizer, batches, run.eos_id, holds_back=True
            )
        repeats.append(computed_bits(run, losses))
    return losses, repeats


def _as_trained(run: Run, batches: list[Tensor]) -> Sequence[Batch]:
    """Return a step's micro batches, masked if the run predicts masked tokens."""
    if not run.config.is_masked:
        return batches
    return masked_batches(run.config, run.topology, run.state.consumed_samples, batches)


def step_batches(run: Run) -> Generator[list[Tensor], None, None]:
    """Return a generator of this rank's micro batches for each next step. Close it after use."""
    config = run.config
    return batches(
        run.training_stream,
        run.blend,
        sequence_length=config.data.sequence_length,
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        rampup_batch_size=config.batch.rampup_batch_size,
        data_parallel_rank=run.topology.data_rank,
        data_parallel_size=run.topology.layout.data,
        consumed_samples=run.state.consumed_samples,
        num_workers=config.data.num_workers,
    )


def _outlook(config: RunConfig, topology: Topology, start_point: StartPoint) -> str:
    """Return a line about where the run starts from and what is left to do."""
    directory, step, last = config.directory, start_point.step, config.train.num_steps
    if start_point.is_finished(config):
        return f"{directory}: already at step {step} of {last}; nothing to train"
    sizes = topology.layout.sizes
    found, checkpoint = start_point.differences, start_point.checkpoint
    differences = ""
    if found and checkpoint is not None:
        reasons = dict.fromkeys(scheduled_changes(config, step), "as a phase asks")
        if moves_end(checkpoint.config, config.parts[start_point.phase - 1].config, step):
            reasons = MOVED_END | reasons
        said = describe_differences(found, config.directory, checkpoint.path, reasons)
        differences = f"\n{said}"
    if step >= last:
        return (
            f"{directory}: at step {step} of {last}, whose evaluation is left; {sizes}{differences}"
        )
    begin = f"going on from step {step}" if start_point.checkpoint else "from scratch"
    phase = f", {config.parts[start_point.phase - 1]}" if config.phases else ""
    return f"{directory}: {begin}, to step {last}{phase}; {sizes}{differences}"


def _finished(step: int) -> str:
    return f"all {step} steps are done"


def _end(run: Run) -> int:
    """Report how the run ended and return its exit code, on all ranks at the same moment."""
    request, step = run.requests.agreed, run.state.step
    if request is None:
        run.reporter.end(0, _finished(step))
        return 0
    code = EXIT_CODES[request]
    when = f": step {step} is saved" if step else " before the first step"
    reason = f"{'SIGINT' if run.requests.is_interrupted else request.name}{when}"
    if run.topology.is_main:
        goes_on = "the same command goes on from there"
        # With several processes or a supervisor, this process's command is not the user's.
        is_alone = run.topology.layout.world_size == 1 and supervised_attempt() is None
        if run.requests.command is not None and is_alone:
            goes_on = f"go on with:\n  {run.requests.command}"
        say(f"{run.config.directory}: {reason}; {goes_on}")
    run.reporter.end(code, reason)
    # A launcher ends all ranks as soon as one has left with a code that is not 0.
    dist.barrier()
    return code

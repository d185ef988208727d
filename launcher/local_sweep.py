"""Train several runs on this machine, one after the other, as `launcher local` does.

The runs are those of `login.sweep_runs`, so a sweep may go on here that began on a cluster.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.config.evaluation import recorded_protocol
from pretrain.config.trajectory import allow_options
from pretrain.launcher.login.look import stopped
from pretrain.launcher.login.sweep import SweepRun, wanted_runs
from pretrain.launcher.node.local import PASSED_ON, run_locally
from pretrain.launcher.node.signals import Signals
from pretrain.launcher.terminal import plain, plain_lines, say
from pretrain.rundir.attempts import is_idle, read_attempts
from pretrain.rundir.checkpoints import newest_checkpoint_step
from pretrain.rundir.jobs import LocalLaunch, check_data, check_goes_on, is_done
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.rundir.paths import ExitCode, Outcome, RunPaths, exit_code_of, in_words

STOPPED_BY_USER = (ExitCode.STOPPED, ExitCode.INTERRUPTED)
"""Exit codes of a run after which the sweep stops too."""
METRICS_BYTES = 1024 * 1024
"""Bytes at the end of metrics.jsonl that are read for the last evaluation: some 3,000 steps."""


def sweep_locally(
    paths: Sequence[Path],
    nproc: int,
    axes: Sequence[str],
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    allow_changed: Sequence[str] = (),
) -> int:
    """Train one run for each combination of values, or for each config, one after the other.

    Finished runs are left out and others go on from their newest checkpoint, so the same command
    goes on where it was. All runs are checked before the first one starts; one that fails does not
    keep the others from training.

    Args:
        paths: The config that the runs have in common, or several, each of which is a run.
        nproc: Processes of each run.
        axes: The keys and their values, as "section.key=value,value"; none in a list of configs.
        overrides: Settings of all runs, as --set takes them.
        dry_run: Only print the runs.
        allow_changed: Keys that may differ from the checkpoints' although they change training.

    Returns:
        The exit code: that of the run in which the user stopped the sweep, else 1 if a run failed.

    Raises:
        ConfigError: The axes are malformed, or a run cannot work; nothing was started.
    """
    runs, folder = wanted_runs(paths, axes, overrides)
    for run in runs:
        run.config.layout(nproc)
        check_goes_on(run.config, allow_changed)
    for config in {run.config.data.directory: run.config for run in runs}.values():
        if not dry_run:
            check_data(config)
    left = [run for run in runs if not is_done(run.config, allow_changed)]
    if dry_run:
        _print_plan(runs, left, nproc)
        return ExitCode.FINISHED
    over = [word for axis in axes for word in ("--over", axis)]
    settings = [word for override in overrides for word in ("--set", override)]
    again = ["launcher", "sweep", *map(str, paths), f"--nproc={nproc}", *over, *settings]
    again += allow_options(allow_changed)
    code = ExitCode.FINISHED.value
    # One record for all runs: a signal may come between two of them, or too late to stop one.
    with Signals(*PASSED_ON) as signals:
        for number, run in enumerate(left, start=1):
            say(f"run {number} of {len(left)}: {_name(run)}")
            # A failure of an earlier run counts as long as the user does not end the sweep.
            launch = LocalLaunch(tuple(again), str(Path.cwd()), nproc, run.over)
            ended = _train(run, launch, allow_changed, signals)
            if ended in STOPPED_BY_USER or (signals.stops and (ended or number < len(left))):
                code = ended if ended in STOPPED_BY_USER else ExitCode.STOPPED
                break
            code = ExitCode.FAILED if ended else code
            # The next run must not follow a SIGUSR1 that this one has followed.
            signals.received.clear()
    print(table(runs), flush=True)
    if code in STOPPED_BY_USER:
        say(f"{stopped(run.config.directory)}; go on with:\n  {shlex.join(again)}")
        return code
    curve = folder / "report" / "curve.json"
    saved = [run.config for run in runs if newest_checkpoint_step(run.config.directory) is not None]
    if saved:
        directories = [config.run.directory for config in saved]
        evaluate = ["pretrain", "evaluate", *directories, "--out", str(curve)]
        print(f"next: {shlex.join(evaluate)}")
    return code


@dataclass(frozen=True)
class Row:
    """The state of a run of the sweep."""

    run: str
    state: str
    step: str
    perplexity: str
    """At the training length, on validation text, by nonoverlapping windows."""

    @staticmethod
    def of(config: RunConfig) -> Row:
        """Read how a run stands from its directory."""
        attempts = [each for each in read_attempts(config.directory) if not is_idle(each)]
        ended = attempts[-1].ended if attempts else None
        saved = newest_checkpoint_step(config.directory)
        state = in_words(ended.outcome) if ended else "died" if attempts else "not started"
        step = saved or 0
        if ended is not None and ended.outcome == Outcome.FINISHED:
            step = ended.step
            state = state if step >= config.train.num_steps else "not finished"
        at = f"{step}/{config.train.num_steps}"
        return Row(config.run.directory, plain(state), at, last_perplexity(config))


def last_perplexity(config: RunConfig) -> str:
    """Return the last validation perplexity at the training length, and where; "-" if none is.

    The evaluation may be an earlier one than that of the run's last step, so its step is named.
    """
    wanted = recorded_protocol(config, "nonoverlapping"), config.data.sequence_length
    found = "-"
    for record in read_metrics(RunPaths(config.directory).metrics, METRICS_BYTES):
        if is_evaluation(record) and (record.get("protocol"), record.get("length")) == wanted:
            value = record.get("perplexity")
            is_number = isinstance(value, int | float) and math.isfinite(value)
            found = f"{value:.2f}" if is_number else "not finite"
            found += "" if record["step"] == config.train.num_steps else f" at {record['step']}"
    return found


def table(runs: Sequence[SweepRun]) -> str:
    """Return a table of the runs: state, step and last validation perplexity."""
    rows = [Row.of(run.config) for run in runs]
    head = Row("RUN", "STATE", "STEP", "PERPLEXITY")
    cells = [(row.run, row.state, row.step, row.perplexity) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells
    )


def _train(
    run: SweepRun, launch: LocalLaunch, allow_changed: Sequence[str], signals: Signals
) -> int:
    """Train one run as `launcher local` does, and return its exit code. Errors are printed.

    Args:
        run: The run.
        launch: The sweep's command, and this run's part of it.
        allow_changed: Keys that may differ from the checkpoint's.
        signals: Records the signals to this process; none came so far.
    """
    train = [sys.executable, "-m", "pretrain", "train", *allow_options(allow_changed)]
    try:
        # Not the config's file: it may have been edited while the runs before this one trained.
        code = run_locally(
            run.config, launch.num_tasks, train, None, signals=signals, launch=launch
        )
    except (ConfigError, RunFailed) as error:
        print(plain_lines(f"error: {error}"), file=sys.stderr, flush=True)
        code = exit_code_of(error)
    if code and code not in STOPPED_BY_USER and not signals.stops:
        say(f"{run.config.run.directory}: failed with exit code {code}; the other runs go on")
    return code


def _print_plan(runs: Sequence[SweepRun], left: Sequence[SweepRun], nproc: int) -> None:
    """Print every run, in the order in which they would train, and what is left of it."""
    for run in runs:
        saved = newest_checkpoint_step(run.config.directory)
        start = "from scratch" if saved is None else f"from step {saved}"
        to_do = f"{start}, to step {run.config.train.num_steps}" if run in left else "finished"
        print(f"{_name(run)}: {to_do}")
    print(f"{len(left)} of {len(runs)} runs would train, one after the other, on {nproc} processes")


def _name(run: SweepRun) -> str:
    """Return a run's directory and what distinguishes it."""
    over = ", ".join(f"{key} = {value}" for key, value in run.over.items())
    return plain(f"{run.config.run.directory} ({over or run.path})")

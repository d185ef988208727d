"""Send a run's numbers to metrics.jsonl, the console, Weights & Biases and TensorBoard.

metrics.jsonl always gets every number (`pretrain.rundir.metrics` says what a record holds); the
other destinations are a convenience and can fail without harm. Each destination is one small class,
and `MetricsWriter` passes every record to all of them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from pretrain.checkpoint.content import Change
from pretrain.config import RunConfig
from pretrain.rundir.files import make_directory
from pretrain.rundir.metrics import MetricsFile, Record
from pretrain.rundir.paths import RunPaths
from pretrain.train.figures import length_picture
from pretrain.train.tags import FIGURE, Axes, evaluation_tags, step_tags
from pretrain.train.weights_and_biases import INSTALL, Wandb, is_installed

PASS = "begun_pass_of_"
"""A step in which a corpus has been read to its end has a key of this and the corpus's name: the
number of the pass that begins, from 2."""
SHOWN_WAIT = 0.05
"""The share of a step from which on the wait for its data is shown."""
RATE_WINDOW_STEPS = 50
"""The estimated time left is computed from this many latest steps."""


class Destination(Protocol):
    """Takes the records of steps and evaluations, until it is closed.

    `go_back` says that the steps after `step` will be taken again.
    """

    def step(self, record: Record) -> None: ...
    def evaluation(self, records: list[Record]) -> None: ...
    def go_back(self, step: int) -> None: ...
    def close(self) -> None: ...


class MetricsWriter:
    """Passes records to every destination that `config.logging` names. Make one, on rank 0."""

    def __init__(
        self,
        config: RunConfig,
        run_directory: Path,
        resume_step: int,
        changes: Sequence[Change] = (),
    ) -> None:
        """Open every destination.

        Args:
            config: The run's config.
            run_directory: Where the files go. Made when missing.
            resume_step: Steps done; 0 for a fresh start. What an earlier attempt wrote about later
                steps is dropped, because they are made again.
            changes: What `--allow-changed` has changed so far.
        """
        make_directory(run_directory)
        paths = RunPaths(run_directory)
        self._lines = JsonLines(paths.metrics, resume_step)
        self._axes = axes = Axes(paths.metrics, config, changes)
        self._destinations: list[Destination] = [self._lines]
        if config.logging.wandb != "disabled" and not is_installed():
            _say(
                "wandb: not installed, so nothing is written for W&B; metrics.jsonl has every "
                f'number. Install it with {INSTALL}, or set logging.wandb = "disabled"'
            )
        elif config.logging.wandb != "disabled":
            self._destinations.append(Guarded("wandb", lambda: Wandb(config, run_directory, axes)))
        if config.logging.tensorboard:
            length = config.data.sequence_length
            self._destinations.append(
                Guarded(
                    "TensorBoard", lambda: TensorBoard(run_directory, resume_step, axes, length)
                )
            )
        # The console comes last: its progress bar starts after whatever the others had to say.
        num_steps, interval = config.train.num_steps, config.logging.interval_steps
        self._destinations.append(
            ProgressBar(num_steps, resume_step) if _can_show_bar() else Lines(num_steps, interval)
        )

    def step(self, record: Record) -> None:
        """Write the record of one training step."""
        self._axes.step(record)
        for destination in self._destinations:
            destination.step(record)

    def evaluation(self, records: list[Record]) -> None:
        """Write the records of one evaluation: one per protocol and length, at one step."""
        for destination in self._destinations:
            destination.evaluation(records)

    def changed(self, record: Record) -> None:
        """Write the record of changed keys to metrics.jsonl; the others hold numbers alone."""
        self._lines.step(record)

    def go_back(self, step: int) -> None:
        """Drop the records of the steps after `step`, which are taken again."""
        for destination in self._destinations:
            destination.go_back(step)
        self._axes.read()

    def flush(self) -> None:
        """Flush metrics.jsonl to the disk. Raises RunFailed when the disk refuses."""
        self._lines.flush()

    def close(self) -> None:
        """Write out what is buffered and close every destination."""
        # In reverse: the progress bar must end before wandb prints and waits for its uploads.
        for destination in reversed(self._destinations):
            destination.close()


class Guarded:
    """Wraps a destination so that its failures are reported once on stderr and never stop a run."""

    def __init__(self, name: str, make: Callable[[], Destination]) -> None:
        self._name = name
        self._destination: Destination | None = None
        try:
            self._destination = make()
        except Exception as error:
            self._give_up(error)

    def step(self, record: Record) -> None:
        self._try(lambda destination: destination.step(record))

    def evaluation(self, records: list[Record]) -> None:
        self._try(lambda destination: destination.evaluation(records))

    def go_back(self, step: int) -> None:
        self._try(lambda destination: destination.go_back(step))

    def close(self) -> None:
        self._try(lambda destination: destination.close())

    def _try(self, action: Callable[[Destination], None]) -> None:
        if self._destination is None:
            return
        try:
            action(self._destination)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        # wandb loses what it has buffered unless it is closed.
        if self._destination is not None:
            with contextlib.suppress(Exception):
                self._destination.close()
        self._destination = None
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _say(f"{self._name}: {reason}; continuing without it; metrics.jsonl has every number")


class JsonLines:
    """metrics.jsonl, which holds every number whatever becomes of the other destinations."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path, self._file = path, MetricsFile(path, resume_step)

    def step(self, record: Record) -> None:
        self._file.write(record)

    def evaluation(self, records: list[Record]) -> None:
        for record in records:
            self._file.write(record)

    def go_back(self, step: int) -> None:
        self._file.close()
        self._file = MetricsFile(self._path, step)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard event files. A resume purges the steps that will be made again."""

    def __init__(
        self, run_directory: Path, resume_step: int, axes: Axes, train_length: int
    ) -> None:
        """Open a file.

        Args:
            run_directory: The run's directory.
            resume_step: Steps done.
            axes: How far training has come, which is written as well.
            train_length: Training length L in tokens.
        """
        self._run_directory, self._axes, self._train_length = run_directory, axes, train_length
        self._open(resume_step)

    def step(self, record: Record) -> None:
        self._add({**step_tags(record), **self._axes.values()}, record["step"])

    def evaluation(self, records: list[Record]) -> None:
        step = records[0]["step"]
        self._add(evaluation_tags(records), step)
        picture = length_picture(records, self._train_length)
        self._writer.add_image(FIGURE, picture, step, dataformats="HWC")

    def go_back(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def close(self) -> None:
        self._writer.close()

    def _open(self, step: int) -> None:
        """Open a file in which everything after `step` is written again."""
        # Slow to import, and tensorboard may not be installed.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            log_dir=str(RunPaths(self._run_directory).tensorboard), purge_step=step + 1
        )

    def _add(self, scalars: Record, step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, global_step=step)


def _can_show_bar() -> bool:
    """Return True if stderr is a terminal on which tqdm can draw a bar."""
    # A terminal without a width, as under `docker run -t`, shows nothing of a bar.
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


class ProgressBar:
    """A tqdm bar on a terminal's stderr."""

    def __init__(self, num_steps: int, resume_step: int) -> None:
        self._bar = tqdm(
            total=num_steps, initial=resume_step, unit="step", dynamic_ncols=True, file=sys.stderr
        )

    def step(self, record: Record) -> None:
        for line in _pass_lines(record):
            self._bar.write(line, file=sys.stderr)
        self._bar.set_postfix_str(_numbers(record), refresh=False)
        self._bar.update(1)

    def evaluation(self, records: list[Record]) -> None:
        for line in _evaluation_lines(records):
            self._bar.write(line, file=sys.stderr)

    def go_back(self, step: int) -> None:
        self._bar.n = step
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class Lines:
    """A plain line on stderr every `interval` steps, for logs."""

    def __init__(self, num_steps: int, interval: int) -> None:
        self._num_steps, self._interval = num_steps, interval
        self._seconds: deque[float] = deque(maxlen=RATE_WINDOW_STEPS)

    def step(self, record: Record) -> None:
        for line in _pass_lines(record):
            _say(line)
        step = record["step"]
        self._seconds.append(record["step_seconds"])
        if step % self._interval == 0 or step == self._num_steps:
            left = round((self._num_steps - step) * sum(self._seconds) / len(self._seconds))
            _say(f"step {step}/{self._num_steps}  {_numbers(record)}  eta {_clock(left)}")

    def evaluation(self, records: list[Record]) -> None:
        for line in _evaluation_lines(records):
            _say(line)

    def go_back(self, step: int) -> None:
        """Do nothing: what was printed stays."""

    def close(self) -> None:
        """Do nothing: no file is open."""


def _numbers(record: Record) -> str:
    return (
        f"loss {record['loss_nats']:.3f}  lr {record['learning_rate']:.1e}  "
        f"grad {record['gradient_norm']:.2f}  "
        f"{_thousands(record['tokens_per_second'])} tokens/s{_data_wait(record)}"
    )


def _data_wait(record: Record) -> str:
    """Return how much of a step was spent waiting for its data, if it is worth a look."""
    share = record["data_wait_seconds"] / record["step_seconds"]
    return f"  data wait {share:.0%}" if share > SHOWN_WAIT else ""


def _pass_lines(record: Record) -> list[str]:
    """Return a line for each corpus that begins another pass in a step."""
    ordinals = {2: "its second pass", 3: "its third pass"}
    return [
        f"step {record['step']}: corpus {key.removeprefix(PASS)} begins "
        f"{ordinals.get(number, f'pass {number}')}"
        for key, number in record.items()
        if key.startswith(PASS)
    ]


def _thousands(value: float) -> str:
    """Return a number as people read it: 21300 is "21.3k", 1250000 is "1.25M"."""
    for size, unit, digits in ((1e6, "M", 2), (1e3, "k", 1)):
        if value >= size:
            return f"{value / size:.{digits}f}{unit}"
    return f"{value:.0f}"


def _clock(seconds: int) -> str:
    """Return a duration: 42 is "0:42", 4000 "1:06:40", 200000 "2 days, 7:33:20"."""
    return (
        f"{seconds // 60}:{seconds % 60:02d}" if seconds < 3600 else str(timedelta(seconds=seconds))
    )


def _evaluation_lines(records: list[Record]) -> list[str]:
    """Return one line for each protocol: the tokens scored, and perplexity by length."""
    by_protocol: dict[str, list[str]] = {}
    for record in records:
        by_protocol.setdefault(record["protocol"], []).append(
            f"{record['length']}: {record['perplexity']:.2f}"
        )
    step, tokens = records[0]["step"], records[0]["tokens"]
    return [
        f"evaluation after step {step}, {p}, {tokens:,} tokens, perplexity at  {'  '.join(v)}"
        for p, v in by_protocol.items()
    ]


def _say(line: str) -> None:
    # stderr may be a file on a disk that is full for a moment, which must not end training.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)

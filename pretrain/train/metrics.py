"""Where a run's numbers go: metrics.jsonl always; the console, wandb and TensorBoard beside it.

A record is a flat dictionary. A step's: `step` (steps done, 1-based), `loss_nats`, `gradient_norm`, `learning_rate`,
`tokens_per_second`, `step_seconds` and what else was measured. An evaluation's: `step`, `evaluation` (true), `length`,
`protocol`, `loss_nats`, `perplexity`. One small class a destination; `MetricsWriter` composes them.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from pretrain.config import RunConfig
from pretrain.rundir.files import replace_file
from pretrain.rundir.metrics import MetricsFile, Record
from pretrain.rundir.paths import RunPaths

WANDB_INIT_SECONDS = 15  # with a key and no network, wandb would block far longer before it raises
WANDB_FINISH_SECONDS = 60  # what is not uploaded by then stays on disk for `wandb sync`
RATE_WINDOW_STEPS = 50  # the estimated time left comes from this many latest steps


class Destination(Protocol):
    """A place that takes a step's record, the records of one evaluation, and is closed once."""

    def step(self, record: Record) -> None: ...
    def evaluation(self, records: list[Record]) -> None: ...
    def close(self) -> None: ...


class MetricsWriter:
    """Passes records on to every destination that `config.logging` names. Make one, on one rank."""

    def __init__(self, config: RunConfig, run_directory: Path, resume_step: int) -> None:
        """`resume_step` steps are done (0: a fresh start); what earlier attempts wrote after them is dropped."""
        run_directory.mkdir(parents=True, exist_ok=True)
        paths = RunPaths(run_directory)
        self._destinations: list[Destination] = [JsonLines(paths.metrics, resume_step)]
        if config.logging.wandb != "disabled":
            self._destinations.append(Guarded("wandb", lambda: Wandb(config, run_directory)))
        if config.logging.tensorboard:
            self._destinations.append(
                Guarded("TensorBoard", lambda: TensorBoard(run_directory, resume_step))
            )
        # The console comes last: its progress bar starts after whatever the others had to say.
        num_steps, interval = config.train.num_steps, config.logging.interval_steps
        self._destinations.append(
            ProgressBar(num_steps, resume_step) if _wide() else Lines(num_steps, interval)
        )

    def step(self, record: Record) -> None:
        """One training step's numbers."""
        for destination in self._destinations:
            destination.step(record)

    def evaluation(self, records: list[Record]) -> None:
        """What one evaluation found: a record a length and protocol, all of the same step."""
        for destination in self._destinations:
            destination.evaluation(records)

    def close(self) -> None:
        """Writes out what is buffered and closes every destination."""
        for destination in reversed(
            self._destinations
        ):  # the progress bar ends before wandb waits for its uploads
            destination.close()


class Guarded:
    """A destination whose failures, while it is made or later, are said once on stderr and never stop the run."""

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
        self._destination = None
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _say(f"{self._name}: {reason}; going on without it, metrics.jsonl has every number")


class JsonLines:
    """metrics.jsonl, which holds every number whatever becomes of the other destinations."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self._file = MetricsFile(path, resume_step)

    def step(self, record: Record) -> None:
        self._file.write(record)

    def evaluation(self, records: list[Record]) -> None:
        for record in records:
            self._file.write(record)

    def close(self) -> None:
        self._file.close()


class Wandb:
    """Weights & Biases. The run's id stands in the run directory, so a resumed run continues the same curve."""

    def __init__(self, config: RunConfig, run_directory: Path) -> None:
        import wandb  # costs about a second: not for runs that do not want it

        mode = config.logging.wandb
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=run_directory.name,
            dir=str(run_directory),
            id=_wandb_id(RunPaths(run_directory).wandb_run_id),
            mode=mode,
            resume="allow" if mode == "online" else None,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(
                silent=True,
                console="off",  # capturing the terminal would break the progress bar
                init_timeout=WANDB_INIT_SECONDS,
                login_timeout=WANDB_INIT_SECONDS,
                finish_timeout=WANDB_FINISH_SECONDS,
            ),
        )
        # Our own step is the x axis: wandb's must only grow, and a resume may go back a few steps.
        self._run.define_metric("*", step_metric="step")
        if mode == "online":
            _say(f"wandb: {self._run.url}")

    def step(self, record: Record) -> None:
        self._run.log(record)

    def evaluation(self, records: list[Record]) -> None:
        self._run.log({"step": records[0]["step"], **_evaluation_scalars(records)})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(path: Path) -> str:
    """The id of the run, kept in `path` from its first start on: one directory is one run.

    So also where it starts from scratch again, because it ended before its first checkpoint.
    """
    if path.exists() and (identifier := path.read_text().strip()):
        return identifier
    identifier = uuid.uuid4().hex[:12]
    replace_file(path, identifier + "\n")
    return identifier


class TensorBoard:
    """TensorBoard event files in `run_directory`/tensorboard; on resume the steps that will be run again are purged."""

    def __init__(self, run_directory: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # slow to import, and tensorboard need not be there

        self._writer = SummaryWriter(
            log_dir=str(RunPaths(run_directory).tensorboard), purge_step=resume_step + 1
        )

    def step(self, record: Record) -> None:
        self._add(record, record["step"])

    def evaluation(self, records: list[Record]) -> None:
        self._add(_evaluation_scalars(records), records[0]["step"])

    def close(self) -> None:
        self._writer.close()

    def _add(self, scalars: Record, step: int) -> None:
        for name, value in scalars.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, global_step=step)


def _evaluation_scalars(records: list[Record]) -> Record:
    """One flat dictionary of an evaluation: evaluation/<protocol>/<length>/loss_nats and .../perplexity."""
    return {
        f"evaluation/{record['protocol']}/{record['length']}/{name}": record[name]
        for record in records
        for name in ("loss_nats", "perplexity")
    }


def _wide() -> bool:
    """Whether stderr is a terminal with room for a bar: on one that knows no width (docker -t) tqdm draws nothing."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


class ProgressBar:
    """A tqdm bar on a terminal's stderr."""

    def __init__(self, num_steps: int, resume_step: int) -> None:
        self._bar = tqdm(
            total=num_steps, initial=resume_step, unit="step", dynamic_ncols=True, file=sys.stderr
        )

    def step(self, record: Record) -> None:
        self._bar.set_postfix_str(_numbers(record), refresh=False)
        self._bar.update(1)

    def evaluation(self, records: list[Record]) -> None:
        for line in _evaluation_lines(records):
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


class Lines:
    """A plain line on stderr every so many steps, for logs."""

    def __init__(self, num_steps: int, interval: int) -> None:
        self._num_steps, self._interval = num_steps, interval
        self._seconds: deque[float] = deque(maxlen=RATE_WINDOW_STEPS)

    def step(self, record: Record) -> None:
        step = record["step"]
        self._seconds.append(record["step_seconds"])
        if step % self._interval == 0 or step == self._num_steps:
            left = round((self._num_steps - step) * sum(self._seconds) / len(self._seconds))
            _say(f"step {step}/{self._num_steps}  {_numbers(record)}  eta {_clock(left)}")

    def evaluation(self, records: list[Record]) -> None:
        for line in _evaluation_lines(records):
            _say(line)

    def close(self) -> None:
        """Nothing is held open."""


def _numbers(record: Record) -> str:
    return (
        f"loss {record['loss_nats']:.3f}  lr {record['learning_rate']:.1e}  grad {record['gradient_norm']:.2f}  "
        f"{_thousands(record['tokens_per_second'])} tokens/s"
    )


def _thousands(value: float) -> str:
    """21300 -> '21.3k', 1250000 -> '1.25M'."""
    for size, unit, digits in ((1e6, "M", 2), (1e3, "k", 1)):
        if value >= size:
            return f"{value / size:.{digits}f}{unit}"
    return f"{value:.0f}"


def _clock(seconds: int) -> str:
    """42 -> '0:42', 4000 -> '1:06:40', 200000 -> '2 days, 7:33:20'."""
    return (
        f"{seconds // 60}:{seconds % 60:02d}" if seconds < 3600 else str(timedelta(seconds=seconds))
    )


def _evaluation_lines(records: list[Record]) -> list[str]:
    """A line a protocol: perplexity by length."""
    by_protocol: dict[str, list[str]] = {}
    for record in records:
        by_protocol.setdefault(record["protocol"], []).append(
            f"{record['length']}: {record['perplexity']:.2f}"
        )
    step = records[0]["step"]
    return [
        f"evaluation after step {step}, {p}, perplexity at  {'  '.join(v)}"
        for p, v in by_protocol.items()
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

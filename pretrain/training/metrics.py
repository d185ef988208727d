"""Collect a step's numbers, and send them to metrics.jsonl, the console, W&B and TensorBoard.

metrics.jsonl always gets every number (`pretrain.rundir.metrics` defines the records); the other
destinations are a convenience and may fail without harm. Each destination is one small class, and
`MetricsWriter` passes every record to all of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from pretrain import platform
from pretrain.config import ConfigError, RunConfig
from pretrain.config.errors import say
from pretrain.rundir.files import make_directory, replace_file
from pretrain.rundir.metrics import (
    CHANGED,
    EVALUATION,
    NON_FINITE,
    PHASE,
    MetricsFile,
    Record,
    Reduction,
)
from pretrain.rundir.metrics import record_metric as record_metric
from pretrain.rundir.paths import RunPaths
from pretrain.topology import gather

# ---- Reduce the values given to `record_metric` in a step over all ranks ----
# Ranks may record different names, because a pipeline stage knows only the numbers of its own
# layers, but a collective needs the same numbers in the same order on every rank. So the ranks
# reduce the names that all of them know. A rank that has seen another name votes for an exchange,
# along with the loss (`step.update`). If any rank has voted for it, the ranks exchange names when
# the step's numbers are read, and reduce the missing ones. This happens only in the first steps
# that record a new name.


_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")


class StepMetrics:
    """The metrics of a run's steps on this rank. Every rank makes one."""

    def __init__(self) -> None:
        self._agreed: dict[str, Reduction] = {}
        """The names that all ranks know, in the order in which they are reduced."""
        self._seen: dict[str, Reduction] = {}
        """The names that this rank knows."""
        self._values: dict[str, list[float | Tensor]] = {}
        """The values of the step in progress."""

    def collect(self, name: str, value: Any, reduction: Reduction) -> None:
        """Collect a value; the arguments are those of `record_metric`."""
        if self._seen.get(name) != reduction:
            self._check(name, reduction)
            self._seen[name] = reduction
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"record_metric({name!r}): {tuple(value.shape)} is not a scalar")
            value = value.detach().reshape(())
            # Copied, because the tensor may be changed in place before the step ends.
            value = value.to(torch.float64, copy=True) if value.is_cuda else float(value)
        self._values.setdefault(name, []).append(value)

    def has_new(self) -> bool:
        """Return True if this rank knows a name that not all ranks know yet."""
        return self._seen.keys() != self._agreed.keys()

    def take(self) -> TakenMetrics:
        """Reduce the values of the completed step, and begin the next. All ranks together."""
        values, self._values = self._values, {}
        names = dict(self._agreed)
        return TakenMetrics(self, values, names, _reduced(values, names))

    def agree(self) -> dict[str, Reduction]:
        """Exchange the names, and return those that all ranks know now. All ranks together."""
        known = [item for each in gather(self._seen, dict[str, Reduction]) for item in each.items()]
        for name, reduction in sorted(known):
            if self._agreed.setdefault(name, reduction) != reduction:
                raise ValueError(f"record_metric({name!r}): ranks record it by several reductions")
        self._seen = dict(self._agreed)
        return dict(self._agreed)

    def _check(self, name: str, reduction: Reduction) -> None:
        """Check a name that is new, or has another reduction than before."""
        said = f"record_metric({name!r}): "
        if name in self._seen:
            raise ValueError(f"{said}reduced by {self._seen[name]!r} before, not {reduction!r}")
        if not _NAME.fullmatch(name) or ("/" in name and name.partition("/")[0] not in GROUPS):
            raise ValueError(f"{said}expected a key, or group/key with one of {', '.join(GROUPS)}")
        taken = {STEP, EVALUATION, CHANGED, NON_FINITE, *TAGS}
        if name in taken or _tag(name) in TAGS.values() or name.startswith(PASS):
            raise ValueError(f"{said}the records of metrics.jsonl have a key of this name")


@dataclass(frozen=True)
class TakenMetrics:
    """The metrics of one step, on their way to the host."""

    owner: StepMetrics
    values: dict[str, list[float | Tensor]]
    """The values of this rank."""
    names: dict[str, Reduction]
    """The metrics in the reduction."""
    numbers: list[Tensor]
    """The reduction: fp64 on the device, to be read back together and passed to `record`."""

    def record(self, numbers: Sequence[float], *, is_lacking: bool) -> Record:
        """Return the step's metrics. All ranks together.

        Args:
            numbers: `self.numbers` on the host.
            is_lacking: True if, by the votes, a rank has recorded a name that is not in `names`.
        """
        record = _record(self.names, numbers)
        if is_lacking:
            agreed = self.owner.agree()
            late = {name: how for name, how in agreed.items() if name not in self.names}
            numbers = [number for part in _reduced(self.values, late) for number in part.tolist()]
            record |= _record(late, numbers)
        return record


def _reduced(values: dict[str, list[float | Tensor]], names: dict[str, Reduction]) -> list[Tensor]:
    """Reduce values over all ranks: sums and their counts, then maxima; fp64, on the device."""
    added = [name for name, how in names.items() if how != "max"]
    largest = [name for name, how in names.items() if how == "max"]
    sums = [_own(values.get(name, []), "sum") for name in added]
    counts = [float(len(values.get(name, []))) for name in added]
    maxima = [_own(values.get(name, []), "max") for name in largest]
    packed = []
    for cells, operation in (([*sums, *counts], dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
        if cells:
            packed.append(_packed(cells))
            dist.all_reduce(packed[-1], operation)
    return packed


def _record(names: dict[str, Reduction], numbers: Sequence[float]) -> Record:
    """Return the numbers of `_reduced` by name. A metric that no rank recorded is left out."""
    added = [name for name, how in names.items() if how != "max"]
    largest = [name for name, how in names.items() if how == "max"]
    sums, counts = numbers[: len(added)], numbers[len(added) : 2 * len(added)]
    record = {
        name: total / count if names[name] == "mean" else total
        for name, total, count in zip(added, sums, counts)
        if count
    }
    maxima = zip(largest, numbers[2 * len(added) :])
    return record | {name: value for name, value in maxima if value != -math.inf}


def _packed(cells: Iterable[float | Tensor]) -> Tensor:
    """Return numbers of the host and of the device as one tensor on the device, fp64."""
    cells = list(cells)
    numbers = [0.0 if isinstance(cell, Tensor) else cell for cell in cells]
    packed = platform.to_device(torch.tensor(numbers, dtype=torch.float64))
    for index, cell in enumerate(cells):
        if isinstance(cell, Tensor):
            packed[index] = cell
    return packed


def _own(values: list[float | Tensor], how: Literal["sum", "max"]) -> float | Tensor:
    """Return this rank's sum or maximum, without waiting for the device."""
    if any(isinstance(value, Tensor) for value in values):
        return getattr(_packed(values), how)()  # type: ignore[no-any-return]  # a method by name
    return float(sum(values) if how == "sum" else max(values, default=-math.inf))


# ---- tags ----
# Name a run's numbers as W&B and TensorBoard show them, in groups with a common axis.
#
# RUN/metrics.jsonl has its own names, with units, which do not change. Here each gets the group
# under which it is shown and, if there is one, the name that Hugging Face's Trainer uses.


PASS = "begun_pass_of_"
"""A step that reads a corpus to its end has a key of this prefix and the corpus's name. The value
is the number of the pass that begins, from 2."""
_GROUPED = {
    "train": (
        *("learning_rate", "position_learning_rate", "global_batch_size", "consumed_samples"),
        PHASE,
    ),
    "throughput": (
        *("tokens_per_second", "step_seconds", "data_wait_seconds"),
        *("tflops_per_second", "tflops_per_second_causal"),
        *("model_flops_utilization", "model_flops_utilization_causal"),
    ),
    "health": (
        *("peak_memory_bytes", "loss_scale", "slowest_rank", "slowest_ratio", "slow_since_step"),
        *("skipped_updates", "rollbacks", "rolled_back_from_step"),
    ),
}
TAGS = {"loss_nats": "train/loss", "gradient_norm": "train/grad_norm"} | {
    key: f"{group}/{key}" for group, keys in _GROUPED.items() for key in keys
}
"""Key of a step's record -> tag."""
GROUPS = ("train", "throughput", "health", "data", "eval")
"""The groups with which tags begin."""
STEP = "step"
"""The axis of every chart: steps done since step 0, over all starts of the run."""


def step_tags(record: Record) -> Record:
    """Return the numbers of a step's record by their tags, "group/name"."""
    return {
        _tag(key): value
        for key, value in record.items()
        if key != STEP and isinstance(value, int | float)
    }


def _tag(key: str) -> str:
    """Return the tag of a number in a step's record; `record_metric` may have given it a group."""
    if key.startswith(PASS):
        return f"data/{key}"
    return TAGS.get(key, key if "/" in key else f"train/{key}")


def _recorded(record: Record) -> Record:
    """Return the numbers of a step that came from `record_metric`."""
    return {
        key: value
        for key, value in record.items()
        if key not in TAGS
        and key != STEP
        and not key.startswith(PASS)
        and isinstance(value, int | float)
    }


def evaluation_tags(records: Sequence[Record]) -> Record:
    """Return an evaluation as eval/<measure>_<protocol>/<length>."""
    return {
        f"eval/{name}_{record['protocol']}/{record['length']}": record[key]
        for record in records
        for key, name in (("perplexity", "perplexity"), ("loss_nats", "loss"))
    }


# ---- Send a run's numbers to Weights & Biases, whose package `wandb` need not be installed ----


INIT_SECONDS = 15
"""Time limit of wandb's start. With an API key but no network, it would block far longer."""
FINISH_SECONDS = 60
"""Time limit of the last upload. Data not uploaded by then stays on disk for `wandb sync`."""
INSTALL = "pip install -e '.[wandb]' in the clone"


def is_installed() -> bool:
    """Return True if the package wandb can be imported.

    A folder named wandb in the working directory, such as that of a run, is not the package.
    """
    found = importlib.util.find_spec("wandb")
    return found is not None and found.origin is not None


def check_wandb(config: RunConfig) -> None:
    """Raise ConfigError if the run is to be sent to W&B but the package is not installed."""
    if config.logging.wandb == "online" and not is_installed():
        raise ConfigError(
            "logging.wandb = online: the package wandb is not installed. Install it "
            f'({INSTALL}), or set logging.wandb = "disabled"'
        )


class Destination:
    """Takes the records of steps and evaluations, until it is closed."""

    def step(self, record: Record) -> None:
        """Take the record of a step."""

    def evaluation(self, records: list[Record]) -> None:
        """Take the records of one evaluation."""

    def go_back(self, step: int) -> None:
        """Note that the steps after `step` will be taken again. What is already shown stays."""

    def close(self) -> None:
        """Write out what is buffered."""


class Wandb(Destination):
    """Weights & Biases. The run directory holds the id, so a resumed run continues its curves."""

    def __init__(self, config: RunConfig, run_directory: Path) -> None:
        # Imported here, because it takes about a second, which only runs that use it should pay.
        import wandb

        mode = config.logging.wandb
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=run_directory.name,
            dir=str(run_directory),
            id=_run_id(RunPaths(run_directory).wandb_run_id),
            mode=mode,
            resume="allow" if mode == "online" else None,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(
                silent=True,
                # Capturing the terminal would break the lines of the console.
                console="off",
                init_timeout=INIT_SECONDS,
                login_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
            ),
        )
        # The x axis is our own step, because wandb's can only grow, and a resumed run may go back.
        self._run.define_metric(STEP)
        for group in GROUPS:
            self._run.define_metric(f"{group}/*", step_metric=STEP)
        if mode == "online":
            say(f"wandb: {self._run.url}")

    def step(self, record: Record) -> None:
        self._run.log({STEP: record[STEP], **step_tags(record)})

    def evaluation(self, records: list[Record]) -> None:
        self._run.log({STEP: records[0][STEP], **evaluation_tags(records)})

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path) -> str:
    """Return the run's id, which `path` keeps from the first start on, so one directory is one run.

    A run that ended before its first checkpoint starts from scratch, and still keeps its id.
    """
    if path.exists() and (identifier := path.read_text().strip()):
        return identifier
    identifier = uuid.uuid4().hex[:12]
    replace_file(path, identifier + "\n")
    return identifier


SHOWN_WAIT = 0.05
"""The wait for data is shown if it takes more than this share of a step."""
RATE_WINDOW_STEPS = 50
"""The estimated time left is computed from this many latest steps."""


class MetricsWriter:
    """Passes records to every destination that `config.logging` names. Create one, on rank 0.

    metrics.jsonl always holds every number. Failures of the other destinations are reported once on
    stderr and never stop a run.
    """

    def __init__(self, config: RunConfig, run_directory: Path, resume_step: int) -> None:
        """Open every destination.

        Args:
            config: The run's config.
            run_directory: The directory of the files, created if it is missing.
            resume_step: Steps done; 0 for a fresh start. An earlier attempt's records of later
                steps are dropped, because those steps will be taken again.
        """
        make_directory(run_directory)
        self._path = RunPaths(run_directory).metrics
        self.file = MetricsFile(self._path, resume_step)
        """metrics.jsonl."""
        # No warning without any record, because this run may begin with another run's checkpoint.
        if 0 < (last := self.file.last_step) < resume_step:
            say(
                f"warning: {self._path}: ends at step {last}, and training goes on from step "
                f"{resume_step}: the records of steps {last + 1} to {resume_step} are missing. To "
                "have them again, resume from an earlier checkpoint"
            )
        self.destinations: dict[str, Destination] = {}
        """The destinations besides metrics.jsonl that have not failed."""
        if config.logging.wandb != "disabled" and not is_installed():
            say(
                "wandb: not installed, so nothing is written for W&B; metrics.jsonl has every "
                f'number. Install it with {INSTALL}, or set logging.wandb = "disabled"'
            )
        elif config.logging.wandb != "disabled":
            with self._guarded("wandb"):
                self.destinations["wandb"] = Wandb(config, run_directory)
        if config.logging.tensorboard:
            with self._guarded("TensorBoard"):
                self.destinations["TensorBoard"] = TensorBoard(run_directory, resume_step)
        self.destinations["console"] = Console(config)

    def step(self, record: Record) -> None:
        """Write the record of one training step."""
        self.file.write(record)
        self._each(lambda destination: destination.step(record))

    def evaluation(self, records: list[Record]) -> None:
        """Write the records of one evaluation: one per protocol and length, at one step."""
        for record in records:
            self.file.write(record)
        self._each(lambda destination: destination.evaluation(records))

    def go_back(self, step: int) -> None:
        """Drop the records of the steps after `step`, which will be taken again."""
        self.file.close()
        self.file = MetricsFile(self._path, step)
        self._each(lambda destination: destination.go_back(step))

    def close(self) -> None:
        """Write out what is buffered and close every destination."""
        self._each(lambda destination: destination.close())
        self.file.close()

    def _each(self, act: Callable[[Destination], None]) -> None:
        for name, destination in list(self.destinations.items()):
            with self._guarded(name):
                act(destination)

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Report a failure of a destination, and continue without that destination."""
        try:
            yield
        except Exception as error:
            # wandb loses what it has buffered unless it is closed.
            if destination := self.destinations.pop(name, None):
                with contextlib.suppress(Exception):
                    destination.close()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            say(f"{name}: {reason}; continuing without it; metrics.jsonl has every number")


class TensorBoard(Destination):
    """TensorBoard event files. A resumed run purges the steps that will be taken again."""

    def __init__(self, run_directory: Path, resume_step: int) -> None:
        self._folder = str(RunPaths(run_directory).tensorboard)
        self._open(resume_step)

    def _open(self, step: int) -> None:
        """Open a file in which everything after `step` is written again."""
        # Imported here, because it is slow to import, and tensorboard may not be installed.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=self._folder, purge_step=step + 1)

    def step(self, record: Record) -> None:
        self._add(step_tags(record), record[STEP])

    def evaluation(self, records: list[Record]) -> None:
        self._add(evaluation_tags(records), records[0][STEP])

    def go_back(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def _add(self, scalars: Record, step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        self._writer.close()


class Console(Destination):
    """Prints a line on stderr for the first step, every interval_steps, and each evaluation."""

    def __init__(self, config: RunConfig) -> None:
        self._num_steps, self._interval = config.train.num_steps, config.logging.interval_steps
        self._even = math.log(config.data.vocab_size)
        """The loss in nats if all tokens are equally probable."""
        self._scale = config.embedding_scale if config.model.tie_word_embeddings else 1.0
        self._seconds: deque[float] = deque(maxlen=RATE_WINDOW_STEPS)

    def step(self, record: Record) -> None:
        step, is_first = record["step"], not self._seconds
        self._seconds.append(record["step_seconds"])
        if step % self._interval == 0 or step == self._num_steps:
            left = round((self._num_steps - step) * sum(self._seconds) / len(self._seconds))
            eta = tqdm.format_interval(left)
            say(f"step {step}/{self._num_steps}  {_numbers(record)}  eta {eta}")
        elif is_first:
            # No estimate from the first step, as it allocates memory and may compile kernels.
            say(f"step {step}/{self._num_steps}  {_numbers(record)}  (the first is the slowest)")
        if step == 1 and self._scale > 1 and record["loss_nats"] > self._even:
            say(
                f"the loss begins above ln(vocabulary) = {self._even:.1f}: tied embeddings, times "
                f"{self._scale:.1f}, at first predict the token that was read"
            )

    def evaluation(self, records: list[Record]) -> None:
        for line in _evaluation_lines(records):
            say(line)


def _numbers(record: Record) -> str:
    recorded = "".join(f"  {name} {value:.4g}" for name, value in _recorded(record).items())
    return (
        f"loss {record['loss_nats']:.3f}  lr {record['learning_rate']:.1e}  "
        f"grad {record['gradient_norm']:.2f}  "
        f"{tqdm.format_sizeof(record['tokens_per_second'])} tokens/s{_data_wait(record)}{recorded}"
    )


def _data_wait(record: Record) -> str:
    """Return the share of a step spent waiting for its data, as text; "" if it is small."""
    share = record["data_wait_seconds"] / record["step_seconds"]
    return f"  data wait {share:.0%}" if share > SHOWN_WAIT else ""


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

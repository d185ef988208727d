"""metrics.jsonl: the measurements of every training step and every evaluation of a run.

A record is a flat JSON object. The record of a step has `step` (steps done, from 1), `loss_nats`,
`gradient_norm`, `learning_rate`, `global_batch_size`, `tokens_per_second`, `step_seconds` and
more. An evaluation has one record for each length and protocol, with `step`, `evaluation` (true),
`protocol`, `stride`, `length`, `loss_nats` and `perplexity`. The record of a change has `step` and
`changed`: the keys that `--allow-changed` named when training continued from this step, each with
the value before and after.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pretrain.config import writing
from pretrain.config.errors import say
from pretrain.rundir.files import (
    MAX_NUMBER,
    new_file,
    open_own,
    read_json_lines,
)
from pretrain.rundir.paths import Place, RunPaths, attempt_numbers

# ---- Warn about failures that training can survive, once for each kind ----


Warn = Callable[[str, str], None]
"""Called with the kind of a warning and its message; see `WarnOnce`."""


class WarnOnce:
    """Prints the first warning of each kind on stderr."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, kind: str, message: str) -> None:
        """Print a warning, unless a warning of the same kind has been printed.

        Args:
            kind: A few words; not printed.
            message: What went wrong, and the consequence.
        """
        if kind in self._said:
            return
        self._said.add(kind)
        say(f"warning: {message}")


# ---- Record a number of a step by its name, from wherever it is computed ----


Reduction = Literal["mean", "sum", "max"]
"""How the values of a metric in a step are reduced to one number."""
Collect = Callable[[str, Any, Reduction], None]

_collectors: list[Collect] = []
"""The functions that collect metrics, the innermost last. The list belongs to the process and not
to a context or a thread, because autograd runs a backward pass in its own threads."""


def record_metric(name: str, value: Any, reduction: Reduction = "mean") -> None:
    """Record a number of the current training step; do nothing outside of a step.

    The number becomes a key of the step's record in metrics.jsonl, and is shown by the log, Weights
    & Biases and TensorBoard. Any rank may record, in any step, any number of times: the values are
    reduced over all calls on all ranks, so that the mean, sum or maximum is taken over micro
    batches, layers and data-parallel ranks. If several ranks record equal values, as
    tensor-parallel ranks do, "mean" and "max" are unaffected, but each value counts in "sum". The
    same holds for values that a recomputed layer records again.

    Nothing waits for the device: a tensor is copied there, travels in one more collective of a step
    (two, if there is a "max"), and is read back with the step's other numbers.

    Args:
        name: The key, with its unit ("attention_entropy_nats"), or "group/key" with one of
            `pretrain.training.metrics.GROUPS`; without a group it is shown in "train".
        value: A number, or a tensor of one element on any device.
        reduction: How the values are reduced to one number; the same for every call with the name.

    Raises:
        ValueError: The name is taken, its group is unknown, its reduction differs from before, or
            the value is not a scalar.

    Modeled on `record_metric` of OLMo-core (src/olmo_core/train/trainer.py).
    """
    if _collectors:
        _collectors[-1](name, value, reduction)


@contextlib.contextmanager
def collecting(collect: Collect) -> Iterator[None]:
    """Pass the metrics that the block records to `collect`."""
    _collectors.append(collect)
    try:
        yield
    finally:
        _collectors.remove(collect)


# ---- metrics.jsonl ----


Record = dict[str, Any]

EVALUATION, CHANGED = "evaluation", "changed"
"""The keys that mark the records of an evaluation and of changed keys."""
PHASE = "phase"
"""The key of the number of the phase: in records of steps, and of changes where a phase begins."""
NON_FINITE = "non_finite"
"""The key under which a record lists those of its values that JSON cannot hold."""


def is_evaluation(record: Record) -> bool:
    """Return True for a record of an evaluation."""
    return bool(record.get(EVALUATION))


def is_change(record: Record) -> bool:
    """Return True for a record of keys that were changed; it has no numbers of the step."""
    return CHANGED in record


LOOK_SECONDS = 10.0
"""The least time between two checks whether the open file is still metrics.jsonl."""


class MetricsFile:
    """Appends records to metrics.jsonl and writes each one immediately."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open the file for a run of which `resume_step` steps are done.

        Records of later steps, which an earlier attempt wrote but did not save, are dropped, so
        that the file holds each step once. Changes at `resume_step` are dropped too; the run writes
        those that still hold again. A fresh start (step 0) keeps nothing.

        Raises:
            RunFailed: The file cannot be written.
        """
        self._path = path
        self._unwritten, self._size = b"", 0
        self._warn = WarnOnce()
        self.last_step = 0
        """The step of the newest record that was kept; 0 for none."""
        with writing(path):
            if path.exists():
                self.last_step = drop_after(path, resume_step)
            self._file = open_own(path, buffering=0)
            self._folder = Place.of(path.parent)
        self._attempt = self._newest_attempt()
        self._looked_at = time.monotonic()

    def write(self, record: Record) -> None:
        """Append one record.

        A record that cannot be written, for example because the disk is full for a moment, is kept
        and written with the next record; a warning is printed once. `flush` and `close` raise an
        error if not all is on the disk.
        """
        self._unwritten += (json.dumps(_to_json(record), allow_nan=False) + "\n").encode()
        try:
            if time.monotonic() - self._looked_at > LOOK_SECONDS:
                self._restore()
            self._write_out()
        except OSError as error:
            self._warn(
                "metrics",
                f"{self._path}: cannot be written for now ({error.strerror}); its lines are kept "
                "in memory and tried again",
            )

    def flush(self) -> None:
        """Write what is left and flush the file to the disk. Raises RunFailed if that fails."""
        with writing(self._path):
            self._restore()
            self._write_out()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is left and close the file, once. Raises RunFailed if that fails."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()

    def _restore(self) -> None:
        """Write the file again if somebody removed or replaced it: the open file has all lines."""
        self._looked_at = time.monotonic()
        is_here = self._folder.is_place_of(self._path.parent)
        if not is_here or self._newest_attempt() != self._attempt:
            # The run's directory is gone, or the file belongs to a newer attempt. The next save
            # will notice that.
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
        what = "its lines are written anew"
        try:
            with (
                open(f"/proc/self/fd/{self._file.fileno()}", "rb") as lost,
                new_file(self._path, durable=True) as partial,
                open_own(partial) as file,
            ):
                shutil.copyfileobj(lost, file)
        except FileNotFoundError:
            what = "the lines so far are lost"
        self._file.close()
        self._file, self._size = open_own(self._path, buffering=0), 0
        say(f"warning: {self._path}: was removed or replaced while the run trains; {what}")

    def _newest_attempt(self) -> int:
        return max(attempt_numbers(RunPaths(self._path.parent).attempts), default=0)

    def _write_out(self) -> None:
        if os.fstat(self._file.fileno()).st_size < self._size:
            say(
                f"warning: {self._path}: was cut short while the run trains; the lines that are "
                "missing are lost"
            )
        # A disk that becomes full accepts only a part of a line; the rest follows later.
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        self._size = os.fstat(self._file.fileno()).st_size


def read_metrics(path: Path, last_bytes: int | None = None) -> Iterator[Record]:
    """Yield the records of a metrics.jsonl, oldest first; none if there is no such file.

    Lines that a kill or a power cut damaged are skipped.

    Args:
        path: The file.
        last_bytes: Read only this many bytes at the end of the file, which grows by about 300 bytes
            per step; None for all.
    """
    for record in read_json_lines(path, last_bytes):
        step = record.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and abs(step) < MAX_NUMBER:
            yield _from_json(record)


def evaluations_at(path: Path, step: int) -> set[tuple[str, int, int]]:
    """Return (protocol, stride, length) of every evaluation after `step` in a metrics.jsonl."""
    return {(r["protocol"], r["stride"], r["length"]) for r in evaluation_records(path, step)}


def evaluation_records(path: Path, step: int) -> list[Record]:
    """Return the records of the evaluation after `step` in a metrics.jsonl; [] without one."""
    return [
        record
        for record in read_metrics(path)
        if record["step"] == step and is_evaluation(record) and _is_whole(record)
    ]


def _is_whole(record: Record) -> bool:
    """Return True if a record of an evaluation has all its keys, with values of the right types."""
    key = [record.get(name) for name in ("protocol", "stride", "length", "tokens")]
    numbers = [record.get(name) for name in ("loss_nats", "perplexity")]
    are_numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
    return list(map(type, key)) == [str, int, int, int] and are_numbers


def copy_after(path: Path, step: int, copy: Path) -> None:
    """Write the records after a step to another file, atomically.

    Args:
        path: The metrics.jsonl.
        step: The last step whose records are left out.
        copy: The file to write.
    """
    _write_all(copy, (record for record in read_metrics(path) if record["step"] > step))


def lines_until(path: Path, step: int) -> Iterator[bytes]:
    """Yield the records up to a step as lines of a metrics.jsonl."""
    for record in read_metrics(path):
        if record["step"] <= step:
            yield f"{json.dumps(_to_json(record))}\n".encode()


def drop_after(path: Path, step: int) -> int:
    """Rewrite the file without the records after `step` and without damaged lines, atomically.

    Returns:
        The step of the newest record that is kept; 0 for none.
    """
    last = 0

    def kept() -> Iterator[Record]:
        nonlocal last
        for record in read_metrics(path):
            if 0 <= record["step"] <= step - is_change(record):
                last = record["step"]
                yield record

    _write_all(path, kept())
    return last


def _write_all(path: Path, records: Iterable[Record]) -> None:
    """Write records to a file atomically. The records may be read from that same file."""
    # Not `replace_file`, because the records of a long run must be streamed, not held in memory.
    # The new file is flushed before it replaces the old one, which holds the run's whole history.
    with new_file(path, durable=True) as partial:
        with open_own(partial) as file:
            file.writelines(f"{json.dumps(_to_json(record))}\n".encode() for record in records)
        if path.exists():
            shutil.copymode(path, partial)


def _to_json(record: Record) -> Record:
    """Replace nan and infinity, which JSON lacks, by null, and list them under `non_finite`."""
    odd = {k: str(v) for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**record, **dict.fromkeys(odd), NON_FINITE: odd} if odd else record


def _from_json(record: Record) -> Record:
    """Undo `_to_json`."""
    odd = record.get(NON_FINITE)
    if not isinstance(odd, dict):
        return record
    values = {key: float(text) for key, text in odd.items() if text in ("nan", "inf", "-inf")}
    return {key: value for key, value in record.items() if key != NON_FINITE} | values

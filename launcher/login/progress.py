"""Read a run's progress from its files: its steps, how fast it does them, and what it waits for."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain.rundir.attempts import read_waiting
from pretrain.rundir.files import MAX_NUMBER, read_text
from pretrain.rundir.lock import LEASE_SECONDS
from pretrain.rundir.metrics import Record, is_evaluation, read_metrics
from pretrain.rundir.paths import RunPaths

RATE_STEPS = 50
"""Rates are means over this many of the latest steps."""
TAIL_BYTES = 256 * 1024
"""Bytes at the end of metrics.jsonl that are read, which may be huge: `RATE_STEPS` steps of some
300 bytes, and some evaluations between them."""
NUM_STEPS = re.compile(r"num_steps *= *([0-9]{1,15})")
"""The line of a config that `dump_config` writes for train.num_steps."""


@dataclass(frozen=True)
class Rates:
    """The progress of training, from the end of metrics.jsonl."""

    step: int
    """The last step."""
    loss_nats: float
    """The last step's loss, which may be nan or infinite."""
    tokens_per_second: float
    """Mean over the last `RATE_STEPS` steps, weighted by their time."""
    step_seconds: float
    """Mean over the last `RATE_STEPS` steps."""


def read_num_steps(run: Path) -> int | None:
    """Return train.num_steps as submitted, or else as started; None if neither can be read."""
    # Not `load_config`: this has to work on the configs of other versions, too. Nor tomllib, whose
    # time grows with the square of the file in one that was made for it.
    paths = RunPaths(run)
    for path in (paths.launch_config, paths.config):
        section = ""
        for line in read_text(path).splitlines():
            section = line.strip() if line.startswith("[") else section
            if section == "[train]" and (found := NUM_STEPS.fullmatch(line.strip())):
                return int(found[1])
    return None


def read_rates(path: Path) -> Rates | None:
    """Return the rates at the end of a metrics.jsonl; None if there is no step in it."""
    records = read_metrics(path, TAIL_BYTES)
    steps = [r for r in records if not is_evaluation(r) and _number(r, "step_seconds") > 0]
    if not steps:
        return None
    last, latest = steps[-1], steps[-RATE_STEPS:]
    seconds = sum(record["step_seconds"] for record in latest)
    # Weighted by time: the tokens of all these steps over the seconds of all these steps.
    tokens = sum(record["step_seconds"] * _number(record, "tokens_per_second") for record in latest)
    return Rates(
        step=last["step"],
        loss_nats=_number(last, "loss_nats", math.nan),
        tokens_per_second=tokens / seconds,
        step_seconds=seconds / len(latest),
    )


def waits_for(attempt: Path, now: float) -> str:
    """Return what the process that made an attempt waits for, and since when; "" if for nothing.

    Args:
        attempt: RUN/attempts/#### of the newest attempt.
        now: Unix seconds.
    """
    waiting, seen = read_waiting(attempt)
    if waiting is None or now - seen > LEASE_SECONDS:
        return ""
    since = time.strftime("%b %d %H:%M:%S", time.localtime(waiting.at))
    return f"waits since {since} for {waiting.what}"


def _number(record: Record, key: str, default: float = 0.0) -> float:
    """Return a number of a record; `default` when it is missing or something else."""
    value = record.get(key)
    if isinstance(value, float) or (type(value) is int and abs(value) < MAX_NUMBER):
        return value
    return default

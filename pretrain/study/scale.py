"""Put what the published 1.3B models took, and how they compare at equal time, beside a study's.

Only a study that names these numbers (`published = "cc100_roberta"`) has something to put there:
the same perplexities, and runs of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pretrain.evaluate.curves import Curve
from pretrain.evaluate.tables import Table, cell
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.metrics import read_metrics
from pretrain.rundir.paths import RunPaths
from pretrain.study import published
from pretrain.study.evidence import NONOVERLAPPING, kind_of
from pretrain.study.published import Published

MEMORY, HOURS = "memory_gb", "gpu_hours"
"""What is put beside each other, by its column in published.toml."""
WORDS = {MEMORY: "peak memory of a GPU, GB", HOURS: "GPU-hours"}


class Taken(NamedTuple):
    """Memory and GPU-hours of one run, or of the published models."""

    method: str
    train_length: int
    what: str
    """MEMORY or HOURS."""
    value: float | None
    """The run's; None where its files do not say."""
    theirs: Published


def taken(directory: Path, runs: Sequence[tuple[str, str, int]]) -> list[Taken]:
    """Return what each run took that has a published counterpart.

    Args:
        directory: The study's.
        runs: (directory below it, method, training length) of each finished run.
    """
    numbers = published.training()
    return [
        Taken(method, length, what, value, numbers[method, length, what])
        for run, method, length in runs
        if (method, length, HOURS) in numbers
        for what, value in _taken(directory / run).items()
    ]


def _taken(run: Path) -> dict[str, float | None]:
    """Return the memory and the GPU-hours of a run, from its training steps."""
    records = list(read_metrics(RunPaths(run).metrics))
    seconds = [r["step_seconds"] for r in records if "step_seconds" in r]
    peaks = [r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes")]
    owners = [attempt.owner for attempt in read_attempts(run)]
    # An owner.json that is damaged gives an owner without a nonce, and no number of processes.
    processes = {owner.num_processes if owner.nonce else None for owner in owners}
    # The lines of a step do not say how many shared it; of one number of processes all of them did.
    [count] = processes if len(processes) == 1 else [None]
    return {
        MEMORY: max(peaks) / 1e9 if peaks else None,
        HOURS: sum(seconds) * count / 3600 if seconds and count else None,
    }


def taken_table(rows: Sequence[Taken]) -> Table:
    """Return the table of what runs took beside what the published ones did."""
    header = ["method", "L", "what", "this study", "published", "where in published.toml"]
    cells = [
        [
            *(row.method, str(row.train_length), WORDS[row.what]),
            "-" if row.value is None else f"{row.value:,.4g}",
            f"{row.theirs.value:,.4g}",
            row.theirs.key,
        ]
        for row in rows
    ]
    return Table("What training took", header, cells, names=3)


def equal_time_table(curves: Sequence[Curve]) -> Table | None:
    """Return the published perplexities at equal time beside the study's at equal steps.

    Args:
        curves: The study's.
    """
    cells = list(_equal_time(curves, published.equal_time()))
    header = ["method", "L", "length", "this study, equal steps", "published, equal time"]
    title = "Perplexity beside the published one at equal time"
    return Table(title, [*header, "where in published.toml"], cells, names=2) if cells else None


def _equal_time(
    curves: Sequence[Curve], numbers: Mapping[tuple[str, int, int], Published]
) -> Iterator[list[str]]:
    """Yield the rows of `equal_time_table`."""
    for (method, trained, length), number in numbers.items():
        for curve in curves:
            alike = (curve.method, curve.train_length) == (method, trained)
            if alike and kind_of(curve) == NONOVERLAPPING and length in curve.records:
                words = [curve.name, str(trained), str(length), cell(curve, length)]
                yield [*words, f"{number.value:.2f}", number.key]

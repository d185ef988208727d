"""Time every attention kernel that this machine has, side by side in one run.

`pretrain bench attention` calls this. On a machine that has torch and Triton but not the rest of
the framework's dependencies, run it as

    python -m pretrain.kernels.bench [--lengths 1024,16384] [--seconds 400] [--write FILE]

In each case the contestants take turns, so that whatever else the machine does affects all alike.
Cases come in the order of their importance, widths alternating. All the time is budgeted, that of
compilation included: when a case's kernels are compiled, it is measured for an equal share of the
time that is left, and what does not get its turn is reported as such. Rows are printed and written
as soon as a case is done.

TFLOP/s count the work of a full causal half for every contestant: a kernel that skips tiles shows a
higher rate, not less work.
"""

# Shape suffixes: S sequence, B batch, H heads, D width of a head.

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pretrain.kernels.alibi import alibi_slopes
from pretrain.kernels.bench_clock import Clock, CpuClock, GpuClock, Reading, summarize
from pretrain.kernels.bench_contestants import (
    HEADS,
    INPUTS,
    PEAK,
    Attend,
    Case,
    Contestant,
    cpu_contestants,
    gpu_contestants,
    not_installed,
)

GPU_LENGTHS = (1024, 16_384, 4096, 2048, 8192, 512, 32_768, 65_536)
"""Sequence lengths, the most important first: the training length of the published run and 16 times
it, and what lies between."""
CPU_LENGTHS = (1024, 512, 2048)
WIDTHS = (128, 64)
SECONDS = 400.0
"""Default budget. The last compilation may begin just before its end and is not interrupted, so
this leaves a limit of ten minutes some air."""
MOST_CALLS = 50
"""Calls that are counted for a contestant in a case; more do not make the median better."""
OUT_OF_TIME = "out of time"
COLUMNS = (
    "width", "length", "inputs", "pass", "kernel", "ms", "spread", "TFLOP/s", "of no bias",
    "visited", "MB",
)  # fmt: skip


@dataclass
class Entry:
    """One contestant's part in a case."""

    contestant: Contestant
    call: Callable[[], None] | None = None
    failure: str = ""
    """Why there are no times."""
    seconds: list[float] = field(default_factory=list)
    allocated: int = 0
    """Bytes that a call allocates at most."""
    visited: float | None = None
    """Share of the causal tiles that it visits."""


class Report:
    """The report, printed and written to a file line by line."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.lines: list[str] = []
        if path is not None:
            path.write_text("")

    def add(self, line: str) -> None:
        """Append a line, so that a run that is cut short leaves all it has measured."""
        self.lines.append(line)
        print(line, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line + "\n")


def parse_lengths(text: str) -> list[int]:
    """Parse a comma-separated list of sequence lengths.

    Raises:
        ValueError: Something in the list is not a positive integer.
    """
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) < 1:
        raise ValueError(
            f"--lengths {text}: expected numbers of tokens, comma-separated, as in 1024,16384"
        )
    return lengths


def bench_attention(
    lengths: Sequence[int] | None = None, seconds: float = SECONDS, write: Path | None = None
) -> str:
    """Run the comparison; print each row, and write it to a file, when it is known.

    Args:
        lengths: Sequence lengths, the most important first; GPU_LENGTHS or CPU_LENGTHS if None.
        seconds: How long to take in all, compilation included.
        write: File that gets the report.

    Returns:
        The whole report, as Markdown.
    """
    deadline = time.monotonic() + seconds
    cuda = torch.cuda.is_available()
    dtype = _dtype()
    cases = list_cases(lengths or (GPU_LENGTHS if cuda else CPU_LENGTHS), cuda)
    contestants = gpu_contestants(dtype) if cuda else cpu_contestants(dtype)
    report = Report(write)
    for line in _preamble(contestants, dtype, seconds):
        report.add(line)
    clock = GpuClock() if cuda else CpuClock()
    for number, case in enumerate(cases):
        share = 1 / (len(cases) - number)
        for row in compare(case, contestants, dtype, clock, deadline, share):
            report.add(row)
    return "\n".join(report.lines) + "\n"


def list_cases(lengths: Sequence[int], cuda: bool) -> list[Case]:
    """Return the cases in the order of measurement: lengths as given, and widths alternating.

    A CPU is given fewer tokens and Gaussian inputs only.

    Args:
        lengths: Sequence lengths.
        cuda: A GPU is there.
    """
    return [
        Case(length, head_dim, inputs, backward, max(length, 65_536 if cuda else 2048))
        for length in lengths
        for inputs in (INPUTS if cuda else INPUTS[:1])
        for backward in (True, False)
        for head_dim in WIDTHS
    ]


def compare(
    case: Case,
    contestants: Sequence[Contestant],
    dtype: torch.dtype,
    clock: Clock,
    deadline: float,
    share: float,
) -> list[str]:
    """Compile a case's kernels, let the contestants take turns, and return the rows.

    Args:
        case: What to measure.
        contestants: Who takes turns.
        dtype: Dtype of q, k and v.
        clock: How to time.
        deadline: When the whole run must end, by time.monotonic. No contestant is prepared after
            it; those that were prepared in time are measured at least once.
        share: Which part of the time that is left after preparation to spend on this case.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slopes = alibi_slopes(HEADS).to(device)
    leaves = _inputs(case, dtype, device)
    entries = [
        Entry(contestant)
        for contestant in contestants
        if contestant.missing is None and (case.inputs == "gaussian" or contestant.visited)
    ]
    for entry in entries:
        if time.monotonic() >= deadline:
            entry.failure = OUT_OF_TIME
        else:
            _attempt(entry, case, partial(_prepare, entry, case, slopes, leaves, clock))
    now = time.monotonic()
    end = now + max(0.0, deadline - now) * share
    while running := [e for e in entries if not e.failure and len(e.seconds) < MOST_CALLS]:
        for entry in running:
            _attempt(entry, case, partial(_take_turn, entry, clock))
        if time.monotonic() >= end:
            break
    return _rows(case, entries)


def _prepare(
    entry: Entry, case: Case, slopes: Tensor, leaves: Sequence[Tensor], clock: Clock
) -> None:
    """Make a contestant's call, compile it, and see what it allocates and visits.

    Args:
        entry: The contestant's entry, which is filled in.
        case: What to measure.
        slopes: ALiBi slopes, [H].
        leaves: q, k and v.
        clock: How to time.
    """
    made = entry.contestant.make(case, slopes)
    if isinstance(made, str):
        entry.failure = made
        return
    entry.call = partial(_call, made, leaves, case.backward)
    entry.allocated = clock.warm_up(entry.call)
    if entry.contestant.visited is not None:
        with torch.no_grad():
            entry.visited = entry.contestant.visited(leaves, slopes)


def _take_turn(entry: Entry, clock: Clock) -> None:
    assert entry.call is not None  # an entry without a call has a failure
    entry.seconds += clock.measure(entry.call)


def _attempt(entry: Entry, case: Case, action: Callable[[], None]) -> None:
    """Run an action; its failure is a row of the report and not the end of the others.

    Args:
        entry: The entry that the action is for.
        case: The case, for the message.
        action: What to do.
    """
    try:
        action()
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        entry.failure = f"{type(error).__name__}: {first_line}"[:160].replace("|", "/")
        print(f"{entry.contestant.name} at {case}: {error}", file=sys.stderr)


def _rows(case: Case, entries: Sequence[Entry]) -> list[str]:
    """Return the rows of a case's entries."""
    readings = {id(entry): summarize(entry.seconds) for entry in entries if not entry.failure}
    without_bias = [
        readings[id(entry)].seconds
        for entry in entries
        if id(entry) in readings and not entry.contestant.has_bias
    ]
    fastest = min(without_bias, default=None)
    return [_row(case, entry, readings.get(id(entry)), fastest) for entry in entries]


def _row(case: Case, entry: Entry, reading: Reading | None, fastest: float | None) -> str:
    """Return one row of the report.

    Args:
        case: The case.
        entry: The contestant's entry.
        reading: What its calls took, or None if it failed.
        fastest: Median seconds of the fastest contestant without a bias, if one was measured.
    """
    passes = "forward + backward" if case.backward else "forward"
    cells = [str(case.head_dim), str(case.length), case.inputs, passes, entry.contestant.name]
    if reading is None:
        cells += [entry.failure, *[""] * 5]
    else:
        cells += [
            f"{1e3 * reading.seconds:.3f}",
            f"±{100 * reading.spread:.1f} % of {reading.calls}",
            f"{case.flops / reading.seconds / 1e12:.3g}",
            "" if fastest is None else f"{reading.seconds / fastest:.2f}",
            "" if entry.visited is None else f"{100 * entry.visited:.0f} %",
            f"{entry.allocated / 1e6:.0f}" if entry.allocated else "",
        ]
    return "| " + " | ".join(cells) + " |"


def _preamble(contestants: Sequence[Contestant], dtype: torch.dtype, seconds: float) -> list[str]:
    """Return the lines above the rows: device, versions, units, what is missing and why.

    Args:
        contestants: All contestants.
        dtype: Dtype of q, k and v.
        seconds: The budget.
    """
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = "no GPU: the CPU's own kernels"
    triton = "no triton"
    if not_installed("triton") is None:
        triton = f"triton {importlib.import_module('triton').__version__}"
    return [
        f"# Attention on {device}",
        f"torch {torch.__version__}, {triton}; {HEADS} heads, {dtype}, causal; a budget of "
        f"{seconds:.0f} s. Columns: median milliseconds of a call on the device's clock, launching "
        "apart; spread, half the distance between the quartiles, and of how many calls; TFLOP/s of "
        "the full causal work; time relative to the fastest kernel without a bias in the same "
        "case; share of the causal tiles that are visited; megabytes that a call allocates beyond "
        f'q, k and v. "peaked" inputs have scores {PEAK**2:.0f} times as wide as "gaussian" ones '
        "and are timed where that matters.",
        *(f"- {c.name}: absent, {c.missing}" for c in contestants if c.missing is not None),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " ---: |" * len(COLUMNS),
    ]


def _dtype() -> torch.dtype:
    """Return the dtype that is trained in on this device."""
    if not torch.cuda.is_available():
        return torch.float32
    has_bf16 = torch.cuda.get_device_capability() >= (8, 0)
    return torch.bfloat16 if has_bf16 else torch.float16


def _inputs(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return q, k and v [S, B, H, D], slices of one tensor as of a fused qkv projection.

    Args:
        case: What to measure.
        dtype: Dtype of q, k and v.
        device: Where to make them.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.length, case.tokens // case.length, HEADS, 3, case.head_dim)
    qkv = torch.randn(shape, generator=generator, device=device)
    if case.inputs == "peaked":
        qkv[..., :2, :] *= PEAK
    return [x.requires_grad_(case.backward) for x in qkv.to(dtype).unbind(3)]


def _call(attend: Attend, leaves: Sequence[Tensor], backward: bool) -> None:
    out = attend(*leaves)
    if backward:
        torch.autograd.grad(out, leaves, out.detach())


def main() -> None:
    """Run the comparison from the command line, with nothing installed but torch and triton."""
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.kernels.bench",
        description="Time every attention kernel that this machine has, side by side.",
    )
    parser.add_argument("--lengths", help="Tokens, comma-separated, the most important first.")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="How long it may take in all, compilation included (default: %(default)s).",
    )
    parser.add_argument("--write", type=Path, help="Also write the report to this Markdown file.")
    arguments = parser.parse_args()
    try:
        lengths = parse_lengths(arguments.lengths) if arguments.lengths else None
    except ValueError as error:
        parser.error(str(error))
    bench_attention(lengths, arguments.seconds, arguments.write)


if __name__ == "__main__":
    main()

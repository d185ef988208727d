"""Time every attention kernel that this machine has, side by side in one run.

`pretrain bench attention` calls this.

In each case the contestants take turns, so that whatever else the machine does affects all alike.
Cases come in the order of their importance, widths alternating. All the time is budgeted, that of
compilation included: when a case's kernels are compiled, it is measured for an equal share of the
time that is left, and what does not get its turn is reported as such. Rows are printed and written
as soon as a case is done.

TFLOP/s count the work of a full causal half for every contestant: a kernel that skips tiles shows a
higher rate, not less work.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pretrain.kernels import skipping
from pretrain.kernels.dispatch import attention
from pretrain.positions.alibi import alibi_slopes

# ---- Time calls on a GPU or a CPU ----


CACHE_BYTES = 2**28
"""Bytes that are zeroed before every timed call, so that no contestant finds its inputs in the L2
cache (50 MB on an H100 or H200)."""
CALLS_PER_READING = 5
"""Calls that are launched together. A GPU queues about a thousand launches, and no contestant has
more than a hundred."""
SPIN_HERTZ = 2e9
"""At least the clock rate of a GPU; turns seconds into the cycles of torch.cuda._sleep."""


class Reading(NamedTuple):
    """The times of one contestant's calls."""

    seconds: float
    """Median."""
    spread: float
    """Half the distance between the quartiles, relative to the median."""
    calls: int


class Clock(Protocol):
    """A way to time calls."""

    def warm_up(self, call: Callable[[], None]) -> int:
        """Make the calls that are not counted and return the bytes that one allocates at most."""

    def measure(self, call: Callable[[], None]) -> list[float]:
        """Make CALLS_PER_READING calls and return the seconds of each."""


class CpuClock:
    """The time that passes on a CPU."""

    def warm_up(self, call: Callable[[], None]) -> int:
        """Make one call. The memory of a CPU's allocator is not counted."""
        call()
        return 0

    def measure(self, call: Callable[[], None]) -> list[float]:
        """Return the seconds of one call."""
        begin = time.perf_counter()
        call()
        return [time.perf_counter() - begin]


class GpuClock:
    """The GPU's own clock, without the time that the host takes to launch kernels.

    The GPU is kept busy until the host has queued all calls of a reading. Then it runs them without
    a gap, and the events around each call measure the kernels alone. In a training step the host is
    ahead of the GPU, too.
    """

    def __init__(self) -> None:
        self.flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
        self.host_seconds = 0.0

    def warm_up(self, call: Callable[[], None]) -> int:
        """Call once, which compiles, and once more, to see memory and the time of launching.

        Args:
            call: What is to be timed.

        Returns:
            The largest number of bytes that a call has allocated at once, beyond what was there.
        """
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        call()
        self.host_seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def measure(self, call: Callable[[], None]) -> list[float]:
        """Queue CALLS_PER_READING calls behind a pause and return the seconds of each.

        Args:
            call: What is timed.
        """
        events = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
            for _ in range(CALLS_PER_READING)
        ]
        # Twice the time that queueing took last time.
        cycles = int(2 * CALLS_PER_READING * self.host_seconds * SPIN_HERTZ)
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        begin = time.perf_counter()
        for start, end in events:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        self.host_seconds = (time.perf_counter() - begin) / CALLS_PER_READING
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) / 1e3 for start, end in events]


def summarize(seconds: Sequence[float]) -> Reading:
    """Return median and spread of the seconds of at least one call."""
    median = statistics.median(seconds)
    if len(seconds) < 2:
        return Reading(median, 0.0, len(seconds))
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Reading(median, (high - low) / 2 / median, len(seconds))


# ---- bench contestants ----
# The attention kernels that are timed, and the cases in which they are.


# Shape suffixes: S sequence, B batch, H heads, D width of a head.


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over q, k and v, all [S, B, H, D]."""
HEADS = 16
MATERIALISED_BYTES = 2**33
"""Largest bias tensor that is materialised."""
INPUTS = ("gaussian", "peaked")
PEAK = 4.0
"""Factor on queries and keys of "peaked" inputs, whose scores spread 16 times as wide. They stand
in for a trained model's: with larger scores a head looks further, and fewer tiles are skipped."""


@dataclass(frozen=True)
class Case:
    """The attention call that all contestants make in turn."""

    length: int
    head_dim: int
    inputs: str
    """One of INPUTS."""
    backward: bool
    """Time forward and backward, not forward alone."""
    tokens: int
    """Tokens in a call: batch x length."""

    @property
    def flops(self) -> float:
        """Return the floating-point operations of a call, for a full causal half of the scores.

        The forward pass has two matrix products, the backward pass five.
        """
        forward = 2 * 2 * HEADS * self.head_dim * self.tokens * self.length / 2
        return forward * (3.5 if self.backward else 1.0)


@dataclass(frozen=True)
class Contestant:
    """A kernel with one way to use it."""

    name: str
    make: Callable[[Case, Tensor], Attend | str]
    """Returns what is timed, given the case and the slopes [H], or why it cannot serve the case."""
    missing: str | None = None
    """Why this machine does not have it, or None."""
    has_bias: bool = True
    """It computes ALiBi. The best of those that do not is what ALiBi is compared with."""
    visited: Callable[[Sequence[Tensor], Tensor], float] | None = None
    """Returns the share of the causal tiles that it visits, given q, k, v and slopes. Where it is
    None, speed does not depend on what q and k hold, and "peaked" inputs are not timed."""


def cpu_contestants(dtype: torch.dtype) -> list[Contestant]:
    """Return what a CPU has, and the Triton kernel as missing, so that the report says why."""
    no_gpu = "Triton's compiled kernel runs on a GPU"
    return [
        _backend("Triton, ALiBi", "triton", missing=no_gpu),
        _backend("SDPA in blocks, ALiBi", "sdpa"),
        _backend("folded, ALiBi", "folded", missing="it serves fp16 and bf16, this is fp32"),
        Contestant("SDPA, materialised ALiBi", partial(_materialised, dtype)),
        _sdpa_without_bias("SDPA flash, no bias", SDPBackend.FLASH_ATTENTION),
    ]


def gpu_contestants(dtype: torch.dtype) -> list[Contestant]:
    """Return what a GPU can have. Those that cannot serve a case say why in its rows."""
    triton = not_installed("triton")
    return [
        _backend("Triton, ALiBi", "triton", missing=triton, visited=_visited_by_triton),
        _backend("Triton, ALiBi, no skipping", "triton", missing=triton, skip=False),
        Contestant("Triton, zero slopes", _zero_slopes, triton),
        _backend("Triton, no bias", "triton", missing=triton, has_bias=False, slopes=None),
        _backend("folded, ALiBi", "folded"),
        Contestant("FlashAttention-2, ALiBi", _flash2, not_installed("flash_attn")),
        _backend("SDPA in blocks, ALiBi", "sdpa"),
        Contestant("SDPA, materialised ALiBi", partial(_materialised, dtype)),
        _sdpa_without_bias("SDPA flash, no bias", SDPBackend.FLASH_ATTENTION),
        _sdpa_without_bias("SDPA cuDNN, no bias", SDPBackend.CUDNN_ATTENTION),
        _sdpa_without_bias("SDPA memory-efficient, no bias", SDPBackend.EFFICIENT_ATTENTION),
        _backend("SDPA as auto takes it, no bias", "auto", has_bias=False, slopes=None),
        Contestant(
            "FlashAttention-3, no bias",
            _flash3,
            not_installed("flash_attn_interface"),
            has_bias=False,
        ),
    ]


def _backend(
    name: str,
    backend: str,
    missing: str | None = None,
    has_bias: bool = True,
    visited: Callable[[Sequence[Tensor], Tensor], float] | None = None,
    **arguments: Any,
) -> Contestant:
    """Return one of the framework's backends, with ALiBi unless `arguments` say otherwise.

    Args:
        name: Name in the report.
        backend: Backend of `pretrain.kernels.dispatch.attention`.
        missing: Why this machine does not have it, or None.
        has_bias: It computes ALiBi.
        visited: Share of the causal tiles that it visits.
        **arguments: Further arguments of `attention`.
    """

    def make(case: Case, slopes: Tensor) -> Attend:
        return partial(attention, backend=backend, **({"slopes": slopes} | arguments))

    return Contestant(name, make, missing, has_bias, visited)


def _zero_slopes(case: Case, slopes: Tensor) -> Attend:
    """Return the Triton kernel with slopes of zero: the cost of ALiBi's arithmetic alone."""
    return partial(attention, backend="triton", slopes=torch.zeros_like(slopes))


def _sdpa_without_bias(name: str, backend: SDPBackend) -> Contestant:
    """Return one of torch's own kernels, which have no ALiBi: what attention costs without it."""

    def attend(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q_SBHD, k_SBHD, v_SBHD, is_causal=True)

    return Contestant(name, lambda case, slopes: attend, has_bias=False)


def _materialised(dtype: torch.dtype, case: Case, slopes: Tensor) -> Attend | str:
    """Return torch's kernel with a bias [1, H, S, S] that is made once, outside the clock."""
    if HEADS * case.length**2 * dtype.itemsize > MATERIALISED_BYTES:
        return "the bias is too large"
    position = torch.arange(case.length, device=slopes.device)
    distance = position[:, None] - position
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf).to(dtype)[None]
    return partial(_sdpa, attn_mask=bias)


def _flash2(case: Case, slopes: Tensor) -> Attend:
    """Return FlashAttention-2, which adds ALiBi in its kernel."""
    attend = importlib.import_module("flash_attn").flash_attn_func

    def call(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q_SBHD, k_SBHD, v_SBHD))
        # Without `deterministic` its backward pass adds dq with atomics, in an order that varies.
        out_BSHD: Tensor = attend(q, k, v, causal=True, alibi_slopes=slopes, deterministic=True)
        return out_BSHD.transpose(0, 1)

    return call


def _flash3(case: Case, slopes: Tensor) -> Attend:
    """Return FlashAttention-3, which has no bias."""
    attend = importlib.import_module("flash_attn_interface").flash_attn_func

    def call(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
        out = attend(*(x.transpose(0, 1) for x in (q_SBHD, k_SBHD, v_SBHD)), causal=True)
        # Some versions return (out, logsumexp), others out alone.
        out_BSHD: Tensor = out[0] if isinstance(out, tuple) else out
        return out_BSHD.transpose(0, 1)

    return call


def _visited_by_triton(qkv: Sequence[Tensor], slopes: Tensor) -> float:
    """Return the share of the causal tiles that the Triton kernel's forward pass visits."""
    from pretrain.kernels.flash.launch import visited_tiles

    q, k, v = qkv
    runs, schedule = visited_tiles(q, k, v, slopes)
    tiles = (schedule.forward.queries, schedule.key_tile)
    shares = skipping.share_visited(runs, len(q), len(k), *tiles, causal=True)
    return float(shares.mean())


def _sdpa(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBHD, v_SBHD))
    return scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)


def not_installed(package: str) -> str | None:
    """Return a message if the package is not installed, else None."""
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return None


# Shape suffixes: S sequence, B batch, H heads, D width of a head.


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


def bench_attention(
    lengths: Sequence[int] | None = None,
    seconds: float = SECONDS,
    write: Path | None = None,
    more: Sequence[Contestant] = (),
) -> str:
    """Run the comparison; print each row, and write it to a file, when it is known.

    Args:
        lengths: Sequence lengths, the most important first; GPU_LENGTHS or CPU_LENGTHS if None.
        seconds: How long to take in all, compilation included.
        write: File that gets the report.
        more: Contestants on a GPU that the framework has not.

    Returns:
        The whole report, as Markdown.
    """
    deadline = time.monotonic() + seconds
    cuda = torch.cuda.is_available()
    dtype = _dtype()
    cases = list_cases(lengths or (GPU_LENGTHS if cuda else CPU_LENGTHS), cuda)
    contestants = [*gpu_contestants(dtype), *more] if cuda else cpu_contestants(dtype)
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

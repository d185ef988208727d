"""What `launcher status` prints: a table of runs that fits the terminal, or one run with its attempts."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.launcher.login.accounting import PARTS, TimeSplit, time_splits, total
from pretrain.launcher.login.status import RunStatus, find_runs, look, read_num_steps
from pretrain.rundir.attempts import AttemptRecord, read_attempts
from pretrain.rundir.checkpoints import checkpoint_name, named_by_step, newest_checkpoint_step
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import ENDED_WELL, in_words

WATCH_SECONDS = 5.0
WIDTH = 120  # where there is no terminal to ask
GAP = "  "
COLUMNS = (
    "run",
    "state",
    "reason",
    "nodes",
    "restarts",
    "step",
    "tokens/s",
    "loss",
    "ends",
    "checkpoint",
    "goodput",
)
RIGHT = {"restarts", "step", "tokens/s", "loss", "checkpoint", "goodput"}
SHORTENED = {
    "reason": 8,
    "nodes": 8,
    "run": 14,
}  # the columns that give way, in turn, and what is left of them
DROPPED = (
    "nodes",
    "reason",
    "ends",
    "checkpoint",
    "restarts",
    "tokens/s",
)  # in turn, where that is not enough


def terminal_width() -> int:
    """Columns of the terminal, or COLUMNS, or 120."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def show(given: Sequence[Path], watch: bool) -> None:
    """`launcher status`. With `watch` again and again, in place on a terminal, until Ctrl-C. Raises ConfigError."""
    text = _page(given)
    if not watch:
        print(text)
        return
    in_place = sys.stdout.isatty()
    try:
        while True:
            text = f"{time.strftime('%H:%M:%S')}\n{text}"
            if in_place:  # home, then line by line: clearing the whole screen first would flicker
                text = "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\n\x1b[J"
            print(text, end="" if in_place else "\n\n", flush=True)
            time.sleep(WATCH_SECONDS)
            text = _page(given)
    except KeyboardInterrupt:
        print()


def _page(given: Sequence[Path]) -> str:
    now = time.time()
    statuses, away = look(find_runs(given), now)
    text = detail(statuses[0], now) if len(given) == 1 else table(statuses, now, terminal_width())
    if away is None or not any(status.state in ("running", "unknown") for status in statuses):
        return text  # how a run ended, its own files tell
    note = f"No word from Slurm ({away})"
    return f"{note[: terminal_width()]}\n{text}"


def table(statuses: Sequence[RunStatus], now: float, width: int) -> str:
    """A line a run."""
    rows = [dict(zip(COLUMNS, _row(status, now))) for status in statuses]
    columns = list(COLUMNS)
    widths = {c: max(len(c), *(len(row[c]) for row in rows)) for c in columns}
    for column, least in SHORTENED.items():
        excess = sum(widths.values()) + len(GAP) * (len(columns) - 1) - width
        widths[column] -= max(0, min(excess, widths[column] - max(least, len(column))))
    for column in DROPPED:
        if sum(widths[c] for c in columns) + len(GAP) * (len(columns) - 1) > width:
            columns.remove(column)
    lines = [dict(zip(COLUMNS, (c.upper() for c in COLUMNS))), *rows]
    return "\n".join(
        GAP.join(_cell(line[c], widths[c], c) for c in columns).rstrip() for line in lines
    )


def detail(status: RunStatus, now: float) -> str:
    """One run: how it stands, then its attempts and where the time went."""
    lines = [str(status.run)]
    job = status.job
    where = [f"job {job.job_id}" if job else "", f"on {status.nodes}" if status.nodes else ""]
    where += [
        f"its time ends {moment(job.ends_at, now)}"
        if job and job.state == "RUNNING" and job.ends_at
        else ""
    ]
    where += [
        f"starts {moment(job.started_at, now)}"
        if job and job.state == "PENDING" and job.started_at
        else ""
    ]
    lines += _field("state", ", ".join(filter(None, [status.state, *where])))
    lines += _field("reason", status.reason)
    lines += _field("step", _progress(status, now))
    if status.checkpoint is not None:
        lines += _field("checkpoint", f"{checkpoint_name(status.checkpoint)}")
    lines += _field("evaluations", _evaluations(status))
    if status.splits:
        lines += [
            "",
            *_attempts(status.attempts, status.splits, now),
            "",
            *_ends(status.attempts),
        ]
        lines += [goodput_line(total(status.splits))]
    return "\n".join(lines)


def summary(run: Path) -> str:
    """A run at its end, in a few lines: how far it came, in how many attempts, and where the time went."""
    attempts = read_attempts(run)
    splits = time_splits(attempts)
    if not attempts:
        return f"{run}: no attempt yet"
    newest, num_steps, checkpoint = attempts[-1], read_num_steps(run), newest_checkpoint_step(run)
    outcome = in_words(newest.ended.outcome) if newest.ended else "not ended"
    step = newest.ended.step if newest.ended else newest.step
    whole = total(splits)
    spent = ", ".join(
        f"{part} {duration(whole.parts[part])}" for part in PARTS if whole.parts[part]
    )
    plural = "" if len(attempts) == 1 else "s"
    return "\n".join(
        [
            f"{run}: {outcome} at step {step}{f' of {num_steps}' if num_steps else ''}, {len(attempts)} attempt{plural}, "
            + (
                f"newest checkpoint {checkpoint_name(checkpoint)}"
                if checkpoint is not None
                else "no checkpoint"
            ),
            f"time: {spent or '0s'}; {duration(whole.wall)} in all",
            goodput_line(whole),
        ]
    )


def goodput_line(whole: TimeSplit) -> str:
    """'goodput 91.2 % of the time it held its nodes, 60.3 % of the wall time'"""
    held, wall = percent(whole.goodput, 1), percent(whole.goodput_of_wall, 1)
    return f"goodput: {held} of the time it held its nodes, {wall} of the wall time"


# ---- cells -----------------------------------------------------------------------------------------------------------
def _row(status: RunStatus, now: float) -> tuple[str, ...]:
    rates = status.rates
    step = (
        ""
        if status.step is None
        else str(status.step) + (f"/{status.num_steps}" if status.num_steps else "")
    )
    return (
        str(status.run),
        status.state,
        status.reason,
        status.nodes,
        str(status.restarts),
        step,
        thousands(rates.tokens_per_second) if rates else "",
        _loss(rates.loss_nats) if rates else "",
        moment(status.ends_at, now) if status.ends_at else "",
        "" if status.checkpoint is None else str(status.checkpoint),
        percent(total(status.splits).goodput) if status.splits else "",
    )


def _cell(text: str, width: int, column: str) -> str:
    if len(text) > width:  # of a path the end tells, of a sentence the beginning
        text = "…" + text[-width + 1 :] if column == "run" else text[: width - 1] + "…"
    return text.rjust(width) if column in RIGHT else text.ljust(width)


def _field(name: str, text: str) -> list[str]:
    return [f"  {name:<12}{text}"] if text else []


def _progress(status: RunStatus, now: float) -> str:
    if status.step is None:
        return f"none of {status.num_steps} yet" if status.num_steps else ""
    words = [str(status.step)]
    if status.num_steps:
        words = [
            f"{status.step} of {status.num_steps} ({status.step / status.num_steps:.1%})".replace(
                "%", " %"
            )
        ]
    if status.rates:
        words += [
            f"{thousands(status.rates.tokens_per_second)} tokens/s",
            f"loss {_loss(status.rates.loss_nats)}",
        ]
    if status.attempts and status.ends_at and status.attempts[-1].phases:
        words += [
            f"now {status.attempts[-1].phases[-1].phase}",
            f"estimated end {moment(status.ends_at, now)}",
        ]
    return ", ".join(words)


def _evaluations(status: RunStatus) -> str:
    """Of checkpoints, by jobs of their own (--evaluate-checkpoints)."""
    paths = RunPaths(status.run)
    if not paths.evaluation_plan.exists():
        return ""
    results = named_by_step(paths.evaluations)
    done = sum((result / "curve.json").exists() for result in results)
    queued = [f"job {job.job_id} {job.state}" for job in status.evaluations]
    return ", ".join([f"{done} done", *queued])


def _attempts(
    attempts: Sequence[AttemptRecord], splits: Sequence[TimeSplit], now: float
) -> list[str]:
    """A line an attempt with its time split, and their sum."""
    heads = ["attempt", "began", "end", *PARTS, "sum"]
    rows = [
        [str(a.number), moment(a.owner.began_at, now), _end(a), *_split(each)]
        for a, each in zip(attempts, splits)
    ]
    if len(rows) > 1:
        rows.append(["all", "", "", *_split(total(splits))])
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows)]
    left = ("began", "end")
    return [
        "  "
        + " ".join(
            c.ljust(w) if head in left else c.rjust(w) for head, c, w in zip(heads, row, widths)
        )
        for row in ([head.upper() for head in heads], *rows)
    ]


def _split(split: TimeSplit) -> list[str]:
    return [
        *(duration(split.parts[part]) if split.parts[part] else "-" for part in PARTS),
        duration(split.wall),
    ]


def _end(attempt: AttemptRecord) -> str:
    return in_words(attempt.ended.outcome) if attempt.ended else ""


def _ends(attempts: Sequence[AttemptRecord]) -> list[str]:
    """Why attempts ended that did not end well."""
    lines = [
        f"  attempt {a.number}: {a.ended.reason}"
        for a in attempts
        if a.ended and a.ended.outcome not in ENDED_WELL
    ]
    return [*lines, ""] if lines else []


def duration(milliseconds: int) -> str:
    """'0.4s', '42s', '12m05s', '3h59m', '12d04h'."""
    if milliseconds < 9_950:
        return f"{milliseconds / 1000:.1f}s"
    seconds = round(milliseconds / 1000)
    for limit, big, small, letters in (
        (3600, 60, 1, "ms"),
        (86400, 3600, 60, "hm"),
        (math.inf, 86400, 3600, "dh"),
    ):
        if seconds < 60:
            return f"{seconds}s"
        if seconds < limit:
            return f"{seconds // big}{letters[0]}{seconds % big // small:02d}{letters[1]}"
    raise AssertionError(milliseconds)


def moment(at: float, now: float) -> str:
    """'14:05:33' today, 'Nov 22 14:05' in the next and last months, then 'Nov 2027'; local time."""
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M:%S", then)
    return time.strftime("%b %d %H:%M" if abs(at - now) < 300 * 86400 else "%b %Y", then)


def percent(share: float | None, digits: int = 0) -> str:
    """0.912 -> '91 %'; '-' when there is none."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def thousands(value: float) -> str:
    """21300 -> '21.3k', 1250000 -> '1.25M'."""
    for size, unit, digits in ((1e6, "M", 2), (1e3, "k", 1)):
        if value >= size:
            return f"{value / size:.{digits}f}{unit}"
    return f"{value:.0f}"


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else str(value)

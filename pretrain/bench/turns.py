"""Let contestants take turns, put together what they measured, and show it as a table.

Contestants take turns round by round, and in the opposite order every second round, so that what
else the machine does hits all of them alike. Numbers of runs at different times could not be
compared. Ratios are therefore taken within a round.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import statistics
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)
from tqdm import tqdm

from pretrain import platform
from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.topology import Process, Topology, initialize

T = TypeVar("T")
Key = dict[str, Any]
"""What a contestant is called in a result: {"method": "alibi", "train_length": 1024}."""
Measured = dict[str, float]
"""What a turn measured, by the names of a result's row."""


def contest(
    keys: Sequence[Key],
    rounds: int,
    turn: Callable[[int], Measured],
    said: Callable[[Measured], str],
    is_shown: bool = True,
) -> dict[str, Any]:
    """Let contestants take turns, round by round, back and forth. Progress goes to stderr.

    Args:
        keys: The contestants.
        rounds: How often each takes its turn.
        turn: Lets the contestant of a number take one turn. A RunFailed that it raises is that
            contestant's end, and the others go on.
        said: What to print of a turn.
        is_shown: Whether anything is printed: of several ranks that take turns, one does.

    Returns:
        {"rounds", "rows": [{**key, name: values}], "failed": [{**key, "reason"}]}, with the values
        of all rounds; of bytes (names that end in "_bytes") the largest alone. A contestant that
        failed in any round has no row.

    Raises:
        RunFailed: All contestants failed.
    """
    taken: list[list[Measured]] = [[] for _ in keys]
    failed: dict[int, str] = {}
    for number in range(1, rounds + 1):
        # Back and forth, so that a drift during the job favours no contestant.
        order = range(len(keys)) if number % 2 else reversed(range(len(keys)))
        for contestant in order:
            if contestant in failed:
                continue
            words = f"round {number} of {rounds}: {name_of(keys[contestant])}"
            try:
                result = turn(contestant)
            except RunFailed as error:
                failed[contestant] = str(error)
                print(f"{words} failed: {error}", file=sys.stderr, flush=True)
                continue
            taken[contestant].append(result)
            if is_shown:
                print(f"{words}: {said(result)}", file=sys.stderr, flush=True)
    if len(failed) == len(keys):
        raise RunFailed("nothing could be measured:\n" + "\n".join(failed.values()))
    rows = []
    for contestant, key in enumerate(keys):
        if contestant not in failed:
            values = {n: [each[n] for each in taken[contestant]] for n in taken[contestant][0]}
            largest = {name: max(values[name]) for name in values if name.endswith("_bytes")}
            rows.append({**key, **values, **largest})
    reasons = [{**keys[n], "reason": reason} for n, reason in failed.items()]
    return {"rounds": rounds, "rows": rows, "failed": reasons}


def name_of(key: Key) -> str:
    """Return a contestant in words: "alibi, 1,024 tokens"."""
    return ", ".join(f"{v:,} tokens" if isinstance(v, int) else str(v) for v in key.values())


class Column(NamedTuple):
    """A column of a table; a speed has a second one with its ratio to the baseline's."""

    title: str
    name: str
    """Of the value in a row."""
    form: str
    """How the median of the rounds is shown, as "{:,.0f} MiB"."""
    unit: float = 1
    """What a value is divided by."""
    ratio: bool = False


def table(
    result: dict[str, Any],
    about: str,
    key: Sequence[str],
    columns: Sequence[Column],
    baseline: Callable[[dict[str, Any]], dict[str, Any] | None],
) -> str:
    """Return a result as a Markdown table.

    A ratio is the median over the rounds of the ratio in a round, with the smallest and the largest
    one; of a value that is one for all rounds it is one number.

    Args:
        result: What `contest` returned.
        about: The line above the table.
        key: Names of what a contestant is called by, the first columns.
        columns: The others.
        baseline: Returns the row that another is compared with, None if there is none.
    """
    titles = [name.replace("_", " ") for name in key]
    for column in columns:
        titles += [column.title, "ratio"] if column.ratio else [column.title]
    lines = [about, "", f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for row in result["rows"]:
        cells = [f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in key]
        other = baseline(row)
        for column in columns:
            value = row[column.name]
            value = statistics.median(value) if isinstance(value, list) else value
            cells.append(column.form.format(value / column.unit))
            if column.ratio:
                cells.append("-" if other is None else ratio(row, other, column.name))
        lines.append(f"| {' | '.join(cells)} |")
    for each in result["failed"]:
        reason = each["reason"].strip().splitlines()[-1]
        named = name_of({name: each[name] for name in key})
        lines += ["", f"{named}: failed: {reason}"]
    return "\n".join(lines)


def ratio(row: dict[str, Any], baseline: dict[str, Any], name: str) -> str:
    """Return a contestant's value as a multiple of the baseline's: median and range of rounds."""
    own, other = row[name], baseline[name]
    if not isinstance(own, list):
        return f"{own / other:.3f}"
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


# ---- Run a function in processes of its own, which join each other and end with it ----
# Each turn has new processes: memory is then that of one contestant alone, a GPU is empty when the
# next one begins, and no idle process of another contestant takes time from the one that is
# measured. Between turns nothing is kept but compiled kernels on the disk.


ADDRESS = "127.0.0.1"
"""All processes of a turn are on this machine."""


def take_turn(task: Callable[[RunConfig, Topology], T], config: RunConfig, nproc: int) -> list[T]:
    """Call task(config, topology) in `nproc` new processes of this machine.

    Without GPUs they are forked from a server that has imported everything, in a tenth of a second;
    imports alone would take longer than what is measured. With GPUs each process imports for
    itself, since a library that asks for the GPUs at import would leave forked ones without them.

    Args:
        task: A function of a module, since it is found by its name, or functools.partial of one.
            Called on all ranks together; it, what it returns and `config` are pickled.
        config: The run, whose layout the processes join in.
        nproc: Number of processes, one for each GPU or a few on CPU cores.

    Returns:
        What the task returned on each rank.

    Raises:
        RunFailed: The task failed on a rank, or a process was killed. All have ended then.
    """
    module = getattr(task, "func", task).__module__
    multiprocessing.set_forkserver_preload(["pretrain.bench.quiet", __name__, module])
    method = "spawn" if platform.has_cuda() else "forkserver"
    with tempfile.TemporaryDirectory(prefix="turn-") as name:
        folder = Path(name)
        # The task in a pickle of its own: reading it imports what may warn.
        arguments = pickle.dumps(task), config, nproc, folder
        try:
            start_processes(_work, arguments, nproc, daemon=True, start_method=method)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except (ProcessRaisedException, ProcessExitedException) as error:
            rank, said = error.error_index, str(error)
            if isinstance(error, ProcessExitedException):
                reason = folder / f"{rank}.reason"
                killed = "the process was killed, often because memory ran out"
                said = reason.read_text() if reason.exists() else killed
            raise RunFailed(f"rank {rank}: {said}" if nproc > 1 else said) from None
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(nproc)]


def _work(rank: int, task: bytes, config: RunConfig, nproc: int, folder: Path) -> None:
    """Do a task and write its result, or why there is none; for a process of a turn.

    Args:
        rank: This process.
        task: The task, pickled.
        config: The run.
        nproc: Number of processes.
        folder: Where results are written, and where rank 0 tells the others its port.
    """
    # Ctrl-C is for the process that started the turns, and this one ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    warnings.simplefilter("ignore")
    # Its own lock is one of the system's, which a process that leaves at once would leave behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(max(1, torch.get_num_threads() // nproc))
    place = Process(rank, nproc, rank, ADDRESS, 0, folder if nproc > 1 else None)
    try:
        result = pickle.loads(task)(config, initialize(config, place))
    except (ConfigError, RunFailed, MemoryError, torch.OutOfMemoryError) as error:
        (folder / f"{rank}.reason").write_text(str(error) or type(error).__name__)
        raise SystemExit(1) from None
    (folder / str(rank)).write_bytes(pickle.dumps(result))
    # Ranks leave together: one that has gone breaks a collective of the others.
    dist.barrier()
    # An ordinary exit would take seconds to unload the imported libraries.
    os._exit(0)


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()

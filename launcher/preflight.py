"""Check the nodes of a Slurm job before its ranks start, and name those that must not train.

This module runs as one job step on all nodes, with one process for each rank (`main`). A process
prints a line of JSON after each stage, so it hangs in the first stage whose line is missing. In the
last stages the processes of each node, then those of all nodes, add up numbers in an all-reduce.
The lines come through srun, so they arrive even if the shared directory is broken. `check_nodes`
starts the step and judges the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.config import ConfigError, NoSpace, RunConfig, writing
from pretrain.config.errors import say
from pretrain.launcher import slurm, slurm_job
from pretrain.launcher.ranks import start_srun
from pretrain.launcher.supervise import Signals
from pretrain.processes import Repeater
from pretrain.rundir.attempts import HEARTBEAT_SECONDS, PREFLIGHT, Attempt, Preflight
from pretrain.rundir.files import parse_json, replace_json
from pretrain.rundir.jobs import LaunchRecord

STAGES = {
    "start": "while it starts",
    "directory": "while it writes to the run's directory",
    "torch": "while it imports torch",
    "device": "while it looks at its device",
    "architecture": "while it compares torch with its GPU",
    "memory": "while it looks at the memory of its GPU",
    "gemm": "while it multiplies matrices",
    "node": "in the all-reduce of its node",
    "all": "in the all-reduce of all nodes",
}
"""What a process does, in order."""
LOADING = ("start", "torch")
"""Stages that load files, which takes minutes from a slow disk: no node is blamed if it is slow."""
OF_THE_RUN = ("start", "directory", "torch", "architecture")
"""Stages in which the same error on all nodes means that the run is the cause, and not a node."""
POLL_SECONDS = 0.05
KILL_SECONDS = 5.0
"""Time allowed for each way of ending the processes."""
USED_SHARE = 0.1
"""Share of a GPU's memory that may be in use before the run starts. A CUDA context takes 1 % of
80 GB."""
LOG = "preflight.log"
MEETINGS = ".preflight"
"""The folder in the attempt's directory in which processes that add up numbers find each other."""


# ---- interpreting what the processes printed -----------------------------------------------------
class Fault(NamedTuple):
    """A fault of a node."""

    kind: str
    """The stage in which an error was reported; "slow", "late" or "ended" if none was reported;
    "lost" if Slurm started no process."""
    cause: str
    """A readable line, without the node's name."""


@dataclass
class Process:
    """A process of the check."""

    rank: int
    passed: int = 0
    """The number of stages that it has passed."""
    error: str = ""
    """The error that it reported, after which it stopped."""
    number: int | None = None
    """The errno of this error."""
    words: str = ""
    """The last line it printed that is not a report, such as the end of a traceback."""
    ended: str = ""
    """srun's words for how it ended, if it failed."""

    @property
    def stage(self) -> str:
        """Return the stage that the process is in; "" after the last."""
        return (*STAGES, "")[self.passed]

    def fault(self, python: str) -> Fault | None:
        """Return what is wrong with the process; None if nothing is."""
        stage = self.stage
        if stage in ("", "all"):
            # In the last stage, processes of other nodes may be the cause.
            return None
        during = STAGES[stage]
        if self.error:
            return Fault(stage, f"process {self.rank} failed {during} ({self.error})")
        how = f"{self.ended}: {self.words}" if self.words else self.ended
        if self.ended and stage == "start":
            return Fault("start", f"{python} -m pretrain cannot be started there ({how})")
        if self.ended:
            return Fault("ended", f"process {self.rank} ended {during} ({how})")
        kind = "slow" if stage in LOADING else "late"
        return Fault(kind, f"process {self.rank} does not answer {during}")


class Readings:
    """Collects what the processes on all nodes have said so far."""

    def __init__(self, nodes: Sequence[str], per_node: int, python: str) -> None:
        self.nodes, self.per_node, self.python = nodes, per_node, python
        self.processes = [Process(rank) for rank in range(len(nodes) * per_node)]
        self.lost: dict[str, str] = {}
        """Nodes on which srun started nothing, with srun's words."""

    def take(self, line: str) -> None:
        """Process a line of srun's output."""
        if labelled := slurm.labelled(line.encode(errors="backslashreplace")):
            process, text = self.processes[labelled[0]], labelled[1].decode().strip()
            content = parse_json(text)
            if content.get("stage") != process.stage:
                process.words = text or process.words
            elif "error" in content:
                process.error, process.number = content["error"], content["number"]
            else:
                process.passed += 1
        elif ended := slurm.ended_tasks(line):
            for rank in _numbers(ended.ranks):
                self.processes[rank].ended = ended.how
        elif lost := slurm.lost_node(line):
            self.lost[lost[0]] = lost[1]

    def are_over(self) -> bool:
        """Return True if no process will pass another stage.

        All processes wait for each other in the last stage, so none passes it if one has failed.
        """
        stopped = [bool(each.error or each.ended) for each in self.processes]
        last = ("", "all") if any(stopped) else ("",)
        return all(s or each.stage in last for s, each in zip(stopped, self.processes))

    def fault_of(self, node: str) -> Fault | None:
        """Return what is wrong with a node; None if nothing is."""
        if words := self.lost.get(node):
            return Fault("lost", f"Slurm starts no processes there ({words})")
        first = self.nodes.index(node) * self.per_node
        processes = self.processes[first : first + self.per_node]
        # The other processes of the node wait for the one that is furthest behind.
        fault = min(processes, key=lambda p: (p.passed, not p.error)).fault(self.python)
        # If srun cannot start all processes, it ends those that it has started: no fault of theirs.
        return None if fault and self.lost and fault.kind in ("ended", "late", "slow") else fault


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list: "0,2-4" is 0, 2, 3, 4."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def diagnose(readings: Readings) -> tuple[dict[str, str], list[str], str]:
    """Return what follows from the readings of a check that is over.

    Returns:
        The cause for each node that must not train; warnings; and the reason why the run can train
        on no node, if the fault is the run's own, because every node reports it.
    """
    nodes, found = readings.nodes, {node: readings.fault_of(node) for node in readings.nodes}
    faults = {node: fault for node, fault in found.items() if fault}
    kinds = {fault.kind for fault in faults.values()}
    if len(faults) == len(nodes) and len(kinds) == 1:
        [kind] = kinds
        where = nodes[0] if len(nodes) == 1 else f"all {len(nodes)} nodes"
        words = f"{where}: {next(iter(faults.values())).cause}"
        if kind in OF_THE_RUN or (kind == "device" and len(nodes) > 1):
            return {}, [], words
        # A single node may be at fault. If several nodes fail alike, the cause is elsewhere.
        if kind in ("late", "slow") or (len(nodes) > 1 and kind != "lost"):
            return {}, [words], ""
    slow = [node for node, fault in faults.items() if fault.kind == "slow"]
    warnings = [f"{node}: {faults[node].cause}" for node in slow]
    stuck = [each for each in readings.processes if each.stage == "all"]
    if stuck and not faults:
        why = next((each.error for each in stuck if each.error), "no answer")
        warnings.append(f"the all-reduce of all nodes fails ({why})")
    blamed = {node: fault.cause for node, fault in faults.items() if node not in slow}
    return blamed, warnings, ""


# ---- the job step --------------------------------------------------------------------------------
def check_nodes(
    launch: LaunchRecord,
    config: RunConfig,
    nodes: Sequence[str],
    attempt: Attempt,
    job_id: str,
    signals: Signals,
) -> dict[str, str]:
    """Check every node of the job, and return those that must not train, each with the cause.

    The check takes at most recovery.preflight_seconds, and ends at once when this process gets a
    signal, whose request is more urgent. The results are printed, and kept in the attempt's
    preflight.json.

    Args:
        launch: How the run starts its ranks.
        config: The run's config. With recovery.preflight_seconds = 0 nothing is checked.
        nodes: The nodes to check, in Slurm's order: those that will train and the spare ones.
        attempt: The attempt, which this process has begun.
        job_id: The job this process runs in.
        signals: The signals that this process receives.

    Raises:
        ConfigError: The ranks could start on none of the nodes, because of the container, the
            directory or torch. No node is to blame.
        NoSpace: The disk is full.
        RunFailed: The run's directory cannot be written to.
    """
    limit = config.recovery.preflight_seconds
    if not limit or not nodes:
        return {}
    began = time.monotonic()
    readings = Readings(nodes, launch.num_tasks // launch.nodes, launch.python)
    name = f"preflight-{attempt.directory.name}"
    words = slurm_job.check_step(launch.command, name, nodes, len(readings.processes))
    words += [launch.python, "-m", "pretrain.launcher.preflight"]
    words += [str(attempt.directory), config.train.precision]
    words += ["gpus"] if launch.site.get("gpus_per_node") else []
    with _step(words, job_id, name, attempt) as srun:
        if not _read(readings, srun, attempt.directory / LOG, signals, began + limit):
            return {}
    faults, warnings, refusal = diagnose(readings)
    record = Preflight(
        at=time.time(),
        seconds=round(time.monotonic() - began, 3),
        nodes=tuple(nodes),
        faults=faults,
        warnings=tuple(warnings),
        refusal=refusal,
    )
    _record(attempt, record)
    if any(each.number in (errno.ENOSPC, errno.EDQUOT) for each in readings.processes):
        raise NoSpace(f"preflight: {attempt.run}: no space is left")
    if refusal:
        raise ConfigError(f"preflight: {refusal}. All output is in {attempt.directory / LOG}")
    return faults


def _record(attempt: Attempt, record: Preflight) -> None:
    """Print what was found and write the attempt's preflight.json."""
    for node, cause in record.faults.items():
        say(f"preflight: {node}: {cause}; not used")
    for warning in record.warnings:
        say(f"preflight: {warning}")
    if not record.refusal:
        fit = f"{len(record.nodes) - len(record.faults)} of {len(record.nodes)}"
        say(f"preflight: {fit} nodes are fit, in {record.seconds:.1f} s")
    # If the disk is full, the printed lines are enough.
    with contextlib.suppress(OSError):
        replace_json(attempt.directory / PREFLIGHT, dataclasses.asdict(record))


@contextmanager
def _step(
    words: Sequence[str], job_id: str, name: str, attempt: Attempt
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the step, whose output goes to the log, and end it after the block in any case."""
    with writing(attempt.directory / LOG), open(attempt.directory / LOG, "ab") as log:
        srun = start_srun(words, stdin=subprocess.PIPE, stdout=log)
    beats = Repeater(HEARTBEAT_SECONDS, attempt.heartbeat)
    beats.start()
    try:
        yield srun
    finally:
        beats.stop(KILL_SECONDS)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # The processes end when their stdin is closed.
            srun.communicate(timeout=KILL_SECONDS)
        slurm.end_step(srun, job_id, name, KILL_SECONDS)
        shutil.rmtree(attempt.directory / MEETINGS, ignore_errors=True)


def _read(
    readings: Readings,
    srun: subprocess.Popen[bytes],
    path: Path,
    signals: Signals,
    until: float,
) -> bool:
    """Read the step's log until nothing more comes or time is up; return False on a signal."""
    num_signals, begin, is_over = len(signals.received), 0, False
    while not is_over:
        # Checked before reading, so that the last lines are read after the step has ended.
        is_over = srun.poll() is not None or time.monotonic() > until
        with contextlib.suppress(OSError), open(path, "rb") as log:
            log.seek(begin)
            for line in log:
                if line.endswith(b"\n"):
                    begin += len(line)
                    readings.take(line.decode(errors="replace").rstrip("\n"))
        is_over = is_over or readings.are_over()
        if len(signals.received) > num_signals:
            return False
        time.sleep(0 if is_over else POLL_SECONDS)
    return True


# ---- the processes -------------------------------------------------------------------------------
SEEN_SECONDS = 3.0
"""How long an NFS client may take to see a directory that another node has just made."""
MEET_SECONDS = 600.0
"""Longer than the launcher waits before it ends the processes."""
MOST_WORDS = 300
"""Most characters of an error that are printed: srun may split lines of 1,024 bytes."""
GEMM_SIZE = {"cuda": 4096, "cpu": 512}
"""Rows and columns of the matrices that are multiplied."""
NUM_SUMMED = 1 << 18
"""Numbers that each process adds in an all-reduce: 1 MiB."""


def main(directory: Path, precision: str, has_gpus: bool) -> None:
    """Check this process's share of its node stage by stage, and print a line after each stage.

    Args:
        directory: The attempt's directory, which the launcher has just made.
        precision: train.precision.
        has_gpus: The site's nodes have GPUs.
    """
    task = slurm.own_task()
    meetings = directory / MEETINGS
    stages: dict[str, Callable[[], object]] = {
        "start": lambda: None,
        "directory": lambda: _write_there(directory / f".preflight-{task.rank}"),
        "torch": _import_torch,
        "device": lambda: _find_device(task.local_rank, has_gpus),
        "architecture": _check_architecture,
        "memory": _check_memory,
        "gemm": lambda: _multiply(precision),
        "node": lambda: _add_up(meetings / task.node, task.local_rank, task.per_node),
        "all": lambda: _add_up(meetings / "all", task.rank, task.num_tasks),
    }
    # Objects that serve other processes, such as a store, are kept until the end.
    kept = []
    for stage, check in stages.items():
        found: dict[str, Any] = {}
        try:
            kept.append(check())
        # Every kind of error is reported as a result of the check.
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            found = {"error": words[:MOST_WORDS], "number": getattr(error, "errno", None)}
        print(json.dumps({"stage": stage, **found}), flush=True)
        if found:
            return


def _write_there(own: Path) -> None:
    """Write a file in the attempt's directory, and remove it."""
    until = time.monotonic() + SEEN_SECONDS
    while not own.parent.is_dir() and time.monotonic() < until:
        time.sleep(0.1)
    try:
        with open(own, "wb") as file:
            file.write(b"0" * 4096)
            os.fsync(file.fileno())
    finally:
        own.unlink(missing_ok=True)


def _import_torch() -> None:
    """Import torch, for the first time in this process: on a bad node this fails or hangs."""
    from pretrain import platform  # noqa: F401


def _find_device(local_rank: int, has_gpus: bool) -> None:
    """Choose this process's GPU.

    Raises:
        RuntimeError: There is no GPU, although the site has GPUs.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    elif has_gpus:
        # Raises an error with CUDA's own message, or with that of a torch without CUDA.
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch declares no types here
        raise RuntimeError("torch finds no GPU")


def _check_architecture() -> None:
    """Check that torch can use the GPU, as the run does before it starts.

    Raises:
        ConfigError: It cannot.
    """
    from pretrain import platform

    platform.check_build()


def _check_memory() -> None:
    """Check that no other process holds much of the GPU's memory.

    Raises:
        RuntimeError: Another process does.
    """
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        if (used := 1 - free / total) > USED_SHARE:
            gpu = f"GPU {torch.cuda.current_device()} ({torch.cuda.get_device_name()})"
            raise RuntimeError(f"{100 * used:.0f} % of the memory of {gpu} is in use by others")


def _multiply(precision: str) -> None:
    """Multiply two matrices whose product is known exactly.

    Raises:
        RuntimeError: The product is wrong.
    """
    import torch

    from pretrain import platform

    device, dtype = platform.device(), platform.DTYPES[precision]
    size = GEMM_SIZE[device.type]
    # The right-hand matrix moves column j to j + 1, so the product is known without computing it.
    # Numbers below 128 are exact in every dtype.
    left = (torch.arange(size * size, device=device) % 127).view(size, size)
    shift = torch.roll(torch.eye(size, device=device), 1, dims=1)
    product = left.to(dtype) @ shift.to(dtype)
    if wrong := int((product != torch.roll(left, 1, dims=1).to(dtype)).sum()):
        raise RuntimeError(f"a matrix product has {wrong} wrong numbers of {size * size}")


def _add_up(folder: Path, rank: int, size: int) -> object:
    """Form a process group, and sum numbers of all its processes in an all-reduce.

    Args:
        folder: The folder in which process 0 publishes the address on which it listens.
        rank: The number of this process in the group.
        size: The number of processes in the group.

    Returns:
        The store, which serves the other processes as long as it exists.

    Raises:
        RuntimeError: A connection failed, or the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    from pretrain import platform, topology

    folder.mkdir(parents=True, exist_ok=True)
    peer = topology.Process(rank, size, rank, slurm.own_task().node, 0, folder)
    store = topology.meet(peer, MEET_SECONDS)
    backend, timeout = platform.backend(), datetime.timedelta(seconds=MEET_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    numbers = torch.full([NUM_SUMMED], rank + 1.0, device=platform.device())
    dist.all_reduce(numbers)
    if not bool((numbers == size * (size + 1) // 2).all()):
        raise RuntimeError("the sum is wrong")
    dist.destroy_process_group()
    return store


if __name__ == "__main__":
    # Blocked, because Slurm's warning before the time limit goes to every process.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    main(Path(sys.argv[1]), sys.argv[2], "gpus" in sys.argv[3:])
    # Wait for the launcher: srun may lose the last output of a process when another one is killed.
    sys.stdin.read()
    # A normal exit would wait for a process group that hangs.
    os._exit(0)

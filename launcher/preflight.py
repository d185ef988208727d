"""Check the nodes of a Slurm job before its ranks start, and name those that must not train.

This module runs as one job step on all nodes, a process for each rank (`main`). A process prints a
line of JSON after each stage, so the first stage that is missing is the one in which it hangs. Then
it reads from stdin with whom it shall add up numbers: first with the processes of its node, then
with those of all nodes that could do that. Lines come and go through srun, so the check needs no
shared directory, which may be what is broken. `check_nodes` starts the step and judges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.config import ConfigError, NoSpace, RunConfig, writing
from pretrain.config.errors import is_supported, not_supported, say
from pretrain.launcher import slurm
from pretrain.launcher.supervise import Repeater, Signals, signals_blocked
from pretrain.rundir.attempts import HEARTBEAT_SECONDS, PREFLIGHT, Attempt, Preflight
from pretrain.rundir.files import Json, parse_json, replace_json
from pretrain.rundir.jobs import LaunchRecord

STAGES = {
    "start": "while it starts",
    "directory": "while it writes to the run's directory",
    "torch": "while it imports torch",
    "device": "while it looks at its device",
    "gemm": "while it multiplies matrices",
    "ready": "while it opens a port",
    "node": "in the all-reduce of its node",
    "all": "in the all-reduce of all nodes",
}
"""What a process does, in order. The last two are done on demand."""
ALONE = tuple(STAGES)[:-2]
LOADING = ("start", "torch")
"""Stages that load files, which takes minutes from a slow disk: no node is blamed for those."""
ALONE_SHARE = 0.6
"""Share of the time for what each process checks by itself. The rest is for adding up."""
POLL_SECONDS = 0.05
ANSWER_SECONDS = 2.0
"""A process that gives up says so; this is how long its line may be on its way."""
KILL_SECONDS = 5.0
"""Time for each way to end the processes."""
USED_SHARE = 0.1
"""Share of a GPU's memory that may be in use before the run starts. A context of CUDA takes 1 % of
80 GB."""
LOG = "preflight.log"


# ---- what the processes said, and what follows from it -------------------------------------------
class Fault(NamedTuple):
    """A fault of a node."""

    kind: str
    """The stage in which an error was reported; "slow", "late" or "ended" where none was; "lost"
    where Slurm started nothing."""
    cause: str
    """In a line for people, without the node's name."""


@dataclass
class Process:
    """A process of the check."""

    rank: int
    found: dict[str, Json] = field(default_factory=dict)
    """The result of each stage."""
    asked: list[str] = field(default_factory=lambda: list(ALONE))
    """The stages that it has to go through."""
    words: str = ""
    """The last line it printed that is not one of ours, such as the end of a traceback."""
    ended: str = ""
    """The words of srun for its end, if that was bad."""

    @property
    def error(self) -> tuple[str, Json] | None:
        """Return the stage that failed, with its result."""
        return next(((s, found) for s, found in self.found.items() if "error" in found), None)

    def is_over(self, stage: str) -> bool:
        """Return True if it has gone through a stage, or never will."""
        return stage in self.found or self.error is not None or bool(self.ended)

    def fault(self, python: str) -> Fault | None:
        """Return what is wrong with it; None if nothing is."""
        if error := self.error:
            stage, found = error
            if stage == "all":
                # Others may be the cause; those that give no answer are named.
                return None
            kind = "late" if found.get("late") else stage
            return Fault(kind, f"process {self.rank} failed {STAGES[stage]} ({found['error']})")
        how = f"{self.ended}: {self.words}" if self.words else self.ended
        missing = next((stage for stage in self.asked if stage not in self.found), "")
        if self.ended and missing == "start":
            return Fault("start", f"{python} -m pretrain cannot be started there ({how})")
        if self.ended:
            during = STAGES.get(missing, "while it ended")
            return Fault("ended", f"process {self.rank} ended {during} ({how})")
        if missing:
            kind = "slow" if missing in LOADING else "late"
            return Fault(kind, f"process {self.rank} does not answer {STAGES[missing]}")
        return None


class Readings:
    """Collects what the processes on all nodes have said so far."""

    def __init__(self, nodes: Sequence[str], per_node: int, python: str, has_gpus: bool) -> None:
        self.nodes, self.per_node, self.python, self.has_gpus = nodes, per_node, python, has_gpus
        self.processes = [Process(rank) for rank in range(len(nodes) * per_node)]
        self.lost: dict[str, str] = {}
        """Nodes on which srun started nothing, with its words."""

    def on(self, node: str) -> list[Process]:
        """Return the processes of a node."""
        first = self.nodes.index(node) * self.per_node
        return self.processes[first : first + self.per_node]

    def take(self, line: str) -> None:
        """Take a line of srun's output."""
        if labelled := slurm.labelled(line.encode(errors="backslashreplace")):
            rank, text = labelled[0], labelled[1].decode().strip()
            content = parse_json(text)
            if rank < len(self.processes) and (stage := content.get("stage")) in STAGES:
                self.processes[rank].found[str(stage)] = content
            elif rank < len(self.processes) and text:
                self.processes[rank].words = text
        elif ended := slurm.ended_tasks(line):
            for rank in _numbers(ended.ranks):
                self.processes[rank].ended = ended.how
        elif lost := slurm.lost_node(line):
            self.lost[lost[0]] = lost[1]

    def fit(self, stage: str) -> list[str]:
        """Return the nodes whose processes have all gone through a stage."""
        return [
            node
            for node in self.nodes
            if all(stage in each.found and not each.error for each in self.on(node))
        ]

    def fault_of(self, node: str) -> Fault | None:
        """Return what is wrong with a node; None if nothing is."""
        if words := self.lost.get(node):
            return Fault("lost", f"Slurm starts no processes there ({words})")
        processes = self.on(node)
        devices = [each.found["device"] for each in processes if "device" in each.found]
        # First, because it explains a product that finds no memory.
        if self.has_gpus and (fault := next(filter(None, map(_device_fault, devices)), None)):
            return fault
        fault = next(filter(None, (each.fault(self.python) for each in processes)), None)
        # Where srun cannot start everything, it ends what it has started.
        return None if fault and self.lost and fault.kind in ("ended", "late", "slow") else fault


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list: "0,2-4" is 0, 2, 3, 4."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _device_fault(found: Json) -> Fault | None:
    """Return what is wrong with the GPU that a process saw."""
    if "error" in found:
        return None
    if not found.get("gpu"):
        why = f" ({found['why']})" if found.get("why") else ""
        return Fault("device", f"torch finds no GPU there{why}")
    name, capability = f"GPU {found['index']} ({found['gpu']})", found["capability"]
    if not is_supported(found["architectures"], capability):
        return Fault("torch", not_supported(name, capability, found["architectures"]))
    if (used := 1 - found["free"] / found["total"]) > USED_SHARE:
        return Fault("memory", f"{100 * used:.0f} % of the memory of {name} are in use by others")
    return None


def diagnose(readings: Readings) -> tuple[dict[str, str], list[str], str]:
    """Return what follows from the readings of a check that is over.

    Returns:
        The cause by node that must not train; warnings; and why the run can train nowhere, where
        that is the run's fault: every node has it.
    """
    nodes, found = readings.nodes, {node: readings.fault_of(node) for node in readings.nodes}
    faults = {node: fault for node, fault in found.items() if fault}
    slow = {node: fault for node, fault in faults.items() if fault.kind == "slow"}
    kinds = {fault.kind for fault in faults.values()}
    if len(faults) == len(nodes) and len(kinds) == 1:
        [kind] = kinds
        where = nodes[0] if len(nodes) == 1 else f"all {len(nodes)} nodes"
        words = f"{where}: {next(iter(faults.values())).cause}"
        if kind in ("start", "directory", "torch") or (kind == "device" and len(nodes) > 1):
            return {}, [], words
        # One node is suspected by itself. What several do alike is not for them to blame.
        if kind in ("late", "slow") or (len(nodes) > 1 and kind != "lost"):
            return {}, [words], ""
    warnings = [f"{node}: {fault.cause}" for node, fault in slow.items()]
    errors = [each.found["all"] for each in readings.processes if "all" in each.found]
    if failed := [each["error"] for each in errors if "error" in each]:
        warnings.append(f"the nodes cannot add up numbers all together ({failed[0]})")
    blamed = {node: fault.cause for node, fault in faults.items() if node not in slow}
    return blamed, warnings, ""


# ---- the job step --------------------------------------------------------------------------------
class Interrupted(Exception):
    """A signal came: what it asks for is more urgent than the check."""


def check_nodes(
    launch: LaunchRecord,
    config: RunConfig,
    nodes: Sequence[str],
    attempt: Attempt,
    job_id: str,
    signals: Signals,
) -> dict[str, str]:
    """Check every node of the job, and return those that must not train, each with the cause.

    It takes at most recovery.preflight_seconds, and ends at once when this process gets a signal.
    What it finds is printed, and kept in the attempt's preflight.json.

    Args:
        launch: How the run starts its ranks.
        config: The run's config. With recovery.preflight_seconds = 0 nothing is checked.
        nodes: The nodes to check, in Slurm's order: those that will train and the spares.
        attempt: The attempt, which this process has begun.
        job_id: The job this process runs in.
        signals: The signals that this process receives.

    Raises:
        ConfigError: The ranks could start on none of the nodes, and the cause is the run's: the
            container, the directory, torch. No node is to blame.
        NoSpace: The disk is full.
        RunFailed: The run's directory cannot be written to.
    """
    limit = config.recovery.preflight_seconds
    if not limit or not nodes:
        return {}
    began = time.monotonic()
    per_node, has_gpus = launch.num_tasks // launch.nodes, bool(launch.site.get("gpus_per_node"))
    readings = Readings(nodes, per_node, launch.python, has_gpus)
    name = f"preflight-{attempt.directory.name}"
    words = slurm.check_step(launch.command, name, nodes, len(readings.processes))
    words += [launch.python, "-m", "pretrain.launcher.preflight"]
    words += [str(attempt.directory), config.train.precision]
    try:
        with _step(words, job_id, name, attempt) as srun:
            _talk(_Conversation(readings, srun, attempt.directory / LOG, signals), limit)
    except Interrupted:
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
    numbers = [each.found.get("directory", {}).get("number") for each in readings.processes]
    if any(number in (errno.ENOSPC, errno.EDQUOT) for number in numbers):
        raise NoSpace(f"preflight: {attempt.run}: no space is left")
    if refusal:
        raise ConfigError(f"preflight: {refusal}")
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
    # On a full disk the printed lines have to do.
    with contextlib.suppress(OSError):
        replace_json(attempt.directory / PREFLIGHT, dataclasses.asdict(record))


@contextmanager
def _step(
    words: Sequence[str], job_id: str, name: str, attempt: Attempt
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the step, whose output goes to the log, and end it whatever state it is in."""
    with writing(attempt.directory / LOG), open(attempt.directory / LOG, "ab") as log:
        try:
            with signals_blocked():
                srun = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            raise ConfigError(
                f"{words[0]}: cannot be started on this node ({error.strerror})"
            ) from None
    beats = Repeater(HEARTBEAT_SECONDS, attempt.heartbeat)
    beats.start()
    try:
        yield srun
    finally:
        beats.stop(KILL_SECONDS)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # The processes end where their stdin does.
            srun.communicate(timeout=KILL_SECONDS)
        slurm.end_step(srun, job_id, name, KILL_SECONDS)


class _Conversation:
    """Reads what the processes say, and tells them what to do."""

    def __init__(
        self, readings: Readings, srun: subprocess.Popen[bytes], log: Path, signals: Signals
    ) -> None:
        self.readings, self._srun, self._signals = readings, srun, signals
        self._log, self._read, self._num_signals = log, 0, len(signals.received)

    def tell(self, content: Mapping[str, object]) -> None:
        """Send a line to every process."""
        assert self._srun.stdin is not None
        # OSError: srun has just ended, which the next look at it finds.
        with contextlib.suppress(OSError):
            self._srun.stdin.write(json.dumps(content).encode() + b"\n")
            self._srun.stdin.flush()

    def wait_for(self, stage: str, until: float) -> None:
        """Read until all who were asked are through a stage, the step is over, or time is up.

        Raises:
            Interrupted: A signal came.
        """
        is_over = False
        while not is_over:
            # Looked at before the last lines are read.
            is_over = self._srun.poll() is not None or time.monotonic() > until
            with contextlib.suppress(OSError), open(self._log, "rb") as log:
                log.seek(self._read)
                for line in log:
                    if line.endswith(b"\n"):
                        self._read += len(line)
                        self.readings.take(line.decode(errors="replace").rstrip("\n"))
            asked = [each for each in self.readings.processes if stage in each.asked]
            is_over = is_over or all(each.is_over(stage) for each in asked)
            if len(self._signals.received) > self._num_signals:
                raise Interrupted
            time.sleep(0 if is_over else POLL_SECONDS)


def _talk(conversation: _Conversation, limit: float) -> None:
    """Let the processes check their places, then have them add up numbers within `limit` seconds.

    Raises:
        Interrupted: A signal came.
    """
    readings, end = conversation.readings, time.monotonic() + limit
    conversation.wait_for("ready", end - (1 - ALONE_SHARE) * limit)
    for stage, before in (("node", "ready"), ("all", "node")):
        fit = readings.fit(before)
        groups = [readings.on(node) for node in fit]
        if stage == "all":
            groups = [[each for group in groups for each in group]]
        # Half of what is left, then the rest.
        left = (end - time.monotonic() - ANSWER_SECONDS) / (2 if stage == "node" else 1)
        if not fit or left <= 0:
            return
        for process in (each for group in groups for each in group):
            process.asked.append(stage)
        asked = [
            {"ranks": [each.rank for each in group], "at": group[0].found["ready"]["at"]}
            for group in groups
        ]
        conversation.tell({"stage": stage, "seconds": round(left, 1), "groups": asked})
        conversation.wait_for(stage, time.monotonic() + left + ANSWER_SECONDS)


# ---- the processes -------------------------------------------------------------------------------
SEEN_SECONDS = 3.0
"""How long an NFS client may take to see a directory that another node has just made."""
MOST_WORDS = 300
"""Characters of an error that are printed: srun may break up a line of 1,024."""
GEMM_SIZE = {"cuda": 4096, "cpu": 512}
"""Rows and columns of the matrices that are multiplied."""
NUM_SUMMED = 1 << 18
"""Numbers that each process adds in an all-reduce: 1 MiB."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(directory: Path, precision: str) -> None:
    """Check this process's place stage by stage, then add up numbers as stdin asks, until it ends.

    Args:
        directory: The attempt's directory, which the launcher has just made.
        precision: train.precision.
    """
    rank, local_rank, _ = slurm.own_task()
    _say("start")
    stores: list[Any] = []
    stages: dict[str, Callable[[], Mapping[str, Any]]] = {
        "directory": lambda: _write_there(directory / f".preflight-{rank}"),
        "torch": _import_torch,
        "device": lambda: _look_at_device(local_rank),
        "gemm": lambda: _multiply(precision),
        "ready": lambda: _offer_store(stores),
    }
    for stage, check in stages.items():
        try:
            _say(stage, **check())
        # Every kind of error is reported as a finding.
        except Exception as error:
            _say(stage, error=_words(error), number=getattr(error, "errno", None))
            return
    for line in sys.stdin:
        asked = json.loads(line)
        for group in asked["groups"]:
            if rank in group["ranks"]:
                _add_up_in_time(asked["stage"], group, rank, asked["seconds"], stores[0])


def _say(stage: str, **found: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps({"stage": stage, **found}), flush=True)


def _words(error: Exception) -> str:
    """Return an error in one short line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:MOST_WORDS]


def _write_there(own: Path) -> dict[str, Any]:
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
    return {}


def _import_torch() -> dict[str, Any]:
    """Import torch, which is not imported before: on a bad node this fails, or takes forever."""
    import torch

    return {"version": torch.__version__}


def _look_at_device(local_rank: int) -> dict[str, Any]:
    """Choose this process's GPU and return what it is; on a machine without one, why."""
    import torch

    if not torch.cuda.is_available():
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch declares no types here
        # A torch without CUDA, or CUDA's own words.
        except Exception as error:
            return {"why": _words(error)}
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu": torch.cuda.get_device_name(index),
        "index": index,
        "capability": list(torch.cuda.get_device_capability(index)),
        "architectures": torch.cuda.get_arch_list(),
        "free": free,
        "total": total,
    }


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _multiply(precision: str) -> dict[str, Any]:
    """Multiply two matrices whose product is known exactly.

    Raises:
        RuntimeError: The product is wrong.
    """
    import torch

    device = _device()
    size, dtype = GEMM_SIZE[device], getattr(torch, DTYPES[precision])
    # The right-hand matrix moves column j to j + 1, so the product is known without computing it.
    # Numbers below 128 are exact in every dtype.
    left = (torch.arange(size * size, device=device) % 127).view(size, size)
    shift = torch.roll(torch.eye(size, device=device), 1, dims=1)
    product = left.to(dtype) @ shift.to(dtype)
    if wrong := int((product != torch.roll(left, 1, dims=1).to(dtype)).sum()):
        raise RuntimeError(f"a product of matrices has {wrong} wrong numbers of {size * size}")
    return {}


def _offer_store(stores: list[Any]) -> dict[str, Any]:
    """Offer a store, in which the first process of a group meets the others."""
    import torch.distributed as dist

    host = slurm.own_task().node
    # torch.distributed does not list it in __all__.
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    stores.append(store)
    return {"at": [host, store.port]}


def _add_up_in_time(stage: str, group: Json, rank: int, seconds: float, own_store: Any) -> None:
    """Add up numbers in a thread, which is left behind when it takes too long, and say the end."""
    ended: list[Exception | None] = []

    def work() -> None:
        try:
            _add_up(stage, group, rank, own_store)
            ended.append(None)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended:
        _say(stage, error=f"not complete within {seconds:.1f} s", late=True)
    elif error := ended[0]:
        _say(stage, error=_words(error))
    else:
        _say(stage)


def _add_up(stage: str, group: Json, rank: int, own_store: Any) -> None:
    """Form a process group, and sum a number of each of its processes.

    Raises:
        RuntimeError: A connection failed, or the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    ranks, device = group["ranks"], _device()
    index, size = ranks.index(rank), len(ranks)
    # Longer than the launcher waits: NCCL would abort the process at the end of its own.
    timeout = datetime.timedelta(minutes=10)
    if device == "cuda":
        # In this thread, which is not the one that has chosen the device.
        torch.cuda.set_device(slurm.own_task().local_rank % torch.cuda.device_count())
    store = own_store
    if index:
        host, port = group["at"]
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    # A prefix of its own, because a store serves several groups.
    store = dist.PrefixStore(f"{stage}-{ranks[0]}", store)  # type: ignore[attr-defined]
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=timeout)
    numbers = torch.full([NUM_SUMMED], index + 1.0, device=device)
    dist.all_reduce(numbers)
    if not bool((numbers == size * (size + 1) // 2).all()):
        raise RuntimeError("the sum is wrong")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The launcher has blocked these: Slurm's warning before the time limit goes to every process.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    # An orderly end would wait for a process group that hangs.
    os._exit(0)

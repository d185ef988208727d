"""Check the nodes of a Slurm job before its ranks start, and tell which of them must not train.

`pretrain preflight` runs as one job step on all nodes, a process for each rank. The processes say
on stdout what they find, and this side says on stdin who shall add up numbers with whom. So the
check needs no shared directory, which may be what is broken, and no process that is broken can hold
up the others: it is left out of the next group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import queue
import secrets
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from pretrain.config import ConfigError, NoSpace, RunConfig, free_bytes, in_bytes, writing
from pretrain.config.errors import is_supported, not_supported
from pretrain.config.tensors import checkpoint_bytes, num_parameters_of_rank
from pretrain.launcher import slurm
from pretrain.launcher.supervise import Signals, signals_blocked
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import HEARTBEAT_SECONDS, PREFLIGHT, Attempt, Preflight
from pretrain.rundir.checkpoints import check_room
from pretrain.rundir.files import Json, from_json, parse_json, replace_json
from pretrain.rundir.jobs import LaunchRecord
from pretrain.rundir.paths import RunPaths

# ---- Keep what the processes of a preflight say, line by line, as srun passes it on ----


STAGES = ("started", "directory", "torch", "device", "gemm", "ready")
"""The stages that a process of the preflight goes through by itself, in order."""

_NEXT = dict(itertools.pairwise(STAGES))
"""The next thing that a process does when it has finished a stage."""
SILENT_SECONDS = 5.0
"""A process says something every second. One that was silent for so long is stopped or gone."""
IDLE_SECONDS = 8.0
"""A process in whose stage no processor time passed for so long hangs."""


@dataclass(frozen=True)
class Said:
    """The part that all lines of the processes share."""

    stage: str
    """The stage or round whose result the line is; "alive" is a sign of life."""
    node: str
    during: str = ""
    """Of a sign of life: the stage the process is in."""
    busy: float = 0.0
    """Of a sign of life: the main thread's processor time."""
    warned: bool = False
    """The process has got SIGUSR1."""


@dataclass
class Process:
    """A process of the preflight, one for each rank."""

    rank: int
    node: str = ""
    """Empty until it is known."""
    found: dict[str, Json] = field(default_factory=dict)
    """The result of each stage, and of each round with others as "round NAME"."""
    during: str = "started"
    """The stage it last said it was in."""
    said_at: float = 0.0
    """The time at which it last said anything, by this side's clock."""
    busy: float = 0.0
    """Its processor time, which grows while it works."""
    worked_at: float = 0.0
    """The time at which that was last seen to grow."""
    words: str = ""
    """The last line it printed that is not one of ours, such as the end of a traceback."""
    ended: str = ""
    """The words of srun for its end, if that was bad."""

    @property
    def is_ready(self) -> bool:
        """Return True if it went through all stages that it goes through by itself."""
        return "ready" in self.found and self.error is None

    @property
    def error(self) -> tuple[str, Json] | None:
        """Return the stage that failed, with its result."""
        failed = ((stage, self.found.get(stage, {})) for stage in STAGES)
        return next(((stage, found) for stage, found in failed if "error" in found), None)

    @property
    def is_over(self) -> bool:
        """Return True if it has no more to say for itself."""
        return bool(self.ended or self.error or self.is_ready)

    @property
    def is_loading(self) -> bool:
        """Return True while it imports torch, in which it is silent for as long as a file loads.

        The thread that gives signs of life needs Python's lock, which is held during dlopen.
        """
        return "directory" in self.found and "torch" not in self.found and not self.is_over

    def is_silent(self, now: float) -> bool:
        """Return True if it has said nothing for so long that it is stopped or gone."""
        return now - self.said_at > SILENT_SECONDS

    def works(self, now: float) -> bool:
        """Return True unless it is silent or hangs."""
        return not self.is_silent(now) and now - self.worked_at <= IDLE_SECONDS


class Readings:
    """All that the processes of a preflight have said so far."""

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}
        self.not_launched: dict[str, str] = {}
        """Nodes on which srun started nothing, with its words."""
        self.warned = False
        """Slurm has sent the processes SIGUSR1, its warning before the time limit."""

    def take(self, line: str, now: float) -> None:
        """Take a line of srun's output.

        Args:
            line: The line.
            now: The present time of the clock by which silence is measured.
        """
        if labelled := slurm.labelled(line.encode(errors="backslashreplace")):
            rank, text = labelled[0], labelled[1].decode().strip()
            process = self.processes.setdefault(rank, Process(rank, said_at=now, worked_at=now))
            process.said_at = now
            content = parse_json(text)
            if said := from_json(Said, content):
                self._take_reading(process, said, content, now)
            elif text:
                process.words = text
        elif ended := slurm.ended_tasks(line):
            for rank in _numbers(ended.ranks):
                process = self.processes.setdefault(rank, Process(rank, said_at=now, worked_at=now))
                process.ended = ended.how
                if not set("[,") & set(ended.node):
                    process.node = ended.node
        elif lost := slurm.lost_node(line):
            node, why = lost
            self.not_launched[node] = why

    def _take_reading(self, process: Process, said: Said, content: Json, now: float) -> None:
        """Take a line of JSON that a process printed."""
        process.node = process.node or said.node
        self.warned = self.warned or said.warned
        if said.stage != "alive":
            process.found[said.stage], process.worked_at = content, now
            process.during = _NEXT.get(said.stage, "waiting")
            return
        # A sign of life may be overtaken by the result of the stage that it names.
        if not {said.during, f"round {said.during}"} & process.found.keys():
            process.during = said.during
        if said.busy > process.busy:
            process.busy, process.worked_at = said.busy, now

    def on(self, node: str) -> list[Process]:
        """Return the processes of a node that are known, by rank."""
        found = (process for process in self.processes.values() if process.node == node)
        return sorted(found, key=lambda process: process.rank)

    def ready_nodes(self, nodes: Sequence[str], per_node: int, now: float) -> list[str]:
        """Return those of the nodes whose processes are all ready, and alive."""
        ready = {
            node: [
                process
                for process in self.on(node)
                if process.is_ready and not process.ended and not process.is_silent(now)
            ]
            for node in nodes
        }
        return [node for node in nodes if len(ready[node]) == per_node]


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list: "0,2-4" is 0, 2, 3, 4."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


SLOW, TOO_SLOW = 2.0, 5.0
"""A node whose matrix product takes so many times as long as the others' is worth a warning; a GPU
is taken for broken."""
LEAST_NODES = 3
"""Nodes that it takes to say which one is slow."""
USED_SHARE = 0.1
"""Share of a GPU's memory that may be in use before the run starts. A context of CUDA takes 1 % of
80 GB."""
OF_THE_RUN = {"python", "torch", "directory", "architecture", "gpus"}
"""Kinds of faults that have their cause in the run, its container or its site when every node has
them."""
OF_ONE_NODE = {"gpus", "memory", "gemm", "ended", "node", "slurm"}
"""Kinds of faults of which a node is suspected even when the run has no other to compare with."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class Fault(NamedTuple):
    """A fault of a node."""

    kind: str
    cause: str
    """In a line for people, without the node's name."""


@dataclass(frozen=True)
class Expected:
    """The needs that the run has of each node."""

    nodes: tuple[str, ...]
    per_node: int
    """Processes on each node."""
    gpus: int
    """GPUs of a node; 0 on a CPU."""
    python: str
    directory: str
    memory: int
    """Bytes that one process needs at the least."""


@dataclass
class Diagnosis:
    """The faults and warnings that follow from the readings."""

    faults: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    refusal: str = ""
    is_full: bool = False
    """The refusal is that the disk is full."""


def diagnose(readings: Readings, expected: Expected, now: float) -> Diagnosis:
    """Return what follows from the readings of a preflight that is over.

    Args:
        readings: What the processes said.
        expected: What the run needs.
        now: The present time of the clock by which silence is measured.
    """
    diagnosis = Diagnosis()
    faults: dict[str, Fault] = {}
    # Where no node is ready in time, all are slow, and none is blamed for being slower.
    in_time = bool(readings.ready_nodes(expected.nodes, expected.per_node, now))
    for node in expected.nodes:
        fault = _fault_of(node, readings, expected, now)
        if fault and fault.kind == "full":
            return Diagnosis(refusal=fault.cause, is_full=True)
        if fault and (fault.kind == "slow" or (fault.kind == "hang" and not in_time)):
            diagnosis.warnings.append(f"{node}: {fault.cause}")
        elif fault:
            faults[node] = fault
    _judge_speed(readings, expected, faults, diagnosis)
    _judge_all(readings, faults, diagnosis)
    _decide(expected, faults, diagnosis)
    return diagnosis


def _decide(expected: Expected, faults: Mapping[str, Fault], diagnosis: Diagnosis) -> None:
    """Blame the nodes, or the run where all nodes have the same fault."""
    kinds = {fault.kind for fault in faults.values()}
    if len(faults) < len(expected.nodes) or len(kinds) != 1:
        diagnosis.faults = {node: fault.cause for node, fault in faults.items()}
        return
    [kind], alone = kinds, len(expected.nodes) == 1
    first = next(iter(faults.values())).cause
    if kind == "slurm" or (alone and kind in OF_ONE_NODE):
        diagnosis.faults = {node: fault.cause for node, fault in faults.items()}
    elif kind in OF_THE_RUN:
        where = expected.nodes[0] if alone else f"all {len(expected.nodes)} nodes"
        diagnosis.refusal = f"{where}: {first}"
    else:
        where = expected.nodes[0] if alone else f"all {len(expected.nodes)} nodes alike"
        diagnosis.warnings.append(f"{where}: {first}")


# ---- one node ------------------------------------------------------------------------------------
def _fault_of(node: str, readings: Readings, expected: Expected, now: float) -> Fault | None:
    """Return what is wrong with a node by itself; None if nothing is."""
    if words := readings.not_launched.get(node):
        return Fault("slurm", f"Slurm starts no processes there ({words})")
    processes = readings.on(node)
    devices = [process.found["device"] for process in processes if "device" in process.found]
    # First, because it explains a product of matrices that finds no memory.
    if fault := _judge_devices([found for found in devices if "error" not in found], expected):
        return fault
    found = [_fault_of_process(process, expected, now) for process in processes]
    if fault := next(filter(None, found), None):
        return fault
    missing = expected.per_node - len(processes)
    if missing > 0:
        return _missing(readings, expected, missing)
    return _judge_sum(node, readings, expected)


def _missing(readings: Readings, expected: Expected, missing: int) -> Fault:
    """Return the fault of a node from some of whose processes nothing has come."""
    unplaced = [process for process in readings.processes.values() if not process.node]
    words = next((process.words for process in unplaced if process.words), "")
    how = next((process.ended for process in unplaced if process.ended), "")
    if how:
        return Fault("python", _not_started(expected, how, words))
    # A node that fetches the container, or reads Python from a slow disk, looks like this as well.
    return Fault("slow", f"{missing} of {expected.per_node} processes gave no sign of life")


def _fault_of_process(process: Process, expected: Expected, now: float) -> Fault | None:
    """Return what is wrong with a process; None if nothing is."""
    if process.error:
        return _explain(*process.error, expected)
    if process.ended and "started" not in process.found:
        how = process.ended
        kind = "python" if how.startswith("Exited") else "ended"
        return Fault(kind, _not_started(expected, how, process.words))
    at = _in_words(process.during)
    if process.ended:
        words = f": {process.words}" if process.words else ""
        return Fault("ended", f"process {process.rank} ended {at} ({process.ended}{words})")
    if process.is_silent(now):
        # torch's libraries may come from a slow disk, as after a boot.
        kind = "slow" if process.is_loading else "hang"
        return Fault(kind, f"process {process.rank} gives no sign of life any more, {at}")
    if process.is_ready:
        return None
    if "started" not in process.found and process.words:
        # It prints, but not what `pretrain preflight` prints.
        return Fault("slow", f"process {process.rank} has only printed {process.words!r}")
    if not process.works(now):
        return Fault("hang", f"process {process.rank} hangs {at}")
    return Fault("slow", f"process {process.rank} works, but is not done yet, {at}")


def _not_started(expected: Expected, how: str, words: str) -> str:
    detail = f"{how}: {words}" if words else how
    return f"{expected.python} -m pretrain cannot be started there ({detail})"


def _in_words(stage: str) -> str:
    """Return what a process was doing, as a part of a sentence."""
    known = {
        "started": "while it starts",
        "directory": "while it looks at the run's directory",
        "torch": "while it imports torch",
        "device": "while it looks at its device",
        "gemm": "while it multiplies matrices",
        "waiting": "while it waits for the others",
        "node": "in the all-reduce of its node",
        "all": "in the all-reduce of all nodes",
    }
    return known.get(stage, f"in the all-reduce {stage}")


def _explain(stage: str, found: Json, expected: Expected) -> Fault:
    """Return the fault that a failed stage is."""
    error = str(found["error"])
    if stage == "directory" and found.get("number") in FULL:
        return Fault("full", f"{expected.directory}: no space is left ({error})")
    causes = {
        "directory": f"{expected.directory} cannot be seen or written to there ({error})",
        "torch": f"torch cannot be imported there ({error})",
        "device": f"its device does not answer ({error})",
        "gemm": f"it computes wrongly or not at all ({error})",
        "ready": f"it offers no port to the others ({error})",
    }
    return Fault({"device": "gpus", "ready": "node"}.get(stage, stage), causes[stage])


def _judge_devices(devices: Sequence[Json], expected: Expected) -> Fault | None:
    """Return what is wrong with the GPUs of a node, or with its memory."""
    for found in devices:
        free, total = found.get("free", 0), found.get("total")
        if not expected.gpus:
            needed = expected.memory * expected.per_node
            if free < needed:
                words = f"{_gib(free)} of memory are free, and the run needs {_gib(needed)} there"
                return Fault("memory", words)
            continue
        if not found.get("count"):
            why = f" ({found['why']})" if found.get("why") else ""
            return Fault("gpus", f"torch finds none of its {expected.gpus} GPUs{why}")
        name = f"GPU {found.get('index')} ({found.get('gpu')})"
        if not is_supported(found.get("architectures", []), found.get("capability", [])):
            words = not_supported(name, found.get("capability", []), found.get("architectures", []))
            return Fault("architecture", words)
        if total and total - free > USED_SHARE * total:
            words = f"{_gib(total - free)} of the {_gib(total)} of {name} are in use by others"
            return Fault("memory", words)
        if free < expected.memory:
            words = f"{_gib(free)} of {name} are free, and a process needs {_gib(expected.memory)}"
            return Fault("memory", words)
    if not expected.gpus or not devices:
        return None
    uuids = [found["uuid"] for found in devices if found.get("uuid")]
    if len(set(uuids)) < len(uuids):
        words = f"its {len(uuids)} processes have only {len(set(uuids))} different GPUs"
        return Fault("gpus", words)
    # Without ids there is only the count to go by.
    counts = {found["count"] for found in devices}
    if not uuids and max(counts) < expected.gpus and counts != {1}:
        return Fault("gpus", f"torch finds {max(counts)} GPUs of {expected.gpus}")
    return None


def _judge_sum(node: str, readings: Readings, expected: Expected) -> Fault | None:
    """Return what went wrong when the processes of a node added up numbers."""
    results = [process.found.get("round node", {}) for process in readings.on(node)]
    failed = next((found for found in results if "error" in found), None)
    if failed is None:
        return None
    words = f"its {expected.per_node} processes cannot add up numbers ({failed['error']})"
    if not failed.get("late"):
        return Fault("node", words)
    # Too late may mean that the machine is slow. A node is blamed if others were in time.
    in_time = any(
        "seconds" in process.found.get("round node", {}) for process in readings.processes.values()
    )
    return Fault("node" if in_time else "slow", words)


# ---- nodes compared ------------------------------------------------------------------------------
def _judge_speed(
    readings: Readings, expected: Expected, faults: dict[str, Fault], diagnosis: Diagnosis
) -> None:
    """Compare the seconds that the nodes' slowest processes took for a product of matrices."""
    seconds: dict[str, float] = {}
    for node in expected.nodes:
        results = [process.found.get("gemm", {}) for process in readings.on(node)]
        took = [float(found["seconds"]) for found in results if "seconds" in found]
        if took:
            seconds[node] = max(took)
    if len(seconds) < LEAST_NODES:
        return
    median = statistics.median(seconds.values())
    for node, longest in seconds.items():
        times = longest / median if median else 1.0
        words = f"a product of matrices takes {times:.1f} times as long as on the others"
        if expected.gpus and times > TOO_SLOW:
            faults.setdefault(node, Fault("gemm", words))
        elif times > SLOW:
            diagnosis.warnings.append(f"{node}: {words}")


def _judge_all(readings: Readings, faults: dict[str, Fault], diagnosis: Diagnosis) -> None:
    """Warn where all nodes together could not add up numbers and no node is known for the cause."""
    results = [process.found.get("round all", {}) for process in readings.processes.values()]
    error = next((found["error"] for found in results if "error" in found), None)
    if error and not faults:
        diagnosis.warnings.append(f"the nodes cannot add up numbers all together ({error})")


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


# ---- Run the processes of a preflight on the nodes of a job, and talk with them through srun ----


LOG = "preflight.log"
ALONE_SHARE, MOST_ALONE_SHARE = 0.6, 0.85
"""Share of the time for what each process checks by itself, and the same while those that are not
done still work. The rest is for adding up."""
POLL_SECONDS = 0.05
"""Time between two looks at the signals."""
MOST_PAUSE = 1.0
"""A longer time between two looks is a pause of this process, as when Slurm suspends the job."""
QUIT_SECONDS = 2.0
"""Time for processes that are told to end; then they are killed."""
KILL_SECONDS = 5.0
"""Time for each way to kill them."""


StepWords = Callable[[str, Sequence[str], int], list[str]]
"""Makes srun's command line from the name of a step, its nodes and the number of its tasks."""


class Interrupted(Exception):
    """A signal came: what it asks for is more urgent than the check."""


class Check:
    """One check of nodes: a step, or two where Slurm could not start the first everywhere."""

    def __init__(
        self,
        words: StepWords,
        expected: Expected,
        limit: float,
        attempt: Attempt,
        job_id: str,
        signals: Signals,
    ) -> None:
        self._words, self._expected, self._limit = words, expected, limit
        self._attempt, self._job_id, self._signals = attempt, job_id, signals
        self._received = len(signals.received)
        self._steps, self._count = 0, 0
        self._step: _Step | None = None
        self._readings = Readings()
        self._output: list[str] = []
        # The time that this process watched, in which a pause of it does not count.
        self._now, self._looked = 0.0, time.monotonic()
        self._renewed = 0.0

    def run(self) -> Diagnosis:
        """Check the nodes and return the diagnosis.

        Raises:
            Interrupted: A signal came.
        """
        nodes, lost = list(self._expected.nodes), dict[str, str]()
        while nodes and self._now < self._limit:
            self._start(nodes)
            began, left = self._now, self._limit - self._now
            self._wait(self._all_over, began + ALONE_SHARE * left)
            self._wait(self._none_works, began + MOST_ALONE_SHARE * left)
            if self._step is None or self._step.runs():
                lost |= self._readings.not_launched
                break
            # srun has ended: it could not start the step everywhere, or no process came far.
            lost |= self._readings.not_launched or self._down(nodes)
            if not set(nodes) & lost.keys():
                break
            nodes = [node for node in nodes if node not in lost]
        self._readings.not_launched = lost
        self._together(nodes)
        diagnosis = diagnose(self._readings, self._expected, self._now)
        if not self._readings.processes and not diagnosis.faults:
            said = next((line for line in reversed(self._output) if line), "nothing was said")
            diagnosis.warnings = [f"the nodes could not be checked ({said})"]
        return diagnosis

    def end(self) -> None:
        """End the step, whatever state it is in."""
        if self._step is not None:
            self._step.end()
            self._step = None

    # ---- what is started and said ----------------------------------------------------------------
    def _start(self, nodes: Sequence[str]) -> None:
        """Start the processes on these nodes, in place of those of an earlier step."""
        self.end()
        self._readings, self._steps = Readings(), self._steps + 1
        name = f"preflight-{self._attempt.directory.name}"
        name += f"-{self._steps}" if self._steps > 1 else ""
        self._count = len(nodes) * self._expected.per_node
        words = self._words(name, nodes, self._count)
        self._step = _Step(words, self._job_id, name, self._attempt.directory / LOG)

    def _down(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return the nodes that Slurm calls down, when it did not make the step."""
        if self._readings.processes:
            return {}
        states = slurm.unusable_nodes(nodes)
        return {node: f"the node is {state}" for node, state in states.items() if node in nodes}

    def _wait(self, is_done: Callable[[], bool], until: float) -> None:
        """Read what the processes say until a condition holds, the step is over, or time is up.

        Args:
            is_done: The condition.
            until: A time on the clock of this check.

        Raises:
            Interrupted: A signal came.
        """
        while self._step is not None:
            runs = self._step.runs()
            self._read()
            if not runs or is_done() or self._now >= until:
                return

    def _read(self) -> None:
        """Take the lines that have come, wait a moment, and keep the clock and the lease."""
        assert self._step is not None
        time.sleep(POLL_SECONDS)
        for line in self._step.lines():
            self._output.append(line)
            self._readings.take(line, self._now)
        passed, self._looked = time.monotonic() - self._looked, time.monotonic()
        self._now += min(passed, MOST_PAUSE)
        if self._now - self._renewed > HEARTBEAT_SECONDS:
            self._renewed = self._now
            self._attempt.heartbeat()
        if self._readings.warned:
            # Slurm's warning before the time limit goes to the job's steps, and not to this
            # process, which is the only one that can act on it now.
            self._signals.received.append(signal.SIGUSR1)
        if len(self._signals.received) > self._received:
            raise Interrupted

    def _all_over(self) -> bool:
        lost = self._readings.not_launched
        processes = [each for each in self._readings.processes.values() if each.node not in lost]
        # With --no-kill a step goes on without a node that dies.
        count = self._count - len(lost) * self._expected.per_node
        return len(processes) >= count and all(process.is_over for process in processes)

    def _none_works(self) -> bool:
        """Return True if there is nothing to wait for any more."""
        processes = self._readings.processes.values()
        working = (
            process.is_loading or (process.works(self._now) and not process.is_over)
            for process in processes
        )
        return bool(processes) and not any(working)

    # ---- rounds of adding up ---------------------------------------------------------------------
    def _together(self, nodes: Sequence[str]) -> None:
        """Have the processes add up numbers: on each node, then on all."""
        per_node = self._expected.per_node
        ready = self._readings.ready_nodes(nodes, per_node, self._now)
        if per_node > 1:
            self._round("node", [self._ranks([node]) for node in ready], 2)
            ready = [node for node in ready if self._added_up(node)]
        if len(ready) > 1:
            self._round("all", [self._ranks(ready)], 1)

    def _round(self, name: str, groups: Sequence[Sequence[int]], share: int) -> None:
        """Have groups of processes add up numbers, all groups at the same time.

        Args:
            name: The round's name.
            groups: The ranks of each group.
            share: The round may take one part in so many of the time that is left.
        """
        seconds = (self._limit - self._now) / share
        if self._step is None or not groups or seconds <= 0:
            return
        asked = []
        for ranks in groups:
            ready = self._readings.processes[ranks[0]].found["ready"]
            asked.append([list(ranks), ready["address"], ready["port"]])
        self._step.tell({"round": name, "seconds": round(seconds, 1), "groups": asked})

        def is_done() -> bool:
            members = [[self._readings.processes[rank] for rank in ranks] for ranks in groups]
            return all(
                all(f"round {name}" in process.found for process in group)
                or any(map(self._is_lost, group))
                for group in members
            )

        # The members give up after the seconds; the rest is for those that were stopped to be
        # silent for long enough.
        self._wait(is_done, min(self._now + seconds + SILENT_SECONDS, self._limit))

    def _ranks(self, nodes: Sequence[str]) -> list[int]:
        return [process.rank for process in self._processes(nodes)]

    def _processes(self, nodes: Sequence[str]) -> list[Process]:
        return [process for node in nodes for process in self._readings.on(node)]

    def _is_lost(self, process: Process) -> bool:
        """Return True for a process that has ended, or was silent for too long."""
        return bool(process.ended) or process.is_silent(self._now)

    def _added_up(self, node: str) -> bool:
        """Return True if all processes of a node could add up numbers."""
        found = [each.found.get("round node") for each in self._processes([node])]
        return all(result is not None and "error" not in result for result in found)


class _Step:
    """The processes of a check, as a step of the job."""

    def __init__(self, words: Sequence[str], job_id: str, name: str, log: Path) -> None:
        """Start srun.

        Args:
            words: Its command line.
            job_id: The job this process runs in.
            name: The step's name.
            log: The file to append the output to, but for signs of life.

        Raises:
            ConfigError: srun cannot be started.
        """
        self._job_id, self._name = job_id, name
        try:
            with signals_blocked():
                self._srun = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            raise ConfigError(
                f"{words[0]}: cannot be started on this node ({error.strerror})"
            ) from None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._copy, args=(log,), daemon=True)
        self._reader.start()

    def runs(self) -> bool:
        """Return True until srun has ended and all its output has been taken."""
        return self._srun.poll() is None or self._reader.is_alive() or not self._lines.empty()

    def lines(self) -> list[str]:
        """Return the lines that have come since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._lines.get_nowait())
        return found

    def tell(self, content: dict[str, object]) -> None:
        """Send a line to every process."""
        stdin: IO[bytes] | None = self._srun.stdin
        assert stdin is not None
        # OSError: srun has just ended, which the next look at it finds.
        with contextlib.suppress(OSError):
            stdin.write(json.dumps(content).encode() + b"\n")
            stdin.flush()

    def end(self) -> None:
        """Tell the processes to end, and kill those that do not."""
        if self._srun.stdin is not None:
            with contextlib.suppress(OSError):
                self._srun.stdin.close()
        try:
            self._srun.wait(QUIT_SECONDS)
        except subprocess.TimeoutExpired:
            slurm.end_step(self._srun, self._job_id, self._name, KILL_SECONDS)
        self._reader.join(KILL_SECONDS)

    def _copy(self, log: Path) -> None:
        """Pass srun's output on, and keep what is not a sign of life."""
        output = self._srun.stdout
        assert output is not None
        with output, contextlib.ExitStack() as stack:
            file = None
            with contextlib.suppress(OSError):
                file = stack.enter_context(open(log, "ab"))
            for line in output:
                self._lines.put(line.decode(errors="replace").rstrip("\n"))
                if file is not None and b'{"stage": "alive"' not in line:
                    # A full disk must not end this thread, which keeps srun going.
                    with contextlib.suppress(OSError):
                        file.write(line)
                        file.flush()


LEAST_BYTES = 4
"""Bytes that a rank needs per parameter it holds at the very least: a weight and a gradient."""


def check_nodes(
    launch: LaunchRecord,
    config: RunConfig,
    nodes: Sequence[str],
    attempt: Attempt,
    job_id: str,
    signals: Signals,
) -> dict[str, str]:
    """Run `pretrain preflight` on every node of the job, and return the nodes that must not train.

    It takes at most recovery.preflight_seconds, renews the attempt's lease meanwhile, and ends at
    once when this process gets a signal. What it finds is printed, and kept in the attempt's
    preflight.json.

    Args:
        launch: How the run starts its ranks.
        config: The run's config. With recovery.preflight_seconds = 0 nothing is checked.
        nodes: The nodes to check: those that will train and the spares.
        attempt: The attempt, which this process has begun.
        job_id: The job this process runs in.
        signals: The signals that this process receives.

    Returns:
        The causes by node. A node that is only odd, as a slow one, is none of them.

    Raises:
        ConfigError: The ranks could start on none of the nodes, and the cause is the run's: the
            container, the directory, torch. No node is to blame.
        NoSpace: No checkpoint fits on the disk.
        RunFailed: The run's directory cannot be written to.
    """
    if not config.recovery.preflight_seconds:
        return {}
    began = time.monotonic()
    paths = RunPaths(attempt.run)
    checkpoint = checkpoint_bytes(config)
    _check_room(paths.checkpoints, checkpoint)
    token = attempt.directory / f".preflight-{secrets.token_hex(8)}"
    with writing(token):
        token.touch()
    gpus = launch.site.get("gpus_per_node", 0)
    stages = range(config.parallel.pipeline_model_parallel_size)
    per_node = launch.num_tasks // launch.nodes
    expected = Expected(
        nodes=tuple(nodes),
        per_node=per_node,
        gpus=per_node if gpus else 0,
        python=launch.python,
        directory=str(attempt.run),
        memory=LEAST_BYTES * max(num_parameters_of_rank(config, stage) for stage in stages),
    )
    command = [launch.python, "-m", "pretrain", "preflight", str(token)]
    command += ["--precision", config.train.precision]
    check = Check(
        lambda *step: [*slurm.check_step(launch.command, *step), *command],
        expected,
        config.recovery.preflight_seconds,
        attempt,
        job_id,
        signals,
    )
    try:
        diagnosis = check.run()
    except Interrupted:
        return {}
    finally:
        check.end()
        # A process that was killed may have left its own file.
        for left in attempt.directory.glob(f"{token.name}*"):
            with contextlib.suppress(OSError):
                left.unlink()
    free = free_bytes(paths.checkpoints)
    if free is not None and free < 2 * checkpoint:
        diagnosis.warnings.append(
            f"{paths.checkpoints}: {in_bytes(free)} are free, less than two checkpoints take"
        )
    _record(attempt, expected, diagnosis, time.monotonic() - began)
    if diagnosis.refusal:
        raise (NoSpace if diagnosis.is_full else ConfigError)(f"preflight: {diagnosis.refusal}")
    return diagnosis.faults


def _check_room(checkpoints: Path, needed: int) -> None:
    """Raise NoSpace when not even one checkpoint fits."""
    free, left = free_bytes(checkpoints), 0
    # The next attempt removes what unfinished saves have left, under hidden names.
    for path in checkpoints.glob(".*/**/*"):
        with contextlib.suppress(OSError):
            left += path.stat().st_size
    if free is not None and free + left < needed:
        check_room(checkpoints, needed)


def _record(attempt: Attempt, expected: Expected, diagnosis: Diagnosis, seconds: float) -> None:
    """Print what was found and write the attempt's preflight.json."""
    lines = [
        *(f"{node}: {cause}; not used" for node, cause in diagnosis.faults.items()),
        *diagnosis.warnings,
    ]
    for line in lines:
        say(f"preflight: {line}")
    fit = len(expected.nodes) - len(diagnosis.faults)
    if not diagnosis.refusal:
        say(f"preflight: {fit} of {len(expected.nodes)} nodes are fit, in {seconds:.1f} s")
    record = Preflight(
        at=time.time(),
        seconds=round(seconds, 3),
        nodes=expected.nodes,
        faults=diagnosis.faults,
        warnings=tuple(diagnosis.warnings),
        refusal=diagnosis.refusal,
    )
    # On a full disk the printed lines have to do.
    with contextlib.suppress(OSError):
        replace_json(attempt.directory / PREFLIGHT, dataclasses.asdict(record))

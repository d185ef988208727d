"""Judge what the processes of a preflight have said: which nodes must not train, and why.

Only what is sure to be a node's own fault excludes it, because a preflight must not stop a run that
could train. A fault that all nodes have in common excludes none of them; what is only slow is a
warning.
"""

from __future__ import annotations

import errno
import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pretrain.config.architectures import is_supported, not_supported
from pretrain.rundir.files import Json, from_json, parse_json

# ---- Keep what the processes of a preflight say, line by line, as srun passes it on ----


LABELLED = re.compile(r"\s*(?P<rank>\d+): (?P<text>.*)")
"""A line of a process, with the number that `srun --label` puts before it."""
ENDED = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>\d+(?:[,-]\d+)*): (?P<how>.*)")
"""The words of srun for processes that ended badly: "srun: error: n2: tasks 2-3: Killed"."""
NOT_LAUNCHED = re.compile(
    r"srun: error: (?:Task launch for \S+ failed on node (?P<silent>\S+): (?P<why>.*)"
    r"|Node failure on (?P<failed>\S+))"
)
"""The words of srun for a node whose slurmd does not start its processes, or that died."""
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
    at: float
    """Unix seconds by the node's clock."""
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
        self.offsets: dict[str, float] = {}
        """By how many seconds the clock of a node is behind this one's, and a little more: the
        least difference between the time of a line and its arrival."""
        self.warned = False
        """Slurm has sent the processes SIGUSR1, its warning before the time limit."""

    def take(self, line: str, now: float, time: float) -> None:
        """Take a line of srun's output.

        Args:
            line: The line.
            now: The present time of the clock by which silence is measured.
            time: The present time in unix seconds.
        """
        if labelled := LABELLED.fullmatch(line):
            rank = int(labelled["rank"])
            process = self.processes.setdefault(rank, Process(rank, said_at=now, worked_at=now))
            process.said_at = now
            content = parse_json(labelled["text"])
            if said := from_json(Said, content):
                self._take_reading(process, said, content, now, time)
            elif labelled["text"].strip():
                process.words = labelled["text"].strip()
        elif ended := ENDED.fullmatch(line):
            for rank in _numbers(ended["ranks"]):
                process = self.processes.setdefault(rank, Process(rank, said_at=now, worked_at=now))
                process.ended = ended["how"]
                # srun may report several nodes in one line, as n[1-2].
                if not set("[,") & set(ended["node"]):
                    process.node = ended["node"]
        elif failed := NOT_LAUNCHED.fullmatch(line):
            self.not_launched[failed["silent"] or failed["failed"]] = failed["why"] or "it died"

    def _take_reading(
        self, process: Process, said: Said, content: Json, now: float, time: float
    ) -> None:
        """Take a line of JSON that a process printed."""
        process.node = process.node or said.node
        offset = time - said.at
        self.offsets[process.node] = min(offset, self.offsets.get(process.node, offset))
        self.warned = self.warned or said.warned
        if said.stage != "alive":
            process.found[said.stage], process.worked_at = content, now
            process.during = _NEXT.get(said.stage, "waiting")
            return
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


SKEW_SECONDS = 5.0
"""A clock that differs by more is worth a warning. Leases do not depend on it, times in logs do."""
SLOW, TOO_SLOW = 2.0, 5.0
"""A node whose matrix product takes so many times as long as the others' is worth a warning; a GPU
is taken for broken."""
LEAST_NODES = 3
"""Nodes that it takes to say which one is slow, or which clock is wrong."""
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


Links = Mapping[tuple[str, str], str | None]
"""The nodes that added up numbers in pairs: None where it worked, else what went wrong."""


def diagnose(
    readings: Readings, expected: Expected, now: float, links: Links | None = None
) -> Diagnosis:
    """Return what follows from the readings of a preflight that is over.

    Args:
        readings: What the processes said.
        expected: What the run needs.
        now: The present time of the clock by which silence is measured.
        links: The pairs that were tried because not all nodes together could add up.
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
    _judge_clocks(readings, expected, diagnosis)
    _judge_links(links or {}, faults, diagnosis)
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
            by = f" by {found['users']}" if found.get("users") else " by another process"
            words = f"{_gib(total - free)} of the {_gib(total)} of {name} are in use{by}"
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
    # Too late may mean that the machine is slow. A node is blamed if others were much faster.
    fastest = min(
        (
            process.found["round node"]["seconds"]
            for process in readings.processes.values()
            if "seconds" in process.found.get("round node", {})
        ),
        default=None,
    )
    asked = max((float(found.get("limit", 0)) for found in results), default=0.0)
    much_faster = fastest is not None and fastest < asked / 3
    return Fault("node" if much_faster else "slow", words)


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


def _judge_clocks(readings: Readings, expected: Expected, diagnosis: Diagnosis) -> None:
    """Warn of clocks that differ from the others'."""
    offsets = {node: readings.offsets[node] for node in expected.nodes if node in readings.offsets}
    if len(offsets) < LEAST_NODES:
        # Two clocks do not show which of them is wrong, so both are compared with this process's.
        middle = 0.0
    else:
        middle = statistics.median(offsets.values())
    for node, offset in offsets.items():
        if abs(offset - middle) > SKEW_SECONDS:
            way = "behind" if offset > middle else "ahead of"
            diagnosis.warnings.append(
                f"{node}: its clock is {abs(offset - middle):.0f} s {way} the others', so times in "
                "logs and metrics are wrong"
            )


def _judge_links(links: Links, faults: dict[str, Fault], diagnosis: Diagnosis) -> None:
    """Blame the nodes that could add up numbers with none of their neighbours."""
    known = {link: error for link, error in links.items() if not set(link) & faults.keys()}
    nodes = {node for link in known for node in link}
    for node in sorted(nodes):
        own = {link: error for link, error in known.items() if node in link}
        if len(own) > 1 and None not in own.values():
            others = ", ".join(sorted({name for link in own for name in link} - {node}))
            error = next(filter(None, own.values()))
            faults.setdefault(node, Fault("link", f"it reaches none of {others} ({error})"))
    for link, failure in known.items():
        if failure and not set(link) & faults.keys():
            diagnosis.warnings.append(f"{link[0]} and {link[1]}: cannot add up numbers ({failure})")


def _judge_all(readings: Readings, faults: dict[str, Fault], diagnosis: Diagnosis) -> None:
    """Warn where all nodes together could not add up numbers and no node is known for the cause."""
    results = [process.found.get("round all", {}) for process in readings.processes.values()]
    error = next((found["error"] for found in results if "error" in found), None)
    if error and not faults:
        diagnosis.warnings.append(f"the nodes cannot add up numbers all together ({error})")


def ring(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return pairs of neighbours in a ring, in rounds in which every node has at most one pair."""
    if len(nodes) < LEAST_NODES:
        return [[(nodes[0], nodes[1])]] if len(nodes) == 2 else []
    pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    even = len(nodes) % 2 == 0
    rounds = [pairs[0 : len(nodes) - 1 : 2], pairs[1 : len(nodes) - (0 if even else 1) : 2]]
    return rounds if even else [*rounds, [pairs[-1]]]


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"

"""Keep what the processes of a preflight say, line by line, as srun passes it on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pretrain.rundir.files import Json, from_json, parse_json

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

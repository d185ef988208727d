"""Check the nodes of a Slurm job before its ranks start, and tell which of them must not train.

`pretrain preflight` runs as one job step on all nodes, a process for each rank. The processes say
on stdout what they find, and this side says on stdin who shall add up numbers with whom. So the
check needs no shared directory, which may be what is broken, and no process that is broken can hold
up the others: it is left out of the next group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from pretrain.config import ConfigError, NoSpace, RunConfig, free_bytes, in_bytes, writing
from pretrain.config.run import num_parameters, num_parameters_of_rank
from pretrain.launcher import slurm
from pretrain.launcher.node.diagnosis import (
    SILENT_SECONDS,
    Diagnosis,
    Expected,
    Links,
    Process,
    Readings,
    diagnose,
    ring,
)
from pretrain.launcher.node.signals import Signals, signals_blocked
from pretrain.launcher.node.srun import end_step
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import PREFLIGHT, Preflight
from pretrain.rundir.checkpoints import check_room
from pretrain.rundir.files import replace_json
from pretrain.rundir.jobs import LaunchRecord
from pretrain.rundir.lock import HEARTBEAT_SECONDS, Attempt
from pretrain.rundir.paths import RunPaths

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
        links = self._together(nodes)
        diagnosis = diagnose(self._readings, self._expected, self._now, links)
        if not self._readings.processes and not diagnosis.faults:
            said = next((line for line in reversed(self._output) if line), "srun said nothing")
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
            self._readings.take(line, self._now, time.time())
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
    def _together(self, nodes: Sequence[str]) -> Links:
        """Have the processes add up numbers: on each node, then on all, then if need be in pairs.

        Returns:
            How it went in pairs; nothing when there was no need for them.
        """
        per_node = self._expected.per_node
        ready = self._readings.ready_nodes(nodes, per_node, self._now)
        if per_node > 1:
            self._round("node", [self._ranks([node]) for node in ready], 3)
            ready = [node for node in ready if self._failure("node", [node]) is None]
        if len(ready) < 2:
            return {}
        self._round("all", [self._ranks(ready)], 2)
        everyone = self._processes(ready)
        if self._failure("all", ready) is None or any(map(self._is_lost, everyone)):
            return {}
        links: dict[tuple[str, str], str | None] = {}
        rounds = ring(ready)
        for number, pairs in enumerate(rounds):
            name = f"pairs-{number + 1}"
            # The first process of each node: it is the way between the nodes that is in doubt.
            firsts = [[self._ranks([node])[0] for node in pair] for pair in pairs]
            self._round(name, firsts, len(rounds) - number + 1)
            for pair, ranks in zip(pairs, firsts, strict=True):
                found = [self._readings.processes[rank].found for rank in ranks]
                results = [each[f"round {name}"] for each in found if f"round {name}" in each]
                errors = [str(result["error"]) for result in results if "error" in result]
                if errors or len(results) == len(ranks):
                    links[pair] = errors[0] if errors else None
        return links

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

    def _failure(self, name: str, nodes: Sequence[str]) -> str | None:
        """Return why a process of these nodes did not add up in a round; None if all did."""
        for process in self._processes(nodes):
            found = process.found.get(f"round {name}", {"error": "no answer"})
            if "error" in found:
                return str(found["error"])
        return None


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
            end_step(self._srun, self._job_id, self._name, KILL_SECONDS)
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


MOST_LINES = 20
"""Lines that are printed; the attempt's preflight.json has all."""
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
    checkpoint = config.state_bytes * num_parameters(config)
    _check_room(paths.checkpoints, checkpoint)
    token = attempt.directory / f".preflight-{secrets.token_hex(8)}"
    with writing(token):
        token.touch()
    gpus = launch.site.get("gpus_per_node", 0)
    per_node = launch.num_tasks // launch.nodes
    expected = Expected(
        nodes=tuple(nodes),
        per_node=per_node,
        gpus=per_node if gpus else 0,
        python=launch.python,
        directory=str(attempt.run),
        memory=LEAST_BYTES * max(_parameters_of_ranks(config)),
    )
    command = [launch.python, "-m", "pretrain", "preflight", str(token)]
    command += ["--precision", config.train.precision]
    check = Check(
        _step(launch.command, command),
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


def _parameters_of_ranks(config: RunConfig) -> list[int]:
    stages = config.parallel.pipeline_model_parallel_size
    return [num_parameters_of_rank(config, stage) for stage in range(stages)]


def _step(step: Sequence[str], command: Sequence[str]) -> StepWords:
    """Return a function that makes srun's command line from the step's name, nodes and tasks."""
    # What comes after --label may be the container's. Of an option given twice, srun takes the
    # last.
    end = list(step).index("--label") + 1 if "--label" in step else len(step)

    def words(name: str, nodes: Sequence[str], num_tasks: int) -> list[str]:
        """Return srun's command line for a step of this name, on these nodes."""
        return [
            *step[:end],
            "--label",
            f"--job-name={name}",
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            f"--ntasks={num_tasks}",
            "--distribution=block",
            # A process that fails does not end the others, which have findings of their own.
            "--kill-on-bad-exit=0",
            "--wait=0",
            # What is left of it on a broken node must not keep the ranks from starting.
            "--overlap",
            "--input=all",
            *step[end:],
            *command,
        ]

    return words


def _record(attempt: Attempt, expected: Expected, diagnosis: Diagnosis, seconds: float) -> None:
    """Print what was found and write the attempt's preflight.json."""
    lines = [
        *(f"{node}: {cause}; not used" for node, cause in diagnosis.faults.items()),
        *diagnosis.warnings,
    ]
    for line in lines[:MOST_LINES]:
        say(f"preflight: {line}")
    if len(lines) > MOST_LINES:
        say(f"preflight: and {len(lines) - MOST_LINES} more; see {attempt.directory / PREFLIGHT}")
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

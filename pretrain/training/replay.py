"""Replay steps after a failed check, to tell a fault of a machine from a fault of the data.

Runs repeat bit for bit, so the same steps on the same data give the same numbers. If a check fails
(`config.Unsound`, or a spike), all ranks go back to the last proven state in this process and take
the steps again in the ordinary way, with their logs, evaluations and saves. Each rank compares its
own numbers of every step with those of the first time. Three results are possible:

- The failure does not happen again. It was transient; the run continues from the replayed steps.
- It happens again, after equal numbers on every rank. It reproduces, and comes from the data, the
  settings or the code; or from a single rank, if only that rank was wrong.
- The same rank differs in two replays. The fault is persistent; the run ends, and the launcher
  excludes the rank's host.

A state is proven when the run has saved another one after it, because the steps between have passed
the checks. So the run goes back to a state before its newest checkpoint, which is set aside and
saved again.

Megatron-LM's rerun_state_machine.py repeats the last forward and backward pass, whose inputs it
keeps, and needs another GPU to tell a persistent fault from a correct result. It cannot see faults
of the optimizer's state or of an earlier step, and its error injector changes the outcome of a
comparison, not a number.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from pretrain import platform
from pretrain.checkpoint.load import load_checkpoint, load_initial
from pretrain.checkpoint.manifest import Origin, TrainerState, open_checkpoint
from pretrain.config import (
    ConfigError,
    Diverged,
    MemoryChanged,
    RunFailed,
    Unsound,
    writing,
)
from pretrain.config.errors import say
from pretrain.optim.health import Resting
from pretrain.rundir.attempts import Cause, Diagnosis
from pretrain.rundir.checkpoints import Branch, Lineage, new_id, read_lineage, saved_checkpoints
from pretrain.rundir.history import settle
from pretrain.topology import Topology, gather, host_name, on_main
from pretrain.training.start import Run
from pretrain.training.step import Hook, Spike

NAMES = ("norm", "loss", "own loss", "own gradient", "own memory")
"""The numbers of a step that are compared, in the order in which `Ledger.note` takes them."""
JUMP = 1e3
"""A norm this many times above all norms since the start of the process is replayed, whatever the
policy. Spikes of published runs reach some hundred times the norm before them."""
MOST_NAMED = 8
"""The most ranks that a message names; it only counts the others."""
MOST_REPLAYS = 2
"""A failure counts as reproduced if the check has failed in this many replays."""


@dataclass(frozen=True)
class Point:
    """A state that a run can go back to."""

    path: Path | None
    """Its checkpoint; None for the initial state, which follows from run.seed."""
    state: TrainerState
    origin: Origin
    """What the next save after this state records about its origin."""
    scaler_fields: dict[str, float] | None = None
    """With fp16, for the initial state: the loss scaler's fields."""
    largest: Tensor | None = None
    """The `health.largest_magnitudes` of this state."""


@dataclass
class Replay:
    """A replay in progress."""

    until: int
    """The step whose check had failed."""
    trouble: Spike | Unsound
    number: int
    """1 for the first replay of a failure."""
    first: tuple[int, frozenset[str]] | None = None
    """The first step whose numbers differed on this rank, and which of NAMES."""
    jumped_to: float | None = None
    """The norm of step `until` in this replay, if it jumps again; then the norm is accepted."""


class Unsteady(Unsound):
    """Ranks have computed a step twice, with different numbers the second time."""


class Ledger:
    """This rank's numbers since the last proven state, and the last two states to go back to."""

    def __init__(self, point: Point, resting: Resting | None, repeat_interval: int | None) -> None:
        """Begin at a state.

        Args:
            point: The state.
            resting: Checks the memory; None if nothing is to be replayed.
            repeat_interval: One of this many steps is computed twice; 0 to compute only steps of a
                replay twice, None to compute no step twice.
        """
        self.points, self.resting = [point], resting
        self._repeat_interval = repeat_interval
        self.largest = point.largest
        """The `health.largest_magnitudes` from the last health check."""
        self.replay: Replay | None = None
        self.most = 0.0
        """The largest gradient norm so far that was not taken for a fault."""
        self.last = point.state.step
        """The last step whose numbers have been read."""
        self.blamed: Counter[int] = Counter()
        """By rank, in how many replays it was the only rank that differed first."""
        self.unsteady: tuple[int, ...] = ()
        """The ranks on which a replay has shown that a step computed twice differs."""
        self._numbers: dict[int, list[bytes | None]] = {}

    @property
    def proven(self) -> Point:
        """Return the last proven state, or the one that this process began with."""
        return self.points[0]

    @property
    def largest_proven(self) -> Tensor | None:
        """Return the magnitudes by which the next state is judged.

        Moments begin at 0, by which nothing can be judged; for these, the newest save counts.
        """
        proven, newest = self.proven.largest, self.points[-1].largest
        if proven is None or newest is None:
            return proven
        return torch.where(proven > 0, proven, newest)

    def note(self, step: int, numbers: Sequence[float | None]) -> None:
        """Record a step's numbers, and compare them with those of the previous time.

        None stands for a number that was not measured; it is never reported as different.
        """
        seen = [None if number is None else struct.pack("d", number) for number in numbers]
        pairs = zip(NAMES, seen, self._numbers.get(step, ()), strict=False)
        odd = frozenset(name for name, *both in pairs if None not in both and both[0] != both[1])
        if self.replay and not self.replay.first and odd:
            self.replay.first = step, odd
        self._numbers[step], self.last = seen, step

    def jumps(self, step: int, norm: float) -> bool:
        """Return True if a step must be replayed because of its norm, but not in its own replay."""
        if self.most and self.most * JUMP < norm < math.inf:
            if self.replay is None or self.replay.until != step:
                return True
            self.replay.jumped_to = norm
        self.most = max(self.most, norm if math.isfinite(norm) else 0.0)
        return False

    @property
    def can_repeat(self) -> bool:
        """Return True if steps can be computed twice, to see whether ranks repeat their bits."""
        return self._repeat_interval is not None

    def is_repeated(self, step: int) -> bool:
        """Return True if the step after `step` is computed twice, on all ranks alike.

        These are the first step of a replay, to see whether the ranks' kernels repeat their sums
        bit for bit, and one step of each interval, drawn by the interval's number.
        """
        if self.resting is None or self._repeat_interval is None or self.unsteady:
            return False
        if self.replay is not None and step == self.proven.state.step:
            return True
        interval = self._repeat_interval
        drawn = random.Random(step // interval).randrange(interval) if interval else None
        return drawn is not None and step % interval == drawn

    def differed(self, step: int, on_this_rank: bool) -> None:
        """Record that a step computed twice has differed. All ranks together.

        Raises:
            Unsteady: The step was not part of a replay.
        """
        everyone = gather(on_this_rank, bool)
        ranks = tuple(rank for rank, differs in enumerate(everyone) if differs)
        if self.replay is None:
            count = f"{len(ranks)} of {len(everyone)} ranks"
            raise Unsteady(f"step {step}, computed twice, differed on {count}", "", ranks)
        self.unsteady = ranks

    def saw(self, step: int, largest: Tensor) -> None:
        """Record the largest magnitudes of the state after a step."""
        self.largest, newest = largest, self.points[-1]
        if newest.state.step == step:
            self.points[-1] = replace(newest, largest=largest)

    def saved(self, point: Point) -> None:
        """Record a save, which proves the one before it."""
        self.points = [self.points[-1], replace(point, largest=self.largest)]
        proven = self.proven.state.step
        self._numbers = {step: seen for step, seen in self._numbers.items() if step > proven}

    def restart(self, point: Point) -> None:
        """Begin anew at a state, with no earlier numbers to compare."""
        self.points, self._numbers, self.replay = [point], {}, None
        self.take_memory(point.state.step)

    def take_memory(self, step: int) -> None:
        """Take checksums of the memory after a step."""
        if self.resting is not None:
            self.resting.take(step, in_replay=self.replay is not None)


class _Place(NamedTuple):
    """A rank's place and its result, to be shared with all ranks."""

    host: str
    device: str
    replica: int
    """Its data-parallel rank."""
    part: tuple[int, int]
    """Its pipeline and tensor rank."""
    first: tuple[int, frozenset[str]] | None


class _Findings(NamedTuple):
    """The differences that all ranks together have seen in a replay."""

    everyone: list[_Place]
    step: int | None
    """The first step whose numbers differed; None if all were equal."""
    ranks: list[int]
    """The ranks from which the difference may come."""
    unsteady: tuple[int, ...] = ()
    """As `Ledger.unsteady`."""


def _compare(topology: Topology, ledger: Ledger, replay: Replay) -> _Findings:
    """Gather from all ranks where the replay first differed. All ranks together."""
    first = replay.first
    device = f"{platform.device()} ({platform.device_name()})"
    part = topology.pipeline_rank, topology.tensor_rank
    everyone = gather(_Place(host_name(), device, topology.data_rank, part, first), _Place)
    step = min((place.first[0] for place in everyone if place.first), default=None)
    if ledger.unsteady:
        stages = {everyone[rank].part[0] for rank in ledger.unsteady}
        others = {rank for rank, place in enumerate(everyone) if place.part[0] in stages}
        # A single rank is suspect if its sums do not repeat, but those of others with the same
        # kernels do.
        is_odd = len(ledger.unsteady) == 1 < len(others)
        return _Findings(everyone, step, [*ledger.unsteady] * is_odd, ledger.unsteady)
    odd: dict[str, list[int]] = {name: [] for name in NAMES}
    for rank, place in enumerate(everyone):
        for name in place.first[1] if place.first and place.first[0] == step else ():
            odd[name].append(rank)
    if odd["own memory"]:
        return _Findings(everyone, step, odd["own memory"])
    # A loss comes from all ranks of a replica; a gradient has been summed over the ranks that hold
    # the same part of the model.
    replicas = {everyone[rank].replica for rank in odd["own loss"]}
    parts = {everyone[rank].part for rank in odd["own gradient"]}
    ranks = [
        rank
        for rank, place in enumerate(everyone)
        if (place.replica in replicas if replicas else place.part in parts)
    ]
    return _Findings(everyone, step, ranks)


def replay(run: Run, hooks: Sequence[Hook], trouble: Spike | Unsound) -> bool:
    """Go back to the last proven state, unless a replay failed in the same way. All ranks together.

    Args:
        run: The run.
        hooks: The run's hooks.
        trouble: The failed check, the same on every rank.

    Returns:
        False if nothing is to be replayed, or if a spike has happened again.

    Raises:
        Unsound: The failure has happened again.
        RunFailed: It comes from the same rank repeatedly, or the state cannot be loaded.
    """
    ledger = run.ledger
    if ledger is None or ledger.resting is None:
        return False
    before, number = ledger.replay, 1
    if before is not None:
        found, number = _compare(run.topology, ledger, before), before.number + 1
        ledger.replay = None
        is_same = found.step is None and ledger.last == before.until
        if is_same and len(trouble.ranks) == 1 and isinstance(trouble, Diverged | MemoryChanged):
            _end_persistent(run, found, trouble.ranks[0], trouble.seen)
        if not is_same:
            _blame(run, found, trouble.seen, trouble.ranks)
        if is_same or number > MOST_REPLAYS:
            _reproduced(run, found, trouble)
            return False
    steps = ledger.last - ledger.proven.state.step
    place = ledger.proven.path or "the initial state"
    if run.topology.is_main:
        say(
            f"{trouble.seen}: replaying {steps} step{'s' * (steps != 1)} with the same data from "
            f"{place}, to find out why"
        )
    _go_back(run, hooks, trouble.seen)
    ledger.replay = Replay(ledger.last, trouble, number)
    ledger.take_memory(ledger.proven.state.step)
    return True


class ReplayHook(Hook):
    """Conclude a replay that has passed the step whose check had failed."""

    def is_due(self, run: Run) -> bool:
        """Return True in a replay, so that every step is read before the next is queued."""
        return run.ledger is not None and run.ledger.replay is not None

    def between_steps(self, run: Run) -> None:
        """Report the result. All ranks together; RunFailed if the same rank differed before."""
        ledger = run.ledger
        if ledger is None or ledger.replay is None or run.state.step < ledger.replay.until:
            return
        done, ledger.replay = ledger.replay, None
        found, seen = _compare(run.topology, ledger, done), done.trouble.seen
        if done.jumped_to is None:
            _blame(run, found, seen, done.trouble.ranks)
        cause, ranks = Cause.REPRODUCES, list[int]()
        if done.jumped_to is not None:
            line = f"{seen}: it happens again with the same data, to a norm of {done.jumped_to:.4g}"
            if found.step is not None:
                since = f"numbers that differed from step {found.step} on"
                line = f"{line}, after {since} ({_whose(found, found.ranks)})"
            line = f"{line}. Training goes on"
        elif isinstance(done.trouble, Unsteady) and found.unsteady:
            line = f"{seen}: {_whose(found, [])}. Training goes on, and computes no step twice"
        else:
            cause, ranks = Cause.TRANSIENT, list(done.trouble.ranks) or found.ranks
            since = f", which differed from step {found.step} on" if found.step is not None else ""
            line = (
                f"{seen}: transient. It did not happen again with the same data{since}; "
                f"{_whose(found, ranks)}. Training goes on from the replayed step {run.state.step}"
            )
        _write(run, cause, done.until, found, ranks, line)
        if run.topology.is_main:
            say(line)


def _whose(found: _Findings, ranks: Sequence[int]) -> str:
    """Return in words from which ranks a difference may have come."""
    unsteady = not ranks and found.unsteady
    if not unsteady and (not ranks or len(ranks) == len(found.everyone) > 1):
        return "it cannot be told on which rank"
    places = [(r, found.everyone[r]) for r in ranks or found.unsteady]
    more = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    named = ", ".join(f"{r} ({at.host}, {at.device})" for r, at in places[:MOST_NAMED]) + more
    if unsteady:
        return (
            f"it cannot be told on which rank, since ranks {named} do not get the same bits when "
            "they compute a step twice, as with kernels that do not repeat their sums in one order"
        )
    return f"it came from rank {named}" if len(ranks) == 1 else f"it came from one of ranks {named}"


def _blame(run: Run, found: _Findings, seen: str, named: Sequence[int]) -> None:
    """Count a single rank that differed, and end the run if this is the second time.

    A rank also counts twice if it differed when it computed a step of the replay twice.
    """
    # Without other ranks to compare with, or if steps cannot be computed twice, the rank may just
    # sum in another order.
    is_known = len(found.everyone) > 1 and run.ledger is not None and run.ledger.can_repeat
    ranks = list(named) or found.ranks * is_known
    if len(ranks) == 1 and run.ledger is not None:
        run.ledger.blamed[ranks[0]] += 2 if found.unsteady and found.ranks == ranks else 1
        if run.ledger.blamed[ranks[0]] > 1:
            _end_persistent(run, found, ranks[0], seen)


def _end_persistent(run: Run, found: _Findings, rank: int, seen: str) -> NoReturn:
    """End the run because of one rank. All ranks together."""
    place, step = found.everyone[rank], run.ledger.last if run.ledger else run.state.step
    line = (
        f"{seen}: rank {rank} ({place.host}, {place.device}) computes or remembers other numbers "
        "than before with the same data, again and again. Leave its host out and test it; a Slurm "
        "job leaves it out by itself, a run on this host alone ends"
    )
    _write(run, Cause.PERSISTENT, step, found, [rank], line)
    raise RunFailed(line)


def _reproduced(run: Run, found: _Findings, trouble: Spike | Unsound) -> None:
    """Record that a failure has reproduced; raise it unless it is a spike. All ranks together."""
    config, ledger = run.config, run.ledger
    assert ledger is not None
    equal = "after equal numbers on every rank"
    if found.step is not None:
        equal = (
            f"in {MOST_REPLAYS} replays whose numbers differed from step {found.step} on: "
            f"{_whose(found, found.ranks)}"
        )
    line = f"{trouble.seen}: it happens again with the same data, {equal}"
    _write(run, Cause.REPRODUCES, ledger.last, found, [], line)
    if isinstance(trouble, Spike):
        return
    clip = config.optimizer.clip_grad
    smaller = f", or an optimizer.clip_grad below {clip:g}" if clip else ""
    advice = (
        "So it comes from the data, the settings or the code: try a lower optimizer.learning_rate "
        f"(now {config.optimizer.learning_rate:g}), a longer schedule.lr_warmup_steps{smaller}"
    )
    if isinstance(trouble, Diverged):
        advice = "So these ranks compute differently: compare their GPUs, drivers and packages"
    raise type(trouble)(line, advice, trouble.ranks)


def note_poisoned_start(run: Run, found: Unsound) -> None:
    """Record that the loaded state cannot be right, as it would be wrong after another load too."""
    _write(run, Cause.REPRODUCES, run.state.step, _Findings([], None, []), [], found.seen)


def _write(
    run: Run, cause: Cause, step: int, found: _Findings, ranks: Sequence[int], what: str
) -> None:
    """Write diagnosis.json. All ranks together; warn if it cannot be written."""
    ledger, attempt = run.ledger, run.reporter.attempt
    if attempt is None or ledger is None:
        return
    rank = ranks[0] if len(ranks) == 1 else None
    place = None if rank is None else found.everyone[rank]
    host, device = (None, None) if place is None else (place.host, place.device)
    diagnosis = Diagnosis(cause, step, rank, host, device, what, ledger.proven.state.step)
    try:
        diagnosis.write(attempt)
    except OSError as error:
        run.reporter.warn("diagnosis", f"{attempt}: diagnosis.json: {error.strerror}")


def _go_back(run: Run, hooks: Sequence[Hook], seen: str) -> None:
    """Load the last proven state into `run`, and set aside what was saved since.

    Raises:
        RunFailed: The state cannot be loaded, or the save in progress has failed.
    """
    ledger = run.ledger
    assert ledger is not None
    point = ledger.proven
    for hook in hooks:
        # Wait for a save in progress, because its checkpoint is set aside too.
        hook.newest_checkpoint(run)
    run.optimizer.wait_for_weights()
    branches = point.origin.branches
    lineage: Lineage | None = Lineage("", 0, None, branches)
    try:
        if point.path is None:
            load_initial(run.config, run.optimizer, point.scaler_fields)
        else:
            load_checkpoint(open_checkpoint(point.path), run.optimizer, run.config)
            lineage = read_lineage(point.path)
    except ConfigError as error:
        raise RunFailed(f"{seen}. {error}") from None
    assert lineage is not None
    where = point.path or run.config.directory

    def set_aside() -> tuple[Path | None, str]:
        for hook in hooks:
            hook.before_rollback(run)
        saved = saved_checkpoints(run.config.directory)
        why = {s.path.name: f"saved again ({seen})" for s in saved if s.step > point.state.step}
        with writing(run.config.directory):
            folder = settle(run.config.directory, where, lineage, why, run.reporter.attempt)
        return folder, new_id()

    folder, identifier = on_main(run.topology, set_aside, tuple[Path | None, str])
    run.state, run.origin = point.state, point.origin
    if folder is not None:
        # A new branch, so that saves from now on are not taken to follow those set aside.
        branch = Branch(identifier, point.state.step)
        run.origin = replace(point.origin, branches=(*branches, branch))
        if run.topology.is_main:
            since = f"after step {point.state.step}"
            say(f"{run.config.directory}: what was saved {since} is in {folder}")
    ledger.points = [replace(point, origin=run.origin)]
    if run.spikes is not None:
        run.spikes.load(point.state.spikes)
    for hook in hooks:
        hook.after_rollback(run)

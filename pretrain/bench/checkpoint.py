"""`pretrain bench checkpoint`: measure saves and loads beside torch's own and beside plain writes.

All contestants move the same tensors, and take turns, so that whatever else the machine does
affects all alike. Before each load the files are dropped from the page cache, as far as the
operating system agrees.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from pretrain import platform
from pretrain.bench.training import random_batches
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manifest import Origin, TrainerState, open_checkpoint
from pretrain.checkpoint.save import Saver
from pretrain.config import RunConfig, num_parameters
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.rundir.checkpoints import checkpoint_directory
from pretrain.rundir.lineage import Branch, new_id
from pretrain.topology import Topology, finish, on_main
from pretrain.topology import initialize as initialize_topology
from pretrain.training.step import forward_backward

OURS, TORCH, RAW = "pretrain", "torch.distributed.checkpoint", "plain files"


@dataclass
class _Bench:
    """The commands that are measured, and their times so far."""

    config: RunConfig
    topology: Topology
    optimizer: ZeroOptimizer
    directory: Path
    train_step: Callable[[], None]
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """("save" or "load" or another word, contestant) -> seconds, on the slowest rank."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that this rank saves, by names of its own."""
        rank = self.topology.rank
        return {
            f"{rank}/{kind}/{fragment.named.name}/{fragment.start}": flat
            for fragment in self.optimizer.state().fragments
            if not fragment.named.is_copy
            for kind, flat in fragment.tensors.items()
        }

    @contextmanager
    def timed(self, what: str, who: str) -> Iterator[None]:
        """Time a block from the moment all ranks begin to the moment all have ended."""
        dist.barrier()
        begin = time.perf_counter()
        yield
        dist.barrier()
        self.seconds.setdefault((what, who), []).append(time.perf_counter() - begin)

    def median(self, what: str, who: str) -> float:
        """Return the median of what was timed."""
        return statistics.median(self.seconds[what, who])


def bench_checkpoint(config: RunConfig, rounds: int, directory: Path) -> str:
    """Measure saves and loads and return a table. All ranks together.

    Args:
        config: The run; its data is not read and its directory is not written to.
        rounds: How often each contestant takes its turn; medians count.
        directory: Where to write; everything is removed again.
    """
    topology = initialize_topology(config)
    directory.mkdir(parents=True, exist_ok=True)
    place = on_main(topology, lambda: Path(tempfile.mkdtemp(prefix="bench-", dir=directory)))
    try:
        bench = _prepare(config, topology, place)
        size = _total_bytes(bench)
        for number in range(1, rounds + 1):
            _one_round(bench, number)
        table = _table(bench, size, rounds)
        if topology.is_main:
            print(table, flush=True)
        stalls = _stalls(bench, rounds)
        # Every rank is done with the files.
        dist.barrier()
    finally:
        if topology.is_main:
            shutil.rmtree(place, ignore_errors=True)
    if topology.is_main:
        print(stalls, flush=True)
    finish()
    return f"{table}\n{stalls}"


def _prepare(config: RunConfig, topology: Topology, place: Path) -> _Bench:
    """Build a model and take a step, so that Adam's state is not zeros."""
    run = config.run.model_copy(update={"directory": str(place / "run")})
    config = config.model_copy(update={"run": run})
    chunks = build_model(config)
    optimizer = ZeroOptimizer(config, topology, chunks)
    batches = random_batches(config, topology.layout.num_microbatches)

    def train_step() -> None:
        forward_backward(chunks, optimizer, next(batches))
        optimizer.reduce_gradients()
        optimizer.update(config.optimizer.learning_rate)
        optimizer.wait_for_weights()

    train_step()
    return _Bench(config, topology, optimizer, place, train_step)


def _one_round(bench: _Bench, number: int) -> None:
    """Let each contestant save and load once."""
    tensors = bench.tensors()
    ours, theirs, raw = (bench.directory / name for name in ("run", "dcp", "raw"))
    checkpoint = checkpoint_directory(ours, number)
    saver = _saver(bench, asynchronous=False)

    def save() -> None:
        saver.begin(TrainerState(number, 0), _origin())
        saver.finish()

    def load() -> None:
        load_checkpoint(open_checkpoint(checkpoint), bench.optimizer)

    rank = bench.topology.rank
    contestants: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        (OURS, save, load),
        (
            TORCH,
            lambda: state_dict_saver.save(tensors, checkpoint_id=theirs),
            lambda: state_dict_loader.load(tensors, checkpoint_id=theirs),
        ),
        (RAW, lambda: _write_raw(raw, rank, tensors), lambda: _read_raw(raw, rank, tensors)),
    ]
    # In each round another one begins.
    contestants = contestants[number % 3 :] + contestants[: number % 3]
    for who, write, _ in contestants:
        with bench.timed("save", who):
            write()
    saver.close()
    for place in (checkpoint, theirs, raw):
        _drop_from_cache(place)
    for who, _, read in contestants:
        with bench.timed("load", who):
            read()
    _clear(bench, (ours, theirs, raw))


def _stalls(bench: _Bench, rounds: int) -> str:
    """Measure how long training stands still in a save, and return lines about it."""
    saver = _saver(bench, asynchronous=True)
    for _ in range(3):
        with bench.timed("step", "alone"):
            bench.train_step()
    for number in range(rounds + 1):
        # The first save makes the memory for the copy, and starts the process.
        first = "first " if number == 0 else ""
        _one_stall(bench, saver, number + 1, first)
        _clear(bench, (bench.directory / "run",))
    saver.close()
    whole = bench.median("save", OURS)
    header = f"{'training stands still':<34}{'for':>10}{'of a save':>11}{'published after':>17}"
    lines = [header, f"{'asynchronous = false':<34}{whole:>8.3f} s{1:>11.1%}{whole:>15.3f} s"]
    for first in ("", "first "):
        stall, published = (bench.median(f"{first}{what}", OURS) for what in ("stall", "whole"))
        name = f"asynchronous = true{', the first save' if first else ''}"
        share = f"{stall / whole:>11.1%}"
        lines.append(f"{name:<34}{stall:>8.3f} s{share}{published:>15.3f} s")
    step = f"a step takes {bench.median('step', 'alone'):.3f} s alone, "
    step += f"{bench.median('step', 'first beside'):.3f} s while the state is copied"
    if ("step", "beside") in bench.seconds:
        step += f", {bench.median('step', 'beside'):.3f} s while it is written"
    return "\n".join([*lines, step])


def _one_stall(bench: _Bench, saver: Saver, number: int, first: str) -> None:
    """Save once beside training steps.

    Args:
        bench: The bench.
        saver: Saves beside training.
        number: The step that is saved.
        first: "first " for the first save, whose times count apart.
    """
    dist.barrier()
    begin = time.perf_counter()
    saver.begin(TrainerState(number, 0), _origin())
    stall = time.perf_counter() - begin
    waited, inner = [0.0], bench.optimizer.before_change

    def before_change() -> None:
        asked = time.perf_counter()
        inner()
        waited[0] += time.perf_counter() - asked

    bench.optimizer.before_change = before_change
    # At least one step, in which the copy of the state is waited for.
    with bench.timed("step", "first beside"):
        bench.train_step()
    while not on_main(bench.topology, lambda: saver.published_step is not None):
        if saver.has_problem:
            break
        if bench.topology.layout.world_size > 1:
            # Its publication waits for all ranks, which `finish` tells it of.
            break
        with bench.timed("step", "beside"):
            bench.train_step()
    published = time.perf_counter()
    saver.finish()
    end = time.perf_counter()
    stall += waited[0] + end - published
    bench.seconds.setdefault((f"{first}stall", OURS), []).append(stall)
    bench.seconds.setdefault((f"{first}whole", OURS), []).append(end - begin)


def _saver(bench: _Bench, asynchronous: bool) -> Saver:
    section = bench.config.checkpoint.model_copy(update={"asynchronous": asynchronous})
    config = bench.config.model_copy(update={"checkpoint": section})
    return Saver(config, bench.topology, bench.optimizer)


def _origin() -> Origin:
    return Origin(branches=(Branch(new_id(), 0),))


def _total_bytes(bench: _Bench) -> int:
    """Return the bytes of tensors that all ranks save together."""
    own = torch.tensor(
        sum(t.numel() * t.element_size() for t in bench.tensors().values()),
        device=platform.device(),
    )
    dist.all_reduce(own)
    return int(own)


def _write_raw(directory: Path, rank: int, tensors: dict[str, Tensor]) -> None:
    """Write tensors one after the other into a file, and flush it."""
    directory.mkdir(exist_ok=True)
    with open(directory / f"{rank}", "wb", buffering=0) as file:
        for tensor in tensors.values():
            view = tensor.detach().cpu().numpy().view(np.uint8).data
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _read_raw(directory: Path, rank: int, tensors: dict[str, Tensor]) -> None:
    """Read what `_write_raw` has written into the tensors."""
    with open(directory / f"{rank}", "rb", buffering=0) as file:
        for tensor in tensors.values():
            host = torch.empty(tensor.shape) if tensor.is_cuda else tensor.detach()
            view = host.numpy().view(np.uint8).data
            while view:
                view = view[file.readinto(view) or len(view) :]
            if tensor.is_cuda:
                tensor.copy_(host)


def _drop_from_cache(directory: Path) -> None:
    """Ask the operating system to forget what it holds of files that are on the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _clear(bench: _Bench, places: tuple[Path, ...]) -> None:
    """Remove what was written, outside of what is timed."""
    dist.barrier()
    if bench.topology.is_main:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
    dist.barrier()


def _table(bench: _Bench, size: int, rounds: int) -> str:
    """Return the lines about saves and loads.

    Args:
        bench: What was measured.
        size: Bytes of tensors.
        rounds: How often each contestant took its turn.
    """
    world = bench.topology.layout.world_size
    lines = [
        f"{num_parameters(bench.config):,} parameters, {size / 1e9:.2f} GB of state, "
        f"{world} x {platform.device_name()}; medians of {rounds} rounds",
        f"{'':<34}{'save':>10}{'':>14}{'load':>10}",
    ]
    for who in (OURS, TORCH, RAW):
        save, load = bench.median("save", who), bench.median("load", who)
        lines.append(
            f"{who:<34}{save:>8.3f} s{size / save / 1e9:>9.2f} GB/s{load:>8.3f} s"
            f"{size / load / 1e9:>9.2f} GB/s"
        )
    for other in (TORCH, RAW):
        ratios = [_ratio(bench, what, other) for what in ("save", "load")]
        lines.append(f"{f'time of {OURS} over {other}':<48}{ratios[0]:>8.2f}{ratios[1]:>12.2f}")
    return "\n".join(lines)


def _ratio(bench: _Bench, what: str, other: str) -> float:
    """Return the median of the ratios within a round, which changes of the machine disturb less."""
    pairs = zip(bench.seconds[what, OURS], bench.seconds[what, other])
    return statistics.median(a / b for a, b in pairs)

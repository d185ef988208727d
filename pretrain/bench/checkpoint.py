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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from pretrain import platform
from pretrain.bench.training import random_batches
from pretrain.bench.turns import Column, Measured, contest, table
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
SAVE, LOAD = "save_bytes_per_second", "load_bytes_per_second"


@dataclass
class _Bench:
    """What is saved and loaded."""

    config: RunConfig
    topology: Topology
    optimizer: ZeroOptimizer
    directory: Path
    train_step: Callable[[], None]

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that this rank saves, by names of its own."""
        rank = self.topology.rank
        return {
            f"{rank}/{kind}/{fragment.named.name}/{fragment.start}": flat
            for fragment in self.optimizer.state().fragments
            if not fragment.named.is_copy
            for kind, flat in fragment.tensors.items()
        }


def _seconds(action: Callable[[], object]) -> float:
    """Return the time from the moment all ranks begin to the moment all have ended."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


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
        turns = _contestants(bench)

        def one(number: int) -> Measured:
            save, load = turns[number]
            saved = _seconds(save)
            _drop_from_cache(place)
            loaded = _seconds(load)
            _clear(bench)
            return {SAVE: size / saved, LOAD: size / loaded}

        result = contest(
            [{"format": name} for name in (OURS, TORCH, RAW)],
            rounds,
            one,
            lambda t: f"{t[SAVE] / 1e9:.2f} GB/s saved, {t[LOAD] / 1e9:.2f} GB/s loaded",
            is_shown=topology.is_main,
        )
        lines = f"{_table(bench, result, size)}\n\n{_stalls(bench, rounds)}"
        # Every rank is done with the files.
        dist.barrier()
    finally:
        if topology.is_main:
            shutil.rmtree(place, ignore_errors=True)
    if topology.is_main:
        print(lines, flush=True)
    finish()
    return lines


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


def _contestants(bench: _Bench) -> list[tuple[Callable[[], object], Callable[[], object]]]:
    """Return what saves and what loads, of each contestant."""
    tensors, rank = bench.tensors(), bench.topology.rank
    theirs, raw = bench.directory / "dcp", bench.directory / "raw"

    saver = _saver(bench, asynchronous=False)

    def save() -> None:
        saver.begin(TrainerState(1, 0), _origin())
        saver.finish()

    def load() -> None:
        path = checkpoint_directory(bench.directory / "run", 1)
        load_checkpoint(open_checkpoint(path), bench.optimizer)

    return [
        (save, load),
        (
            lambda: state_dict_saver.save(tensors, checkpoint_id=theirs),
            lambda: state_dict_loader.load(tensors, checkpoint_id=theirs),
        ),
        (lambda: _write_raw(raw, rank, tensors), lambda: _read_raw(raw, rank, tensors)),
    ]


def _stalls(bench: _Bench, rounds: int) -> str:
    """Measure how long training stands still in a save, and return lines about it."""
    saver = _saver(bench, asynchronous=True)
    step = statistics.median(_seconds(bench.train_step) for _ in range(3))
    # The first save makes the memory for the copy, and starts the process.
    first, *later = (_one_stall(bench, saver, number) for number in range(1, rounds + 2))
    saver.close()
    lines = [
        f"training stands still for {stall:.3f} s in a save that takes {whole:.3f} s ({which}); "
        f"the step in which the state is copied takes {beside:.3f} s, one alone {step:.3f} s"
        for which, (stall, whole, beside) in (
            ("the first of a process", first),
            (f"median of {rounds} later ones", map(statistics.median, zip(*later))),
        )
    ]
    return "\n".join(lines)


def _one_stall(bench: _Bench, saver: Saver, number: int) -> tuple[float, float, float]:
    """Save once beside training steps.

    Args:
        bench: The bench.
        saver: Saves beside training.
        number: The step that is saved.

    Returns:
        The seconds for which training stood still, those until the checkpoint was published, and
        those of the step in which the state was copied.
    """
    dist.barrier()
    begin = time.perf_counter()
    saver.begin(TrainerState(number, 0), _origin())
    stall = time.perf_counter() - begin
    inner = bench.optimizer.before_change

    def before_change() -> None:
        nonlocal stall
        asked = time.perf_counter()
        inner()
        stall += time.perf_counter() - asked

    bench.optimizer.before_change = before_change
    # At least one step, in which the copy of the state is waited for.
    beside = _seconds(bench.train_step)
    # Of several ranks, the publication waits for all, which `finish` tells it of.
    while bench.topology.layout.world_size == 1 and saver.published_step is None:
        if saver.has_problem:
            break
        bench.train_step()
    published = time.perf_counter()
    saver.finish()
    end = time.perf_counter()
    bench.optimizer.before_change = inner
    _clear(bench)
    return stall + end - published, end - begin, beside


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


def _clear(bench: _Bench) -> None:
    """Remove what was written, outside of what is timed."""
    dist.barrier()
    if bench.topology.is_main:
        for place in bench.directory.iterdir():
            shutil.rmtree(place, ignore_errors=True)
    dist.barrier()


def _table(bench: _Bench, result: dict[str, Any], size: int) -> str:
    """Return saves and loads as a table, with ratios to plain files.

    Args:
        bench: The bench.
        result: What `contest` returned.
        size: Bytes of tensors.
    """
    world = bench.topology.layout.world_size
    plain = next((row for row in result["rows"] if row["format"] == RAW), None)
    return table(
        result,
        f"{num_parameters(bench.config):,} parameters, {size / 1e9:.2f} GB of state, "
        f"{world} x {platform.device_name()}; medians of {result['rounds']} rounds in turn; ratios "
        f"to {RAW}, with their range over the rounds",
        ["format"],
        [
            Column("saved", SAVE, "{:.2f} GB/s", 1e9, ratio=True),
            Column("loaded", LOAD, "{:.2f} GB/s", 1e9, ratio=True),
        ],
        lambda row: plain,
    )

"""The state of a run, from every rank's shards into one directory that names no layout."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from pretrain.checkpoint.boxes import BoxTensor, box_tensor
from pretrain.checkpoint.manifest import (
    CONFIG,
    FORMAT,
    MANIFEST,
    STATE,
    complete_checkpoints,
    describe,
    step_directory,
    write_json,
)
from pretrain.config import RunConfig, dump_config, writing
from pretrain.model.parameters import named_parameters
from pretrain.optim.fragments import adam_steps, fragments
from pretrain.optim.zero import ZeroOptimizer
from pretrain.topology import Topology


@dataclass(frozen=True)
class Progress:
    """How far a run is: the only state beside weights and Adam moments."""

    step: int
    consumed_samples: int


def save_checkpoint(
    config: RunConfig, topology: Topology, optimizer: ZeroOptimizer, progress: Progress
) -> Path:
    """Writes <run>/checkpoints/step-########, all ranks together; it appears under that name only when complete.

    Checkpoints beyond checkpoint.keep are removed afterwards, unless they still await an evaluation. Raises RunFailed
    when the disk refuses.
    """
    final = step_directory(config.directory, progress.step)
    partial = final.with_name(f".{final.name}.partial")
    with writing(final):
        if topology.is_main:
            recover(config.directory)
            for left_behind in final.parent.glob(".step-*"):  # by a save that was killed
                shutil.rmtree(left_behind)
            partial.mkdir(parents=True)
        dist.barrier()
        try:
            _save_tensors(optimizer_tensors(optimizer, for_saving=True), partial)
            written: list[Any] = [None] * topology.layout.world_size
            mine = {f.name: describe(f) for f in partial.glob(f"__{topology.rank}_*")}
            dist.all_gather_object(written, (mine, shapes(optimizer)))
            if topology.is_main:
                _publish(config, optimizer, progress, partial, final, written)
        except (OSError, KeyboardInterrupt):
            shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its room back
            raise
    dist.barrier()
    return final


def _save_tensors(tensors: dict[str, BoxTensor], directory: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(tensors, checkpoint_id=directory)
    except (
        CheckpointException
    ) as failure:  # raised on every rank when one could not write, and no Exception to Python
        rank, (error, _) = next(iter(failure.failures.items()))
        if isinstance(error, KeyboardInterrupt):
            raise error from None
        raise OSError(f"rank {rank}: {error}") from None


def optimizer_tensors(optimizer: ZeroOptimizer, for_saving: bool) -> dict[str, BoxTensor]:
    """ "master/<global name>", "exp_avg/...", "exp_avg_sq/..." -> this rank's boxes. Saving leaves out copies."""
    tensors = {}
    for fragment in fragments(optimizer):
        named = fragment.named
        if for_saving and named.is_copy:
            continue
        for key, flat in fragment.tensors.items():
            tensors[f"{key}/{named.name}"] = box_tensor(
                flat, fragment.start, named.shape, named.global_shape, named.offset
            )
    return tensors


def shapes(optimizer: ZeroOptimizer) -> dict[str, list[int]]:
    """Global names and shapes of this rank's parameters."""
    return {named.name: list(named.global_shape) for named in named_parameters(optimizer.chunks)}


def _publish(
    config, optimizer, progress: Progress, partial: Path, final: Path, written: list[Any]
) -> None:
    state = {
        "format": FORMAT,
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
        "adam_steps": adam_steps(optimizer),
        "loss_scaler": loss_scaler_state(optimizer),
        "shapes": {name: shape for _, part in written for name, shape in part.items()},
    }
    write_json(partial / STATE, state)
    (partial / CONFIG).write_text(dump_config(config))
    files = {name: entry for part, _ in written for name, entry in part.items()}
    files |= {name: describe(partial / name) for name in (STATE, CONFIG, ".metadata")}
    write_json(partial / MANIFEST, {"format": FORMAT, "files": files})
    _flush(partial)
    if final.exists():  # the same step again, after a resume from an earlier one
        old = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old)
    else:
        partial.rename(final)
    _flush(final.parent)
    if config.checkpoint.keep is not None:
        for old in _evaluated(
            config.directory, complete_checkpoints(config.directory)[: -config.checkpoint.keep]
        ):
            removed = old.rename(
                old.with_name(f".{old.name}.removed")
            )  # or, killed half-way, it would look complete
            shutil.rmtree(removed)


def recover(run: Path) -> None:
    """Shows a checkpoint again that a save of the same step, killed between its two renames, left hidden. One rank."""
    for old in (run / "checkpoints").glob(".step-*.replaced"):
        final = old.with_name(old.name[1:].removesuffix(".replaced"))
        if not final.exists():
            new = old.with_name(f".{final.name}.partial")
            (new if (new / MANIFEST).is_file() else old).rename(final)


def _evaluated(run: Path, checkpoints: list[Path]) -> list[Path]:
    """Without those that wait for the evaluation that the run's plan promises each (a later save removes them).

    A folder in evaluations/ appears whole: a result, or a note that the launcher gave the checkpoint up.
    """
    evaluations = run / "evaluations"
    if not (evaluations / "plan.json").exists():
        return checkpoints
    return [c for c in checkpoints if (evaluations / c.name).is_dir()]


def loss_scaler_state(optimizer: ZeroOptimizer) -> dict[str, float] | None:
    """fp16: the dynamic loss scale and where it stands; None otherwise."""
    if not optimizer.is_fp16:
        return None
    scaler = optimizer.zero.loss_scaler
    return {
        key: getattr(scaler, key)
        for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    }


def _flush(directory: Path) -> None:
    """A directory's names reach the disk before anyone relies on them."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Save a run: every rank writes its share of one directory, which names no parallel layout.

The tensors are fp32 master weights and Adam moments under their global names, written by torch's
distributed checkpoint (DCP) as N-dimensional boxes of global tensors. Any layout can load them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from pretrain.checkpoint.boxes import BoxTensor, box_tensor
from pretrain.checkpoint.manifest import (
    CONFIG,
    FORMAT,
    MANIFEST,
    STATE,
    TrainerState,
    complete_checkpoints,
    describe,
    step_directory,
    write_json,
)
from pretrain.config import RunConfig, dump_config, writing
from pretrain.optim.state import Fragment, adam_steps, loss_scaler_state
from pretrain.optim.zero import ZeroOptimizer
from pretrain.topology import Topology


def save_checkpoint(
    config: RunConfig, topology: Topology, optimizer: ZeroOptimizer, trainer_state: TrainerState
) -> Path:
    """Save a checkpoint in <run>/checkpoints/step-########. All ranks together.

    Everything is written to a hidden directory first, which is renamed when it is complete, so a
    checkpoint under its name is never a partial one. Checkpoints beyond checkpoint.keep are
    removed afterwards, except those that still wait for an evaluation.

    Args:
        config: The run; run.directory and [checkpoint].
        topology: The processes' layout.
        optimizer: The optimizer, whose masters stand for the weights.
        trainer_state: How far training has come.

    Returns:
        The checkpoint's directory.

    Raises:
        RunFailed: A file could not be written, on this or another rank.
    """
    final = step_directory(config.directory, trainer_state.step)
    partial = final.with_name(f".{final.name}.partial")
    with writing(final):
        if topology.is_main:
            # A save that was killed may have left this step's old checkpoint renamed: put that
            # back first, because all hidden directories are removed next.
            recover(config.directory)
            for left_behind in final.parent.glob(".step-*"):
                shutil.rmtree(left_behind)
            partial.mkdir(parents=True)
        # No rank may write before the directory is there.
        dist.barrier()
        try:
            tensors = box_tensors(optimizer.state().fragments, with_copies=False)
            _save_tensors(tensors, partial)
            # Each rank hashes its own files (DCP names them __<rank>_<number>.distcp), so hashing
            # is spread over the machines as writing was.
            own_files = {f.name: describe(f) for f in partial.glob(f"__{topology.rank}_*")}
            written: list[Any] = [None] * topology.layout.world_size
            dist.all_gather_object(written, (own_files, optimizer.shapes))
            if topology.is_main:
                _publish(config, optimizer, trainer_state, partial, final, written)
        except (OSError, KeyboardInterrupt):
            # A disk that is full gets its room back.
            shutil.rmtree(partial, ignore_errors=True)
            raise
    # No rank may go on, and end, before the checkpoint has its name.
    dist.barrier()
    return final


def box_tensors(fragments: Iterable[Fragment], with_copies: bool) -> dict[str, BoxTensor]:
    """Return the tensors of a checkpoint, each holding what this rank has of it.

    Args:
        fragments: This rank's optimizer state, as `ZeroOptimizer.state` gives it.
        with_copies: False to leave out parameters that another model-parallel rank holds too and
            saves (to save); True to include them, because each copy has to be filled (to load).

    Returns:
        "master/<global name>", "exp_avg/<global name>" and "exp_avg_sq/<global name>" -> boxes.
    """
    tensors = {}
    for fragment in fragments:
        named = fragment.named
        if named.is_copy and not with_copies:
            continue
        for key, flat in fragment.tensors.items():
            tensors[f"{key}/{named.name}"] = box_tensor(
                flat, fragment.start, named.shape, named.global_shape, named.offset
            )
    return tensors


def _save_tensors(tensors: dict[str, BoxTensor], directory: Path) -> None:
    """Write this rank's boxes. All ranks together; OSError on all when one of them cannot write."""
    try:
        state_dict_saver.save(tensors, checkpoint_id=directory)
    # DCP collects what its ranks raised and raises this on all of them. It is a BaseException, so
    # `except Exception` would miss it (torch/distributed/checkpoint/api.py).
    except CheckpointException as failure:
        rank, (error, _) = next(iter(failure.failures.items()))
        if isinstance(error, KeyboardInterrupt):
            raise error from None
        raise OSError(f"rank {rank}: {error}") from None


def _publish(
    config: RunConfig,
    optimizer: ZeroOptimizer,
    progress: TrainerState,
    partial: Path,
    final: Path,
    written: list[Any],
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


def _flush(directory: Path) -> None:
    """A directory's names reach the disk before anyone relies on them."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

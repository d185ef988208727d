"""Save a run: every rank writes its share of one directory, which names no parallel layout.

The tensors are fp32 master weights and Adam moments under their global names, written by torch's
distributed checkpoint (DCP) as N-dimensional boxes of global tensors. Any layout can load them.
"""

from __future__ import annotations

import dataclasses
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
    STATE,
    Origin,
    TrainerState,
    describe,
)
from pretrain.config import RunConfig, dump_config, writing
from pretrain.optim.state import Fragment, OptimizerState
from pretrain.optim.zero import ZeroOptimizer
from pretrain.rundir.checkpoints import (
    MANIFEST,
    begin_partial,
    checkpoint_directory,
    publish_checkpoint,
)
from pretrain.rundir.files import (
    flush_directory,
    replace_file,
    replace_json,
)
from pretrain.rundir.history import remove_old
from pretrain.rundir.lineage import new_id
from pretrain.rundir.retention import Policy
from pretrain.rundir.warn import WarnOnce
from pretrain.topology import Topology, on_main


def save_checkpoint(
    config: RunConfig,
    topology: Topology,
    optimizer: ZeroOptimizer,
    trainer_state: TrainerState,
    origin: Origin,
    attempt: Path | None = None,
    warn: WarnOnce | None = None,
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
        origin: Where its state comes from.
        attempt: RUN/attempts/#### that must still hold the run; rank 0's counts.
        warn: Takes what the disk refuses of the deletion of old checkpoints.

    Returns:
        The checkpoint's directory.

    Raises:
        RunFailed: A file could not be written, on this or another rank, or (Superseded) another
            attempt has taken the run.
    """
    final = checkpoint_directory(config.directory, trainer_state.step)

    def begin() -> Path:
        with writing(final):
            return begin_partial(config.directory, trainer_state.step, attempt)

    # No rank may write before the directory is there.
    partial = on_main(topology, begin)
    with writing(final):
        try:
            state = optimizer.state()
            _save_tensors(box_tensors(state.fragments, with_copies=False), partial)
            # Each rank hashes its own files (DCP names them __<rank>_<number>.distcp), so hashing
            # is spread over the machines as writing was.
            own_files = {f.name: describe(f) for f in partial.glob(f"__{topology.rank}_*")}
            written: list[Any] = [None] * topology.layout.world_size
            dist.all_gather_object(written, (own_files, optimizer.shapes))
            if topology.is_main:
                _publish(config, state, trainer_state, origin, partial, written)
                publish_checkpoint(partial, final, attempt)
                policy = config.checkpoint
                kept = Policy(policy.keep, policy.keep_every, policy.keep_best)
                remove_old(config.directory, final, kept, warn or WarnOnce())
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
        if isinstance(error, OSError) and error.errno is not None:
            # With its number, which tells a full disk from another refusal.
            raise OSError(error.errno, f"rank {rank}: {error.strerror}") from None
        raise OSError(f"rank {rank}: {error}") from None


def _publish(
    config: RunConfig,
    optimizer_state: OptimizerState,
    trainer_state: TrainerState,
    origin: Origin,
    partial: Path,
    written: list[Any],
) -> None:
    """Complete the checkpoint in `partial`, up to its name.

    Args:
        config: The run.
        optimizer_state: The optimizer's state, for its scalars.
        trainer_state: How far training has come.
        origin: Where its state comes from.
        partial: The hidden directory, in which all ranks have written their tensors.
        written: Of each rank, the manifest entries of its files and its parameters' shapes.
    """
    state = {
        "format": FORMAT,
        "step": trainer_state.step,
        "consumed_samples": trainer_state.consumed_samples,
        "adam_steps": optimizer_state.adam_steps,
        "loss_scaler": optimizer_state.loss_scaler_state,
        "data": origin.data,
        "changes": [dataclasses.asdict(change) for change in origin.changes],
        "shapes": {name: shape for _, part in written for name, shape in part.items()},
    }
    # Durable: a rename that survives a power cut must not publish files whose content did not.
    replace_json(partial / STATE, state, durable=True, indent=2)
    replace_file(partial / CONFIG, dump_config(config), durable=True)
    files = {name: entry for part, _ in written for name, entry in part.items()}
    files |= {name: describe(partial / name) for name in (STATE, CONFIG, ".metadata")}
    # Last, because a checkpoint with a manifest is complete.
    manifest = {
        "format": FORMAT,
        "id": new_id(),
        "parent": origin.parent,
        "branches": [dataclasses.asdict(branch) for branch in origin.branches],
        "step": trainer_state.step,
        "validation_loss_nats": origin.validation_loss_nats,
        "files": files,
    }
    replace_json(partial / MANIFEST, manifest, durable=True, indent=2)
    flush_directory(partial)

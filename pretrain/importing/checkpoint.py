"""Write a checkpoint from whole tensors in one process: a stand-in for checkpoint.save's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

from pretrain.checkpoint.manifest import Origin, TrainerState, describe
from pretrain.checkpoint.save import _publish
from pretrain.config import RunConfig
from pretrain.optim.state import OptimizerState
from pretrain.rundir.checkpoints import checkpoint_directory
from pretrain.rundir.files import partial_directory


def write_checkpoint(
    run: Path,
    config: RunConfig,
    tensors: Iterable[tuple[str, Tensor]],
    trainer_state: TrainerState,
    origin: Origin,
) -> Path:
    """Save masters, with moments of zero, in <run>/checkpoints/step-########.

    Args:
        run: The run's directory.
        config: What is saved as the checkpoint's config.
        tensors: Global name -> fp32 master.
        trainer_state: How far training has come.
        origin: Where the state comes from.

    Returns:
        The checkpoint's directory.
    """
    final = checkpoint_directory(run, trainer_state.step)
    partial = partial_directory(final)
    partial.mkdir(parents=True)
    masters = dict(tensors)
    state = {
        f"{key}/{name}": torch.zeros_like(tensor) if key != "master" else tensor
        for name, tensor in masters.items()
        for key in ("master", "exp_avg", "exp_avg_sq")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(state, checkpoint_id=partial, no_dist=True)
    files = {f.name: describe(f) for f in partial.glob("__*")}
    shapes = {name: list(tensor.shape) for name, tensor in masters.items()}
    _publish(
        config,
        OptimizerState([], 0, None),
        trainer_state,
        origin,
        partial,
        final,
        [(files, shapes)],
    )
    return final

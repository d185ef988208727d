"""A checkpoint, saved on any layout, into this one; or into full tensors on one process."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain.checkpoint.boxes import BoxTensor
from pretrain.checkpoint.manifest import read_state, verify_files
from pretrain.checkpoint.save import Progress, optimizer_tensors
from pretrain.config import ConfigError
from pretrain.model.parameters import named_parameters
from pretrain.optim.fragments import copy_masters_to_partitions, create_adam_state
from pretrain.optim.zero import ZeroOptimizer


def load_checkpoint(checkpoint: Path, optimizer: ZeroOptimizer) -> Progress:
    """Weights, Adam moments and progress into a freshly built optimizer. All ranks together.

    Raises ConfigError when a file is damaged or the model's shapes are not the checkpoint's; nothing is changed then.
    """
    state = _verified_state(checkpoint, optimizer.chunks)
    create_adam_state(optimizer, state["adam_steps"])
    _load(optimizer_tensors(optimizer, for_saving=False), checkpoint)
    if optimizer.stage == 3:
        copy_masters_to_partitions(optimizer)
    else:
        _load(_weights(optimizer.chunks), checkpoint)
    if optimizer.is_fp16 and state["loss_scaler"]:
        for key, value in state["loss_scaler"].items():
            setattr(optimizer.zero.loss_scaler, key, value)
    return Progress(state["step"], state["consumed_samples"])


def load_weights(checkpoint: Path, chunks: list[GPTModel]) -> Progress:
    """Weights alone, cast to the model's dtype, for evaluation. All ranks together; errors as `load_checkpoint`."""
    state = _verified_state(checkpoint, chunks)
    _load(_weights(chunks), checkpoint)
    return Progress(state["step"], state["consumed_samples"])


def load_global_state(checkpoint: Path) -> dict[str, Tensor]:
    """Every full fp32 master by its global name, in this process alone, for export."""
    verify_files(checkpoint)
    shapes = read_state(checkpoint)["shapes"]
    tensors = {f"master/{name}": torch.empty(shape) for name, shape in shapes.items()}
    _load(tensors, checkpoint, alone=True)
    return {name.removeprefix("master/"): tensor for name, tensor in tensors.items()}


def _verified_state(checkpoint: Path, chunks: list[GPTModel]) -> dict:
    problem = None
    try:
        verify_files(checkpoint, dist.get_rank(), dist.get_world_size())
        state = read_state(checkpoint)
        problem = _mismatch(state["shapes"], chunks)
    except ConfigError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(
        problems, problem
    )  # or the ranks that found nothing would wait for the others forever
    if found := [p for p in problems if p]:
        raise ConfigError(
            found[0] if found[0].startswith(str(checkpoint)) else f"{checkpoint}: {found[0]}"
        )
    return state


def _mismatch(shapes: dict[str, list[int]], chunks: list[GPTModel]) -> str | None:
    for named in named_parameters(chunks):
        saved = shapes.get(named.name)
        if saved != list(named.global_shape):
            return (
                f"its {named.name} is {saved or 'absent'}, the config's is {list(named.global_shape)}. [model], "
                "[position] and data.vocab_size must be those of the run that saved it"
            )
    return None


def _weights(chunks: list[GPTModel]) -> dict[str, BoxTensor]:
    """This rank's weights as destinations of the masters; DCP casts as it copies."""
    return {
        f"master/{named.name}": BoxTensor(
            named.global_shape, named.parameter.dtype, [(named.offset, named.parameter.data)]
        )
        for named in named_parameters(chunks)
    }


def _load(tensors: dict, checkpoint: Path, alone: bool = False) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=alone)

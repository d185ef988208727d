"""Load a checkpoint that was saved on any layout: into this one, or into full tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from pretrain.checkpoint.boxes import BoxTensor
from pretrain.checkpoint.manifest import Checkpoint, TrainerState
from pretrain.checkpoint.save import box_tensors
from pretrain.config import ConfigError
from pretrain.model.parameters import Named, named_parameters
from pretrain.optim.zero import ZeroOptimizer


def load_checkpoint(checkpoint: Checkpoint, optimizer: ZeroOptimizer) -> TrainerState:
    """Load weights and optimizer state into a newly built optimizer. All ranks together.

    Args:
        checkpoint: The checkpoint, opened.
        optimizer: The optimizer; its model is loaded with it.

    Returns:
        How far training had come.

    Raises:
        ConfigError: A file is damaged, or a parameter's shape is not the checkpoint's. Nothing has
            been changed then, and every rank raises it.
    """
    _verify(checkpoint, optimizer.parameters)
    # The state's tensors are views of the optimizer's buffers: filling them loads it.
    _load_into(box_tensors(optimizer.state().fragments, with_copies=True), checkpoint.path)
    optimizer.load_state(checkpoint.adam_steps, checkpoint.loss_scaler_state)
    if not optimizer.partitions_weights:
        # The masters on this rank are fragments, but its weights are whole.
        _load_into(_weights(optimizer.parameters), checkpoint.path)
    return checkpoint.trainer_state


def load_weights(checkpoint: Checkpoint, chunks: list[GPTModel]) -> None:
    """Load a model's weights alone, cast to its dtype, for evaluation. All ranks together.

    Raises:
        ConfigError: As `load_checkpoint`.
    """
    parameters = list(named_parameters(chunks))
    _verify(checkpoint, parameters)
    _load_into(_weights(parameters), checkpoint.path)


def load_global_state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return every fp32 master by its global name, whole, in this process alone, for an export.

    Raises:
        ConfigError: A file is damaged.
    """
    checkpoint.verify_tensors()
    tensors = {f"master/{name}": torch.empty(shape) for name, shape in checkpoint.shapes.items()}
    _load_into(tensors, checkpoint.path, alone=True)
    return {name.removeprefix("master/"): tensor for name, tensor in tensors.items()}


def _verify(checkpoint: Checkpoint, parameters: Iterable[Named]) -> None:
    """Verify files, dealt to the ranks, and shapes. Raise the first problem on every rank."""
    problem: ConfigError | None = None
    try:
        checkpoint.verify_tensors(dist.get_rank(), dist.get_world_size())
        if mismatch := _mismatch(checkpoint, parameters):
            problem = ConfigError(mismatch)
    except ConfigError as error:
        problem = error
    # The ranks tell each other: those that found nothing would otherwise wait in the load's
    # collectives for one that has ended.
    problems: list[ConfigError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if found := [p for p in problems if p]:
        raise found[0]


def _mismatch(checkpoint: Checkpoint, parameters: Iterable[Named]) -> str | None:
    """Return a message about the first parameter whose shape is not the checkpoint's, or None."""
    for named in parameters:
        saved = checkpoint.shapes.get(named.name)
        if saved != list(named.global_shape):
            return (
                f"{checkpoint.path}: its {named.name} is {saved or 'absent'}, the config's is "
                f"{list(named.global_shape)}. [model], [position] and data.vocab_size must be "
                "those of the run that saved it"
            )
    return None


def _weights(parameters: Iterable[Named]) -> dict[str, BoxTensor]:
    """Return this rank's weights as what the masters are read into; DCP casts as it copies."""
    return {
        f"master/{named.name}": BoxTensor(
            named.global_shape, named.parameter.dtype, [(named.offset, named.parameter.data)]
        )
        for named in parameters
    }


def _load_into(tensors: Mapping[str, Tensor], directory: Path, alone: bool = False) -> None:
    """Fill `tensors` in place from a checkpoint's files. All ranks together, unless `alone`."""
    with warnings.catch_warnings(), torch.no_grad():
        # DCP warns that it assumes a single process, which is what `alone` asks for.
        warnings.simplefilter("ignore")
        state_dict_loader.load(dict(tensors), checkpoint_id=directory, no_dist=alone)

"""Give every parameter of this rank its global name, and say which part of it this rank holds.

The global name and shape of a parameter are those that it has in the unsharded model on one
process. Checkpoints, initial weights and tests address parameters by global name, so none of them
depends on the layout (tensor x pipeline x data). Global names are Megatron's local names, except
for two:

    local name                             global name
    decoder.layers.0.* of a later chunk    decoder.layers.6.* (Megatron numbers layers per chunk)
    output_layer.weight, if tied           embedding.word_embeddings.weight

How parameters are spread over tensor ranks and pipeline stages, and where they are copies:

    parameter                            tensor ranks   pipeline stages     copies
    linear_qkv, linear_fc1 weight, bias  split, dim 0   the layer's         none
    linear_proj, linear_fc2 weight       split, dim 1   the layer's         none
    linear_proj, linear_fc2 bias; norms  replicated     the layer's         tensor rank > 0
    word_embeddings (vocabulary)         split, dim 0   first; last, if     last stage, if tied
                                                        tied
    output_layer, untied (vocabulary)    split, dim 0   last                none
    position_embeddings (learned);       replicated     first               tensor rank > 0
    word_embeddings_layernorm
    word_embeddings.* and output_layer.* whole          the only one    none
    of an adaptive softmax
    position.* (heads of slopes, table)  split, dim 0   every               stage > 0

Data-parallel ranks hold the same parameters as each other. ZeRO's partitioning among them is the
business of `pretrain.optim`. Of all ranks of one data-parallel replica, exactly one holds any given
element of the model with `is_copy` False; that rank saves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from pretrain.config.tensors import TIED


@dataclass(frozen=True)
class Named:
    """A parameter of this rank with its global name, and the part of the global tensor it holds."""

    name: str
    """The global name."""

    parameter: nn.Parameter

    shape: tuple[int, ...]
    """Shape of this tensor rank's part."""

    global_shape: tuple[int, ...]
    """Shape in the unsharded model."""

    offset: tuple[int, ...]
    """Index in the global tensor at which this rank's part starts."""

    is_copy: bool
    """True if another tensor rank or pipeline stage holds the same values and saves them."""

    def slice_of(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor, as a view of it."""
        for axis, (start, size) in enumerate(zip(self.offset, self.shape)):
            full = full.narrow(axis, start, size)
        return full


def named_parameters(chunks: list[GPTModel]) -> Iterator[Named]:
    """Yield every parameter of this rank once, in the order of its chunks.

    Not for a model under ZeRO 3, whose parameters have given up their shapes: ask the optimizer,
    which lists them before (`ZeroOptimizer.parameters`).
    """
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    seen: set[int] = set()
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            # The position method is one module, registered in every chunk of this rank.
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = _global_name(local_name, chunk)
            shape = tuple(parameter.shape)
            global_shape, offset = list(shape), [0] * len(shape)
            sharded = getattr(parameter, "tensor_model_parallel", False)
            # Megatron marks a sharded parameter with the dimension that it splits evenly.
            if sharded:
                axis = parameter.partition_dim
                offset[axis] = tensor_rank * shape[axis]
                global_shape[axis] *= tensor_size
            copy = (not sharded and tensor_rank > 0) or is_pipeline_copy(parameter, name)
            yield Named(name, parameter, shape, tuple(global_shape), tuple(offset), copy)


def is_pipeline_copy(parameter: nn.Parameter, name: str) -> bool:
    """Return True if this stage repeats a parameter that another pipeline stage owns.

    This concerns the tied output layer, which repeats the embedding of the first stage, and the
    parameters of the position method, which every stage holds.

    Args:
        parameter: The parameter.
        name: Its global name.
    """
    # Set by Megatron on the last stage when PP > 1 (megatron/core/models/common/language_module/
    # language_module.py, setup_embeddings_and_output_layer).
    tied_output = getattr(parameter, "shared", False)
    repeated = name.startswith("position.") and not parallel_state.is_pipeline_first_stage(
        ignore_virtual=True
    )
    return tied_output or repeated


def _global_name(name: str, chunk: GPTModel) -> str:
    """Return the global name of a parameter that Megatron calls `name` in `chunk`."""
    if name.startswith("decoder.layers."):
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        offset = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        return f"decoder.layers.{int(number) + offset}.{rest}"
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return TIED
    return name

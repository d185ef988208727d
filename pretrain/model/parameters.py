"""Global names: what a parameter is called, and which part of it this rank holds, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

TIED = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Named:
    """One parameter of this rank under its global name."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """Of this tensor rank's part."""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Where this rank's part starts in the global tensor."""
    is_copy: bool
    """Another pipeline stage or tensor rank holds the same values and saves them."""

    def slice_of(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor (a view)."""
        for axis, (start, size) in enumerate(zip(self.offset, self.shape)):
            full = full.narrow(axis, start, size)
        return full


def named_parameters(chunks: list[GPTModel]) -> Iterator[Named]:
    """Every parameter of this rank once, in the order of its chunks.

    Not for a model under ZeRO 3, whose parameters have given up their shapes: ask the optimizer,
    which lists them before (`ZeroOptimizer.parameters`).
    """
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    seen: set[int] = set()
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            if id(parameter) in seen:
                continue  # the position method is shared by this rank's chunks
            seen.add(id(parameter))
            name = _global_name(local_name, chunk)
            shape = tuple(parameter.shape)
            global_shape, offset = list(shape), [0] * len(shape)
            sharded = getattr(parameter, "tensor_model_parallel", False)
            if sharded:
                axis = parameter.partition_dim
                offset[axis] = tensor_rank * shape[axis]
                global_shape[axis] *= tensor_size
            copy = (not sharded and tensor_rank > 0) or is_pipeline_copy(parameter, name)
            yield Named(name, parameter, shape, tuple(global_shape), tuple(offset), copy)


def is_pipeline_copy(parameter: nn.Parameter, name: str) -> bool:
    """True on the stages that repeat a parameter another stage owns: the tied output layer, the position method's."""
    tied_output = getattr(parameter, "shared", False)
    repeated = name.startswith("position.") and not parallel_state.is_pipeline_first_stage(
        ignore_virtual=True
    )
    return tied_output or repeated


def _global_name(name: str, chunk: GPTModel) -> str:
    """Megatron's local name with the layer's number in the whole model, and the tied output as the embedding."""
    if name.startswith("decoder.layers."):
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        offset = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        return f"decoder.layers.{int(number) + offset}.{rest}"
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return TIED
    return name

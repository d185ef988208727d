"""Say what one operator of torch costs: its class, its kernel launches, the bytes it moves.

The bytes are those of the tensors that a kernel has to read and write at least once, as
numel x itemsize. Caches may save a part of them, and a kernel that walks over its input twice reads
more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


class OpClass(StrEnum):
    """The kinds of kernels that the tables tell apart."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    NORM = "norm"
    REDUCTION = "reduction"
    COPY = "copy/cast"
    OPTIMIZER = "optimizer"
    EMBEDDING = "embedding"
    OTHER = "other"


# The keys are operator names without namespace and overload; in-place variants end in "_".
CLASSES = {
    OpClass.MATMUL: ("mm addmm bmm baddbmm addbmm mv addmv dot linear _scaled_mm _grouped_mm"),
    OpClass.NORM: (
        "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward"
    ),
    OpClass.REDUCTION: (
        "sum mean amax amin max min norm linalg_vector_norm any all argmax argmin logsumexp prod "
        "var var_mean cumsum _softmax _log_softmax _softmax_backward_data "
        "_log_softmax_backward_data nll_loss_forward nll_loss_backward _foreach_norm "
        "_amp_foreach_non_finite_check_and_unscale_"
    ),
    OpClass.COPY: (
        "copy_ _to_copy clone cat stack zero_ fill_ zeros ones full zeros_like ones_like full_like "
        "new_zeros new_ones new_full arange constant_pad_nd index_select index gather scatter "
        "scatter_ index_put_ index_put _index_put_impl_ select_backward slice_backward repeat roll "
        "_foreach_copy_ _foreach_zero_ triu tril eye scalar_tensor flip"
    ),
    OpClass.EMBEDDING: "embedding embedding_dense_backward",
}
"""Operators whose class does not follow from torch's tag "pointwise", separated by blanks."""


def _names(text: str) -> frozenset[str]:
    """Return the names in a text that are separated by blanks."""
    return frozenset(text.split())


UNTAGGED_POINTWISE = _names(
    "native_dropout native_dropout_backward dropout bernoulli normal uniform random exponential "
    "lerp gelu_backward threshold_backward masked_fill"
)
"""Operators that work element by element without having torch's tag in every version."""

CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names.split()}

NO_KERNEL = _names(
    "empty empty_like empty_strided new_empty new_empty_strided empty_permuted _unsafe_view "
    "resize_ set_ record_stream is_pinned _has_compatible_shallow_copy_type is_same_size "
    "_local_scalar_dense lift lift_fresh _efficientzerotensor sym_size sym_numel sym_stride "
    "_version _pin_memory detach_ t_ transpose_ squeeze_ unsqueeze_ as_strided_"
)
"""Operators that allocate or change metadata, besides views, which torch marks itself."""

ALLOCATES = _names("empty empty_like empty_strided new_empty new_empty_strided empty_permuted")
"""Operators whose result is uninitialised memory."""

SYNCHRONISES = _names("nonzero masked_select equal _unique2 unique_dim is_nonzero")
"""Operators that make the host wait for the device, because their result's shape or value depends
on data. `_local_scalar_dense` (item) is counted apart."""

WRITE_ONLY = _names(
    "copy_ zero_ fill_ normal_ uniform_ bernoulli_ random_ exponential_ _foreach_copy_ "
    "_foreach_zero_"
)
"""In-place operators that do not read what they overwrite."""

READS_ROWS = _names("embedding index index_select gather")
"""Operators that read as much of their first tensor as they return, and the indices."""

WRITES_ROWS = _names("index_put_ _index_put_impl_ scatter_ index_add_ scatter_add_")
"""In-place operators that touch as much of their first tensor as they are given values."""

FUSED_OPTIMIZERS = _names("_fused_adamw_ _fused_adam_ _fused_sgd_")

LAUNCHES = {"native_layer_norm_backward": 2}
"""CUDA launches of operators that need more than one. The backward pass of a layer norm launches
one kernel for the input and one for weight and bias (ATen/native/cuda/layer_norm_kernel.cu)."""

# Origin: ATen/native/cuda/MultiTensorApply.cuh. A launch serves at most this many blocks, each of
# CHUNK elements, and at most TENSORS[depth - 1] tensors of each of its `depth` lists.
CHUNK = 65_536
BLOCKS = 320
TENSORS = (110, 64, 48, 36, 30)


def op_name(function: OpOverload) -> str:
    """Return the operator's name without namespace and overload, as "add_"."""
    return str(function._schema.name).rpartition("::")[2]


def op_class(function: OpOverload) -> OpClass:
    """Return the class of an operator."""
    name = op_name(function)
    if name in FUSED_OPTIMIZERS:
        return OpClass.OPTIMIZER
    if "attention" in name:
        return OpClass.ATTENTION
    base = name.rstrip("_")
    pointwise = torch.Tag.pointwise in function.tags
    for candidate in (name, base):
        found = CLASS_OF.get(candidate)
        # `max` and `min` of two tensors are pointwise, those of one are reductions.
        if found is not None and not (pointwise and found == OpClass.REDUCTION):
            return found
    if pointwise or name.startswith("_foreach_") or base in UNTAGGED_POINTWISE:
        return OpClass.ELEMENTWISE
    return OpClass.OTHER


def launches_kernel(function: OpOverload) -> bool:
    """Return False for views and for operators that allocate or change metadata only."""
    return not function.is_view and op_name(function) not in NO_KERNEL


def num_launches(function: OpOverload, args: tuple[Any, ...]) -> int:
    """Return how many kernels an operator launches on CUDA.

    One, except for those in LAUNCHES and for operators on lists of tensors, whose launches follow
    from the limits of a launch: modelled, not counted.

    Args:
        function: The operator.
        args: Its positional arguments.
    """
    name = op_name(function)
    if not name.startswith(("_foreach_", "_fused_")) or not isinstance(args[0], (list, tuple)):
        return LAUNCHES.get(name, 1)
    depth = sum(1 for arg in args if isinstance(arg, (list, tuple)) and _all_tensors(arg))
    # The count of steps is one number a tensor, which is passed as a pointer and not as a list of
    # the same depth.
    depth = min(depth - (name in FUSED_OPTIMIZERS), len(TENSORS))
    tensors: Sequence[Tensor] = args[0]
    chunks = sum(math.ceil(tensor.numel() / CHUNK) for tensor in tensors)
    return max(math.ceil(chunks / BLOCKS), math.ceil(len(tensors) / TENSORS[depth - 1]))


def _all_tensors(values: Iterable[Any]) -> bool:
    """Return True if every value is a tensor and there is at least one."""
    values = list(values)
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, which may be a list or tuple of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors; a dimension that is expanded counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(_extent(tensor) * tensor.element_size() for tensor in distinct.values())


def _extent(tensor: Tensor) -> int:
    """Return the number of different elements that a tensor shows."""
    extent = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        extent *= size if stride != 0 else min(size, 1)
    return extent


def bytes_moved(
    function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[int, int]:
    """Return the bytes that an operator reads and writes.

    Args:
        function: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        result: What it returned.
    """
    name = op_name(function)
    read: list[Tensor] = []
    written: list[Tensor] = list(tensors_in(_new_results(function, result)))
    for argument, value in _arguments(function, args, kwargs):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # The gradients are marked as written, which they are only where the kernel scales them:
        # it stores the scaled ones (ATen/native/cuda/fused_adam_utils.cuh).
        if name in FUSED_OPTIMIZERS and argument.name == "grads":
            is_written = kwargs.get("grad_scale") is not None
        if is_written:
            written.extend(tensors_in(value))
        # `out=` arguments are the keyword-only ones that are written.
        if not is_written or not (name in WRITE_ONLY or argument.kwarg_only):
            read.extend(tensors_in(value))
    if name in READS_ROWS:
        return num_bytes(written) + num_bytes(read[1:]), num_bytes(written)
    if name in WRITES_ROWS:
        values = num_bytes(read[-1:])
        return num_bytes(read[1:]) + (0 if name == "scatter_" else values), values
    return num_bytes(read), num_bytes(written)


def _new_results(function: OpOverload, result: Any) -> list[Any]:
    """Return the results that are not arguments which were written to."""
    returns = function._schema.returns
    results = result if len(returns) > 1 else (result,)
    return [value for declared, value in zip(returns, results) if declared.alias_info is None]


def _arguments(
    function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the schema and the value of every argument that was given."""
    declared = function._schema.arguments
    yield from zip(declared, args)
    for argument in declared[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]

"""Count the cost of torch's operators: their class, their kernel launches, the bytes they move.

The bytes are those of the tensors that a kernel must read and write at least once, as
numel x itemsize. Caches may save a part of them, and a kernel that reads its input twice moves
more.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.topology import context_group, replica_group


class OpClass(StrEnum):
    """The classes of kernels in the tables."""

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
"""Operators whose class does not follow from torch's tag "pointwise", separated by spaces."""


def _names(text: str) -> frozenset[str]:
    """Return the names in a text, which are separated by spaces."""
    return frozenset(text.split())


UNTAGGED_POINTWISE = _names(
    "native_dropout native_dropout_backward dropout bernoulli normal uniform random exponential "
    "lerp gelu_backward threshold_backward masked_fill"
)
"""Elementwise operators that do not have torch's tag in every version."""

CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names.split()}

NO_KERNEL = _names(
    "empty empty_like empty_strided new_empty new_empty_strided empty_permuted _unsafe_view "
    "resize_ set_ record_stream is_pinned _has_compatible_shallow_copy_type is_same_size "
    "_local_scalar_dense lift lift_fresh _efficientzerotensor sym_size sym_numel sym_stride "
    "_version _pin_memory detach_ t_ transpose_ squeeze_ unsqueeze_ as_strided_"
)
"""Operators that only allocate or change metadata. Views are not listed, as torch marks them."""

SYNCHRONIZES = _names("nonzero masked_select equal _unique2 unique_dim is_nonzero")
"""Operators that make the host wait for the device, because the shape or value of their result
depends on data. `_local_scalar_dense` (item) is counted separately."""

WRITE_ONLY = _names(
    "copy_ zero_ fill_ normal_ uniform_ bernoulli_ random_ exponential_ _foreach_copy_ "
    "_foreach_zero_"
)
"""In-place operators that do not read the tensor that they overwrite."""

READS_ROWS = _names("embedding index index_select gather")
"""Operators that read only the returned part of their first tensor, and the indices."""

WRITES_ROWS = _names("index_put_ _index_put_impl_ scatter_ index_add_ scatter_add_")
"""In-place operators that change only as many elements of their first tensor as they get values."""

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
    """Return the operator's name without namespace and overload, such as "add_"."""
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
        # `max` and `min` of two tensors are pointwise; of one tensor they are reductions.
        if found is not None and not (pointwise and found == OpClass.REDUCTION):
            return found
    if pointwise or name.startswith("_foreach_") or base in UNTAGGED_POINTWISE:
        return OpClass.ELEMENTWISE
    return OpClass.OTHER


def num_launches(function: OpOverload, args: tuple[Any, ...]) -> int:
    """Return how many kernels an operator launches on CUDA.

    The result is 1, except for operators in LAUNCHES and for operators on lists of tensors, whose
    launches are computed from the limits of a launch, not counted.

    Args:
        function: The operator.
        args: Its positional arguments.
    """
    name = op_name(function)
    if not name.startswith(("_foreach_", "_fused_")) or not isinstance(args[0], (list, tuple)):
        return LAUNCHES.get(name, 1)
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    depth = sum(all(isinstance(each, Tensor) for each in values) for values in lists)
    # The list of step counts does not add to the depth, because it has one number per tensor, which
    # is passed as a pointer.
    depth = min(depth - (name in FUSED_OPTIMIZERS), len(TENSORS))
    tensors: Sequence[Tensor] = args[0]
    chunks = sum(math.ceil(tensor.numel() / CHUNK) for tensor in tensors)
    return max(math.ceil(chunks / BLOCKS), math.ceil(len(tensors) / TENSORS[depth - 1]))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, which may be a list or tuple of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors; an expanded dimension counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(_extent(tensor) * tensor.element_size() for tensor in distinct.values())


def _extent(tensor: Tensor) -> int:
    """Return the number of distinct elements of a tensor."""
    sizes = zip(tensor.shape, tensor.stride())
    return math.prod(size if stride else min(size, 1) for size, stride in sizes)


def bytes_moved(
    function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> int:
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
        # The gradients are marked as written, but the kernel writes them only if it scales them
        # (ATen/native/cuda/fused_adam_utils.cuh).
        if name in FUSED_OPTIMIZERS and argument.name == "grads":
            is_written = kwargs.get("grad_scale") is not None
        if is_written:
            written.extend(tensors_in(value))
        # `out=` arguments are the keyword-only ones that are written.
        if not is_written or not (name in WRITE_ONLY or argument.kwarg_only):
            read.extend(tensors_in(value))
    if name in READS_ROWS:
        return 2 * num_bytes(written) + num_bytes(read[1:])
    if name in WRITES_ROWS:
        values = num_bytes(read[-1:])
        return num_bytes(read[1:]) + (values if name == "scatter_" else 2 * values)
    return num_bytes(read) + num_bytes(written)


def _new_results(function: OpOverload, result: Any) -> list[Any]:
    """Return the results that are new, and not arguments that were written to."""
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


# ---- The records of a count: kernels, collectives and synchronizations of a step ----


class Phase(StrEnum):
    """The parts of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BETWEEN_PASSES = "between passes"
    """Work of the pipeline schedule outside of both: sends, receives and the loss."""
    GRADIENT_REDUCTION = "gradient reduction"
    OPTIMIZER_STEP = "optimizer step"
    WEIGHT_GATHER = "weight gather"
    LOSS_AVERAGE = "loss average"
    OTHER = "other"


@dataclass
class Kernels:
    """The total cost of several kernels."""

    launches: int = 0
    bytes_moved: int = 0
    """Bytes read and written."""

    def add(self, launches: int, num_bytes: int) -> None:
        """Add the cost of further kernels."""
        self.launches += launches
        self.bytes_moved += num_bytes


@dataclass
class Collective:
    """One call of torch.distributed."""

    name: str
    """The operator in torch's namespace c10d, without underscores at its ends."""
    group: str
    """"world", "data" (all replicas), "tensor", "pipeline", "embedding", "model" (tensor x
    pipeline), "context", or a list of ranks."""
    group_size: int
    dtype: str
    num_bytes: int
    """Size of the message: of the whole tensor for an all-reduce, of the gathered result for an
    all-gather, of the input for a reduce-scatter."""
    phase: Phase
    """The phase in which it was issued."""
    asynchronous: bool
    """False if the caller made the stream wait for it immediately."""
    hidden_behind: int | None = None
    """The number of kernels launched after it was issued and before the caller waited for it,
    without those of the gradient reduction itself. None if the caller never waited, or if the
    processes are real, in which waits are not observed."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank sends with ring algorithms, to which NCCL's bandwidths refer.

        Origin: nccl-tests, doc/PERFORMANCE.md. A received message is counted at its sender.
        """
        share = (self.group_size - 1) / self.group_size
        if self.name in ("recv", "barrier"):
            return 0.0
        if self.name == "send":
            return float(self.num_bytes)
        return self.num_bytes * share * (2 if self.name.startswith("allreduce") else 1)

    @property
    def is_exposed(self) -> bool:
        """True if no kernel was launched behind which it could be hidden."""
        return not self.asynchronous or self.hidden_behind == 0


@dataclass
class StepCounts:
    """The cost of one optimizer step of one rank."""

    kernels: dict[tuple[Phase, OpClass, str], Kernels] = field(default_factory=dict)
    """By phase, class and name of the operator."""
    collectives: list[Collective] = field(default_factory=list)
    """In the order in which they were issued."""
    synchronizations: Tally[tuple[Phase, str]] = field(default_factory=Tally)
    """How often the host waited for the device, by phase and cause."""

    def total(
        self, phase: Phase | None = None, kind: OpClass | None = None, name: str | None = None
    ) -> Kernels:
        """Return the cost of all kernels of a phase, a class and a name.

        Args:
            phase: A phase; None means all.
            kind: A class of operators; None means all.
            name: The name of an operator; None means all.
        """
        result = Kernels()
        for (its_phase, its_kind, its_name), cost in self.kernels.items():
            if phase in (None, its_phase) and kind in (None, its_kind) and name in (None, its_name):
                result.add(cost.launches, cost.bytes_moved)
        return result


# ---- counter ----
# Count what runs while a counter is active: kernels, bytes, collectives and host synchronizations.
#
# The counter sees every operator that reaches torch's dispatcher, including those of the backward
# pass and of torch.distributed, and does not change them. Markers (`Counter.during`) tell to which
# part of a step an operator belongs. Only a backward pass is recognized through autograd.


P = ParamSpec("P")
T = TypeVar("T")


# Functions that create a tensor in host memory unless they are given a device.
_FACTORIES = frozenset(
    {torch.tensor, torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.rand}
)
_READS_BACK = frozenset({Tensor.tolist, Tensor.cpu, Tensor.numpy})


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode is untyped
    """A context in which everything that a rank does is counted."""

    def __init__(self, work: Callable[[Counter, Collective], Any] | None = None) -> None:
        """Count into an empty `counts`.

        Args:
            work: In a simulation, whose tensors hold no data, creates the handle of a collective
                that is not executed. With None, collectives and reads of values are executed.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.counts = StepCounts()
        self.work = work
        self._handles: list[Any] = []
        self._phases = [Phase.OTHER]
        self._paused = 0
        self.cover = 0
        """The number of launches so far behind which a collective could be hidden."""
        self._functions = _FunctionCounter(self)

    @property
    def phase(self) -> Phase:
        """The phase in which an operator would be counted now."""
        marked = self._phases[-1]
        # autograd's engine gives a number to the backward pass that it runs in this thread. A
        # forward pass within a backward pass is the recomputation of activations.
        if marked in (Phase.BETWEEN_PASSES, Phase.FORWARD) and (
            torch._C._current_graph_task_id() != -1
        ):
            return Phase.BACKWARD
        return marked

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count everything that runs in this context as part of `phase`."""
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()

    def marked(self, phase: Phase, function: Callable[P, T]) -> Callable[P, T]:
        """Return a wrapper of `function` that counts its operators as part of `phase`."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.during(phase):
                return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that runs in this context."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def kernel(
        self,
        kind: OpClass,
        name: str,
        read: Iterable[Tensor],
        written: Iterable[Tensor] = (),
    ) -> None:
        """Count one kernel that is launched without torch's dispatcher.

        Args:
            kind: Class of the kernel.
            name: Name of the kernel.
            read: The tensors that it reads, or all its tensors if it is unknown which are written.
            written: The tensors that it writes.
        """
        self._add(kind, name, 1, num_bytes(read) + num_bytes(written))

    def synchronized(self, cause: str) -> None:
        """Count one wait of the host for the device, and record the function that caused it."""
        if not self._paused:
            self.counts.synchronizations[self.phase, f"{cause} in {_caller()}"] += 1

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a copy of a host's tensor on the device, without counting the copy."""
        with self.paused():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)

    def __enter__(self) -> Counter:
        self._functions.__enter__()  # type: ignore[no-untyped-call]  # torch's
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # torch's
        self._functions.__exit__(*exception)  # type: ignore[no-untyped-call]  # torch's

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        # Queries of a tensor's device or layout, which happen only for fake tensors.
        if func.namespace == "prim":
            return func(*args, **kwargs)
        inputs = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        on_host = _runs_on_host(inputs)
        name = op_name(func)
        if name == "_local_scalar_dense":
            if not on_host:
                self.synchronized("item")
            if isinstance(args[0], FakeTensor):
                return _nothing(args[0])
        # Results computed from values that the host knows have values in a simulation, too.
        has_values = bool(inputs) and not any(isinstance(t, FakeTensor) for t in inputs)
        with unset_fake_temporarily() if has_values else contextlib.nullcontext():
            result = func(*args, **kwargs)
        outputs = list(tensors_in(result))
        if on_host or name == "_local_scalar_dense":
            for output in outputs:
                mark_on_host(output)
            return result
        if name in SYNCHRONIZES:
            self.synchronized(name)
        # Views, and operators that allocate or change metadata, launch no kernel.
        is_kernel = not func.is_view and op_name(func) not in NO_KERNEL
        if is_kernel and any(t.numel() for t in (*outputs, *inputs)):
            moved = bytes_moved(func, args, kwargs, result)
            self._add(op_class(func), name, num_launches(func, args), moved)
        return result

    def _add(self, kind: OpClass, name: str, launches: int, moved: int) -> None:
        """Count kernels in the current phase."""
        if self._paused:
            return
        phase = self.phase
        self.counts.kernels.setdefault((phase, kind, name), Kernels()).add(launches, moved)
        # Kernels of a reduction itself (casts, sums of received parts) hide no other reduction.
        if phase != Phase.GRADIENT_REDUCTION:
            self.cover += launches

    def _collective(
        self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Count a collective, and execute it unless this is a simulation."""
        record = _describe(function, args, self.phase)
        # Weights are gathered only during the optimizer step.
        if (
            record.phase == Phase.OPTIMIZER_STEP
            and record.group in ("data", "world")
            and "allgather" in record.name
        ):
            record.phase = Phase.WEIGHT_GATHER
        if not self._paused:
            self.counts.collectives.append(record)
        if self.work is None:
            return function(*args, **kwargs)
        work = self.work(self, record)
        # Kept here, because torch keeps only the C++ part alive. Without the Python part, `wait` of
        # the base class would be called, which blocks forever.
        self._handles.append(work)
        handle = work.boxed()
        # Some operators return a handle, others the tensors and a handle.
        return handle if len(function._schema.returns) == 1 else (args[0], handle)


class _FunctionCounter(TorchFunctionMode):
    """Counts what the dispatcher does not see: tensors from Python values, and values read back."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            return self._make(func, args, kwargs)
        if func in _READS_BACK and not _is_on_host(args[0]):
            self.counter.synchronized(func.__name__)
            if self.counter.work is not None and func is Tensor.tolist:
                return _zeros(tuple(args[0].shape))
        if func is Tensor.to and isinstance(args[0], Tensor) and _is_on_host(args[0]):
            like = next((t for t in args[1:] if isinstance(t, Tensor)), None)
            if like is not None and not _is_on_host(like):
                # Copied from pageable memory, as in `_make`.
                self.counter.synchronized("to the device")
                return self.counter.to_device(args[0].to(like.dtype))
        return func(*args, **kwargs)

    def _make(self, factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Create a tensor; if the host knows its values, it has them in a simulation, too."""
        # Any given device is the GPU: here platform.device() and DeepSpeed's accelerator give
        # "cpu" in its place.
        on_host = kwargs.get("device") is None
        if factory is torch.tensor and not on_host:
            # Copied from pageable memory, which waits for the device's stream.
            self.counter.synchronized("tensor from Python values")
        if not on_host and factory is not torch.tensor:
            return factory(*args, **kwargs)
        with (
            unset_fake_temporarily(),
            self.counter.paused() if on_host else contextlib.nullcontext(),
        ):
            made = factory(*args, **kwargs)
        return mark_on_host(made) if on_host else made


def _caller() -> str:
    """Return the innermost running function outside of torch and this package, with its module."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("pretrain.plan", "torch.")) and module != "torch":
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"


def mark_on_host(tensor: Tensor) -> Tensor:
    """Mark a tensor that would be in host memory if the run had a GPU, and return it."""
    tensor._is_on_host = True  # type: ignore[attr-defined]  # an attribute of our own
    return tensor


def _runs_on_host(inputs: list[Tensor]) -> bool:
    """Return True if an operator of these tensors runs on the host.

    A tensor without dimensions may be on either side. The first argument then decides, because an
    in-place operator writes to it.
    """
    if not inputs or not _is_on_host(inputs[0]):
        return False
    return all(tensor.dim() == 0 or _is_on_host(tensor) for tensor in inputs)


def _is_on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_on_host", False)


def _nothing(tensor: Tensor) -> bool | int | float:
    """Return the zero of a tensor's dtype, in place of a value that a simulation lacks."""
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 0


def _zeros(shape: tuple[int, ...]) -> Any:
    """Return nested lists of zeros of a shape."""
    return 0.0 if not shape else [_zeros(shape[1:]) for _ in range(shape[0])]


def _describe(function: OpOverload, args: tuple[Any, ...], phase: Phase) -> Collective:
    """Return the record of a call of a c10d operator."""
    # Trailing arguments that equal their defaults are not passed on.
    named = {argument.name: value for argument, value in zip(function._schema.arguments, args)}
    group = dist.ProcessGroup.unbox(named["process_group"])
    name = op_name(function).strip("_")
    # Inputs and outputs of gathers and scatters differ in size; the larger side is the message.
    sides = [list(tensors_in(value)) for value in named.values()]
    tensors = [tensor for side in sides for tensor in side]
    return Collective(
        name=name,
        group=group_name(group),
        group_size=group.size(),
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        # A barrier has a tensor only to tell the device.
        num_bytes=0 if name == "barrier" else max(map(num_bytes, sides)),
        phase=phase,
        asynchronous=bool(named.get("async_op", True)),
    )


def group_name(group: dist.ProcessGroup) -> str:
    """Return the purpose of a process group; see `Collective.group`."""
    known = {
        "data": replica_group(),
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "embedding": parallel_state.get_embedding_group(check_initialized=False),
        "model": parallel_state.get_model_parallel_group(),
        "context": context_group(),
        "world": dist.group.WORLD,
    }
    ranks = dist.get_process_group_ranks
    found = [name for name, each in known.items() if each is group]
    # DeepSpeed and Megatron create further groups of the same ranks.
    found += [name for name, each in known.items() if each and ranks(each) == ranks(group)]
    return found[0] if found else str(ranks(group))

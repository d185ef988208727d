"""Count what runs while a counter is active: kernels, bytes, collectives and host synchronisations.

The counter sees every operator that reaches torch's dispatcher, those of the backward pass and of
torch.distributed included. It changes nothing that it counts. Which part of a step an operator
belongs to is said by markers (`Counter.during`), never guessed, except that a backward pass is
recognised by autograd itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.plan import operators
from pretrain.plan.costs import Collective, Kernels, Phase, StepCounts
from pretrain.plan.operators import OpClass

P = ParamSpec("P")
T = TypeVar("T")


# Functions that make a tensor in host memory unless they are given a device.
_FACTORIES = frozenset(
    {torch.tensor, torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.rand}
)
_READS_BACK = frozenset({Tensor.tolist, Tensor.cpu, Tensor.numpy})


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode is untyped
    """A context in which everything that a rank does is counted."""

    def __init__(self, work: Callable[[Counter, Collective], Any] | None = None) -> None:
        """Count into an empty `counts`.

        Args:
            work: Makes the handle of a collective that is not executed, in a simulation. None
                executes collectives and reads of values.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.counts = StepCounts()
        self._work = work
        self._handles: list[Any] = []
        self._phases = [Phase.OTHER]
        self._paused = 0
        self._cover = Kernels()
        self._functions = _FunctionCounter(self)
        # Storages that were allocated and not written yet, by address. A kernel that torch's
        # dispatcher does not know must write what it is given of them.
        self._uninitialised: set[int] = set()

    @property
    def simulates(self) -> bool:
        """True if collectives are not executed and tensors hold no data."""
        return self._work is not None

    @property
    def phase(self) -> Phase:
        """The phase in which an operator that ran now would be counted."""
        marked = self._phases[-1]
        # The engine numbers the backward passes that it runs in this thread. A forward pass within
        # one is the recomputation of activations.
        if marked in (Phase.BETWEEN_PASSES, Phase.FORWARD) and (
            torch._C._current_graph_task_id() != -1
        ):
            return Phase.BACKWARD
        return marked

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count what runs in this context in `phase`."""
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()

    def marked(self, phase: Phase, function: Callable[P, T]) -> Callable[P, T]:
        """Return `function` so wrapped that what it does is counted in `phase`."""

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
        self, kind: OpClass, name: str, read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        """Count one kernel that is launched past torch's dispatcher.

        Args:
            kind: Class of the kernel.
            name: Name of the kernel.
            read: The tensors that it reads.
            written: The tensors that it writes.
        """
        self._uninitialised.difference_update(map(_address, written))
        self._add(kind, name, 1, operators.num_bytes(read), operators.num_bytes(written))

    def launch(self, kind: OpClass, name: str, tensors: list[Tensor]) -> None:
        """Count one kernel of which nobody says what it writes, such as one of Triton's.

        Args:
            kind: Class of the kernel.
            name: Name of the kernel.
            tensors: Its tensor arguments. It writes those whose memory nobody has written yet, and
                reads the others.
        """
        written = [t for t in tensors if _address(t) in self._uninitialised]
        read = [t for t in tensors if _address(t) not in self._uninitialised]
        self.kernel(kind, name, read, written)

    def synchronised(self, cause: str) -> None:
        """Count one wait of the host for the device, and note the function that asked for it."""
        if not self._paused:
            self.counts.synchronisations[self.phase, f"{cause} in {_caller()}"] += 1

    def cover(self) -> Kernels:
        """Return all kernels so far that a collective could hide behind."""
        return replace(self._cover)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a copy of a host's tensor on the device, without counting the copy."""
        with self.paused():
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            return copy.copy_(tensor)

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
        # Questions about a tensor's device or layout, which arise for fake tensors only.
        if func.namespace == "prim":
            return func(*args, **kwargs)
        inputs = [*operators.tensors_in(args), *operators.tensors_in(list(kwargs.values()))]
        on_host = _runs_on_host(inputs)
        name = operators.op_name(func)
        if name == "_local_scalar_dense":
            if not on_host:
                self.synchronised("item")
            if isinstance(args[0], FakeTensor):
                return _nothing(args[0])
        # What was computed from values that the host knows has values in a simulation, too.
        has_values = bool(inputs) and not any(isinstance(t, FakeTensor) for t in inputs)
        with unset_fake_temporarily() if has_values else contextlib.nullcontext():
            result = func(*args, **kwargs)
        outputs = list(operators.tensors_in(result))
        if on_host or name == "_local_scalar_dense":
            for output in outputs:
                mark_on_host(output)
            return result
        if name in operators.SYNCHRONISES:
            self.synchronised(name)
        self._note_memory(func, name, args, outputs)
        if operators.launches_kernel(func) and any(t.numel() for t in (*outputs, *inputs)):
            moved = operators.bytes_moved(func, args, kwargs, result)
            launches = operators.num_launches(func, args)
            self._add(operators.op_class(func), name, launches, *moved)
        return result

    def _add(
        self, kind: OpClass, name: str, launches: int, bytes_read: int, bytes_written: int
    ) -> None:
        """Count kernels in the current phase."""
        if self._paused:
            return
        phase = self.phase
        cost = self.counts.kernels.setdefault((phase, kind, name), Kernels())
        cost.add(launches, bytes_read, bytes_written)
        # What a reduction does itself (casts, sums of what has arrived) hides no other one.
        if phase != Phase.GRADIENT_REDUCTION:
            self._cover.add(launches, bytes_read, bytes_written)

    def _note_memory(
        self, function: OpOverload, name: str, args: tuple[Any, ...], outputs: list[Tensor]
    ) -> None:
        """Keep `_uninitialised` up to date after an operator."""
        if function.is_view:
            return
        addresses = set(map(_address, outputs))
        if name in operators.ALLOCATES:
            self._uninitialised |= addresses
        else:
            self._uninitialised -= addresses

    def _collective(
        self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Count a collective, and execute it unless this is a simulation."""
        record = _describe(function, args, self.phase)
        # Weights are gathered within the optimizer's step alone.
        if (
            record.phase == Phase.OPTIMIZER_STEP
            and record.group in ("data", "world")
            and "allgather" in record.name
        ):
            record.phase = Phase.WEIGHT_GATHER
        if not self._paused:
            self.counts.collectives.append(record)
        if self._work is None:
            return function(*args, **kwargs)
        work = self._work(self, record)
        # torch keeps the C++ part alive only. Without the Python part, its `wait` would be that of
        # the base class, which blocks for ever.
        self._handles.append(work)
        handle = work.boxed()
        # The operators return a handle, or the tensors and a handle.
        return handle if len(function._schema.returns) == 1 else (args[0], handle)


class _FunctionCounter(TorchFunctionMode):
    """Count what the dispatcher does not see: tensors of Python values, and values read back."""

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
            self.counter.synchronised(func.__name__)
            if self.counter.simulates and func is Tensor.tolist:
                return _zeros(tuple(args[0].shape))
        if func is Tensor.to and isinstance(args[0], Tensor) and _is_on_host(args[0]):
            like = next((t for t in args[1:] if isinstance(t, Tensor)), None)
            if like is not None and not _is_on_host(like):
                # Copied from pageable memory, as above.
                self.counter.synchronised("to the device")
                return self.counter.to_device(args[0].to(like.dtype))
        return func(*args, **kwargs)

    def _make(self, factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor; one of values that the host knows has them in a simulation, too."""
        # torch's optimizers ask for the CPU by name where they keep their count of steps. In other
        # code "cpu" is what platform.device() or DeepSpeed's accelerator calls the device.
        by_name = kwargs.get("device") == "cpu" and _caller().startswith("torch.optim.")
        on_host = kwargs.get("device") is None or by_name
        if factory is torch.tensor and not on_host:
            # Copied from pageable memory, which waits for the device's stream.
            self.counter.synchronised("tensor from Python values")
        if not on_host and factory is not torch.tensor:
            return factory(*args, **kwargs)
        with (
            unset_fake_temporarily(),
            self.counter.paused() if on_host else contextlib.nullcontext(),
        ):
            made = factory(*args, **kwargs)
        return mark_on_host(made) if on_host else made


def _caller() -> str:
    """Return the module and the function that run, without torch and this room."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        ours = module.startswith("pretrain.plan")
        if not ours and (module.split(".")[0] != "torch" or module.startswith("torch.optim")):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"


def mark_on_host(tensor: Tensor) -> Tensor:
    """Note that a tensor would be in host memory if the run had a GPU, and return it."""
    tensor._is_on_host = True  # type: ignore[attr-defined]  # an attribute of our own
    return tensor


def _runs_on_host(inputs: list[Tensor]) -> bool:
    """Return True if an operator of these tensors runs on the host.

    A tensor of no dimension may be on either side; the first argument then decides, which an
    in-place operator writes to.
    """
    if not inputs or not _is_on_host(inputs[0]):
        return False
    return all(tensor.dim() == 0 or _is_on_host(tensor) for tensor in inputs)


def _is_on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_on_host", False)


def _address(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _nothing(tensor: Tensor) -> bool | int | float:
    """Return the zero of a tensor's dtype, in place of a value that a simulation does not have."""
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 0


def _zeros(shape: tuple[int, ...]) -> Any:
    """Return nested lists of zeros."""
    return 0.0 if not shape else [_zeros(shape[1:]) for _ in range(shape[0])]


def _describe(function: OpOverload, args: tuple[Any, ...], phase: Phase) -> Collective:
    """Return the record of a call of a c10d operator."""
    # Trailing arguments that equal their defaults are not passed on.
    named = {argument.name: value for argument, value in zip(function._schema.arguments, args)}
    group = dist.ProcessGroup.unbox(named["process_group"])
    name = operators.op_name(function).strip("_")
    # Inputs and outputs of gathers and scatters differ in size; the larger side is the message.
    sides = [list(operators.tensors_in(value)) for value in named.values()]
    tensors = [tensor for side in sides for tensor in side]
    return Collective(
        name=name,
        group=group_name(group),
        group_size=group.size(),
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        # A barrier passes a tensor only to say which device it is for.
        num_bytes=0 if name == "barrier" else max(map(operators.num_bytes, sides)),
        phase=phase,
        asynchronous=bool(named.get("async_op", True)),
    )


def group_name(group: dist.ProcessGroup) -> str:
    """Return what a process group is for; see `Collective.group`."""
    if group is dist.group.WORLD:
        return "world"
    known = {
        "data": parallel_state.get_data_parallel_group(),
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "embedding": parallel_state.get_embedding_group(check_initialized=False),
        "model": parallel_state.get_model_parallel_group(),
    }
    for name, candidate in known.items():
        if candidate is group:
            return name
    # DeepSpeed and Megatron make further groups of the same ranks.
    ranks = dist.get_process_group_ranks(group)
    for name, candidate in known.items():
        if candidate is not None and dist.get_process_group_ranks(candidate) == ranks:
            return name
    return str(ranks)

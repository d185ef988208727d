"""Be one rank of a large job in a single process, without data: the shapes of a run and no numbers.

torch's fake tensors compute shapes and dtypes only, and its fake process group says yes to every
collective, so one CPU process runs the real code of the model, of Megatron's schedule and of
DeepSpeed for any rank of any number of ranks. What the GPU would do differently from the CPU is
replaced here, and nowhere else:

- attention goes through the Triton kernels, whose launches are recorded instead of executed;
- torch's optimizers take their multi-tensor or fused path, as they do on CUDA;
- regions under torch.compile run uncompiled, so that their operators are counted one by one: an
  upper bound, since fake tensors cannot pass through a compiled kernel;
- fp16 is allowed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch._subclasses import FakeTensor, FakeTensorMode

from pretrain import platform
from pretrain.config import RunConfig
from pretrain.plan.counter import Collective, Counter
from pretrain.plan.operators import OpClass
from pretrain.topology import Process, Topology, finish, initialize


@contextlib.contextmanager
def simulated_rank(
    config: RunConfig, rank: int, world_size: int
) -> Iterator[tuple[Topology, Counter]]:
    """Be rank `rank` of `world_size` in this context. No process group may be open.

    Args:
        config: The run.
        rank: The rank to be.
        world_size: Number of ranks of the job.

    Yields:
        The rank's topology and the counter, which is active.
    """
    # Importing the module registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    platform.prepare(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(platform.fp16_allowed_on_cpu())
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(finish)
        # Before the fake mode: the generators' states are real tensors.
        topology = initialize(config, Process(rank, world_size, 0, "simulated", 0))
        counter = Counter(_Handle)
        stack.enter_context(_as_on_cuda(counter))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(counter)
        yield topology, counter


class _Handle(Work):
    """The handle of a collective that is not executed; it notes when it is waited for."""

    def __init__(self, counter: Counter, record: Collective) -> None:
        super().__init__()
        self.counter, self.record = counter, record
        self.issued_at = counter.num_launches()

    def wait(self, *timeout: Any) -> bool:
        if self.record.launches_until_wait is None:
            self.record.launches_until_wait = self.counter.num_launches() - self.issued_at
        return True

    def is_completed(self) -> bool:
        return True


@contextlib.contextmanager
def _as_on_cuda(counter: Counter) -> Iterator[None]:
    """Replace what would run differently with fake tensors on a CPU than with real ones on CUDA."""
    from triton.runtime.jit import KernelInterface

    from pretrain.kernels.dispatch import attention
    from pretrain.kernels.flash import host
    from pretrain.model import attention as module

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        return functools.partial(_record_launch, counter, kernel)

    # torch.optim removes its submodule's name.
    optimizer = importlib.import_module("torch.optim.optimizer")
    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (KernelInterface, "__getitem__", launcher),
            (host, "refusal", lambda queries: None),
            (module, "attention", _choose_triton(attention)),
            (nn.Module, "_apply", _apply),
            (optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
            (optimizer, "_foreach_supported_types", [Tensor, nn.Parameter, FakeTensor]),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _record_launch(counter: Counter, kernel: Any, *args: Any, **kwargs: Any) -> None:
    """Count a launch of a Triton kernel instead of executing it."""
    function = kernel.fn
    while hasattr(function, "fn"):
        function = function.fn
    ours = function.__module__.startswith("pretrain.kernels")
    kind = OpClass.ATTENTION if ours else OpClass.ELEMENTWISE
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    counter.launch(kind, function.__name__.strip("_"), tensors)


def _choose_triton(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `attention` with "auto" choosing the Triton kernels, as it does on CUDA."""

    def call(*args: Any, backend: str, **kwargs: Any) -> Tensor:
        return attention(*args, backend="triton" if backend == "auto" else backend, **kwargs)

    return call


def _apply(
    self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Convert a module's tensors in place, as torch's Module._apply does for real tensors.

    For fake tensors torch swaps whole tensor objects instead (torch/nn/modules/module.py). That
    fails for those to which something holds a weak reference, as FakeTensorMode itself does.
    """
    for child in self.children() if recurse else ():
        child._apply(function)  # type: ignore[no-untyped-call]  # torch's
    for parameter in self._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                converted = function(parameter)
            if converted is not parameter:
                parameter.data = converted
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self

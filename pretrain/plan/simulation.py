"""Be one rank of a large job in a single process, without data: the shapes of a run and no numbers.

torch's fake tensors compute shapes and dtypes only, and its fake process group says yes to every
collective, so one CPU process runs the real code of the model, of Megatron's schedule and of
DeepSpeed for any rank of any number of ranks. What an H200 would do differently from the CPU is
replaced here, and nowhere else:

- `auto` chooses attention as on that GPU, and the launches of Triton's kernels are recorded instead
  of executed;
- `auto` chooses fusions as on that GPU. Regions under torch.compile run uncompiled and uncounted,
  since fake tensors cannot pass through a compiled kernel, and the kernels are recorded that
  Inductor makes of them. A weight's gradient is added to fp32 by one matrix product;
- torch's optimizers take their multi-tensor path where they would on CUDA;
- data-parallel ranks stand on one node, which decides how gradients travel in 16 bit
  (pretrain/optim/wire.py);
- fp16 is allowed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch._subclasses import FakeTensor, FakeTensorMode

from pretrain import platform
from pretrain.config import RunConfig
from pretrain.plan.costs import Collective, Kernels
from pretrain.plan.counter import Counter
from pretrain.plan.fused import compiled_regions, weight_gradients
from pretrain.plan.operators import OpClass
from pretrain.topology import Process, Topology, finish, initialize

CAPABILITY = (9, 0)
"""Compute capability of the GPU that is simulated: Hopper."""

CAPABLE = SimpleNamespace(
    has_cuda=lambda: True, can_compile=lambda: True, can_accumulate_products=lambda: True
)
"""What `pretrain.platform` answers on that GPU when the fusions are chosen."""


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
        self.issued_at = counter.cover()

    def wait(self, *timeout: Any) -> bool:
        if self.record.hidden_behind is None:
            now, then = self.counter.cover(), self.issued_at
            self.record.hidden_behind = Kernels(
                now.launches - then.launches,
                now.bytes_read - then.bytes_read,
                now.bytes_written - then.bytes_written,
            )
            self.record.awaited_in = self.counter.phase
        return True

    def is_completed(self) -> bool:
        return True


@contextlib.contextmanager
def _as_on_cuda(counter: Counter) -> Iterator[None]:
    """Replace what would run differently with fake tensors on a CPU than with real ones on CUDA."""
    from triton.runtime.jit import KernelInterface

    from pretrain.kernels import call, dispatch
    from pretrain.kernels.flash import host
    from pretrain.model import fusion
    from pretrain.optim import wire

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        return functools.partial(_record_launch, counter, kernel)

    def describe_call(*args: Any) -> Any:
        return describe(*args)._replace(capability=CAPABILITY)

    describe = call.describe_call
    # torch.optim removes its submodule's name.
    optimizer = importlib.import_module("torch.optim.optimizer")
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (KernelInterface, "__getitem__", launcher),
            (host, "refusal", lambda queries: None),
            (dispatch, "describe_call", describe_call),
            (fusion, "platform", CAPABLE),
            (wire, "ranks_per_node", lambda group: group.size()),
            *compiled_regions(counter),
            *weight_gradients(counter),
            (nn.Module, "_apply", _apply),
            (optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
            (optimizer, "_foreach_supported_types", [Tensor, nn.Parameter, FakeTensor]),
        ):
            stack.enter_context(platform.replaced(owner, name, value))
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

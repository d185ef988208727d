"""Simulate one rank of a large job in a single process: all tensor shapes, but no data.

torch's fake tensors compute only shapes and dtypes, and its fake process group accepts every
collective, so one CPU process runs the real code of the model, of Megatron's schedule and of
DeepSpeed for any rank of any number of ranks. Only this file replaces what would run differently on
an H200 than on the CPU:

- `auto` chooses attention as on that GPU, and the launches of Triton's kernels are recorded instead
  of executed.
- `auto` chooses fusions as on that GPU. Fake tensors cannot pass through a compiled kernel, so
  regions under torch.compile run uncompiled and uncounted, and the kernels that Inductor would
  generate for them are recorded. A weight's gradient is added to fp32 by one matrix product.
- All data-parallel ranks are on one node, which decides how gradients are sent in 16 bit
  (pretrain/optim/sharded_step.py).
- fp16 is allowed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.fusions import fused_bias_dropout, fused_bias_gelu, fused_bias_swiglu
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch._subclasses import FakeTensorMode

from pretrain import platform
from pretrain.checkpoint.manifest import TrainerState
from pretrain.config import RunConfig, num_parameters
from pretrain.config.errors import columns, size
from pretrain.model import forward, loss
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.plan.memory import check_counted
from pretrain.plan.operators import (
    Collective,
    Counter,
    OpClass,
    Phase,
    StepCounts,
    tensors_in,
)
from pretrain.topology import Process, Topology, finish, initialize
from pretrain.training import loop, step
from pretrain.training.reporter import AttemptReporter, Requests
from pretrain.training.start import Run, StartPoint

# ---- Show the cost of a step ----


PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.BETWEEN_PASSES)
"""The phases that are repeated for every micro batch."""


def to_table(config: RunConfig, counts: dict[int, StepCounts]) -> str:
    """Return the lines that the command prints.

    Args:
        config: The run.
        counts: The counts by pipeline stage.
    """
    layout = config.layout(planned_world_size(config))
    lines = [
        f"{num_parameters(config):,} parameters, {config.position.method}, "
        f"L = {config.data.sequence_length}, {config.train.precision}, "
        f"ZeRO {config.parallel.zero_stage}",
        f"{layout.world_size} ranks: {layout.sizes}; {config.tokens_per_step:,} tokens a step, of "
        f"which a rank passes {layout.num_microbatches} micro batches of "
        f"{config.batch.micro_batch_size} sequences"
        + (f", 1/{layout.context} of each" if layout.context > 1 else ""),
    ]
    for stage, each in counts.items():
        lines += ["", f"One rank of pipeline stage {stage}, one step"]
        parts = [(phase, kind, each.total(phase, kind)) for phase in Phase for kind in OpClass]
        rows = [
            *((str(phase), str(kind), cost) for phase, kind, cost in parts if cost.launches),
            ("step", "all", each.total()),
        ]
        lines += columns(
            [("phase", "class", "launches", "moved")]
            + [(a, b, f"{cost.launches:,}", size(cost.bytes_moved)) for a, b, cost in rows],
            right=[2, 3],
        )
        passes = [each.total(phase) for phase in PASSES]
        launches = sum(cost.launches for cost in passes) / layout.num_microbatches
        moved = sum(cost.bytes_moved for cost in passes) // layout.num_microbatches
        lines += [f"a micro batch: {launches:,.0f} launches, {size(moved)} read and written", ""]
        lines += [*_collective_lines(each.collectives), ""]
        waits = sorted(each.synchronizations.items())
        lines.append(f"the host waits for the device {each.synchronizations.total()} times")
        lines += [f"  {phase}: {times} x {cause}" for (phase, cause), times in waits]
    return "\n".join(lines)


def _collective_lines(collectives: Iterable[Collective]) -> list[str]:
    """Return the table of collectives, with one row for all calls of the same kind."""
    rows: dict[tuple[str, ...], list[Collective]] = {}
    for each in collectives:
        group = f"{each.group} ({each.group_size})"
        rows.setdefault((each.phase, each.name, group, each.dtype), []).append(each)
    cells = [
        (
            *key,
            f"{len(calls):,}",
            size(sum(each.num_bytes for each in calls)),
            size(int(sum(each.wire_bytes for each in calls))),
            str(sum(each.is_exposed for each in calls)),
        )
        for key, calls in rows.items()
    ]
    header = ("phase", "collective", "group", "dtype", "calls", "bytes", "sent", "exposed")
    return columns([header, *cells], right=range(4, len(header))) if rows else ["no collectives"]


CAPABILITY = (9, 0)
"""Compute capability of the GPU that is simulated: Hopper. Below 8.0 nothing is compiled, and no
product adds to fp32."""


@contextlib.contextmanager
def simulated_rank(
    config: RunConfig, rank: int, world_size: int
) -> Iterator[tuple[Topology, Counter]]:
    """Simulate rank `rank` of `world_size` in this context. No process group may be open.

    Args:
        config: The run.
        rank: The rank to simulate.
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
        # Before the fake mode, because the generators' states are real tensors.
        topology = initialize(config, Process(rank, world_size, 0, "simulated", 0))
        counter = Counter(_Handle)
        stack.enter_context(_as_on_cuda(counter))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(counter)
        yield topology, counter


class _Handle(Work):
    """The handle of a collective that is not executed; it records when `wait` is called."""

    def __init__(self, counter: Counter, record: Collective) -> None:
        super().__init__()
        self.counter, self.record = counter, record
        self.issued_at = counter.cover

    def wait(self, *timeout: Any) -> bool:
        if self.record.hidden_behind is None:
            self.record.hidden_behind = self.counter.cover - self.issued_at
        return True


@contextlib.contextmanager
def _as_on_cuda(counter: Counter) -> Iterator[None]:
    """Replace functions that would behave differently here than with real tensors on CUDA."""
    from triton.runtime.jit import KernelInterface

    from pretrain.kernels import call, dispatch
    from pretrain.model import gpt
    from pretrain.optim import sharded_step

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        return functools.partial(_record_launch, counter, kernel)

    def describe_call(*args: Any) -> Any:
        return describe(*args)._replace(capability=CAPABILITY)

    describe = call.describe_call
    is_modern = CAPABILITY >= (8, 0)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (KernelInterface, "__getitem__", launcher),
            (dispatch, "describe_call", describe_call),
            (gpt, "_abilities", lambda: (True, is_modern, is_modern)),
            (sharded_step, "ranks_per_node", lambda group: group.size()),
            *compiled_regions(counter),
            *weight_gradients(counter),
            (nn.Module, "_apply", _apply),
        ):
            stack.enter_context(patch.object(owner, name, value))
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
    counter.kernel(kind, function.__name__.strip("_"), tensors)


def _apply(
    self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Convert a module's tensors in place, as torch's Module._apply does for real tensors.

    For fake tensors, torch swaps whole tensor objects instead (torch/nn/modules/module.py). That
    fails for tensors with a weak reference, such as those that FakeTensorMode itself holds.
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


# ---- Count fused operations, which a simulation cannot run, as the kernels that a GPU runs ----
#
# A region under torch.compile runs as plain operators here, which are not counted. Instead, the
# kernels that Inductor generates for it on a GPU are recorded: one for a chain of elementwise
# operators, and one for a sum over tokens, which cannot share a kernel with operators that are not
# summed. Inductor's own count agrees: on a CPU, with hidden size 2,048 and 16-bit values, its
# kernels for bias and GELU move 32.8 kB per token in the forward pass and 65.7 kB, in two kernels,
# in the backward pass; those for bias and residual move 12.3 kB and 4.1 kB.


Replacement = tuple[Any, str, Any]
"""A module, the name of one of its functions, and the replacement of that function."""


def compiled_regions(counter: Counter) -> Iterator[Replacement]:
    """Yield stand-ins for the functions of the model that are compiled (`pretrain.model.gpt`).

    Args:
        counter: Counts the kernels.
    """

    def one_kernel(module: Any, name: str, kind: OpClass, in_place: int = 0) -> Replacement:
        """Return a stand-in that counts one kernel, which also writes its first `in_place` args."""
        function = getattr(module, name)

        def call(*args: Tensor) -> Any:
            with counter.paused():
                result = function(*args)
            written = [*args[:in_place], *tensors_in(result)]
            counter.kernel(kind, name.strip("_"), args, written)
            return result

        return module, name, call

    def bias_dropout_add(
        x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
    ) -> Tensor:
        out: Tensor = _BiasDropoutAdd.apply(*x_with_bias, residual, probability, counter)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
        return out

    for module, name in (
        (fused_bias_gelu, "bias_gelu"),
        (fused_bias_swiglu, "bias_swiglu"),
        (fused_bias_swiglu, "swiglu"),
    ):
        yield one_kernel(module, name, OpClass.ELEMENTWISE)
        yield one_kernel(module, f"{name}_back", OpClass.ELEMENTWISE)

    def rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
        """Normalize as on CUDA; on other devices torch has no single kernel for it."""
        out: Tensor = _RMSNorm.apply(x, weight, counter)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
        return out

    yield nn.functional, "rms_norm", rms_norm
    yield fused_bias_dropout, "bias_dropout_add_fused_train", bias_dropout_add
    yield one_kernel(loss, "_compiled_statistics", OpClass.REDUCTION)
    yield one_kernel(loss, "_compiled_gradient", OpClass.ELEMENTWISE, in_place=1)


class _BiasDropoutAdd(torch.autograd.Function):
    """Add a bias, apply dropout, add a residual; counted as the kernels of torch.compile.

    The backward pass passes the gradient on. It computes the gradient of the bias and, with
    dropout, the gradient of the dropout's input.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float, counter: Counter
    ) -> Tensor:
        """Count the one kernel of the forward pass, and return an unfilled result."""
        with counter.paused():
            out = torch.empty_like(x)
            # The mask of dropout, one byte per element.
            keep = torch.empty_like(x, dtype=torch.bool) if dropout else None
        ctx.counter, ctx.keep = counter, keep
        ctx.bias_shape = None if bias is None else bias.shape
        inputs = [tensor for tensor in (x, bias, residual) if tensor is not None]
        outputs = [out] if keep is None else [out, keep]
        counter.kernel(OpClass.ELEMENTWISE, "bias_dropout_add", inputs, outputs)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        counter, d_x, d_bias = ctx.counter, d_out, None
        if ctx.keep is not None:
            with counter.paused():
                d_x = torch.empty_like(d_out)
            name = "bias_dropout_add_backward"
            counter.kernel(OpClass.ELEMENTWISE, name, [d_out, ctx.keep], [d_x])
        if ctx.bias_shape is not None:
            with counter.paused():
                d_bias = d_x.new_empty(ctx.bias_shape)
            counter.kernel(OpClass.REDUCTION, "bias_gradient", [d_x], [d_bias])
        return d_x, d_bias, d_out, None, None


class _RMSNorm(torch.autograd.Function):
    """Normalize rows, counted as torch's kernels (ATen/native/cuda/layer_norm_kernel.cu)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counter: Counter) -> Tensor:
        """Count the one kernel of the forward pass, and return an unfilled result."""
        with counter.paused():
            out, roots = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, roots)
        ctx.counter = counter
        counter.kernel(OpClass.NORM, "_fused_rms_norm", [x, weight], [out, roots])
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, roots = ctx.saved_tensors
        with ctx.counter.paused():
            results = torch.empty_like(x), torch.empty_like(weight)
        # One kernel for each result.
        for result, read in zip(results, ([d_out, x, weight, roots], [d_out, x, roots])):
            ctx.counter.kernel(OpClass.NORM, "_fused_rms_norm_backward", read, [result])
        return *results, None


def weight_gradients(counter: Counter) -> Iterator[Replacement]:
    """Yield stand-ins for the matrix product that adds a weight's gradient to an fp32 buffer.

    Its `out_dtype` exists only on CUDA (`pretrain.model.loss`).

    Args:
        counter: Counts the kernels.
    """

    def add(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        factors = [inputs, grad_output]
        if loss.take_stale(main_grad):
            counter.kernel(OpClass.MATMUL, "mm", factors, [main_grad])
        else:
            counter.kernel(OpClass.MATMUL, "addmm", [*factors, main_grad], [main_grad])

    yield loss, "add_weight_gradient", add


# ---- Count the cost of one optimizer step for each pipeline stage of a run ----
# The step is that of training (`pretrain.training.loop.queue_step`), in the loop's order: the host
# reads the numbers of a step after it has queued the next. The second step is counted, because the
# first creates Adam's state. A third step runs, because it waits for the weights that the second
# step gathers.


def count_run(config: RunConfig) -> dict[int, StepCounts]:
    """Count a step on one rank of every pipeline stage: tensor rank 0 of data rank 0.

    With context parallelism, the rank has the last part of the sequence, which sees the most keys.
    Under ZeRO 3 it has the first part, because DeepSpeed compares the order of modules with that of
    rank 0, which must then be the simulated rank itself (deepspeed/runtime/zero/utils.py,
    `assert_ints_same_as_other_ranks`).

    The ranks are simulated one after another. The job has parallel.world_size ranks, by default as
    few as its layout allows.

    Args:
        config: The run.

    Returns:
        The counts by pipeline stage.

    Raises:
        ConfigError: The model has an adaptive softmax.
    """
    check_counted(config)
    world_size = planned_world_size(config)
    layout = config.layout(world_size)
    part = 0 if config.parallel.zero_stage == 3 else layout.context - 1
    counts = {}
    for stage in range(layout.pipeline):
        rank = layout.tensor * (stage * layout.replicas + part)
        with simulated_rank(config, rank, world_size) as (topology, counter):
            counts[stage] = count_step(config, topology, counter)
    return counts


def planned_world_size(config: RunConfig) -> int:
    """Return parallel.world_size, or the fewest processes that the layout allows."""
    return config.parallel.world_size or config.parallel.ranks_per_copy


def run_without_data(config: RunConfig, topology: Topology) -> Run:
    """Return a run with initial weights and no data, for steps on batches that are passed to it."""
    chunks = build_model(config)
    return Run(
        config=config,
        whole=config,
        topology=topology,
        chunks=chunks,
        optimizer=ZeroOptimizer(config, topology, chunks),
        # No streams: the step reads its micro batches from the iterator that is passed to it.
        training_stream=None,  # type: ignore[arg-type]  # not read
        validation_stream=None,  # type: ignore[arg-type]  # not read
        state=TrainerState(step=0, consumed_samples=0),
        start_point=StartPoint(),
        requests=Requests(),
        reporter=AttemptReporter(),
    )


def count_step(config: RunConfig, topology: Topology, counter: Counter) -> StepCounts:
    """Build the model of this rank, take steps, and count the last one. All ranks together.

    Args:
        config: The run.
        topology: This rank's topology.
        counter: The active counter.
    """
    run = run_without_data(config, topology)
    # Any token will do, because the counts do not depend on which token ends a document.
    run.eos_id = 0 if config.data.per_document_attention else None
    run.ledger = loop.begin_ledger(run)
    shape = (config.batch.micro_batch_size, config.data.sequence_length + 1)
    with counter.paused():
        tokens = torch.ones(shape, dtype=torch.int64, device="cpu")
    batches = itertools.repeat([tokens] * topology.layout.num_microbatches)
    with _markers(counter, run.optimizer):
        first = loop.queue_step(run, batches, platform.Moment())
        counter.counts = counts = StepCounts()
        second = loop.queue_step(run, batches, first.end)
        first.read()
        counter.counts = StepCounts()
        loop.queue_step(run, batches, second.end)
    return counts


@contextlib.contextmanager
def _markers(counter: Counter, optimizer: ZeroOptimizer) -> Iterator[None]:
    """Tell the counter which part of a step runs, by wrapping the functions of a step.

    This also replaces functions of `platform` that differ on a GPU: the step's numbers arrive in
    host memory, and the host waits for their arrival.
    """
    marks: list[tuple[Any, str, Phase]] = [
        (loop, "forward_backward", Phase.BETWEEN_PASSES),
        (forward, "call_model", Phase.FORWARD),
        (optimizer, "begin_step", Phase.OPTIMIZER_STEP),
        (optimizer, "reduce_gradients", Phase.GRADIENT_REDUCTION),
        (optimizer, "update", Phase.OPTIMIZER_STEP),
        (step, "_sum_over_ranks", Phase.LOSS_AVERAGE),
        (step.QueuedStep, "read", Phase.LOSS_AVERAGE),
    ]

    def numbers(readback: platform.Readback) -> list[float]:
        counter.synchronized("numbers")
        with counter.paused():
            return read(readback)

    def synchronize() -> None:
        counter.synchronized("synchronize")

    read = platform.Readback.numbers
    with contextlib.ExitStack() as stack:
        for owner, name, phase in marks:
            wrapped = counter.marked(phase, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, wrapped))
        stack.enter_context(patch.object(platform.Readback, "numbers", numbers))
        stack.enter_context(patch.object(platform, "to_device", counter.to_device))
        stack.enter_context(patch.object(platform, "synchronize", synchronize))
        yield

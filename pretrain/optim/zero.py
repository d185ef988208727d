"""The optimizer: DeepSpeed ZeRO shards its state, and Megatron's schedule runs the model.

Megatron runs forward and backward passes, and DeepSpeed owns the optimizer's state. How they work
together depends on the ZeRO stage:

- Stage 1 shards the optimizer's state only. Megatron's schedule runs the raw model chunks, so any
  schedule works (1F1B, interleaved). DeepSpeed lays out the weights and keeps this rank's masters;
  gradients are reduced while the backward pass runs (pretrain/optim/sharded_step.py), the update
  changes only this rank's part, and updated weights are gathered while the next forward pass
  begins (pretrain/optim/buckets.py).
- Stages 2 and 3 also shard gradients, and stage 3 weights, inside the backward pass. The schedule
  must then call DeepSpeed's engine instead of the model. The config refuses these stages with
  pipeline parallelism (pretrain/config/rules.py).

ZeRO shards over the replicas (`pretrain.topology`). With a single replica there is nothing to
shard, and every stage is treated as stage 1.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from pretrain import platform
from pretrain.config import RunConfig, num_parameters
from pretrain.model.gpt import Named, choose_fusion, named_parameters
from pretrain.optim.buckets import Bucket, plan_buckets, reduce_sequence_parallel_on_accumulation
from pretrain.optim.optimizers import Optimizer, Shard
from pretrain.optim.sharded_step import ShardedStep, Veto
from pretrain.topology import Topology, replica_group

# ---- state ----
# The optimizer's state on this rank, as views into the flat buffers in which DeepSpeed keeps it.
#
# ZeRO flattens the parameters of a group, cuts the result over the data-parallel ranks and keeps
# the fp32 master weights and the optimizer's moments of one part per rank. This module finds, for
# each parameter, which range of it this rank keeps and where. The buffers' names are those of
# deepspeed 0.19 (deepspeed/runtime/zero/stage_1_and_2.py and stage3.py).


LOSS_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Fields of DeepSpeed's DynamicLossScaler that change in training (deepspeed/runtime/fp16)."""


@dataclass(frozen=True)
class Fragment:
    """The contiguous range of one parameter whose optimizer state this rank keeps."""

    named: Named
    start: int
    """First element of the range, in this tensor rank's part of the parameter, row-major."""
    tensors: dict[str, Tensor]
    """"master" and the optimizer's moments, each fp32 [n]: the range is [start, start + n). The
    tensors are views, so writing to them changes the optimizer's state."""


@dataclass(frozen=True)
class OptimizerState:
    """Everything that a checkpoint needs of the optimizer on this rank."""

    fragments: list[Fragment]
    adam_steps: int
    """Number of updates so far."""
    loss_scaler_state: dict[str, float] | None
    """The fields of fp16's dynamic loss scaler; None in other precisions."""


def read_fragments(optimizer: ZeroOptimizer) -> Iterator[Fragment]:
    """Yield this rank's fragments, in the order of its parameters.

    Optimizers create their moments at the first update. If there was none, because the optimizer is
    new or every step so far has overflowed in fp16, this creates the zero moments with which the
    optimizer would start, so that a state can always be saved and loaded.
    """
    if not all(optimizer.zero.optimizer.state[flat] for flat in flat_masters(optimizer)):
        for flat in flat_masters(optimizer):
            moments = {moment: torch.zeros_like(flat) for moment in optimizer.moments}
            step = torch.zeros((), device=flat.device)
            optimizer.zero.optimizer.state[flat] = {"step": step, **moments}
    find = _stage3_range if optimizer.stage == 3 else _stage12_range
    for named in optimizer.parameters:
        found = find(optimizer, named)
        if found is not None:
            yield Fragment(named, *found)


def flat_masters(optimizer: ZeroOptimizer) -> list[Tensor]:
    """Return the flat fp32 masters of each parameter group, which are keys of Adam's state."""
    if optimizer.stage == 3:
        return list(optimizer.zero.fp32_partitioned_groups_flat)
    return list(optimizer.zero.single_partition_of_fp32_groups)


def _stage12_range(optimizer: ZeroOptimizer, named: Named) -> tuple[int, dict[str, Tensor]] | None:
    """Return a parameter's (start, tensors) under ZeRO 1 and 2, None if this rank has none of it.

    Each data-parallel rank keeps one flat range of the whole group, which may begin and end within
    a parameter. `_hp_mapping` (deepspeed/utils/tensor_fragment.py) holds the overlap with a
    parameter: its address in the rank's buffer (`hp`) and in the parameter (`lp`).
    """
    mapping = cast(Any, named.parameter)._hp_mapping
    if mapping is None:
        return None
    flat = flat_masters(optimizer)[mapping.param_group_index]
    state = optimizer.zero.optimizer.state[flat]
    buffers = {"master": flat.detach(), **{moment: state[moment] for moment in optimizer.moments}}
    address = mapping.hp_fragment_address
    tensors = {
        key: buffer.narrow(0, address.start, address.numel) for key, buffer in buffers.items()
    }
    return mapping.lp_fragment_address.start, tensors


def _stage3_range(optimizer: ZeroOptimizer, named: Named) -> tuple[int, dict[str, Tensor]] | None:
    """Return a parameter's (start, tensors) under ZeRO 3, None if this rank has only padding.

    ZeRO 3 cuts every parameter into equal parts, one per data-parallel rank, and pads the last
    ones (deepspeed/runtime/zero/partition_parameters.py, `_partition_param`).
    """
    parameter = cast(Any, named.parameter)
    start, count = _stage3_part(parameter)
    if count <= 0:
        return None
    tensors = {}
    # DeepSpeed returns the master if no key of the optimizer's state is given.
    for key in ("master", *optimizer.moments):
        state_key = None if key == "master" else key
        part, _ = optimizer.zero._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=state_key
        )
        tensors[key] = part.detach().view(-1)[:count]
    return start, tensors


def _stage3_part(parameter: Any) -> tuple[int, int]:
    """Return where this rank's part begins, and how many of its elements are not padding."""
    size = parameter.ds_tensor.numel()
    start = replica_group().rank() * size
    return start, max(0, min(size, parameter.ds_numel - start))


def _clear_padding(optimizer: ZeroOptimizer) -> None:
    """Set ZeRO 3's padding to 0. DeepSpeed leaves in it whatever the memory held."""
    for parameter in (cast(Any, named.parameter) for named in optimizer.parameters):
        _, count = _stage3_part(parameter)
        master, _ = optimizer.zero._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False
        )
        for part in (parameter.ds_tensor.data, master.detach()):
            part.view(-1)[count:] = 0


# DeepSpeed's default reduction bucket, in elements.
DEFAULT_BUCKET_SIZE = 500_000_000


class ZeroOptimizer:
    """The optimizer of a run, whose state ZeRO shards over the data-parallel ranks."""

    def __init__(self, config: RunConfig, topology: Topology, chunks: list[GPTModel]) -> None:
        """Build DeepSpeed's engine around the model. All ranks call this together.

        Args:
            config: The run, for [optimizer], [parallel] and train.precision.
            topology: The processes' layout.
            chunks: This rank's model chunks. ZeRO 1 moves their parameters into flat tensors, and
                ZeRO 3 replaces their storage.
        """
        self.stage = topology.layout.zero_stage
        self.before_change: Callable[[], None] = lambda: None
        """Called before the state changes. A save that still copies the state waits here."""
        self.is_fp16 = config.train.precision == "fp16"
        self.moments = config.moments
        """Names of the tensors that the optimizer keeps for each parameter besides the master."""
        self.clip_grad = config.optimizer.clip_grad
        # Listed before DeepSpeed gets the model, because ZeRO 3's parameters are empty afterwards.
        self.parameters: list[Named] = list(named_parameters(chunks))
        buckets = plan_buckets(config, self.parameters, self.stage)
        if self.stage > 1:
            # Before `deepspeed.initialize`, because hooks run in the order of their registration.
            reduce_sequence_parallel_on_accumulation(chunks)
        self.engine = _build_engine(config, topology, chunks, buckets)
        self._sharded_step: ShardedStep | None = None
        if self.stage == 3:
            _clear_padding(self)
        if self.stage == 1:
            self._sharded_step = ShardedStep(
                self.zero,
                chunks,
                buckets,
                clip_grad=self.clip_grad,
                wire_dtype=platform.DTYPES[config.parallel.gradient_reduce_dtype],
                add_in_layers=choose_fusion(config).weight_gradients,
            )
        if self.is_fp16:
            # Megatron's schedule multiplies the loss by `grad_scale_func` before the backward
            # pass. DeepSpeed must then not insist on scaling it: its engine raises unless
            # `engine.backward` is called (deepspeed/runtime/engine.py, `_backward_post_hook`).
            self.engine.optimizer.needs_scaler = lambda: False
            # DeepSpeed's step at stages 2 and 3 changes the scale before it divides gradients and
            # their norm by it (zero/stage_1_and_2.py and stage3.py, `step`), so in a step at which
            # the scale grows they would be half as large. `update` changes it afterwards.
            self.engine.optimizer._update_scale = lambda overflow: None
            # All chunks share one TransformerConfig.
            chunks[0].config.grad_scale_func = lambda loss: loss * self.zero.loss_scale

    @property
    def zero(self) -> Any:
        """DeepSpeed's ZeRO optimizer, which wraps a `FlatOptimizer`; only for pretrain/optim."""
        return self.engine.optimizer

    @property
    def schedule_module(self) -> nn.Module | None:
        """Return the module that Megatron's schedule calls in place of a chunk; None: the chunk.

        ZeRO 2 and 3 need the engine's `forward`, which prepares their reductions for the backward
        pass. ZeRO 3's weights are only available through it, in evaluation too.
        """
        return None if self.stage == 1 else self.engine

    @property
    def loss_scale(self) -> float | None:
        """Return the current dynamic loss scale of fp16; None in other precisions."""
        return float(self.zero.loss_scale) if self.is_fp16 else None

    @property
    def scaler_fields(self) -> dict[str, float] | None:
        """Return the fields of fp16's dynamic loss scaler; None in other precisions."""
        if not self.is_fp16:
            return None
        return {each: getattr(self.zero.loss_scaler, each) for each in LOSS_SCALER_FIELDS}

    @property
    def own_square(self) -> Tensor | None:
        """Return this rank's share of the last squared gradient norm; None at stages 2 and 3."""
        return self._sharded_step.own_square if self._sharded_step is not None else None

    @property
    def own_sums(self) -> list[Tensor]:
        """Return the gradients of this rank's samples, fp32, by bucket; stage 1 only.

        Sending overwrites them.
        """
        assert self._sharded_step is not None
        return [bucket.gradients for bucket in self._sharded_step.reducer.buckets]

    def state(self) -> OptimizerState:
        """Return this rank's share of masters and moments, as views, and the optimizer's scalars.

        Writing to the tensors changes the optimizer, which is how a checkpoint is loaded: fill
        them in place, then call `load_state`.
        """
        fragments = list(read_fragments(self))
        # Number of updates, which fp16 skips after an overflow.
        [steps] = {int(self.zero.optimizer.state[flat]["step"]) for flat in flat_masters(self)}
        return OptimizerState(fragments, steps, self.scaler_fields)

    def load_state(self, adam_steps: int, loss_scaler: dict[str, float] | None) -> None:
        """Complete a load after the tensors of `state` were filled. All ranks call this together.

        This sets the model's weights from the masters. Each data-parallel rank has read only its
        part of them, and the ranks send the parts to each other.

        Args:
            adam_steps: Number of updates when the state was saved.
            loss_scaler: The saved loss scaler's fields; ignored unless this run trains in fp16.
        """
        for flat in flat_masters(self):
            # On the device, where AdamW's fused kernel reads it.
            step = torch.tensor(float(adam_steps), device=flat.device)
            self.zero.optimizer.state[flat]["step"] = step
        if self._sharded_step is not None:
            self._sharded_step.refresh_weights()
        elif self.stage == 3:
            # ZeRO 3 also keeps partitions in the model's dtype, which it gathers before a layer
            # runs.
            for fragment in read_fragments(self):
                master = fragment.tensors["master"]
                partition = cast(Any, fragment.named.parameter).ds_tensor
                partition.data.view(-1)[: master.numel()].copy_(master)
        else:
            self.zero.update_lp_params()
        if self.is_fp16 and loss_scaler:
            for field, value in loss_scaler.items():
                setattr(self.zero.loss_scaler, field, value)

    def begin_step(self, num_microbatches: int, *, holds_back: bool = False) -> None:
        """Prepare for the backward passes of a step.

        Args:
            num_microbatches: Number of backward passes.
            holds_back: Send no gradient before `reduce_gradients`, so that `own_sums` can be read.
        """
        if self._sharded_step is not None:
            # A bucket is sent when the last backward pass has reached it; one pass that never
            # comes holds all of them back.
            self._sharded_step.reducer.begin_step(num_microbatches + holds_back)

    def reduce_gradients(self) -> None:
        """Complete the sums of gradients over the ranks, which the backward pass has begun.

        At stages 2 and 3 the backward pass has completed them.
        """
        if self._sharded_step is not None:
            self._sharded_step.reduce()

    def update(self, learning_rate: float, veto: Veto | None = None) -> Tensor:
        """Clip the reduced gradients by their global norm, and update the weights.

        Args:
            learning_rate: The learning rate of this step, without the buckets' factors.
            veto: Decides from the norm whether to skip the update; the same on all ranks. Stage 1.

        Returns:
            The global gradient norm before clipping, a scalar on the device. If it is not finite,
            the weights have not been updated, and in fp16 the loss scale has been lowered.
        """
        self.before_change()
        for group in self.zero.param_groups:
            group["lr"] = learning_rate * group["lr_mult"]
        if self._sharded_step is None:
            assert veto is None, "refused by pretrain/config/rules.py"
            self.engine.step()
            # DeepSpeed reports the norm of gradients that hold a NaN as infinite, too.
            norm = torch.tensor(float(self.engine.get_global_grad_norm()), dtype=torch.float64)
        else:
            norm = self._sharded_step.update(self.loss_scale or 1.0, veto)
        if self.is_fp16:
            # The host must wait here, because the next step's loss scale depends on whether this
            # step overflowed. DeepSpeed reports the norm after an overflow as infinite.
            overflow = not math.isfinite(float(norm))
            self.zero.loss_scaler.update_scale(overflow)
            if overflow:
                norm = torch.full_like(norm, math.inf)
        return norm

    def wait_for_weights(self) -> None:
        """Wait for weights that are still being gathered, to read them outside a forward pass."""
        if self._sharded_step is not None:
            self._sharded_step.gather.wait()

    def step(self, learning_rate: float, veto: Veto | None = None) -> Tensor:
        """Reduce the gradients and update the weights: `reduce_gradients`, then `update`."""
        self.reduce_gradients()
        return self.update(learning_rate, veto)

    def release(self) -> None:
        """Drop parameters and state, so that another optimizer can use their memory."""
        zero = self.zero
        self.engine.destroy()
        # DeepSpeed's lists and hooks keep stage 3 alive (runtime/zero/parameter_offload.py), so
        # remove the tensors from it.
        self.engine.optimizer = self.engine.basic_optimizer = None
        zero.optimizer.state.clear()
        zero.optimizer.param_groups.clear()
        vars(zero).clear()
        # Hooks and DeepSpeed's attributes form reference cycles with parameters and buckets, which
        # Python's collector cannot see.
        for parameter in (cast(Any, named.parameter) for named in self.parameters):
            (parameter._post_accumulate_grad_hooks or {}).clear()
            vars(parameter).clear()
            parameter.data = parameter.data.new_empty(0)


def deepspeed_config(config: RunConfig, topology: Topology) -> dict[str, Any]:
    """Return DeepSpeed's configuration. No other function makes one.

    Args:
        config: The run.
        topology: The processes' layout.
    """
    stage = topology.layout.zero_stage
    # The default of 5e8 elements would take 2 GB in fp32, which a small model does not need.
    bucket_size = min(DEFAULT_BUCKET_SIZE, num_parameters(config))
    bucket_size += bucket_size % 2  # An odd one is refused.
    result: dict[str, Any] = {
        "train_batch_size": topology.layout.replicas,
        # To DeepSpeed a step is one sample per rank. Megatron's schedule splits it into micro
        # batches and averages over them, so the engine must neither divide gradients by a number
        # of accumulation steps nor count backward passes to find out where a step ends: with
        # managed_gradient_accumulation = false, `engine.step()` is the end of the step
        # (deepspeed/runtime/engine.py, `is_gradient_accumulation_boundary`).
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.clip_grad,
        # DeepSpeed's own progress lines are not wanted.
        "steps_per_print": 10**9,
        # DeepSpeed has a list of tested classes (zero/utils.py). An optimizer must update each
        # element separately, as ours do; tests/distributed tests them.
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            # At stage 1 this would install gradient hooks that follow the engine's backward pass
            # (zero/stage_1_and_2.py, `create_gradient_handling_hooks`), which never runs there.
            "contiguous_gradients": stage != 1,
            # Refused without managed accumulation, except at stage 2 (engine.py).
            "overlap_comm": False,
            "reduce_scatter": True,
            # At stage 2, reduce_scatter would otherwise be an all-reduce of which each rank keeps
            # its part (zero/stage_1_and_2.py, `average_tensor`). Reducing to the owner halves the
            # bytes.
            "use_multi_rank_bucket_allreduce": False,
            "reduce_bucket_size": bucket_size,
            "allgather_bucket_size": bucket_size,
            # Parameters below the threshold would stay gathered, and `load_state`, which writes to
            # the partitions, would not reach them.
            "stage3_param_persistence_threshold": 0,
        },
    }
    if config.train.precision == "bf16":
        # With immediate_grad_update, stages 2 and 3 accumulate gradients in hooks on each backward
        # pass. Without it the engine's backward pass would, which never runs.
        result["bf16"] = {"enabled": True, "immediate_grad_update": True}
    if config.train.precision == "fp16":
        result["fp16"] = {
            "enabled": True,
            "initial_scale_power": config.optimizer.initial_loss_scale_power,
        }
    if config.train.precision != "fp32" and stage > 1:
        # By default gradients are added up and reduced in the dtype of the model: the sums of the
        # micro batches are cast to bf16, added over the ranks in bf16 and copied back (engine.py,
        # `allreduce_bucket`). Stage 1 has its own sums, and with grad_accum_dtype it would get
        # another class than DeepSpeedZeroOptimizer (engine.py, `_do_optimizer_sanity_check`).
        result["communication_data_type"] = "fp32"
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    return result


def _build_engine(
    config: RunConfig, topology: Topology, chunks: list[GPTModel], buckets: list[Bucket]
) -> Any:
    """Return DeepSpeed's engine over the optimizer and this rank's chunks.

    Args:
        config: The run.
        topology: The processes' layout.
        chunks: This rank's model chunks.
        buckets: All their parameters; each bucket becomes a parameter group.
    """
    # Imported late: DeepSpeed chooses its accelerator at import, from the environment that
    # `platform.prepare` has set.
    import deepspeed

    groups = [
        {"params": b.parameters, "weight_decay": b.weight_decay, "lr_mult": b.lr_mult}
        for b in buckets
    ]
    # The bf16 optimizer prints the memory in use for every group (deepspeed/runtime/
    # bf16_optimizer.py calls `see_memory_usage` with force=True).
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            # Several chunks are wrapped only so that the engine finds their parameters: a
            # ModuleList has no forward, and at stage 1 the engine's is never called.
            model=chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks),
            optimizer=FlatOptimizer(config.optimizer, groups),
            config=deepspeed_config(config, topology),
            mpu=_ModelParallelUnit(),
            dist_init_required=False,
        )
    return engine


class FlatOptimizer(torch.optim.Optimizer):
    """The optimizer as a torch.optim.Optimizer, to which DeepSpeed gives this rank's masters.

    The state of each tensor is its moments and "step", the number of updates, on the device.
    """

    grad_scale: Tensor | None = None
    """Divisor of the gradients, a scalar; None for 1."""
    found_inf: Tensor | None = None
    """1 to skip the update, else 0, a scalar; None for 0."""

    # Unwrapped, because torch's decorator loads torch._dynamo (torch/_compile.py) and with it 200
    # modules: 0.7 of the 4 processor seconds in which a rank starts.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    def __init__(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Initialize with parameter groups, each of which has its "weight_decay"."""
        super().__init__(groups, {"lr": optimizer.learning_rate})
        self._optimizer = optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """Update the weights that have a gradient."""
        made = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["step"] = torch.zeros((), device=weights.device)
                    state |= {each: torch.zeros_like(weights) for each in self._optimizer.moments}
                state["step"] += made
                shard = Shard(
                    weights,
                    weights.grad,
                    {each: state[each] for each in self._optimizer.moments},
                    state["step"],
                    group["lr"],
                    group["weight_decay"],
                    self.grad_scale,
                    self.found_inf,
                )
                self._optimizer.update(shard)


class _ModelParallelUnit:
    """The object ("mpu") through which DeepSpeed 0.19 asks for Megatron's process groups.

    DeepSpeed's calls have the names of Megatron's functions, with two exceptions: DeepSpeed's model
    parallelism is tensor x pipeline parallelism. Its data-parallel ranks are all replicas.
    """

    def __getattr__(self, name: str) -> Any:
        function = getattr(parallel_state, name)
        if name.startswith("get_data_parallel_"):
            return functools.partial(function, with_context_parallel=True)
        return function

    @staticmethod
    def get_model_parallel_world_size() -> int:
        return int(parallel_state.get_model_parallel_group().size())

    @staticmethod
    def get_model_parallel_rank() -> int:
        return int(parallel_state.get_model_parallel_group().rank())

"""DeepSpeed ZeRO under Megatron's schedule: the engine, and one optimizer step.

Megatron runs forward and backward passes, DeepSpeed owns the optimizer. How they meet depends on
the ZeRO stage:

- Stage 1 shards the optimizer's state only. Megatron's schedule runs the raw model chunks, so any
  schedule works (1F1B, interleaved), and DeepSpeed sees nothing before `engine.step()`, which
  reduces the gradients over the data-parallel ranks.
- Stages 2 and 3 also shard gradients (and weights), which happens inside the backward pass. There
  the schedule has to call the engine instead of the model. The config refuses them with pipeline
  stages (pretrain/config/rules.py).
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from pretrain.config import RunConfig, RunFailed, num_parameters
from pretrain.model.parameters import Named, is_pipeline_copy, named_parameters
from pretrain.optim.gradients import finalize_gradients, reduce_sequence_parallel_on_accumulation
from pretrain.optim.state import (
    OptimizerState,
    adam_steps,
    copy_masters_to_partitions,
    loss_scaler_state,
    read_fragments,
    set_adam_steps,
    set_loss_scaler_state,
)
from pretrain.topology import Topology

# DeepSpeed's default reduction bucket, in elements.
DEFAULT_BUCKET_SIZE = 500_000_000


class ZeroOptimizer:
    """AdamW whose state ZeRO shards over the data-parallel ranks."""

    def __init__(self, config: RunConfig, topology: Topology, chunks: list[GPTModel]) -> None:
        """Build DeepSpeed's engine around the model. All ranks together.

        Args:
            config: The run; its [optimizer], parallel.zero_stage and train.precision.
            topology: The processes' layout.
            chunks: This rank's model chunks. ZeRO 3 replaces their parameters' storage.
        """
        self.chunks = chunks
        self.stage = config.parallel.zero_stage
        self.is_fp16 = config.train.precision == "fp16"
        # Listed before DeepSpeed is given the model: afterwards ZeRO 3's parameters are empty.
        self.parameters: list[Named] = list(named_parameters(chunks))
        for named in self.parameters:
            # Otherwise the global gradient norm would count parameters that several pipeline
            # stages hold more than once (`get_global_norm_of_tensors`' callers in
            # zero/stage_1_and_2.py and bf16_optimizer.py skip those with this mark).
            if is_pipeline_copy(named.parameter, named.name):
                named.parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]  # DeepSpeed
        if self.stage > 1:
            # Before `deepspeed.initialize`: hooks run in the order of their registration.
            reduce_sequence_parallel_on_accumulation(chunks)
        self.engine = _build_engine(config, topology, chunks)
        if self.stage == 1 and config.train.precision == "bf16" and topology.layout.data == 1:
            # There is no rank to reduce with. BF16_Optimizer leaves the reduction to the engine,
            # which copies and "reduces" all gradients on a single rank, too. In the other
            # precisions this call also moves gradients to their partitions, so there it stays.
            self.engine.allreduce_gradients = lambda *args, **kwargs: None
        if self.is_fp16:
            # Megatron's schedule multiplies the loss by `grad_scale_func` before the backward
            # pass. DeepSpeed must then not insist on scaling it: its engine raises unless
            # `engine.backward` is called (deepspeed/runtime/engine.py, `_backward_post_hook`).
            self.engine.optimizer.needs_scaler = lambda: False
            # All chunks share one TransformerConfig.
            chunks[0].config.grad_scale_func = self._scale_loss

    @property
    def zero(self) -> Any:
        """DeepSpeed's ZeRO optimizer, which wraps AdamW. For pretrain/optim alone."""
        return self.engine.optimizer

    @property
    def schedule_module(self) -> nn.Module | None:
        """The module that Megatron's schedule has to call in place of a chunk; None: the chunk.

        ZeRO 2 and 3 need the engine's `forward`, which prepares their reductions for the backward
        pass. ZeRO 3's weights can be used through it alone, in evaluation too.
        """
        return None if self.stage == 1 else self.engine

    @property
    def loss_scale(self) -> float | None:
        """fp16: the current dynamic loss scale. None in other precisions."""
        return float(self.zero.loss_scale) if self.is_fp16 else None

    @property
    def partitions_weights(self) -> bool:
        """True under ZeRO 3, where no rank holds a whole weight."""
        return self.stage == 3

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Global names and global shapes of the parameters of which this rank holds a part."""
        return {named.name: list(named.global_shape) for named in self.parameters}

    def state(self) -> OptimizerState:
        """Return this rank's share of masters and moments, as views, and the optimizer's scalars.

        Writing to the tensors changes the optimizer, which is how a checkpoint is loaded: fill
        them in place, then call `load_state`.
        """
        fragments = list(read_fragments(self))
        return OptimizerState(fragments, adam_steps(self), loss_scaler_state(self))

    def load_state(self, adam_steps: int, loss_scaler: dict[str, float] | None) -> None:
        """Complete a load after the tensors of `state` have been filled.

        Under ZeRO 3 the model's weights are set from the masters. In the other stages each rank
        holds whole weights but only fragments of the masters, so the caller loads the weights.

        Args:
            adam_steps: Number of updates made when the state was saved.
            loss_scaler: The saved loss scaler's fields; ignored unless this run trains in fp16.
        """
        set_adam_steps(self, adam_steps)
        if self.partitions_weights:
            copy_masters_to_partitions(self)
        if self.is_fp16 and loss_scaler:
            set_loss_scaler_state(self, loss_scaler)

    def step(self, learning_rate: float) -> float:
        """Reduce the gradients, clip them by their global norm, and update the weights.

        Args:
            learning_rate: AdamW's learning rate for this step.

        Returns:
            The global gradient norm before clipping. In fp16, inf when a gradient overflowed: the
            update was skipped and the loss scale lowered.

        Raises:
            RunFailed: The norm is not finite, and the precision is not fp16. The weights in memory
                are then worthless.
        """
        # At stages 2 and 3 the same sums were taken during the backward pass.
        if self.stage == 1:
            finalize_gradients(self.chunks)
        for group in self.zero.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(norm) and not self.is_fp16:
            raise RunFailed(
                f"the gradient norm is {norm}. Resume from the last checkpoint with a lower "
                "optimizer.learning_rate, a longer schedule.lr_warmup_steps or a smaller "
                "optimizer.clip_grad"
            )
        return norm

    def wrap_gradient_reduction(
        self, wrap: Callable[[Callable[..., None]], Callable[..., None]]
    ) -> None:
        """Replace the reduction over the data-parallel ranks by `wrap(reduction)`, to measure it.

        At stage 1 it is one call in `step`. At stages 2 and 3 it runs in pieces within the backward
        pass and cannot be told apart from it, so nothing is wrapped.
        """
        if self.stage == 1:
            self.engine.allreduce_gradients = wrap(self.engine.allreduce_gradients)

    def _scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the dynamic loss scale."""
        scaled: Tensor = loss * self.zero.loss_scale
        return scaled


def parameter_groups(config: RunConfig, chunks: list[GPTModel]) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: matrices are decayed, everything else is not.

    Not decayed are biases, layer norms and what a position method learns per head.
    """
    decayed: list[nn.Parameter] = []
    not_decayed: list[nn.Parameter] = []
    for named in named_parameters(chunks):
        is_matrix = len(named.global_shape) == 2 and not named.name.startswith("position.")
        (decayed if is_matrix else not_decayed).append(named.parameter)
    groups = [
        {"params": decayed, "weight_decay": config.optimizer.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    # A pipeline stage may have no parameter of a kind; DeepSpeed cannot flatten an empty group.
    return [group for group in groups if group["params"]]


def deepspeed_config(config: RunConfig, topology: Topology) -> dict[str, Any]:
    """Return DeepSpeed's configuration; it is written here and nowhere else.

    Args:
        config: The run.
        topology: The processes' layout, which gives the samples per data-parallel rank.
    """
    stage = config.parallel.zero_stage
    # The default of 5e8 elements would take 2 GB of fp32 that a small model has no use for.
    bucket_size = min(DEFAULT_BUCKET_SIZE, num_parameters(config))
    result: dict[str, Any] = {
        "train_batch_size": config.batch.global_batch_size,
        # To DeepSpeed a step is one batch per rank. Megatron's schedule splits it into micro
        # batches and averages over them, so the engine must neither divide gradients by a number
        # of accumulation steps nor count backward passes to find out where a step ends: with
        # managed_gradient_accumulation = false, `engine.step()` is the end of the step
        # (deepspeed/runtime/engine.py, `is_gradient_accumulation_boundary`).
        "train_micro_batch_size_per_gpu": config.batch.global_batch_size // topology.layout.data,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.clip_grad,
        # DeepSpeed's own progress lines are not wanted.
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            # At stage 1 this would install gradient hooks that follow the engine's backward pass
            # (zero/stage_1_and_2.py, `create_gradient_handling_hooks`), which never runs there.
            "contiguous_gradients": stage != 1,
            # Refused without managed accumulation, except at stage 2 (engine.py).
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket_size,
            "allgather_bucket_size": bucket_size,
            # Parameters below the threshold would stay gathered, and `load_state`, which writes to
            # the partitions, would not reach them.
            "stage3_param_persistence_threshold": 0,
        },
    }
    if config.train.precision == "bf16":
        # Gradients are added up in fp32 by hooks on each backward pass. Without
        # immediate_grad_update the engine's backward pass would do it (bf16_optimizer.py,
        # `update_hp_grads`), which never runs at stage 1.
        result["bf16"] = {"enabled": True, "immediate_grad_update": True}
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.train.precision != "fp32":
        # By default gradients are reduced in the model's dtype: the fp32 sums are cast to bf16,
        # added over the ranks in bf16 and copied back (engine.py, `allreduce_bucket`). Measured,
        # relative to a sum in fp64: 4e-3 on 4 ranks, and 2e-9 with this (tests/distributed).
        result["communication_data_type"] = "fp32"
    if config.train.precision == "fp16":
        result["fp16"] = {
            "enabled": True,
            "initial_scale_power": config.optimizer.initial_loss_scale_power,
        }
    return result


def _build_engine(config: RunConfig, topology: Topology, chunks: list[GPTModel]) -> Any:
    """Return DeepSpeed's engine over AdamW and this rank's chunks."""
    # Imported late: DeepSpeed chooses its accelerator at import, from the environment that
    # `platform.prepare` has set.
    import deepspeed

    adam = torch.optim.AdamW(
        parameter_groups(config, chunks),
        lr=config.optimizer.learning_rate,
        betas=(config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        eps=config.optimizer.adam_eps,
    )
    # The bf16 optimizer prints the memory in use for every group (deepspeed/runtime/
    # bf16_optimizer.py calls `see_memory_usage` with force=True).
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            # Several chunks are wrapped only so that the engine finds their parameters: a
            # ModuleList has no forward, and at stage 1 the engine's is never called.
            model=chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks),
            optimizer=adam,
            config=deepspeed_config(config, topology),
            mpu=_ModelParallelUnit(),
            dist_init_required=False,
        )
    return engine


class _ModelParallelUnit:
    """The object ("mpu") through which DeepSpeed 0.19 asks for Megatron's process groups.

    What DeepSpeed calls model parallel is tensor x pipeline parallel.
    """

    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_world_size)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_model_parallel_group = staticmethod(parallel_state.get_model_parallel_group)
    get_tensor_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_tensor_model_parallel_world_size = staticmethod(
        parallel_state.get_tensor_model_parallel_world_size
    )
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_pipeline_model_parallel_group = staticmethod(
        parallel_state.get_pipeline_model_parallel_group
    )
    get_pipeline_model_parallel_world_size = staticmethod(
        parallel_state.get_pipeline_model_parallel_world_size
    )
    get_pipeline_model_parallel_rank = staticmethod(parallel_state.get_pipeline_model_parallel_rank)

    @staticmethod
    def get_model_parallel_world_size() -> int:
        return int(parallel_state.get_model_parallel_group().size())

    @staticmethod
    def get_model_parallel_rank() -> int:
        return int(parallel_state.get_model_parallel_group().rank())

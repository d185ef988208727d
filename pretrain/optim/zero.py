"""DeepSpeed ZeRO under Megatron's schedule: the engine built from our config, gradients made whole, one step.

Stage 1 takes the raw module under any schedule; `engine.step()` reduces over the data-parallel ranks. Stages 2 and 3
reduce inside the backward pass, so there the engine itself is the module.
"""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from pretrain.config import RunConfig, RunFailed, num_parameters
from pretrain.model.parameters import is_pipeline_copy, named_parameters
from pretrain.topology import Topology


class ZeroOptimizer:
    """AdamW whose state is sharded by ZeRO over the data-parallel ranks."""

    def __init__(self, config: RunConfig, topology: Topology, chunks: list[GPTModel]) -> None:
        import deepspeed

        self.config, self.chunks = config, chunks
        self.stage = config.parallel.zero_stage
        self.is_fp16 = config.train.precision == "fp16"
        for named in named_parameters(chunks):
            # Or the global norm counts what several stages hold more than once (deepspeed/runtime/utils.py).
            if is_pipeline_copy(named.parameter, named.name):
                named.parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
        if self.stage > 1:
            _reduce_sequence_parallel_on_accumulation(chunks)
        o = config.optimizer
        adam = torch.optim.AdamW(
            parameter_groups(config, chunks),
            lr=o.learning_rate,
            betas=(o.adam_beta1, o.adam_beta2),
            eps=o.adam_eps,
        )
        with contextlib.redirect_stdout(
            io.StringIO()
        ):  # its bf16 optimizer prints the memory in use
            self.engine: Any = deepspeed.initialize(
                model=chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks),
                optimizer=adam,
                config=deepspeed_config(config, topology),
                mpu=_Mpu(),
                dist_init_required=False,
            )[0]
        if self.is_fp16:
            # Megatron's schedule scales the loss (`scale_loss`); DeepSpeed must not ask for a scaling of its own.
            self.engine.optimizer.needs_scaler = lambda: False
            chunks[0].config.grad_scale_func = self.scale_loss

    @property
    def modules(self) -> list[nn.Module]:
        """What Megatron's schedule runs: our chunks, or the engine where it reduces in the backward pass."""
        return list(self.chunks) if self.stage == 1 else [self.engine]

    @property
    def zero(self) -> Any:
        """DeepSpeed's ZeRO optimizer."""
        return self.engine.optimizer

    def scale_loss(self, loss: Tensor) -> Tensor:
        """fp16: the loss times the dynamic scale."""
        return loss * self.zero.loss_scale

    def step(self, learning_rate: float) -> float:
        """Reduces gradients, clips, updates. Returns the global gradient norm before clipping.

        fp16: an overflow skips the update, lowers the loss scale and returns inf. Otherwise a norm that is not finite
        raises RunFailed; what is in memory is then worth nothing.
        """
        if self.stage == 1:
            finalize_gradients(self.chunks)
        for group in self.zero.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(norm) and not self.is_fp16:
            raise RunFailed(
                f"the gradient norm is {norm}. Resume from the last checkpoint with a lower optimizer.learning_rate, "
                "a longer schedule.lr_warmup_steps or a smaller optimizer.clip_grad"
            )
        return norm


def parameter_groups(config: RunConfig, chunks: list[GPTModel]) -> list[dict[str, Any]]:
    """AdamW's groups: matrices are decayed; biases, norms and whatever positions learn per head are not."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for named in named_parameters(chunks):
        is_matrix = len(named.global_shape) == 2 and not named.name.startswith("position.")
        (decayed if is_matrix else plain).append(named.parameter)
    groups = [
        {"params": decayed, "weight_decay": config.optimizer.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def deepspeed_config(config: RunConfig, topology: Topology) -> dict[str, Any]:
    """DeepSpeed's dictionary; written here and nowhere else. Accumulation over micro batches is the schedule's."""
    per_rank = config.batch.global_batch_size // topology.layout.data
    # Buckets of 5e8 elements are DeepSpeed's default: 2 GB of fp32 that a small model has no use for.
    bucket = min(500_000_000, num_parameters(config))
    stage = config.parallel.zero_stage
    result: dict[str, Any] = {
        "train_batch_size": config.batch.global_batch_size,
        "train_micro_batch_size_per_gpu": per_rank,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.clip_grad,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": stage != 1,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if config.train.precision == "bf16":
        result["bf16"] = {"enabled": True, "immediate_grad_update": True}
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.train.precision == "fp16":
        result["fp16"] = {
            "enabled": True,
            "initial_scale_power": config.optimizer.initial_loss_scale_power,
        }
    return result


# ---- gradients across tensor and pipeline ranks --------------------------------------------------
def finalize_gradients(chunks: list[GPTModel]) -> None:
    """Sums what several ranks each hold a part of, after the last micro batch and before ZeRO's reduction:

    norms and biases under sequence parallelism (over tensor ranks), the tied embedding (over the first and the last
    stage), and the position method's parameters (over all stages).
    """
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    if tensor_group.size() > 1:
        partial = [
            p for c in chunks for p in c.parameters() if getattr(p, "sequence_parallel", False)
        ]
        _sum_flat([g for p in partial if (g := gradient(p)) is not None], tensor_group)
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    if pipeline_group.size() == 1:
        return
    for parameter in chunks[0].position.parameters():
        _sum_flat([gradient(parameter)], pipeline_group)
    if chunks[0].share_embeddings_and_output_weights and parallel_state.is_rank_in_embedding_group(
        ignore_virtual=True
    ):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        weight = (chunks[0] if first else chunks[-1]).shared_embedding_or_output_weight()
        dist.all_reduce(gradient(weight), group=parallel_state.get_embedding_group())


def gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient accumulated so far; DeepSpeed's bf16 optimizer keeps it in fp32 beside the parameter."""
    accumulated = getattr(parameter, "_hp_grad", None)
    return parameter.grad if accumulated is None else accumulated


def _sum_flat(gradients: list[Tensor | None], group: dist.ProcessGroup) -> None:
    tensors = [g for g in gradients if g is not None]
    if not tensors:
        return
    flat = torch._utils._flatten_dense_tensors(tensors)
    dist.all_reduce(flat, group=group)
    for tensor, reduced in zip(tensors, torch._utils._unflatten_dense_tensors(flat, tensors)):
        tensor.copy_(reduced)


def _reduce_sequence_parallel_on_accumulation(chunks: list[GPTModel]) -> None:
    """ZeRO 2 and 3 take each gradient as it comes, so sequence-parallel ones are summed before their own hook sees them.

    Registered before `deepspeed.initialize`, because hooks run in the order of their registration.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return

    def reduce(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad, group=group)

    for chunk in chunks:
        for parameter in chunk.parameters():
            if getattr(parameter, "sequence_parallel", False):
                parameter.register_post_accumulate_grad_hook(reduce)


class _Mpu:
    """The getters through which DeepSpeed 0.19 asks for the model-parallel layout; model parallel is tensor x pipeline."""

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
        return parallel_state.get_model_parallel_group().size()

    @staticmethod
    def get_model_parallel_rank() -> int:
        return parallel_state.get_model_parallel_group().rank()

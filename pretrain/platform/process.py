"""Set this process up: its device, DeepSpeed, Megatron and the random generators."""

from __future__ import annotations

import logging
import os

import torch

from pretrain.devices import Device, device_index
from pretrain.platform.caches import make_caches_private
from pretrain.platform.hardware import has_cuda
from pretrain.platform.megatron_on_cpu import patch_megatron_for_cpu


def prepare(local_rank: int) -> None:
    """Select this process's device, and configure DeepSpeed and Megatron for it.

    Must be called before anything else imports Megatron or DeepSpeed. May be called again.

    Args:
        local_rank: Number of this process on its machine.

    Raises:
        ConfigError: if another user may write to the directories of compiled kernels.
    """
    make_caches_private()
    _select_device(local_rank)
    if has_cuda():
        # One hardware queue, so that kernels start in the order in which they were launched.
        # Megatron relies on it to overlap communication and computation
        # (megatron/core/tensor_parallel/layers.py).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    # Imported here because DeepSpeed chooses its accelerator from the environment on import.
    import deepspeed.ops

    for name in ("DeepSpeed", "torch.distributed", "megatron"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not has_cuda():
        # deepspeed/comm/torch.py would compile this extension when communication starts, which
        # takes 70 s and needs a compiler. It goes unused when marked as incompatible.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        patch_megatron_for_cpu()


def _select_device(local_rank: int) -> None:
    """Make a GPU this process's own, and tell DeepSpeed which one."""
    if has_cuda():
        local_rank = device_index(local_rank, torch.cuda.device_count())
        torch.cuda.set_device(local_rank)
    # deepspeed/runtime/engine.py requires it and takes it for the number of the GPU. srun does not
    # set it.
    os.environ["LOCAL_RANK"] = str(local_rank)


def own_device(host: str) -> Device:
    """Describe this process's device for the other ranks.

    Args:
        host: The name of this process's node.
    """
    uuid = ""
    if has_cuda():
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return Device(host, uuid, os.environ.get("CUDA_VISIBLE_DEVICES"))


def seed_generators(seed: int, tensor_parallel_rank: int) -> None:
    """Seed torch's default generator and Megatron's tracked generators.

    The default generator gets the same seed on all tensor ranks, for dropout on replicated
    activations. The tracked "model-parallel-rng" gets another one on each, for dropout on
    activations that are split over tensor ranks.

    Args:
        seed: The seed; the same on all tensor ranks.
        tensor_parallel_rank: The tensor rank of this process.
    """
    from megatron.core.tensor_parallel import random

    if has_cuda():
        torch.cuda.manual_seed(seed)
        random.model_parallel_cuda_manual_seed(seed)
        return
    # The same names and offset as model_parallel_cuda_manual_seed
    # (megatron/core/tensor_parallel/random.py).
    torch.default_generator.manual_seed(seed)
    tracker = random.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("data-parallel-rng", seed)
    tracker.add("model-parallel-rng", seed + 2718 + tensor_parallel_rank)

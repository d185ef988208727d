"""Block sizes of the flash-attention kernels, for each dtype, head width and GPU generation.

The sizes are fixed tables and not the result of an autotuner. Block sizes set the order of
summation, so processes whose timings led them to different sizes would no longer agree bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor


class Blocks(NamedTuple):
    """The launch parameters of one kernel."""

    queries: int
    """Queries in a block."""
    keys: int
    """Keys in a block."""
    warps: int
    """Warps per program."""
    stages: int
    """Stages of the software pipeline: how many loop iterations are loaded ahead."""


class Schedule(NamedTuple):
    """The block sizes of all kernels for one dtype and head width."""

    forward: Blocks
    dkdv: Blocks
    dq: Blocks
    key_tile: int
    """Granularity of skipping in keys. Skipping is decided for `forward.queries` queries and
    `key_tile` keys at once, so both must be multiples of the block sizes of every kernel."""


# Keys are (bytes of an element, head width padded to a power of two).
#
# SCHEDULES_90 is for the data-centre GPUs of compute capability 9 and 10, where a thread block may
# have 227 KiB of shared memory. SCHEDULES_80 is for all others; the smallest limit among them is
# 99 KiB (compute capability 8.6, 8.9 and 12.0).
#
# The sizes were chosen from what ptxas reports, before any was timed on a GPU: the largest blocks
# whose registers do not spill, or by no more than a few dozen bytes (dkdv with 128 keys at width
# 128). fp32 blocks are smaller because each element takes twice the space.
SCHEDULES_90 = {
    (2, 64): Schedule(Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3), 64),
    (2, 128): Schedule(Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 2), Blocks(128, 64, 8, 3), 128),
    (2, 256): Schedule(Blocks(128, 32, 8, 3), Blocks(32, 64, 8, 2), Blocks(64, 32, 8, 2), 64),
    (4, 64): Schedule(Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 2), 64),
    (4, 128): Schedule(Blocks(32, 32, 8, 2), Blocks(16, 32, 4, 2), Blocks(32, 16, 4, 2), 64),
    (4, 256): Schedule(Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 2), Blocks(16, 16, 8, 2), 64),
}
SCHEDULES_80 = SCHEDULES_90 | {
    (2, 64): Schedule(Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3), 64),
    (2, 128): Schedule(Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 2), Blocks(128, 32, 8, 2), 64),
    (2, 256): Schedule(Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 4, 2), 64),
}


def choose_schedule(q_SBHD: Tensor) -> Schedule:
    """Return the schedule for the dtype and head width of `q_SBHD` on its GPU."""
    # The interpreter has no limit of shared memory, so it takes the larger blocks.
    large_shared_memory = not q_SBHD.is_cuda or (
        torch.cuda.get_device_capability(q_SBHD.device)[0] in (9, 10)
    )
    table = SCHEDULES_90 if large_shared_memory else SCHEDULES_80
    return table[q_SBHD.element_size(), max(64, padded_width(q_SBHD.shape[3]))]


def padded_width(head_dim: int) -> int:
    """Return the width to which a head is padded in registers.

    It is a power of two, since Triton's tensors have no other shapes, and at least 16, which is the
    smallest inner dimension of `tl.dot`.
    """
    return max(16, int(triton.next_power_of_2(head_dim)))

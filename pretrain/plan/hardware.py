"""Describe the GPUs and networks that a run is planned for: the speeds they achieve, with origins.

Every value says where it comes from. "counted": a tool counted it in a run. "closed form": it
follows from the code that is named. "measured": on such a device. "published": a paper or a data
sheet says so. "assumed": nobody has looked yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from pretrain.model.flops import peak_tflops_per_second


@dataclass(frozen=True)
class Device:
    """The speeds that one GPU achieves."""

    name: str
    """As torch.cuda.get_device_name() reports it; `pretrain.model.flops` knows its peak."""
    gemm_fraction: float
    """Part of the peak that a product reaches with all multiprocessors busy and a large K."""
    multiprocessors: int
    tile: tuple[int, int]
    """Rows and columns of the output that one thread block of a matrix product computes."""
    tile_overhead: int
    """Start and end of a tile, in steps of the inner dimension K that take as long."""
    memory_tb_per_second: float
    """Bytes read and written per second by elementwise kernels."""
    attention_tflops: dict[str, tuple[float, float]]
    """Forward and backward, before and after; of the causal half alone, at 1,024 tokens."""
    launch_gap_us: float
    """Time between the end of one kernel and the start of the next one in the same stream."""
    host_us: float
    """Time that the host needs for each launch, through autograd."""
    nvlink_gb_per_second: float
    """What a GPU sends to the others of its node in a collective, in one direction."""
    memory_bytes: int
    """What CUDA reports as the memory of the device."""
    network: str
    """Name in NETWORKS of the links that nodes with this GPU usually have."""
    origins: dict[str, str]

    @cached_property
    def peak_tflops(self) -> float:
        """Dense 16-bit peak in TFLOP/s, from `pretrain.model.flops`."""
        peak = peak_tflops_per_second(self.name)
        assert peak is not None, self.name
        return peak

    def gemm_ms(self, rows: int, inner: int, columns: int) -> float:
        """Return the time of a product [rows, inner] x [inner, columns].

        The multiprocessors compute the output tile by tile, in waves of one tile each. All tiles
        take equally long, also those at the edge that are partly empty, and so do all waves, also
        the last one, which leaves multiprocessors idle.
        """
        tiles = math.ceil(rows / self.tile[0]) * math.ceil(columns / self.tile[1])
        waves = math.ceil(tiles / self.multiprocessors)
        flops_of_wave = (
            2 * self.multiprocessors * self.tile[0] * self.tile[1] * (inner + self.tile_overhead)
        )
        return 1e3 * waves * flops_of_wave / (self.peak_tflops * 1e12 * self.gemm_fraction)

    def memory_ms(self, num_bytes: float) -> float:
        """Return the time in which elementwise kernels read and write `num_bytes`."""
        return 1e3 * num_bytes / (self.memory_tb_per_second * 1e12)


H200 = Device(
    name="NVIDIA H200",
    gemm_fraction=0.83,
    multiprocessors=132,
    tile=(128, 256),
    tile_overhead=160,
    memory_tb_per_second=4.0,
    attention_tflops={"before": (200.0, 110.0), "after": (423.0, 182.0)},
    launch_gap_us=1.5,
    host_us=6.0,
    nvlink_gb_per_second=360.0,
    memory_bytes=int(139.8 * 2**30),
    network="8x400",
    origins={
        "memory_bytes": "assumed: 139.8 GiB of the data sheet's 141 GB",
        "peak_tflops": "published: data sheet, without sparsity",
        "gemm_fraction": "assumed, so that 8192 x 8192 x 8192 comes to 780 TFLOP/s; measured: "
        "769 to 798 on random data",
        "multiprocessors": "published",
        "tile": "assumed: the tile of cuBLAS's large kernels for Hopper",
        "tile_overhead": "assumed",
        "memory_tb_per_second": "assumed; measured: a copy moves 4.3; data sheet: 4.8",
        "attention_tflops": "before: assumed (Triton kernel with serialised wgmma); after: "
        "published for FlashAttention-3 on an H100, D = 128",
        "launch_gap_us": "assumed",
        "host_us": "assumed",
        "nvlink_gb_per_second": "assumed: 0.80 of the data sheet's 450",
    },
)
V100 = replace(
    H200,
    name="Tesla V100-SXM2-32GB",
    gemm_fraction=0.75,
    multiprocessors=80,
    memory_tb_per_second=0.78,
    attention_tflops={"before": (6.0, 6.0), "after": (40.0, 30.0)},
    launch_gap_us=2.0,
    host_us=8.0,
    nvlink_gb_per_second=110.0,
    memory_bytes=int(31.7 * 2**30),
    network="4xedr",
    origins=H200.origins
    | {
        "memory_bytes": "assumed: 31.7 GiB of the data sheet's 32 GB",
        "peak_tflops": "published: data sheet, fp16",
        "gemm_fraction": "assumed",
        "tile": "assumed",
        "memory_tb_per_second": "assumed; data sheet: 0.9",
        "attention_tflops": "before: assumed, 1.0 s of the published step of 3.3 s; after: assumed "
        "for memory-efficient attention in fp16 without a mask",
        "nvlink_gb_per_second": "assumed: 0.73 of the data sheet's 150",
    },
)
H100 = replace(
    H200,
    name="NVIDIA H100 80GB HBM3",
    memory_tb_per_second=2.8,
    memory_bytes=int(79.1 * 2**30),
    origins=H200.origins
    | {
        "gemm_fraction": "assumed: as on an H200, which has the same multiprocessors",
        "memory_tb_per_second": "assumed: 0.83 of the data sheet's 3.35, as on an H200",
        "memory_bytes": "assumed: 79.1 GiB of the data sheet's 80 GB",
    },
)
A100 = replace(
    H200,
    name="NVIDIA A100-SXM4-80GB",
    multiprocessors=108,
    memory_tb_per_second=1.7,
    attention_tflops={"before": (100.0, 70.0), "after": (130.0, 100.0)},
    nvlink_gb_per_second=240.0,
    memory_bytes=int(79.1 * 2**30),
    network="8x200",
    origins=H200.origins
    | {
        "gemm_fraction": "assumed: as on an H200",
        "tile": "assumed",
        "memory_tb_per_second": "assumed: 0.83 of the data sheet's 2.04, as on an H200",
        "attention_tflops": "assumed for the causal half, D = 128, at 1,024 tokens",
        "nvlink_gb_per_second": "assumed: 0.80 of the data sheet's 300",
        "memory_bytes": "assumed: 79.1 GiB of the data sheet's 80 GB",
    },
)
TITLES = {
    "peak_tflops": "peak, TFLOP/s, dense 16 bit",
    "gemm_fraction": "part of it in matrix products, all multiprocessors busy",
    "multiprocessors": "multiprocessors",
    "tile": "output tile of a thread block",
    "tile_overhead": "start and end of a tile, in steps of K",
    "memory_tb_per_second": "memory, TB/s read and written",
    "attention_tflops": "attention, TFLOP/s of the causal half, forward and backward",
    "launch_gap_us": "gap between two kernels, us",
    "host_us": "host time a launch, us",
    "nvlink_gb_per_second": "NVLink, GB/s a GPU sends in a collective",
}
"""What the values of a device are, in the words of docs/performance.md."""
GPU_TYPES = {"v100-32": V100, "a100-80": A100, "h100": H100, "h200": H200}
"""GPUs by the names that `pretrain plan --gpu-type` takes."""

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Network:
    """Links between nodes of eight GPUs each. Inside a node they are NVLink, and faster."""

    name: str
    node_gb_per_second: float
    """All links of a node together, in one direction."""
    efficiency: float
    """Part of it that a collective of large buckets achieves."""
    between_nodes_us: float = 7.0
    """Latency of a step of a ring to another node."""
    within_node_us: float = 1.5
    """Latency of a step of a ring within a node."""

    def ring_ms(
        self,
        num_bytes: float,
        ranks: int,
        collectives: int = 1,
        ranks_per_node: int = GPUS_PER_NODE,
    ) -> float:
        """Return the time of a reduce-scatter or an all-gather; an all-reduce takes twice that.

        Each chunk passes through every node once, so a node sends and receives num_bytes x
        (ranks - 1) / ranks. The ring's latency comes on top for each collective.

        Args:
            num_bytes: Bytes of the whole tensor.
            ranks: Ranks of the group.
            collectives: Number of calls that it is split into.
            ranks_per_node: Ranks of the group on each node.
        """
        if ranks == 1:
            return 0.0
        nodes = ranks // ranks_per_node
        steps_us = nodes * self.between_nodes_us + (ranks - 1 - nodes) * self.within_node_us
        return self._links_ms(num_bytes * (ranks - 1) / ranks) + 1e-3 * collectives * steps_us

    def all_to_all_ms(self, num_bytes: float, ranks: int, collectives: int = 1) -> float:
        """Return the time in which every rank sends every other its part, unsummed.

        Nothing is added up on the way: each of a node's ranks sends all that other nodes own.

        Args:
            num_bytes: Bytes of the whole tensor, which every rank holds.
            ranks: Ranks of the group, GPUS_PER_NODE on each node.
            collectives: Number of calls that it is split into.
        """
        sent = GPUS_PER_NODE * num_bytes * (ranks - GPUS_PER_NODE) / ranks
        latency_us = ranks // GPUS_PER_NODE * self.between_nodes_us
        return self._links_ms(sent) + 1e-3 * collectives * latency_us

    def _links_ms(self, num_bytes: float) -> float:
        """Return the time in which all links of a node together send `num_bytes`."""
        return 1e3 * num_bytes / (self.node_gb_per_second * 1e9 * self.efficiency)


FAST = Network("8 x 400 Gbit/s", 400.0, 0.80)
SLOW = Network("8 x 100 Gbit/s", 100.0, 0.85)
EDR = Network("4 x EDR (100 Gbit/s)", 50.0, 0.80)
MIDDLE = Network("8 x 200 Gbit/s", 200.0, 0.80)
NETWORKS = {"8x400": FAST, "8x200": MIDDLE, "8x100": SLOW, "4xedr": EDR}
"""Networks by the names that `pretrain plan --network` takes."""


@dataclass(frozen=True)
class Scale:
    """Hold factors on the assumed times, from a measurement (`pretrain.plan.search`)."""

    compute: float = 1.0
    """On matrix products, attention and elementwise work."""
    optimizer: float = 1.0
    """On the optimizer's step."""


UNSCALED = Scale()
"""Times as assumed."""


def network_of(gbit_per_second: float) -> Network:
    """Return a network whose nodes have this bandwidth each way, all links together."""
    return Network(f"{gbit_per_second:g} Gbit/s a node", gbit_per_second / 8, 0.80)


# ---- Assumptions of the time of a step beside the hardware: bytes and launches, with origins ----
# The words that say where a value comes from are those of `pretrain.plan.hardware`.


@dataclass(frozen=True)
class Input:
    """Something that the model takes for granted: how much before, how much after, and why."""

    before: float
    after: float
    origin: str
    v100: float | None = None
    """The value after, on a V100, where it differs: torch.compile generates nothing there, no
    product adds to fp32, and ALiBi stands in columns of q and k."""

    def of(self, state: str, is_v100: bool = False) -> float:
        """Return the value in `state`, "before" or "after"."""
        if state == "before":
            return self.before
        return self.v100 if is_v100 and self.v100 is not None else self.after


ELEMENTWISE = {
    "two LayerNorms, forward": Input(4, 4, "counted: read x, write y"),
    "bias of qkv": Input(6, 6, "counted: an addition"),
    "two bias-dropout-adds": Input(10, 6, "counted: two additions; after: one kernel", v100=10),
    "bias and GELU, forward": Input(
        16, 8, "counted: two kernels on 4 d; after: one kernel", v100=16
    ),
    "GELU, backward": Input(12, 12, "counted: read two, write one, each 4 d"),
    "gradients of biases": Input(9, 9, "counted: read 3 d + d + 4 d + d"),
    "two LayerNorms, backward": Input(
        10,
        10,
        "closed form: dx reads 2, writes 1; dw, db read 2. As one operator, which reads each once, "
        "they were counted as 6",
    ),
    "two sums of residual gradients": Input(6, 6, "counted: read two, write one"),
    "cat of dq, dk, dv": Input(6, 0, "counted: a copy of 3 d; after: none, one buffer"),
    "columns of ALiBi in q, k and v": Input(
        0, 0, "V100: counted: pad, cat and cut, forward and backward", v100=18.65
    ),
}
"""Elements of width d = hidden_size moved per layer and token, forward and backward; bf16."""

INPUTS = {
    "bytes per logit, loss forward and backward": Input(
        52,
        6,
        "before: closed form, megatron/core/tensor_parallel/cross_entropy.py; after: counted, read "
        "twice and written once in 16 bit; on a V100 in pieces, not compiled",
        v100=48,
    ),
    "bytes per parameter to accumulate a gradient, first micro batch": Input(
        18,
        4.9,
        "before: closed form, cast and add in fp32; after: counted, the product writes fp32, and "
        "the rest as below",
    ),
    "the same, later micro batches": Input(
        18,
        8.9,
        "before: as above; after: counted, the product reads and writes fp32 (8), and the tied "
        "embedding's other gradient is written and added (0.9)",
    ),
    "first micro batch in fp16": Input(
        0, 6, "before: autograd's own buffer; after: counted, a copy to fp32"
    ),
    "later micro batches in fp16": Input(
        6, 10, "before: an addition in fp16; after: counted, an addition in fp32"
    ),
    "kernel launches per layer, forward and backward": Input(
        64.2,
        42.6,
        "counted: 1,606 a micro batch, after: 1,066, V100: 1,610; each over 25 layers",
        v100=64.4,
    ),
    "bytes per parameter of the whole model in the optimizer step": Input(
        52,
        0,
        "before: closed form, deepspeed/runtime/engine.py and bf16_optimizer.py (flatten 8, cast "
        "6, divide 4, copy back 6 and 8, norm 4, clip 8, zero twice 8); after: counted",
    ),
    "the same with fp32 on the wire": Input(44, 0, "closed form: as above, no casts, divide 8"),
    "the same on one rank, where nothing is reduced": Input(
        20, 0, "before: closed form, norm 4, clip 8, zero twice 8; after: counted"
    ),
    "bytes per parameter of the shard in the optimizer step, beside the update": Input(
        44,
        10,
        "before: AdamW of 24 ms on one GPU (modelled) and a cast, without the update's own 32; "
        "after: counted (norm 4, cast 6)",
    ),
    "host time of the optimizer step, ms": Input(13, 0.5, "before: measured; after: assumed"),
    "host synchronisations and the log, ms": Input(
        2.1,
        0.1,
        "before: five synchronisations and rank 0's log; after: assumed, for one wait (counted), "
        "which the next step's queue hides",
    ),
    "buckets of gradients": Input(
        3, 40, "before: DeepSpeed's default; after: counted, pretrain/optim/buckets.py"
    ),
    "part of all bytes in the bucket that is last to reduce": Input(
        1, 0.076, "after: counted, the tied embedding"
    ),
    "part of compute lost while a collective runs beside it": Input(
        0, 0.12, "assumed: 16 of 132 multiprocessors"
    ),
}

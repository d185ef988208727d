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
    attention_tflops: tuple[float, float]
    """Forward and backward; of the causal half alone, at 1,024 tokens."""
    masked_tflops: tuple[float, float]
    """The same with a mask in memory and products in fp32. Assumed."""
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

    @property
    def is_v100(self) -> bool:
        """True if it has no bf16, trains in fp16 and has no compiled kernels."""
        return "V100" in self.name

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
    attention_tflops=(423.0, 182.0),
    masked_tflops=(200.0, 110.0),
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
        "attention_tflops": "published for FlashAttention-3 on an H100, D = 128",
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
    attention_tflops=(40.0, 30.0),
    masked_tflops=(6.0, 6.0),
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
        "attention_tflops": "assumed for memory-efficient attention in fp16 without a mask",
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
    attention_tflops=(130.0, 100.0),
    masked_tflops=(100.0, 70.0),
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
"""What the values of a device are, in the words of the plan."""
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
# The words that say where a value comes from are those of the module's docstring.


@dataclass(frozen=True)
class Input:
    """Something that the model takes for granted, and why."""

    value: float
    origin: str
    v100: float | None = None
    """The value on a V100, where it differs: torch.compile generates nothing there, no product adds
    to fp32, and ALiBi stands in columns of q and k."""

    def of(self, is_v100: bool) -> float:
        """Return the value on a V100, or on a later GPU."""
        return self.v100 if is_v100 and self.v100 is not None else self.value


ELEMENTWISE = {
    "two LayerNorms, forward": Input(4, "counted: read x, write y"),
    "bias of qkv": Input(6, "counted: an addition"),
    "two bias-dropout-adds": Input(6, "counted: one kernel; V100: two additions", v100=10),
    "bias and GELU, forward": Input(8, "counted: one kernel on 4 d; V100: two", v100=16),
    "GELU, backward": Input(12, "counted: read two, write one, each 4 d"),
    "gradients of biases": Input(9, "counted: read 3 d + d + 4 d + d"),
    "two LayerNorms, backward": Input(
        10,
        "closed form: dx reads 2, writes 1; dw, db read 2. As one operator, which reads each once, "
        "they were counted as 6",
    ),
    "two sums of residual gradients": Input(6, "counted: read two, write one"),
    "columns of ALiBi in q, k and v": Input(
        0, "V100: counted: pad, cat and cut, forward and backward", v100=18.65
    ),
}
"""Elements of width d = hidden_size moved per layer and token, forward and backward; bf16."""

LOGIT = "bytes per logit, loss forward and backward"
FIRST_SUM = "bytes per parameter to accumulate a gradient, first micro batch"
LATER_SUM = "the same, later micro batches"
FIRST_SUM_FP16 = "first micro batch in fp16"
LATER_SUM_FP16 = "later micro batches in fp16"
LAUNCHES = "kernel launches per layer, forward and backward"
BESIDE = "bytes per parameter of the shard in the optimizer step, beside the update"
HOST = "host time of the optimizer step, ms"
LOG = "host synchronisations and the log, ms"
BUCKETS = "buckets of gradients"
ROTATED = "elements moved per rotated channel of queries and keys, forward and backward"
ROTATION = "the same per channel, whichever are rotated"
CUT = "the same where a part is rotated"
JOINED = "elements moved per channel of queries, keys and values without a bias"
ROTATION_LAUNCHES = "kernel launches per layer of a rotation, forward and backward"
LOST = "part of compute lost while a collective runs beside it"
INPUTS = {
    LOGIT: Input(
        6,
        "counted, read twice and written once in 16 bit; on a V100 in pieces, not compiled",
        v100=48,
    ),
    FIRST_SUM: Input(4.9, "counted, the product writes fp32, and the rest as below"),
    LATER_SUM: Input(
        8.9,
        "counted, the product reads and writes fp32 (8), and the tied embedding's other gradient "
        "is written and added (0.9)",
    ),
    FIRST_SUM_FP16: Input(6, "counted, a copy to fp32"),
    LATER_SUM_FP16: Input(10, "counted, an addition in fp32"),
    LAUNCHES: Input(
        42.6, "counted: 1,066 a micro batch, V100: 1,610; each over 25 layers", v100=64.4
    ),
    BESIDE: Input(10, "counted (norm 4, cast 6)"),
    HOST: Input(0.5, "assumed"),
    LOG: Input(0.1, "assumed, for one wait (counted), which the next step's queue hides"),
    BUCKETS: Input(40, "counted, pretrain/optim/buckets.py"),
    ROTATED: Input(20.4, "counted, Megatron's rotation"),
    ROTATION: Input(6, "counted"),
    CUT: Input(2, "counted"),
    JOINED: Input(2, "counted: their gradients are put together, which our kernels need not"),
    ROTATION_LAUNCHES: Input(38, "counted"),
    LOST: Input(0.12, "assumed: 16 of 132 multiprocessors"),
}

DEEPSPEED = {FIRST_SUM: 18.0, LATER_SUM: 18.0, BESIDE: 44.0, HOST: 13.0}
"""INPUTS at ZeRO 2 and 3, where DeepSpeed sums gradients and takes the step: closed form of
deepspeed/runtime/engine.py and bf16_optimizer.py; the host's time was measured."""
DEEPSPEED_WHOLE_MODEL = 44.0
"""Bytes per parameter of the whole model that its step moves: flatten 8, divide 8, copy back 8,
norm 4, clip 8, zero twice 8."""
DEEPSPEED_ONE_RANK = 20.0
"""The same where nothing is reduced: norm 4, clip 8, zero twice 8."""

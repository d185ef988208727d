"""Compute the time of a training step from the speeds of a GPU, of its links, and counted costs.

The origin of every number is stated. "counted": by a tool, in a run. "closed form": it follows from
the named code. "measured": on such a device (H100: benchmarks/results/gpu_day_h100.md).
"published": in a paper or a data sheet. "fitted": to the speed of published training
(`benchmarks.published_steps`), so it includes time that the lines below lack. "assumed": not
checked yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pretrain.config import Layout, RunConfig
from pretrain.config.tensors import widths
from pretrain.model import (
    attention_share,
    flops_per_token,
    keys_per_query,
    model_flops_utilization,
    peak_tflops_per_second,
    received_share,
)
from pretrain.plan.memory import ZERO_LIVE, Activations, Stage, chunk_layers
from pretrain.positions.base import PositionMethod, by_layer

# ---- GPUs ----

GPUS_PER_NODE = 8


class Inputs(NamedTuple):
    """The speeds on which a step's time depends most, as factors on the values stated below."""

    matrix_products: float = 1
    attention: float = 1
    memory: float = 1
    network: float = 1
    """NVLink and the links between nodes."""


LARGE_PRODUCT = 0.83
"""Share of the peak that a single large product reaches. At 8192 x 8192 x 8192 on an H200 this is
780 TFLOP/s; measured: 769 to 798 on random data."""
SLOW = Inputs(0.87, 0.87, 0.90, 0.62)
"""Products and attention: chosen so that no published step that fits well into memory is slower.
Network: 200 of 400 GB/s, published for a gather over 256 H100s (NVIDIA/nccl, issue 1218)."""
FAST = Inputs(attention=1.25, memory=1.08, network=1.1)
"""Attention: FlashAttention-3's published rates on an H100. Memory: what a copy reaches. Network:
assumed. Products: LARGE_PRODUCT."""


@dataclass(frozen=True)
class Device:
    """The speeds that one GPU achieves."""

    name: str
    """As torch.cuda.get_device_name() reports it; `pretrain.model` knows its peak."""
    gemm_fraction: float
    """Share of the peak that products reach in training, with all multiprocessors busy, large K:
    what `gemm_ms` needs for the time that all of them take."""
    multiprocessors: int
    tile: tuple[int, int]
    """Rows and columns of the output that one thread block of a matrix product computes."""
    tile_overhead: int
    """The time to start and end a tile, as the number of steps along K that take equally long."""
    memory_tb_per_second: float
    """Bytes read and written per second by elementwise kernels."""
    attention_tflops: tuple[float, float]
    """Forward and backward, counting only the causal half, at 1,024 tokens."""
    launch_gap_us: float
    """Time between the end of one kernel and the start of the next one in the same stream."""
    host_us: float
    """Time that the host needs for each launch, through autograd. Assumed: counts have no times."""
    nvlink_gb_per_second: float
    """The rate at which a GPU sends to the others of its node in a collective, in one direction."""
    memory_bytes: int
    """The memory of the device as CUDA reports it."""
    network_gbit: float
    """Gbit/s of all links that a node with this GPU usually has, together, in one direction."""
    masked: float = 0.75
    """Share of attention's rates with a mask in memory and products in fp32. Assumed."""
    fitted: Device | None = None
    """The same GPU at the speeds that published training in other code is fitted by, where our own
    code was measured. The slow end of the range is below them by SLOW."""

    @property
    def is_modern(self) -> bool:
        """False if it has no bf16, trains in fp16 and has no compiled kernels: a V100."""
        return "V100" not in self.name

    @cached_property
    def peak_tflops(self) -> float:
        """Dense 16-bit peak in TFLOP/s, from `pretrain.model`."""
        peak = peak_tflops_per_second(self.name)
        assert peak is not None, self.name
        return peak

    @property
    def ends(self) -> tuple[Inputs, Inputs]:
        """Factors on the speeds at the slow end and at the fast end of their range."""
        other = self.fitted or self
        # Of attention, two and a half times as much is done backward as forward.
        ours, theirs = (
            1 / rates[0] + 2.5 / rates[1]
            for rates in (self.attention_tflops, other.attention_tflops)
        )
        slow = SLOW._replace(
            matrix_products=SLOW.matrix_products * other.gemm_fraction / self.gemm_fraction,
            attention=SLOW.attention * ours / theirs,
        )
        return slow, FAST._replace(matrix_products=LARGE_PRODUCT / self.gemm_fraction)

    def gemm_ms(self, rows: int, inner: int, columns: int) -> float:
        """Return the time of a product [rows, inner] x [inner, columns].

        The multiprocessors compute the output in waves, one tile each. All tiles take equally long,
        even the partly empty ones at the edge. So do all waves, even the last one, in which some
        multiprocessors are idle.
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


# Peaks and numbers of multiprocessors are published. Numbers without a comment are assumed.
_H200 = Device(
    name="NVIDIA H200",
    # Fitted to runs on H100s.
    gemm_fraction=0.58,
    multiprocessors=132,
    # The tile of cuBLAS's large kernels for Hopper.
    tile=(128, 256),
    tile_overhead=160,
    # Measured: a copy moves 4.3. Data sheet: 4.8.
    memory_tb_per_second=4.0,
    # Forward: published for a Triton kernel, like ours, on an H100 with D = 128 (figure 5 of the
    # paper on FlashAttention-3). Backward: fitted to runs on H100s with FlashAttention-2.
    attention_tflops=(273.0, 148.0),
    launch_gap_us=1.5,
    host_us=6.0,
    # 0.80 of the data sheet's 450.
    nvlink_gb_per_second=360.0,
    # Of the data sheet's 141 GB.
    memory_bytes=int(139.8 * 2**30),
    # 8 x 400 Gbit/s.
    network_gbit=3200,
)
V100 = replace(
    _H200,
    name="Tesla V100-SXM2-32GB",
    gemm_fraction=0.75,
    multiprocessors=80,
    # Data sheet: 0.9.
    memory_tb_per_second=0.78,
    # Memory-efficient attention in fp16 without a mask.
    attention_tflops=(40.0, 30.0),
    launch_gap_us=2.0,
    host_us=8.0,
    # 0.73 of the data sheet's 150.
    nvlink_gb_per_second=110.0,
    # Of the data sheet's 32 GB.
    memory_bytes=int(31.7 * 2**30),
    # 4 x EDR.
    network_gbit=400,
    masked=0.17,
)
_H100 = replace(
    _H200,
    name="NVIDIA H100 80GB HBM3",
    # 0.83 of the data sheet's 3.35, as on an H200, which has the same multiprocessors.
    memory_tb_per_second=2.8,
    memory_bytes=int(79.1 * 2**30),
)
A100 = replace(
    _H200,
    name="NVIDIA A100-SXM4-80GB",
    # Fitted, as attention's backward pass.
    gemm_fraction=0.75,
    multiprocessors=108,
    # 0.83 of the data sheet's 2.04, as on an H200.
    memory_tb_per_second=1.7,
    attention_tflops=(130.0, 85.0),
    # 0.80 of the data sheet's 300.
    nvlink_gb_per_second=240.0,
    memory_bytes=int(79.1 * 2**30),
    network_gbit=1600,
)
# Measured on an H100, in a step of two micro batches of 8 x 1,024 tokens of the 1.3B model: 181.3
# ms of products, 142 us of attention forward and 413 us backward in a layer. The products include
# the sums of gradients. An H200 has the same multiprocessors.
H100, H200 = (
    replace(each, gemm_fraction=0.80, attention_tflops=(241.0, 208.0), fitted=each)
    for each in (_H100, _H200)
)
GPU_TYPES = {"v100-32": V100, "a100-80": A100, "h100": H100, "h200": H200}
"""GPUs by the values of `pretrain plan --gpu-type`."""


# ---- Links between GPUs ----


@dataclass(frozen=True)
class Network:
    """The links between nodes of eight GPUs each. Within a node, GPUs have the faster NVLink."""

    gbit_per_second: float
    """All links of a node together, in one direction."""
    efficiency: float = 0.80
    """Share of it that a collective of large buckets achieves. Assumed, like the latencies."""
    between_nodes_us: float = 7.0
    """Latency of a step of a ring to another node."""
    within_node_us: float = 1.5
    """Latency of a step of a ring within a node."""


# ---- The cost of a step on every GPU of a kind: bytes, elements and launches ----


class Costs(NamedTuple):
    """Elements are in units of d = hidden_size, moved per layer and token, forward and backward.

    They were counted by `pretrain bench step` in bf16, unless stated otherwise.
    """

    stream: float
    """Elements of norms and residual stream: norms forward 4 and backward 10 (closed form: dx reads
    2 and writes 1, dw and db read 2; as one operator, which reads each once, they were counted as
    6), two additions to the residual stream 6, two sums of its gradients 6."""
    mlp: float
    """Elements of GELU, with or without a bias: forward 8, one kernel on 4 d, backward 12."""
    biases: float
    """Elements of biases: an addition to qkv 6, and the gradients of all biases 9. V100: also
    additions of their own to the MLP's 4 d, 8, and to the residual stream, 4."""
    columns: float
    """Elements of ALiBi's columns in q, k and v: pad, cat and cut, 18.57; the gradients of q, k and
    v, which are put together, 6."""
    logit: float
    """Bytes per logit, loss forward and backward: read twice and written once in 16 bit; on a V100
    in pieces, not compiled."""
    first_sum: float
    """Bytes per parameter to accumulate a gradient in the first micro batch: the product writes
    fp32, and the tied embedding's other gradient is written and added (0.9). V100: a copy to
    fp32. ZeRO 2 and 3: closed form of deepspeed/runtime/engine.py and bf16_optimizer.py."""
    later_sum: float
    """The same in later ones: the product reads and writes fp32. V100: an addition in fp32."""
    launches: float
    """Kernel launches per layer without biases: 789 a micro batch of 25 layers. V100, in micro
    batches of 2, of whose logits 7 pieces are made: 1,257."""
    bias_launches: float
    """Further launches per layer with biases."""
    update: float = 10
    """Bytes per parameter of the shard in the optimizer step besides the update: norm 4, cast 6."""
    whole_model: float = 0
    """Bytes that the optimizer step moves per parameter of the whole model. DeepSpeed: flatten 8,
    divide 8, copy back 8, norm 4, clip 8, zero twice 8."""
    host_ms: float = 0.5
    """Host time of the optimizer step. Assumed; for DeepSpeed's step, measured."""


MODERN = Costs(
    stream=26,
    mlp=20,
    biases=15,
    columns=0,
    logit=6,
    first_sum=4.9,
    later_sum=8.9,
    launches=31.6,
    bias_launches=11,
)
OF_V100 = MODERN._replace(
    biases=27,
    columns=24.57,
    logit=48,
    first_sum=6,
    later_sum=10,
    launches=50.28,
    bias_launches=14,
)
"""On a V100, torch.compile generates nothing and no product adds to fp32."""
DEEPSPEED = {"update": 44.0, "whole_model": 44.0, "host_ms": 13.0}
DEEPSPEED_SUMS = {"first_sum": 18.0, "later_sum": 18.0}
"""Costs at ZeRO 2 and 3, where DeepSpeed takes the step and sums gradients. On a V100 the sums are
assumed to cost as much as at ZeRO 1."""
ROTATED, ROTATION, CUT = 20.4, 6, 2
"""Elements that Megatron's rotation moves per channel of queries and keys: per rotated channel; per
channel in any case; and per channel if only a part is rotated."""
SCORE_PASSES = 10, 12
"""How often a score is read or written by a method of scores: in the forward pass, and besides the
recomputation in the backward pass. Counted in `pretrain.kernels.scored`; timed on no GPU."""
ROTATION_LAUNCHES = 38
"""Kernel launches per layer of a rotation."""
CAST = 2.5
"""Elements moved per number that train.fp8 casts to 8 bits: read to find the largest, read again
and written. Counted without compilation."""
JOINED = 2
"""Elements moved per channel of queries, keys and values without a bias, to join their gradients.
Our own kernels write joined gradients directly."""
LOST = 0.12
"""Share of compute lost while a collective runs beside it. Assumed: 16 of 132 multiprocessors."""


# ---- The target of a plan, and the time of a step ----

USABLE = 0.95
"""Share of a GPU's memory that a plan may use. Assumed: with other lengths of text, or another
version of a library, a run should not fail for lack of the last gigabyte."""


@dataclass(frozen=True)
class Target:
    """The GPUs and links for which a run is planned."""

    gpus: int
    device: Device
    network: Network

    @property
    def usable_bytes(self) -> int:
        """The memory of a GPU that a plan may use."""
        return int(USABLE * self.device.memory_bytes)

    def ring_ms(self, num_bytes: float, ranks: int, collectives: int = 1, groups: int = 1) -> float:
        """Return the time of a reduce-scatter or an all-gather; an all-reduce takes twice that.

        Each chunk passes through every rank once, so a rank sends and receives num_bytes x
        (ranks - 1) / ranks: over NVLink if all ranks are on one node, else over the node's links.
        Each collective adds the latency of the ring.

        Args:
            num_bytes: Bytes of the whole tensor of a group.
            ranks: Number of ranks of a group.
            collectives: Number of calls into which the transfer is split.
            groups: Number of groups that share a node and its links, and do the same at once.
        """
        ranks_per_node = GPUS_PER_NODE // groups
        between = min(ranks // ranks_per_node, ranks - 1) if ranks > ranks_per_node else 0
        within = ranks - 1 - between
        sent = num_bytes * (ranks - 1) / ranks
        return self.send_ms(sent, collectives * within, collectives * between, groups)

    def send_ms(
        self, num_bytes: float, within: int, between: int, senders: int = GPUS_PER_NODE
    ) -> float:
        """Return the time for a GPU to send bytes, in a number of steps within and between nodes.

        If any step is between nodes, `senders` GPUs of a node send at once and share its links.
        """
        network, rate = self.network, self.device.nvlink_gb_per_second
        if between:
            rate = network.gbit_per_second / 8 * network.efficiency / senders
        latency_us = within * network.within_node_us + between * network.between_nodes_us
        return 1e3 * num_bytes / (rate * 1e9) + 1e-3 * latency_us

    def moved(self, to: Inputs) -> Target:
        """Return the same GPUs with other speeds."""
        device, network = self.device, self.network
        forward, backward = device.attention_tflops
        device = replace(
            device,
            gemm_fraction=device.gemm_fraction * to.matrix_products,
            attention_tflops=(forward * to.attention, backward * to.attention),
            memory_tb_per_second=device.memory_tb_per_second * to.memory,
            nvlink_gb_per_second=device.nvlink_gb_per_second * to.network,
        )
        network = replace(network, efficiency=network.efficiency * to.network)
        return replace(self, device=device, network=network)


Lines = dict[str, float]
"""Milliseconds by class of work that can be measured."""
TENSOR, SENDS = "tensor-parallel communication, exposed", "sends between stages"
CONTEXT = "exchange of keys and values"
REDUCTION, GATHER = "reduction of gradients, exposed", "gather of weights, exposed"
HOST = "optimizer, waiting for the host"
SLOWED = "compute slowed by hidden communication"
PARTS = {
    "GEMM": ("matrix products",),
    "attention": ("attention",),
    "elementwise": (
        "elementwise in layers",
        "cross-entropy",
        "gradient accumulation",
        "gaps between kernels",
        "waiting for the host",
    ),
    "communication": (TENSOR, CONTEXT, SENDS, REDUCTION, GATHER, SLOWED),
    "bubble": ("pipeline bubble",),
    "optimizer": ("optimizer", HOST),
}
"""The columns of the plan's table, and the lines of each."""


class Step:
    """One training step of one pipeline stage, on all ranks of a data-parallel group."""

    def __init__(self, config: RunConfig, layout: Layout, stage: Stage, target: Target) -> None:
        """Prepare the step of a stage; the arguments are those of `time_of_step`."""
        self.config, self.layout, self.stage, self.target = config, layout, stage, target
        self.device = target.device
        self.activations = Activations(config, target.device.is_modern)
        self.tokens = self.activations.tokens
        """Tokens of a micro batch on a rank."""
        self.num_layers = sum(layers for _, layers in chunk_layers(config, stage.number))
        self.has_output = stage.number == layout.pipeline - 1
        """This stage computes the logits."""
        self.costs = MODERN if self.device.is_modern else OF_V100
        if self.layout.zero_stage > 1:
            sums = DEEPSPEED_SUMS if self.device.is_modern else {}
            self.costs = self.costs._replace(**DEEPSPEED, **sums)

    @cached_property
    def gemm_ms(self) -> tuple[float, float]:
        """The time of all matrix products of a micro batch: forward, backward."""
        tokens, gemm = self.tokens, self.device.gemm_ms
        width, hidden = widths(self.config), self.config.model.hidden_size
        # Inner dimension, columns, number of products, and their time relative to 16 bits.
        many, part = self.num_layers, 0.5 if self.config.train.fp8 else 1.0
        layers = [
            (hidden, width.query + 2 * width.key, many, part),
            (width.query, hidden, many, part),
            (hidden, width.projected, many, part),
            (width.ffn, hidden, many, part),
        ]
        output = [(hidden, width.vocabulary, 1, 1.0)] * self.has_output
        forward = sum(count * part * gemm(tokens, k, n) for k, n, count, part in layers + output)
        # The gradients of the input [tokens, n] x [n, k] and of the weight [n, tokens] x
        # [tokens, k].
        backward = sum(
            count * (part * gemm(tokens, n, k) + gemm(n, tokens, k))
            for k, n, count, part in layers + output
        )
        if self.config.train.recompute_granularity == "full":
            backward += sum(count * part * gemm(tokens, k, n) for k, n, count, part in layers)
        # Weights are cast in both passes.
        cast = 2 * CAST * self.config.train.fp8 * sum(k * n * count for k, n, count, _ in layers)
        cast_ms = self.device.memory_ms(cast)
        # The backward pass also copies the transpose of each weight, which adds 2 bytes to 5.
        return forward + cast_ms, backward + 1.4 * cast_ms

    @cached_property
    def attention_ms(self) -> tuple[float, float]:
        """The time of attention of a micro batch: forward, backward.

        The two products of the forward pass cost four operations for each channel of each pair of
        query and key that a head sees; the backward pass has five products. Tensor-parallel ranks
        have different heads, and wait for the rank whose heads see farthest. Context ranks wait for
        the last one.
        """
        found = [self._attention_ms(each) for each in by_layer(self.config)]
        forward, backward = (sum(part) / len(found) for part in zip(*found))
        return forward, backward

    def _attention_ms(self, config: RunConfig) -> tuple[float, float]:
        """Return `attention_ms` if all layers had the position method of a config."""
        heads = config.model.num_attention_heads // self.layout.tensor
        seen = keys_per_query(config, self.layout.context)
        most = max(sum(seen[i : i + heads]) for i in range(0, len(seen), heads))
        flops = 4 * most * config.head_dim * self.num_layers * self.tokens
        kept = Activations(config, self.device.is_modern)
        flops /= self.device.masked if (kept.uses_mask or kept.is_scored) else 1
        rates = self.device.attention_tflops
        forward, backward = 1e3 * flops / (rates[0] * 1e12), 1e3 * 2.5 * flops / (rates[1] * 1e12)
        if kept.is_scored:
            # Blocks of scores pass through memory, and are computed again in the backward pass.
            scores = most * self.num_layers * self.tokens
            forward += self.device.memory_ms(4 * SCORE_PASSES[0] * scores)
            backward += forward + self.device.memory_ms(4 * SCORE_PASSES[1] * scores)
        recomputed = self.config.train.recompute_granularity != "none"
        return forward, backward + recomputed * forward

    def elements(self, position: PositionMethod) -> float:
        """Return the elements of width d that a layer moves per token, forward and backward."""
        m, costs = self.config.model, self.costs
        # Under sequence parallelism, norms and residual stream have only a part of the tokens here.
        total = costs.stream / (self.layout.tensor if self.config.parallel.sequence_parallel else 1)
        # Tensor-parallel ranks divide the rest (in truth only seven ninths of bias gradients).
        divided = costs.mlp * self.config.ffn_hidden_size / (4 * m.hidden_size)
        # Forward and backward, GELU reads and writes 5 numbers per element, and a gate 8.
        divided *= 8 / 5 if m.gated_linear_unit else 1
        divided += costs.biases * m.use_bias + costs.columns * (position.bias == "slopes")
        width = widths(self.config)
        pair, channels = width.query + width.key, 0.0
        if position.bias == "none":
            channels += JOINED * (pair + width.key)
        if m.qk_layernorm:
            # Like the norms of the stream: forward 2 and backward 5.
            channels += 7 * pair
        if self.config.train.fp8:
            # The inputs of four products, and the gradients of their outputs, are cast.
            channels += CAST * (2 * pair + 4 * m.hidden_size + width.ffn + width.projected)
        if share := position.rotated_channels(self.config) / self.config.head_dim:
            channels += (ROTATED * share + ROTATION + CUT * (share < 1)) * pair
        total += divided / self.layout.tensor + channels / m.hidden_size
        # A recomputed forward pass adds about two fifths.
        recomputed = self.config.train.recompute_granularity == "full"
        return total * (1.4 if recomputed else 1.0)

    @cached_property
    def compute_lines(self) -> Lines:
        """The lines that do not depend on other ranks, for the whole step."""
        m, memory_ms, costs = self.config.model, self.device.memory_ms, self.costs
        count = self.layout.num_microbatches
        tokens = count * self.tokens
        # An element has two bytes.
        methods = [each.position for each in by_layer(self.config)]
        elements = sum(map(self.elements, methods)) / len(methods)
        moved = 2 * elements * m.hidden_size * self.num_layers * tokens
        logits = self.config.padded_vocab_size // self.layout.tensor * tokens * self.has_output
        accumulated = costs.first_sum + (count - 1) * costs.later_sum
        launches = costs.launches + costs.bias_launches * m.use_bias
        rotating = sum(each.rotated_channels(self.config) > 0 for each in methods)
        launches += ROTATION_LAUNCHES * rotating / len(methods)
        # One kernel forward and two backward, for queries and for keys.
        launches += 6 * m.qk_layernorm
        launches *= self.num_layers * count
        if self.config.train.recompute_granularity == "full":
            launches *= 4 / 3
        lines = {
            "matrix products": count * sum(self.gemm_ms),
            "attention": count * sum(self.attention_ms),
            "elementwise in layers": memory_ms(moved),
            "cross-entropy": memory_ms(costs.logit * logits),
            "gradient accumulation": memory_ms(accumulated * self.stage.parameters),
            "gaps between kernels": launches * self.device.launch_gap_us / 1e3,
        }
        host = launches * self.device.host_us / 1e3
        lines["waiting for the host"] = max(0.0, host - sum(lines.values()))
        return lines

    def optimizer_lines(self) -> Lines:
        """Return the lines of the optimizer step, without communication."""
        shard = self.costs.update + self.config.optimizer.update_bytes
        each = shard / self.layout.replicas + self.costs.whole_model
        update = self.device.memory_ms(each * self.stage.parameters)
        # The host runs ahead of the device and waits for it at the norm.
        return {"optimizer": update, HOST: max(0.0, self.costs.host_ms - update)}

    def communication_lines(self) -> Lines:
        """Return the lines of data-parallel communication: exposed time, and the cost of hiding."""
        if self.layout.replicas == 1:
            return {}
        parameters, tail = self.stage.parameters, self.stage.tail
        reduce, gather = self.reduction_ms(), self.ring_ms(2 * parameters)
        forward, backward = self.passes_ms()
        if self.layout.zero_stage > 1:
            count = self.layout.num_microbatches
            # Gradients are reduced in every micro batch.
            if self.layout.zero_stage == 3:
                # Weights that DeepSpeed does not keep until the backward pass are gathered again.
                again = max(0.0, 1 - ZERO_LIVE / parameters)
                exposed = max(0.0, gather - forward) + max(0.0, again * gather - backward)
                gather = count * exposed
            return {REDUCTION: count * reduce, GATHER: gather}
        # The last bucket to be reduced and the first to be gathered hold the tied embedding, whose
        # gradient is complete last and whose weight is used first.
        exposed_reduce = max(tail * reduce, reduce - backward)
        exposed_gather = max(tail * gather, gather - forward)
        hidden = reduce + gather - exposed_reduce - exposed_gather
        return {REDUCTION: exposed_reduce, GATHER: exposed_gather, SLOWED: LOST * hidden}

    def ring_ms(self, num_bytes: float) -> float:
        """Return the time of a reduce-scatter or an all-gather over the data-parallel ranks.

        Each tensor-parallel rank of a node has its own group; the groups share the node's links.
        """
        buckets = len(self.stage.buckets)
        return self.target.ring_ms(num_bytes, self.layout.replicas, buckets, self.layout.tensor)

    def reduction_ms(self) -> float:
        """Return the time of a reduce-scatter of all gradients.

        In 16 bit it has two stages: a ring in fp32 within nodes, then an all-to-all between nodes,
        in which a node sends as much as in a ring of nodes.
        """
        parameters, tensor = self.stage.parameters, self.layout.tensor
        nodes = self.layout.replicas * tensor // GPUS_PER_NODE
        if self.config.parallel.gradient_reduce_dtype == "fp32" or nodes <= 1:
            return self.ring_ms(4 * parameters)
        within, buckets = GPUS_PER_NODE // tensor, len(self.stage.buckets)
        within_ms = self.target.ring_ms(4 * parameters, within, buckets, tensor)
        # Each GPU of a node sends its part of the sums.
        sums = 2 * parameters / within
        return within_ms + self.target.ring_ms(sums, nodes, buckets, GPUS_PER_NODE)

    def passes_ms(self) -> tuple[float, float]:
        """Return the time of the forward and the backward pass of one micro batch.

        All other time is divided in the same proportion as that of products and attention.
        """
        forward, backward = (
            gemm + attention for gemm, attention in zip(self.gemm_ms, self.attention_ms)
        )
        whole = sum(self.compute_lines.values()) / self.layout.num_microbatches
        return whole * forward / (forward + backward), whole * backward / (forward + backward)

    def model_parallel_lines(self) -> Lines:
        """Return the exposed communication between the ranks of a sample.

        Tensor-parallel ranks are on one node, and so are context ranks if they fit.
        """
        lines: Lines = {}
        if self.layout.tensor > 1:
            sent, rings = self.exposed_in_tensor_group()
            lines[TENSOR] = self.target.ring_ms(sent, self.layout.tensor, rings)
        if self.layout.context > 1:
            received, calls = self.exchanged_in_context_group()
            needed = received * received_share(self.config, self.layout.context)
            calls *= self.layout.context - 1
            leaves_node = self.layout.tensor * self.layout.context > GPUS_PER_NODE
            steps = (0, calls) if leaves_node else (calls, 0)
            lines[CONTEXT] = self.target.send_ms(needed, *steps)
        if self.layout.pipeline > 1:
            sent, calls = self.sent_to_stages()
            fills_nodes = self.layout.tensor * self.layout.replicas >= GPUS_PER_NODE
            leaves_node = self.layout.world_size > GPUS_PER_NODE and fills_nodes
            steps = (0, calls) if leaves_node else (calls, 0)
            lines[SENDS] = self.target.send_ms(sent, *steps)
        return lines

    # ---- Communication between ranks of one replica ----
    # A test compares these numbers with the counts of `pretrain bench step`.
    def exposed_in_tensor_group(self) -> tuple[int, int]:
        """Return the bytes that tensor-parallel ranks exchange while nothing else runs, and rings.

        Bytes are those of whole tensors. A gather or a scatter is one ring, an all-reduce two.
        Communication that runs beside matrix products costs nothing.
        """
        config, a, layers = self.config, self.activations, self.num_layers
        has_embedding = self.stage.number == 0
        forward = 2 if config.train.recompute_granularity == "full" else 1
        if config.parallel.sequence_parallel:
            # Megatron adds positions before it splits the sequence.
            summed = has_embedding * config.position.adds_to_embeddings(config)
            # Forward: inputs are gathered and outputs scattered. Backward: gradients of outputs,
            # which the products wait for.
            rings = 4 * layers * forward + has_embedding * (not summed) + self.has_output
            rings += 2 * layers + has_embedding
        else:
            summed, rings = 2 * layers * forward + has_embedding, 0
        rings += 2 * summed
        sent = rings * a.whole
        if self.has_output:
            # For each token the maximum, the sum of exponentials and the label's logit; Megatron's
            # loss sends the last two separately.
            sent += 2 * 3 * 4 * a.tokens
            rings += 2 * (2 if a.has_fused_loss else 3)
        count, partial = self.layout.num_microbatches, self.stage.partial
        # Once per step, gradients of which each rank has only the part of its own tokens.
        return sent * count + 2 * 4 * partial, rings * count + 2 * (partial > 0)

    def exchanged_in_context_group(self) -> tuple[int, int]:
        """Return the bytes of keys and values that the last context rank receives, and the calls.

        The gradients that it sends back count like received bytes. All keys are counted, although a
        method with a reach needs only a part of them (`Reach.received`).
        """
        a = self.activations
        passes = 2 if self.config.train.recompute_granularity == "none" else 3
        calls = passes * self.num_layers * self.layout.num_microbatches
        received = (self.layout.context - 1) * a.tokens * 2 * widths(self.config).key * a.item
        return calls * received, calls

    def sent_to_stages(self) -> tuple[int, int]:
        """Return the bytes of activations and gradients that the stage sends, and the calls."""
        last = len(self.config.layers_per_chunk) - 1
        # A chunk sends to the next chunk and to the previous one.
        chunks = chunk_layers(self.config, self.stage.number)
        calls = sum((n > 0) + (n < last) for n, _ in chunks) * self.layout.num_microbatches
        return calls * self.activations.stream, calls

    def lines(self) -> Lines:
        """Return all lines of the step but the bubble."""
        return {
            **self.compute_lines,
            **self.optimizer_lines(),
            **self.communication_lines(),
            **self.model_parallel_lines(),
        }


@dataclass(frozen=True)
class Timing:
    """The time of a step by class of work."""

    lines: Lines
    """Milliseconds by class of work for the slowest stage, with the pipeline bubble."""
    tokens: int
    """Tokens of a step on all GPUs together."""
    gpus: int

    @property
    def milliseconds(self) -> float:
        """The time of the step in milliseconds."""
        return sum(self.lines.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all GPUs together."""
        return 1e3 * self.tokens / self.milliseconds

    def part(self, name: str) -> float:
        """Return the milliseconds of one of PARTS."""
        return sum(self.lines.get(line, 0.0) for line in PARTS[name])

    def mfu(self, config: RunConfig, device: Device, causal: bool) -> float:
        """Return the model FLOPs utilization, in 0..1, counting attention only within the reach.

        Args:
            config: The run.
            device: The GPU.
            causal: Count only the causal half of attention.
        """
        linear, whole = (
            flops_per_token(config, length, causal=causal)
            for length in (0, config.data.sequence_length)
        )
        flops = linear + attention_share(config) * (whole - linear)
        return model_flops_utilization(
            self.tokens_per_second / self.gpus, flops, device.peak_tflops
        )


def time_of_step(
    config: RunConfig,
    layout: Layout,
    stages: Sequence[Stage],
    target: Target,
) -> Timing:
    """Return the time of a step in a layout.

    The slowest stage works without a pause; the others wait for it. Around its own work it waits
    for one micro batch of each other stage, divided by the number of chunks per stage.

    Args:
        config: The run, with the layout's keys.
        layout: Its layout.
        stages: Its pipeline stages, one of each kind.
        target: The GPUs and their links.
    """
    times = [Step(config, layout, stage, target).lines() for stage in stages]
    slowest: Lines = max(times, key=lambda each: sum(each.values()))
    lines = dict(slowest)
    if layout.pipeline > 1:
        # The lines that repeat for every micro batch.
        repeated = {TENSOR, CONTEXT, "matrix products", "attention", *PARTS["elementwise"]}
        passes = [sum(ms for name, ms in each.items() if name in repeated) for each in times]
        others = sum(p * stage.count for p, stage in zip(passes, stages)) - max(passes)
        lines["pipeline bubble"] = others / layout.num_microbatches / layout.virtual
    return Timing(lines, config.tokens_per_step, layout.world_size)

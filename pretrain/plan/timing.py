"""Put the pipeline stages of a step together: its time by part, and what follows for the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pretrain.config import Layout, RunConfig
from pretrain.config.tensors import widths
from pretrain.model.flops import flops_per_token
from pretrain.plan.hardware import (
    BESIDE,
    BUCKETS,
    CUT,
    DEEPSPEED,
    DEEPSPEED_ONE_RANK,
    DEEPSPEED_WHOLE_MODEL,
    ELEMENTWISE,
    FIRST_SUM,
    FIRST_SUM_FP16,
    GPUS_PER_NODE,
    HOST,
    INPUTS,
    JOINED,
    LATER_SUM,
    LATER_SUM_FP16,
    LAUNCHES,
    LOG,
    LOGIT,
    LOST,
    ROTATED,
    ROTATION,
    ROTATION_LAUNCHES,
    UNSCALED,
    Device,
    Network,
    Scale,
)
from pretrain.plan.memory import ITEM, Activations, Stage, chunk_layers

# ---- step time ----
# The time of one training step as a sum of lines, each a class of work that can be measured.
#
# Times are those of one rank of one pipeline stage, in milliseconds.


Lines = dict[str, float]
"""Milliseconds by class of work."""

SPLIT = frozenset(
    {
        "bias of qkv",
        "bias and GELU, forward",
        "GELU, backward",
        "gradients of biases",
        "columns of ALiBi in q, k and v",
    }
)
"""Rows of ELEMENTWISE that tensor-parallel ranks divide among them. Of the gradients of biases it
is seven ninths."""

LIVE_WEIGHTS = 1_000_000_000
"""Gathered weights that ZeRO 3 keeps for the backward pass (DeepSpeed's default of
stage3_max_live_parameters)."""


@dataclass(frozen=True)
class Step:
    """One training step of one pipeline stage, on all ranks of a data-parallel group.

    The layout is that of config.parallel.
    """

    config: RunConfig
    device: Device
    tokens: int
    """Tokens of one rank in a step."""
    micro_batch_tokens: int
    ranks: int
    network: Network
    stage: int
    """The pipeline stage."""
    parameters: int
    """Of each of its ranks."""
    tail: float
    """Part of all bytes in what is last to reduce."""
    scale: Scale
    """Factors on the times of computing."""
    waits: bool = False
    """True if the host waits for the device after each part of a step, as `pretrain bench train`
    does: then the gather of weights hides behind nothing."""

    @property
    def tensor(self) -> int:
        """The tensor-parallel size."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def num_layers(self) -> int:
        """Layers of this stage."""
        return sum(layers for _, layers in chunk_layers(self.config, self.stage))

    @property
    def has_output(self) -> bool:
        """True on the stage that computes the logits."""
        return self.stage == self.config.parallel.pipeline_model_parallel_size - 1

    def input(self, name: str) -> float:
        """Return the value of INPUTS on this device and at this ZeRO stage."""
        if self.config.parallel.zero_stage > 1 and name in DEEPSPEED:
            return DEEPSPEED[name]
        return INPUTS[name].of(self.device.is_v100)

    @property
    def num_micro_batches(self) -> int:
        """Micro batches that a rank accumulates."""
        return self.tokens // self.micro_batch_tokens

    @cached_property
    def gemm_ms(self) -> tuple[float, float]:
        """The time of all matrix products of a micro batch: forward, backward."""
        tokens, gemm = self.micro_batch_tokens, self.device.gemm_ms
        m, tensor = self.config.model, self.tensor
        heads = m.num_attention_heads + 2 * self.config.num_query_groups
        ffn, hidden = self.config.ffn_hidden_size // tensor, m.hidden_size
        # Inner dimension and columns of a token's products, and how many there are of each.
        layers = [
            (hidden, heads * self.config.head_dim // tensor, self.num_layers),
            (hidden // tensor, hidden, self.num_layers),
            (hidden, ffn, self.num_layers),
            (ffn, hidden, self.num_layers),
        ]
        output = [(hidden, self.config.padded_vocab_size // tensor, 1)] * self.has_output
        forward = sum(count * gemm(tokens, k, n) for k, n, count in layers + output)
        # The gradients of the input [tokens, n] x [n, k] and of the weight [n, tokens] x
        # [tokens, k].
        backward = sum(
            count * (gemm(tokens, n, k) + gemm(n, tokens, k)) for k, n, count in layers + output
        )
        if self.config.train.recompute_granularity == "full":
            backward += sum(count * gemm(tokens, k, n) for k, n, count in layers)
        return forward, backward

    def attention_ms(self) -> tuple[float, float]:
        """Return the time of attention of a micro batch: forward, backward.

        The two products of the forward pass cost 4 L d per token and layer, of which the causal
        half is counted; the backward pass has five.
        """
        m, length = self.config.model, self.config.data.sequence_length
        width = m.hidden_size // self.tensor
        flops = 2 * length * width * self.num_layers * self.micro_batch_tokens
        has_mask = Activations(self.config, not self.device.is_v100).uses_mask
        rates = self.device.masked_tflops if has_mask else self.device.attention_tflops
        forward, backward = 1e3 * flops / (rates[0] * 1e12), 1e3 * 2.5 * flops / (rates[1] * 1e12)
        recomputed = self.config.train.recompute_granularity != "none"
        return forward, backward + recomputed * forward

    def elements(self) -> float:
        """Return the elements of width d that a layer moves per token, forward and backward."""
        m = self.config.model
        # Of the norms and the residual stream this rank may compute a part of the tokens alone.
        stream_share = 1 / self.tensor if self.config.parallel.sequence_parallel else 1.0
        total = 0.0
        for name, row in ELEMENTWISE.items():
            value = row.of(self.device.is_v100)
            if "bias of qkv" in name or "of biases" in name:
                value *= m.use_bias
            if "ALiBi" in name:
                value *= self.config.position.bias == "slopes"
            if "GELU" in name:
                value *= self.config.ffn_hidden_size / (4 * m.hidden_size)
            total += value * (1 / self.tensor if name in SPLIT else stream_share)
        total += self._position_elements() / m.hidden_size
        # The forward pass is about two fifths of it.
        recomputed = self.config.train.recompute_granularity == "full"
        return total * (1.4 if recomputed else 1.0)

    def _position_elements(self) -> float:
        """Return the elements that a layer moves per token for its positions, on this rank."""
        position, width = self.config.position, widths(self.config)
        pair = width.query + width.key
        total = 0.0
        if position.bias == "none":
            total += self.input(JOINED) * (pair + width.key)
        if share := position.rotated_channels(self.config) / self.config.head_dim:
            cut = self.input(CUT) * (share < 1)
            total += (self.input(ROTATED) * share + self.input(ROTATION) + cut) * pair
        return total

    @cached_property
    def compute_lines(self) -> Lines:
        """The lines that do not depend on other ranks, for the whole step."""
        m, memory_ms = self.config.model, self.device.memory_ms
        count, tokens = self.num_micro_batches, self.tokens
        # Two bytes an element.
        elements = self.elements() * m.hidden_size
        logits = self.config.padded_vocab_size // self.tensor * tokens * self.has_output
        # fp16 on a V100 has no product that adds to fp32.
        is_v100 = self.device.is_v100
        first, later = (FIRST_SUM_FP16, LATER_SUM_FP16) if is_v100 else (FIRST_SUM, LATER_SUM)
        accumulated = self.input(first) + (count - 1) * self.input(later)
        launches = self.input(LAUNCHES)
        if self.config.position.rotated_channels(self.config):
            launches += self.input(ROTATION_LAUNCHES)
        launches *= self.num_layers
        if self.config.train.recompute_granularity == "full":
            launches *= 4 / 3
        lines = {
            "matrix products": count * sum(self.gemm_ms),
            "attention": count * sum(self.attention_ms()),
            "elementwise in layers": memory_ms(2 * elements * self.num_layers * tokens),
            "cross-entropy": memory_ms(self.input(LOGIT) * logits),
            "gradient accumulation": memory_ms(accumulated * self.parameters),
            "gaps between kernels": count * launches * self.device.launch_gap_us / 1e3,
        }
        host = count * launches * self.device.host_us / 1e3
        lines["waiting for the host"] = max(0.0, host - sum(lines.values()))
        return {name: ms * self.scale.compute for name, ms in lines.items()}

    def optimizer_lines(self) -> Lines:
        """Return the lines of the optimizer step, without communication."""
        memory_ms, parameters = self.device.memory_ms, self.parameters
        whole = 0.0
        if self.config.parallel.zero_stage > 1:
            whole = DEEPSPEED_ONE_RANK if self.ranks == 1 else DEEPSPEED_WHOLE_MODEL
        shard = self.input(BESIDE) + self.config.optimizer.update_bytes
        lines = {
            "optimizer, whole model": memory_ms(whole * parameters),
            "optimizer, own shard": memory_ms(shard * parameters / self.ranks),
        }
        # The host runs ahead of the device and waits for it at the norm.
        lines["optimizer, host"] = max(0.0, self.input(HOST) - sum(lines.values()))
        lines["synchronisation and log"] = self.input(LOG)
        return {name: ms * self.scale.optimizer for name, ms in lines.items()}

    def communication_lines(self) -> Lines:
        """Return the lines of communication: what is not hidden, and what hiding costs."""
        if self.ranks == 1:
            return {}
        reduce = self.reduction_ms()
        gather = self.ring_ms(2 * self.parameters, int(self.input(BUCKETS)))
        forward, backward = self.passes_ms()
        zero, count = self.config.parallel.zero_stage, self.num_micro_batches
        if zero > 1:
            # Gradients are reduced in every micro batch.
            if zero == 3:
                # What DeepSpeed does not keep until the backward pass is gathered a second time.
                again = max(0.0, 1 - LIVE_WEIGHTS / self.parameters)
                exposed = max(0.0, gather - forward) + max(0.0, again * gather - backward)
                gather = count * exposed
            return {
                "reduction of gradients, exposed": count * reduce,
                "gather of weights, exposed": gather,
            }
        # The last bucket to reduce and the first to gather hold the tied embedding, whose gradient
        # is the last to be complete and whose weight is the first to be used.
        exposed_reduce = max(self.tail * reduce, reduce - backward)
        exposed_gather = gather if self.waits else max(self.tail * gather, gather - forward)
        hidden = reduce + gather - exposed_reduce - exposed_gather
        return {
            "reduction of gradients, exposed": exposed_reduce,
            "gather of weights, exposed": exposed_gather,
            "compute slowed by hidden communication": self.input(LOST) * hidden,
        }

    def ring_ms(self, num_bytes: float, collectives: int) -> float:
        """Return the time of a reduce-scatter or an all-gather over the data-parallel ranks.

        The tensor-parallel ranks of a node have a group each, and share its links.

        Args:
            num_bytes: Bytes of the whole tensor of each group.
            collectives: Number of calls that it is split into.
        """
        if self.ranks * self.tensor <= GPUS_PER_NODE:
            return self.nvlink_ms(num_bytes, self.ranks, collectives)
        return self.network.ring_ms(
            num_bytes * self.tensor, self.ranks, collectives, GPUS_PER_NODE // self.tensor
        )

    def nvlink_ms(self, num_bytes: float, ranks: int, collectives: int) -> float:
        """Return the time of a ring within a node.

        Args:
            num_bytes: Bytes of the whole tensor.
            ranks: Ranks of the ring.
            collectives: Number of calls.
        """
        sent = num_bytes * (ranks - 1) / ranks
        latency = 1e-3 * collectives * (ranks - 1) * self.network.within_node_us
        return 1e3 * sent / (self.device.nvlink_gb_per_second * 1e9) + latency

    def reduction_ms(self) -> float:
        """Return the time of a reduce-scatter of all gradients.

        In 16 bit it has two stages: a ring in fp32 within nodes, then all-to-all between nodes.
        """
        buckets = int(self.input(BUCKETS))
        in_fp32 = self.config.parallel.gradient_reduce_dtype == "fp32"
        if in_fp32 or self.ranks * self.tensor <= GPUS_PER_NODE:
            return self.ring_ms(4 * self.parameters, buckets)
        within = 4 * self.parameters * (GPUS_PER_NODE - 1) / GPUS_PER_NODE
        within_ms = 1e3 * within / (self.device.nvlink_gb_per_second * 1e9)
        # Each rank then has an eighth of its node's sums.
        share = 2 * self.parameters / GPUS_PER_NODE
        return within_ms + self.tensor * self.network.all_to_all_ms(share, self.ranks, buckets)

    def passes_ms(self) -> tuple[float, float]:
        """Return the time of the forward and the backward pass of one micro batch.

        What is not a matrix product or attention is divided as those are.
        """
        (gemm_forward, gemm_backward), attention = self.gemm_ms, self.attention_ms()
        forward, backward = gemm_forward + attention[0], gemm_backward + attention[1]
        whole = sum(self.compute_lines.values()) / self.num_micro_batches
        return whole * forward / (forward + backward), whole * backward / (forward + backward)

    def lines(self) -> Lines:
        """Return all lines of the step."""
        return {**self.compute_lines, **self.optimizer_lines(), **self.communication_lines()}


# ---- List the collectives of a step at ZeRO 1, as `pretrain bench step` counts them ----
# Counted are those of one rank of a pipeline stage; a test compares every row with the counter. Of
# ZeRO 2 and 3, whose calls are DeepSpeed's, the model of time knows the bytes alone.


LOSS_BYTES = 40
"""Loss, votes on requests and the vote on new metrics, in fp64 (`pretrain.training.step`)."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Messages(NamedTuple):
    """Calls of one collective that are alike."""

    name: str
    """As in `pretrain.plan.operators.Collective`; "send" and "recv" between pipeline stages."""
    group: str
    """"tensor", "pipeline", "embedding", "data" or "world"."""
    dtype: str
    calls: int
    num_bytes: int
    """Of all calls together, as `Collective` counts them."""
    is_hidden: bool = False
    """True if matrix products run meanwhile."""


def messages(config: RunConfig, layout: Layout, stage: Stage, is_modern: bool) -> list[Messages]:
    """Return the collectives of a step on one rank of a stage, those of single ranks left out.

    Args:
        config: The run, at ZeRO 1.
        layout: Its layout.
        stage: The pipeline stage.
        is_modern: As in `Activations`.
    """
    found = [
        *_tensor(config, layout, stage, is_modern),
        *_pipeline(config, layout, stage, is_modern),
        *_shared(config, layout, stage),
        *_data(config, layout, stage),
    ]
    return [each for each in found if each.calls]


def _chunks(config: RunConfig, stage: Stage) -> tuple[int, bool, bool]:
    """Return the layers of a stage, and if it has the embedding and the output layer."""
    numbers = chunk_layers(config, stage.number)
    last = len(config.layers_per_chunk) - 1
    return (
        sum(layers for _, layers in numbers),
        any(number == 0 for number, _ in numbers),
        any(number == last for number, _ in numbers),
    )


def _tensor(config: RunConfig, layout: Layout, stage: Stage, is_modern: bool) -> Iterator[Messages]:
    """Yield what tensor-parallel ranks send in the passes."""
    if layout.tensor == 1:
        return
    a, dtype = Activations(config, is_modern), DTYPES[config.train.precision]
    layers, has_embedding, has_output = _chunks(config, stage)
    micro = layout.num_microbatches
    forward = 2 if config.train.recompute_granularity == "full" else 1

    def many(name: str, times: int, is_hidden: bool = False) -> Messages:
        """Return messages of all tokens, `times` for each micro batch."""
        return Messages(name, "tensor", dtype, times * micro, times * micro * a.whole, is_hidden)

    if config.parallel.sequence_parallel:
        # Megatron adds positions before it splits the sequence.
        adds_positions = config.position.adds_to_embeddings
        yield many("allreduce", has_embedding * adds_positions)
        scattered = 2 * layers * forward + has_embedding * (not adds_positions)
        yield many("reduce_scatter_base", scattered)
        yield many("allgather_base", 2 * layers * forward + has_output)
        # Gradients of outputs, which the products wait for, and inputs for the weights' gradients.
        yield many("allgather_base", 2 * layers + has_embedding)
        # The fused loss keeps what it has gathered.
        again = 2 * layers + (has_output and not a.has_fused_loss)
        yield many("allgather_base", again, is_hidden=True)
        yield many("reduce_scatter_base", 2 * layers + has_output, is_hidden=True)
    else:
        yield many("allreduce", 2 * layers * forward + has_embedding)
        yield many("allreduce", 2 * layers + has_output, is_hidden=True)
    if has_output:
        # Maximum, sum of exponentials and the label's logit of each token; Megatron's loss sends
        # the last two apart.
        count = micro * (2 if a.has_fused_loss else 3)
        yield Messages("allreduce", "tensor", "float32", count, micro * 3 * 4 * a.tokens)


def _pipeline(
    config: RunConfig, layout: Layout, stage: Stage, is_modern: bool
) -> Iterator[Messages]:
    """Yield what neighbouring stages send: activations forward, gradients backward."""
    if layout.pipeline == 1:
        return
    a, dtype = Activations(config, is_modern), DTYPES[config.train.precision]
    chunks = [number for number, _ in chunk_layers(config, stage.number)]
    last = len(config.layers_per_chunk) - 1
    # A chunk sends to the next one and to the one before, and receives as often.
    times = sum((number > 0) + (number < last) for number in chunks) * layout.num_microbatches
    for name in ("send", "recv"):
        yield Messages(name, "pipeline", dtype, times, times * a.stream)


def _shared(config: RunConfig, layout: Layout, stage: Stage) -> Iterator[Messages]:
    """Yield the sums of gradients that several model-parallel ranks hold parts of."""
    if layout.tensor > 1 and stage.partial:
        yield Messages("allreduce", "tensor", "float32", 1, 4 * stage.partial)
    if layout.pipeline > 1:
        for elements in stage.shared:
            yield Messages("allreduce", "pipeline", "float32", 1, 4 * elements)
        if config.model.tie_word_embeddings and stage.number in (0, layout.pipeline - 1):
            rows = config.padded_vocab_size // layout.tensor
            size = 4 * rows * config.model.hidden_size
            yield Messages("allreduce", "embedding", "float32", 1, size)


def _data(config: RunConfig, layout: Layout, stage: Stage) -> Iterator[Messages]:
    """Yield what data-parallel ranks send on one node, and the sums over all ranks."""
    if layout.world_size > 1:
        # The squared norm; and the loss with what is logged beside it.
        yield Messages("allreduce", "world", "float64", 2, 8 + LOSS_BYTES)
    if layout.data == 1:
        return
    wire = config.parallel.gradient_reduce_dtype
    name, size = ("reduce_scatter_base", 4) if wire == "fp32" else ("alltoall_base", 2)
    padded, calls = sum(b.num_elements for b in stage.buckets), len(stage.buckets)
    yield Messages(name, "data", DTYPES[wire], calls, size * padded, is_hidden=True)
    item, dtype = ITEM[config.train.precision], DTYPES[config.train.precision]
    yield Messages("allgather_base", "data", dtype, calls, item * padded, is_hidden=True)


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
    "communication": (
        "tensor-parallel communication, exposed",
        "sends between stages",
        "reduction of gradients, exposed",
        "gather of weights, exposed",
        "compute slowed by hidden communication",
    ),
    "bubble": ("pipeline bubble",),
    "optimizer": (
        "optimizer, whole model",
        "optimizer, own shard",
        "optimizer, host",
        "synchronisation and log",
    ),
}
"""The columns of the plan's table, and the lines of a step in each."""
USABLE = 0.95
"""Part of a GPU's memory that may be planned for. Assumed: a start with other lengths of text, or
another version of a library, should not fail at the last gigabyte."""


@dataclass(frozen=True)
class Target:
    """Say for which GPUs, links and measured speeds a run is planned."""

    gpus: int
    gpu_type: str
    device: Device
    network: Network
    scale: Scale = UNSCALED

    @property
    def is_modern(self) -> bool:
        """True unless the GPU is older than compute capability 8.0."""
        return not self.device.is_v100

    @property
    def usable_bytes(self) -> int:
        """Memory of a GPU that may be planned for."""
        return int(USABLE * self.device.memory_bytes)


@dataclass(frozen=True)
class Timing:
    """Hold the time of a step by class of work."""

    lines: Lines
    """Milliseconds by class of work, of the slowest stage, with the bubble."""
    tokens: int
    """Tokens of a step, of all GPUs."""
    gpus: int

    @property
    def milliseconds(self) -> float:
        """Time of the step."""
        return sum(self.lines.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all GPUs together."""
        return 1e3 * self.tokens / self.milliseconds

    def part(self, name: str) -> float:
        """Return the milliseconds of one of PARTS."""
        return sum(self.lines.get(line, 0.0) for line in PARTS[name])

    def mfu(self, config: RunConfig, device: Device, causal: bool) -> float:
        """Return the model FLOPs utilization, in 0..1.

        Args:
            config: The run.
            device: The GPU.
            causal: Count the causal half of attention only.
        """
        flops = flops_per_token(config, config.data.sequence_length, causal=causal)
        rate = self.tokens_per_second / self.gpus
        return rate * flops / (device.peak_tflops * 1e12)


def time_of_step(
    config: RunConfig,
    layout: Layout,
    stages: Sequence[Stage],
    target: Target,
    waits: bool = False,
) -> Timing:
    """Return the time of a step in a layout.

    The slowest stage works without a pause; the others wait for it. Before its first and after its
    last micro batch it waits for each of the others once, divided by the chunks of a stage.

    Args:
        config: The run, with the layout's keys.
        layout: Its layout.
        stages: Its pipeline stages, one of each kind.
        target: The GPUs, their links and measured speeds.
        waits: As in `Step`.
    """
    steps = [replace(stage_step(config, layout, stage, target), waits=waits) for stage in stages]
    times = [
        step.lines() | _model_parallel_lines(step, layout, stage)
        for step, stage in zip(steps, stages)
    ]
    slowest: Lines = max(times, key=lambda each: sum(each.values()))
    lines = dict(slowest)
    if layout.pipeline > 1:
        passes = [sum(each.get(name, 0.0) for name in _REPEATED) for each in times]
        others = sum(p * stage.count for p, stage in zip(passes, stages)) - max(passes)
        lines["pipeline bubble"] = others / layout.num_microbatches / layout.virtual
    return Timing(lines, config.tokens_per_step, layout.world_size)


_REPEATED = (
    *PARTS["GEMM"],
    *PARTS["attention"],
    *PARTS["elementwise"],
    "tensor-parallel communication, exposed",
)
"""The lines that every micro batch has a part of."""


def stage_step(config: RunConfig, layout: Layout, stage: Stage, target: Target) -> Step:
    """Return the step of one pipeline stage.

    Args:
        config: The run, with the layout's keys.
        layout: Its layout.
        stage: The pipeline stage.
        target: The GPUs, their links and measured speeds.
    """
    micro = config.batch.micro_batch_size * config.data.sequence_length
    return Step(
        config,
        target.device,
        tokens=micro * layout.num_microbatches,
        micro_batch_tokens=micro,
        ranks=layout.data,
        network=target.network,
        stage=stage.number,
        parameters=stage.parameters,
        tail=stage.tail,
        scale=target.scale,
    )


def _model_parallel_lines(step: Step, layout: Layout, stage: Stage) -> Lines:
    """Return the exposed communication between the tensor-parallel ranks and the stages of a step.

    Tensor-parallel ranks are in one node. What is hidden costs nothing here.

    Args:
        step: The step of the stage.
        layout: The layout.
        stage: The pipeline stage.
    """
    tensor = sends = 0.0
    for each in messages(step.config, layout, stage, not step.device.is_v100):
        if each.group == "tensor" and not each.is_hidden:
            # An all-reduce sends everything twice.
            times = 2 if each.name == "allreduce" else 1
            tensor += times * step.nvlink_ms(each.num_bytes, layout.tensor, each.calls)
        elif each.name == "send":
            sends += _sends_ms(step, layout, each)
    lines: Lines = {}
    if layout.tensor > 1:
        lines["tensor-parallel communication, exposed"] = tensor
    if layout.pipeline > 1:
        lines["sends between stages"] = sends
    return lines


def _sends_ms(step: Step, layout: Layout, sends: Messages) -> float:
    """Return the time in which a stage sends its activations and gradients on.

    Args:
        step: The step of the stage.
        layout: The layout.
        sends: What it sends.
    """
    network = step.network
    if layout.world_size <= GPUS_PER_NODE or layout.tensor * layout.data < GPUS_PER_NODE:
        rate, latency = step.device.nvlink_gb_per_second, network.within_node_us
    else:
        # All GPUs of a node send at once.
        rate = network.node_gb_per_second * network.efficiency / GPUS_PER_NODE
        latency = network.between_nodes_us
    return 1e3 * sends.num_bytes / (rate * 1e9) + 1e-3 * sends.calls * latency

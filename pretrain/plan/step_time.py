"""The time of one training step as a sum of lines, each a class of work that can be measured.

Times are those of one rank, in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import RunConfig, num_parameters
from pretrain.model.flops import flops_per_token, num_matmul_parameters
from pretrain.plan.hardware import FAST, GPUS_PER_NODE, Device, Network
from pretrain.plan.inputs import ELEMENTWISE, INPUTS

Lines = dict[str, float]
"""Milliseconds by class of work."""

REDUCTIONS = {
    "ring, 16 bit": "summed in 16 bit on the way",
    "ring, fp32": "summed in fp32 on the way",
    "all-to-all, 16 bit": "every rank gets all parts and sums them in fp32",
    "two stages, 16 bit": "a ring in fp32 within nodes, then all-to-all in 16 bit between nodes",
}
"""Ways to reduce gradients. Before, a reduction is an all-reduce, which takes twice as long."""


@dataclass(frozen=True)
class Step:
    """One training step, on all ranks of a data-parallel group."""

    config: RunConfig
    device: Device
    tokens: int
    """Tokens of one rank in a step."""
    micro_batch_tokens: int
    state: str = "after"
    """Either "before" or "after"."""
    ranks: int = 1
    network: Network = FAST
    reduction: str = "ring, fp32"
    """One of REDUCTIONS."""

    def input(self, name: str) -> float:
        """Return the value of INPUTS in this state."""
        return INPUTS[name].of(self.state, self.is_v100)

    @property
    def num_micro_batches(self) -> int:
        """Micro batches that a rank accumulates."""
        return self.tokens // self.micro_batch_tokens

    def gemm_ms(self) -> tuple[float, float]:
        """Return the time of all matrix products of a micro batch: forward, backward."""
        m, tokens, gemm = self.config.model, self.micro_batch_tokens, self.device.gemm_ms
        heads = m.num_attention_heads + 2 * self.config.num_query_groups
        ffn, hidden = self.config.ffn_hidden_size, m.hidden_size
        layer = [
            (hidden, heads * self.config.head_dim),
            (hidden, hidden),
            (hidden, ffn),
            (ffn, hidden),
        ]
        products = layer * m.num_layers + [(hidden, self.config.padded_vocab_size)]
        assert sum(k * n for k, n in products) == num_matmul_parameters(self.config)
        forward = sum(gemm(tokens, k, n) for k, n in products)
        # The gradients of the input [tokens, n] x [n, k] and of the weight [n, tokens] x
        # [tokens, k].
        backward = sum(gemm(tokens, n, k) + gemm(n, tokens, k) for k, n in products)
        return forward, backward

    def attention_ms(self) -> tuple[float, float]:
        """Return the time of attention of a micro batch: forward, backward.

        The two products of the forward pass cost 4 L d per token and layer, of which the causal
        half is counted; the backward pass has five.
        """
        m, length = self.config.model, self.config.data.sequence_length
        flops = 2 * length * m.hidden_size * m.num_layers * self.micro_batch_tokens
        forward, backward = self.device.attention_tflops[self.state]
        return 1e3 * flops / (forward * 1e12), 1e3 * 2.5 * flops / (backward * 1e12)

    def compute_lines(self) -> Lines:
        """Return the lines that do not depend on other ranks, for the whole step."""
        m, parameters, memory_ms = self.config.model, self.parameters, self.device.memory_ms
        count, tokens = self.num_micro_batches, self.tokens
        # Two bytes an element.
        rows = (row.of(self.state, self.is_v100) for row in ELEMENTWISE.values())
        elements = sum(rows) * m.hidden_size
        logits = self.config.padded_vocab_size * tokens
        first = "bytes per parameter to accumulate a gradient, first micro batch"
        later = "the same, later micro batches"
        if self.is_v100:
            first, later = "first micro batch in fp16", "later micro batches in fp16"
        accumulated = self.input(first) + (count - 1) * self.input(later)
        launches = m.num_layers * self.input("kernel launches per layer, forward and backward")
        loss_bytes = self.input("bytes per logit, loss forward and backward")
        lines = {
            "matrix products": count * sum(self.gemm_ms()),
            "attention": count * sum(self.attention_ms()),
            "elementwise in layers": memory_ms(2 * elements * m.num_layers * tokens),
            "cross-entropy": memory_ms(loss_bytes * logits),
            "gradient accumulation": memory_ms(accumulated * parameters),
            "gaps between kernels": count * launches * self.device.launch_gap_us / 1e3,
        }
        host = count * launches * self.device.host_us / 1e3
        lines["waiting for the host"] = max(0.0, host - sum(lines.values()))
        return lines

    def optimizer_lines(self) -> Lines:
        """Return the lines of the optimizer step, without communication."""
        memory_ms, parameters = self.device.memory_ms, self.parameters
        whole_name = "bytes per parameter of the whole model in the optimizer step"
        if self.ranks == 1:
            whole_name = "the same on one rank, where nothing is reduced"
        elif self.reduction == "ring, fp32":
            whole_name = "the same with fp32 on the wire"
        shard = self.input("bytes per parameter of the shard in the optimizer step")
        lines = {
            "optimizer, whole model": memory_ms(self.input(whole_name) * parameters),
            "optimizer, own shard": memory_ms(shard * parameters / self.ranks),
        }
        # The host runs ahead of the device and waits for it at the norm.
        host = self.input("host time of the optimizer step, ms")
        lines["optimizer, host"] = max(0.0, host - sum(lines.values()))
        lines["synchronisation and log"] = self.input("host synchronisations and the log, ms")
        return lines

    def communication_lines(self) -> Lines:
        """Return the lines of communication: what is not hidden, and what hiding costs."""
        if self.ranks == 1:
            return {}
        buckets = int(self.input("buckets of gradients"))
        reduce = self.reduction_ms()
        gather = self.network.ring_ms(2 * self.parameters, self.ranks, buckets)
        if self.state == "before":
            return {
                "reduction of gradients, exposed": 2 * reduce,
                "gather of weights, exposed": gather,
            }
        # The last bucket to reduce and the first to gather hold the tied embedding, whose gradient
        # is the last to be complete and whose weight is the first to be used.
        tail = self.input("part of all bytes in the bucket that is last to reduce")
        forward, backward = self.passes_ms()
        exposed_reduce = max(tail * reduce, reduce - backward)
        exposed_gather = max(tail * gather, gather - forward)
        hidden = reduce + gather - exposed_reduce - exposed_gather
        lost = self.input("part of compute lost while a collective runs beside it")
        return {
            "reduction of gradients, exposed": exposed_reduce,
            "gather of weights, exposed": exposed_gather,
            "compute slowed by hidden communication": lost * hidden,
        }

    def reduction_ms(self) -> float:
        """Return the time of a reduce-scatter of all gradients."""
        buckets = int(self.input("buckets of gradients"))
        ring, all_to_all = self.network.ring_ms, self.network.all_to_all_ms
        if self.reduction == "ring, fp32":
            return ring(4 * self.parameters, self.ranks, buckets)
        if self.reduction == "ring, 16 bit":
            return ring(2 * self.parameters, self.ranks, buckets)
        if self.reduction == "all-to-all, 16 bit":
            return all_to_all(2 * self.parameters, self.ranks, buckets)
        within = 4 * self.parameters * (GPUS_PER_NODE - 1) / GPUS_PER_NODE
        within_ms = 1e3 * within / (self.device.nvlink_gb_per_second * 1e9)
        # Each rank then has an eighth of its node's sums.
        return within_ms + all_to_all(2 * self.parameters / GPUS_PER_NODE, self.ranks, buckets)

    def passes_ms(self) -> tuple[float, float]:
        """Return the time of the forward and the backward pass of one micro batch.

        What is not a matrix product or attention is divided as those are.
        """
        (gemm_forward, gemm_backward), attention = self.gemm_ms(), self.attention_ms()
        forward, backward = gemm_forward + attention[0], gemm_backward + attention[1]
        whole = sum(self.compute_lines().values()) / self.num_micro_batches
        return whole * forward / (forward + backward), whole * backward / (forward + backward)

    @property
    def is_v100(self) -> bool:
        """True on a device without bf16, which trains in fp16 and has no compiled kernels."""
        return "V100" in self.device.name

    @property
    def parameters(self) -> int:
        """Parameters of the model, tied weights once."""
        return num_parameters(self.config)

    def lines(self) -> Lines:
        """Return all lines of the step."""
        return {**self.compute_lines(), **self.optimizer_lines(), **self.communication_lines()}

    @property
    def milliseconds(self) -> float:
        """Time of the step."""
        return sum(self.lines().values())

    def mfu(self, causal: bool) -> float:
        """Return the model FLOPs utilization, in 0..1, with all or the causal half of attention."""
        flops = flops_per_token(self.config, self.config.data.sequence_length, causal=causal)
        return flops * self.tokens / (self.milliseconds / 1e3) / (self.device.peak_tflops * 1e12)

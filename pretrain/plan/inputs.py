"""Assumptions of the time of a step beside the hardware: bytes and launches, with origins.

The words that say where a value comes from are those of `pretrain.plan.hardware`.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    "bytes per parameter of the shard in the optimizer step": Input(
        76,
        42,
        "before: AdamW of 24 ms on one GPU (modelled) and a cast; after: counted (norm 4, fused "
        "AdamW 32, since it writes the scaled gradient back, cast 6)",
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

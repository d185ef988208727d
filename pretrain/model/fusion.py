"""Decide which operations of the model are fused, from `train.fusion` and the device.

Three parts of the model beside attention have a fused form:

    compiled regions    bias with GELU, bias with dropout and residual: Megatron's own functions
                        under torch.compile (megatron/core/fusions)
    fused loss          logits with cross-entropy (`pretrain.model.loss`)
    weight gradients    added to fp32 buffers by the matrix product that computes them
                        (`pretrain.model.weight_gradients`), where the optimizer keeps such buffers
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from pretrain import platform
from pretrain.config import RunConfig


@dataclass(frozen=True)
class Fusion:
    """The fused operations of a model."""

    compiled: bool
    """Compile what torch.compile turns into one kernel."""

    loss: bool
    """Compute the loss from the hidden states, without a second copy of the logits."""

    weight_gradients: bool
    """Add weight gradients to fp32 buffers in the matrix product."""

    def bias_gelu(self, config: RunConfig) -> bool:
        """Return True if bias and GELU are one kernel.

        Megatron's fused function is the tanh approximation, whatever activation its configuration
        names (megatron/core/fusions/fused_bias_gelu.py), and it needs a bias.
        """
        m = config.model
        return self.compiled and m.use_bias and m.hidden_act == "gelu_pytorch_tanh"


def choose_fusion(config: RunConfig) -> Fusion:
    """Return what is fused in this process, and log it once.

    A CPU is left alone by default: compilation costs tens of seconds at every start, and the
    results of runs that were started before the fusions existed stay the same to the last bit.
    """
    wanted = config.train.fusion == "on" or (config.train.fusion == "auto" and platform.has_cuda())
    fusion = Fusion(
        compiled=wanted and platform.can_compile(),
        loss=wanted,
        weight_gradients=wanted and platform.can_accumulate_products(),
    )
    if wanted:
        _log_once(_describe(config, fusion))
    return fusion


def _describe(config: RunConfig, fusion: Fusion) -> str:
    """Return a line for the log that says what is fused, and what is not although it was wanted."""
    is_fused = {
        "loss": fusion.loss,
        "weight gradients": fusion.weight_gradients,
        "bias-dropout-residual": fusion.compiled,
        "bias-GELU": fusion.bias_gelu(config),
    }
    parts = ", ".join(name for name, fused in is_fused.items() if fused)
    missing = "" if fusion.compiled else "; torch.compile cannot generate code for this device"
    return f"fused operations: {parts} (train.fusion = {config.train.fusion}{missing})"


@cache
def _log_once(message: str) -> None:
    """Log a message the first time it occurs in this process."""
    logging.getLogger("pretrain.model").info(message)

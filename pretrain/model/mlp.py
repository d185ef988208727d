"""Dropout between the activation and the second linear layer of the MLP, which Megatron has not."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor


class DropoutRowParallelLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron ships no types
    """Megatron's row-parallel linear layer, which drops elements of its input while it trains.

    As in fairseq's feed-forward block (modules/transformer_layer.py, `activation_dropout_module`).
    """

    def __init__(self, *args: Any, dropout: float, **named: Any) -> None:
        """Initialize Megatron's layer.

        Args:
            *args: Arguments of Megatron's layer.
            dropout: Dropout probability of the input.
            **named: Further arguments of Megatron's layer.
        """
        super().__init__(*args, **named)
        self.dropout = dropout

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output [S, B, hidden] and the bias, which the layer does not add.

        Args:
            input_: The activation's output, [S, B, this tensor rank's part of ffn_hidden_size].
        """
        if not self.training:
            plain: tuple[Tensor, Tensor | None] = super().forward(input_)
            return plain
        # Tensor ranks hold different channels, and must draw different masks: see the core
        # attention's forward in `pretrain.model.attention`.
        fork = not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            # F.dropout calls it on a GPU. Elsewhere that one keeps a mask of the input's data type.
            dropped, _ = torch.native_dropout(input_, self.dropout, True)
        out: tuple[Tensor, Tensor | None] = super().forward(dropped)
        return out

"""Sizes of the measurements: the 1.3B model on a GPU, a tiny one of the same kind on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from pretrain.config import RunConfig, load_config

CUDA = torch.cuda.is_available()
CONFIG = Path(__file__).parents[2] / "configs/cc100_roberta/alibi_1024.toml"
SEQUENCES = 8 if CUDA else 2
"""Sequences in a micro batch; those of the model in docs/performance.md."""
TINY = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=256",
    "data.vocab_size=512",
    "data.sequence_length=128",
    "evaluation.lengths=[128]",
)
"""What a CPU can do in seconds."""


def sizes_name() -> str:
    """Return a few words that say what the sizes are, for the head of every result."""
    return "1.3B model" if CUDA else "tiny sizes on the CPU, which say nothing about speed"


def device_name() -> str:
    """Return the vendor's name of the GPU, or "cpu"."""
    return torch.cuda.get_device_name() if CUDA else "cpu"


def precision() -> str:
    """Return the precision to train in: bf16, or fp16 on a GPU that has no bf16."""
    return "fp16" if CUDA and torch.cuda.get_device_capability() < (8, 0) else "bf16"


def run_config(tokens: int, *overrides: str, sequences: int = SEQUENCES) -> RunConfig:
    """Return the config of a run on one process.

    Args:
        tokens: Tokens a step on a GPU. A CPU takes one of 128 of its sequences, and at least two
            micro batches.
        *overrides: Further settings, KEY.PATH=VALUE.
        sequences: Sequences in a micro batch.
    """
    batch = tokens // 1024 if CUDA else max(2, tokens // 1024 // 128) * sequences
    settings = [
        *(() if CUDA else TINY),
        "parallel.world_size=1",
        f"batch.micro_batch_size={sequences}",
        f"batch.global_batch_size={max(batch, sequences)}",
        f"train.precision={precision()}",
        *overrides,
    ]
    return load_config(CONFIG, settings)

"""A run in a few lines for a person: its size and how its processes share it."""

from __future__ import annotations

from pretrain.config.parameters import num_parameters, num_parameters_of_rank
from pretrain.config.schema import RunConfig


def describe(config: RunConfig) -> str:
    """What `pretrain config` prints below the TOML, as comments so that the whole stays TOML."""
    c, p, total = config, config.parallel, num_parameters(config)
    tokens = c.tokens_per_step * c.train.num_steps
    lines = [
        f"parameters       {total:,} ({_short(total)}), vocabulary padded from {c.data.vocab_size:,} to {c.padded_vocab_size:,}",
        f"positions        {c.position.method}, trained at {c.data.sequence_length} tokens, evaluated at "
        + ", ".join(str(n) for n in c.evaluation_lengths),
        f"training         {c.train.num_steps:,} steps of {c.tokens_per_step:,} tokens = {tokens:,} tokens ({_short(tokens)})",
    ]
    if p.world_size is not None:
        layout = c.layout(p.world_size)
        lines.append(
            f"{layout.world_size} processes    tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}, "
            f"{layout.num_microbatches} micro batches of {c.batch.micro_batch_size} a step, ZeRO {p.zero_stage}"
        )
    else:
        lines.append(
            f"layout           tensor {p.tensor_model_parallel_size} x pipeline {p.pipeline_model_parallel_size} x data "
            f"(what is left of the processes), ZeRO {p.zero_stage}"
        )
    for stage in range(p.pipeline_model_parallel_size):
        layers = c.layers_per_chunk[stage :: p.pipeline_model_parallel_size]
        name = f"stage {stage}"
        lines.append(
            f"{name:<17}{'+'.join(map(str, layers))} layers, {num_parameters_of_rank(c, stage):,} parameters a rank"
        )
    return "\n".join(f"# {line}" for line in lines)


def _short(count: int) -> str:
    """1317632 -> 1.32M, 1359000000 -> 1.36B."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"

"""Describe a run: its size, its length, its layout, what it exports as."""

from __future__ import annotations

from collections.abc import Iterable

from pretrain.config.run import RunConfig
from pretrain.config.tensors import num_parameters, num_parameters_of_rank


def describe(config: RunConfig, export: Iterable[str] = ()) -> str:
    """Return the summary that `pretrain config` prints below the resolved config.

    Every line is a TOML comment, so that the output of the command can be saved and used as a
    config file.

    Args:
        config: The run.
        export: What the run will export as, or why not: `pretrain.huggingface.classes` says it.
    """
    total = num_parameters(config)
    tokens = config.planned_tokens
    steps = f"{config.train.num_steps:,} steps of {config.tokens_per_step:,} tokens"
    if config.batch.rampup_batch_size is not None:
        start, _, samples = config.batch.rampup_batch_size
        begin = start * config.data.sequence_length
        steps = (
            f"{config.train.num_steps:,} steps of {begin:,} to {config.tokens_per_step:,} tokens"
        )
        steps += f" (ramped up over {samples:,} samples)"
    vocabulary = f"{config.data.vocab_size:,} padded to {config.padded_vocab_size:,}"
    if clusters := config.adaptive_clusters:
        parts = " + ".join(f"{cluster.size:,} x {cluster.dim}" for cluster in clusters)
        vocabulary += f" in clusters of {parts}"
    lengths = ", ".join(str(length) for length in config.evaluation_lengths)
    trained = f"trained at {config.data.sequence_length} tokens"
    if config.data.per_document_attention:
        trained += " within documents"
    if config.is_masked:
        trained += ", predicts masked tokens from both sides"
    rows = [
        ("parameters", f"{total:,} ({_short(total)}), vocabulary of {vocabulary}"),
        ("positions", f"{config.position.description(config)}, {trained}, evaluated at {lengths}"),
        ("training", f"{steps} = {tokens:,} tokens ({_short(tokens)})"),
        ("evaluations", _evaluations(config)),
        ("layout", _layout(config)),
        *_stages(config),
        *(("export", line) for line in export),
    ]
    return "\n".join(f"# {name:<16} {text}" for name, text in rows)


def _evaluations(config: RunConfig) -> str:
    """Return when a run is evaluated while it trains."""
    return f"every {config.evaluation_interval_steps:,} steps, and after the last one"


def _layout(config: RunConfig) -> str:
    """Return the parallel sizes, and where they are known the data-parallel size and batches."""
    p = config.parallel
    model = f"tensor {p.tensor_model_parallel_size} x pipeline {p.pipeline_model_parallel_size}"
    if p.world_size is None:
        return f"{model} x data (all remaining processes), ZeRO {p.zero_stage}"
    layout = config.layout(p.world_size)
    batches = f"{layout.num_microbatches} micro batches of {config.batch.micro_batch_size} a step"
    return (
        f"{layout.world_size} processes = {model} x data {layout.data}, {batches}, "
        f"ZeRO {p.zero_stage}"
    )


def _stages(config: RunConfig) -> list[tuple[str, str]]:
    """Return a row for each pipeline stage: layers of its chunks, and parameters of a rank."""
    pipeline = config.parallel.pipeline_model_parallel_size
    rows = []
    for stage in range(pipeline):
        layers = "+".join(map(str, config.layers_per_chunk[stage::pipeline]))
        parameters = num_parameters_of_rank(config, stage)
        rows.append((f"stage {stage}", f"{layers} layers, {parameters:,} parameters a rank"))
    return rows


def _short(count: int) -> str:
    """Return a count in millions or billions: 1317632 -> "1.32M", 1359000000 -> "1.36B"."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"

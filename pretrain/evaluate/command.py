"""`pretrain evaluate`: checkpoints in, one curve out. Runs on however many processes it is started with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pretrain import topology
from pretrain.checkpoint.load import load_weights
from pretrain.checkpoint.manifest import (
    Checkpoint,
    check_same_model,
    find_checkpoint,
    open_checkpoint,
)
from pretrain.config import ConfigError, EvaluationRequest, RunConfig, writing
from pretrain.data.manifest import TOKENIZER
from pretrain.data.stream import open_stream
from pretrain.data.tokenizer import Tokenizer
from pretrain.evaluate.perplexity import Evaluation, Evaluator, Protocol
from pretrain.evaluate.report import format_table, write_report
from pretrain.model.checks import check_positions
from pretrain.model.gpt import build_model


def evaluation_config(
    checkpoint: Checkpoint, request: EvaluationRequest, overrides: list[str]
) -> RunConfig:
    """The checkpoint's config with an evaluation's layout: all processes data-parallel, unless overrides say else.

    Raises ConfigError when the overrides would make another model of the weights.
    """
    world_size = topology.Process.from_environment().world_size
    sections = {"parallel": {}, "batch": {"micro_batch_size": 1, "global_batch_size": world_size}}
    config = checkpoint.load_config([*request.overrides(), *overrides], sections)
    check_same_model(config, checkpoint)
    trained = checkpoint.config.data.sequence_length
    if config.data.sequence_length != trained:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length}: {checkpoint.path} was trained at {trained}. "
            "Say with --lengths at which lengths to evaluate"
        )
    return config


def _protocols(request: EvaluationRequest, config: RunConfig) -> list[Protocol]:
    """Every protocol at every length."""
    lengths, stride = config.evaluation_lengths, config.evaluation_stride
    return [Protocol(name, length, stride) for name in request.protocols for length in lengths]


def evaluate_checkpoint(
    checkpoint: Checkpoint, config: RunConfig, protocols: list[Protocol]
) -> list[Evaluation]:
    """Scores the validation split with a checkpoint's weights; every rank gets the results, rank 0 prints them."""
    stream = open_stream(config, "validation")
    place = topology.initialize(config)
    chunks = build_model(config)
    check_positions(config, chunks)
    load_weights(checkpoint, chunks)
    evaluator = Evaluator(
        chunks,
        place,
        stream,
        Tokenizer(config.data_directory / TOKENIZER).eos_id,
        tokens_per_batch=config.evaluation.tokens_per_batch,
        max_tokens=config.evaluation.max_tokens,
    )
    results = []
    for protocol in protocols:
        results.append(evaluator.evaluate(protocol, progress=True))
        if place.is_main:
            name = f"{config.position.method:<12} {protocol.name:<15} {protocol.length:>7} tokens"
            print(f"{name}  perplexity {results[-1].perplexity:9.3f}", flush=True)
    return results


def evaluate_sources(
    sources: list[Path], request: EvaluationRequest, overrides: list[str], out: Path | None
) -> list[dict]:
    """Evaluates each run or checkpoint, prints one table, writes the report to `out` and beside it. Returns records."""
    checkpoints = [open_checkpoint(find_checkpoint(source)) for source in sources]
    configs = [evaluation_config(checkpoint, request, overrides) for checkpoint in checkpoints]
    train_length = configs[0].data.sequence_length
    for config, checkpoint in zip(configs, checkpoints):
        if config.data.sequence_length != train_length:
            raise ConfigError(
                f"{checkpoint.path}: trained at {config.data.sequence_length} tokens, the first at {train_length}. "
                "One report holds one training length: evaluate them one by one"
            )
    if out is not None:
        _prepare_out(out)
    records: list[dict] = []
    positions: dict[tuple[str, int], np.ndarray] = {}
    for checkpoint, config in zip(checkpoints, configs):
        for result in evaluate_checkpoint(checkpoint, config, _protocols(request, config)):
            records.append(
                {
                    "method": config.position.method,
                    **result.record(),
                    "checkpoint": str(checkpoint.path),
                }
            )
            if result.protocol.name == "nonoverlapping":
                positions[config.position.method, result.protocol.length] = result.loss_by_position
    if topology.Process.from_environment().rank == 0:
        print("\n" + format_table(train_length, records))
        if out is not None:
            with writing(out):
                write_report(out, train_length, records, positions)
            print(
                f"\nwritten: {out.parent}/ ({', '.join(sorted(p.name for p in out.parent.iterdir()))})"
            )
    topology.finish()
    return records


def _prepare_out(out: Path) -> None:
    """Finds out before the work, not after it, whether the report can be written."""
    if out.suffix != ".json":
        raise ConfigError(
            f"--out {out}: want a file that ends in .json; the report's other files stand beside it"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: {out.parent} cannot be made ({error.strerror}). Choose another"
        ) from None

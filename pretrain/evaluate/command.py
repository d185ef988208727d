"""Run `pretrain evaluate`: score checkpoints, print one table and write one report.

The command runs on as many processes as it is started with, alone or under torchrun or srun.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pretrain.topology
from pretrain.checkpoint.changes import check_model, check_tokenizer, is_its_validation_split
from pretrain.checkpoint.data_set import with_data_set
from pretrain.checkpoint.load import load_weights
from pretrain.checkpoint.manifest import Checkpoint, open_checkpoint
from pretrain.config import ConfigError, EvaluationRequest, RunConfig, writing
from pretrain.data.stream import TokenStream, open_stream
from pretrain.evaluate.perplexity import Evaluation, Evaluator, Protocol
from pretrain.evaluate.report import check_report_path, format_table, write_report
from pretrain.model.checks import check_positions
from pretrain.model.gpt import build_model
from pretrain.rundir.checkpoints import find_checkpoint
from pretrain.rundir.files import make_directory
from pretrain.rundir.holds import hold


def evaluation_config(
    checkpoint: Checkpoint, request: EvaluationRequest, overrides: list[str]
) -> RunConfig:
    """Return a checkpoint's config with the layout of an evaluation.

    Checkpoints load on any layout, so the one that the run was trained on does not matter here. All
    processes are data-parallel replicas unless the overrides set another layout.

    Args:
        checkpoint: The checkpoint, opened.
        request: Lengths, protocols, stride and token limit from the command line.
        overrides: `section.key=value` settings, applied last.

    Raises:
        ConfigError: The overrides describe a model that does not fit the weights, or change the
            training length.
    """
    world_size = pretrain.topology.Process.from_environment().world_size
    sections: dict[str, dict[str, Any]] = {
        "parallel": {},
        "batch": {"micro_batch_size": 1, "global_batch_size": world_size},
    }
    config = checkpoint.load_config([*request.overrides(), *overrides], sections)
    check_model(config, checkpoint)
    trained = checkpoint.config.data.sequence_length
    # data.sequence_length is the training length L of every table; lengths are chosen separately.
    if config.data.sequence_length != trained:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length}: {checkpoint.path} was "
            f"trained at {trained} tokens. Use --lengths to choose the lengths to evaluate at"
        )
    return config


def open_validation(checkpoint: Checkpoint, config: RunConfig) -> TokenStream:
    """Open the validation split to score a checkpoint on. Rank 0 says when it is not its own.

    Another corpus is a fair question to ask of a model; another tokenizer is none.

    Args:
        checkpoint: The checkpoint, opened.
        config: Its config, with the overrides of the command line.

    Raises:
        ConfigError: The data cannot be used, or was made by another tokenizer.
    """
    stream = open_stream(with_data_set(config, checkpoint), "validation")
    check_tokenizer(stream, checkpoint)
    rank = pretrain.topology.Process.from_environment().rank
    if rank == 0 and not is_its_validation_split(stream, checkpoint):
        print(
            f"{stream.directory}: not the validation split that {checkpoint.path} was evaluated on "
            "while it trained",
            file=sys.stderr,
            flush=True,
        )
    return stream


def evaluate_checkpoint(
    checkpoint: Checkpoint, config: RunConfig, stream: TokenStream, protocols: list[Protocol]
) -> list[Evaluation]:
    """Score the validation split with a checkpoint's weights. Rank 0 prints each result.

    Args:
        checkpoint: The checkpoint, opened.
        config: Its config, with the layout to evaluate on (see `evaluation_config`).
        stream: The validation split.
        protocols: Protocols to score under, in order.

    Returns:
        One evaluation for each protocol, the same on every rank.
    """
    topology = pretrain.topology.initialize(config)
    chunks = build_model(config)
    check_positions(config, chunks)
    load_weights(checkpoint, chunks)
    evaluator = Evaluator(
        chunks,
        topology,
        stream,
        stream.eos_id,
        tokens_per_batch=config.evaluation.tokens_per_batch,
        max_tokens=config.evaluation.max_tokens,
    )
    results = []
    for protocol in protocols:
        result = evaluator.evaluate(protocol, progress=True)
        results.append(result)
        if topology.is_main:
            name = f"{config.position.method:<12} {protocol.name:<15} {protocol.length:>7} tokens"
            print(f"{name}  perplexity {result.perplexity:9.3f}", flush=True)
    return results


def evaluate_sources(
    sources: list[Path], request: EvaluationRequest, overrides: list[str], out: Path | None
) -> list[dict[str, Any]]:
    """Evaluate runs or checkpoints, print one table of all, and write a report if asked to.

    Args:
        sources: Run directories (their newest checkpoint is evaluated) or checkpoint directories.
        request: Lengths, protocols, stride and token limit from the command line.
        overrides: `section.key=value` settings for every checkpoint.
        out: FILE.json of the report, whose other files are written beside it; None for no report.

    Returns:
        One record for each checkpoint, protocol and length, with the keys of `report.FIELDS`.

    Raises:
        ConfigError: A source is not a run or checkpoint, the checkpoints were trained at different
            lengths, the data has another tokenizer, or the report cannot be written to `out`.
    """
    checkpoints = [open_checkpoint(find_checkpoint(source)) for source in sources]
    configs = [evaluation_config(checkpoint, request, overrides) for checkpoint in checkpoints]
    _check_same_training_length(checkpoints, configs)
    # The data is checked before the process group starts, which takes seconds.
    streams = [open_validation(c, config) for c, config in zip(checkpoints, configs)]
    if out is not None:
        _prepare_report_directory(out)
    records: list[dict[str, Any]] = []
    positions: dict[tuple[str, int], NDArray[np.float64]] = {}
    for checkpoint, config, stream in zip(checkpoints, configs, streams):
        method = config.position.method
        protocols = _protocols(request, config)
        with hold(checkpoint.path):
            results = evaluate_checkpoint(checkpoint, config, stream, protocols)
        for result in results:
            path = str(checkpoint.path)
            records.append({"method": method, **result.record(), "checkpoint": path})
            # Sliding windows score few positions, so loss by position is reported without overlap.
            if result.protocol.name == "nonoverlapping":
                positions[method, result.protocol.length] = result.loss_by_position
    if pretrain.topology.Process.from_environment().rank == 0:
        train_length = configs[0].data.sequence_length
        # The table is printed first: its numbers are not lost if the report cannot be written.
        print("\n" + format_table(train_length, records))
        if out is not None:
            with writing(out):
                write_report(out, train_length, records, positions)
            names = ", ".join(sorted(p.name for p in out.parent.iterdir()))
            print(f"\nReport written to {out.parent}/ ({names})")
    pretrain.topology.finish()
    return records


def _protocols(request: EvaluationRequest, config: RunConfig) -> list[Protocol]:
    """Return every requested protocol at every length."""
    lengths, stride = config.evaluation_lengths, config.evaluation_stride
    return [Protocol(name, length, stride) for name in request.protocols for length in lengths]


def _check_same_training_length(checkpoints: list[Checkpoint], configs: list[RunConfig]) -> None:
    """Raise ConfigError unless all checkpoints were trained at the same length.

    Tables and plots give lengths as multiples of the training length, which a report holds once.
    """
    first = configs[0].data.sequence_length
    for checkpoint, config in zip(checkpoints, configs):
        if config.data.sequence_length != first:
            raise ConfigError(
                f"{checkpoint.path}: trained at {config.data.sequence_length} tokens, but "
                f"{checkpoints[0].path} at {first}. A report has one training length: evaluate "
                "these checkpoints one by one"
            )


def _prepare_report_directory(out: Path) -> None:
    """Make the report's directory, so that a bad --out fails before the evaluation, not after."""
    check_report_path(out)
    try:
        make_directory(out.parent)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot create {out.parent} ({error.strerror}). Choose another path"
        ) from None

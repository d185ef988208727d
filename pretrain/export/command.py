"""Run `pretrain export`: write a checkpoint as a Hugging Face folder and verify the result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain import topology
from pretrain.checkpoint.changes import check_tokenizer, trained_tokens
from pretrain.checkpoint.load import load_global_state, load_weights
from pretrain.checkpoint.manifest import Checkpoint, open_checkpoint
from pretrain.checkpoint.tokenizer import tokenizer_of
from pretrain.config import ConfigError, RunConfig, writing
from pretrain.config.exports import EXPORT_REACH, export_length
from pretrain.config.run import is_url
from pretrain.data.manifest import MANIFEST, OtherFormat
from pretrain.data.stream import open_stream
from pretrain.export.huggingface import to_huggingface
from pretrain.export.parity import PRECISIONS, ParityReport, check_parity
from pretrain.export.precision import add_precisions
from pretrain.model.forward import logits
from pretrain.model.gpt import build_model
from pretrain.rundir.checkpoints import checkpoint_step, find_checkpoint
from pretrain.rundir.holds import hold
from pretrain.rundir.metrics import evaluation_records
from pretrain.rundir.paths import RunPaths

PARITY_ROWS = 4
"""Number of validation sequences that are compared at the training length; one beyond it."""
SCORE_BYTES = 2**32
"""Largest matrix of attention scores in the comparison, [heads, T, T] in fp32. It bounds T, and so
the memory and the time of exporting a large model."""


def export_source(
    source: Path, out: Path, curve: Path | None, max_length: int | None = None
) -> bool:
    """Export a checkpoint, compare the export with the trained model and print the comparison.

    Args:
        source: Run directory (its newest checkpoint is exported) or checkpoint directory.
        out: Hugging Face folder to write.
        curve: curve.json for the model card; None takes the run's last evaluation while training.
        max_length: Longest sequence in tokens that the export accepts; None takes 16 training
            lengths, or the longest that the run evaluates.

    Returns:
        True if the exported model computes the same function.

    Raises:
        ConfigError: No transformers class can hold the model, a weight is not finite, or the
            checkpoint, the data or the curve is missing or damaged.
    """
    checkpoint = find_checkpoint(source)
    if out.resolve().is_relative_to(checkpoint.resolve()):
        # A file that the manifest does not list would make the checkpoint count as damaged.
        raise ConfigError(f"{out}: lies in the checkpoint {checkpoint}. Name a directory elsewhere")
    with hold(checkpoint):
        return _export(open_checkpoint(checkpoint), out, curve, max_length)


def _export(opened: Checkpoint, out: Path, curve: Path | None, max_length: int | None) -> bool:
    """Export an opened checkpoint and print the comparison; see `export_source`."""
    checkpoint = opened.path
    # Checkpoints load on any layout, so one process is enough. fp32 because the export holds the
    # fp32 master weights, and the comparison is one of fp32 logits.
    sections: dict[str, dict[str, Any]] = {
        "parallel": {},
        "batch": {"micro_batch_size": 1, "global_batch_size": 1},
    }
    config = opened.load_config(["train.precision=fp32"], sections)
    tokenizer = tokenizer_of(opened, Path(config.data.directory))
    max_length = checked_length(config, max_length)
    ids = _comparison_ids(config, opened, max_length)
    state = opened.trainer_state
    facts = {
        "Training steps": f"{state.step:,}",
        "Training tokens": f"{trained_tokens(config, state, opened.origin.changes):,}",
    }
    weights = load_global_state(opened)
    check_finite(weights, checkpoint)
    name = to_huggingface(
        config,
        weights,
        tokenizer.path,
        out,
        max_length=max_length,
        curve=_curve(config, checkpoint, curve),
        facts=facts,
    )
    print(f"{checkpoint} -> {out} ({name})")
    report = compare_with_folder(config, opened, out, ids, tuple(PRECISIONS))
    with writing(out):
        add_precisions(out, config, report)
    print(report.format())
    return report.passed


def checked_length(config: RunConfig, max_length: int | None) -> int:
    """Return the longest sequence that an export accepts, in tokens.

    Args:
        config: The run's config.
        max_length: What the user asks for; None takes the default.

    Raises:
        ConfigError: It is shorter than the training length, or a learned table does not reach it.
    """
    if max_length is None:
        return export_length(config)
    length = config.data.sequence_length
    if max_length < length:
        raise ConfigError(
            f"--max-length {max_length}: shorter than data.sequence_length = {length}, at which "
            "the model was trained. Give at least that"
        )
    if config.position.method == "learned" and max_length != config.max_position_embeddings:
        raise ConfigError(
            f"--max-length {max_length}: the trained table of positions has "
            f"{config.max_position_embeddings} rows. Leave the option out"
        )
    return max_length


def check_finite(weights: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Check that all weights are finite: no model with a NaN computes anything.

    Args:
        weights: Full tensors by global name.
        checkpoint: Where they come from.

    Raises:
        ConfigError: Some are not; names the first tensor and how many elements it is.
    """
    for name, tensor in weights.items():
        bad = tensor[~tensor.isfinite()]
        if bad.numel():
            raise ConfigError(
                f"{checkpoint}: {bad.numel()} of the {tensor.numel()} elements of {name} are not "
                f"finite (the first is {float(bad[0])}). Training had failed when it was saved. "
                "Export an earlier checkpoint, and train on from there (--resume)"
            )


def compare_with_folder(
    config: RunConfig,
    checkpoint: Checkpoint,
    folder: Path,
    ids_by_length: list[Tensor],
    precisions: Sequence[str] = (),
) -> ParityReport:
    """Compare stock transformers' model with our own, built and run as in training.

    Args:
        config: The checkpoint's config, for one process in fp32.
        checkpoint: The checkpoint, opened.
        folder: Hugging Face folder.
        ids_by_length: Token ids [N, T] for each length.
        precisions: 16-bit formats in which the folder's perplexity is measured too.
    """
    topology.initialize(config)
    try:
        chunks = build_model(config)
        load_weights(checkpoint, chunks)
        chunks[0].eval()
        return check_parity(
            lambda tokens: logits(chunks[0], tokens), folder, ids_by_length, precisions=precisions
        )
    finally:
        topology.finish()


def _comparison_ids(config: RunConfig, checkpoint: Checkpoint, max_length: int) -> list[Tensor]:
    """Return token ids [N, T] to compare the models on, at L tokens and beyond, at up to 16 L.

    The tokens are the first of the validation split, or random ones where the data set is not here,
    or is of a format that is no longer read.

    Args:
        config: The checkpoint's config.
        checkpoint: The checkpoint, opened.
        max_length: Longest sequence that the export accepts, in tokens.

    Raises:
        ConfigError: The data set is damaged or another tokenizer's, or the validation split is
            shorter than one sequence.
    """
    length, heads = config.data.sequence_length, config.model.num_attention_heads
    memory = math.isqrt(SCORE_BYTES // (4 * heads))
    longest = max(length, min(EXPORT_REACH * length, max_length, memory))
    where = f"{config.data.directory}/validation"
    if not is_url(where) and not Path(where, MANIFEST).exists():
        return _random_rows(config, longest, f"{where}: not here")
    try:
        stream = open_stream(config, "validation")
    except OtherFormat:
        return _random_rows(config, longest, f"{where}: of an earlier format")
    check_tokenizer(stream, checkpoint)
    if len(stream) < length:
        raise ConfigError(
            f"{stream.directory}: has {len(stream)} tokens, but the comparison needs {length}. "
            "Hold out more validation text (data.validation_fraction) and build the data again"
        )
    longest = min(longest, len(stream))
    rows = min(PARITY_ROWS, len(stream) // length)
    return [
        torch.from_numpy(stream.read(0, n * size)).view(n, size)
        for n, size in _shapes(rows, length, longest)
    ]


def _random_rows(config: RunConfig, longest: int, why: str) -> list[Tensor]:
    """Return random sequences, int64 [N, T] of each length, and print why they are.

    Args:
        config: The checkpoint's config.
        longest: Tokens of the longest sequence.
        why: Why there is no text.
    """
    print(f"{why}, so the models are compared on random tokens")
    generator = torch.Generator().manual_seed(0)
    shapes = _shapes(PARITY_ROWS, config.data.sequence_length, longest)
    return [torch.randint(config.data.vocab_size, s, generator=generator) for s in shapes]


def _shapes(rows: int, length: int, longest: int) -> list[tuple[int, int]]:
    """Return [N, T] of the sequences: some of the training length, and one of the longest."""
    return [(rows, length), (1, longest)] if longest > length else [(rows, length)]


def _curve(config: RunConfig, checkpoint: Path, curve: Path | None) -> list[dict[str, Any]]:
    """Return the evaluation records for the model card.

    Args:
        config: The checkpoint's config.
        checkpoint: Checkpoint that is exported.
        curve: A curve.json, of which the records of this method and checkpoint are taken; None
            takes the evaluation after the checkpoint's step in the run's metrics.jsonl.

    Returns:
        Records of this checkpoint's position method; none where it has not been evaluated.

    Raises:
        ConfigError: `curve` is not a curve.json.
    """
    method = config.position.method
    if curve is not None:
        try:
            records = json.loads(curve.read_text())["records"]
            # RUN/evaluations/curve.json has all checkpoints of one run, told apart by a "step" in
            # each record. A report of several runs has no "step", and one checkpoint of each run.
            return [
                record
                for record in records
                if record["method"] == method
                and ("step" not in record or Path(record["checkpoint"]).name == checkpoint.name)
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"--curve {curve}: not a curve.json that `pretrain evaluate --out` wrote ({error})"
            ) from None
    # RUN/checkpoints/step-########. A copy elsewhere has no run whose numbers would be its own, and
    # of the run's evaluations only the one after this very step is of these weights.
    step = checkpoint_step(checkpoint.name)
    if step is None or checkpoint.absolute().parent.name != "checkpoints":
        return []
    metrics = RunPaths(checkpoint.absolute().parents[1]).metrics
    common = {"method": method, "checkpoint": str(checkpoint)}
    return [{**common, **record} for record in evaluation_records(metrics, step)]

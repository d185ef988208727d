"""`pretrain export`: a checkpoint to a Hugging Face folder, compared with the model it came from before it is said to be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pretrain import topology
from pretrain.checkpoint.load import load_global_state, load_weights
from pretrain.checkpoint.manifest import Checkpoint, find_checkpoint, open_checkpoint
from pretrain.config import ConfigError, RunConfig
from pretrain.data.manifest import TOKENIZER
from pretrain.data.stream import TokenStream, open_stream
from pretrain.export.huggingface import to_huggingface
from pretrain.export.parity import ParityReport, check_parity
from pretrain.model.forward import logits
from pretrain.model.gpt import build_model

PARITY_ROWS = 4
"""Sequences compared at each length."""


def export_source(source: Path, out: Path, curve: Path | None) -> bool:
    """Exports the newest checkpoint of a run (or the one named), prints the parity, returns whether it holds.

    Raises ConfigError when no stock class holds the model, or something is missing.
    """
    opened = open_checkpoint(find_checkpoint(source))
    checkpoint = opened.path
    # One process, whatever the layout was; fp32, because the export holds the masters.
    sections: dict[str, dict] = {
        "parallel": {},
        "batch": {"micro_batch_size": 1, "global_batch_size": 1},
    }
    config = opened.load_config(["train.precision=fp32"], sections)
    stream = open_stream(config, "validation")
    state = opened.trainer_state
    facts = {
        "Steps": f"{state.step:,}",
        "Tokens seen": f"{state.consumed_samples * config.data.sequence_length:,}",
    }
    name = to_huggingface(
        config,
        load_global_state(opened),
        config.data_directory / TOKENIZER,
        out,
        max_length=max(*config.evaluation_lengths, 4 * config.data.sequence_length),
        curve=_curve(config, checkpoint, curve),
        facts=facts,
    )
    print(f"{checkpoint} -> {out} ({name})")
    report = _compare(config, opened, stream, out)
    print(report.format())
    return report.passed


def _compare(
    config: RunConfig, checkpoint: Checkpoint, stream: TokenStream, out: Path
) -> ParityReport:
    """Logits of our own model, run as in training, beside stock transformers', at L and at 4 L."""
    topology.initialize(config)
    chunks = build_model(config)
    load_weights(checkpoint, chunks)
    chunks[0].eval()
    length = config.data.sequence_length
    lengths = [
        n for n in (length, 4 * length) if config.position.method != "learned" or n == length
    ]
    ids = []
    for n in lengths:
        rows = min(PARITY_ROWS, len(stream) // n)
        if rows == 0:
            raise ConfigError(
                f"{stream.directory}: {len(stream)} tokens, the comparison needs {n}. Hold out more text"
            )
        ids.append(torch.from_numpy(stream.read(0, rows * n)).view(rows, n))
    report = check_parity(lambda tokens: logits(chunks[0], tokens), out, ids)
    topology.finish()
    return report


def _curve(config: RunConfig, checkpoint: Path, curve: Path | None) -> list[dict[str, Any]]:
    """Records for the model card: from a curve.json, or the run's last evaluation in metrics.jsonl."""
    method = config.position.method
    if curve is not None:
        try:
            records = json.loads(curve.read_text())["records"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"--curve {curve}: not a curve.json as `pretrain evaluate --out` writes it ({error})"
            ) from None
        # A run's own (RUN/evaluations/curve.json) holds every checkpoint of it, with its step.
        mine = [
            r for r in records if "step" not in r or Path(r["checkpoint"]).name == checkpoint.name
        ]
        return [r for r in mine if r["method"] == method]
    metrics = checkpoint.parent.parent / "metrics.jsonl"
    if not metrics.is_file():
        return []
    evaluations = [
        r for line in metrics.read_text().splitlines() if (r := json.loads(line)).get("evaluation")
    ]
    last = max((record["step"] for record in evaluations), default=None)
    return [
        {"method": method, "checkpoint": str(checkpoint), **r}
        for r in evaluations
        if r["step"] == last
    ]

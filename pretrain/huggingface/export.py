"""Run `pretrain export`: write a checkpoint as a Hugging Face folder and verify the result."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain import topology
from pretrain.checkpoint.format import CONFIG
from pretrain.checkpoint.load import GlobalState, load_weights
from pretrain.checkpoint.manifest import (
    Checkpoint,
    NoDataSet,
    check_tokenizer,
    open_checkpoint,
    trained_tokens,
    with_data_set,
)
from pretrain.checkpoint.save import tokenizer_of
from pretrain.config import ConfigError, RunConfig, RunFailed, load_config
from pretrain.data.shards import MANIFEST
from pretrain.data.stream import TokenStream, open_stream
from pretrain.huggingface.classes import EXPORT_REACH, class_of, export_length
from pretrain.huggingface.consumers import Consumer, Export, chosen, not_for, prove
from pretrain.huggingface.folder import add_proofs, special_ids, to_huggingface
from pretrain.huggingface.parity import PRECISIONS, check_parity
from pretrain.model.forward import logits
from pretrain.model.gpt import build_model
from pretrain.platform import release_memory, to_device
from pretrain.rundir.checkpoints import checkpoint_step, find_checkpoint, hold
from pretrain.rundir.metrics import evaluation_records
from pretrain.rundir.paths import RunPaths

PARITY_ROWS = 4
"""Number of validation sequences to compare at the training length. One is compared beyond it."""
SCORE_BYTES = 2**32
"""Largest matrix of attention scores in the comparison, [heads, T, T] in fp32, in bytes. It limits
T, and thereby the memory and time to export a large model."""


def export_source(
    source: Path,
    out: Path,
    max_length: int | None = None,
    *,
    overrides: Sequence[str] = (),
    programs: Sequence[str] = (),
) -> None:
    """Export a checkpoint, compare the export with the trained model and print the comparison.

    The folder gets its final name after the comparison. Only one model is in memory at a time: the
    process's own memory (RssAnon) is the fp32 weights once, plus about 0.2 GB for libraries and
    activations. It also maps files, whose pages the kernel reclaims when memory is short. Writing
    the files for `programs` needs all weights at once, and some libraries copy tensors again.

    Args:
        source: Run directory (its newest checkpoint is exported) or checkpoint directory.
        out: Hugging Face folder to write.
        max_length: Longest sequence in tokens that the export accepts; None takes 16 training
            lengths, or the longest that the run evaluates.
        overrides: `section.key=value` settings of [export], or of data.directory.
        programs: Names in `consumers.CONSUMERS` of further programs to export for.

    Raises:
        ConfigError: No transformers class can hold the model, a program would compute another one,
            or the checkpoint or the data is missing or damaged.
        RunFailed: The export computes another function, or cannot be written.
    """
    checkpoint = find_checkpoint(source)
    if out.resolve().is_relative_to(checkpoint.resolve()):
        # A file that the manifest does not list would make the checkpoint count as damaged.
        raise ConfigError(f"{out}: lies in the checkpoint {checkpoint}. Name a directory elsewhere")
    _check_overrides(overrides)
    with hold(checkpoint):
        _export(open_checkpoint(checkpoint), out, max_length, overrides, chosen(programs))


def _check_overrides(overrides: Sequence[str]) -> None:
    """Check that settings for an export do not change the model or its training.

    Raises:
        ConfigError: A setting does.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not key.startswith("export.") and key != "data.directory":
            raise ConfigError(
                f"--set {override}: an export holds the model as it was trained. Set only keys of "
                "[export], and data.directory if the data set was moved"
            )


def _export(
    opened: Checkpoint,
    out: Path,
    max_length: int | None,
    overrides: Sequence[str],
    programs: Sequence[Consumer],
) -> None:
    """Export an opened checkpoint and print the comparison; see `export_source`."""
    checkpoint = opened.path
    # Checkpoints load on any layout, so one process is enough. In fp32, because the export holds
    # the fp32 master weights, and the comparison is of fp32 logits.
    config = opened.load_config([*overrides, "train.precision=fp32"])
    stream, directory = _validation_split(config, opened)
    tokenizer = tokenizer_of(opened, Path(directory))
    max_length, target = checked_length(config, max_length), class_of(config)
    for program in programs:
        program.check(config, target, tokenizer)
    ids = _comparison_ids(config, stream, max_length)
    state = opened.trainer_state
    tokens = trained_tokens(config, state, opened.origin.changes)
    facts = {
        "Training steps": f"{state.step:,}",
        "Training tokens": f"{sum(tokens.values()):,}",
    }
    if changes := [f"{c.key} = {c.after} from step {c.step:,}" for c in opened.origin.changes]:
        facts["Changed while training"] = ", ".join(changes)
    weights = GlobalState(opened)

    def finish(folder: Path) -> None:
        print(f"{checkpoint} -> {out} ({target.name})")
        special = special_ids(tokenizer)
        export = Export(config, weights, target, folder, tokenizer, special, max_length)
        for program in programs:
            if program.packages:
                (folder / program.name).mkdir()
                program.write(export, folder / program.name)
        with recorded_logits(config, opened, ids, folder) as ours:
            report = check_parity(ours, folder, ids, precisions=tuple(PRECISIONS))
            proofs = [prove(program, export, ours, ids) for program in programs]
        lines = [*map(str, proofs), *not_for(config, target, programs)]
        add_proofs(folder, report, lines, is_text=stream is not None)
        print("\n".join([report.format(), *map(str, proofs)]))
        if not report.passed or not all(proof.passed for proof in proofs):
            raise RunFailed(
                f"{out}: not made, since it would not be the trained model. This is a defect of "
                "the export: report it with the numbers above and the checkpoint's config.toml"
            )

    # The folder says how the run was trained, so that an import goes on in the same way.
    to_huggingface(
        load_config(checkpoint / CONFIG, overrides, {"parallel": {}}),
        weights,
        tokenizer.path,
        out,
        max_length=max_length,
        curve=_curve(config, checkpoint),
        facts=facts,
        finish=finish,
    )


def checked_length(config: RunConfig, max_length: int | None) -> int:
    """Return the longest sequence that an export accepts, in tokens.

    Args:
        config: The run's config.
        max_length: The requested length; None takes the default.

    Raises:
        ConfigError: The length is below the training length, or not that of a learned table.
    """
    if max_length is None:
        return export_length(config)
    length, rows = config.data.sequence_length, config.position.table_end(config)
    if max_length < length:
        raise ConfigError(
            f"--max-length {max_length}: shorter than data.sequence_length = {length}, at which "
            "the model was trained. Give at least that length"
        )
    if rows is not None and max_length != rows:
        raise ConfigError(
            f"--max-length {max_length}: the trained table of positions has {rows} rows. Leave "
            "the option out"
        )
    return max_length


@contextmanager
def recorded_logits(
    config: RunConfig, checkpoint: Checkpoint, ids_by_length: Sequence[Tensor], folder: Path
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Compute a checkpoint's logits with our model, and free the model before yielding them.

    Yields a function from token ids [1, T] to the stored logits [1, T, V].

    Args:
        config: The checkpoint's config, for one process in fp32.
        checkpoint: The opened checkpoint.
        ids_by_length: Token ids [N, T] for each length T. The function accepts only their rows.
        folder: Folder in which the logits are stored meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix=".logits-", dir=folder) as kept:
        files: dict[bytes, str] = {}
        release_memory()
        topology.initialize(config, topology.ALONE)
        try:
            chunks = build_model(config)
            load_weights(checkpoint, chunks)
            chunks[0].eval()
            for row in (row for ids in ids_by_length for row in ids.long().unsqueeze(1)):
                # The same row again gets its own file again, whichever rows came between.
                name = files.setdefault(row.numpy().tobytes(), f"{kept}/{len(files)}.npy")
                np.save(name, logits(chunks[0], to_device(row)).cpu().numpy())
        finally:
            topology.finish()
        del chunks
        release_memory()
        yield lambda tokens: torch.from_numpy(np.load(files[tokens.cpu().numpy().tobytes()]))


def _validation_split(config: RunConfig, checkpoint: Checkpoint) -> tuple[TokenStream | None, str]:
    """Return the validation split and the directory of its data set.

    If the data set is not on this machine, the split is None, and a line is printed.

    Args:
        config: The checkpoint's config.
        checkpoint: The opened checkpoint.

    Raises:
        ConfigError: The data set is damaged, or was built with another tokenizer.
    """
    try:
        config = with_data_set(config, checkpoint)
        where = f"{config.data.directory}/validation"
        if Path(where, MANIFEST).exists():
            stream = open_stream(config, "validation")
            check_tokenizer(stream, checkpoint)
            return stream, config.data.directory
        why = f"{where}: not here"
    except NoDataSet as missing:
        why = str(missing)
    print(f"{why}, so the models are compared on random tokens")
    return None, config.data.directory


def _comparison_ids(config: RunConfig, stream: TokenStream | None, max_length: int) -> list[Tensor]:
    """Return token ids [N, T] to compare the models on, at L tokens and beyond, at up to 16 L.

    The tokens are the first ones of the validation split, or random ones without a split.

    Args:
        config: The checkpoint's config.
        stream: The validation split.
        max_length: Longest sequence that the export accepts, in tokens.

    Raises:
        ConfigError: The validation split is shorter than one sequence.
    """
    memory = longest_comparison(config)
    length, rows = min(config.data.sequence_length, memory), PARITY_ROWS
    longest = min(EXPORT_REACH * length, max_length, memory)
    if stream is not None:
        if len(stream) < length:
            raise ConfigError(
                f"{stream.directory}: has {len(stream)} tokens, but the comparison needs {length}. "
                "Hold out more validation text (data.validation_fraction) and build the data again"
            )
        longest, rows = min(longest, len(stream)), min(rows, len(stream) // length)
    shapes = [(rows, length), (1, longest)] if longest > length else [(rows, length)]
    if stream is not None:
        return [torch.from_numpy(stream.read(0, n * t)).view(n, t) for n, t in shapes]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(config.data.vocab_size, s, generator=generator) for s in shapes]


def longest_comparison(config: RunConfig) -> int:
    """Return the tokens of the longest sequence whose attention scores fit into SCORE_BYTES."""
    return math.isqrt(SCORE_BYTES // (4 * config.model.num_attention_heads))


def _curve(config: RunConfig, checkpoint: Path) -> list[dict[str, Any]]:
    """Return the run's own evaluations of a checkpoint, for the model card; [] without any.

    Args:
        config: The checkpoint's config.
        checkpoint: The checkpoint to export.
    """
    # Only for RUN/checkpoints/step-########, because a copy elsewhere belongs to no run; and only
    # the evaluation after this step, because only that one is of these weights.
    step = checkpoint_step(checkpoint.name)
    if step is None or checkpoint.absolute().parent.name != "checkpoints":
        return []
    metrics = RunPaths(checkpoint.absolute().parents[1]).metrics
    common = {"method": config.position_name, "checkpoint": str(checkpoint)}
    return [{**common, **record} for record in evaluation_records(metrics, step)]

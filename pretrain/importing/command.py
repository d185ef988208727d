"""Run `pretrain import`: make a run's directory of a Hugging Face folder, and verify its weights.

The directory appears whole, after stock transformers and our model have computed the same, or not
at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pretrain.checkpoint.content import Origin, TrainerState
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.whole import write_checkpoint
from pretrain.config import ConfigError, RunConfig, RunFailed, dump_config, num_parameters, writing
from pretrain.config.run import is_url
from pretrain.config.trajectory import TOKENIZER
from pretrain.data.manifest import MANIFEST
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.export.command import compare_with_folder
from pretrain.export.convert import EMBEDDING, SLOPES, restore, same_bits
from pretrain.export.huggingface import MARKER, ORIGINALS, stock_shapes
from pretrain.export.targets import Target
from pretrain.export.tokenizer import find_original
from pretrain.importing.run import run_config
from pretrain.importing.settings import CONFIG, Source, read_source
from pretrain.importing.weights import FolderWeights, read_tensors
from pretrain.rundir.files import new_directory, replace_file
from pretrain.rundir.lineage import Branch, new_id
from pretrain.rundir.paths import RunPaths, check_apart, claim_version

MOST_LAYERS = 1000
PARITY_ROWS = 2
"""Number of random sequences that are compared at each length."""


def import_folder(folder: Path, out: Path, overrides: Sequence[str] = ()) -> None:
    """Make a run's directory of a Hugging Face folder, and print the comparison.

    Args:
        folder: Folder with config.json and the weights.
        out: Directory of the run to make. Its config.toml is a whole config, and
            checkpoints/step-00000000 holds the weights, with moments of zero.
        overrides: `section.key=value` settings for config.toml.

    Raises:
        ConfigError: The folder is damaged, our model cannot hold its model, or `out` is not empty.
        RunFailed: Our model computes something else, or `out` cannot be written.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"{out}: already exists and is not an empty folder. Choose another")
    check_apart(out)
    source = read_source(folder)
    config = run_config(folder, source, out, overrides)
    weights = _open_weights(folder, source)
    tokenizer = _tokenizer(folder, config)
    with writing(out), new_directory(out.absolute()) as partial:
        claim_version(partial)
        replace_file(RunPaths(partial).config, dump_config(config))
        if tokenizer is not None:
            replace_file(partial / tokenizer.file_name, tokenizer.content)
        # Not streamed: the comparison holds the whole model in any case.
        tensors = dict(_tensors(folder, source, config, weights))
        data = {TOKENIZER: tokenizer.fingerprint} if tokenizer is not None else {}
        origin = Origin(branches=(Branch(new_id(), 0),), data=data)
        state = TrainerState(0, 0)
        checkpoint = write_checkpoint(partial, config, tensors, state, origin, tokenizer)
        _check_parity(folder, out, source, checkpoint)
    print(f"{folder} -> {out} ({num_parameters(config):,} parameters)")
    print(_advice(config, out, tokenizer))


def _open_weights(folder: Path, source: Source) -> FolderWeights:
    """Open the weights, and compare their names and shapes with those of the stock class."""
    # The stock model is built to see its shapes, which takes the longer the more layers it has.
    if (layers := source.settings.num_hidden_layers) > MOST_LAYERS:
        raise ConfigError(f"{folder / CONFIG}: {layers} layers are more than {MOST_LAYERS}")
    shapes = stock_shapes(source.settings)
    weights = FolderWeights(folder, source.target.family, shapes)
    weights.check_tied(_embedding_name(source.target))
    return weights


def _tensors(
    folder: Path, source: Source, config: RunConfig, weights: FolderWeights
) -> Iterator[tuple[str, Tensor]]:
    """Yield our tensors by global name.

    Args:
        folder: The Hugging Face folder.
        source: Its model.
        config: The run's config.
        weights: The folder's weights.

    Raises:
        ConfigError: A tensor is damaged, or one that only the class has is not what an export of
            this config stores.
    """
    target = source.target
    factors = target.stored_factors(config, weights.read)
    for name, tensor in target.extra(config, factors, source.max_length).items():
        if not same_bits(weights.read(name), tensor):
            raise ConfigError(
                f"{folder}: {name} is not what the export stored. Remove {folder / MARKER} to "
                "import the model as its class computes it"
            )
    if config.position.trainable_slopes:
        # Of the weights, these alone stand in config.json.
        yield SLOPES, torch.tensor(source.settings.slopes, dtype=torch.float32)
    originals = folder / ORIGINALS
    has_originals = (folder / MARKER).is_file() and originals.is_file()
    stored = read_tensors(originals) if has_originals else {}
    yield from restore(target, config, factors, weights.read, stored)


def _embedding_name(target: Target) -> str:
    """Return the class's name of the word embeddings."""
    _, *theirs = target.table[EMBEDDING.removesuffix(".weight")]
    return f"{theirs[0]}.weight"


def _check_parity(folder: Path, out: Path, source: Source, checkpoint: Path) -> None:
    """Compare our model, loaded from the checkpoint, with the stock one, and print the comparison.

    The tokens are random, because the folder's tokenizer may be one that is not known here.

    Args:
        folder: The Hugging Face folder.
        out: The run's directory, for the message.
        source: The folder's model.
        checkpoint: The checkpoint that was made of it.

    Raises:
        RunFailed: They do not compute the same.
    """
    opened = open_checkpoint(checkpoint)
    config = opened.load_config(
        # fp32, because the masters are, on the one process that this command is.
        ["train.precision=fp32"],
        {"parallel": {}, "batch": {"micro_batch_size": 1, "global_batch_size": 1}},
    )
    lengths = [config.data.sequence_length, 4 * config.data.sequence_length]
    if source.target.family in ("opt", "mpt"):
        # OPT and MPT accept no more positions than this.
        lengths = [min(length, source.max_length) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(0, source.settings.vocab_size, (PARITY_ROWS, length), generator=generator)
        for length in sorted(set(lengths))
    ]
    report = compare_with_folder(config, opened, folder, ids)
    report = dataclasses.replace(report, warning="DIFFERS from our model of the same weights")
    print(report.format())
    if not report.passed:
        raise RunFailed(
            f"{folder}: our model does not compute what stock transformers computes, so {out} was "
            "not made. This is a defect of the import: report it with the folder's config.json"
        )


def _tokenizer(folder: Path, config: RunConfig) -> Tokenizer | None:
    """Return the run's tokenizer that the folder carries, if it is one of our exports.

    Raises:
        ConfigError: It is not the tokenizer that the exported run's config describes.
    """
    original = find_original(folder)
    if not (folder / MARKER).is_file() or original is None:
        return None
    tokenizer = load_tokenizer(original[1])
    if tokenizer.vocab_size != config.data.vocab_size:
        raise ConfigError(
            f"{tokenizer.path}: has {tokenizer.vocab_size} pieces, but data.vocab_size = "
            f"{config.data.vocab_size}"
        )
    return tokenizer


def _advice(config: RunConfig, out: Path, tokenizer: Tokenizer | None) -> str:
    """Return what has to be known about the data before the run is evaluated or trained on."""
    where = f"data.directory = {config.data.directory}"
    if tokenizer is None:
        return (
            f"To evaluate it or train on, {where} needs tokens of this model's own tokenizer, "
            f"which has up to {config.data.vocab_size:,} ids. `pretrain data build` can use its "
            "SentencePiece model or tokenizer.json (data.tokenizer), but this folder says nowhere "
            "which file is the model's. Tokens of another tokenizer would give meaningless numbers"
        )
    own = f"The tokenizer is {out / tokenizer.file_name}"
    if is_url(config.data.directory) or (config.data_directory / "validation" / MANIFEST).is_file():
        return f"{own}; {where} exists and is used if it fits"
    return (
        f"{own}. To evaluate the model or train on, make tokens with it: set data.paths and "
        f"data.directory, and run `pretrain data build {out}/config.toml`"
    )

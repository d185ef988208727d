"""Run `pretrain import`: make a run's directory of a Hugging Face folder, and verify its weights.

transformers reads the folder; the table of its class, read backwards, says what is ours. The run's
directory appears whole, after stock transformers and our model have computed the same, or not at
all.

An export carries the config of the run that it was made from. That is taken over with its data,
schedule and all, if it still describes the folder's model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.manifest import Origin, TrainerState, open_checkpoint
from pretrain.checkpoint.save import write_checkpoint
from pretrain.config import (
    ConfigError,
    RunConfig,
    RunFailed,
    dump_config,
    load_config,
    num_parameters,
    parse_config,
    writing,
)
from pretrain.config.run import is_url
from pretrain.config.trajectory import TOKENIZER
from pretrain.data.manifest import MANIFEST
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.huggingface.base import EMBEDDING, OUTPUT, HuggingFaceClass, same_bits
from pretrain.huggingface.classes import CLASSES, class_of
from pretrain.huggingface.export import compare_with_folder
from pretrain.huggingface.folder import MARKER, ORIGINALS, find_original
from pretrain.rundir.files import new_directory, replace_file
from pretrain.rundir.lineage import Branch, new_id
from pretrain.rundir.paths import RunPaths, check_apart, claim_version

CONFIG = "config.json"
DEFAULT_LENGTH = 2048
"""Training length in tokens of a model whose folder states none: that of the published Blooms."""
MOST_LAYERS = 1000
PARITY_ROWS = 2
"""Number of random sequences that are compared at each length."""

MAY_DIFFER = {
    "attention_backend",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "embedding_init_method_std",
    "make_vocab_size_divisible_by",
}
"""Keys of [model] that do not change what the imported weights compute."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    # The smallest micro batch, because the memory is not known here.
    "batch": {"micro_batch_size": 1, "global_batch_size": 8},
    # Low, because the weights are trained already.
    "optimizer": {"learning_rate": 1e-5},
    "train": {"num_steps": 1000},
}
"""Settings of the run of a model that comes from elsewhere, where the schema has no default."""


@dataclass(frozen=True)
class Source:
    """A folder's model as its config.json describes it."""

    folder: Path
    target: HuggingFaceClass
    settings: Any
    """The transformers config."""

    @property
    def max_length(self) -> int:
        """Return the longest sequence in tokens that the folder states."""
        return getattr(self.settings, self.target.length_key, None) or DEFAULT_LENGTH

    @property
    def is_export(self) -> bool:
        """Return True for an export of ours, with the run's config."""
        return (self.folder / MARKER).is_file()


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
    config = run_config(source, out, overrides)
    weights = _read_weights(source)
    tokenizer = _tokenizer(source, config)
    with writing(out), new_directory(out.absolute()) as partial:
        claim_version(partial)
        replace_file(RunPaths(partial).config, dump_config(config))
        if tokenizer is not None:
            replace_file(partial / tokenizer.file_name, tokenizer.content)
        tensors = dict(_tensors(source, config, weights))
        del weights
        data = {TOKENIZER: tokenizer.fingerprint} if tokenizer is not None else {}
        origin = Origin(branches=(Branch(new_id(), 0),), data=data)
        state = TrainerState(0, 0)
        checkpoint = write_checkpoint(partial, config, tensors, state, origin, tokenizer)
        _check_parity(source, out, checkpoint)
    print(f"{folder} -> {out} ({num_parameters(config):,} parameters)")
    print(_advice(config, out, tokenizer))


# ---- The folder's model --------------------------------------------------------------------------
def read_source(folder: Path) -> Source:
    """Read and check config.json, without the weights.

    Raises:
        ConfigError: There is none, it is damaged, or it describes a model of another class.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}). Give the folder of a downloaded or exported model"
        ) from None
    model_type = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(model_type, str) or model_type not in CLASSES:
        raise ConfigError(
            f"{path}: model_type = {model_type!r}: cannot be imported. {', '.join(CLASSES)} can"
        )
    if values.get("quantization_config"):
        raise ConfigError(
            f"{path}: quantization_config: the weights are quantised, and masters are fp32. "
            "Import the model that this one was made from"
        )
    target = CLASSES[model_type]
    try:
        settings = target.config_class.from_pretrained(folder, local_files_only=True)
    # transformers validates a config with errors of many kinds.
    except Exception as error:
        raise ConfigError(f"{path}: transformers cannot read it: {_in_a_line(error)}") from None
    return Source(folder, target, settings)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _read_weights(source: Source) -> Mapping[str, Tensor]:
    """Return the weights that transformers loads, in fp32 by the names of the class's state_dict.

    Raises:
        ConfigError: They cannot be loaded, or are not those of the model that config.json
            describes.
    """
    folder, settings = source.folder, source.settings
    # The model is built before its weights are read, which takes the longer the more layers it has.
    if (layers := settings.num_hidden_layers) > MOST_LAYERS:
        raise ConfigError(f"{folder / CONFIG}: {layers} layers are more than {MOST_LAYERS}")
    options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        # torch's files are loaded as weights alone.
        model, found = source.target.load(folder, config=settings, dtype=torch.float32, **options)
    # Of the file system, safetensors, pickle and transformers.
    except Exception as error:
        raise ConfigError(
            f"{folder}: transformers cannot load the weights: {_in_a_line(error)}"
        ) from None
    for kind, what in (
        ("missing_keys", "missing of what"),
        ("unexpected_keys", "not of the model that"),
        ("mismatched_keys", "of another shape than in the model that"),
    ):
        # A mismatch is (name, the folder's shape, the class's).
        if names := sorted(n if isinstance(n, str) else n[0] for n in found[kind]):
            raise ConfigError(
                f"{folder}: {len(names)} tensors are {what} {CONFIG} describes, the first is "
                f"{names[0]}"
            )
    weights: dict[str, Tensor] = model.state_dict()
    output, embedding = (f"{source.target.modules[name]}.weight" for name in (OUTPUT, EMBEDDING))
    if settings.tie_word_embeddings and not torch.equal(weights[output], weights[embedding]):
        raise ConfigError(
            f"{folder}: {output} is not the embedding, but tie_word_embeddings = true in {CONFIG}"
        )
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{folder}: {name} holds a NaN or an infinity")
    return weights


def _tensors(
    source: Source, config: RunConfig, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield our tensors by global name.

    Args:
        source: The folder's model.
        config: The run's config.
        weights: The folder's weights.

    Raises:
        ConfigError: A tensor that only the class has is not what an export of this config stores.
    """
    from safetensors.torch import load_file

    target, folder = source.target, source.folder
    factors = target.stored_factors(config, weights.__getitem__)
    for name, tensor in target.extra(config, factors, source.max_length).items():
        if not same_bits(weights[name], tensor):
            raise ConfigError(
                f"{folder}: {name} is not what the export stored. Remove {folder / MARKER} to "
                "import the model as its class computes it"
            )
    for name, key in target.settings_tensors.items():
        if name in config.position.tensors(config):
            yield name, torch.tensor(getattr(source.settings, key), dtype=torch.float32)
    originals = folder / ORIGINALS
    stored = load_file(originals) if source.is_export and originals.is_file() else {}
    yield from target.restore(config, weights.__getitem__, stored)


# ---- The run's config ----------------------------------------------------------------------------
def run_config(source: Source, out: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the config of the run that an import makes.

    Args:
        source: The folder's model.
        out: The run's directory.
        overrides: `section.key=value` settings of the user.

    Raises:
        ConfigError: Our model cannot hold the folder's, or an override describes another model.
    """
    values = _exported_values(source, out) if source.is_export else _new_values(source, out)
    values["run"] = values.get("run", {}) | {"directory": str(out)}
    origin = str(source.folder / (MARKER if source.is_export else CONFIG))
    found = parse_config(values, origin)
    if source.is_export:
        _check_unchanged(source, found)
    config = parse_config(values, origin, overrides)
    _check_overrides(found, config)
    return config


def _exported_values(source: Source, out: Path) -> dict[str, Any]:
    """Return the sections of the run that the folder was exported from."""
    config = load_config(source.folder / MARKER)
    values = config.model_dump(mode="json", exclude_none=True)
    if config.position.table_end(config) is not None:
        # By default it follows data.sequence_length, which the user may override.
        values["position"]["max_position_embeddings"] = source.max_length
    if (original := find_original(source.folder)) is not None:
        # The import puts a copy there; a file that the run was given may be on another machine.
        values["data"]["tokenizer"] = str(out / original[0])
    return values


def _new_values(source: Source, out: Path) -> dict[str, Any]:
    """Return the sections of a run for a model that was not trained here.

    Raises:
        ConfigError: The model computes something that ours cannot; one line for each reason.
    """
    sections, refusals = source.target.sections(source.settings)
    if refusals:
        path = source.folder / CONFIG
        raise ConfigError("\n".join(f"{path}: {refusal}" for refusal in refusals))
    return {
        **sections,
        **_DEFAULTS,
        "data": {
            "directory": str(out / "data"),
            "sequence_length": source.max_length,
            "vocab_size": source.settings.vocab_size,
            "source": "text",
            "paths": ["corpus/**/*.txt"],
        },
    }


def _check_unchanged(source: Source, config: RunConfig) -> None:
    """Check that config.json still is what an export with this config writes.

    Raises:
        ConfigError: A setting differs, so one of the two files describes another model.
    """
    target, folder = class_of(config), source.folder
    remedy = f"Restore it, or remove {folder / MARKER} to import the model that {CONFIG} describes"
    if target is not source.target:
        raise ConfigError(
            f"{folder / CONFIG}: model_type = {source.target.model_type}, but {MARKER} describes "
            f"a model that is exported as {target.model_type}. {remedy}"
        )
    written = target.settings(config, source.max_length)
    expected = target.transformers_config(config, source.max_length, {})
    # A user may raise the length. Trained slopes are weights, which may be others than those of
    # the export.
    free = {"max_position_embeddings", target.length_key}
    trained = config.position.tensors(config)
    free |= {key for name, key in target.settings_tensors.items() if name in trained}
    for key in written.keys() - free:
        now, before = (_setting(s, key, written[key]) for s in (source.settings, expected))
        if now != before:
            raise ConfigError(
                f"{folder / CONFIG}: {key} = {now}, but {MARKER} describes a model with {before}. "
                f"{remedy}"
            )


def _setting(settings: Any, key: str, written: Any) -> Any:
    """Return a setting of a transformers config; of a section, the keys that an export writes."""
    value = getattr(settings, key)
    if not isinstance(written, dict):
        return value
    section = value if isinstance(value, dict) else value.to_dict()
    return {name: section.get(name) for name in written}


def _check_overrides(found: RunConfig, config: RunConfig) -> None:
    """Check that the user's settings leave the model and the run's directory alone."""
    pairs = {
        f"{section}.{key}": (getattr(getattr(found, section), key, None), value)
        for section in ("model", "position")
        for key, value in getattr(config, section)
        if key not in MAY_DIFFER
    }
    pairs["run.directory"] = found.run.directory, config.run.directory
    pairs["data.vocab_size, padded"] = found.padded_vocab_size, config.padded_vocab_size
    for key, (before, now) in pairs.items():
        if now != before:
            raise ConfigError(
                f"{key} = {now}: an import gives it the value {before}. Remove the --set that "
                "changes it"
            )


# ---- The comparison, and what is said ------------------------------------------------------------
def _check_parity(source: Source, out: Path, checkpoint: Path) -> None:
    """Compare our model, loaded from the checkpoint, with the stock one, and print the comparison.

    The tokens are random, because the folder's tokenizer may be one that is not known here.

    Args:
        source: The folder's model.
        out: The run's directory, for the message.
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
    if source.target.is_bounded:
        lengths = [min(length, source.max_length) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(0, source.settings.vocab_size, (PARITY_ROWS, length), generator=generator)
        for length in sorted(set(lengths))
    ]
    report = compare_with_folder(config, opened, source.folder, ids)
    report = dataclasses.replace(report, warning="DIFFERS from our model of the same weights")
    print(report.format())
    if not report.passed:
        raise RunFailed(
            f"{source.folder}: our model does not compute what stock transformers computes, so "
            f"{out} was not made. This is a defect of the import: report it with the folder's "
            f"{CONFIG}"
        )


def _tokenizer(source: Source, config: RunConfig) -> Tokenizer | None:
    """Return the run's tokenizer that the folder carries, if it is one of our exports.

    Raises:
        ConfigError: It is not the tokenizer that the exported run's config describes.
    """
    original = find_original(source.folder)
    if not source.is_export or original is None:
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

"""Make the config of an imported run, from the folder's own or, for one of our exports, the run's.

An export carries the config of the run that it was made from. That is taken over with its data,
schedule and all, if it still describes the folder's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pretrain.config import ConfigError, RunConfig, load_config, parse_config
from pretrain.export.huggingface import MARKER, hf_settings
from pretrain.export.selection import check_exportable
from pretrain.export.tokenizer import find_original
from pretrain.importing.settings import CONFIG, Source, sections

MAY_DIFFER = {
    "attention_backend",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "embedding_init_method_std",
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


def run_config(folder: Path, source: Source, out: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the config of the run that an import makes.

    Args:
        folder: The Hugging Face folder.
        source: Its model, as `read_source` returned it.
        out: The run's directory.
        overrides: `section.key=value` settings of the user.

    Raises:
        ConfigError: Our model cannot hold the folder's, or an override describes another model.
    """
    exported = (folder / MARKER).is_file()
    make = _exported_values if exported else _new_values
    values = make(folder, source, out)
    values["run"] = values.get("run", {}) | {"directory": str(out)}
    origin = str(folder / (MARKER if exported else CONFIG))
    found = parse_config(values, origin)
    if exported:
        _check_unchanged(folder, source, found)
    config = parse_config(values, origin, overrides)
    _check_overrides(found, config)
    return config


def _exported_values(folder: Path, source: Source, out: Path) -> dict[str, Any]:
    """Return the sections of the run that the folder was exported from."""
    config = load_config(folder / MARKER)
    values = config.model_dump(mode="json", exclude_none=True)
    if config.position.method == "learned":
        # By default it follows data.sequence_length, which the user may override.
        values["position"]["max_position_embeddings"] = source.max_length
    if (original := find_original(folder)) is not None:
        # The import puts a copy there; a file that the run was given may be on another machine.
        values["data"]["tokenizer"] = str(out / original[0])
    return values


def _new_values(folder: Path, source: Source, out: Path) -> dict[str, Any]:
    """Return the sections of a run for a model that was not trained here."""
    return {
        **sections(source, folder / CONFIG),
        **_DEFAULTS,
        "data": {
            "directory": str(out / "data"),
            "sequence_length": source.max_length,
            "vocab_size": source.settings.vocab_size,
            "source": "text",
            "paths": ["corpus/**/*.txt"],
        },
    }


def _check_unchanged(folder: Path, source: Source, config: RunConfig) -> None:
    """Check that config.json still is what an export with this config writes.

    Raises:
        ConfigError: A setting differs, so one of the two files describes another model.
    """
    remedy = f"Restore it, or remove {folder / MARKER} to import the model that {CONFIG} describes"
    target = check_exportable(config)
    if target is not source.target:
        raise ConfigError(
            f"{folder / CONFIG}: model_type = {source.target.model_type}, but {MARKER} describes "
            f"a model that is exported as {target.model_type}. {remedy}"
        )
    written = target.settings(config, source.max_length)
    written |= dict.fromkeys(("vocab_size", "tie_word_embeddings"))
    del written[target.length_key]
    slopes = None
    if target.stock and config.position.trainable_slopes:
        # They are weights, which may be others than those of the export.
        slopes = torch.tensor(source.settings.slopes, dtype=torch.float32)
    elif target.stock:
        written["slopes"] = None
    expected = hf_settings(target, config, source.max_length, {}, slopes)
    for key, value in written.items():
        now, before = (_setting(s, key, value) for s in (source.settings, expected))
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
        f"{section}.{key}": (getattr(getattr(found, section), key), value)
        for section in ("model", "position")
        for key, value in getattr(config, section)
        if key not in MAY_DIFFER | {"make_vocab_size_divisible_by"}
    }
    pairs["run.directory"] = found.run.directory, config.run.directory
    pairs["data.vocab_size, padded"] = found.padded_vocab_size, config.padded_vocab_size
    for key, (before, now) in pairs.items():
        if now != before:
            raise ConfigError(
                f"{key} = {now}: an import gives it the value {before}. Remove the --set that "
                "changes it"
            )

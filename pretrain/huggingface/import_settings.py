"""Make the config of an imported run, from the folder's own or, for one of our exports, the run's.

An export carries the config of the run that it was made from. That is taken over with its data,
schedule and all, if it still describes the folder's model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pretrain.config import ConfigError, RunConfig, load_config, parse_config
from pretrain.config.describe import OPT_LAYERNORM_EPSILON
from pretrain.config.errors import Refusal
from pretrain.huggingface.folder import MARKER, find_original, hf_settings
from pretrain.huggingface.table import (
    SLOPES,
    TARGETS,
    Target,
    check_exportable,
    config_class,
    is_own,
)
from pretrain.positions.alibi import MAX_SLOPE

# ---- Read a folder's config.json as [model] and [position] of our config, or refuse it ----
# A setting that changes what the model computes, and that our model cannot hold, is refused with
# its key, its value and the reason. The classes were read as in `pretrain.huggingface.table`.


CONFIG = "config.json"
DEFAULT_LENGTH = 2048
"""Training length in tokens of a model whose folder states none: that of the published Blooms."""

ACTIVATIONS = {
    "gelu": "gelu",
    # Three names of GELU's tanh approximation (transformers/activations.py).
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "relu": "relu",
}
"""Hugging Face's name of an activation -> model.hidden_act."""


@dataclass(frozen=True)
class Source:
    """A folder's model as its config.json describes it."""

    target: Target
    settings: Any
    """The transformers config."""
    max_length: int
    """Longest sequence in tokens that the folder states."""


class _Condition(NamedTuple):
    """Something that must hold for a model to be imported."""

    key: str
    """Key of config.json."""
    value: object
    holds: bool
    reason: str
    """Why it is refused otherwise."""


def read_source(folder: Path) -> Source:
    """Read and check config.json, without the weights.

    Raises:
        ConfigError: There is none, it is damaged, or it describes a model of another class.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path}: no such file. Give the folder of a downloaded or exported model"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable JSON file ({error})") from None
    model_type = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(model_type, str) or model_type not in TARGETS:
        raise ConfigError(
            f"{path}: model_type = {model_type!r}: cannot be imported. {', '.join(TARGETS)} can"
        )
    if values.get("quantization_config"):
        raise ConfigError(
            f"{path}: quantization_config: the weights are quantised, and masters are fp32. "
            "Import the model that this one was made from"
        )
    settings = _load(path, model_type)
    target = TARGETS[model_type]
    length = getattr(settings, target.length_key, None)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        if length is not None:
            raise ConfigError(f"{path}: {target.length_key} = {length!r}: not a number of tokens")
        length = DEFAULT_LENGTH
    return Source(target, settings, length)


def _load(path: Path, model_type: str) -> Any:
    """Return the transformers config in a file, which is of this model_type."""
    from transformers import AutoConfig

    try:
        # Code that the folder brings along is never run.
        if is_own(model_type):
            return config_class(model_type).from_pretrained(path.parent, local_files_only=True)
        return AutoConfig.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False
        )
    # transformers validates a config with errors of many kinds.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: transformers cannot read it: {reason}") from None


def sections(source: Source, path: Path) -> dict[str, dict[str, Any]]:
    """Return [model] and [position] of the model that config.json describes.

    Args:
        source: What `read_source` returned.
        path: The file, for error messages.

    Raises:
        ConfigError: The model computes something that ours cannot; one line for each reason.
    """
    settings = source.settings
    conditions, model, position = _READERS[source.target.model_type](settings)
    refusals = [
        Refusal(c.key, c.value, c.reason, "This model cannot be imported")
        for c in conditions
        if not c.holds
    ]
    if refusals:
        raise ConfigError("\n".join(f"{path}: {refusal}" for refusal in refusals))
    model |= {
        "num_layers": settings.num_hidden_layers,
        "hidden_size": settings.hidden_size,
        "num_attention_heads": settings.num_attention_heads,
        "tie_word_embeddings": settings.tie_word_embeddings,
        # So the embedding has exactly as many rows as the folder's, whichever of them stand for
        # pieces of the tokenizer.
        "make_vocab_size_divisible_by": settings.vocab_size,
        # None of the classes multiplies its embeddings.
        "embedding_scale": 1.0,
    }
    return {"model": model, "position": position}


_Reading = tuple[Iterable[_Condition], dict[str, Any], dict[str, Any]]
"""Conditions, and what follows from the settings for [model] and [position]."""


def _bloom(s: Any) -> _Reading:
    post = s.apply_residual_connection_post_layernorm
    conditions = [
        _Condition(
            "apply_residual_connection_post_layernorm",
            post,
            not post,
            "our residual stream adds to what the LayerNorm reads, not to what it returns",
        )
    ]
    model = {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "embedding_layernorm": True,
        "layernorm_epsilon": s.layer_norm_epsilon,
        "hidden_dropout": s.hidden_dropout,
        "attention_dropout": s.attention_dropout,
    }
    return conditions, model, {"method": "alibi"}


def _mpt(s: Any) -> _Reading:
    a, heads = s.attn_config, s.num_attention_heads
    bias_max = a.alibi_bias_max
    scale = None if not heads else (s.hidden_size / heads) ** -0.5
    same = "stock transformers ignores it, and so would we"
    conditions = [
        _Condition("no_bias", s.no_bias, s.no_bias is True, same),
        _Condition("expansion_ratio", s.expansion_ratio, s.expansion_ratio == 4, same),
        _Condition("logit_scale", s.logit_scale, s.logit_scale is None, same),
        _Condition(
            "norm_type",
            s.norm_type,
            s.norm_type in ("layernorm", "low_precision_layernorm"),
            "our norms are LayerNorms",
        ),
        _Condition("attn_config.alibi", a.alibi, a.alibi is True, same),
        _Condition("attn_config.alibi_bias_max", bias_max, bias_max == 8, same),
        _Condition("attn_config.qk_ln", a.qk_ln, not a.qk_ln, same),
        _Condition("attn_config.prefix_lm", a.prefix_lm, not a.prefix_lm, same),
        _Condition(
            "attn_config.attn_uses_sequence_id",
            a.attn_uses_sequence_id,
            not a.attn_uses_sequence_id,
            same,
        ),
        _Condition(
            "attn_config.attn_type",
            a.attn_type,
            a.attn_type == "multihead_attention",
            same,
        ),
        _Condition(
            "attn_config.clip_qkv",
            a.clip_qkv,
            not a.clip_qkv,
            "our queries, keys and values are not clipped",
        ),
        _Condition(
            "attn_config.softmax_scale",
            a.softmax_scale,
            a.softmax_scale in (None, scale),
            "our scores are divided by the square root of the head size",
        ),
    ]
    model = {
        "hidden_act": "gelu",
        "use_bias": False,
        "layernorm_epsilon": s.layer_norm_epsilon,
        "attention_dropout": a.attn_pdrop,
        "hidden_dropout": a.attn_pdrop,
    }
    return conditions, model, {"method": "alibi"}


def _own_slopes(reader: Callable[[Any], _Reading]) -> Callable[[Any], _Reading]:
    """Return the reader of a class in the folder, which is a stock class but for its slopes.

    Args:
        reader: That of the stock class.
    """

    def read(s: Any) -> _Reading:
        conditions, model, position = reader(s)
        slopes = s.slopes or []
        holds = bool(slopes) and all(0 <= slope <= MAX_SLOPE for slope in slopes)
        reason = f"position.slopes has a number from 0 to {MAX_SLOPE:.0f} for each head"
        condition = _Condition("slopes", slopes, holds, reason)
        return [*conditions, condition], model, position | {"slopes": slopes}

    return read


def _opt(s: Any) -> _Reading:
    width = s.word_embed_proj_dim
    norms, biases = s.layer_norm_elementwise_affine, s.enable_bias
    conditions = [
        _Condition(
            "do_layer_norm_before",
            s.do_layer_norm_before,
            s.do_layer_norm_before is True,
            "our layers normalise their inputs, not their outputs",
        ),
        _Condition(
            "_remove_final_layer_norm",
            s._remove_final_layer_norm,
            not s._remove_final_layer_norm,
            "our model ends with a LayerNorm",
        ),
        _Condition(
            "word_embed_proj_dim",
            width,
            width == s.hidden_size,
            f"our embeddings are as wide as the model, {s.hidden_size}",
        ),
        _Condition(
            "layer_norm_elementwise_affine",
            norms,
            norms is True,
            "our LayerNorms have weights",
        ),
        _Condition(
            "enable_bias",
            biases,
            biases is True,
            "without biases our LayerNorms have none either",
        ),
        _Condition("layerdrop", s.layerdrop, not s.layerdrop, "our model leaves out no layers"),
        _activation("activation_function", s.activation_function),
    ]
    model = {
        "ffn_hidden_size": s.ffn_dim,
        "hidden_act": ACTIVATIONS.get(s.activation_function),
        "use_bias": True,
        "layernorm_epsilon": OPT_LAYERNORM_EPSILON,
        "hidden_dropout": s.dropout,
        "attention_dropout": s.attention_dropout,
    }
    table = {"method": "learned", "max_position_embeddings": s.max_position_embeddings}
    return conditions, model, table


def _gpt_neox(s: Any) -> _Reading:
    rope = s.rope_parameters
    kind, base = rope.get("rope_type", "default"), rope.get("rope_theta")
    conditions = [
        _Condition(
            "attention_bias",
            s.attention_bias,
            s.attention_bias is True,
            "our model has biases everywhere or nowhere",
        ),
        _Condition(
            "rope_parameters.rope_type",
            kind,
            kind == "default",
            "our rotary embeddings are not rescaled for longer sequences",
        ),
        _Condition(
            "rope_parameters.rope_theta",
            base,
            isinstance(base, int | float) and base == int(base),
            "our base is an integer",
        ),
        _activation("hidden_act", s.hidden_act),
    ]
    model = {
        "ffn_hidden_size": s.intermediate_size,
        "hidden_act": ACTIVATIONS.get(s.hidden_act),
        "use_bias": True,
        "parallel_residual": s.use_parallel_residual,
        "layernorm_epsilon": s.layer_norm_eps,
        "hidden_dropout": s.hidden_dropout,
        "attention_dropout": s.attention_dropout,
    }
    position = {
        "method": "rotary",
        "rotary_base": int(base) if conditions[2].holds else None,
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
    return conditions, model, position


def _activation(key: str, value: str) -> _Condition:
    reason = f"our activations are {', '.join(ACTIVATIONS)}"
    return _Condition(key, value, value in ACTIVATIONS, reason)


_READERS = {
    "bloom": _bloom,
    "mpt": _mpt,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "bloom_slopes": _own_slopes(_bloom),
    "mpt_slopes": _own_slopes(_mpt),
}


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
    if config.position.table_end(config) is not None:
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
    if target.stock and SLOPES in config.position.tensors(config):
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
        f"{section}.{key}": (getattr(getattr(found, section), key, None), value)
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

"""Layout-free weights -> a folder that stock `transformers` loads: weights, settings, tokenizer, model card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config import ConfigError, RunConfig, dump_config, writing
from pretrain.export.card import model_card
from pretrain.export.targets import Target, check_exportable
from pretrain.export.tokenizer import check_same_ids, fast_tokenizer, special_ids

MARKER = "pretrain.toml"
"""The run's resolved config. A folder that holds it is an export of ours and may be replaced by another."""

EMBEDDING, FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm"


def to_huggingface(
    config: RunConfig,
    state: Mapping[str, Tensor],
    tokenizer_model_path: str | Path,
    out_dir: str | Path,
    *,
    max_length: int,
    curve: Sequence[Mapping[str, Any]] = (),
    facts: Mapping[str, str] | None = None,
) -> str:
    """Writes `out_dir` for `AutoModelForCausalLM` and `AutoTokenizer`, and returns the class it is for.

    `state`: full fp32 tensors by global name, as a checkpoint holds them. `max_length`: tokens of the longest sequence
    the copy must take (OPT and MPT have an end). `curve`: records of an evaluation, `facts`: name -> value, both for
    the model card. The folder appears whole or not at all, and takes the place of an earlier export.

    Raises ConfigError when no stock class holds the model, when names or shapes in `state` are not the config's, when
    the tokenizer cannot be exported or is not the model's, or when `out_dir` is something else; RunFailed when the disk
    refuses.
    """
    target, out = check_exportable(config), Path(out_dir).absolute()
    if out.exists() and not (out / MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out}: exists and is no earlier export (it has no {MARKER}). Choose another folder"
        )
    tensors = convert(target, config, state, max_length)
    settings = _settings(target, config, tokenizer_model_path, max_length)
    _check_complete(settings, tensors)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    with writing(out):
        temporary.mkdir(parents=True)
        try:
            _write(temporary, settings, tensors, tokenizer_model_path, max_length)
            card = model_card(config, target, curve, facts or {}, max_length)
            (temporary / "README.md").write_text(card, encoding="utf-8")
            (temporary / MARKER).write_text(dump_config(config), encoding="utf-8")
            _publish(temporary, out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target.class_name


def convert(
    target: Target, config: RunConfig, state: Mapping[str, Tensor], max_length: int
) -> dict[str, Tensor]:
    """Our tensors as `target`'s, by its names, fp32. Raises ConfigError on missing, surplus or misshapen ones."""
    rest = dict(state)
    embedding = _take(rest, EMBEDDING)
    shape = config.padded_vocab_size, config.model.hidden_size
    if embedding.shape != shape:
        raise ConfigError(
            f"{EMBEDDING}: shape {tuple(embedding.shape)}, the config wants {shape}: another run's weights?"
        )
    scale = target.embedding_scale(config)
    rest[EMBEDDING] = embedding * scale
    unscale = (
        1 / scale if config.model.tie_word_embeddings else 1.0
    )  # the tied output reads the scaled embeddings
    out = target.extra(config, rest[EMBEDDING], max_length)
    for module, (transform, *theirs) in target.table.items():
        if module == "output_layer" and config.model.tie_word_embeddings:
            continue
        for i in range(config.model.num_layers if "{i}" in module else 1):
            for kind, tensor in _weight_and_bias(module.format(i=i), target, config, rest).items():
                tensor = tensor * unscale if module == FINAL_NORM else tensor
                for their, part in zip(theirs, transform(config, tensor), strict=True):
                    out[f"{their.format(i=i)}.{kind}"] = part.float().contiguous()
    if rest:
        raise ConfigError(
            f"weights that the config has no place for: {', '.join(sorted(rest)[:5])}: another run's?"
        )
    return out


def _weight_and_bias(
    module: str, target: Target, config: RunConfig, rest: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Takes a module's tensors out of `rest`; zeros stand for biases that only `target` has."""
    weight = _take(rest, f"{module}.weight")
    if module in (EMBEDDING.removesuffix(".weight"), "output_layer") or not target.has_bias:
        return {"weight": weight}
    bias = (
        _take(rest, f"{module}.bias")
        if config.model.use_bias
        else weight.new_zeros(weight.shape[0])
    )
    return {"weight": weight, "bias": bias}


def _take(rest: dict[str, Tensor], name: str) -> Tensor:
    if name not in rest:
        raise ConfigError(
            f"{name}: not among the weights, but the config needs it: another run's weights?"
        )
    return rest.pop(name)


def _settings(
    target: Target, config: RunConfig, tokenizer_model_path: str | Path, max_length: int
) -> Any:
    from transformers import AutoConfig

    settings = AutoConfig.for_model(
        target.model_type,
        vocab_size=config.padded_vocab_size,
        tie_word_embeddings=config.model.tie_word_embeddings,
        **special_ids(tokenizer_model_path),
        **target.settings(config, max_length),
    )
    settings.architectures = [target.class_name]
    settings.dtype = torch.float32
    return settings


def _check_complete(settings: Any, tensors: dict[str, Tensor]) -> None:
    """Their model, built without memory, must have exactly these tensors: a silent default would be a wrong model."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(settings).state_dict()
    if settings.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    wrong = sorted(
        n for n in theirs.keys() | tensors.keys() if _shape(theirs, n) != _shape(tensors, n)
    )
    if wrong:
        name, fits = wrong[0], settings.architectures[0]
        raise ConfigError(
            f"{len(wrong)} tensors do not fit {fits}, first {name}: it has {_shape(theirs, name)}, the "
            f"weights give {_shape(tensors, name)}: another run's weights?"
        )


def _shape(tensors: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def _write(
    directory: Path,
    settings: Any,
    tensors: dict[str, Tensor],
    tokenizer_model_path: str | Path,
    max_length: int,
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    tokenizer = fast_tokenizer(tokenizer_model_path, max_length=max_length)
    if len(tokenizer) > settings.vocab_size:
        raise ConfigError(
            f"{tokenizer_model_path}: {len(tokenizer)} pieces, but the model has {settings.vocab_size} "
            "embeddings: another run's tokenizer?"
        )
    try:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error
    settings.save_pretrained(directory)
    # safetensors writes for the owner alone; a shared folder needs what the umask gives every other file
    os.chmod(directory / "model.safetensors", (directory / "config.json").stat().st_mode)
    GenerationConfig(**special_ids(tokenizer_model_path)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    check_same_ids(tokenizer_model_path, directory)


def _publish(temporary: Path, out: Path) -> None:
    """Renames `temporary` to `out`; what stood there is moved aside first and removed last."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.replaced")
    if out.exists():
        out.rename(aside)
    try:
        temporary.rename(out)
    except OSError:
        if aside.exists():
            aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)

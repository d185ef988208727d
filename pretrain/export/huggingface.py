"""Convert a checkpoint's weights to a folder that stock `transformers` loads.

The folder holds the weights (safetensors), the config and generation config, the tokenizer, a model
card, and the run's resolved config as pretrain.toml.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config import ConfigError, RunConfig, dump_config, writing
from pretrain.export.card import model_card
from pretrain.export.selection import check_exportable
from pretrain.export.targets import Target
from pretrain.export.tokenizer import check_same_ids, fast_tokenizer, special_ids
from pretrain.rundir.files import new_directory

MARKER = "pretrain.toml"
"""The run's resolved config. A folder that holds it is one of our exports and may be replaced."""

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
    """Write a model to `out_dir` for AutoModelForCausalLM and AutoTokenizer.

    The folder appears whole or not at all, and replaces an earlier export.

    Args:
        config: The run's resolved config.
        state: Full fp32 tensors by global name, as a checkpoint holds them.
        tokenizer_model_path: SentencePiece model that the run's data was tokenized with.
        out_dir: Folder to write.
        max_length: Longest sequence in tokens that the export must accept. OPT and MPT have such a
            limit; the other classes only record it.
        curve: Evaluation records for the model card.
        facts: Name -> value of further rows in the model card's table.

    Returns:
        The name of the transformers class, such as "BloomForCausalLM".

    Raises:
        ConfigError: No transformers class can hold the model, `state` does not have the names and
            shapes of the config, the tokenizer cannot be exported or does not fit the model, or
            `out_dir` exists and is not an earlier export.
        RunFailed: The folder cannot be written, for example because the disk is full.
    """
    target, out = check_exportable(config), Path(out_dir).absolute()
    # An earlier export or an empty folder may be replaced; anything else is not ours to delete.
    if out.exists() and not (out / MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out}: already exists and is not an earlier export (it has no {MARKER}). Choose "
            "another folder"
        )
    tensors = convert(target, config, state, max_length)
    settings = _settings(target, config, tokenizer_model_path, max_length)
    _check_complete(settings, tensors)
    with writing(out), new_directory(out, replace=True) as folder:
        _write(folder, settings, tensors, tokenizer_model_path, max_length)
        card = model_card(config, target, curve, facts or {}, max_length)
        (folder / "README.md").write_text(card, encoding="utf-8")
        (folder / MARKER).write_text(dump_config(config), encoding="utf-8")
    return target.class_name


def convert(
    target: Target, config: RunConfig, state: Mapping[str, Tensor], max_length: int
) -> dict[str, Tensor]:
    """Return the weights under the names and in the shapes of the target class, in fp32.

    Args:
        target: Class to convert to.
        config: The run's resolved config.
        state: Full fp32 tensors by global name.
        max_length: Longest sequence in tokens, which sizes OPT's table of positions.

    Returns:
        Tensors by their names in the class's state_dict.

    Raises:
        ConfigError: A tensor that the config needs is missing, one is left over, or the embeddings
            have another shape.
    """
    # Tensors are taken out of `rest` as they are converted, so that none can be forgotten.
    rest = dict(state)
    embedding = _take(rest, EMBEDDING)
    shape = config.padded_vocab_size, config.model.hidden_size
    if embedding.shape != shape:
        raise ConfigError(
            f"{EMBEDDING}: has shape {tuple(embedding.shape)}, but the config asks for {shape}. "
            "Are these another run's weights?"
        )
    tied = config.model.tie_word_embeddings
    scale = target.embedding_scale(config)
    rest[EMBEDDING] = embedding * scale
    # A tied output layer multiplies by the scaled embeddings too. Dividing the final LayerNorm by
    # the same factor cancels it in the logits.
    unscale = 1 / scale if tied else 1.0
    out = target.extra(config, rest[EMBEDDING], max_length)
    for module, (transform, *theirs) in target.table.items():
        if module == "output_layer" and tied:
            continue
        for i in range(config.model.num_layers if "{i}" in module else 1):
            for kind, tensor in _weight_and_bias(module.format(i=i), target, config, rest).items():
                tensor = tensor * unscale if module == FINAL_NORM else tensor
                for their, part in zip(theirs, transform(config, tensor), strict=True):
                    out[f"{their.format(i=i)}.{kind}"] = part.float().contiguous()
    if rest:
        raise ConfigError(
            f"the weights hold tensors that the config does not have: "
            f"{', '.join(sorted(rest)[:5])}. Are these another run's weights?"
        )
    return out


def _weight_and_bias(
    module: str, target: Target, config: RunConfig, rest: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Take a module's weight and bias out of `rest`.

    Args:
        module: Our name of the module.
        target: Class to convert to.
        config: The run's resolved config.
        rest: Tensors not converted yet, updated in place.

    Returns:
        "weight" and, where the target class has one, "bias": zeros if our model has none.
    """
    weight = _take(rest, f"{module}.weight")
    if module in (EMBEDDING.removesuffix(".weight"), "output_layer") or not target.has_bias:
        return {"weight": weight}
    if config.model.use_bias:
        return {"weight": weight, "bias": _take(rest, f"{module}.bias")}
    return {"weight": weight, "bias": weight.new_zeros(weight.shape[0])}


def _take(rest: dict[str, Tensor], name: str) -> Tensor:
    """Remove a tensor from `rest` and return it; raise ConfigError if it is missing."""
    if name not in rest:
        raise ConfigError(
            f"{name}: missing from the weights, but the config needs it. Are these another run's "
            "weights?"
        )
    return rest.pop(name)


def _settings(
    target: Target, config: RunConfig, tokenizer_model_path: str | Path, max_length: int
) -> Any:
    """Return the transformers config of the export.

    Args:
        target: Class to export as.
        config: The run's resolved config.
        tokenizer_model_path: SentencePiece model, for the ids of BOS, EOS and padding.
        max_length: Longest sequence in tokens.
    """
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
    """Raise ConfigError unless the tensors are exactly those of the transformers model.

    from_pretrained would fill a missing tensor with random values and only warn. The model is built
    on the meta device, which needs no memory.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        stock: Any = AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]  # untyped in transformers
    theirs = stock.state_dict()
    if settings.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    wrong = sorted(
        n for n in theirs.keys() | tensors.keys() if _shape(theirs, n) != _shape(tensors, n)
    )
    if wrong:
        name, class_name = wrong[0], settings.architectures[0]
        raise ConfigError(
            f"{len(wrong)} tensors do not fit {class_name}. The first is {name}: the class has "
            f"shape {_shape(theirs, name)}, the weights have {_shape(tensors, name)}. Are these "
            "another run's weights?"
        )


def _shape(tensors: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    """Return a tensor's shape, or None if there is no such tensor."""
    return tuple(tensors[name].shape) if name in tensors else None


def _write(
    directory: Path,
    settings: Any,
    tensors: dict[str, Tensor],
    tokenizer_model_path: str | Path,
    max_length: int,
) -> None:
    """Write weights, config, generation config and tokenizer, and check the tokenizer.

    Args:
        directory: Existing folder to write to.
        settings: The transformers config.
        tensors: Weights by their names in the transformers class.
        tokenizer_model_path: SentencePiece model.
        max_length: Longest sequence in tokens, for the tokenizer.

    Raises:
        ConfigError: The tokenizer has more pieces than the model has embeddings.
        OSError: A file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    tokenizer = fast_tokenizer(tokenizer_model_path, max_length=max_length)
    if len(tokenizer) > settings.vocab_size:
        raise ConfigError(
            f"{tokenizer_model_path}: has {len(tokenizer)} pieces, but the model has "
            f"{settings.vocab_size} embeddings. Is this another run's tokenizer?"
        )
    try:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors reports a full disk as an error of its own, which is not an OSError.
        raise OSError(str(error)) from error
    settings.save_pretrained(directory)
    # safetensors makes its file readable by the owner only. In a shared folder it needs the mode
    # that the umask gives to every other file.
    os.chmod(directory / "model.safetensors", (directory / "config.json").stat().st_mode)
    generation = GenerationConfig(**special_ids(tokenizer_model_path))  # type: ignore[no-untyped-call]  # untyped in transformers
    generation.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    check_same_ids(tokenizer_model_path, directory)

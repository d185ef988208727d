"""Convert a checkpoint's weights to a folder that `transformers` loads.

The folder holds the weights (safetensors), the config and generation config, the tokenizer, a model
card, and the run's resolved config as pretrain.toml.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config import ConfigError, RunConfig, dump_config, writing
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.export import harness
from pretrain.export.card import ExportExtras, model_card
from pretrain.export.classes import auto_map, build_model, code_files, config_class
from pretrain.export.convert import SLOPES, convert, not_restored
from pretrain.export.selection import check_exportable
from pretrain.export.targets import Target
from pretrain.export.tokenizer import (
    ORIGINAL_TOKENIZERS,
    check_same_ids,
    fast_tokenizer,
    special_ids,
)
from pretrain.export.written import MARKER as MARKER
from pretrain.export.written import check_replaceable, record_files
from pretrain.kernels.alibi import chosen_slopes
from pretrain.rundir.files import new_directory

ORIGINALS = "pretrain.originals"
"""Those weights, by global name, that cannot be restored bit for bit from what the class stores.

A safetensors file, which must not be named so: vLLM takes every *.safetensors of a folder for the
model's (default_loader.py), and fails on names that the class does not have.
"""

_NOTHING_ELSE = ExportExtras()


def to_huggingface(
    config: RunConfig,
    state: Mapping[str, Tensor],
    tokenizer_path: str | Path,
    out_dir: str | Path,
    *,
    max_length: int,
    extras: ExportExtras = _NOTHING_ELSE,
) -> str:
    """Write a model to `out_dir` for AutoModelForCausalLM and AutoTokenizer.

    The folder appears whole or not at all, and replaces an earlier export that nobody has changed.

    Args:
        config: The run's resolved config.
        state: Full fp32 tensors by global name, as a checkpoint holds them.
        tokenizer_path: File of the tokenizer that the run's data was made with.
        out_dir: Folder to write.
        max_length: Longest sequence in tokens that the export must accept. OPT and MPT have such a
            limit; the other classes only record it. A learned position table has its own.
        extras: What else the export holds, and how its tokenizer takes special tokens.

    Returns:
        The name of the transformers class, such as "BloomForCausalLM".

    Raises:
        ConfigError: No transformers class can hold the model, `state` does not have the names and
            shapes of the config, the tokenizer cannot be exported or does not fit the model, or
            `out_dir` exists and is not an earlier export, or holds more than that wrote.
        RunFailed: The folder cannot be written, for example because the disk is full.
    """
    target, out = check_exportable(config), Path(out_dir).absolute()
    if config.position.method == "learned":
        max_length = config.max_position_embeddings
    check_replaceable(out)
    tensors = convert(target, config, state, max_length)
    tokenizer = load_tokenizer(tokenizer_path)
    settings = hf_settings(target, config, max_length, special_ids(tokenizer), state.get(SLOPES))
    _check_complete(settings, tensors)
    originals = not_restored(target, config, state)
    with writing(out), new_directory(out, replace=True) as folder:
        eos = _write(folder, settings, tensors, tokenizer, max_length, extras.split_special_tokens)
        if target.code is not None:
            for source in code_files(target.code):
                (folder / source.name).write_bytes(source.read_bytes())
        told = replace(extras, slopes=settings.slopes if target.stock else ())
        card = model_card(config, target, told, max_length, eos)
        (folder / "README.md").write_text(card, encoding="utf-8")
        # For `pretrain import`, whose result is then the run's model to the last bit.
        if originals:
            _save(originals, folder / ORIGINALS)
        (folder / ORIGINAL_TOKENIZERS[tokenizer.file_name]).write_bytes(tokenizer.content)
        if extras.documents:
            harness.write_task(
                folder,
                extras.documents,
                config.data.sequence_length,
                is_stock=not target.stock,
            )
        (folder / MARKER).write_text(dump_config(config), encoding="utf-8")
        record_files(folder)
    return target.class_name


def hf_settings(
    target: Target,
    config: RunConfig,
    max_length: int,
    special: Mapping[str, int],
    trained_slopes: Tensor | None = None,
) -> Any:
    """Return the transformers config of a model.

    Args:
        target: Class that holds it.
        config: The run's resolved config.
        max_length: Longest sequence in tokens.
        special: bos_token_id, eos_token_id and pad_token_id, as `special_ids` returns them.
        trained_slopes: The slopes of all heads, [H], if the run has trained them.
    """
    slopes = {}
    if target.stock:
        found = chosen_slopes(config.slopes, config.model.num_attention_heads)
        # Numbers of fp32, which JSON keeps exactly; a weight would be rounded to 16 bit.
        slopes["slopes"] = (found if trained_slopes is None else trained_slopes).float().tolist()
    settings = config_class(target.model_type)(
        vocab_size=config.padded_vocab_size,
        tie_word_embeddings=config.model.tie_word_embeddings,
        **special,
        # Bloom and MPT have other names for it, or none, and programs that load a model look for
        # this one before they fall back to a shorter default of their own.
        **{"max_position_embeddings": max_length, **target.settings(config, max_length)},
        **slopes,
    )
    settings.architectures = [target.class_name]
    settings.dtype = torch.float32
    if target.code is not None:
        settings.auto_map = auto_map(target.code, target.model_type)
    return settings


def stock_shapes(settings: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a transformers model; a tied output layer has none.

    The model is built on the meta device, which needs no memory.
    """
    with torch.device("meta"):
        stock = build_model(settings)
    shapes = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    if settings.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def _check_complete(settings: Any, tensors: dict[str, Tensor]) -> None:
    """Raise ConfigError unless the tensors are exactly those of the transformers model.

    from_pretrained would fill a missing tensor with random values and only warn.
    """
    theirs = stock_shapes(settings)
    ours = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
    if wrong:
        name, class_name = wrong[0], settings.architectures[0]
        raise ConfigError(
            f"{len(wrong)} tensors do not fit {class_name}. The first is {name}: the class has "
            f"shape {theirs.get(name)}, the weights have {ours.get(name)}. Are these another run's "
            "weights?"
        )


def _write(
    directory: Path,
    settings: Any,
    tensors: dict[str, Tensor],
    tokenizer: Tokenizer,
    max_length: int,
    split_special_tokens: bool,
) -> str:
    """Write weights, config, generation config and tokenizer, and check the tokenizer.

    Args:
        directory: Existing folder to write to.
        settings: The transformers config.
        tensors: Weights by their names in the transformers class.
        tokenizer: The run's tokenizer.
        max_length: Longest sequence in tokens, for the tokenizer.
        split_special_tokens: Take special tokens in a text for text; see `fast_tokenizer`.

    Returns:
        The name of the token that ends a document.

    Raises:
        ConfigError: The tokenizer has more pieces than the model has embeddings.
        OSError: A file cannot be written.
    """
    from transformers import GenerationConfig

    stock = fast_tokenizer(
        tokenizer, max_length=max_length, split_special_tokens=split_special_tokens
    )
    if tokenizer.vocab_size > settings.vocab_size:
        raise ConfigError(
            f"{tokenizer.path}: has {tokenizer.vocab_size} pieces, but the model has "
            f"{settings.vocab_size} embeddings. Is this another run's tokenizer?"
        )
    settings.save_pretrained(directory)
    _save(tensors, directory / "model.safetensors")
    # The ids alone, as published base models have it. A limit of new tokens here would overrule the
    # max_length that programs such as lm-eval pass, and a max_length would make every call that
    # passes max_new_tokens warn that both are set.
    generation = GenerationConfig(**special_ids(tokenizer))  # type: ignore[no-untyped-call]  # untyped in transformers
    generation.save_pretrained(directory)
    stock.save_pretrained(directory)
    check_same_ids(tokenizer, directory, settings)
    return str(stock.eos_token)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file into the export's folder, which holds config.json already."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors reports a full disk as an error of its own, which is not an OSError.
        raise OSError(str(error)) from error
    # safetensors makes its file readable by the owner only. In a shared folder it needs the mode
    # that the umask gives to every other file.
    os.chmod(path, path.with_name("config.json").stat().st_mode)

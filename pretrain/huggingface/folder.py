"""Convert a checkpoint's weights to a folder that `transformers` loads.

The folder holds the weights (safetensors), the config and generation config, the tokenizer, a model
card, and the run's resolved config as pretrain.toml.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pretrain.config import ConfigError, RunConfig, dump_config, writing
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.base import JSON, MODEL, PROBES
from pretrain.huggingface.base import HuggingFaceClass, same_bits
from pretrain.huggingface.card import ExportExtras, write_card
from pretrain.huggingface.classes import class_of
from pretrain.rundir.files import new_directory, read_json

# ---- Remember which files an export wrote, so that the next one replaces nothing else ----


MARKER = "pretrain.toml"
"""The run's resolved config. A folder that holds it is one of our exports and may be replaced."""

FILES = "pretrain.files.json"
"""The SHA-256 of every other file that the export wrote."""


def record_files(folder: Path) -> None:
    """Write FILES into a finished export.

    Where it is there already, an export goes on writing into a folder that others may see by now:
    the files that it lists are recorded again, and no others.
    """
    names = read_json(folder / FILES).get("sha256") or _names(folder)
    digests = {name: _digest(folder / name) for name in names}
    # As all files of the folder, with the mode that the umask gives.
    (folder / FILES).write_text(json.dumps({"sha256": digests}, indent=2) + "\n")


def check_replaceable(out: Path) -> None:
    """Check that a new export may take the place of whatever is at `out`.

    That is so for nothing at all, an empty folder, and an export that is as it was written.

    Raises:
        ConfigError: It is something else, or the export holds files that it did not write, or that
            were changed since. Names them.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MARKER).is_file():
        raise ConfigError(
            f"{out}: already exists and is not an earlier export (it has no {MARKER}). Choose "
            "another folder"
        )
    faults = _faults(out)
    if faults:
        shown = ", ".join(faults[:5]) + (f" and {len(faults) - 5} more" if faults[5:] else "")
        raise ConfigError(
            f"{out}: an earlier export, but a new one would also delete {shown}. Move that "
            "elsewhere, or choose another folder"
        )


def _faults(out: Path) -> list[str]:
    """Return the files of an export that it did not write, or that were changed since."""
    # Empty if the list is missing or damaged.
    written = read_json(out / FILES).get("sha256") or {}
    faults = []
    for name in _names(out):
        if name == FILES:
            continue
        if name not in written:
            faults.append(f"{name} (not written by it)")
        elif _digest(out / name) != written[name]:
            faults.append(f"{name} (changed since)")
    return faults


def _names(folder: Path) -> list[str]:
    """Return the paths below a folder of all that is no folder, and of empty folders, sorted."""
    found = [
        path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    ]
    return sorted(str(path.relative_to(folder)) for path in found)


def _digest(path: Path) -> str:
    """Return the hex SHA-256 of a file; "" for what is none or cannot be read."""
    try:
        if not path.is_file() or path.is_symlink():
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


# ---- Put a tokenizer into a Hugging Face folder, where `AutoTokenizer` gives the same ids ----


ORIGINAL_JSON = "pretrain.tokenizer.json"
"""The tokenizer.json that the run's data was made with, unchanged.

transformers writes a tokenizer.json of its own. The run's may also add tokens to every text, which
the data does not have.
"""
ORIGINAL_TOKENIZERS = {MODEL: MODEL, JSON: ORIGINAL_JSON}
"""Name in a data set or a checkpoint -> name of the unchanged file in an export."""


def fast_tokenizer(tokenizer: Tokenizer, *, max_length: int) -> Any:
    """Return a tokenizer as a PreTrainedTokenizerFast with the same ids.

    It adds no BOS or EOS to a text and pads on the left, as generation needs. The name of a
    special token in a text, such as "</s>", is that token, which chat templates and trainers rely
    on. In the run's data it was text, as with `from_pretrained(..., split_special_tokens=True)`.

    Args:
        tokenizer: The run's tokenizer.
        max_length: Longest sequence in tokens, beyond which the tokenizer warns.

    Raises:
        ConfigError: A Hugging Face tokenizer would not give the same ids.
    """
    from transformers import PreTrainedTokenizerFast

    stock = tokenizer.to_hugging_face()
    ids = {name.removesuffix("_id"): i for name, i in special_ids(tokenizer).items()}
    if (unknown := tokenizer.special.get("unk")) is not None:
        ids["unk_token"] = unknown
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped in transformers
        tokenizer_object=stock,
        **{role: stock.id_to_token(i) for role, i in ids.items()},
        split_special_tokens=False,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=max_length,
    )


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return bos_token_id, eos_token_id and pad_token_id.

    In training every text followed the EOS of the one before, and no other token began one. So EOS
    is BOS too, whatever token the tokenizer's own file has for it: lm-eval and other programs put
    the BOS before a text, and a token that training never saw makes the text less probable. EOS
    pads where the tokenizer has no token for that.
    """
    eos = tokenizer.eos_id
    return {
        "bos_token_id": eos,
        "eos_token_id": eos,
        "pad_token_id": tokenizer.special.get("pad", eos),
    }


def find_original(folder: Path) -> tuple[str, Path] | None:
    """Return the name and the path of the run's tokenizer in an export; None without one."""
    for name, original in ORIGINAL_TOKENIZERS.items():
        if (folder / original).is_file():
            return name, folder / original
    return None


def check_same_ids(tokenizer: Tokenizer, directory: Path, settings: Any = None) -> None:
    """Load the tokenizer saved in `directory` as a user would and compare it with the run's.

    Args:
        tokenizer: The run's.
        directory: The folder.
        settings: The model's transformers config. Without it transformers looks for one in the
            folder, and asks whether it may run the folder's code.

    Raises:
        RuntimeError: It gives other ids on one of the probes, or a special token's name is not the
            token where it should be. This is a defect of the conversion, not of the user's input.
    """
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory, config=settings, local_files_only=True)
    probes = PROBES
    wanted = [(text, True, tokenizer.encode(text).tolist()) for text in probes]
    names = [str(token) for token in theirs.added_tokens_decoder.values() if token.special]
    plain = [text for text in probes if not any(name in text for name in names)]
    wanted += [(text, False, tokenizer.encode(text).tolist()) for text in plain]
    wanted += [(str(theirs.convert_ids_to_tokens(i)), False, [i]) for i in _declared(tokenizer)]
    for text, split, ids in wanted:
        got = theirs(text, split_special_tokens=split)["input_ids"]
        if got != ids:
            raise RuntimeError(
                f"{tokenizer.path}: the exported tokenizer encodes {text!r} as {got}, not as {ids} "
                f"(split_special_tokens = {split})"
            )
    found = {role: getattr(theirs, role) for role in special_ids(tokenizer)}
    if found != special_ids(tokenizer):
        raise RuntimeError(
            f"{tokenizer.path}: the exported tokenizer has {found}, the run's is "
            f"{special_ids(tokenizer)}"
        )


def _declared(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of the special tokens that the exported tokenizer declares."""
    unknown = tokenizer.special.get("unk")
    return set(special_ids(tokenizer).values()) | ({unknown} if unknown is not None else set())


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
        extras: What else the export holds.

    Returns:
        The name of the transformers class, such as "BloomForCausalLM".

    Raises:
        ConfigError: No transformers class can hold the model, `state` does not have the names and
            shapes of the config, the tokenizer cannot be exported or does not fit the model, or
            `out_dir` exists and is not an earlier export, or holds more than that wrote.
        RunFailed: The folder cannot be written, for example because the disk is full.
    """
    target, out = class_of(config), Path(out_dir).absolute()
    max_length = config.position.table_end(config) or max_length
    check_replaceable(out)
    tensors = target.convert(config, state, max_length)
    tokenizer = load_tokenizer(tokenizer_path)
    settings = target.transformers_config(config, max_length, special_ids(tokenizer), state)
    _check_complete(target, settings, tensors)
    again = target.restore(config, tensors.__getitem__, {})
    originals = {n: state[n].contiguous() for n, t in again if not same_bits(t, state[n])}
    with writing(out), new_directory(out, replace=True) as folder:
        eos = _write(folder, settings, tensors, tokenizer, max_length)
        for source in target.code_files():
            (folder / source.name).write_bytes(source.read_bytes())
        write_card(folder, config, target, settings, extras, eos)
        # For `pretrain import`, whose result is then the run's model to the last bit.
        if originals:
            _save(originals, folder / ORIGINALS)
        (folder / ORIGINAL_TOKENIZERS[tokenizer.file_name]).write_bytes(tokenizer.content)
        (folder / MARKER).write_text(dump_config(config), encoding="utf-8")
        record_files(folder)
    return target.name


def _check_complete(target: HuggingFaceClass, settings: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless the tensors are exactly those of the transformers model.

    from_pretrained would fill a missing tensor with random values and only warn.
    """
    theirs = target.shapes(settings)
    ours = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
    if wrong:
        raise ConfigError(
            f"{len(wrong)} tensors do not fit {target.name}. The first is {wrong[0]}: the class "
            f"has shape {theirs.get(wrong[0])}, the weights have {ours.get(wrong[0])}. Are these "
            "another run's weights?"
        )


def _write(
    directory: Path,
    settings: Any,
    tensors: dict[str, Tensor],
    tokenizer: Tokenizer,
    max_length: int,
) -> str:
    """Write weights, config, generation config and tokenizer, and check the tokenizer.

    Args:
        directory: Existing folder to write to.
        settings: The transformers config.
        tensors: Weights by their names in the transformers class.
        tokenizer: The run's tokenizer.
        max_length: Longest sequence in tokens, for the tokenizer.

    Returns:
        The name of the token that ends a document.

    Raises:
        ConfigError: The tokenizer has more pieces than the model has embeddings.
        OSError: A file cannot be written.
    """
    from transformers import GenerationConfig

    stock = fast_tokenizer(tokenizer, max_length=max_length)
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

"""Put a tokenizer into a Hugging Face folder, where `AutoTokenizer` gives the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrain.data.tokenizer import Tokenizer
from pretrain.data.tokenizers.base import JSON, MODEL

ORIGINAL_JSON = "pretrain.tokenizer.json"
"""The tokenizer.json that the run's data was made with, unchanged.

transformers writes a tokenizer.json of its own. The run's may also add tokens to every text, which
the data does not have.
"""
ORIGINAL_TOKENIZERS = {MODEL: MODEL, JSON: ORIGINAL_JSON}
"""Name in a data set or a checkpoint -> name of the unchanged file in an export."""


def fast_tokenizer(tokenizer: Tokenizer, *, max_length: int) -> Any:
    """Return a tokenizer as a PreTrainedTokenizerFast with the same ids.

    It adds no BOS or EOS to a text and pads on the left, as generation needs.

    Args:
        tokenizer: The run's tokenizer.
        max_length: Longest sequence in tokens, beyond which the tokenizer warns.

    Raises:
        ConfigError: A Hugging Face tokenizer would not give the same ids.
    """
    from transformers import PreTrainedTokenizerFast

    stock = tokenizer.to_hugging_face()
    ids = {f"{role}_token": i for role, i in tokenizer.special.items()}
    ids.setdefault("pad_token", tokenizer.eos_id)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped in transformers
        tokenizer_object=stock,
        **{role: stock.id_to_token(i) for role, i in ids.items()},
        # A literal "<s>" in a text is text.
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=max_length,
    )


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return bos_token_id, eos_token_id and pad_token_id.

    A token that there is not is None, except that EOS pads where there is no pad token.
    """
    special = tokenizer.special
    return {
        "bos_token_id": special.get("bos"),
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": special.get("pad", tokenizer.eos_id),
    }


def find_original(folder: Path) -> tuple[str, Path] | None:
    """Return the name and the path of the run's tokenizer in an export; None without one."""
    for name, original in ORIGINAL_TOKENIZERS.items():
        if (folder / original).is_file():
            return name, folder / original
    return None


def check_same_ids(tokenizer: Tokenizer, directory: Path) -> None:
    """Load the tokenizer saved in `directory` as a user would and compare it with the run's.

    Raises:
        RuntimeError: It gives other ids on one of the probes. This is a defect of the conversion,
            not of the user's input.
    """
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if theirs.eos_token_id != tokenizer.eos_id:
        raise RuntimeError(
            f"{tokenizer.path}: the exported tokenizer's eos is {theirs.eos_token_id}, the run's "
            f"{tokenizer.eos_id}"
        )
    for text in tokenizer.probes():
        want, got = tokenizer.encode(text).tolist(), theirs(text)["input_ids"]
        if want != got:
            raise RuntimeError(
                f"{tokenizer.path}: the exported tokenizer encodes {text!r} as {got}, but the "
                f"run's as {want}"
            )

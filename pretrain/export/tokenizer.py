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


def fast_tokenizer(
    tokenizer: Tokenizer, *, max_length: int, split_special_tokens: bool = False
) -> Any:
    """Return a tokenizer as a PreTrainedTokenizerFast with the same ids.

    It adds no BOS or EOS to a text and pads on the left, as generation needs.

    Args:
        tokenizer: The run's tokenizer.
        max_length: Longest sequence in tokens, beyond which the tokenizer warns.
        split_special_tokens: Take the name of a special token in a text, such as "</s>", for text,
            as the run's data did. Otherwise it is that token, which chat templates and trainers
            rely on.

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
        split_special_tokens=split_special_tokens,
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
    probes = tokenizer.probes()
    wanted = [(text, True, tokenizer.encode(text).tolist()) for text in probes]
    if not theirs.split_special_tokens:
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

"""Convert a SentencePiece BPE model to a fast Hugging Face tokenizer that gives identical ids.

A SentencePiece BPE model stores pieces with scores, a Hugging Face BPE model a list of merges. The
merges follow from the pieces (`_merges`). Settings under which the two libraries would tokenize
differently are refused, and every exported tokenizer is compared with SentencePiece on odd strings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrain.config import ConfigError

SPACE = "▁"
"""U+2581, which SentencePiece writes for a space."""
NORMAL, USER_DEFINED = 1, 4
"""Values of SentencePiece.Type in sentencepiece_model.proto."""

PROBES = (
    "",
    " ",
    "  two  spaces ",
    "\ttab\tand\nlines\r\n\n",
    "naïve café, 北京市 こんにちは",
    "🙂🙃👩\u200d👩\u200d👧 flags 🇩🇪",
    "<s> and </s> and <unk>",
    "<0x41> bytes \x00\x07\x7f\ufeff",
    "1234567890 3.14159",
    "▁literal underline▁",
    "Ünïcödé e\u0301 \u200b \u00a0 \U0001f3fb",
)
"""Odd strings on which every exported tokenizer must give the ids of SentencePiece."""


def fast_tokenizer(model_path: str | Path, *, max_length: int) -> Any:
    """Return a SentencePiece model as a PreTrainedTokenizerFast with the same ids.

    It adds no BOS or EOS to a text and pads on the left, as generation needs.

    Args:
        model_path: SentencePiece BPE model.
        max_length: Longest sequence in tokens, beyond which the tokenizer warns.

    Raises:
        ConfigError: The file is missing, is not a SentencePiece model, or has settings whose ids a
            Hugging Face tokenizer would not reproduce.
    """
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    proto = _read(Path(model_path))
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    special = {
        name: proto.pieces[i].piece for name, i in special_ids(model_path).items() if i is not None
    }
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    tokenizer = Tokenizer(
        BPE(vocab, _merges(proto), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # There is no pre-tokenizer, because SentencePiece applies its merges to the whole text and not
    # word by word.
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped in transformers
        tokenizer_object=tokenizer,
        unk_token=unknown,
        bos_token=special.get("bos_token_id"),
        eos_token=special.get("eos_token_id"),
        pad_token=special.get("pad_token_id"),
        # SentencePiece tokenizes a literal "<s>" in a text as text.
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=max_length,
    )


def special_ids(model_path: str | Path) -> dict[str, int | None]:
    """Return bos_token_id, eos_token_id and pad_token_id of a SentencePiece model.

    A token that the model does not have is None, except that EOS pads where there is no pad piece.
    """
    spec = _read(Path(model_path)).trainer_spec
    # SentencePiece marks an absent token with -1.
    bos, eos, pad = (i if i >= 0 else None for i in (spec.bos_id, spec.eos_id, spec.pad_id))
    return {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad if pad is not None else eos,
    }


def check_same_ids(model_path: str | Path, directory: Path) -> None:
    """Load the tokenizer saved in `directory` as a user would and compare it with SentencePiece.

    Raises:
        RuntimeError: It gives other ids on one of the probes. This is a defect of the conversion,
            not of the user's input.
    """
    from sentencepiece import SentencePieceProcessor
    from transformers import AutoTokenizer

    ours = SentencePieceProcessor(model_file=str(model_path))
    theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    for text in PROBES:
        want, got = ours.encode(text), theirs(text)["input_ids"]
        if want != got:
            raise RuntimeError(
                f"{model_path}: the exported tokenizer encodes {text!r} as {got}, but "
                f"SentencePiece as {want}"
            )


def _read(path: Path) -> Any:
    """Return the parsed SentencePiece model.

    Raises:
        ConfigError: The file is missing, is not a SentencePiece model, or has settings that cannot
            be exported.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # generated code
    try:
        proto.ParseFromString(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file. `pretrain data build` writes the tokenizer there"
        ) from None
    except DecodeError:
        raise ConfigError(f"{path}: not a SentencePiece model") from None
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    # Setting -> (True if the model has it right, the value that can be exported).
    wanted = {
        "model_type": (trainer.model_type == trainer.BPE, "bpe"),
        "byte_fallback": (trainer.byte_fallback, True),
        "treat_whitespace_as_suffix": (not trainer.treat_whitespace_as_suffix, False),
        "normalization_rule_name": (not normalizer.precompiled_charsmap, "identity"),
        "add_dummy_prefix": (not normalizer.add_dummy_prefix, False),
        "remove_extra_whitespaces": (not normalizer.remove_extra_whitespaces, False),
        "user_defined_symbols": (all(p.type != USER_DEFINED for p in proto.pieces), "none"),
    }
    wrong = [f"{name} must be {right}" for name, (holds, right) in wanted.items() if not holds]
    if wrong:
        raise ConfigError(
            f"{path}: a Hugging Face tokenizer would not give the same ids: {', '.join(wrong)}. "
            "`pretrain data build` trains a tokenizer that can be exported"
        )
    return proto


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return every pair of pieces that joins into a third, in the order in which to merge them.

    SentencePiece merges the pair whose result has the highest score. Pairs with the same result are
    ordered by the ids of their parts. Special pieces are left out: "<s>" or "<0x41>" in a text must
    not be merged into them.
    """
    pieces = {p.piece: (i, p.score) for i, p in enumerate(proto.pieces) if p.type == NORMAL}
    merges = []
    for whole, (_, score) in pieces.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in pieces and right in pieces:
                merges.append((-score, pieces[left][0], pieces[right][0], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]

"""Convert a SentencePiece BPE model to a Hugging Face tokenizer that gives identical ids.

A SentencePiece BPE model stores pieces with scores, a Hugging Face BPE model a list of merges. The
merges follow from the pieces (`_merges`). Settings under which the two libraries would tokenize
differently are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from pretrain.config import ConfigError
from pretrain.data.tokenizers.words import SPACE

NORMAL, USER_DEFINED = 1, 4
"""Values of SentencePiece.Type in sentencepiece_model.proto."""


def convert(path: Path, proto: Any) -> Tokenizer:
    """Return the Hugging Face tokenizer of a SentencePiece BPE model.

    Args:
        path: Where the model is, for messages.
        proto: Its ModelProto.

    Raises:
        ConfigError: The model has settings whose ids a Hugging Face tokenizer would not reproduce.
    """
    _check_settings(path, proto)
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    tokenizer = Tokenizer(
        BPE(vocab, _merges(proto), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # There is no pre-tokenizer, because SentencePiece applies its merges to the whole text and not
    # word by word.
    replace = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _check_settings(path: Path, proto: Any) -> None:
    """Raise ConfigError if the two libraries would tokenize differently."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    # Setting -> (True if the model has it right, the value that can be exported).
    wanted = {
        "model_type": (trainer.model_type == trainer.BPE, "bpe"),
        "byte_fallback": (trainer.byte_fallback, True),
        "treat_whitespace_as_suffix": (not trainer.treat_whitespace_as_suffix, False),
        "normalization_rule_name": (not normalizer.precompiled_charsmap, "identity"),
        "escape_whitespaces": (normalizer.escape_whitespaces, True),
        "remove_extra_whitespaces": (not normalizer.remove_extra_whitespaces, False),
        "user_defined_symbols": (all(p.type != USER_DEFINED for p in proto.pieces), "none"),
    }
    wrong = [f"{name} must be {right}" for name, (holds, right) in wanted.items() if not holds]
    if wrong:
        raise ConfigError(
            f"{path}: a Hugging Face tokenizer would not give the same ids, so a model trained "
            f"with it could not be exported: {', '.join(wrong)}. Give the tokenizer.json that was "
            "made of it, or leave data.tokenizer out to have one trained that can be exported"
        )


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

"""Choose what an evaluation measures: every protocol at every length that the text can carry."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.config import ConfigError, RunConfig
from pretrain.config.evaluation import MASKED
from pretrain.evaluate.windows import Protocol


def choose_protocols(
    config: RunConfig,
    names: Sequence[str],
    tokens: int,
    total: int,
    *,
    lengths_from: str = "evaluation.lengths =",
    limit: str = "evaluation.max_tokens",
) -> tuple[tuple[Protocol, ...], list[str]]:
    """Return what is measured, and lines that say what is left out.

    Windows longer than the text would all be one window, the whole text, under several names.

    Args:
        config: The config, whose lengths and stride are taken.
        names: The protocols.
        tokens: Tokens that are scored.
        total: Tokens of the validation split.
        lengths_from: What a user changes to name other lengths.
        limit: What a user changes to have more of the split scored.

    Raises:
        ConfigError: The text is shorter than one window of a length that was named, or than the
            training length.
    """
    lengths = dict.fromkeys(config.evaluation_lengths)
    short = f"the {tokens:,} tokens that are scored are less than one window"
    more = "hold out more text (data.validation_fraction, data.validation_paths) and build again"
    if tokens < total:
        more = f"score more of the validation split's {total:,} tokens ({limit})"
    notes: list[str] = []
    if config.is_masked:
        names, notes = _masked(names)
    too_long = [length for length in lengths if length > tokens]
    if too_long and (config.evaluation.lengths is not None or too_long == list(lengths)):
        choose = f"Choose lengths up to {tokens:,}, or {more}"
        raise ConfigError("\n".join(f"{lengths_from} {n}: {short}. {choose}" for n in too_long))
    if too_long:
        left_out = ", ".join(map(str, too_long))
        notes.append(f"{lengths_from} {left_out} left out: {short}; to measure them, {more}")
    chosen = []
    for name in dict.fromkeys(names):
        for length in lengths:
            stride = config.evaluation_stride
            if length in too_long:
                continue
            if name == "sliding" and stride == length and "nonoverlapping" in names:
                notes.append(
                    f"sliding windows of {length} tokens by {stride} do not overlap; they are "
                    "measured once, as nonoverlapping"
                )
            else:
                chosen.append(Protocol(name, length, stride))
    return tuple(chosen), notes


def _masked(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the protocols of a model that predicts masked tokens, and what is left out.

    Args:
        names: The protocols that were asked for.

    Raises:
        ConfigError: Only sliding windows were asked for.
    """
    why = (
        "a sliding window gives each token more of what is before it, and train.objective = "
        '"masked" looks both ways'
    )
    if "nonoverlapping" not in names:
        raise ConfigError(f"sliding: {why}. Choose the protocol nonoverlapping")
    return [MASKED], [f"sliding windows are left out: {why}"] if "sliding" in names else []

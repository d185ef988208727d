"""Compare config and data with a checkpoint: what may differ to train on, and to evaluate.

Which key may change is said in pretrain/config/trajectory.py; here that is applied to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pretrain.checkpoint.content import Change, TrainerState
from pretrain.checkpoint.manifest import Checkpoint
from pretrain.config import ConfigError, RunConfig
from pretrain.config.trajectory import (
    DIGITS,
    TOKENIZER,
    TRAINING,
    VALIDATION,
    Difference,
    Effect,
    check_differences,
    data_differences,
    differences,
)
from pretrain.data.stream import TokenStream


def data_hashes(streams: tuple[TokenStream, TokenStream]) -> dict[str, str]:
    """Return the hashes that a checkpoint records of its training and validation split."""
    training, validation = streams
    return {
        TRAINING: training.identity,
        VALIDATION: validation.identity,
        TOKENIZER: training.tokenizer_sha256,
    }


def check_training(
    config: RunConfig,
    data: Mapping[str, str],
    checkpoint: Checkpoint,
    allowed: Collection[str] = (),
) -> tuple[Difference, ...]:
    """Check that a run may train on from a checkpoint, and return all in which they differ.

    Layout, logging, evaluation, saving and the number of steps may differ. What changes training
    may where it is allowed by name; the model may not.

    Args:
        config: The run.
        data: The hashes of its data: "training", "validation", "tokenizer".
        checkpoint: The checkpoint, opened.
        allowed: The keys of --allow-changed.

    Raises:
        ConfigError: With a line for each difference that is not allowed.
    """
    found = differences(checkpoint.config, config)
    found += data_differences(checkpoint.origin.data, data, config.data.directory)
    check_differences(found, checkpoint.path, allowed)
    return tuple(found)


def changes_of(found: Collection[Difference], state: TrainerState) -> tuple[Change, ...]:
    """Return what a checkpoint records of the differences that change training.

    Args:
        found: What `check_training` returned, so each of them was allowed.
        state: How far training had come, after which the new values hold.
    """
    return tuple(
        Change(state.step, each.key, each.before, each.after, state.consumed_samples)
        for each in found
        if each.effect is Effect.TRAJECTORY
    )


def trained_tokens(config: RunConfig, state: TrainerState, changes: Sequence[Change]) -> int:
    """Return the tokens that a checkpoint was trained on, at whatever lengths.

    Args:
        config: The checkpoint's config.
        state: How far training had come.
        changes: What was changed on the way, oldest first.
    """
    length, samples, tokens = config.data.sequence_length, state.consumed_samples, 0
    # Backwards from the length at the end. What is left belongs to the first length.
    for change in reversed(changes):
        if change.key == "data.sequence_length":
            tokens += (samples - change.consumed_samples) * length
            samples, length = change.consumed_samples, change.before
    return tokens + samples * length


def check_model(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Check that `config` describes the model that the checkpoint's weights were trained in.

    Raises:
        ConfigError: With a line for each key of the model that differs.
    """
    found = differences(checkpoint.config, config)
    check_differences([d for d in found if d.effect is Effect.FIXED], checkpoint.path)


def check_tokenizer(stream: TokenStream, checkpoint: Checkpoint) -> None:
    """Check that a data set was made by the tokenizer that the checkpoint was trained with.

    With other pieces under the same ids, a loss or an exported tokenizer would mean nothing.

    Raises:
        ConfigError: The tokenizer is another one.
    """
    trained = checkpoint.origin.data.get(TOKENIZER, checkpoint.tokenizer_sha256)
    found = stream.tokenizer_sha256
    if trained not in (None, found):
        raise ConfigError(
            f"data.directory = {stream.data_set}: its tokenizer has the SHA-256 "
            f"{found[:DIGITS]}..., {checkpoint.path} was trained with {str(trained)[:DIGITS]}.... "
            "Restore the data set, or give another one by that tokenizer"
        )


def is_its_validation_split(stream: TokenStream, checkpoint: Checkpoint) -> bool:
    """Return False if a checkpoint's run was evaluated on other tokens while it trained."""
    return checkpoint.origin.data.get(VALIDATION) in (None, stream.identity)

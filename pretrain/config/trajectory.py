"""Say of every key what it means to change it between two starts of a run.

A checkpoint goes on under a config that may differ from the one that saved it. `EFFECTS` says for
each key whether that is possible, whether it changes what is trained, or neither. A key without an
entry is an error in this table; tests/unit/test_trajectory.py fails until it has one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pretrain.config.errors import ConfigError
from pretrain.config.load import section_keys, suggestion
from pretrain.config.run import RunConfig


class Effect(StrEnum):
    """The effect of a changed key on a run that goes on from a checkpoint."""

    FIXED = "fixed"
    """The weights or the moments would not fit, or the model would compute another function. Never
    allowed."""
    TRAJECTORY = "trajectory"
    """Training goes on differently. Refused unless `--allow-changed` names the key."""
    CONTENT = "content"
    """A path, which may change. What lies there is known by its hash, and a change of that is
    refused unless `--allow-changed` names the key."""
    FREE = "free"
    """Only where, how fast or with how much output the same training happens."""


FIXED, TRAJECTORY, CONTENT, FREE = Effect.FIXED, Effect.TRAJECTORY, Effect.CONTENT, Effect.FREE

EFFECTS: dict[str, Effect] = {
    # "section" stands for the keys of the section that have no entry of their own. A section whose
    # keys are of several kinds has no such entry, so that a new key has to be put somewhere.
    "run.directory": FREE,
    # The order of the data and the dropout masks; the initial weights are in the checkpoint.
    "run.seed": TRAJECTORY,
    "model": FIXED,
    "model.hidden_dropout": TRAJECTORY,
    "model.attention_dropout": TRAJECTORY,
    "model.adaptive_dropout": TRAJECTORY,
    "model.activation_dropout": TRAJECTORY,
    # Acts at step 0 only.
    "model.init_method_std": FREE,
    "model.embedding_init_method_std": FREE,
    # How the same scores are computed.
    "model.attention_backend": FREE,
    "position": FIXED,
    # Checkpoints do not depend on the layout.
    "parallel.tensor_model_parallel_size": FREE,
    "parallel.pipeline_model_parallel_size": FREE,
    "parallel.virtual_pipeline_model_parallel_size": FREE,
    "parallel.sequence_parallel": FREE,
    "parallel.zero_stage": FREE,
    "parallel.world_size": FREE,
    "parallel.gradient_reduce_dtype": TRAJECTORY,
    "batch.micro_batch_size": FREE,
    "batch.global_batch_size": TRAJECTORY,
    "batch.rampup_batch_size": TRAJECTORY,
    "data.directory": CONTENT,
    "data.tokenizer": CONTENT,
    "data.sequence_length": TRAJECTORY,
    "data.vocab_size": FIXED,
    # Read by `pretrain data build` alone; what it made of them is known by its hash.
    "data.source": FREE,
    "data.paths": FREE,
    "data.text_field": FREE,
    "data.validation_bytes": FREE,
    "data.bytes_per_task": FREE,
    "cleaning": FREE,
    # The shares of the corpora decide which samples follow. Their paths are as free as data.paths.
    "data.corpora": TRAJECTORY,
    "data.validation_paths": FREE,
    "data.validation_fraction": FREE,
    "data.tokenizer_training_bytes": FREE,
    "data.tokens_per_block": FREE,
    "data.tokens_per_shard": FREE,
    "data.cache_directory": FREE,
    "data.cache_bytes": FREE,
    # What a sample shows the model. The weights fit either way, and an exported or evaluated model
    # computes the same function of a text.
    "data.per_document_attention": TRAJECTORY,
    "data.num_workers": FREE,
    "optimizer": TRAJECTORY,
    # A checkpoint has the moments of one optimizer.
    "optimizer.name": FIXED,
    # The scale at step 0; the present one is in the checkpoint.
    "optimizer.initial_loss_scale_power": FREE,
    "schedule": TRAJECTORY,
    # More steps are the usual reason to go on. `Difference.line` says what becomes of the schedule.
    "train.num_steps": FREE,
    # Attention looks both ways or back.
    "train.objective": FIXED,
    "train.precision": TRAJECTORY,
    "train.spike_policy": TRAJECTORY,
    "train.spike_threshold": TRAJECTORY,
    "train.spike_window_steps": TRAJECTORY,
    "train.spike_max_rollbacks": TRAJECTORY,
    "train.consistency_interval_steps": FREE,
    "train.recompute_granularity": FREE,
    "train.fusion": FREE,
    "train.profile_steps": FREE,
    "checkpoint": FREE,
    "evaluation": FREE,
    "logging": FREE,
    "recovery.hang_seconds": FREE,
    "recovery.startup_seconds": FREE,
    "recovery.max_restarts": FREE,
    "recovery.spare_nodes": FREE,
    "recovery.preflight_seconds": FREE,
    "export": FREE,
}
"""Key, or section -> what a change of it does."""

_DERIVED = {
    "model.num_query_groups",
    "model.ffn_hidden_size",
    "model.embedding_scale",
    "model.embedding_init_method_std",
}
"""Keys whose default is derived from fixed keys, by a property of RunConfig of the same name."""

TRAINING, VALIDATION, TOKENIZER = "training", "validation", "tokenizer"
"""The names of the hashes that a checkpoint records of its data."""
DIGITS = 12
"""How much of a hash is shown."""


@dataclass(frozen=True)
class Difference:
    """A key, or what lies under a path, that is not as it was when a checkpoint was saved."""

    key: str
    """The key, "section.key"; of data the one that --allow-changed names."""
    before: Any
    """The checkpoint's value, as JSON has it; of data its hash."""
    after: Any
    """The present value."""
    effect: Effect
    """FIXED, TRAJECTORY or FREE."""
    data: str = ""
    """Of data: what differs."""
    directory: str = ""
    """Of data: where it lies."""
    note: str = ""
    """What else to know about it."""

    def line(self) -> str:
        """Return it as a line for people: key, both values, and why it may differ."""
        what = f"{self.key} ({self.data})" if self.data else self.key
        why = "may change"
        if self.effect is TRAJECTORY:
            why = f"changes training, allowed by --allow-changed {self.key}"
        note = f"; {self.note}" if self.note else ""
        return f"{what} = {self._shown(self.before)} -> {self._shown(self.after)}  ({why}{note})"

    def refusal(self, checkpoint: object) -> str:
        """Return the message that refuses it.

        Args:
            checkpoint: The path of the checkpoint that does not agree.
        """
        after, before = self._shown(self.after), self._shown(self.before)
        anew = "train anew in another run.directory"
        if self.data:
            said = (
                f"data.directory = {self.directory}: its {self.data} has the SHA-256 {after}..., "
            )
            said += f"{checkpoint} was trained with {before}.... Use that {self.data}"
        else:
            said = f"{self.key} = {after}: {checkpoint} was trained with {before}. Keep it"
        if self.effect is FIXED:
            return f"{said}, or {anew}"
        return f"{said}, {anew}, or change it from here on with --allow-changed {self.key}"

    def _shown(self, value: Any) -> str:
        """Return a value as a user finds it in the file."""
        if self.data:
            return str(value)[:DIGITS]
        return str(value).lower() if isinstance(value, bool) else str(value)


def effect_of(key: str) -> Effect:
    """Return what a change of a key does.

    Raises:
        KeyError: The key has no entry in `EFFECTS`.
    """
    return EFFECTS[key] if key in EFFECTS else EFFECTS[key.partition(".")[0]]


def differences(before: RunConfig, after: RunConfig) -> list[Difference]:
    """Return the keys in which two configs differ, in the order of the config file."""
    found = []
    for section, keys in section_keys().items():
        for name in keys:
            key = f"{section}.{name}"
            old, new = _value(before, section, name), _value(after, section, name)
            if old != new and not _follows(key, before, after):
                effect = effect_of(key)
                effect = FREE if effect is CONTENT else effect
                found.append(Difference(key, old, new, effect, note=_note(key, after)))
    return found


AT_STEP_0 = {"model.init_method_std", "model.embedding_init_method_std", "train.num_steps"}
"""Keys that a checkpoint does not mind, and that yet decide what a run becomes."""


def settings_hash(config: RunConfig, training: str | None) -> str:
    """Return a hash of all that training depends on but the seed, the same for runs that agree.

    Args:
        config: The config of a run.
        training: The hash of its training split; None where a checkpoint did not record it.
    """
    values: dict[str, Any] = {TRAINING: training}
    for section, keys in section_keys().items():
        for key in (f"{section}.{name}" for name in keys):
            counts = effect_of(key) in (FIXED, TRAJECTORY) or key in AT_STEP_0
            value = _value(config, section, key.partition(".")[2])
            if counts and key != "run.seed":
                values[key] = value
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def data_differences(
    before: Mapping[str, str], after: Mapping[str, str], directory: str
) -> list[Difference]:
    """Return the differences of two data sets that are known by their hashes.

    Args:
        before: "training", "validation" and "tokenizer" -> SHA-256, as a checkpoint recorded them.
            What it did not record is not compared.
        after: The same of the present data set.
        directory: The present data.directory.
    """
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    # Another tokenizer changes the tokens of both splits, so only the tokenizer is named then.
    kinds = {
        TRAINING: ("data.directory", "training split", TRAJECTORY),
        VALIDATION: ("data.directory", "validation split", FREE),
    }
    if TOKENIZER in changed:
        kinds = {TOKENIZER: ("data.tokenizer", "tokenizer", TRAJECTORY)}
    return [
        Difference(key, before[name], after[name], effect, what, directory)
        for name, (key, what, effect) in kinds.items()
        if name in changed
    ]


def check_differences(
    found: Sequence[Difference], checkpoint: object, allowed: Collection[str] = ()
) -> None:
    """Check that a run may go on from a checkpoint from which it differs.

    Args:
        found: What `differences` and `data_differences` found.
        checkpoint: The checkpoint's path, for the message.
        allowed: The keys of --allow-changed.

    Raises:
        ConfigError: With a line for each difference that is not allowed.
    """
    refused = [
        each.refusal(checkpoint)
        for each in found
        if each.effect is FIXED or (each.effect is TRAJECTORY and each.key not in allowed)
    ]
    if refused:
        raise ConfigError("\n".join(refused))


def check_allowed(keys: Sequence[str]) -> None:
    """Check the values of --allow-changed.

    Raises:
        ConfigError: There is no such key, or there is nothing to allow about it.
    """
    for key in keys:
        section, _, name = key.partition(".")
        given = f"--allow-changed {key}: "
        if not name:
            raise ConfigError(
                f"{given}expected section.key, as in --allow-changed optimizer.learning_rate"
            )
        if section not in section_keys():
            raise ConfigError(f"{given}no such section{suggestion([section])}")
        if name not in section_keys()[section]:
            raise ConfigError(f"{given}no such key{suggestion([section, name])}")
        effect = effect_of(key)
        if effect is FIXED:
            why = (
                "a checkpoint has the moments of one optimizer"
                if key == "optimizer.name"
                else "the weights of a checkpoint would not fit, or the model would compute "
                "another function"
            )
            raise ConfigError(
                f"{given}cannot be changed: {why}. Train anew in another run.directory"
            )
        if effect is FREE:
            raise ConfigError(f"{given}may change without this option. Leave it out")


def allow_options(keys: Sequence[str]) -> list[str]:
    """Return --allow-changed for each key, as command-line arguments."""
    return [word for key in keys for word in ("--allow-changed", key)]


def describe_differences(found: Sequence[Difference], run: object, checkpoint: object) -> str:
    """Return what a resume prints about everything that differs; empty when nothing does.

    Args:
        found: What `differences` and `data_differences` found.
        run: The run's directory.
        checkpoint: The checkpoint's path.
    """
    if not found:
        return ""
    count = "1 difference" if len(found) == 1 else f"{len(found)} differences"
    lines = [f"  {each.line()}" for each in found]
    return "\n".join([f"{run}: {count} from {checkpoint}:", *lines])


def _value(config: RunConfig, section: str, name: str) -> Any:
    """Return a value as JSON has it, so that a checkpoint can record it.

    Where a missing value stands for one that is derived, that one is returned: what counts is the
    model that results.
    """
    key = f"{section}.{name}"
    if key in _DERIVED:
        return getattr(config, name)
    if key == "position.sinusoidal_table" and config.position.method != "sinusoidal":
        return None
    if key == "position.max_position_embeddings":
        return config.max_position_embeddings if config.position.method == "learned" else None
    if key == "position.slopes" and config.slopes is not None:
        # A range and the list of its values are one model.
        return list(config.slopes)
    if key == "data.corpora":
        return {
            corpus: {"epochs": section.epochs or 1.0}
            if section.weight is None
            else {"weight": section.weight}
            for corpus, section in config.data.corpora.items()
        }
    value = getattr(getattr(config, section), name)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _follows(key: str, before: RunConfig, after: RunConfig) -> bool:
    """Return True if a derived value differs because of another key, which is reported itself."""
    section, _, name = key.partition(".")
    spelled = [getattr(getattr(config, section), name) for config in (before, after)]
    return key in _DERIVED and spelled[0] == spelled[1]


def _note(key: str, after: RunConfig) -> str:
    """Return what else a user should know about the change of a key."""
    if key == "train.num_steps" and after.schedule.lr_decay_style != "constant":
        return "the learning rate decays towards the new last step"
    return ""

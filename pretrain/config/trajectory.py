"""Say of every key what it means to change it between two starts of a run.

A checkpoint goes on under a config that may differ from the one that saved it. Each key says
itself whether that is possible, whether it changes what is trained, or neither: see
`pretrain.config.schema.Effect`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pretrain.config.errors import ConfigError
from pretrain.config.load import effect_of, section_fields, section_keys, suggestion
from pretrain.config.run import RunConfig
from pretrain.config.schema import Effect, Section

FIXED, TRAJECTORY, FREE = Effect.FIXED, Effect.TRAJECTORY, Effect.FREE
BY_NAME = {
    TRAJECTORY: "changes training",
    Effect.FUNCTION: "changes what the model computes",
}
"""The effects of the keys that may change if --allow-changed names them, in words."""
MOVED_END = dict.fromkeys(
    ("train.num_steps", "schedule.lr_end_step"),
    "may change, and moves the end of the schedule: not the experiment of a run that had this "
    "value from the start",
)
"""Reasons of `Difference.line` where steps that are done had rates for another end."""

_DERIVED = {
    "model.num_query_groups",
    "model.ffn_hidden_size",
    "model.kv_channels",
    "model.embedding_scale",
    "model.embedding_init_method_std",
    "schedule.lr_end_step",
    "optimizer.position_learning_rate_mult",
}
"""Keys whose value is derived from other keys, by a property of RunConfig of the same name."""

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
    """What the change means. Of data it is one of BY_NAME, or FREE for the validation split."""
    data: str = ""
    """Of data: what differs."""
    directory: str = ""
    """Of data: where it lies."""

    def line(self, reasons: Mapping[str, str]) -> str:
        """Return it as a line for people: key, both values, and why it may differ.

        Args:
            reasons: Key -> why it may differ, where that is not the usual reason.
        """
        what = f"{self.key} ({self.data})" if self.data else self.key
        why = reasons.get(self.key, "may change")
        if self.effect in BY_NAME:
            by = reasons.get(self.key, f"allowed by --allow-changed {self.key}")
            why = f"{BY_NAME[self.effect]}, {by}"
        return f"{what} = {self.shown(self.before)} -> {self.shown(self.after)}  ({why})"

    def refusal(self, checkpoint: object) -> str:
        """Return the message that refuses it.

        Args:
            checkpoint: The path of the checkpoint that does not agree.
        """
        after, before = self.shown(self.after), self.shown(self.before)
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

    def shown(self, value: Any) -> str:
        """Return a value as a user finds it in the file."""
        if self.data:
            return str(value)[:DIGITS]
        return str(value).lower() if isinstance(value, bool) else str(value)


def differences(before: RunConfig, after: RunConfig) -> list[Difference]:
    """Return the keys in which two configs differ, in the order of the config file."""
    found = []
    for section, keys in section_keys().items():
        for name in keys:
            key = f"{section}.{name}"
            old, new = _value(before, section, name), _value(after, section, name)
            if old != new and not _follows(key, before, after):
                found.append(Difference(key, old, new, effect_of(key)))
    return found


def scheduled_changes(config: RunConfig, step: int) -> set[str]:
    """Return the keys that [[phases]] change after `step` steps: {} where no phase begins."""
    borders = {after.first: (before, after) for before, after in pairwise(config.parts)}
    if step not in borders:
        return set()
    before, after = borders[step]
    return {each.key for each in differences(before.config, after.config)}


def settings_hash(
    config: RunConfig, training: str | None, changes: Sequence[tuple[int, str, Any, Any]] = ()
) -> str:
    """Return a hash of all that training depends on but the seed, the same for runs that agree.

    Args:
        config: The config of a run.
        training: The hash of its training split; None where a checkpoint did not record it.
        changes: (step, key, before, after) of what was changed on the way.
    """
    values: dict[str, Any] = {TRAINING: training}
    if changes:
        values["changes"] = list(changes)
    for section in section_keys():
        for name, field in section_fields(section).items():
            key, value = f"{section}.{name}", _value(config, section, name)
            counts = effect_of(key) in (FIXED, *BY_NAME, Effect.OUTCOME) and key != "run.seed"
            exists = name in type(getattr(config, section)).model_fields
            # So a key that is new, with a default that trains as before, changes no older hash.
            if counts and exists and value != _as_json(field.default):
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


def changed_function(before: RunConfig, after: RunConfig) -> str:
    """Return what makes the weights of one config compute another function, as a user writes it.

    As "position.slopes = {factor = 0.5}"; empty where it is the same function.
    """
    keys = [d.key for d in differences(before, after) if d.effect is Effect.FUNCTION]
    if "position.method" in keys:
        # Its other keys came with it.
        given = after.position.model_dump(exclude_defaults=True)
        keys = ["position.method", *(f"position.{name}" for name in given if name != "method")]
    values = (getattr(after.position, key.partition(".")[2]) for key in keys)
    return ", ".join(f"{key} = {_as_written(value)}" for key, value in zip(keys, values))


def _as_written(value: Any) -> str:
    """Return a value of [position] as a line of TOML, without quotes."""
    if isinstance(value, Section):
        given = value.model_dump(exclude_defaults=True).items()
        return f"{{{', '.join(f'{k} = {_as_written(v)}' for k, v in given)}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_written, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


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
        if each.effect is FIXED or (each.effect in BY_NAME and each.key not in allowed)
    ]
    if refused:
        raise ConfigError("\n".join(refused))


def check_allowed(keys: Sequence[str]) -> None:
    """Raise ConfigError for a value of --allow-changed that is no key: it would allow nothing."""
    for key in keys:
        section, _, name = key.partition(".")
        if name not in section_keys().get(section, ()):
            raise ConfigError(f"--allow-changed {key}: no such key{suggestion(section, name)}")


def allow_options(keys: Sequence[str]) -> list[str]:
    """Return --allow-changed for each key, as command-line arguments."""
    return [word for key in keys for word in ("--allow-changed", key)]


def describe_differences(
    found: Sequence[Difference],
    run: object,
    checkpoint: object,
    reasons: Mapping[str, str],
) -> str:
    """Return what a resume prints about everything that differs; empty when nothing does.

    Args:
        found: What `differences` and `data_differences` found.
        run: The run's directory.
        checkpoint: The checkpoint's path.
        reasons: As of `Difference.line`.
    """
    if not found:
        return ""
    count = "1 difference" if len(found) == 1 else f"{len(found)} differences"
    lines = [f"  {each.line(reasons)}" for each in found]
    return "\n".join([f"{run}: {count} from {checkpoint}:", *lines])


def _value(config: RunConfig, section: str, name: str) -> Any:
    """Return a value as JSON has it, so that a checkpoint can record it.

    Where a missing value stands for one that is derived, that one is returned: what counts is the
    model that results.
    """
    key = f"{section}.{name}"
    if key in _DERIVED:
        return getattr(config, name)
    if section == "position":
        # Of two methods, the name alone differs where the keys of each say their defaults.
        written = dict(config.position) | config.position.resolved(config)
        return _as_json(written.get(name, section_fields(section)[name].default))
    if key == "data.corpora":
        return {
            corpus: {"epochs": section.epochs or 1.0}
            if section.weight is None
            else {"weight": section.weight}
            for corpus, section in config.data.corpora.items()
        }
    if key == "data.paths" and config.data.corpora:
        # The files of all corpora, and how they are read.
        return {
            corpus: section.model_dump(mode="json", exclude={"epochs", "weight"}, exclude_none=True)
            for corpus, section in config.data.corpora.items()
        }
    # A section may be of another class, which has not this key.
    return _as_json(getattr(getattr(config, section), name, None))


def _as_json(value: Any) -> Any:
    """Return the value of a key as JSON has it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _follows(key: str, before: RunConfig, after: RunConfig) -> bool:
    """Return True if a value differs because of another key, which is reported itself."""
    section, _, name = key.partition(".")
    sections = [getattr(config, section) for config in (before, after)]
    if not all(name in type(each).model_fields for each in sections):
        # It comes or goes with position.method or optimizer.name.
        return True
    spelled = [getattr(each, name, None) for each in sections]
    return key in _DERIVED and spelled[0] == spelled[1]

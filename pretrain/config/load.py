"""TOML and --set in, a checked RunConfig out; and the resolved TOML back out."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from pretrain.config import rules
from pretrain.config.errors import ConfigError
from pretrain.config.schema import RunConfig


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    sections: Mapping[str, dict[str, Any]] | None = None,
) -> RunConfig:
    """Reads `path` (TOML), applies `overrides` ("section.key=value", later ones win) and checks the whole.

    `sections` stand in place of the file's sections of those names, before the overrides.
    Raises ConfigError, naming file, key, value and remedy.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such config file. `ls configs` shows those that come with the project"
        ) from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable config file ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    values |= sections or {}
    for override in overrides:
        _apply(values, override)
    return parse_config(values, str(path))


def parse_config(values: dict[str, Any], origin: str) -> RunConfig:
    """The same from a dictionary of sections; `origin` stands in the messages."""
    try:
        config = RunConfig.model_validate(values)
        rules.check(config)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{origin}: {_explain(e)}" for e in error.errors())) from None
    except ConfigError as error:
        raise ConfigError(
            "\n".join(f"{origin}: {line}" for line in str(error).splitlines())
        ) from None
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved config as TOML: every key with its value, those without one left out; `load_config` reads it back."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (separator and dot and name):
        raise ConfigError(
            f"--set {override}: want section.key=value, as in --set train.num_steps=100"
        )
    if not isinstance(values.setdefault(section, {}), dict):
        raise ConfigError(f"--set {override}: {section} is not a section")
    if text.strip() == "none":
        values[section].pop(name, None)
        return
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # an unquoted string, as a shell leaves it
    values[section][name] = value


def _explain(error: Any) -> str:
    """One pydantic error in a line a person can act on."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"{key}: no such key{_nearest(location)}"
    if error["type"] == "missing":
        return f"{key}: missing; it has no default"
    got = error["input"]
    return (
        f"{key} = {got!r}: {error['msg'][:1].lower()}{error['msg'][1:]} (got {type(got).__name__})"
    )


def _nearest(location: list[str]) -> str:
    """', did you mean ...?' over the keys of that section, or the same key in another section."""
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    if len(location) == 1:
        near = difflib.get_close_matches(location[0], sections, 1)
        homes = [f"{s}.{location[0]}" for s, a in sections.items() if location[0] in _fields(a)]
        return (
            f", did you mean {(near or homes)[0]}?"
            if near or homes
            else f"; sections are {', '.join(sections)}"
        )
    section, name = location[0], location[1]
    elsewhere = [f"{s}.{name}" for s, annotation in sections.items() if name in _fields(annotation)]
    near = difflib.get_close_matches(name, _fields(sections[section]), 1, cutoff=0.5)
    if elsewhere or near:
        return f", did you mean {elsewhere[0] if elsewhere else f'{section}.{near[0]}'}?"
    return f"; [{section}] has {', '.join(_fields(sections[section]))}"


def _fields(annotation: Any) -> list[str]:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return list(candidate.model_fields)
    return []

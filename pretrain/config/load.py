"""Load a run's config from TOML, apply `--set` overrides, check it, and write it back as TOML."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from pretrain.config import rules
from pretrain.config.earlier import with_earlier_values
from pretrain.config.errors import ConfigError
from pretrain.config.run import RunConfig


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    sections: Mapping[str, dict[str, Any]] | None = None,
) -> RunConfig:
    """Read a TOML file, apply overrides and check the result.

    Args:
        path: The config file.
        overrides: "section.key=value" as after `--set`; of several on one key the last one wins.
            The value is TOML, or a plain word, which needs no quotes. `none` removes the key, which
            brings its default back.
        sections: Whole sections that replace those of the file, before the overrides are applied.

    Returns:
        The config, with every rule checked that does not depend on the number of processes.

    Raises:
        ConfigError: When the file cannot be read, or the run cannot work. The message names the
            file, the key, the value and the remedy.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such config file. `pretrain config --list` shows the configs that are "
            "installed with this package"
        ) from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable config file ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return parse_config(values | dict(sections or {}), str(path), overrides)


def parse_config(values: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Build and check a config from a dictionary of sections.

    Args:
        values: Section name -> its keys and values, as tomllib returns them.
        origin: What the values were read from; every line of an error message begins with it.
        overrides: As for `load_config`; applied to a copy of the values.

    Raises:
        ConfigError: When a key or value is not valid, or the run cannot work.
    """
    values = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    values = with_earlier_values(values)
    for override in overrides:
        _apply(values, override)
    try:
        config = RunConfig.model_validate(values)
        rules.check(config)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{origin}: {_explain(e)}" for e in error.errors())) from None
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(f"{origin}: {line}" for line in lines)) from None
    return config


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as TOML: every key with its value, defaults included.

    Keys whose value is None are left out, since TOML has no null. `load_config` reads the text back
    as an equal config.
    """
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _apply(values: dict[str, Any], override: str) -> None:
    """Apply one "section.key=value" to the sections in place."""
    key, separator, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (separator and dot and name):
        raise ConfigError(
            f"--set {override}: expected section.key=value, as in --set train.num_steps=100"
        )
    if not isinstance(values.setdefault(section, {}), dict):
        raise ConfigError(f"--set {override}: {section} is a value in the config, not a section")
    if text.strip() == "none":
        values[section].pop(name, None)
        return
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # A shell removes the quotes that TOML wants around a string: what is not TOML is one.
        value = text
    values[section][name] = value


def _explain(error: Any) -> str:
    """Return a pydantic error (`ErrorDetails`) as a line: the key, its value, what is expected."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"{key}: no such key{suggestion(location)}"
    if error["type"] == "missing":
        return f"{key}: missing, and it has no default. Set it in the file or with --set"
    got, text = error["input"], error["msg"]
    return f"{key} = {got!r}: {text[:1].lower()}{text[1:]} (got {type(got).__name__})"


def section_keys() -> dict[str, list[str]]:
    """Return the names of all keys by section, in the order of the config file."""
    return {name: _keys(field.annotation) for name, field in RunConfig.model_fields.items()}


def suggestion(location: list[str]) -> str:
    """Return the end of the message about an unknown key: what was probably meant.

    The same name in another section comes first (a key under the wrong header), then a similar name
    in the section.
    """
    sections = section_keys()
    if len(location) == 1:
        near = difflib.get_close_matches(location[0], sections, 1)
        homes = [f"{s}.{location[0]}" for s, keys in sections.items() if location[0] in keys]
        if near or homes:
            return f", did you mean {(near or homes)[0]}?"
        return f"; sections are {', '.join(sections)}"
    section, name = location[0], location[1]
    elsewhere = [f"{s}.{name}" for s, keys in sections.items() if name in keys]
    near = difflib.get_close_matches(name, sections[section], 1, cutoff=0.5)
    if elsewhere or near:
        return f", did you mean {elsewhere[0] if elsewhere else f'{section}.{near[0]}'}?"
    return f"; [{section}] has {', '.join(sections[section])}"


def _keys(annotation: Any) -> list[str]:
    """Return the keys of a section, given its annotation in RunConfig; none for other types."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return list(candidate.model_fields)
    return []

"""Expand ~ and $VARIABLE in the paths of a config.

It happens once, when a config is read, so what a run records of itself is the place that it had:
a variable may have another value on another node or for another user. The paths that come out hold
no variable any more, so reading a recorded config again changes nothing.

The environment is read here because a user has written the variable's name into the config. No
other module of this package reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from pretrain.config.errors import ConfigError

PATHS = {
    "run": ("directory",),
    "data": ("directory", "paths", "validation_paths", "tokenizer"),
    "checkpoint": ("upload_to",),
}
"""The keys by section that hold paths or URLs. data.cache_directory is not among them: it may lie
on a disk of the node's own, so it is expanded by the process that uses it."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^{}]*)\})")
"""$NAME or ${NAME}. Any other dollar stays as it is."""


def expand_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a config with ~ and variables expanded in every path.

    Args:
        values: Section -> its keys and values, which have not been checked yet: what is no path is
            left as it is.

    Raises:
        ConfigError: A path is empty, or a variable or a home directory in it does not exist.
    """
    result = dict(values)
    for section, names in PATHS.items():
        if isinstance(keys := result.get(section), dict):
            result[section] = _expanded(section, keys, names)
    data = result.get("data")
    if isinstance(data, dict) and isinstance(corpora := data.get("corpora"), dict):
        data["corpora"] = {
            name: _expanded(f"data.corpora.{name}", corpus, ("paths",))
            if isinstance(corpus, dict)
            else corpus
            for name, corpus in corpora.items()
        }
    return result


def expand_path(key: str, path: str) -> str:
    """Return a path with ~ and variables expanded.

    Args:
        key: Where it stands, for the message.
        path: A path, a pattern or a URL.

    Raises:
        ConfigError: It is empty, or a variable or a home directory in it does not exist.
    """
    given = f"{key} = {path}"

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        found = os.environ.get(name, "")
        if not found:
            # An empty one would turn $SCRATCH/runs into /runs.
            raise ConfigError(
                f"{given}: the variable {name} is not set. Set it (export {name}=...), or write "
                "the path without it"
            )
        return found

    expanded = _VARIABLE.sub(value, path)
    if _VARIABLE.search(expanded):
        raise ConfigError(
            f"{given}: a variable in it holds the name of another variable. Write the path in full"
        )
    if expanded.startswith("~"):
        expanded = os.path.expanduser(expanded)
        if expanded.startswith("~"):
            raise ConfigError(f"{given}: there is no such home directory. Write the path in full")
    if "\0" in expanded:
        raise ConfigError(f"{key} = {path!a}: no path holds a NUL character. Remove it")
    if any("\ud800" <= character <= "\udfff" for character in expanded):
        raise ConfigError(
            f"{key} = {expanded!a}: holds bytes that are no UTF-8, which a config cannot "
            "record. Use another path"
        )
    if not expanded.strip():
        raise ConfigError(f"{key} = {path!r}: is empty. Name a directory or a file")
    return expanded


def _expanded(section: str, keys: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return a section's keys with those of these names expanded."""
    return keys | {n: _each(f"{section}.{n}", keys[n]) for n in names if n in keys}


def _each(key: str, value: Any) -> Any:
    """Return a value with every text in it expanded."""
    if isinstance(value, str):
        return expand_path(key, value)
    return [_each(key, part) for part in value] if isinstance(value, list | tuple) else value

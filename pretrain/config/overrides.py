"""Read `--set section.key=value`: what is typed is the value, and nothing typed removes the key.

The value is TOML. A shell takes away the quotes that TOML wants around a text, so what is not TOML
is a text as well, without the space around it. Every value of a key that holds texts alone is one,
even "2024" and "none".
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.config.errors import ConfigError
from pretrain.config.keys import is_text, section_keys, suggestion


def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the sections of a config with overrides applied, the first one first.

    Args:
        values: Section -> its keys and values, as tomllib returns them. They stay as they are.
        overrides: "section.key=value" each, or "section.key=", which removes the key.

    Raises:
        ConfigError: An override is malformed, or removes a key that does not exist.
    """
    result = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    for override in overrides:
        _apply(result, override)
    return result


def check_overrides(overrides: Sequence[str]) -> list[str]:
    """Check the options of one command line, and return them.

    Raises:
        ConfigError: One is malformed, or two are about one key: the command would name two runs.
    """
    seen: dict[str, str] = {}
    for override in overrides:
        key = key_of(override)
        if key in seen:
            raise ConfigError(
                f"--set {override}: {key} is given twice, before as --set {seen[key]}. Leave one "
                "of the two out"
            )
        seen[key] = override
    return list(overrides)


def check_beside(overrides: Sequence[str], options: Mapping[str, tuple[object, str]]) -> None:
    """Check that no option of a command is given beside a --set of the key that it sets.

    Args:
        overrides: The options --set of the command.
        options: "--name" -> its value, None where it is not given; and the key.

    Raises:
        ConfigError: A key is set by both, so that it is not known which of the two is meant.
    """
    # A key that is removed, as in `--set key=`, says nothing that the option could contradict.
    settings = {key_of(override): override for override in overrides if override[-1:] != "="}
    for option, (value, key) in options.items():
        if value is not None and key in settings:
            raise ConfigError(
                f"--set {settings[key]}: {option} {value} says what {key} is, too. Give one of the "
                "two"
            )


def check_unread(overrides: Sequence[str], unread: Mapping[str, str]) -> None:
    """Check that no --set is about a key that a command does not read.

    Args:
        overrides: The options --set of the command.
        unread: Key -> why it is not read, and what to do; "{value}" stands for what is set.

    Raises:
        ConfigError: One is; it would have no effect.
    """
    for override in overrides:
        section, name, value = _split(override)
        if why := unread.get(f"{section}.{name}"):
            raise ConfigError(f"--set {override}: {why.format(value=value)}")


def key_of(override: str) -> str:
    """Return the key that an override is about, as "section.key"."""
    section, name, _ = _split(override)
    return f"{section}.{name}"


def _apply(values: dict[str, Any], override: str) -> None:
    """Apply one "section.key=value" to the sections in place."""
    section, name, text = _split(override)
    if not isinstance(values.setdefault(section, {}), dict):
        raise ConfigError(f"--set {override}: {section} is a value in the config, not a section")
    if text:
        values[section][name] = _value(section, name, text)
        return
    # A misspelled key would be removed without any effect, and the one that is meant would stay.
    if section not in section_keys():
        raise ConfigError(f"--set {override}: {section}: no such key{suggestion([section])}")
    if name not in section_keys()[section]:
        raise ConfigError(
            f"--set {override}: {section}.{name}: no such key{suggestion([section, name])}"
        )
    values[section].pop(name, None)


def _split(override: str) -> tuple[str, str, str]:
    """Return section, name and text of an override, without the space around them."""
    key, separator, text = override.partition("=")
    section, dot, name = (part.strip() for part in key.partition("."))
    if not (separator and dot and section and name):
        raise ConfigError(
            f"--set {override}: expected section.key=value, as in --set train.num_steps=100, or "
            "section.key= to remove the key"
        )
    if not _is_unicode(override):
        raise ConfigError(f"--set {override!a}: holds bytes that are no UTF-8. Remove them")
    return section, name, text.strip()


def _is_unicode(text: str) -> bool:
    """Return False for a text with bytes of another encoding, which TOML cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _value(section: str, name: str, text: str) -> Any:
    """Return the value that a text stands for."""
    try:
        parsed = tomllib.loads(f"value = {text}")
        # A comment, a comma or another line at its end is no part of a value. In brackets they are
        # an error, or a second one.
        whole = len(parsed) == len(tomllib.loads(f"values = [{text}]")["values"]) == 1
        whole = whole and not text.endswith(",")
    # An integer of more than 4,300 digits is a ValueError of Python's, deep brackets the other one.
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    if not whole or (is_text(section, name) and not isinstance(value, str)):
        return text
    return value

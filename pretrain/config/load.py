"""Load a run's config from TOML, apply `--set` overrides, check it, and write it back as TOML."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pretrain.config import rules
from pretrain.config.errors import ConfigError
from pretrain.config.run import RunConfig
from pretrain.config.schema import FOREIGN_KEY, Section
from pretrain.config.toml import (
    expand_paths,
    leaves,
    parse_toml,
    read_layers,
    with_version,
    without_version,
)

# ---- Name the keys of a config, and guess which one was meant by a name that is none ----


def section_keys() -> dict[str, list[str]]:
    """Return the names of all keys by section, in the order of the config file."""
    return {name: list(section_fields(name)) for name in RunConfig.model_fields}


def is_text(section: str, name: str) -> bool:
    """Return True if every value of a key is a text, so that "2024" can only mean the word."""
    field = section_fields(section).get(name) if section in RunConfig.model_fields else None
    return field is not None and all(kind is str for kind in _kinds(field.annotation))


def is_needed(location: Sequence[int | str]) -> bool:
    """Return True for the location of a config's key that has no default."""
    section, name = (*map(str, location), "", "")[:2]
    field = section_fields(section).get(name) if section in RunConfig.model_fields else None
    return field is not None and field.is_required()


def suggestion(location: list[str]) -> str:
    """Return the end of the message about an unknown key: what was probably meant.

    The same name in another section comes first (a key under the wrong header), then a similar name
    in the section.
    """
    sections, name = section_keys(), location[-1]
    elsewhere = [f"{s}.{name}" for s, keys in sections.items() if name in keys]
    if len(location) == 1:
        near = _near(name, [*sections, "base", "remove"], 0.6) + elsewhere
        return f", did you mean {near[0]}?" if near else f"; sections are {', '.join(sections)}"
    section = location[0]
    if name in ("base", "remove"):
        return f"; {name} stands at the top of a file, before its first section"
    near = elsewhere + [f"{section}.{key}" for key in _near(name, sections[section], 0.5)]
    if near:
        return f", did you mean {near[0]}?"
    return f"; [{section}] has {', '.join(sections[section])}"


def _near(name: str, names: list[str], cutoff: float) -> list[str]:
    """Return the most similar of some names, in lower case; an empty list if none is similar."""
    return difflib.get_close_matches(name.lower(), names, 1, cutoff)


def section_fields(section: str) -> dict[str, FieldInfo]:
    """Return the fields of a section by name, those of all classes that it may be."""
    found: dict[str, FieldInfo] = {}
    for model in section_models(section):
        for name, field in model.model_fields.items():
            found.setdefault(name, field)
    return found


def section_models(section: str) -> list[type[Section]]:
    """Return the class of a section and those registered below it, as one for each optimizer.

    Raises:
        KeyError: There is no such section.
    """
    annotation = RunConfig.model_fields[section].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return [candidate, *getattr(candidate, "REGISTERED", {}).values()]
    raise KeyError(section)


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that a value may have, without None; of a Literal those of its values."""
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    return set() if annotation is type(None) else {annotation}


# ---- overrides ----
# Read `--set section.key=value`: what is typed is the value, and nothing typed removes the key.
#
# The value is TOML. A shell takes away the quotes that TOML wants around a text, so what is not
# TOML is a text as well, without the space around it. Every value of a key that holds texts alone
# is one, even "2024" and "none".


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
    return section, name, text.strip()


def _value(section: str, name: str, text: str) -> Any:
    """Return the value that a text stands for."""
    try:
        # In brackets, a comment, a comma or another line at its end is an error, or a second value.
        values = parse_toml(f"values = [{text}]")["values"]
    # An integer of more than 4,300 digits is a ValueError, deep brackets are the other one.
    except (ValueError, RecursionError):
        return text
    if len(values) != 1 or text.endswith(","):
        return text
    return text if is_text(section, name) and not isinstance(values[0], str) else values[0]


SET, GIVEN, DEFAULT = "--set", "the command", "default"
"""Where a value may come from, beside a file: --set, sections that the caller gives, the schema."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    sections: Mapping[str, dict[str, Any]] | None = None,
) -> RunConfig:
    """Read a TOML file and the bases that it names, apply overrides and check the result.

    Args:
        path: The config file. `pretrain.config.toml` says how it builds on a base.
        overrides: "section.key=value" as after `--set`; of several on one key the last one wins.
            The value is TOML, or a plain word, which needs no quotes. "section.key=" removes the
            key, which brings its default back.
        sections: Whole sections that replace those of the file, before the overrides are applied.

    Returns:
        The config, with every rule checked that does not depend on the number of processes.

    Raises:
        ConfigError: When the file or a base of it cannot be read, or the run cannot work. The
            message names the file in which the value stands, the key, the value and the remedy.
    """
    return load_with_origins(path, overrides, sections)[0]


def load_with_origins(
    path: str | Path,
    overrides: Sequence[str] = (),
    sections: Mapping[str, dict[str, Any]] | None = None,
) -> tuple[RunConfig, dict[str, str]]:
    """Load a config as `load_config` does, and say where each of its values comes from.

    Args:
        path: As for `load_config`.
        overrides: As for `load_config`.
        sections: As for `load_config`.

    Returns:
        The config; and the dotted key of every value that `dump_config` writes -> the file that it
        stands in, "--set" or "default".

    Raises:
        ConfigError: As for `load_config`.
    """
    layered = read_layers(Path(path))
    values = overridden(layered.values | dict(sections or {}), overrides)
    elsewhere = {key_of(override): SET for override in overrides}
    elsewhere |= {key: GIVEN for key in sections or {}}

    def origin(key: str) -> str:
        """Return where a key of the merged values comes from; the file for what is nowhere."""
        for other, where in elsewhere.items():
            if key == other or key.startswith(f"{other}."):
                return where
        return layered.where(key) or str(path)

    def place(key: str) -> str:
        """Return what a message about a key begins with."""
        file = origin(key)
        if file == SET:
            return f"{path}: --set "
        if file in (GIVEN, str(path)):
            return f"{path}: "
        return f"{file} (a base of {path}): "

    config = _checked(values, place)
    given = {key for key, _ in leaves(values)}
    # An empty table has a header and no value.
    found = [key for key, value in leaves(_dumped(config)) if value != {}]
    return config, {key: origin(key) if key in given else DEFAULT for key in found}


def parse_config(values: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Build and check a config from a dictionary of sections.

    Args:
        values: Section name -> its keys and values, as tomllib returns them.
        origin: What the values were read from; every line of an error message begins with it.
        overrides: As for `load_config`; applied to a copy of the values.

    Raises:
        ConfigError: When a key or value is not valid, or the run cannot work.
    """
    given = {key_of(override) for override in overrides}

    def place(key: str) -> str:
        """Return what a message about a key begins with."""
        is_given = any(key == other or key.startswith(f"{other}.") for other in given)
        return f"{origin}: --set " if is_given else f"{origin}: "

    return _checked(overridden(without_version(values, origin), overrides), place)


def _checked(values: dict[str, Any], place: Callable[[str], str]) -> RunConfig:
    """Build and check a config.

    Args:
        values: Section name -> its keys and values.
        place: Returns what a message about a key begins with: where the key stands, and ": ".
    """
    try:
        values = expand_paths(values)
        config = RunConfig.model_validate(values)
        rules.check(config)
    except ValidationError as error:
        # A misspelled key is the reason why another one is missing, so it comes first.
        errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        lines = [(_key_of(e, values), explain(e)) for e in errors]
        raise ConfigError("\n".join(f"{place(key)}{line}" for key, line in lines)) from None
    except ConfigError as error:
        # Each line of a rule begins with its key: "section.key = value: reason".
        refused = str(error).splitlines()
        lines = [(line.partition(" = ")[0], line) for line in refused]
        raise ConfigError("\n".join(f"{place(key)}{line}" for key, line in lines)) from None
    return config


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as TOML: its version, and every key with its value.

    Keys whose value is None are left out, since TOML has no null. `load_config` reads the text back
    as an equal config.
    """
    return tomli_w.dumps(with_version(_dumped(config)))


def _dumped(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_none=True)


def _key_of(error: Any, values: Mapping[str, Any]) -> str:
    """Return the key that a pydantic error is about, without what follows it in the location.

    That is the index in a list, or which of several types was tried.
    """
    location = [str(part) for part in error["loc"]]
    inner: Any = values
    for depth, part in enumerate(location):
        if not isinstance(inner, dict) or part not in inner:
            # A key that is missing stands nowhere, whatever stands beside it.
            return ".".join(location[: depth + 1] if isinstance(inner, dict) else location[:depth])
        inner = inner[part]
    return ".".join(location)


def explain(error: Any, *, has_set: bool = True) -> str:
    """Return a pydantic error (`ErrorDetails`) as a line: the key, its value, what is expected.

    Args:
        error: The error.
        has_set: Whether a value may also be given by --set, which is so in configs of runs alone.
    """
    location = [str(part) for part in error["loc"]]
    # lengths[1] is the second element of a list.
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    key = "".join(parts).removeprefix(".")
    if error["type"] == "extra_forbidden":
        return f"{key}: no such key{suggestion(location)}"
    if error["type"] == "missing":
        where = "in the file or with --set" if has_set else "in the file"
        return f"{key}: missing, and it has no default. Set it {where}"
    got, text = error["input"], error["msg"]
    if error["type"] == FOREIGN_KEY:
        return f"{key} = {got!r}: {text}"
    if error["type"] == "string_too_short":
        return f"{key} = {got!r}: is empty. Set a value that is not"
    if error["type"] == "too_short":
        return f"{key} = {got!r}: an empty list. Name at least one value, or remove the key"
    text = text.replace("a valid tuple", "a list")
    said = f"{text[:1].lower()}{text[1:]} (got {type(got).__name__})"
    return f"{key} = {got!r}: {said}{_remedy(error, key, has_set)}"


HINTS = {
    "bool_type": "Write true or false",
    "int_type": "Write all of its digits, without quotes, a unit or a comma: 50000 or 50_000",
    "float_type": "Write all of its digits, without quotes, a unit or a comma: 0.003 or 3e-3",
    "tuple_type": 'Write a list: [64, 256] or ["a.txt", "b.txt"]',
}
"""How to write a value, by the kind of pydantic's error."""


def _remedy(error: Any, key: str, has_set: bool) -> str:
    """Return how to write a value that is refused, if that can be guessed."""
    kind, got = error["type"], error["input"]
    if isinstance(got, str) and got.lower() in ("none", "null", "nil", "~"):
        if is_needed(error["loc"]):
            return ". The key is needed: set a value"
        nothing = f"write nothing: --set {key}=" if has_set else "leave its line out"
        return f". To remove the key, {nothing}"
    if kind == "literal_error" and isinstance(got, str):
        allowed = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        if near := _near(got, allowed, 0.6):
            return f'. Did you mean "{near[0]}"?'
    return f". {HINTS[kind]}" if kind in HINTS else ""

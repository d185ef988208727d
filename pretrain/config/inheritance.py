"""Read a config file together with the files that it builds on: `base = "other.toml"`.

A file names its base at the top, before the first section. What the file says is laid over what the
base says: tables are merged key by key at every depth, any other value replaces the base's.
`remove = ["section.key"]` beside it takes keys or whole tables of the base away first.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.errors import ConfigError
from pretrain.config.paths import expand_path
from pretrain.config.toml_file import read_toml_text

BASE, REMOVE = "base", "remove"
"""The keys at the top of a file that are about its base, and no sections of a run's config."""

CONFIG_VERSION = 1
"""The version of the files that `dump_config` writes, as they state it. It is raised when a key's
meaning changes, or the value of a key that they lack, so that such a file would be read as another
run. What a person writes needs no version."""
_VERSION = "config_version"


@dataclass(frozen=True)
class Layered:
    """The sections of a config file and of its bases, merged, and where each value stands."""

    values: dict[str, Any]
    """Section -> its keys and values, as tomllib returns them; without `base` and `remove`."""

    origins: dict[str, str]
    """Dotted key of every value that is no table -> the file that it stands in."""

    files: tuple[Path, ...]
    """The file, its base, the base of that, and so on."""

    def where(self, key: str) -> str | None:
        """Return the file that a key stands in; of a table, the one that all of it stands in.

        None if the key stands in no file, or the table in several.
        """
        if key in self.origins:
            return self.origins[key]
        found = {file for leaf, file in self.origins.items() if leaf.startswith(f"{key}.")}
        return found.pop() if len(found) == 1 else None


def read_layers(path: Path) -> Layered:
    """Read a config file and its bases, and merge them.

    Raises:
        ConfigError: A file is missing or is no TOML, or the bases form a circle. The message names
            the file that asks for the base.
    """
    layers = _chain(path)
    result: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file, values in reversed(layers):
        below = _without(result, values.pop(REMOVE, None), file)
        values.pop(BASE, None)
        here = dict(leaves(values))
        result = merged(below, values)
        # What has no origin is a table of the base that `remove` has emptied.
        origins = {
            key: str(file) if key in here else origins.get(key, str(file))
            for key, _ in leaves(result)
        }
    return Layered(result, origins, tuple(file for file, _ in layers))


def with_version(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file that states its version."""
    return {_VERSION: CONFIG_VERSION, **sections}


def without_version(values: Mapping[str, Any], file: Path | str) -> dict[str, Any]:
    """Return the content of a file without its version, which it may state.

    Raises:
        ConfigError: It is another one.
    """
    found = values.get(_VERSION, CONFIG_VERSION)
    # In Python true and 1.0 equal 1, too.
    if type(found) is not int or found != CONFIG_VERSION:
        raise ConfigError(
            f"{file}: {_VERSION} = {found!r}: this version of pretrain reads {CONFIG_VERSION}. Use "
            "the version that wrote the file"
        )
    return {key: value for key, value in values.items() if key != _VERSION}


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table laid over another: tables key by key, any other value replaces the base's."""
    result = dict(base)
    for key, value in overlay.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = merged(below, value)
        result[key] = value
    return result


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything in a table that is no table with keys."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _chain(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return a file and its bases with their content, the file first."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    seen: list[str] = []
    file: Path | None = path
    while file is not None:
        asked_by = chain[-1][0] if chain else None
        # Not Path.resolve, which fails with an error of its own on links that go round in a circle.
        if os.path.realpath(file) in seen:
            circle = " -> ".join(str(f) for f in (*(f for f, _ in chain), file))
            raise ConfigError(
                f'{asked_by}: base = "{chain[-1][1][BASE]}": goes round in a circle: {circle}. '
                "Remove one of these bases"
            )
        seen.append(os.path.realpath(file))
        values = without_version(_read(file, chain), file)
        chain.append((file, values))
        file = _base_of(file, values)
    return chain


def _base_of(file: Path, values: Mapping[str, Any]) -> Path | None:
    """Return the base that a file names; None if it names none."""
    if BASE not in values:
        if REMOVE in values:
            raise ConfigError(
                f"{file}: {REMOVE} = {values[REMOVE]!r}: takes keys of a base away, and the file "
                f'names none. Set {BASE} = "other.toml", or leave {REMOVE} out'
            )
        return None
    name = values[BASE]
    if not isinstance(name, str):
        raise ConfigError(
            f"{file}: {BASE} = {name!r}: expected the name of one config file, as in "
            f'{BASE} = "other.toml"'
        )
    try:
        path = file.parent / expand_path(BASE, name)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    # "a/h100/../base.toml" is shown as "a/base.toml", unless a link makes that another file.
    short = Path(os.path.normpath(path))
    same = os.path.exists(short) and os.path.exists(path) and os.path.samefile(short, path)
    return short if same else path


def _read(file: Path, chain: list[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Return the content of a file, which the last one of the chain names as its base, if any."""
    asked_by = f", the base of {chain[-1][0]}" if chain else ""
    try:
        text = read_toml_text(file)
    except FileNotFoundError:
        near = _similar_file(file)
        if chain:
            raise ConfigError(
                f'{chain[-1][0]}: {BASE} = "{chain[-1][1][BASE]}": no such config file ({file}). A '
                f"base is looked for from the folder of the file that names it{near.rstrip()}"
            ) from None
        raise ConfigError(
            f"{file}: no such config file{near or '. '}`pretrain config --list` shows the configs "
            "that are installed with this package"
        ) from None
    except IsADirectoryError as error:
        inner = file / "config.toml"
        remedy = f"That of a run is {inner}" if inner.is_file() else "Name a file in it"
        raise ConfigError(
            f"{file}: not a readable config file{asked_by}: {error.strerror}. {remedy}"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{file}: not a readable config file{asked_by}: line {line} is not UTF-8 (byte "
            f"0x{error.object[error.start]:02x}). Save the file as UTF-8"
        ) from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: not a readable config file{asked_by} ({error})") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Also what Python refuses: integers of thousands of digits, brackets a thousand deep.
        said = f"{error}{_quoted_line(text, str(error))}{_other_format(file)}"
        raise ConfigError(f"{file}: not valid TOML{asked_by}: {said}") from None


def _similar_file(file: Path) -> str:
    """Return ", did you mean FILE? ", where a file beside a missing one is like it; else ""."""
    try:
        names = [entry.name for entry in os.scandir(file.parent) if entry.name.endswith(".toml")]
    except OSError:
        return ""
    near = difflib.get_close_matches(file.name, names, 1, 0.8)
    return f", did you mean {file.parent / near[0]}? " if near else ""


def _quoted_line(text: str, message: str) -> str:
    """Return the line that an error of tomllib is about, with how to write what is often wrong."""
    place = re.search(r"at line (\d+), column", message)
    # TOML counts the lines that \n ends.
    lines = text.split("\n")
    if place is None or int(place[1]) > len(lines):
        return ""
    line = lines[int(place[1]) - 1].strip()
    shown = line if len(line) <= 60 else f"{line[:60]}..."
    remedy = ""
    if "Cannot overwrite" in message:
        remedy = ". The key is given twice; remove one of the two lines"
    elif "Cannot declare" in message:
        remedy = ". The section begins twice; put its keys below one header"
    elif re.fullmatch(r"[\w.-]+\s*=\s*[A-Za-z]\S*", line):
        remedy = ". A text stands in quotes; true and false do not, in lower case"
    elif re.match(r"[\w.-]+\s*=\s*[\d.]+\s*,", line):
        remedy = ". A number has no comma: 50000 or 50_000. A list stands in brackets: [64, 256]"
    elif re.match(r"[\w.-]+\s*=\s*[\d.]+[A-Za-z%]", line):
        remedy = ". A number has digits alone, without a unit: 50000 or 50_000"
    return f": {shown!a}{remedy}"


def _other_format(file: Path) -> str:
    """Return a hint for a file that is named as one of another format."""
    if file.suffix.lower() in (".yaml", ".yml", ".json", ".py", ".cfg", ".ini"):
        return (
            '. A config is a TOML file: sections such as [model], and lines such as key = "value"'
        )
    return ""


def _without(values: dict[str, Any], keys: Any, file: Path) -> dict[str, Any]:
    """Return the merged bases of a file without the keys that it removes."""
    if keys is None:
        return values
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(
            f"{file}: {REMOVE} = {keys!r}: expected a list of keys of the base, as in "
            f'{REMOVE} = ["parallel.world_size"]'
        )
    for key in keys:
        if (left := _without_key(values, key.split("."))) is None:
            raise ConfigError(
                f'{file}: {REMOVE} = "{key}": the base has no such key. Write it with its section, '
                "as section.key, or leave it out"
            )
        values = left
    return values


def _without_key(table: Mapping[str, Any], parts: list[str]) -> dict[str, Any] | None:
    """Return a copy of a table without one key, given in parts; None if it is not there."""
    first, *rest = parts
    if first not in table:
        return None
    if not rest:
        return {key: value for key, value in table.items() if key != first}
    inner = _without_key(table[first], rest) if isinstance(table[first], dict) else None
    return None if inner is None else {**table, first: inner}

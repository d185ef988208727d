"""Read files of TOML: one alone, and a config with the files that it builds on and its paths.

The example configs and site files that are installed with the package are found here as well.
`pretrain/configs` and `pretrain/slurm` lie beside the code. In a clone they are links to the
folders of those names at its root; in an installed wheel they are folders in site-packages, where
users do not look for them.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.errors import ConfigError

# ---- Read a file of TOML, however an editor has stored its text ----


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file in UTF-8, with or without a byte order mark.

    Raises:
        OSError: The file cannot be read.
        UnicodeError: It is not UTF-8.
        ValueError: It is not TOML; also for what Python refuses, such as integers of thousands of
            digits.
        RecursionError: Its brackets are a thousand deep.
    """
    return parse_toml(read_toml_text(path))


def read_toml_text(path: Path) -> str:
    """Return the text of a TOML file in UTF-8, with or without a byte order mark.

    Lines may end as on Unix, on Windows or on an old Mac; those returned end with \\n alone.

    Raises:
        OSError: The file cannot be read.
        UnicodeError: It is not UTF-8.
    """
    text = path.read_bytes().decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


# ---- Expand ~ and $VARIABLE in the paths of a config ----
# It happens once, when a config is read, so what a run records of itself is the place that it had:
# a variable may have another value on another node or for another user. The paths that come out
# hold no variable any more, so reading a recorded config again changes nothing.
#
# The environment is read here because a user has written the variable's name into the config. No
# other module of this package reads it.


PATHS = {
    "run": ("directory",),
    "data": ("directory", "paths", "validation_paths", "tokenizer"),
    "checkpoint": ("upload_to",),
}
"""The keys by section that hold paths or URLs. data.cache_directory is not among them: it may lie
on a disk of the node's own, so it is expanded by the process that uses it."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^{}]*)\})")
"""$NAME or ${NAME}. Any other dollar stays as it is."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""NUL, and what Python makes of bytes that are no UTF-8: config.toml can hold neither."""


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
    if not expanded.strip():
        raise ConfigError(f"{key} = {path!r}: is empty. Name a directory or a file")
    if _NO_TEXT.search(expanded):
        raise ConfigError(f"{key} = {path!a}: holds a NUL or bytes that are no UTF-8. Remove them")
    return expanded


def _expanded(section: str, keys: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return a section's keys with those of these names expanded."""
    return keys | {n: _each(f"{section}.{n}", keys[n]) for n in names if n in keys}


def _each(key: str, value: Any) -> Any:
    """Return a value with every text in it expanded."""
    if isinstance(value, str):
        return expand_path(key, value)
    return [_each(key, part) for part in value] if isinstance(value, list | tuple) else value


# ---- Read a config file together with the files that it builds on: `base = "other.toml"` ----
# A file names its base at the top, before the first section. What the file says is laid over what
# the base says: tables are merged key by key at every depth, any other value replaces the base's.
# `remove = ["section.key"]` beside it takes keys or whole tables of the base away first.


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


def parse_toml(text: str) -> dict[str, Any]:
    """Return what TOML says.

    Raises:
        ValueError: It is no TOML, or has an integer of more digits than Python writes (4,300).
    """
    values = tomllib.loads(text)
    # tomllib reads a hexadecimal integer of any length, which no message could show.
    repr(values)
    return values


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
        if chain:
            raise ConfigError(
                f'{chain[-1][0]}: {BASE} = "{chain[-1][1][BASE]}": no such config file ({file}). A '
                "base is looked for from the folder of the file that names it"
            ) from None
        raise ConfigError(
            f"{file}: no such config file. `pretrain config --list` shows the configs that are "
            "installed with this package"
        ) from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: not a readable config file{asked_by} ({error})") from None
    try:
        return parse_toml(text)
    except (ValueError, RecursionError) as error:
        # Also what Python refuses: integers of thousands of digits, brackets a thousand deep.
        place = re.search(r"at line (\d+), column", str(error))
        line = text.split("\n")[int(place[1]) - 1].strip() if place else ""
        said = f"{error}: {line[:60]!a}" if line else str(error)
        raise ConfigError(f"{file}: not valid TOML{asked_by}: {said}") from None


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


PACKAGE = Path(__file__).parents[1]
STUDIES = "studies"
"""The folder of study files among the configs."""


@dataclass(frozen=True)
class ShippedFile:
    """A TOML file that is installed with the package, as an example to run or to copy."""

    path: Path
    description: str
    """The file's first line, which is a comment that says in one line what the file is for."""

    @property
    def is_base(self) -> bool:
        """Return True for a part of a config, which others build on and no run can be made of.

        A whole config names run.directory, which no two runs share, so no base has one.
        """
        return "directory" not in read_layers(self.path).values.get("run", {})


def shipped_configs() -> list[ShippedFile]:
    """Return the configs of runs and the bases that they build on, sorted by path."""
    paths = sorted((PACKAGE / "configs").rglob("*.toml"))
    return [_shipped(path) for path in paths if path.parent.name != STUDIES]


def shipped_studies() -> list[ShippedFile]:
    """Return the files of `pretrain study`, sorted by path."""
    return [_shipped(path) for path in sorted((PACKAGE / "configs" / STUDIES).glob("*.toml"))]


def shipped_sites() -> list[ShippedFile]:
    """Return the example descriptions of a cluster, for the launcher's --site, sorted by path."""
    return [_shipped(path) for path in sorted((PACKAGE / "slurm").glob("site.*.toml"))]


def list_shipped() -> str:
    """Return what `pretrain config --list` prints: every file, with a description.

    Raises:
        ConfigError: The files are missing, as in a copy of the clone without its symbolic links.
    """
    if not shipped_configs():
        raise ConfigError(
            f"{PACKAGE / 'configs'}: no configs there. A copy of a clone has to keep its symbolic "
            "links (pretrain/configs, kernels, launcher, slurm): use git clone, not a zip file"
        )
    configs = shipped_configs()
    return "\n".join(
        [
            "Configs, for `pretrain` and `launcher` as CONFIG:",
            *_table([file for file in configs if not file.is_base]),
            "",
            'Parts of them, for `base = "FILE"` in a config of your own:',
            *_table([file for file in configs if file.is_base]),
            "",
            "Studies, for `pretrain study` as STUDY:",
            *_table(shipped_studies()),
            "",
            "Example sites, for `launcher submit --site`; copy one and set your cluster's values:",
            *_table(shipped_sites()),
        ]
    )


def _table(files: list[ShippedFile]) -> Iterator[str]:
    """Yield two lines for each file, so that a long path never breaks a table."""
    for file in files:
        yield f"  {_shown(file.path)}"
        yield f"      {file.description}"


def _shown(path: Path) -> Path:
    """Return the path as one would type it: relative where it lies below the current directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _shipped(path: Path) -> ShippedFile:
    # In a clone the package's folders are links. Resolved, the paths are those at the clone's root.
    return ShippedFile(path.resolve(), _first_comment(path.read_text()))


def _first_comment(text: str) -> str:
    """Return the first line of a TOML file without its "#"; empty when it is no comment."""
    first, _, _ = text.partition("\n")
    return first.removeprefix("#").strip() if first.startswith("#") else ""

"""Find the example configs and site files that are installed with the package.

`pretrain/configs` and `pretrain/slurm` lie beside the code. In a clone they are links to the
folders of those names at its root; in an installed wheel they are folders in site-packages, where
users do not look for them.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.errors import ConfigError
from pretrain.config.inheritance import read_layers

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
    folder = (PACKAGE / "configs").resolve()
    alone = [file for file in shipped_configs() if file.path.parent == folder]
    return "\n".join(
        [
            "Configs, for `pretrain` and `launcher` as CONFIG:",
            *_table(alone),
            *_families(folder),
            "",
            "Studies, for `pretrain study` as STUDY:",
            *_table(shipped_studies()),
            "",
            "Example sites, for `launcher submit --site`; copy one and set your cluster's values:",
            *_table(shipped_sites()),
        ]
    )


def _families(folder: Path) -> Iterator[str]:
    """Yield the lines about each folder of configs: its configs by kind, and what they build on."""
    inside = [file for file in shipped_configs() if file.path.parent != folder]
    for name, found in itertools.groupby(inside, lambda f: f.path.relative_to(folder).parts[0]):
        files = list(found)
        about = [file.description for file in files if file.path == folder / name / "base.toml"]
        yield f"  {_shown(folder / name)}/"
        yield from (f"      {text}" for text in about)
        names = {
            is_base: [str(f.path.relative_to(folder / name)) for f in files if f.is_base == is_base]
            for is_base in (False, True)
        }
        for _, kind in itertools.groupby(sorted(names[False], key=_by_number), _kind):
            yield from _wrapped(kind, "      ")
        yield from _wrapped(names[True], "      to build on: ")


def _wrapped(names: Iterable[str], begin: str) -> list[str]:
    """Return names in lines, the first of which begins with `begin`."""
    names = sorted(names, key=_by_number)
    return textwrap.wrap(
        ", ".join(names),
        width=98,
        initial_indent=begin,
        subsequent_indent="          ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _by_number(name: str) -> tuple[str, int]:
    """Return the key that sorts alibi_64.toml before alibi_512.toml."""
    number = re.search(r"\d+(?=\.toml$)", name)
    return _kind(name), int(number[0]) if number else 0


def _kind(name: str) -> str:
    """Return a file's name without the number at its end: that of the position method, say."""
    return re.sub(r"\d*\.toml$", "", name)


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

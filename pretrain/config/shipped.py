"""Find the example configs and site files that are installed with the package.

`pretrain/configs` and `pretrain/slurm` lie beside the code. In a clone they are links to the
folders of those names at its root; in an installed wheel they are folders in site-packages, which
nobody would find without being told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.errors import ConfigError

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class ShippedFile:
    """A TOML file that is installed with the package, as an example to run or to copy."""

    path: Path
    description: str
    """The file's first line, which is a comment that says in one line what the file is for."""


def shipped_configs() -> list[ShippedFile]:
    """Return the configs of runs, for CONFIG on any command line, sorted by path."""
    return [_shipped(path) for path in sorted((PACKAGE / "configs").rglob("*.toml"))]


def shipped_sites() -> list[ShippedFile]:
    """Return the example descriptions of a cluster, for the launcher's --site, sorted by path."""
    return [_shipped(path) for path in sorted((PACKAGE / "slurm").glob("site.*.toml"))]


def list_shipped() -> str:
    """Return what `pretrain config --list` prints: path and description of each file.

    Raises:
        ConfigError: The files are missing, as in a copy of the clone without its symbolic links.
    """
    if not shipped_configs():
        raise ConfigError(
            f"{PACKAGE / 'configs'}: no configs there. A copy of a clone has to keep its symbolic "
            "links (pretrain/configs, kernels, launcher, slurm): use git clone, not a zip file"
        )
    return "\n".join(
        [
            "Configs, for `pretrain` and `launcher` as CONFIG:",
            *_table(shipped_configs()),
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

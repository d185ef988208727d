"""Name the runs of a study, so that a study that grows keeps the runs that it has."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pretrain.rundir.checkpoints import complete_checkpoints
from pretrain.rundir.paths import RunPaths


def run_name(folder: Path, of: str, seed: int, *, several: bool) -> str:
    """Return the name of the directory of a run.

    A directory that holds this seed already keeps its name, whatever was added to the study file or
    taken from it since.

    Args:
        folder: STUDY/runs.
        of: METHOD-L.
        seed: The run's seed.
        several: Whether the study file has this method and length with several seeds. A new run has
            its seed in its name then, and also where another seed has METHOD-L.
    """
    named = [f"{of}-s{seed}", of] if several else [of, f"{of}-s{seed}"]
    seeds = {name: recorded_seed(folder / name) for name in named}
    kept = (name for name in named if seeds[name] == seed)
    free = (name for name in named if seeds[name] is None)
    return next(kept, None) or next(free, f"{of}-s{seed}")


def recorded_seed(run: Path) -> int | None:
    """Return the seed that a run's directory says it has; None where nothing there can be read."""
    paths = RunPaths(run)
    checkpoints = [path / "config.toml" for path in reversed(complete_checkpoints(run))]
    for file in (*checkpoints, paths.config, paths.launch_config):
        try:
            seed = tomllib.loads(file.read_text("utf-8"))["run"]["seed"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(seed, int):
            return seed
    return None

"""Find the data set of a run from any working directory, and when the run was moved with it."""

from __future__ import annotations

import os
from pathlib import Path

from pretrain.checkpoint.manifest import Checkpoint
from pretrain.config import ConfigError, RunConfig
from pretrain.config.run import is_url
from pretrain.data.manifest import MANIFEST
from pretrain.rundir.checkpoints import run_of


class NoDataSet(ConfigError):
    """The data set of a run is not where it could be."""


def with_data_set(config: RunConfig, checkpoint: Checkpoint) -> RunConfig:
    """Return the config with data.directory as it is found from here.

    A relative data.directory and a relative run.directory start where the run was started. A run
    that is found at /x/runs/demo and is called runs/demo in its config was started in /x, or moved
    there as a whole, so its data is looked for there first, and then from the working directory.

    Args:
        config: The checkpoint's config, perhaps with another data.directory, which is then taken
            as it is given.
        checkpoint: The checkpoint, opened.

    Raises:
        NoDataSet: There is none at either place.
    """
    given = config.data.directory
    if is_url(given) or os.path.isabs(given) or given != checkpoint.config.data.directory:
        return config
    root = _started_in(checkpoint)
    if root is None or root == Path.cwd():
        # If there is none, opening it raises the error that says so.
        return config
    for place in (str(root / given), given):
        if os.path.isfile(os.path.join(place, "validation", MANIFEST)):
            data = config.data.model_copy(update={"directory": place})
            return config.model_copy(update={"data": data})
    raise NoDataSet(
        f"data.directory = {given}: there is no built data set at {root / given}, nor at "
        f"{os.path.abspath(given)}. Give its place with --set data.directory=PATH"
    )


def _started_in(checkpoint: Checkpoint) -> Path | None:
    """Return the directory from which run.directory leads to the checkpoint's run; None for none.

    There is none for a checkpoint that was copied out of its run, for an absolute run.directory,
    and for a run that was renamed.
    """
    run, named = run_of(checkpoint.path), os.path.normpath(checkpoint.config.run.directory)
    if run is None or os.path.isabs(named) or named.startswith(os.pardir):
        return None
    parts = Path(named).parts
    for found in (Path(os.path.abspath(run)), run.resolve()):
        if found.parts[-len(parts) :] == parts:
            return Path(*found.parts[: -len(parts)])
    return None

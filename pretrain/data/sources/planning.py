"""Divide the files of a data set into tasks."""

from __future__ import annotations

from pretrain.config.schema import DataSection
from pretrain.data.document import Split
from pretrain.data.sources.corpus import Task


def plan(data: DataSection) -> dict[Split, list[Task]]:
    """Return the tasks of both splits, the same whatever the number of processes.

    Validation has tasks only where whole files are held out: with data.validation_paths, and of
    the shakespeare corpus.

    Raises:
        ConfigError: if a pattern matches no file, a file cannot be read, or nothing is left to
            train on.
    """
    raise NotImplementedError

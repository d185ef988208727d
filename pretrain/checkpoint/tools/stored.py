"""`pretrain checkpoint list`, `verify` and `upload` for a store, which is named by its URL."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pretrain.checkpoint.store import Store, Stored
from pretrain.checkpoint.store_names import split_checkpoint
from pretrain.checkpoint.tools.listing import Row
from pretrain.checkpoint.tools.table import size
from pretrain.checkpoint.uploader import Rounds
from pretrain.config import ConfigError, load_config
from pretrain.rundir.checkpoints import complete_checkpoints
from pretrain.rundir.paths import RunPaths


def list_store(url: str) -> list[Row]:
    """Return the checkpoints in a store: first the run's line, then those it turned away from.

    Raises:
        ConfigError: There are none, or it cannot be known which line is the run's.
        StoreError: The store cannot be read.
    """
    store = Store(url)
    newest = store.newest()
    names = store.names()
    if newest is None and not names:
        raise _none(url)
    line = {s.name for s in store.line_to(newest)} if newest else set()
    rows = []
    for name in names:
        stored = store.stored(name)
        row = Row(f"{store.url}/{name}", int(name.split("-")[1]))
        if stored is None:
            rows.append(dataclasses.replace(row, damage="not complete, or its manifest is damaged"))
            continue
        lineage = stored.lineage
        row = dataclasses.replace(
            row,
            id=lineage.id,
            parent=lineage.parent,
            branch=lineage.branches[-1].id,
            branch_since=lineage.branches[-1].since,
            bytes=stored.bytes,
            validation_loss_nats=stored.content.get("validation_loss_nats"),
            abandoned=None if name in line else "other lines",
        )
        rows.append(row)
    return rows


def verify_store(url: str) -> bool:
    """Verify the checkpoints in a store, or the one that the URL names; print a line for each.

    Returns:
        True if all are as they were written.

    Raises:
        ConfigError: There are none.
        StoreError: The store cannot be read.
    """
    base, name = split_checkpoint(url)
    store = Store(base)
    names = [name] if name else store.names()
    if not names:
        raise _none(url)
    good = True
    for each in names:
        stored = store.stored(each)
        problems = _problems(store, stored)
        for problem in problems:
            print(f"{store.url}/{each}: DAMAGED: {problem}", flush=True)
        if stored is not None and not problems:
            print(
                f"{store.url}/{each}: every byte is as it was written ({size(stored.bytes)})",
                flush=True,
            )
        good = good and not problems
    return good


def upload_run(run: Path, url: str | None) -> list[str]:
    """Upload the checkpoints of a run that are not in a store yet.

    Args:
        run: The run's directory.
        url: The store; None for that of the run's config.

    Returns:
        A line for each checkpoint that is still missing there.

    Raises:
        ConfigError: The run has no checkpoint, or no URL is known.
    """
    if not complete_checkpoints(run):
        raise ConfigError(f"{run}: has no complete checkpoint. Give a run's directory")
    path = RunPaths(run).newest_config()
    if url is None and path is not None:
        url = load_config(path).checkpoint.upload_to
    if url is None:
        raise ConfigError(f"{run}: its config has no checkpoint.upload_to. Say where to: --to URL")
    rounds = Rounds(run, Store(url))
    while rounds.upload_next():
        pass
    return rounds.missing()


def _problems(store: Store, stored: Stored | None) -> list[str]:
    if stored is None:
        return ["not complete, or its manifest is damaged"]
    return store.verify(stored)


def _none(url: str) -> ConfigError:
    return ConfigError(
        f"{url}: holds no checkpoints. Give what checkpoint.upload_to of the run says"
    )

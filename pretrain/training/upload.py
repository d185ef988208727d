"""Upload a run's checkpoints while it trains, and bring the newest one back to an empty node."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

from pretrain.checkpoint.format import DamagedCheckpoint
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.store import Store, Stored, StoreError, split_checkpoint
from pretrain.config import ConfigError, RunConfig, writing
from pretrain.config.run import is_url
from pretrain.rundir.attempts import check_free
from pretrain.rundir.checkpoints import (
    begin_partial,
    checkpoint_directory,
    read_lineage,
    saved_checkpoints,
)
from pretrain.rundir.files import publish_directory, say
from pretrain.topology import Topology, on_main, supervised_attempt
from pretrain.training.start import Run

STOP_SECONDS = 30.0
"""How long a run that is asked to stop waits for an upload; the next start makes up for it."""
POLL_SECONDS = 60.0
"""The longest time for which the other ranks wait in a collective while rank 0 downloads."""


class Patience:
    """Decides how long the end of a run waits for uploads."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._asked_at: float | None = None

    def may_wait(self) -> bool:
        """Return True as long as nobody asked the run to stop, and for a while after that."""
        # A sign of life, for the watchdog.
        self._run.reporter.progress(self._run.state.step)
        if self._asked_at is None and any(self._run.requests.votes()[:-1]):
            self._asked_at = time.monotonic()
        return self._asked_at is None or time.monotonic() - self._asked_at < STOP_SECONDS


# ---- at the start --------------------------------------------------------------------------------
def check_store(config: RunConfig, resume: str) -> None:
    """Check that the packages for the run's URLs are installed. Every process does so.

    Raises:
        ConfigError: One is not.
    """
    for url in (config.checkpoint.upload_to, resume if is_url(resume) else None):
        if url is not None:
            Store(split_checkpoint(url)[0])


def bring(config: RunConfig, topology: Topology, resume: str) -> str:
    """Download the checkpoint to resume from, if it is in a store. All ranks together.

    With "auto" that is done if checkpoint.upload_to has a checkpoint that descends from the run's
    newest one, as on another node's empty disk.

    Args:
        config: The run.
        topology: The processes' layout.
        resume: "auto", "none", a path or a URL.

    Returns:
        What to resume from now: a path in place of a URL.

    Raises:
        ConfigError: The store holds no such checkpoint, or another run's.
        RunFailed: It cannot be read, or the disk refused.
    """
    url = config.checkpoint.upload_to
    if not is_url(resume) and url is None:
        return resume
    if not is_url(resume) and resume not in ("auto", "none"):
        return resume
    work = _Download(config, resume)
    while not on_main(topology, work.go_on):
        pass
    return on_main(topology, lambda: work.resume)


class _Download:
    """The download on rank 0, while the other ranks wait in short collectives."""

    def __init__(self, config: RunConfig, resume: str) -> None:
        self.resume = resume
        self._config = config
        self._problem: Exception | None = None
        self._thread: threading.Thread | None = None

    def go_on(self) -> bool:
        """Begin or go on for at most POLL_SECONDS; return True when it is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._thread.join(POLL_SECONDS)
        if self._thread.is_alive():
            return False
        if self._problem is not None:
            raise self._problem
        return True

    def _work(self) -> None:
        try:
            with writing(self._config.directory):
                self.resume = fetch(self._config, self.resume)
        except Exception as error:
            self._problem = error


def fetch(config: RunConfig, resume: str) -> str:
    """Do the work of `bring`, in one process."""
    url = resume if is_url(resume) else config.checkpoint.upload_to
    assert url is not None
    base, name = split_checkpoint(url)
    store = Store(base)
    own = [saved for saved in saved_checkpoints(config.directory) if saved.is_sound]
    try:
        wanted = store.stored(name) if name else store.newest()
    except StoreError as error:
        if resume == "auto" and own:
            say(f"warning: {error}. Training goes on from what is on the disk")
            return resume
        raise
    if wanted is None:
        if is_url(resume):
            raise ConfigError(f"--resume {resume}: holds no complete checkpoint. Give another URL")
        return resume
    if resume == "none":
        raise ConfigError(
            f"checkpoint.upload_to = {url}: holds a run already, and --resume none would mix "
            "another one with it. Resume (--resume auto), or set another URL"
        )
    if resume == "auto" and own:
        newest = own[-1].lineage
        assert newest is not None
        if wanted.lineage.branches[0].id != newest.branches[0].id:
            raise ConfigError(
                f"checkpoint.upload_to = {url}: holds another run's checkpoints "
                f"({wanted.name}), not those of {config.directory}. Set another URL"
            )
        if not newest.is_ancestor_of(wanted.lineage):
            return resume
    for stored in [wanted] if name else store.line_to(wanted):
        final = checkpoint_directory(config.directory, stored.step)
        there = read_lineage(final)
        try:
            if there is None or there.id != stored.lineage.id:
                _fetch_one(config, store, stored, final)
        except DamagedCheckpoint as error:
            say(f"warning: {error}. The checkpoint before it is tried")
            continue
        return resume if resume == "auto" else str(final)
    raise ConfigError(
        f"{store.url}: every checkpoint there is damaged. --resume one that is elsewhere"
    )


def _fetch_one(config: RunConfig, store: Store, stored: Stored, final: Path) -> None:
    """Download a checkpoint under a hidden name, verify it, and give it its name."""
    if supervised_attempt() is None:
        # Under a supervisor the run is held already.
        check_free(config.directory)
    if final.exists():
        raise ConfigError(
            f"{final}: is there already, and is not {store.url}/{stored.name}. Move it elsewhere, "
            "or train in another run.directory"
        )
    say(f"{config.directory}: downloading {store.url}/{stored.name}, {stored.bytes / 1e9:.2f} GB")
    partial = begin_partial(config.directory, stored.step, supervised_attempt())
    try:
        store.download(stored, partial)
        open_checkpoint(partial)
        publish_directory(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

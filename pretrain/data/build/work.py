"""Hold what the steps of one task share: the task, its output, its counts and its progress."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pretrain.config import ConfigError
from pretrain.data.build.folder import BuildFolder
from pretrain.data.build.merged import TokenTask, load_token_task
from pretrain.data.build.output import Output, clear
from pretrain.data.build.plan import TaskPlan, load_task
from pretrain.data.sources import Task
from pretrain.rundir.files import Json, replace_json

Stage = Literal["scan", "tokenize"]

PROGRESS_SECONDS = 1.0
EXAMPLES = 5
"""Reasons of skipped documents that a record keeps."""


class Stopped(RuntimeError):
    """Another task has failed, so this one is given up."""


class Work:
    """The task that a process is doing.

    The steps of a pipeline share one object, which holds nothing but the folder and the stage until
    a task begins, so that it travels to other processes and nodes.
    """

    plan: TaskPlan
    token_task: TokenTask
    """Only in the tokenize stage."""
    output: Output
    counts: Counter[str]
    skipped: list[str]

    def __init__(self, folder: BuildFolder, stage: Stage) -> None:
        """Prepare for any task of a stage."""
        self.folder = folder
        self.stage: Stage = stage

    def __getstate__(self) -> Json:
        return {"folder": self.folder, "stage": self.stage}

    def final(self, rank: int) -> Path:
        """Return the folder of a task's output."""
        if self.stage == "scan":
            return self.folder.scan(rank)
        split, number = load_token_task(self.folder, rank)[:2]
        return self.folder.tokens(split, number)

    @property
    def planned(self) -> int:
        """Return the task of the plan whose documents are read."""
        return self.rank if self.stage == "scan" else self.token_task.planned

    @property
    def holds_out(self) -> bool:
        """Return True for a task whose documents the merge has held out of a corpus."""
        return self.stage == "tokenize" and self.token_task.holds_out

    def leave_out(self, reason: str, text: str) -> None:
        """Count a document that is left out of training."""
        size = len(text.encode("utf-8", "surrogatepass"))
        self.counts[f"{reason}.documents"] += 1
        self.counts[f"{reason}.bytes"] += size
        self.advance(size)

    def begin(self, rank: int) -> None:
        """Begin a task: read its plan and make the folder of its output."""
        self.rank = rank
        self.counts, self.skipped = Counter(), []
        self._documents = self._bytes = 0
        self._reported = 0.0
        if self.stage == "scan":
            self.plan = load_task(self.folder, rank)
        else:
            self.token_task = load_token_task(self.folder, rank)
            self.plan = load_task(self.folder, self.token_task.planned)
        self.final(rank).parent.mkdir(exist_ok=True)
        clear(self.final(rank))
        self.output = Output(self.final(rank))

    def skip(self) -> Callable[[str], None] | None:
        """Return what the reader calls for a document that cannot be read; None to end the build.

        The scan counts them. The tokenize stage meets the same ones again.
        """
        limit = self.plan.cleaning.max_skipped_documents
        if not limit:
            return None

        def skip(reason: str) -> None:
            self.counts["skipped"] += 1
            self.skipped = [*self.skipped, reason][:EXAMPLES]
            if self.counts["skipped"] > limit:
                raise too_many_skipped(self.plan.corpus.name, limit, self.skipped)

        return skip

    def advance(self, size: int) -> None:
        """Count a document for the progress line, and look whether the build is still on."""
        self._documents += 1
        self._bytes += size
        now = time.monotonic()
        if now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            self._report()
            if self.folder.stop.exists():
                raise Stopped

    def publish(self, record: Json) -> None:
        """Publish the task's output."""
        self.output.publish(
            record | {"counts": dict(sorted(self.counts.items())), "skipped": self.skipped}
        )
        self._report()

    def _report(self) -> None:
        # Nobody waits for it and it may be lost, so a full disk or a slow server is passed over.
        with contextlib.suppress(OSError):
            replace_json(
                self.folder.progress / f"{self.stage}-{self.rank:06d}.json",
                {"documents": self._documents, "bytes": self._bytes, "pid": os.getpid()},
            )


def too_many_skipped(corpus: str, limit: int, reasons: list[str]) -> ConfigError:
    """Return the error of a corpus with more unreadable documents than are allowed."""
    return ConfigError(
        f"corpus {corpus}: more than cleaning.max_skipped_documents = {limit} documents cannot be "
        f"read, for example {'; '.join(reasons[:3])}. Repair the files, or raise the limit"
    )


def changed(folder: BuildFolder, task: Task, place: tuple[int, int] | None = None) -> ConfigError:
    """Return the error of a task whose documents are not those that the scan saw.

    Args:
        folder: The build.
        task: The task.
        place: The piece and the offset of the first other document; None if one is missing.
    """
    where = f"{task.pieces[place[0]].path}:{place[1]}" if place else task.pieces[-1].path
    return ConfigError(
        f"{where}: has changed since the build began. Remove {folder.path} to build from the text "
        "as it is now, or restore the file and run the command again"
    )

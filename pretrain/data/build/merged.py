"""Read what the merge found out about the whole corpus."""

from __future__ import annotations

from typing import NamedTuple

from pretrain.data.build.folder import BuildFolder
from pretrain.data.build.output import RECORD
from pretrain.data.document import Split
from pretrain.rundir.files import Json, read_json

HELD_OUT_SEQUENCES, HELD_OUT_HASHES = "held-out.bin", "held-out-hashes.npy"


class TokenTask(NamedTuple):
    """A task of the tokenize stage."""

    split: Split
    number: int
    """Position among the tasks of the split."""
    planned: int
    """The task of the plan that it reads; for held-out documents the first one of their corpus."""
    holds_out: bool
    """Its documents are those that the merge has held out of a corpus."""


class Cut(NamedTuple):
    """The place at which the only document of a data set is cut into training and validation."""

    task: int
    """The task of the plan that holds it, as its first document."""
    characters: int
    """Those of the training part."""


def token_tasks(merge: Json) -> list[TokenTask]:
    """Return the tasks of the tokenize stage, those of train first."""
    return [TokenTask(*each) for each in merge["token_tasks"]]


def load_merge(folder: BuildFolder) -> Json:
    """Return the record of the merge; {} before it is done."""
    return read_json(folder.merge / RECORD, most=None)


def load_token_task(folder: BuildFolder, rank: int) -> TokenTask:
    """Return a task of the tokenize stage."""
    return token_tasks(load_merge(folder))[rank]


def cut_of(merge: Json) -> Cut | None:
    """Return where the only document is cut, if the data set has a single one."""
    return Cut(*merge["cut"]) if merge["cut"] else None

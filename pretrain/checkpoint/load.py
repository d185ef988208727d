"""Load a checkpoint that was saved on any layout: into this layout, or into full tensors.

Each process reads only the boxes that it needs, and verifies every block that it reads. A run whose
newest checkpoint is in a store downloads it first.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain.checkpoint.format import (
    ITEM_BYTES,
    BlockReader,
    Chunk,
    DamagedCheckpoint,
    FileRecord,
    global_boxes,
)
from pretrain.checkpoint.manifest import (
    MASTER,
    REMEDY,
    Checkpoint,
    TrainerState,
    open_checkpoint,
)
from pretrain.checkpoint.store import Store, Stored, StoreError, split_checkpoint
from pretrain.config import ConfigError, RunConfig, writing
from pretrain.config.errors import say
from pretrain.config.run import is_url
from pretrain.model.gpt import Named, initial_part, named_parameters
from pretrain.optim.zero import Fragment, ZeroOptimizer
from pretrain.positions.base import PositionMethod
from pretrain.processes import in_background
from pretrain.rundir.attempts import check_free
from pretrain.rundir.checkpoints import (
    begin_partial,
    checkpoint_directory,
    read_lineage,
    saved_checkpoints,
)
from pretrain.rundir.files import publish_directory
from pretrain.topology import Topology, first_problem, on_main, supervised_attempt

SLAB_BYTES = 32 << 20
"""Largest number of bytes that are read before they are copied to their target."""
TASK_BYTES = 256 << 20
"""Approximate number of bytes of a file that one thread reads."""
NUM_THREADS = 4


class Target(NamedTuple):
    """A box of a global tensor, and the memory to read it into."""

    name: str
    """The global tensor: "<kind>/<parameter>"."""
    offset: tuple[int, ...]
    values: Tensor
    """Has the shape of the box, any device, and any dtype to which fp32 can be cast."""


def load_checkpoint(
    checkpoint: Checkpoint, optimizer: ZeroOptimizer, config: RunConfig
) -> TrainerState:
    """Load weights and optimizer state into an optimizer. All ranks call this together.

    Args:
        checkpoint: The opened checkpoint.
        optimizer: The optimizer. Its model's weights are loaded too.
        config: The run. If its position method differs from the checkpoint's, the method's
            parameters start from their initial values (`begins_anew`).

    Returns:
        How far training had come.

    Raises:
        DamagedCheckpoint: A file is damaged. The optimizer may be partly loaded: load another
            checkpoint into it, or end. Every rank raises the error.
        ConfigError: A parameter's shape is not the checkpoint's. Every rank raises the error.
    """
    optimizer.before_change()
    # The state's tensors are views of the optimizer's buffers, so filling them loads the state.
    anew = begins_anew(checkpoint.config.position, config)
    targets: list[Target] = []
    for each in optimizer.state().fragments:
        if each.named.name in anew:
            set_initial(config, each)
            continue
        for kind, flat in each.tensors.items():
            targets += _targets(kind, each.named, each.start, flat)
    _load(checkpoint, (p for p in optimizer.parameters if p.name not in anew), targets)
    optimizer.load_state(checkpoint.adam_steps, checkpoint.loss_scaler_state)
    return checkpoint.trainer_state


def load_initial(
    config: RunConfig, optimizer: ZeroOptimizer, loss_scaler: dict[str, float] | None
) -> None:
    """Set the optimizer to what a run from scratch begins with. All ranks together.

    Args:
        config: The run.
        optimizer: The optimizer; its model is set with it.
        loss_scaler: fp16: the fields of the loss scaler at the start.
    """
    optimizer.before_change()
    for fragment in optimizer.state().fragments:
        set_initial(config, fragment)
    optimizer.load_state(0, loss_scaler)


def load_weights(checkpoint: Checkpoint, chunks: list[GPTModel]) -> None:
    """Load only a newly built model's weights, cast to its dtype. All ranks call this together.

    Parameters that `begins_anew` lists keep their initial values.

    Raises:
        DamagedCheckpoint, ConfigError: As `load_checkpoint`.
    """
    anew = begins_anew(checkpoint.config.position, chunks[0].position.config)
    parameters = [p for p in named_parameters(chunks) if p.name not in anew]
    flat = [(p, p.parameter.data.view(-1)) for p in parameters]
    _load(checkpoint, parameters, (t for p, x in flat for t in _targets(MASTER, p, 0, x)))


def begins_anew(before: PositionMethod, config: RunConfig) -> set[str]:
    """Return the position method's parameters that are not loaded from a checkpoint.

    If the method has changed, these are all of its parameters. With the same method they are those
    that it did not learn before, and those whose initial values its keys have changed, such as
    slopes. They start at their initial values with moments of zero. Parameters of the checkpoint
    that are no longer learned are not read.

    Args:
        before: The section [position] of the checkpoint.
        config: The run that resumes from it.
    """
    now = config.position
    learned, known = now.tensors(config), set(before.tensors(config))
    if before.method != now.method:
        return set(learned)
    old, new = before.initial_values(config), now.initial_values(config)
    given = learned.keys() & old.keys()
    return (learned.keys() - known) | {n for n in given if not torch.equal(old[n], new[n])}


@torch.no_grad()
def set_initial(config: RunConfig, fragment: Fragment) -> None:
    """Set a part of the optimizer's state to its value at the start of a new run."""
    values = initial_part(config, fragment.named).view(-1)
    for kind, flat in fragment.tensors.items():
        begin = values[fragment.start :][: flat.numel()]
        flat.copy_(begin if kind == MASTER else torch.zeros_like(flat))


class GlobalState(Mapping[str, Tensor]):
    """Global name -> full fp32 tensor, read from the checkpoint at every access.

    Reads happen in this process alone, and raise DamagedCheckpoint if a block is damaged.
    """

    def __init__(self, checkpoint: Checkpoint, kind: str = MASTER) -> None:
        """Store the arguments, without reading.

        Args:
            checkpoint: The opened checkpoint.
            kind: MASTER, or one of the optimizer's moments.
        """
        self._checkpoint, self._kind, self._shapes = checkpoint, kind, checkpoint.shapes

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty(self._shapes[name])
        read_into(self._checkpoint, [Target(f"{self._kind}/{name}", (0,) * tensor.dim(), tensor)])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def load_global_state(checkpoint: Checkpoint, kind: str = MASTER) -> dict[str, Tensor]:
    """Return every tensor of `GlobalState` at once.

    Raises:
        DamagedCheckpoint: A file is damaged.
    """
    return dict(GlobalState(checkpoint, kind))


def read_into(checkpoint: Checkpoint, targets: Iterable[Target]) -> None:
    """Fill the targets in this process alone.

    Args:
        checkpoint: The opened checkpoint.
        targets: Boxes within the checkpoint's tensors.

    Raises:
        DamagedCheckpoint: A block differs from what was written.
    """
    files = checkpoint.index.files
    by_file: dict[int, list[_Copy]] = {}
    for copy in _copies(checkpoint, targets):
        by_file.setdefault(copy.chunk.file, []).append(copy)
    tasks = [
        (files[number], share)
        for number, copies in by_file.items()
        for share in _shares(sorted(copies, key=lambda copy: copy.start))
    ]
    try:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(lambda task: _read_file(checkpoint.path, *task), tasks))
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}. {REMEDY}") from None


# ---- on all ranks --------------------------------------------------------------------------------
def _load(checkpoint: Checkpoint, parameters: Iterable[Named], targets: Iterable[Target]) -> None:
    """Compare the shapes and fill the targets. Raise the first problem on every rank."""
    problem: ConfigError | None = None
    try:
        _check_shapes(checkpoint, parameters)
        read_into(checkpoint, targets)
    except ConfigError as error:
        problem = error
    # Share problems, because ranks without one would otherwise wait in their next collective for a
    # rank that has ended.
    if found := first_problem(problem):
        raise found


def _check_shapes(checkpoint: Checkpoint, parameters: Iterable[Named]) -> None:
    """Raise ConfigError about the first parameter whose shape differs from the checkpoint's."""
    shapes = checkpoint.shapes
    for named in parameters:
        saved = shapes.get(named.name)
        if saved != tuple(named.global_shape):
            raise ConfigError(
                f"{checkpoint.path}: its {named.name} is {list(saved) if saved else 'absent'}, "
                f"the config's is {list(named.global_shape)}. [model], [position] and "
                "data.vocab_size must be those of the run that saved it"
            )


def _targets(kind: str, named: Named, start: int, flat: Tensor) -> Iterator[Target]:
    """Yield the targets that fill `flat` with a parameter's elements from `start` on."""
    position = 0
    for offset, size in global_boxes(named.parts, start, start + flat.numel()):
        count = math.prod(size)
        yield Target(f"{kind}/{named.name}", offset, flat.narrow(0, position, count).view(size))
        position += count


# ---- from files to tensors -----------------------------------------------------------------------
class _Copy(NamedTuple):
    """The intersection of a chunk and a target: which rows of the chunk to read, and where to."""

    chunk: Chunk
    rows: tuple[int, int]
    """First and last row of the chunk, along its first axis."""
    inside: tuple[slice, ...]
    """The part of each row that belongs to the target."""
    values: Tensor
    """The target's memory for it, [rows, ...]."""

    @property
    def row_bytes(self) -> int:
        return ITEM_BYTES * math.prod(self.chunk.size[1:])

    @property
    def start(self) -> int:
        """Return the position of the first byte in the file."""
        return self.chunk.start + self.rows[0] * self.row_bytes

    @property
    def bytes(self) -> int:
        return (self.rows[1] - self.rows[0]) * self.row_bytes


def _copies(checkpoint: Checkpoint, targets: Iterable[Target]) -> Iterator[_Copy]:
    """Yield the copies that fill the targets."""
    for name, offset, values in targets:
        if not values.dim():
            chunk = checkpoint.index.tensors[name].chunks[0]
            yield _Copy(chunk._replace(offset=(0,), size=(1,)), (0, 1), (), values.view(1))
            continue
        for chunk in checkpoint.index.overlapping(name, offset, values.shape):
            begin = [max(a, b) for a, b in zip(offset, chunk.offset)]
            ends = zip(offset, values.shape, chunk.offset, chunk.size)
            end = [min(o + n, c + m) for o, n, c, m in ends]
            inside = [slice(b - c, e - c) for b, e, c in zip(begin, end, chunk.offset)]
            target = values[tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offset))]
            rows = inside[0].start, inside[0].stop
            yield _Copy(chunk, rows, tuple(inside[1:]), target)


def _shares(copies: Sequence[_Copy]) -> Iterator[list[_Copy]]:
    """Split the copies from one file into shares for threads, in the order of the file."""
    share: list[_Copy] = []
    size = 0
    for copy in copies:
        share.append(copy)
        size += copy.bytes
        if size >= TASK_BYTES:
            yield share
            share, size = [], 0
    if share:
        yield share


def _read_file(directory: Path, record: FileRecord, copies: Sequence[_Copy]) -> None:
    """Fill targets from one file."""
    with closing(BlockReader(directory, record)) as file, torch.no_grad():
        for copy in copies:
            rows_at_once = max(1, SLAB_BYTES // max(1, copy.row_bytes))
            first, last = copy.rows
            for row in range(first, last, rows_at_once):
                count = min(rows_at_once, last - row)
                data = file.read(copy.chunk.start + row * copy.row_bytes, count * copy.row_bytes)
                source = data.view(np.float32).reshape(count, *copy.chunk.size[1:])
                target = copy.values[row - first : row - first + count]
                # `source` stays unchanged, because the reader may keep a part of it.
                target.copy_(torch.from_numpy(source[(slice(None), *copy.inside)]))


# ---- Download the newest checkpoint of a store to an empty node ----


POLL_SECONDS = 60.0
"""The longest time for which the other ranks wait in a collective while rank 0 downloads."""


def check_store(config: RunConfig, resume: str) -> None:
    """Check that the packages for the run's URLs are installed. Every process calls this.

    Raises:
        ConfigError: A package is missing.
    """
    for url in (config.checkpoint.upload_to, resume if is_url(resume) else None):
        if url is not None:
            Store(split_checkpoint(url)[0])


def bring(config: RunConfig, topology: Topology, resume: str) -> str:
    """Download the checkpoint to resume from, if it is in a store. All ranks together.

    With "auto" it is downloaded if checkpoint.upload_to has a checkpoint that descends from the
    run's newest one, or if the run has none, as on the empty disk of another node.

    Args:
        config: The run.
        topology: The processes' layout.
        resume: "auto", "none", a path or a URL.

    Returns:
        The new value of `resume`: a path in place of a URL.

    Raises:
        ConfigError: The store holds no such checkpoint, or another run's.
        RunFailed: The store cannot be read, or the checkpoint cannot be written.
    """
    is_stored = config.checkpoint.upload_to is not None and resume in ("auto", "none")
    if not is_url(resume) and not is_stored:
        return resume

    def work() -> str:
        with writing(config.directory):
            return fetch(config, resume)

    # On other ranks this is a placeholder whose result is never used.
    download = in_background(work) if topology.is_main else Future[str]()
    while not on_main(topology, lambda: bool(wait([download], POLL_SECONDS).done), bool):
        pass
    return on_main(topology, download.result, str)


def fetch(config: RunConfig, resume: str) -> str:
    """Do the work of `bring`, in one process."""
    url = resume if is_url(resume) else config.checkpoint.upload_to
    assert url is not None
    base, name = split_checkpoint(url)
    store = Store(base)
    own = [saved for saved in saved_checkpoints(config.directory) if saved.is_sound]
    try:
        if url == config.checkpoint.upload_to:
            store.check_is_of(config.directory, starts=True)
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
        is_here = there is not None and there.id == stored.lineage.id
        try:
            if not is_here:
                is_own = store.url == (config.checkpoint.upload_to or "").rstrip("/")
                with_records = is_own and (resume == "auto" or not own)
                _fetch_one(config, store, stored, with_records)
        except DamagedCheckpoint as error:
            say(f"warning: {error}. The checkpoint before it is tried")
            continue
        return resume if resume == "auto" else str(final)
    raise ConfigError(
        f"{store.url}: every checkpoint there is damaged. --resume one that is elsewhere"
    )


def _fetch_one(config: RunConfig, store: Store, stored: Stored, with_records: bool) -> None:
    """Download a checkpoint under a hidden name, verify it, and give it its name."""
    final = checkpoint_directory(config.directory, stored.step)
    if supervised_attempt() is None:
        # A supervisor would already hold the run.
        check_free(config.directory)
    if final.exists():
        raise ConfigError(
            f"{final}: is there already, and is not {store.url}/{stored.name}. Move it elsewhere, "
            "or train in another run.directory"
        )
    say(f"{config.directory}: downloading {store.url}/{stored.name}, {stored.bytes / 1e9:.2f} GB")
    partial = begin_partial(config.directory, stored.step, supervised_attempt())
    try:
        if with_records:
            # First, because a checkpoint that is here is not downloaded again.
            store.download_records(stored, config.directory)
        store.download(stored, partial)
        open_checkpoint(partial)
        publish_directory(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

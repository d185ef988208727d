"""Save a run while it trains: every rank writes its part of one checkpoint, for any layout.

A save begins by copying the state into host memory while the next step computes, because the state
only changes in that step's update. Each rank's writing process (`writer`) then writes and hashes
the copy. When all parts are on the disk, rank 0's process publishes the checkpoint. A problem on
any rank is an error on all ranks, by the next step.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pretrain import platform
from pretrain.checkpoint.format import (
    BITS_MASK,
    DamagedCheckpoint,
    Part,
    Piece,
    Values,
    global_boxes,
    write_part,
)
from pretrain.checkpoint.manifest import (
    MASTER,
    Checkpoint,
    Origin,
    TrainerState,
    lineage_content,
    state_content,
)
from pretrain.checkpoint.writer import Publication, Writer, publish
from pretrain.config import ConfigError, RunConfig, RunFailed, dump_config, writing
from pretrain.config.errors import say
from pretrain.config.trajectory import DIGITS, TOKENIZER
from pretrain.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from pretrain.optim.health import checksum
from pretrain.optim.zero import Fragment, ZeroOptimizer
from pretrain.rundir.checkpoints import (
    begin_partial,
    check_still_holds,
    checkpoint_directory,
    new_id,
    writing_as_holder,
)
from pretrain.rundir.files import replace_file
from pretrain.rundir.metrics import WarnOnce
from pretrain.topology import Process, Topology, first_problem, gather, on_main, ranks_here

# ---- Write a checkpoint's tokenizer; load it from the checkpoint or from its data set ----


def tokenizer_of(checkpoint: Checkpoint, data_directory: Path) -> Tokenizer:
    """Return the tokenizer that a checkpoint was trained with.

    Checkpoints hold their tokenizer, except those of a model that was imported without one. For
    these the data set's tokenizer is used, and a line on stderr says so.

    Args:
        checkpoint: The opened checkpoint.
        data_directory: data.directory of its config.

    Raises:
        ConfigError: The data set has no tokenizer, or a different one.
    """
    if checkpoint.tokenizer_file is not None:
        return load_tokenizer(checkpoint.path / checkpoint.tokenizer_file)
    path = find_tokenizer(data_directory)
    tokenizer = load_tokenizer(path)
    trained = checkpoint.origin.data.get(TOKENIZER)
    if trained not in (None, tokenizer.fingerprint):
        raise ConfigError(
            f"{path}: its SHA-256 is {tokenizer.fingerprint[:DIGITS]}..., {checkpoint.path} was "
            f"trained with {str(trained)[:DIGITS]}.... Give that tokenizer's data set "
            "(data.directory)"
        )
    if Process.from_environment().rank == 0:
        say(f"{checkpoint.path}: carries no tokenizer, so {path} is used")
    return tokenizer


def put_tokenizer(tokenizer: Tokenizer | None, partial: Path) -> None:
    """Write the tokenizer to a checkpoint's hidden directory; `publish` flushes it to the disk."""
    if tokenizer is not None:
        replace_file(partial / tokenizer.file_name, tokenizer.content)


MEMORY_MARGIN = 1.2
"""Saves are asynchronous if the available memory is at least this many times that of the copy."""
CLOSE_SECONDS = 20
"""How long a process that ends early waits for its last save, in seconds."""


@dataclass
class _Save:
    """A save in progress."""

    id: str
    step: int
    partial: Path
    final: Path
    publication: Publication
    problem: RunFailed | None = None
    """The first problem on this rank so far."""
    is_beside: bool = False
    """True if the writing process writes it while training continues."""


class Saver:
    """Saves a run's checkpoints, one at a time."""

    def __init__(
        self,
        config: RunConfig,
        topology: Topology,
        optimizer: ZeroOptimizer,
        attempt: Path | None = None,
        warn: WarnOnce | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Allocate memory for copies of the state. All ranks call this together.

        Args:
            config: The run, of which run.directory and [checkpoint] are used.
            topology: The processes' layout.
            optimizer: The optimizer, whose master weights are saved as the model's weights.
            attempt: RUN/attempts/#### that must still hold the run; only rank 0's is used.
            warn: Called with warnings, such as old checkpoints that cannot be deleted.
            tokenizer: The run's tokenizer, which every checkpoint holds.
        """
        self._attempt, self._warn = attempt, warn or WarnOnce()
        self._tokenizer = tokenizer
        self._config, self._topology, self._optimizer = config, topology, optimizer
        self._writer = Writer()
        self._save: _Save | None = None
        self._copy: platform.HostCopy | None = None
        self._pinned: torch.Tensor | None = None
        self._memory: torch.Tensor | None = None
        if config.checkpoint.asynchronous:
            # Allocated during the first steps, so that the first save does not wait for it.
            part, _ = lay_out(topology.rank, optimizer.state().fragments)
            self._memory = self._make_memory(part)
        self._writing: threading.Thread | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Return True if training continues while a save is written; the same on every rank."""
        return self._memory is not None

    @property
    def has_problem(self) -> bool:
        """Return True if this rank knows of a problem with the save in progress."""
        save = self._save
        return save is not None and bool(save.problem or self._writer.problem)

    @property
    def is_busy(self) -> bool:
        """Return True while a save is in progress; the same on every rank."""
        return self._save is not None

    @property
    def published_step(self) -> int | None:
        """Return, on rank 0, the step of the save in progress if it has been published by now."""
        save, writing = self._save, self._writing
        if save is None or save.problem or not save.is_beside:
            return None
        is_written = writing is not None and not writing.is_alive() and self._writer.is_idle
        return save.step if is_written else None

    def begin(
        self,
        trainer_state: TrainerState,
        origin: Origin,
        prepare: Callable[[], None] | None = None,
    ) -> str:
        """Begin to save RUN/checkpoints/step-########. All ranks call this together.

        This first waits for the previous save. Everything is written to a hidden directory, which
        is renamed when it is complete, so a checkpoint with its final name is never partial.

        Args:
            trainer_state: How far training has come.
            origin: History of the state.
            prepare: Called on rank 0 before anything is written; if it raises, all ranks raise.

        Returns:
            The new checkpoint's id.

        Raises:
            RunFailed: The previous save failed, the hidden directory cannot be created, or
                (Superseded) another attempt has taken over the run.
        """
        self.finish()
        state = self._optimizer.state()
        step = trainer_state.step
        identifier, partial = on_main(
            self._topology,
            lambda: (new_id(), self._begin_partial(step, prepare)),
            tuple[str, Path],
        )
        final = checkpoint_directory(self._config.directory, step)
        publication = Publication(
            partial=str(partial),
            final=str(final),
            attempt=str(self._attempt) if self._attempt else None,
            keep=self._config.checkpoint.model_dump(include={"keep", "keep_every", "keep_best"}),
            world_size=self._topology.layout.world_size,
            lineage=lineage_content(identifier, step, origin),
            state=state_content(trainer_state, state.adam_steps, state.loss_scaler_state, origin),
            config=dump_config(self._config),
            tokenizer=self._tokenizer.file_name if self._tokenizer else None,
        )
        self._save = _Save(identifier, step, partial, final, publication)
        part, tensors = lay_out(self._topology.rank, state.fragments)
        if self._memory is not None:
            self._begin_beside(part, tensors, self._memory)
        else:
            self._write_here(part, tensors)
        return identifier

    def finish(self) -> None:
        """Wait until any save in progress is published. All ranks call this together.

        Raises:
            RunFailed: A part could not be written, on this or another rank. All ranks raise it.
        """
        save = self._save
        if save is None:
            return
        if save.is_beside:
            self._before_change()
            # Do not wait for the second of rank 0's two commands: publishing needs all ranks.
            self._note_problem(save, unanswered=int(self._topology.is_main))
        problem = first_problem(save.problem)
        self._save = None
        try:
            if problem is not None:
                # If another attempt has taken the run, it has removed the directory: raise that
                # as the reason.
                on_main(self._topology, lambda: check_still_holds(self._attempt))
                raise problem
            on_main(self._topology, lambda: self._publish(save))
        except (RunFailed, DamagedCheckpoint):
            self._give_up(save)
            raise

    def close(self) -> None:
        """End the writing process.

        After a failure or Ctrl-C a save may be in progress. This waits for it for a limited time,
        without the other ranks, which may be gone. The checkpoint is published if all of its parts
        are written.
        """
        self._optimizer.before_change = lambda: None
        if self._copy is not None:
            self._copy.wait()
        if self._save is not None and self._save.is_beside and self._writing is not None:
            self._writing.join(CLOSE_SECONDS)
            self._writer.settle(CLOSE_SECONDS)
        if self._pinned is not None:
            platform.unpin(self._pinned)
        self._writer.close()
        if self._save is not None and self._topology.is_main:
            # A published checkpoint has its final name, so this removes only an unfinished one.
            shutil.rmtree(self._save.partial, ignore_errors=True)

    # ---- the two ways to write ----
    def _make_memory(self, part: Part) -> torch.Tensor | None:
        """Return memory for a copy of the state, fp32; None if any rank's host has too little."""
        needed = int(MEMORY_MARGIN * part.data_bytes * ranks_here())
        available = platform.available_memory()
        memory = None
        if needed <= available:
            # A limit on memory, processes or file sizes may still refuse the allocation.
            with contextlib.suppress(OSError):
                shared = self._writer.memory(part.data_bytes)
                self._writer.make_pages()
                memory = torch.from_numpy(shared)
        # Either all ranks save synchronously or none does, because a checkpoint is published when
        # the training process of every rank knows that its part is written.
        own = (needed, available) if memory is None else None
        needs = next(filter(None, gather(own, tuple[int, int] | None)), None)
        if needs is not None:
            if self._topology.is_main:
                needed_gb, available_gb = (count / 1e9 for count in needs)
                say(
                    f"checkpoint.asynchronous: a copy of the state needs {needed_gb:.1f} GB of "
                    f"memory on each node, {available_gb:.1f} GB are available; training waits for "
                    "its saves"
                )
            self._writer.close()
            return None
        assert memory is not None
        self._pinned = memory if platform.pin(memory) else None
        return memory

    def _begin_beside(self, part: Part, tensors: list[torch.Tensor], memory: torch.Tensor) -> None:
        """Copy the state while training continues, and have the writing process write the copy.

        Args:
            part: The pieces of the rank's file.
            tensors: The values of each piece.
            memory: Memory for the copy.
        """
        assert self._save is not None
        # Like the copy, this runs after the last update and before the next one.
        bits = _sum_of_bits(tensors)
        copy = platform.HostCopy(tensors, list(torch.split(memory, [t.numel() for t in tensors])))
        self._copy, self._optimizer.before_change = copy, self._before_change
        save, is_main = self._save, self._topology.is_main
        save.is_beside = True

        def write() -> None:
            try:
                with writing(save.final):
                    copy.wait()
                    self._writer.write(save.partial, part, int(bits.numbers()[0]))
                    if is_main:
                        self._writer.publish(save.publication)
            # A thread's error would be printed, and the save taken for done.
            except Exception as error:
                save.problem = error if isinstance(error, RunFailed) else RunFailed(repr(error))

        self._writing = threading.Thread(target=write, daemon=True)
        self._writing.start()

    def _before_change(self) -> None:
        """Delay changes of the state until it has been copied."""
        if self._copy is not None:
            self._copy.before_change()

    def _write_here(self, part: Part, tensors: list[torch.Tensor]) -> None:
        """Write the state in this process, while training waits."""
        save = self._save
        assert save is not None
        try:
            with writing(save.final):
                bits = int(_sum_of_bits(tensors).numbers()[0])
                write_part(save.partial, part, (t.detach().cpu().numpy() for t in tensors), bits)
        except RunFailed as error:
            save.problem = error
        except KeyboardInterrupt:
            # Free space, because the disk may be full.
            shutil.rmtree(save.partial, ignore_errors=True)
            raise

    # ---- the end of a save ----
    def _note_problem(self, save: _Save, unanswered: int) -> None:
        """Wait until this rank's part is written, and record any problem."""
        assert self._writing is not None
        self._writing.join()
        try:
            with writing(save.final):
                self._writer.wait(unanswered)
        except RunFailed as error:
            save.problem = save.problem or error

    def _publish(self, save: _Save) -> None:
        """Publish the checkpoint once all of its parts are written. Called on rank 0 only."""
        with writing_as_holder(save.final, self._attempt):
            if save.is_beside:
                self._writer.all_written(save.id)
                warnings = self._writer.wait()
            else:
                warnings = publish(save.publication)
        for warning in warnings:
            self._warn("deletion", warning)

    def _give_up(self, save: _Save) -> None:
        """Delete the files of a failed save, to free space on a full disk."""
        if not self._topology.is_main:
            return
        if save.is_beside:
            # The process may be waiting for a part that will never arrive.
            self._writer.end()
        shutil.rmtree(save.partial, ignore_errors=True)

    def _begin_partial(self, step: int, prepare: Callable[[], None] | None) -> Path:
        """Create the hidden directory that all ranks write to. Called on rank 0 only."""
        if prepare is not None:
            prepare()
        with writing_as_holder(checkpoint_directory(self._config.directory, step), self._attempt):
            partial = begin_partial(self._config.directory, step, self._attempt)
            put_tokenizer(self._tokenizer, partial)
            return partial


def lay_out(rank: int, fragments: Iterable[Fragment]) -> tuple[Part, list[torch.Tensor]]:
    """Lay out a rank's file.

    Args:
        rank: The rank.
        fragments: Its optimizer state, from `ZeroOptimizer.state`. Copies of parameters that
            another model-parallel rank saves are left out.

    Returns:
        The pieces of the file, and the values of each piece, fp32 [n] on the device.
    """
    pieces, tensors = [], []
    for fragment in fragments:
        named = fragment.named
        if named.is_copy:
            continue
        for kind, flat in fragment.tensors.items():
            boxes = global_boxes(named.parts, fragment.start, fragment.start + flat.numel())
            pieces.append(Piece(f"{kind}/{named.name}", tuple(named.global_shape), boxes))
            tensors.append(flat)
    return Part(rank, tuple(pieces)), tensors


def _sum_of_bits(tensors: list[torch.Tensor]) -> platform.Readback:
    """Start to compute the checksum of tensors on the device that `write_part` compares."""
    sums = [checksum(tensor) for tensor in tensors] or [torch.zeros((), dtype=torch.int64)]
    return platform.Readback((torch.stack(sums).sum(0, keepdim=True) & BITS_MASK).double())


# ---- Write a checkpoint from full weights in one process, as for an imported model ----


def write_checkpoint(
    run: Path,
    config: RunConfig,
    masters: Mapping[str, torch.Tensor],
    trainer_state: TrainerState,
    origin: Origin,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write a checkpoint from full weights, in this process alone. All moments are zero.

    Args:
        run: The run's directory.
        config: The config to save in the checkpoint.
        masters: Global name -> full weights of every parameter.
        trainer_state: How far training has come.
        origin: History of the state.
        tokenizer: The model's tokenizer, if it is known.

    Returns:
        The checkpoint's directory.

    Raises:
        RunFailed: The disk refused the write, or a weight is not finite.
    """
    final = checkpoint_directory(run, trainer_state.step)
    pieces = tuple(
        Piece(f"{kind}/{name}", tuple(whole.shape), (((0,) * whole.dim(), tuple(whole.shape)),))
        for name, whole in masters.items()
        for kind in (MASTER, *config.moments)
    )

    def values() -> Iterator[Values]:
        for master in masters.values():
            flat = master.detach().float().contiguous().view(-1).numpy()
            yield flat
            for _ in config.moments:
                yield np.zeros_like(flat)

    with writing(final):
        partial = begin_partial(run, trainer_state.step, None)
        put_tokenizer(tokenizer, partial)
        write_part(partial, Part(0, pieces), values())
        publish(
            Publication(
                partial=str(partial),
                final=str(final),
                lineage=lineage_content(new_id(), trainer_state.step, origin),
                state=state_content(trainer_state, 0, None, origin),
                config=dump_config(config),
                tokenizer=tokenizer.file_name if tokenizer else None,
            )
        )
    return final

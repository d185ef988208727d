"""Write checkpoints in a separate process while training continues.

The training process copies its state into memory that it shares with this process, and continues.
This process writes and hashes the state; on rank 0 it also waits for the other ranks' parts and
publishes the checkpoint. It imports no torch, has no signal handlers, and ends with the training
process.

Commands arrive as lines of JSON on stdin; each is answered with a line on stdout:
  {"do": "make pages"}              have the kernel make the pages of the shared memory
  {"do": "write", ...}              write this rank's part from the shared memory
  {"do": "publish", ...}            wait for all parts and publish
  {"do": "all written", "id": ...}  not answered: every part of this checkpoint is on the disk
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from pretrain.checkpoint.format import (
    CONFIG,
    FORMAT,
    INDEX,
    ITEM_BYTES,
    REQUIRED,
    STATE,
    Index,
    Part,
    Piece,
    PoisonedState,
    checksum,
    describe,
    merge,
    split_values,
    write_part,
)
from pretrain.config import RunFailed
from pretrain.processes import start_beside
from pretrain.rundir.checkpoints import MANIFEST, Superseded, publish_checkpoint
from pretrain.rundir.files import adapter, flush, replace_file, replace_json
from pretrain.rundir.history import Policy, remove_old

# ---- Complete a checkpoint when all of its parts are written, and give it its name ----


POLL_SECONDS = 0.05
"""Time between two looks for the parts of other ranks."""


@dataclass(frozen=True)
class Publication:
    """Everything that is needed to complete and publish a checkpoint; fits into JSON."""

    partial: str
    """The hidden directory, in which every rank writes its part."""
    final: str
    """The checkpoint's directory."""
    lineage: dict[str, Any]
    """The manifest's entries that identify the checkpoint."""
    state: dict[str, Any]
    """The content of state.json."""
    config: str
    """The content of config.toml."""
    tokenizer: str | None = None
    """Name of the tokenizer's file in the hidden directory; None without a tokenizer."""
    attempt: str | None = None
    """RUN/attempts/#### that must still hold the run; None for a save without an attempt."""
    keep: dict[str, Any] = field(default_factory=dict)
    """The fields of the `Policy`, which are keys of [checkpoint]."""
    world_size: int = 1


class Patience:
    """The news for a publisher that waits for the parts of other ranks."""

    all_written: str = ""
    """The id of the checkpoint whose parts are all on the disk."""


def publish(publication: Publication, patience: Patience | None = None) -> list[str]:
    """Wait for all parts of a checkpoint, complete it and give it its name.

    Args:
        publication: The checkpoint.
        patience: What is known of the other ranks; None if all parts are written.

    Returns:
        Warnings about problems that do not affect the checkpoint.

    Raises:
        DamagedCheckpoint: The parts do not form a complete checkpoint.
        Superseded: Another attempt has taken over the run; nothing is published.
        OSError: The disk refused the write.
    """
    partial, identifier = Path(publication.partial), publication.lineage["id"]
    names = [Part(rank, ()).record_name for rank in range(publication.world_size)]
    # List the directory instead of looking up each name, because an NFS client remembers for a long
    # time that a name did not exist. Once all parts are written, opening them asks the server.
    while patience is not None and patience.all_written != identifier:
        if set(names) <= set(os.listdir(partial)):
            break
        time.sleep(POLL_SECONDS)
    index = merge((partial / name).read_bytes() for name in names)
    _write_small_files(partial, publication, index)
    for name in names:
        (partial / name).unlink()
    flush(partial)
    final = Path(publication.final)
    publish_checkpoint(
        partial, final, Path(publication.attempt) if publication.attempt is not None else None
    )
    warnings: list[str] = []
    policy = Policy(**publication.keep)
    try:
        remove_old(final.parents[1], final, policy, lambda _, message: warnings.append(message))
    except OSError as error:
        # The checkpoint is published, so the save has not failed.
        warnings.append(f"{final.parent}: old checkpoints are not deleted ({error})")
    return warnings


def _write_small_files(directory: Path, publication: Publication, index: Index) -> None:
    """Write the small files, the manifest last: a checkpoint with a manifest is complete."""
    # Durable, because after a power cut the checkpoint's name may be on the disk, and then the
    # content of its files must be too.
    replace_file(directory / INDEX, index.dump(), durable=True)
    replace_json(directory / STATE, publication.state, durable=True, indent=2)
    replace_file(directory / CONFIG, publication.config, durable=True)
    files: dict[str, dict[str, Any]] = {f.name: {"bytes": f.bytes} for f in index.files}
    small = list(REQUIRED)
    if publication.tokenizer is not None:
        flush(directory / publication.tokenizer)
        small.append(publication.tokenizer)
    files |= {name: describe(directory / name) for name in small}
    manifest = {"format": FORMAT, **publication.lineage, "files": files}
    manifest["checksum"] = checksum(manifest)
    replace_json(directory / MANIFEST, manifest, durable=True, indent=2)


_MADV_POPULATE_WRITE = 23
"""From linux/mman.h; Python's mmap has no constant for it."""


# ---- in the training process ---------------------------------------------------------------------
class Writer:
    """The handle of this rank's writing process in the training process."""

    def __init__(self) -> None:
        """Initialize without starting the process, which the first command starts."""
        self._process: subprocess.Popen[str] | None = None
        self._descriptor = -1
        self._has_ended = False
        self._unanswered = 0
        self.problem: Exception | None = None
        """The first error since the last `wait`; None if there was none."""
        self._warnings: list[str] = []
        self._changed = threading.Condition()

    @property
    def is_idle(self) -> bool:
        """Return True if every command has been carried out without a problem."""
        return not self._unanswered and self.problem is None

    def memory(self, num_bytes: int) -> NDArray[np.float32]:
        """Return memory that is shared with the process; called once at most, before any command.

        It is anonymous memory with a file descriptor, because /dev/shm is small in containers.
        """
        self._descriptor = os.memfd_create("checkpoint")
        os.ftruncate(self._descriptor, max(num_bytes, ITEM_BYTES))
        memory = mmap.mmap(self._descriptor, max(num_bytes, ITEM_BYTES))
        return np.frombuffer(memory, np.float32, num_bytes // ITEM_BYTES)

    def make_pages(self) -> None:
        """Have the kernel allocate the pages of the shared memory, which is slower than a copy."""
        self._ask("make pages")

    def write(self, directory: Path, part: Part, bits: int) -> None:
        """Have the shared memory written as this rank's part of a checkpoint.

        Args:
            directory: The checkpoint's hidden directory.
            part: The pieces in the shared memory.
            bits: As in `write_part`.
        """
        where = {"directory": str(directory), "rank": part.rank}
        self._ask("write", **where, pieces=part.pieces, bits=bits)

    def publish(self, publication: Publication) -> None:
        """Have the checkpoint published as soon as all ranks' parts are written."""
        self._ask("publish", **dataclasses.asdict(publication))

    def all_written(self, identifier: str) -> None:
        """Tell the process that all parts of the checkpoint with this id are on the disk."""
        self._send({"do": "all written", "id": identifier})

    def wait(self, unanswered: int = 0) -> list[str]:
        """Wait until all commands but the last `unanswered` have been carried out.

        Returns:
            The process's warnings.

        Raises:
            RunFailed: The state is not finite, the checkpoint was not published, or the process
                ended.
            OSError: The disk refused.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._unanswered <= unanswered or self.problem)
            problem, self.problem = self.problem, None
            warnings, self._warnings = self._warnings, []
        if problem is not None:
            raise problem
        return warnings

    def settle(self, seconds: float) -> None:
        """Wait for all commands or the first failure, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered or self.problem, seconds)

    def end(self) -> None:
        """End the process at once. The next command starts it again."""
        with self._changed:
            process, self._process = self._process, None
            self._unanswered, self.problem = 0, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process and free the shared memory."""
        self.end()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            # Arrays may still refer to the mapping, which is freed with the last of them.
            self._descriptor = -1

    def _ask(self, what: str, **arguments: Any) -> None:
        with self._changed:
            # Start it again if it ended while it was idle.
            if self._process is None or self._has_ended:
                self._process = self._start()
            self._unanswered += 1
        self._send({"do": what, **arguments})

    def _send(self, command: dict[str, Any]) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        # If the process has ended, the thread that reads the answers reports how.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def _start(self) -> subprocess.Popen[str]:
        process = start_beside(__name__, str(self._descriptor), pass_fds=[self._descriptor])
        self._has_ended = False
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Record the answers until the process ends."""
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            with self._changed:
                self._unanswered -= 1
                self._warnings += answer.get("warnings", [])
                self.problem = self.problem or _problem(answer)
                self._changed.notify_all()
        code = process.wait()
        with self._changed:
            if self._process is not process:
                # `close` has ended this process on purpose.
                return
            self._has_ended = True
            if self._unanswered:
                end = f"signal {-code}" if code < 0 else f"exit code {code}"
                self.problem = self.problem or RunFailed(
                    f"the process that writes checkpoints (process {process.pid}) ended with {end}"
                )
                self._changed.notify_all()


_KINDS: dict[str, type[RunFailed]] = {kind.__name__: kind for kind in (PoisonedState, Superseded)}


def _problem(answer: dict[str, Any]) -> Exception | None:
    """Return the error that an answer reports, if any."""
    if (message := answer.get("error")) is None:
        return None
    if answer.get("errno"):
        return OSError(answer["errno"], os.strerror(answer["errno"]), answer.get("filename"))
    return _KINDS.get(answer.get("kind", ""), RunFailed)(message)


# ---- in the writing process ----------------------------------------------------------------------
def main(answers: TextIO) -> None:
    """Carry out commands until stdin ends, which it does when the training process does."""
    descriptor = int(sys.argv[1])
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    patience = Patience()
    given = descriptor, commands, patience, answers
    threading.Thread(target=_carry_out, args=given, daemon=True).start()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "all written":
            patience.all_written = command["id"]
        else:
            commands.put(command)
    # Exit at once, even in the middle of a file: the checkpoint has no name yet.
    os._exit(0)


def _carry_out(
    descriptor: int, commands: queue.Queue[dict[str, Any]], patience: Patience, answers: TextIO
) -> None:
    """Carry out commands in order and answer each."""
    while True:
        command = commands.get()
        try:
            answer: dict[str, Any] = {"warnings": _do(descriptor, command, patience)}
        except OSError as error:
            answer = {"error": str(error), "errno": error.errno, "filename": error.filename}
        except RunFailed as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _do(descriptor: int, command: dict[str, Any], patience: Patience) -> list[str]:
    """Carry out a command and return its warnings."""
    arguments = {key: value for key, value in command.items() if key != "do"}
    if command["do"] == "publish":
        return publish(Publication(**arguments), patience)
    # Not closed here: arrays refer to the mapping, which is freed with the last of them.
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    if command["do"] == "make pages":
        with contextlib.suppress(OSError):
            # Needs Linux 5.14; elsewhere the first save allocates the pages.
            memory.madvise(_MADV_POPULATE_WRITE)
        return []
    part = Part(arguments["rank"], adapter(tuple[Piece, ...]).validate_python(arguments["pieces"]))
    write_part(Path(arguments["directory"]), part, split_values(part, memory), arguments["bits"])
    return []

"""Record a few training steps with torch.profiler, on rank 0: train.profile_steps.

The trace shows every operation of the host and every kernel of the device on one time line, and
what was allocated. On a GPU a snapshot of its memory is written as well, which says of each
allocation where it was made. Neither changes what is computed, and a failure ends no run.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from pretrain import platform
from pretrain.rundir.files import FILE_MODE, make_directory, new_file, say
from pretrain.rundir.paths import RunPaths
from pretrain.training.start import Run
from pretrain.training.step import Hook

MAX_ALLOCATIONS = 1_000_000
"""Allocations and frees of GPU memory that a snapshot keeps; the oldest are dropped."""
TRACE_VIEWER, MEMORY_VIEWER = "https://ui.perfetto.dev", "https://pytorch.org/memory_viz"
"""Both read the file in the browser, and send it nowhere."""
TRACE_SUFFIX, MEMORY_SUFFIX = ".json.gz", ".pickle"
"""Of a trace, which Perfetto and Chrome read, and of a snapshot of GPU memory."""


class ProfileHook(Hook):
    """Record the steps of train.profile_steps, and write them; on rank 0 alone."""

    def __init__(self, run: Run) -> None:
        """Record nothing yet."""
        self._run, self._warn = run, run.reporter.warn
        self._steps = run.config.train.profile_steps
        self._is_over = self._steps is None or not run.topology.is_main
        self._recording: Recording | None = None

    def before_step(self, run: Run) -> None:
        """Begin to record, if the next step is to be, and mark where it begins."""
        step = run.state.step + 1
        if self._is_over or self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            return
        with self._warning():
            if self._recording is None:
                self._recording = Recording(step)
            self._recording.mark(step)

    def is_due(self, run: Run) -> bool:
        """Return True around the steps, so that they are recorded whole; alike on all ranks."""
        return self._steps is not None and run.state.step in (self._steps[0] - 1, self._steps[1])

    def between_steps(self, run: Run) -> None:
        """Write what was recorded after the last of the steps."""
        if self._steps is not None and run.state.step == self._steps[1]:
            self._write()

    def before_rollback(self, run: Run) -> None:
        """Write what was recorded: the steps that follow are others."""
        self._write()

    def at_end(self, run: Run) -> None:
        """Write what was recorded, if the run was stopped within the steps.

        A failed run writes nothing: its messages may be on their way, and none can be waited for.
        """
        self._write()

    def _write(self) -> None:
        """Write what was recorded, if anything was, and say where it is; record no more."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        self._is_over = True
        with self._warning(), recording:
            # A gloo collective that ends after the recording writes its end into memory that torch
            # has freed, and the process dies of it (torch 2.13.0).
            self._run.optimizer.wait_for_weights()
            recording.stop()
            written = recording.write(self._run.config.directory)
            say(describe(written, recording.first, recording.last))

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Warn about whatever fails, and record no more. Training goes on."""
        try:
            yield
        except Exception as error:
            self._is_over, self._recording = True, None
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._warn("profile", f"train.profile_steps: no profile ({reason}); training goes on")


class Recording:
    """A recording that is under way, from its first step on."""

    def __init__(self, first: int) -> None:
        """Begin to record. `first` is the step that comes next."""
        self.first = self.last = first
        self._step: torch.profiler.record_function | None = None
        activities = [ProfilerActivity.CPU]
        if platform.has_cuda():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True
        )
        self._profiler.start()
        if platform.has_cuda():
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def mark(self, step: int) -> None:
        """Mark in the trace that a step begins here, and that the one before it ends."""
        self._end_mark()
        self.last, self._step = step, torch.profiler.record_function(f"step {step}")
        self._step.__enter__()  # type: ignore[no-untyped-call]  # torch declares no types here

    def _end_mark(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def stop(self) -> None:
        """End the recording, with all work of the device that was queued."""
        platform.synchronize()
        self._end_mark()
        self._profiler.stop()

    def write(self, run: Path) -> list[Path]:
        """Write what was recorded to RUN/profile, each file in one move.

        Returns:
            The files: the trace and, on a GPU, the snapshot.

        Raises:
            OSError: The disk refused.
        """
        folder = RunPaths(run).profile
        make_directory(folder)
        name = f"step-{self.first:08d}-{self.last:08d}.rank0"
        paths = [folder / f"{name}{TRACE_SUFFIX}"]
        with new_file(paths[0]) as partial:
            self._write_trace(partial)
            partial.chmod(FILE_MODE)
        if platform.has_cuda():
            paths.append(folder / f"{name}{MEMORY_SUFFIX}")
            with new_file(paths[1]) as partial:
                # torch declares no types here.
                torch.cuda.memory._dump_snapshot(str(partial))  # type: ignore[no-untyped-call]
                partial.chmod(FILE_MODE)
        return paths

    def _write_trace(self, partial: Path) -> None:
        # A folder, because the library writes under a name of its own first.
        with tempfile.TemporaryDirectory(prefix=".trace.", dir=partial.parent) as folder:
            plain = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(plain))
            # It says nothing of a disk that is full.
            if not _is_whole(plain):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
            with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        """Record no more allocations of the GPU."""
        if platform.has_cuda():
            torch.cuda.memory._record_memory_history(enabled=None)


def describe(paths: list[Path], first: int, last: int) -> str:
    """Return the lines that name the written files and say how to open them.

    Args:
        paths: The trace, then the snapshots of memory.
        first: The first recorded step.
        last: The last recorded step.
    """
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lines = [f"profile of {steps}: {paths[0]}; open it at {TRACE_VIEWER}"]
    lines += [f"memory of {steps}: {p}; open it at {MEMORY_VIEWER}" for p in paths[1:]]
    return "\n".join(lines)


def _is_whole(trace: Path) -> bool:
    """Return True if a JSON file ends as one does."""
    try:
        with trace.open("rb") as file:
            file.seek(max(0, trace.stat().st_size - 16))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False

"""Copy, wait and measure time in the device's queue of work, which the host does not wait for."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.platform.hardware import device, has_cuda


def synchronize() -> None:
    """Wait for the device, so that a clock read afterwards includes the work queued before."""
    if has_cuda():
        torch.cuda.synchronize()


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the device without waiting for the work queued there.

    From memory that is not pinned, a copy to the GPU would wait for all kernels launched before it
    (aten/src/ATen/native/cuda/Copy.cu).
    """
    return tensor.pin_memory().to(device(), non_blocking=True) if has_cuda() else tensor


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Queue the block's work beside the default queue, behind everything queued there so far.

    Memory that the block allocates may be used by the default queue after it has waited for the
    block's work, and be freed at any time: it is only given out again to other blocks, which begin
    behind the default queue.
    """
    if not has_cuda():
        yield
        return
    queue = _queue_beside()
    queue.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(queue):
        yield


@functools.cache
def _queue_beside() -> torch.cuda.Stream:
    """Return the stream of `beside`, the same in every call."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch declares no types here


class Moment:
    """A point in the device's queue of work: it has passed when all work queued before is done."""

    def __init__(self) -> None:
        """Mark the present end of the queue. On a CPU that is now."""
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if has_cuda():
            # torch declares no types here.
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Wait until the moment has passed. Work queued after it goes on."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Return the seconds between two moments that have passed, by the device's clock."""
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1e3
        return self._seconds - earlier._seconds


class Readback:
    """Numbers on their way from the device to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Start to copy a tensor of one dimension, behind the work queued so far."""
        self._host = tensor
        if has_cuda():
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        self.arrival = Moment()

    def numbers(self) -> list[float]:
        """Return the numbers, once they are here."""
        self.arrival.wait()
        return [float(number) for number in self._host.tolist()]


class HostCopy:
    """A copy of tensors into host memory, made while the device and the host go on.

    The tensors must not change before `before_change` has been called.
    """

    def __init__(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """Start to copy.

        Args:
            sources: Tensors on the device, each of one dimension.
            targets: Host memory for each, of the same size and dtype; pinned if `pin` could.
        """
        self._thread: threading.Thread | None = None
        self._event: torch.cuda.Event | None = None
        if has_cuda():
            with beside():
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source, non_blocking=True)
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()
            return
        # NumPy copies on one core and lets other threads run; torch would start a second team of
        # threads that competes with the model's.
        pairs = [(s.detach().numpy(), t.numpy()) for s, t in zip(sources, targets, strict=True)]
        self._thread = threading.Thread(target=_copy_all, args=(pairs,), daemon=True)
        self._thread.start()

    def before_change(self) -> None:
        """Hold changes of the tensors, which are queued from now on, back until they are copied."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._event is not None:
            self._event.synchronize()
        if self._thread is not None:
            self._thread.join()


def _copy_all(pairs: list[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    for source, target in pairs:
        np.copyto(target, source)


def pin(memory: torch.Tensor) -> bool:
    """Pin host memory that another process shares, so that the device copies into it by itself.

    Returns:
        False where it could not be pinned: copies then pass through a buffer of the driver's.
    """
    if not has_cuda():
        return False
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`."""
    if has_cuda():
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

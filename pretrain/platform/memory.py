"""Measure the memory of this process and the memory that it can still allocate."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch

from pretrain.platform.hardware import has_cuda


def peak_memory_bytes() -> int:
    """Return the peak memory of this process: allocated on the GPU, or resident on the CPU."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    # Linux reports ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory() -> int:
    """Return the bytes that this process can still allocate on `device()`."""
    if not has_cuda():
        return available_memory()
    free, _ = torch.cuda.mem_get_info()
    # torch keeps freed memory and gives it out again.
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def available_memory() -> int:
    """Return the bytes of host memory that can be allocated.

    The least of the machine's, of what the cgroups of this process have left (those of a container
    or of a Slurm job), and of what `ulimit -v` leaves.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError):
        # Only Linux has this file. Elsewhere, half of the machine's memory is taken for available.
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            available = min(available, limit - pages * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min([available, *_cgroup_memory()]))


def _cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> list[int]:
    """Return what each cgroup with a limit that this process is in has left, of cgroup v2.

    Args:
        root: Where the cgroups are mounted. In a container that is the container's own.
        own: This process's cgroup below it; None reads it from /proc.
    """
    if own is None:
        own = "/"
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/cgroup").read_text().splitlines():
                # The lines of cgroup version 1 begin with other numbers.
                own = line.removeprefix("0::") if line.startswith("0::") else own
    folder, left = root / own.lstrip("/"), []
    for group in (folder, *folder.parents):
        if group != root and root not in group.parents:
            break
        # "max", which is no number, where there is no limit.
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            statistics = dict(
                line.split() for line in (group / "memory.stat").read_text().splitlines()
            )
            # Files that were read are kept in memory as long as nothing else needs it.
            cached = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
            left.append(limit - used + cached)
    return left

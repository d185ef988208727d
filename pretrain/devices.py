"""Tell which GPU a rank uses, and find ranks that share one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pretrain.rundir.files import from_json, parse_json

MOST_SHARED_NAMED = 3
"""GPUs that a message names; the rest are counted."""


def device_index(local_rank: int, num_visible: int) -> int:
    """Return the number of a process's GPU among those that it can see.

    Where all processes of a node see all its GPUs, that is the local rank. With one GPU bound to
    each (srun --gpus-per-task=1, --gpu-bind=single:1) every process sees one, whose number is 0.
    That each has a GPU of its own is checked by the GPUs' ids; see `shared_gpus`.

    Args:
        local_rank: Number of the process on its machine.
        num_visible: Number of GPUs that it can see, at least 1.
    """
    return local_rank % num_visible


@dataclass(frozen=True)
class Device:
    """The device of one rank, as the rank sees it."""

    host: str
    uuid: str
    """The GPU's id, which no other GPU has; empty on the CPU."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES of the rank's process; None where it is not set."""

    def to_json(self) -> str:
        """Return the device as text for the other ranks."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> Device:
        """Return the device that `to_json` described."""
        device = from_json(Device, parse_json(text))
        assert device is not None, text
        return device


def shared_gpus(devices: Sequence[Device]) -> str:
    """Return a message about ranks that use one GPU together, or "" if each has its own.

    Args:
        devices: The device of each rank, by rank.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(devices):
        if device.uuid:
            ranks.setdefault((device.host, device.uuid), []).append(rank)
    shared = [(gpu, users) for gpu, users in ranks.items() if len(users) > 1]
    if not shared:
        return ""
    found = [
        f"{uuid} on {host} is used by "
        + " and ".join(f"rank {r} (CUDA_VISIBLE_DEVICES {_value(devices[r])})" for r in users)
        for (host, uuid), users in shared[:MOST_SHARED_NAMED]
    ]
    if len(shared) > MOST_SHARED_NAMED:
        found.append(f"and {len(shared) - MOST_SHARED_NAMED} more GPUs")
    return (
        f"two ranks cannot use one GPU: {'; '.join(found)}. Start one rank per GPU of a node: srun "
        "with --ntasks-per-node and --gpus-per-node of the same number, or with --gpus-per-task=1. "
        "CUDA_VISIBLE_DEVICES= runs on the CPU"
    )


def _value(device: Device) -> str:
    return "not set" if device.visible is None else f"= {device.visible}"

"""Tell whether a build of torch has code for a GPU. Pure text, without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence


def is_supported(architectures: Sequence[str], capability: Sequence[int]) -> bool:
    """Return True if a build of torch runs on a GPU.

    Machine code (sm_80) runs on GPUs of the same major version and at least its minor one, PTX
    (compute_80) on all later ones. A suffix, as in sm_90a, ties code to exactly that GPU.

    Args:
        architectures: What the build contains, as torch.cuda.get_arch_list() returns it.
        capability: The GPU's compute capability, major and minor.
    """
    if len(capability) != 2:
        return False
    major, minor = capability
    for name in architectures:
        if not (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)):
            continue
        kind, built, suffix = match[1], (int(match[2]), int(match[3])), match[4]
        if suffix == "a":
            runs = built == (major, minor)
        elif kind == "sm" or suffix:
            runs = built[0] == major and built[1] <= minor
        else:
            runs = built <= (major, minor)
        if runs:
            return True
    return False


def not_supported(gpu: str, capability: Sequence[int], architectures: Sequence[str]) -> str:
    """Return the words that say that a build of torch has no code for a GPU.

    Args:
        gpu: What to call the GPU.
        capability: Its compute capability, major and minor.
        architectures: What the build contains, as torch.cuda.get_arch_list() returns it.
    """
    built = ", ".join(architectures) or "no GPU"
    number = ".".join(str(part) for part in capability)
    return f"{gpu} has compute capability {number}, and torch is built for {built}"

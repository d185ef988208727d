"""Replace attributes of modules, classes and objects for the time of a context."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value in this context.

    Args:
        owner: A module, a class or an object.
        name: Name of the attribute. It is looked up in the owner alone: what an object has from
            its class, or a class from its base, is covered and shows again afterwards.
        value: The value.
    """
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def fp16_allowed_on_cpu() -> Iterator[None]:
    """Let a run in fp16 pass on a CPU in this context, to test it or to count what it would do.

    torch computes in fp16 on a CPU, slowly. DeepSpeed refuses it, as does `check_precision`.
    `prepare` must have been called.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    with (
        # The package, because others call it as platform.check_precision.
        replaced(sys.modules["pretrain.platform"], "check_precision", lambda precision: None),
        replaced(accelerator, "is_fp16_supported", lambda self: True),
    ):
        yield

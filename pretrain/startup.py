"""What happens before anything slow is imported: Ctrl-C ends a command quietly, imports are lean.

Python would print a traceback on Ctrl-C while a command starts, most of which is imports, and while
it ends. This file imports nothing of ours and nothing slow, so that commands can call it before all
else.

Megatron-core and DeepSpeed decorate functions with torch.compile, which loads torch._inductor and
torch._dynamo on the spot, whether or not the function is ever called; Megatron's timers and its
inference engine load TensorBoard and wandb. Here each is loaded where a process first uses it. A
command that only reads a model then imports 2,400 modules, not 3,800. It took 3.5 CPU seconds to
start, not 6.1, when 250 modules of TensorBoard were still among them (Megatron-core 0.16, torch
2.13).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

CODE = 130
"""The exit code of a command that Ctrl-C ends, as shells have it."""


def leave_on_ctrl_c() -> None:
    """End the process at once on Ctrl-C from now on, with nothing done by it yet or any more.

    Where Ctrl-C is ignored, as in a shell's background job, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


def raise_on_ctrl_c(recorded: list[int]) -> None:
    """Raise KeyboardInterrupt on Ctrl-C from now on, and append to `recorded`.

    Libraries turn a KeyboardInterrupt into errors of their own; the list knows better.
    """

    def record(number: int, frame: FrameType | None) -> None:
        recorded.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, record)


def _leave(number: int, frame: FrameType | None) -> None:
    # Not print: what is interrupted may be in the middle of it.
    os.write(2, b"interrupted\n")
    os._exit(CODE)


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Keep what is imported here from garbage collections, for the rest of the process.

    To look at modules again and again while others are imported took a seventh of a rank's start.
    A full collection in training took 0.3 s, in which the other ranks wait.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


MODULES = ("megatron.core", "deepspeed")
"""Modules, with all within them, that decorate with torch.compile or import one of WITHHELD."""
WITHHELD = ("wandb", "torch.utils.tensorboard", "transformer_engine", "apex")
"""Modules that these do without where they are not installed. Nothing here computes with the last
two. They change what Megatron does, and one that was built for another torch ends its import."""


def install() -> None:
    """Make the first import of each of MODULES a lean one, whoever imports it."""
    if not any(isinstance(finder, _LeanFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LeanFinder())


class _LeanFinder:
    """Find each of MODULES as Python does, and execute it in `_lean`."""

    def __init__(self) -> None:
        # Threads and nested imports share one context: the first enters it, the last leaves it.
        self._lock, self._depth, self._context = threading.Lock(), 0, contextlib.ExitStack()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of MODULES; else None."""
        if not name.startswith(MODULES):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with self._sharing():
                    execute(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    @contextlib.contextmanager
    def _sharing(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._context.enter_context(_lean())
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    self._context.close()


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    """Let no import in this context find WITHHELD, and no decoration with torch.compile load it.

    For other threads, too. What they decorate is compiled when it is called.
    """
    import torch

    compile_now = torch.compile
    withheld = [name for name in WITHHELD if name not in sys.modules]
    # Python's own mark of a module that is not to be found.
    sys.modules.update(dict.fromkeys(withheld))  # type: ignore[arg-type]
    torch.compile = compile_when_called  # type: ignore[assignment]  # a patch
    try:
        yield
    finally:
        torch.compile = compile_now
        for name in withheld:
            del sys.modules[name]


def compile_when_called(
    function: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """Do what torch.compile does, but load the compiler when the function is first called."""
    if function is None:
        return functools.partial(compile_when_called, **options)
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            import torch

            compiled.append(torch.compile(function, **options))
        return compiled[0](*args, **kwargs)

    return call

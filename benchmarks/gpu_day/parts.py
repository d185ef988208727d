"""The parts: what each runs, and how long it may take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_day.attention_correctness import WRONG_CODE
from benchmarks.gpu_day.sizes import CUDA

PYTEST = ("pytest", "-p", "benchmarks.gpu_day.pytest_rows", "-p", "no:cacheprovider", "-q")
STEP_SIZES = {"16k": 2**14, "65k": 2**16, "262k": 2**18}
"""Tokens a step on one GPU; the smallest is what each of 128 GPUs has at 2.1M."""


@dataclass(frozen=True)
class Part:
    """One question, answered by one process."""

    name: str
    question: str
    seconds: int
    """Limit, after which the process is ended. Rows that it has written remain."""
    arguments: tuple[str, ...]
    """Arguments of `python -W ignore -m`, where OUT stands for the directory of the results."""
    complete_codes: tuple[int, ...] = (0,)
    """Exit codes of a process that came to its end; all but 0 say that what it found is bad."""

    def command(self, out: Path) -> list[str]:
        """Return the command line of the part's process."""
        arguments = (argument.replace("OUT", str(out)) for argument in self.arguments)
        return [sys.executable, "-W", "ignore", "-m", *arguments]


def _module(name: str) -> str:
    return f"benchmarks.gpu_day.{name}"


def _step(kind: str, module: str, question: str, seconds: int) -> list[Part]:
    """Return a part for each step size.

    Args:
        kind: Begins the parts' names.
        module: What runs.
        question: What it answers.
        seconds: Limit of the largest size, and of the others.
    """
    return [
        Part(
            f"{kind}-{size}",
            f"{question}, {size} tokens a step",
            seconds,
            (_module(module), "--out", "OUT", "--part", f"{kind}-{size}", "--tokens", str(tokens)),
        )
        for size, tokens in STEP_SIZES.items()
    ]


PARTS = (
    Part(
        "cuda-tests",
        "Do the tests pass that need a GPU?",
        480,
        (
            *PYTEST,
            "--rows",
            "OUT",
            "cuda-tests",
            "-m",
            "cuda",
            "tests/kernels",
            "tests/distributed/test_cuda.py",
        ),
        # pytest: 0 all passed, 1 some failed.
        complete_codes=(0, 1),
    ),
    Part(
        "kernel-tests",
        "Do the kernel's own tests pass when it is compiled, not interpreted?",
        520,
        (
            *PYTEST,
            "--rows",
            "OUT",
            "kernel-tests",
            "-m",
            "not cuda",
            # Without a GPU `make test` has run them in Triton's interpreter.
            *(
                ("tests/kernels/test_flash.py", "tests/kernels/test_skipping.py")
                if CUDA
                else ("tests/kernels/test_bias.py",)
            ),
        ),
        complete_codes=(0, 1),
    ),
    Part(
        "attention-correctness",
        "Is every attention backend right at the sizes of training?",
        420,
        (_module("attention_correctness"), "--out", "OUT"),
        complete_codes=(0, WRONG_CODE),
    ),
    Part(
        "attention-speed",
        "How fast is every attention kernel?",
        530,
        (_module("attention_speed"), "--out", "OUT"),
    ),
    Part(
        "fused",
        "What do the operations beside attention cost, plain and fused?",
        400,
        ("benchmarks.fused_gpu", "--out", "OUT/fused.md", *(() if CUDA else ("--tokens", "16"))),
    ),
    *_step("train", "training", "How long is a training step, and what MFU is that?", 300),
    *_step("split", "step_split", "Which kernels does the time of a step go to?", 300),
    Part(
        "positions",
        "What does ALiBi cost over sinusoidal and over the best kernel without a bias?",
        500,
        (_module("positions"), "--out", "OUT"),
    ),
    Part(
        "memory-none",
        "How much memory does a micro batch take?",
        240,
        (_module("memory"), "--out", "OUT", "--recompute", "none"),
    ),
    Part(
        "memory-full",
        "How much memory does a micro batch take with recomputation?",
        240,
        (_module("memory"), "--out", "OUT", "--recompute", "full"),
    ),
)

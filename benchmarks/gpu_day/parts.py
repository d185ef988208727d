"""The parts, most important first: what each runs, how long it should take and how long it may."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_day import two_ranks
from benchmarks.gpu_day.attention_correctness import WRONG_CODE
from benchmarks.gpu_day.sizes import CUDA, SEQUENCES

PYTEST = ("pytest", "-p", "benchmarks.gpu_day.pytest_rows", "-p", "no:cacheprovider", "-q")
STEP_SIZES = {"16k": 2**14, "65k": 2**16, "262k": 2**18}
"""Tokens a step on one GPU; the smallest is what each of 128 GPUs has at 2.1M."""


@dataclass(frozen=True)
class Part:
    """One question, answered by one process."""

    name: str
    question: str
    expected: int
    """Seconds that it should take: it is begun where so many are left. On an H100, train-16k took
    57 s, split-16k 45 s and, beside other parts, attention-correctness 114 s; the rest is
    estimated."""
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


def _step(size: str) -> list[Part]:
    """Return the parts of a step size: its time, and what that is made of."""
    tokens = str(STEP_SIZES[size])

    def part(kind: str, module: str, question: str, expected: int) -> Part:
        name = f"{kind}-{size}"
        words = (_module(module), "--out", "OUT", "--part", name, "--tokens", tokens)
        return Part(name, f"{size} tokens a step: {question}", expected, 240, words)

    return [
        part("train", "training", "how long does it take, and what MFU is that?", 70),
        part("split", "step_split", "which kernels does the time go to?", 60),
    ]


FP8 = ("train.fp8=true",) if CUDA else ()
TWICE = (
    f"data.sequence_length={2048 if CUDA else 256}",
    "evaluation.lengths=[2048]",
    f"batch.micro_batch_size={SEQUENCES // 2}",
    f"batch.global_batch_size={SEQUENCES}",
)
"""Twice the training length, with as many tokens a micro batch and, on a GPU, a step."""


def _changed_step(name: str, question: str, *settings: str) -> Part:
    """Return the part of a step of 16k tokens with other settings."""
    name = f"train-16k-{name}"
    words = [_module("training"), "--out", "OUT", "--part", name, "--tokens", str(2**14)]
    words += [word for setting in settings for word in ("--set", setting)]
    return Part(name, f"16k tokens a step, {question}: how long does it take?", 90, 240, (*words,))


def _product(name: str, question: str, expected: int, seconds: int) -> Part:
    """Return the part of one of `benchmarks.gpu_day.product.RUNS`."""
    return Part(
        name, question, expected, seconds, (_module("product"), "--out", "OUT", "--part", name)
    )


def _tests(name: str, question: str, expected: int, seconds: int, *chosen: str) -> Part:
    """Return a part that runs tests."""
    arguments = (*PYTEST, "--rows", "OUT", name, *chosen)
    # pytest: 0 all passed, 1 some failed.
    return Part(name, question, expected, seconds, arguments, complete_codes=(0, 1))


PARTS = (
    *_step("16k"),
    _product(
        "product-demo",
        "Does the demo train, save, get killed, resume, evaluate and export?",
        *(110, 240),
    ),
    _product(
        "product-1.3B",
        "Does the 1.3B model, for 30 steps, with checkpoints of 18 GB?",
        *(220, 480),
    ),
    Part(
        "two-ranks",
        "Do two ranks of NCCL on one GPU train as one process does, in each kind of layout?",
        *(150, 300),
        (_module("two_ranks"), "--out", "OUT"),
        complete_codes=(0, two_ranks.WRONG_CODE),
    ),
    _tests(
        "cuda-tests",
        "Do the tests pass that need a GPU?",
        *(240, 480),
        *("-m", "cuda", "tests/kernels", "tests/distributed/test_cuda.py"),
    ),
    _tests(
        "kernel-tests",
        "Do the kernel's own tests pass when it is compiled, not interpreted?",
        *(260, 520),
        *("-m", "not cuda"),
        # Without a GPU `make test` has run them in Triton's interpreter.
        *(
            ("tests/kernels/test_flash.py", "tests/kernels/test_skipping.py")
            if CUDA
            else ("tests/kernels/test_bias.py",)
        ),
    ),
    Part(
        "attention-correctness",
        "Is every attention backend right at the sizes of training?",
        *(120, 420),
        (_module("attention_correctness"), "--out", "OUT"),
        complete_codes=(0, WRONG_CODE),
    ),
    _changed_step("layers", "each layer compiled as one graph", "train.fusion=layers"),
    _changed_step("fp8", "and products in 8 bits", "train.fusion=layers", *FP8),
    _changed_step("sinusoidal", "sinusoidal positions", "position.method=sinusoidal"),
    _changed_step("2L", "sinusoidal positions at 2 L", "position.method=sinusoidal", *TWICE),
    Part(
        "attention-speed",
        "How fast is every attention kernel?",
        *(270, 530),
        (_module("attention_speed"), "--out", "OUT"),
    ),
    Part(
        "fused",
        "What do the operations beside attention cost, plain and fused?",
        *(200, 400),
        ("benchmarks.fused_gpu", "--out", "OUT/fused.md", *(() if CUDA else ("--tokens", "16"))),
    ),
    *_step("65k"),
    *_step("262k"),
    Part(
        "positions",
        "What does ALiBi cost over sinusoidal and over the best kernel without a bias?",
        *(250, 500),
        (_module("positions"), "--out", "OUT"),
    ),
    *(
        Part(
            f"memory-{recompute}",
            f"How much memory does a micro batch take, recomputation {recompute}?",
            *(120, 240),
            (_module("memory"), "--out", "OUT", "--recompute", recompute),
        )
        for recompute in ("none", "full")
    ),
)

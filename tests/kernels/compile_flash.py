"""Compile the flash-attention kernels for a named GPU and print what the compiler made of them.

`test_flash_compiled` runs this as a program: it must not share a process with the other tests,
which set TRITON_INTERPRET. No GPU is needed, because Triton brings its own ptxas and compiles for a
named target on any machine. By hand, in a clone:

    python -m tests.kernels.compile_flash '{"capability": 90, "width": 128, "skip": false}'

An argument is the JSON of a `Variant`; without one, each line of the standard input is. One line of
JSON is printed for each kernel of a variant, and an empty one after the last.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pretrain.kernels.call import ScoreBias
from pretrain.kernels.flash import launch
from pretrain.positions.alibi import alibi_slopes


class Variant(NamedTuple):
    """An attention call whose kernels are compiled, forward and backward."""

    capability: int
    """Compute capability of the GPU: 90 for sm_90a, 80 for sm_80."""
    width: int
    """Width of a head."""
    dtype: str = "bfloat16"
    bias: str = "slopes"
    """"slopes", "trained" (slopes with a gradient), "table" (T5's) or "none"."""
    causal: bool = True
    skip: bool = True
    dropout_p: float = 0.0
    length: int = 2048
    """Number of queries, and of keys."""
    heads: int = 2
    documents: bool = False
    """Attention stays within documents."""
    loops: bool = False
    """Report what the steps of each kernel's loops cost, too, which takes as long as ptxas does."""


class NoDevice:
    """A driver without a device, for Triton to compile against."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def read_loops(cubin: bytes, warps: int) -> list[dict[str, int]]:
    """Return what one step of each loop around matrix products costs, in machine code (sm_90).

    "tensor" are the cycles in which a multiprocessor's tensor cores compute the step's products (an
    instruction of 64 x N x 16 takes N / 2), "issue" those in which each of its four schedulers
    issues the step's instructions, without stalls. Where a block is alone on its multiprocessor and
    its warps keep step, the two times add up; where blocks or warps overlap, the longer one counts.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = re.findall(r"/\*([0-9a-f]{4,5})\*/ +(?:@!?U?P\w+ )?([^;]*);", sass)
    lines = [(int(address, 16), text) for address, text in code]
    jumps = [(re.search(r"^BRA\b.*?0x([0-9a-f]+)", text), address) for address, text in lines]
    spans = [(int(to[1], 16), address) for to, address in jumps if to and int(to[1], 16) < address]
    found, end = [], -1
    for first, last in sorted(spans, key=lambda span: span[1]):
        body = [text for address, text in lines if first <= address <= last]
        widths = [int(n) for n in re.findall(r"HGMMA\.64x(\d+)x16", "\n".join(body))]
        # Of nested loops the inner one; what lies behind all loops only jumps back into them.
        if not widths or first <= end:
            continue
        end = last
        found.append(
            {
                "instructions": len(body),
                "tensor": sum(widths) // 2 * warps // 4,
                "issue": len(body) * warps // 4,
                "spilled": sum(text.startswith(("LDL", "STL")) for text in body),
            }
        )
    return found


def read_report(name: str, compiled: Any, log: str, loops: bool) -> dict[str, Any]:
    """Return what matters of a compiled kernel.

    Args:
        name: Name of the kernel.
        compiled: Triton's compiled kernel.
        log: What `ptxas -v` printed while it assembled the kernel.
        loops: Read its loops, if it has products.
    """
    ptx, warps = compiled.asm["ptx"], compiled.metadata.num_warps
    loops &= "wgmma.mma_async" in ptx
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert spilled and registers, f"ptxas did not report on {name}: {log!r}"
    return {
        "name": name,
        "shared": compiled.metadata.shared,
        "cubin": len(compiled.asm["cubin"]),
        "registers": int(registers[1]),
        "spill_stores": int(spilled[1]),
        "spill_loads": int(spilled[2]),
        "advice": [line for line in log.splitlines() if re.search(r"\(C75\d\d\)", line)],
        "operands": sorted(
            set(re.findall(r"tt\.dot [^\n]*: tensor<[0-9x]*(\w+)", compiled.asm["ttir"]))
        ),
        "products": sorted(set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.(\S+)", ptx))),
        "wgmma": ptx.count("wgmma.mma_async"),
        "loops": read_loops(compiled.asm["cubin"], warps) if loops else [],
        "atomics": ptx.count("atom."),
    }


def main(variant: Variant) -> None:
    """Run attention forward and backward, compiling every kernel instead of launching it."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        # Triton calls `ptxas -v` and prints its log if this is set.
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = run(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        print(json.dumps(read_report(name, compiled, log.getvalue(), variant.loops)))

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(NoDevice(variant.capability))
    if variant.capability < 90:
        launch.choose_schedule = lambda q: launch.SCHEDULES_80[q.element_size(), variant.width]

    shape = (variant.length, 1, variant.heads, variant.width)
    dtype = getattr(torch, variant.dtype)
    q, k, v = (torch.empty(shape, dtype=dtype).requires_grad_() for _ in range(3))
    slopes = table = None
    if variant.bias in ("slopes", "trained"):
        slopes = alibi_slopes(variant.heads).requires_grad_(variant.bias == "trained")
    elif variant.bias == "table":
        table = torch.zeros(variant.heads, 32).requires_grad_()
    bias = ScoreBias(slopes, table, 128, variant.causal)
    starts = torch.zeros(1, variant.length, dtype=torch.int32) if variant.documents else None
    # ptxas reports only on what it assembles.
    with tempfile.TemporaryDirectory() as triton.knobs.cache.dir:
        out = launch.attention_triton(
            q, k, v, bias, None, variant.dropout_p, skip=variant.skip, document_starts=starts
        )
        out.sum().backward()


if __name__ == "__main__":
    for line in sys.argv[1:] or sys.stdin:
        # A process of its own, since kernels and targets stay with it.
        arguments = (Variant(**json.loads(line)),)
        process = multiprocessing.get_context("fork").Process(target=main, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"exit code {process.exitcode}")
        print(flush=True)

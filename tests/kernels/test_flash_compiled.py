"""Test what the compiler makes of the flash-attention kernels: tensor cores, registers, memory.

No GPU is needed: Triton compiles for a named target on any machine.
"""

import itertools
import json
import os
import subprocess
import sys

import pytest

from tests.changed import ROOT
from tests.conftest import mark_torture
from tests.kernels.compile_flash import Variant

# Bytes that a thread may spill to local memory (stores plus loads) in each kernel, where it is not
# zero. Sizes are those of Triton 3.7.1's ptxas, rounded up to the next multiple of 64.
VARIANTS = {
    "default, width 128": (Variant(90, 128, loops=True), {"dkdv_kernel": 64}),
    "default, width 64": (Variant(90, 64), {}),
    "default, fp16": (Variant(90, 64, "float16"), {}),
    "no skipping": (Variant(90, 128, skip=False), {"dkdv_kernel": 64}),
    "trained": (Variant(90, 128, bias="trained"), {"dkdv_kernel": 64}),
    "symmetric, trained, dropout": (
        Variant(90, 64, "float16", "trained", causal=False, dropout_p=0.1),
        {"dkdv_kernel": 64},
    ),
    "table": (Variant(90, 128, bias="table"), {"dkdv_kernel": 128}),
    "table, width 64": (Variant(90, 64, bias="table"), {}),
    "default, sm_80": (Variant(80, 128), {"forward_kernel": 128}),
    "documents": (Variant(90, 128, documents=True), {}),
    "documents, nothing added": (Variant(90, 64, bias="none", documents=True), {}),
    "documents, table": (Variant(90, 128, bias="table", documents=True), {"dkdv_kernel": 64}),
    "documents, sm_80": (Variant(80, 128, documents=True), {"forward_kernel": 64}),
}

# Cycles in which a step of each kernel's loops is issued at width 128, of which its products on the
# tensor cores take 1,024, 2,048 and 1,536; rounded up likewise.
ISSUE = {"forward_kernel": 1088, "dkdv_kernel": 1088, "dq_kernel": 896}

# Each kernel, kind of GPU and way to leave out keys.
CORE = {("default, width 128",), ("documents, table",), ("documents, sm_80",)}


@pytest.fixture(scope="module")
def compile_kernels():
    """Return a function: variant -> what `compile_flash` reports of each of its kernels, by name.

    One process compiles for all tests.
    """
    command = [sys.executable, "-m", "tests.kernels.compile_flash"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes) as program:

        def run(variant):
            print(json.dumps(variant._asdict()), file=program.stdin, flush=True)
            lines = list(itertools.takewhile(str.strip, program.stdout))
            assert lines and all(line.startswith("{") for line in lines), "".join(lines)
            return {kernel["name"]: kernel for kernel in map(json.loads, lines)}

        yield run
        program.stdin.close()


@pytest.mark.parametrize(("case",), mark_torture([(case,) for case in VARIANTS], CORE))
def test_kernels_compile_to_what_the_gpu_is_good_at(case, compile_kernels):
    variant, may_spill = VARIANTS[case]
    kernels = compile_kernels(variant)
    table = variant.bias == "table"
    slopes = variant.bias in ("slopes", "trained")
    products = {"forward_kernel", "dkdv_kernel", "dq_kernel"}
    products |= {"row_gradient_kernel"} if table else set()
    skips = variant.skip and slopes
    others = {"delta_kernel"} | ({"norms_kernel"} if skips else set())
    assert kernels.keys() == products | others

    # KiB of shared memory of a block; 99 is the smallest among the GPUs that SCHEDULES_80 serves.
    limit = 227 if variant.capability == 90 else 99
    for name, kernel in kernels.items():
        assert kernel["cubin"] > 0 and kernel["atomics"] == 0
        assert kernel["shared"] <= limit * 1024, kernel
        spilled = kernel["spill_stores"] + kernel["spill_loads"]
        assert spilled <= may_spill.get(name, 0), f"{name} spills {spilled} bytes"
        # C7510 to C7515 say that the products of a loop wait for each other. C7519 only says that
        # ptxas added a fence which Triton had left out.
        slow = [line for line in kernel["advice"] if "(C7519)" not in line]
        assert not slow, f"{name}: {slow[0]}"
    for name in products:
        short = {"bfloat16": "bf16", "float16": "f16"}[variant.dtype]
        assert kernels[name]["operands"] == [short], kernels[name]
        assert kernels[name]["products"], f"{name} makes no use of tensor cores"
        assert all(f"f32.{short}.{short}" in x for x in kernels[name]["products"]), kernels[name]
        if variant.capability == 90 and name != "row_gradient_kernel":
            assert kernels[name]["wgmma"] > 0, f"{name} makes no use of wgmma"
        if variant.loops:
            steps = [loop["issue"] for loop in kernels[name]["loops"]]
            assert len(steps) == 2 and max(steps) <= ISSUE[name], (name, steps)


def test_one_key_compiles_with_skipping(compile_kernels):
    """Compile for arguments that are 1, of which Triton makes constants."""
    kernels = compile_kernels(Variant(90, 64, bias="trained", length=1, heads=1))
    assert all(kernel["cubin"] > 0 for kernel in kernels.values())

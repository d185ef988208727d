"""Test what the compiler makes of the flash-attention kernels.

No GPU is needed: Triton compiles for a named target on any machine.
"""

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from pretrain.kernels.flash import host, schedules
from pretrain.kernels.alibi import alibi_slopes
from pretrain.kernels.bias import ScoreBias

capability, width, dtype, arguments = json.loads(sys.argv[1])

class NoDevice:
    def get_current_target(self):
        return GPUTarget("cuda", capability, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

def compile_only(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    asm, ptx = kernel.asm, kernel.asm["ptx"]
    dot = r"tt\\.dot [^\\n]*: tensor<[0-9x]*(\\w+)"
    mma = r"(?:wgmma\\.mma_async|mma)\\.sync\\.aligned\\.(\\S+)"
    print(json.dumps({
        "name": self.fn.__name__, "shared": kernel.metadata.shared, "cubin": len(asm["cubin"]),
        "operands": sorted(set(re.findall(dot, asm["ttir"]))),
        "products": sorted(set(re.findall(mma, ptx))),
        "atomics": ptx.count("atom."),
    }))

run, JITFunction.run = JITFunction.run, compile_only
triton.runtime.driver.set_active(NoDevice())
if capability < 90:
    host.choose_schedule = lambda q: schedules.SCHEDULES_80[q.element_size(), width]
shape = (2048, 1, 2, width)
q, k, v = (torch.empty(shape, dtype=getattr(torch, dtype)).requires_grad_() for _ in range(3))
table = torch.zeros(2, 32).requires_grad_() if "table" in arguments else None
slopes = None if table is not None else alibi_slopes(2).requires_grad_("trained" in arguments)
bias = ScoreBias(slopes, table, 128, "symmetric" not in arguments)
dropout_p = 0.1 if "dropout" in arguments else 0.0
host.attention_triton(q, k, v, bias, None, dropout_p).sum().backward()
"""


@pytest.mark.parametrize(
    ("capability", "width", "dtype", "arguments"),
    [
        (90, 128, "bfloat16", []),
        (90, 64, "float16", ["trained", "symmetric", "dropout"]),
        (80, 128, "bfloat16", ["table"]),
    ],
)
def test_compiles_to_tensor_cores_without_upcast(capability, width, dtype, arguments, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps([capability, width, dtype, arguments])],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    kernels = {kernel["name"]: kernel for kernel in map(json.loads, result.stdout.splitlines())}
    products = {"forward_kernel", "dkdv_kernel", "dq_kernel"} | (
        {"row_gradient_kernel"} & kernels.keys()
    )
    others = {"delta_kernel"} | (set() if "table" in arguments else {"norms_kernel"})
    assert products | others == kernels.keys() and ("table" in arguments) == (
        "row_gradient_kernel" in kernels
    )
    # KiB of shared memory of a block; 99 is the smallest among the GPUs that SCHEDULES_80 serves.
    limit = 227 if capability == 90 else 99
    for kernel in kernels.values():
        assert kernel["cubin"] > 0 and kernel["atomics"] == 0
        assert kernel["shared"] <= limit * 1024, kernel
    for name in products:
        short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        assert kernels[name]["operands"] == [short], kernels[name]
        assert kernels[name]["products"], f"{name} makes no use of tensor cores"
        half = "bf16.bf16" if dtype == "bfloat16" else "f16.f16"
        assert all(f"f32.{half}" in product for product in kernels[name]["products"]), kernels[name]

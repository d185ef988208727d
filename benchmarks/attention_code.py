"""Print what the compiler makes of the Triton attention kernel for a Hopper GPU; needs no GPU.

    python -m benchmarks.attention_code

Of each kernel: registers a thread, bytes that a thread spills, shared memory; of a step of its
loops, the cycles of its products on the tensor cores and the cycles in which its instructions are
issued (`tests.kernels.compile_flash.read_loops`). The first loop of the forward kernel and of dkdv
has the causal mask, as the second of dq has.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.kernels.compile_flash import Variant

VARIANTS = {
    "128, ALiBi, skips": Variant(90, 128),
    "128, ALiBi": Variant(90, 128, skip=False),
    "128, no bias": Variant(90, 128, bias="none"),
    "64, ALiBi, skips": Variant(90, 64),
    "64, no bias": Variant(90, 64, bias="none"),
}


def main() -> None:
    """Print the table, in Markdown."""
    print("| head width | kernel | registers | spilled, B | shared, KiB | tensor + issue, cycles |")
    print("|---|---|---:|---:|---:|---|")
    each = [json.dumps(variant._replace(loops=True)._asdict()) for variant in VARIANTS.values()]
    command = [sys.executable, "-m", "tests.kernels.compile_flash", *each]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name, lines in zip(VARIANTS, printed.split("\n\n")):
        for kernel in map(json.loads, lines.splitlines()):
            if not kernel["loops"]:
                continue
            loops = ", ".join(f"{each['tensor']} + {each['issue']}" for each in kernel["loops"])
            spilled = kernel["spill_stores"] + kernel["spill_loads"]
            print(
                f"| {name} | {kernel['name'].removesuffix('_kernel')} | {kernel['registers']} "
                f"| {spilled} | {kernel['shared'] // 1024} | {loops} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

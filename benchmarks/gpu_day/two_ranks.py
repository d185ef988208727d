"""Train on two ranks of NCCL that share one GPU, in every kind of layout, and compare the losses.

    python -m benchmarks.gpu_day.two_ranks --out RESULTS

NCCL refuses two ranks with the same host and GPU. Each rank therefore names itself a host
(NCCL_HOSTID), so that they reach each other through sockets: slow, but every collective of
training meets NCCL. The losses of a layout must be those of one process, as tests/distributed
demands of gloo. Without a GPU, the same processes use gloo.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_day.product import ROOT, Product
from benchmarks.gpu_day.results import Rows

PART = "two-ranks"
WRONG_CODE = 3
"""Exit code when a layout does not train, or trains to other losses."""
STEPS = 12
SECONDS = 100
"""After so many a layout's processes are ended."""
TOLERANCE = 2e-4
"""Largest difference of a loss in nats, in fp32."""
LAYOUTS = {
    "one process": (),
    "data 2, ZeRO 1": ("parallel.zero_stage=1",),
    "data 2, ZeRO 3": ("parallel.zero_stage=3",),
    "tensor 2, sequence parallel": (
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
    ),
    "pipeline 2": ("parallel.pipeline_model_parallel_size=2",),
    "context 2": ("parallel.context_parallel_size=2",),
}


def main() -> None:
    """Train in each layout that has no row yet; exit with WRONG_CODE if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    rows = Rows(parser.parse_args().out, PART)
    work = ROOT / "runs/gpu_day" / PART
    work.mkdir(parents=True, exist_ok=True)
    product = Product("product-demo", work)
    if not product.data.exists():
        product.build()
    for name, settings in LAYOUTS.items():
        if not rows.has(layout=name):
            rows.add({"layout": name, **train(product, name, settings)})
    expected = next(row["losses"] for row in rows if row["layout"] == "one process")
    for row in rows:
        apart = max((abs(a - b) for a, b in zip(row["losses"], expected)), default=math.inf)
        failed = any(code != 0 for code in row["exit codes"])
        if failed or len(row["losses"]) != STEPS or not apart <= TOLERANCE:
            print(f"{row['layout']}: exit codes {row['exit codes']}, losses {apart:.1e} nats apart")
            sys.exit(WRONG_CODE)


def train(product: Product, name: str, settings: tuple[str, ...]) -> dict[str, object]:
    """Train a few steps, and return the losses and how the processes ended."""
    shutil.rmtree(product.run, ignore_errors=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    size = 1 if name == "one process" else 2
    short = (f"train.num_steps={STEPS}", "evaluation.interval_steps=", *settings)
    command = product.command("train", product.config, *product.sets())
    command += [word for setting in short for word in ("--set", setting)]
    given = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ
            | given
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"host-{rank}"},
        )
        for rank in range(size)
    ]
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(timeout=SECONDS))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in processes:
        process.kill()
    losses = product.losses()
    return {"exit codes": codes, "losses": [losses[step] for step in sorted(losses)]}


if __name__ == "__main__":
    main()

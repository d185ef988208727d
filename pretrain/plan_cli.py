"""Define `pretrain plan`: choose a layout before there are GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.config.arguments import Config, Overrides
from pretrain.config.overrides import check_beside


def plan(
    config: Config,
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs of the whole job.")],
    gpu_type: Annotated[str, typer.Option(metavar="TYPE", help="v100-32, a100-80, h100 or h200.")],
    network: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|GBIT",
            help="Links of a node: 8x400, 8x200, 8x100 or 4xedr, or Gbit/s of all of them in one "
            "direction. Default: what nodes with such GPUs usually have.",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the best layout as a config on top of CONFIG."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Scale the assumed speeds by a measurement: pretrain bench train --json FILE.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Predict memory, time and cost of a run in every layout, and name the best.

    Computes, for each legal layout (tensor, pipeline and virtual pipeline size, sequence
    parallelism, ZeRO stage, recomputation, micro-batch size), the memory of a GPU and the time of a
    step by part, tokens/s, MFU and GPU-hours. Prints the fastest that fit, why the others fall out,
    and every assumption. Needs no GPU and runs nothing.

    \b
    Example:
      pretrain plan configs/cc100_roberta/alibi_1024.toml --gpus 128 --gpu-type v100-32
      pretrain plan configs/demo.toml --gpus 8 --gpu-type h100 --set train.precision=bf16 \\
          --write demo_h100.toml
    """
    check_beside(overrides, {"--gpus": (gpus, "parallel.world_size")})
    from pretrain.plan.command import plan_run, read_target
    from pretrain.plan.source import load_for_plan

    run, refusal = load_for_plan(Path(config), overrides)
    target = read_target(gpus, gpu_type, network, calibrate)
    print(plan_run(run, Path(config), target, write, refusal))

"""Define `pretrain bench ...`: one short function per subcommand, as in pretrain/cli.py."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import ConfigError, load_config, writing
from pretrain.config.arguments import Config, Overrides

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory.")


@bench.command("train")
def bench_train(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to time, after a few that warm up.")
    ] = 20,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the result, for pretrain plan."),
    ] = None,
) -> None:
    """Time training steps on random tokens.

    Prints tokens/s, the time that each part of a step takes, and peak memory.

    \b
    Example:
      pretrain bench train configs/demo.toml --steps 20
    """
    run = load_config(config, overrides)
    from pretrain.train.bench import bench_training

    bench_training(run, steps, json_file)


@bench.command("step")
def bench_step(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    count: Annotated[
        bool,
        typer.Option(
            "--count", help="Count on the CPU, without a GPU, data or memory for the model."
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write everything that was counted."),
    ] = None,
) -> None:
    """Count what one optimizer step costs.

    Prints kernel launches, bytes read and written, every collective and every time the host waits
    for the device, by phase of the step, for one rank of each pipeline stage. The command is a
    single process whatever the layout: it simulates a rank of parallel.world_size ranks (default:
    the fewest that the layout allows).

    \b
    Example:
      pretrain bench step configs/cc100_roberta/alibi_1024.toml --count --json step.json
    """
    if not count:
        raise ConfigError(
            "pretrain bench step: says what a step costs by counting. Add --count, or use "
            "`pretrain bench train` to time steps"
        )
    run = load_config(config, overrides)
    from pretrain.plan.step import bench_step_counts

    counted, table = bench_step_counts(run)
    print(table)
    if json_file is not None:
        with writing(json_file):
            json_file.write_text(json.dumps(counted, indent=1) + "\n")


@bench.command("attention")
def bench_attention(
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens, comma-separated, the most important first; 512 to 65536."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="How long it may take in all, compilation included.")
    ] = 400,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write each row there, as Markdown.")
    ] = None,
) -> None:
    """Time every attention kernel that this machine has, side by side; without a GPU, the CPU's.

    Example: pretrain bench attention --lengths 1024,16384 --write attention.md
    """
    from pretrain.kernels import bench as attention_bench

    try:
        chosen = attention_bench.parse_lengths(lengths) if lengths else None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with writing(write) if write is not None else contextlib.nullcontext():
        attention_bench.bench_attention(chosen, seconds, write)


@bench.command("checkpoint")
def bench_checkpoint(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each contestant takes its turn.")
    ] = 5,
    directory: Annotated[
        Path, typer.Option(metavar="DIR", help="Where to write; all is removed again.")
    ] = Path(),
) -> None:
    """Time saves and loads beside torch.distributed.checkpoint and plain files.

    Saves and loads the optimizer's state of the config's model, with digests of every byte, then
    the same tensors with torch's own format, which has none, then as many bytes as plain files.
    Also prints how long training stands still during a save, with and without
    checkpoint.asynchronous.

    \b
    Example:
      pretrain bench checkpoint configs/demo.toml --directory /scratch
    """
    run = load_config(config, overrides)
    from pretrain.train.bench_checkpoint import bench_checkpoint as measure

    measure(run, rounds, directory)

"""Define `pretrain bench ...`: one short function per subcommand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import ConfigError, EvaluationRequest, RunConfig, load_config, writing
from pretrain.config.arguments import Commands, Config, Count, Numbers, OutFile, Overrides
from pretrain.rundir.files import replace_file

# ---- Turn the options of a comparison into configs, before anything slow is imported ----


def with_lengths(
    file: Path, overrides: list[str], methods: str, lengths: str | None = None
) -> list[RunConfig]:
    """Return a config for each method and training length, alike in all else.

    A step and a micro batch keep their tokens: their sequences become fewer as they become longer.

    Args:
        file: The config file.
        overrides: `section.key=value` settings.
        methods: Values of position.method, separated by commas.
        lengths: Training lengths in tokens, separated by commas; None for the config's own.

    Raises:
        ConfigError: The config is wrong, or a length does not divide the tokens of a step or of a
            micro batch.
    """
    # First the config by itself, so that a wrong value is named as such.
    given = load_config(file, overrides)
    own = given.data.sequence_length
    numbers = EvaluationRequest.parse(lengths, "nonoverlapping", None, None).lengths
    configs = []
    for method in methods.split(","):
        for length in numbers or (own,):
            settings = [f"position.method={method}", f"data.sequence_length={length}"]
            for key in ("global_batch_size", "micro_batch_size"):
                tokens = getattr(given.batch, key) * own
                if tokens % length:
                    raise ConfigError(
                        f"--lengths {length}: does not divide the {tokens:,} tokens of "
                        f"batch.{key} = {getattr(given.batch, key)} x {own}. Choose lengths that "
                        f"do, or --set batch.{key}"
                    )
                settings.append(f"batch.{key}={tokens // length}")
            configs.append(load_config(file, [*overrides, *settings]))
            if configs[-1].position.method != method:
                # An empty name would remove the key, and measure its default.
                raise ConfigError(f"--methods {methods}: {method!r} is not a position method")
    return configs


bench = Commands(help="Measure speed and memory.")


@bench.command("train")
def bench_train(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    steps: Count = 20,
) -> None:
    """Time training steps on random tokens.

    Prints tokens/s, the time that each part of a step takes, and peak memory.

    \b
    Example:
      pretrain bench train configs/demo.toml --steps 20

    Args:
        steps: Steps to time, after a few that warm up.
    """
    run = load_config(config, overrides)
    from pretrain.bench.timing import bench_training

    bench_training(run, steps)


@bench.command("methods")
def bench_methods(
    config: Config,
    methods: Annotated[str, typer.Option(metavar="NAME,NAME,...")] = "alibi,sinusoidal,rotary,t5",
    lengths: Numbers = None,
    rounds: Count = 5,
    nproc: Count = 1,
    out: OutFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Time training and evaluation of position methods in turns, with their memory.

    Each turn has processes of its own, in which a model is built and random tokens pass through
    training steps and an evaluation. Prints a table with ratios to sinusoidal positions of the same
    length, and their range over the rounds.

    \b
    Example:
      pretrain bench methods configs/demo.toml --methods alibi,sinusoidal --lengths 64,128

    Args:
        methods: Values of position.method to compare.
        lengths: Training lengths in tokens, as in 64,128; batches are resized so that a step and a
            micro batch keep their tokens. Default: data.sequence_length.
        rounds: How often each contestant takes its turn.
        nproc: Processes of each contestant, on this machine.
        out: Also write what was measured, as JSON.
    """
    configs = with_lengths(config, overrides, methods, lengths)
    # Before minutes are spent on what goes there.
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out {out}: {out.parent} is not a directory. Make it, or choose another"
        )
    from pretrain.bench.timing import efficiency_table, measure

    result = measure(configs, rounds, nproc)
    print(efficiency_table(result))
    if out is not None:
        with writing(out):
            replace_file(out, json.dumps(result, indent=1) + "\n")


@bench.command("step")
def bench_step(config: Config, overrides: Overrides = []) -> None:  # noqa: B006
    """Count what one optimizer step costs, without a GPU, data or memory for the model.

    Prints kernel launches, bytes read and written, every collective and every time the host waits
    for the device, by phase of the step, for one rank of each pipeline stage. The command is a
    single process whatever the layout: it simulates a rank of parallel.world_size ranks (default:
    the fewest that the layout allows).

    What is counted is the code that trains, run on tensors without data, with the attention and the
    fusions that auto takes on a GPU of compute capability 9.0. An operator of torch is taken to
    launch one kernel, the backward pass of a layer norm two, and an operator on lists of tensors as
    many as ATen needs. Bytes are those of the tensors that a kernel reads and writes, each once. A
    region under torch.compile is one kernel; its backward pass has one more for the gradient of a
    bias. A collective is exposed if no kernel is launched between its start and the wait for it,
    those of the gradient reduction itself apart.

    \b
    Example:
      pretrain bench step configs/cc100_roberta/alibi_1024.toml
    """
    run = load_config(config, overrides)
    from pretrain.plan.simulation import bench_step_counts

    print(bench_step_counts(run))

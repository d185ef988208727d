"""Define `pretrain bench ...` and `pretrain leaderboard ...`: one short function per subcommand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from pretrain.config import ConfigError, load_config, writing
from pretrain.config.arguments import Commands, Config, Count, OutFile, Overrides
from pretrain.rundir.files import replace_file

bench = Commands(help="Measure speed and memory.")


@bench.command("train")
def bench_train(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    steps: Count = 20,
) -> None:
    """Time training steps on random tokens.

    Prints tokens/s, the time of each part of a step, and peak memory.

    \b
    Example:
      pretrain bench train configs/demo.toml --steps 20

    Args:
        steps: Number of steps to time, after a few warm-up steps.
    """
    run = load_config(config, overrides)
    from pretrain.bench.timing import bench_training

    bench_training(run, steps)


@bench.command("methods")
def bench_methods(
    config: Config,
    methods: Annotated[str, typer.Option(metavar="NAME,NAME,...")] = "alibi,sinusoidal,rotary,t5",
    rounds: Count = 5,
    nproc: Count = 1,
    out: OutFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Measure speed and memory of position methods, one after another in several rounds.

    Each turn starts new processes, which build a model and run training steps and an evaluation on
    random tokens. Prints a table with ratios to sinusoidal positions of the same length, and their
    range over the rounds.

    \b
    Example:
      pretrain bench methods configs/demo.toml --methods alibi,sinusoidal

    Args:
        methods: Values of position.method to compare.
        rounds: Number of times that each method is measured.
        nproc: Processes for each method, on this machine.
        out: Also write the measurements to this file, as JSON.
    """
    # An empty name would remove the key, so that the default method would be measured.
    chosen = [f"position.method={method}" for method in methods.split(",") if method.strip()]
    configs = [load_config(config, [*overrides, each]) for each in chosen]
    # Checked before minutes are spent on measurements.
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
    single process for every layout: it simulates one of parallel.world_size ranks (default: the
    fewest that the layout allows).

    The counted code is the training code, run on tensors without data, with the attention and the
    fusions that auto chooses on a GPU of compute capability 9.0. A torch operator counts as one
    kernel, the backward pass of a layer norm as two, and an operator on lists of tensors as the
    number that ATen needs. The bytes are those of the tensors that a kernel reads and writes, each
    counted once. A region under torch.compile is one kernel; its backward pass has one more for the
    gradient of a bias. A collective is exposed if no kernel is launched between its start and the
    wait for it, except kernels of the gradient reduction itself.

    \b
    Example:
      pretrain bench step configs/cc100_roberta/alibi_1024.toml
    """
    run = load_config(config, overrides)
    from pretrain.plan.simulation import count_run, to_table

    print(to_table(run, count_run(run)))


leaderboard = Commands(help="Rank evaluations by several people on one page, and verify them.")
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The leaderboard's directory.")]


@leaderboard.command("add")
def leaderboard_add(
    directory: Directory,
    curve: Annotated[Path, typer.Argument(metavar="CURVE.json")],
    name: Annotated[str, typer.Option(metavar="NAME")],
    authors: str | None = None,
    link: Annotated[str | None, typer.Option(metavar="URL")] = None,
    equal: Literal["tokens", "FLOP", "time"] | None = None,
) -> None:
    """Create an entry, DIR/NAME.json, from an evaluation of one checkpoint.

    \b
    Example:
      pretrain evaluate runs/demo/alibi --max-tokens 16384 --out runs/demo/alibi.json
      pretrain leaderboard add board runs/demo/alibi.json --name alibi-1.3M --equal tokens
      pretrain leaderboard build board

    Args:
        curve: The file that `pretrain evaluate --out` wrote.
        name: The name of the model on the page.
        authors: Who trained the model.
        link: A page about the model.
        equal: The quantity that is equal in its training and in that of the entries it is compared
            with. Entries are ranked only against entries that name the same quantity.
    """
    from pretrain.evaluation.leaderboard import add

    print(add(directory, curve, name=name, authors=authors, link=link, equal=equal))


@leaderboard.command("build")
def leaderboard_build(directory: Directory) -> None:
    """Write DIR/index.html, a single page that ranks all entries and needs no network."""
    from pretrain.evaluation.leaderboard import build

    print(build(directory))


@leaderboard.command("verify")
def leaderboard_verify(
    directory: Directory,
    entry: Annotated[str, typer.Argument(metavar="ENTRY")],
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT|HF_FOLDER")],
    text: Annotated[list[str], typer.Option(metavar="FILE|PATTERN")] = [],  # noqa: B006
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Evaluate the checkpoint of an entry again, and mark the entry as verified.

    Every number must equal that of the entry within a relative difference of 1e-6, or of 1e-3 if
    one of the two was measured on a GPU. The exit code is 1 if one does not. The page ranks and
    shows the numbers of this evaluation.

    \b
    Example:
      pretrain leaderboard verify board alibi-1-3m runs/demo/alibi

    Args:
        entry: Name of the entry's file, without .json.
        source: The model of the entry.
        text: The text on which it was evaluated, as for `pretrain evaluate`.
        trust_remote_code: As for `pretrain evaluate`.
    """
    from pretrain.evaluation.leaderboard import verify

    difference = verify(directory, entry, source, overrides, text, trust_remote_code)
    print(f"{entry}: verified, to {difference:.1e} of each number")

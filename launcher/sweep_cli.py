"""Define `launcher sweep`, which trains a run for each combination of values or each config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import ConfigError
from pretrain.config.arguments import AllowChanged, Overrides
from pretrain.config.trajectory import check_allowed
from pretrain.launcher.options import (
    Account,
    Dependency,
    DryRun,
    Mail,
    Nodes,
    OptionalSiteFile,
    Partition,
    Qos,
    SaveBefore,
    Sbatch,
    TimeLimit,
)


def sweep(
    configs: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG",
            help="TOML file that the runs have in common; or, without --over, of each run.",
        ),
    ],
    over: Annotated[
        list[str],
        typer.Option(
            metavar="SECTION.KEY=VALUE,VALUE",
            help="A key of the config and the values to try. Can be repeated.",
        ),
    ] = [],  # noqa: B006  typer copies it
    site: OptionalSiteFile = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Train on this machine instead of a Slurm cluster, each run with N processes.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    concurrent: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The most runs that train at the same time. Default: all."
        ),
    ] = None,
    nodes: Nodes = None,
    time: TimeLimit = None,
    save_before: SaveBefore = None,
    dry_run: DryRun = False,
    allow_changed: AllowChanged = [],  # noqa: B006
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    sbatch: Sbatch = [],  # noqa: B006
    dependency: Dependency = None,
    mail: Mail = None,
) -> None:
    """Train one run for each combination of values, or for each of several configs.

    With --site submits one job array to a Slurm cluster. With --nproc trains on this machine, one
    run after the other as `launcher local` does, and prints a table of all runs at the end. The
    exit code is 1 if a run failed; the others are trained all the same. Ctrl-C saves the present
    run and stops the sweep.

    The runs lie beside the config's run.directory, in RUN-sweep, each in a directory named after
    its values, such as RUN-sweep/alibi-512; several configs have a run.directory each. Runs that
    are finished are left out and others go on from their newest checkpoint, so the same command
    does what is missing.

    \b
    Examples:
      launcher sweep configs/demo.toml --nproc 2 --over position.method=alibi,rotary
      launcher sweep configs/demo.toml --site slurm/site.toml --concurrent 2 \\
          --over position.method=alibi,sinusoidal --over data.sequence_length=128,256
      launcher sweep configs/cc100_roberta/*_512.toml --site slurm/site.toml
    """
    check_allowed(allow_changed)
    if site is not None and nproc is not None:
        raise ConfigError(
            "--site and --nproc: choose one. --site submits to a Slurm cluster, --nproc trains on "
            "this machine"
        )
    if nproc is not None:
        from pretrain.launcher.local_sweep import sweep_locally

        _refuse_slurm_options(
            {
                "--concurrent": concurrent,
                "--nodes": nodes,
                "--time": time,
                "--save-before": save_before,
                "--partition": partition,
                "--account": account,
                "--qos": qos,
                "--sbatch": sbatch or None,
                "--dependency": dependency,
                "--mail": mail,
            }
        )
        raise typer.Exit(sweep_locally(configs, nproc, over, overrides, dry_run, allow_changed))
    if site is None:
        raise ConfigError(
            "launcher sweep: give --nproc N to train on this machine, or --site SITE to submit to "
            "a Slurm cluster"
        )
    from pretrain.launcher.cluster import load_site
    from pretrain.launcher.login.sweep import sweep as submit_sweep
    from pretrain.launcher.request import SlurmRequest

    submit_sweep(
        configs,
        load_site(site),
        over,
        overrides,
        nodes=nodes,
        time_limit=time,
        save_before=save_before,
        concurrent=concurrent,
        dry_run=dry_run,
        allow_changed=allow_changed,
        request=SlurmRequest(partition, account, qos, tuple(sbatch), dependency, mail),
    )


def _refuse_slurm_options(options: dict[str, object]) -> None:
    """Refuse options of Slurm on this machine, on which they would have no effect.

    Args:
        options: Names and values of the options; None for one that is not given.

    Raises:
        ConfigError: One of them is given.
    """
    for option, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{option}: has no effect with --nproc, which trains on this machine, one run "
                "after the other. Leave it out, or give --site instead of --nproc"
            )

"""Define `launcher sweep`, which trains a run for each combination of values or each config."""

from __future__ import annotations

from collections.abc import Mapping
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

SweepConfigs = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG",
        help="TOML file that the runs have in common; or, without --over, of each run.",
    ),
]
Over = Annotated[
    list[str],
    typer.Option(
        metavar="SECTION.KEY=VALUE,VALUE",
        help="A key of the config and the values to try. Can be repeated.",
    ),
]
SweepNproc = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Train on this machine instead of a Slurm cluster, each run with N processes.",
    ),
]
Concurrent = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="The most runs that train at the same time. Default: all."
    ),
]


def sweep(
    configs: SweepConfigs,
    over: Over = [],  # noqa: B006  typer copies it
    site: OptionalSiteFile = None,
    nproc: SweepNproc = None,
    overrides: Overrides = [],  # noqa: B006
    concurrent: Concurrent = None,
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
    slurm_options = {
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
    place = _one_place(site, nproc, slurm_options)
    if isinstance(place, int):
        from pretrain.launcher.local_sweep import sweep_locally

        raise typer.Exit(sweep_locally(configs, place, over, overrides, dry_run, allow_changed))
    from pretrain.launcher.cluster import load_site
    from pretrain.launcher.login.sweep import sweep as submit_sweep
    from pretrain.launcher.request import SlurmRequest

    submit_sweep(
        configs,
        load_site(place),
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


def _one_place(
    site: Path | None, nproc: int | None, slurm_options: Mapping[str, object]
) -> Path | int:
    """Return the site to submit to, or the number of processes of each run on this machine.

    Args:
        site: The value of --site.
        nproc: The value of --nproc.
        slurm_options: Names and values of options that have no effect on this machine; None for one
            that is not given.

    Raises:
        ConfigError: Not exactly one of the two is given, or an option would have no effect.
    """
    if site is not None and nproc is not None:
        raise ConfigError(
            "--site and --nproc: choose one. --site submits to a Slurm cluster, --nproc trains on "
            "this machine"
        )
    given = [option for option, value in slurm_options.items() if value is not None]
    if site is not None:
        return site
    if nproc is None:
        raise ConfigError(
            "launcher sweep: give --nproc N to train on this machine, or --site SITE to submit to "
            "a Slurm cluster"
        )
    if given:
        raise ConfigError(
            f"{given[0]}: has no effect with --nproc, which trains on this machine, one run after "
            "the other. Leave it out, or give --site instead of --nproc"
        )
    return nproc

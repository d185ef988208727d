"""Define the `launcher data` commands, which build a data set on a Slurm cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import load_config
from pretrain.config.arguments import Config, Overrides
from pretrain.launcher.options import SiteFile, TimeLimit

data = typer.Typer(no_args_is_help=True, help="Build a data set on a Slurm cluster.")


@data.command("build")
def data_build(
    config: Config,
    site: SiteFile,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    nodes: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="As many tasks run at the same time as so many nodes of the site have cores.",
        ),
    ] = 1,
    time: TimeLimit = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the jobs, and estimate tokens, bytes and time; submit and write nothing.",
        ),
    ] = False,
) -> None:
    """Build a data set on many nodes of a Slurm cluster.

    Builds exactly what `pretrain data build` does, in data.directory, which the nodes must share.
    This command plans, trains the tokenizer and finishes; for reading and for tokenizing it submits
    a job array, whose tasks have one core each, and waits for its end. Run it where it may go on
    for hours, as in tmux on the login node.

    Ctrl-C, SIGTERM and a lost terminal cancel the jobs. What is finished is kept, and the same
    command goes on, also after a node, this command or the controller has died.

    \b
    Examples:
      launcher data build configs/cc100_roberta/alibi_1024.toml --site site.toml --dry-run
      launcher data build configs/cc100_roberta/alibi_1024.toml --site site.toml --nodes 4
    """
    from pretrain.launcher.cluster import load_site
    from pretrain.launcher.login import data as builds

    run = load_config(config, overrides)
    builds.build(config, overrides, run, site, load_site(site), nodes, time, dry_run)


@data.command("array", hidden=True)
def data_array(
    tasks: Annotated[int, typer.Argument(min=0)],
    pickle: Path,
    stop: Path,
    site: SiteFile,
    name: Annotated[str, typer.Option()],
    concurrent: Annotated[int, typer.Option(min=1)],
    time: TimeLimit = None,
) -> None:
    """Run a job array of a build of data, on the login node.

    `launcher data build` has this command run by the process that builds.
    """
    from pretrain.launcher.cluster import load_site
    from pretrain.launcher.login import data as builds

    builds.run_array(builds.data_job(load_site(site), name, pickle, tasks, concurrent, time), stop)

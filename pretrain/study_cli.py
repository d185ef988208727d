"""Define `pretrain study`, as pretrain/cli.py does the other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import ConfigError


def study(
    file: Annotated[
        Path,
        typer.Argument(metavar="STUDY.toml", help="The study: methods, lengths, seeds, settings."),
    ],
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes of each run, of the evaluation and of what is measured. Default: 1.",
        ),
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="SITE.toml",
            help="Submit the runs to this Slurm cluster, as one job array, and train none here.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and what is left of each; do nothing.")
    ] = False,
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only", help="Train and measure nothing; evaluate and report what is finished."
        ),
    ] = False,
) -> None:
    """Train methods at several lengths, evaluate them together, and report on the claims.

    Builds the data if it is missing, checks every run before the first one starts, and trains one
    after the other as `launcher local` does. Finished runs are left out, so the same command goes
    on after Ctrl-C, which saves. A run that fails does not stop the others, and the exit code is 1
    then. All finished runs are evaluated together, and STUDY/report has the result.

    With --site the missing runs are submitted instead; the same command reports when they are done.

    The runs of a study differ in what its file says and in nothing else: a study file that was
    edited beyond what leaves the trained runs as they are is refused.

    \b
    Examples:
      pretrain study configs/studies/demo.toml --nproc 2
      pretrain study configs/studies/wikitext103.toml --site slurm/site.toml
    """
    if report_only and site is not None:
        raise ConfigError(
            "--report-only and --site: choose one. --report-only evaluates on this machine"
        )
    from pretrain.study.command import Request, print_plan, run_study

    if dry_run:
        print_plan(file, nproc)
        return
    raise typer.Exit(run_study(file, Request(nproc or 1, site, report_only)))

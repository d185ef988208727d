"""Define what batch scripts run: `launcher attempt`, `guard` and `evaluation`, hidden in --help."""

from __future__ import annotations

from typing import Annotated

import typer

from pretrain.launcher.options import Run


def attempt(run: Run) -> None:
    """Make attempts at a run, inside its Slurm job.

    The batch script of `launcher submit` runs this command.
    """
    from pretrain.launcher.login.tables import print_summary
    from pretrain.launcher.node import job

    code = job.attempt(run)
    print_summary(run, code)
    raise typer.Exit(code)


def guard(run: Run) -> None:
    """Requeue the Slurm job that this runs in when the node of its batch script dies.

    The jobs of runs with spare nodes run this command as a job step.
    """
    from pretrain.launcher.node.guard import guard

    raise typer.Exit(guard(run))


def evaluation(
    run: Run,
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="Name of one of its checkpoints, step-########."),
    ],
) -> None:
    """Evaluate one checkpoint, inside its Slurm job.

    The batch script of an evaluation runs this command.
    """
    from pretrain.launcher.node.evaluation import run_job

    raise typer.Exit(run_job(run, checkpoint))

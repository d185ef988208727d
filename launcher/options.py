"""Define the arguments and options of the `launcher` command, with the text that --help shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")]
SiteFile = Annotated[
    Path,
    typer.Option(
        metavar="SITE",
        help="TOML file that describes your cluster. Copy one of the examples slurm/site.*.toml.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of nodes of each run. Default: as many as parallel.world_size needs, else 1.",
    ),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        metavar="LIMIT",
        help="Time limit of the job, as in 1-00:00:00, 12:00:00 or 90 (minutes). Default: the "
        "site's time_limit.",
    ),
]
SaveBefore = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Save a checkpoint this long before the time limit. Default: the time of two "
        "checkpoints and one step, plus a minute.",
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Window lengths of evaluations in tokens, as in 128,512,2048. Default: "
        "evaluation.lengths of the config, else 1, 2, 4, 8 and 16 times the training length as "
        "far as the text reaches.",
    ),
]
Protocols = Annotated[
    str,
    typer.Option(
        help="Protocols of evaluations: nonoverlapping, sliding, or both separated by a comma."
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens from one sliding window to the next. Default: evaluation.stride of the "
        "config where no length is shorter, else the shortest length.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Score at most this many validation tokens. Default: all; evaluation.max_tokens "
        "bounds the evaluations while training.",
    ),
]
BOTH_PROTOCOLS = "nonoverlapping,sliding"
"""The default of --protocols."""
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="auto|none|PATH",
        help="Start from the run's newest checkpoint if there is one (auto), from step 0 "
        "(none), or from this checkpoint. Default: auto.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the job and when it could start, and submit nothing."),
]
EvaluationTasks = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="GPUs of an evaluation, on one node. Default: as many as training uses per node.",
    ),
]
EvaluationTime = Annotated[
    str | None,
    typer.Option(metavar="LIMIT", help="Time limit of an evaluation. Default: that of training."),
]
Partition = Annotated[
    str | None, typer.Option(metavar="NAME", help="Partition of the job. Default: the site's.")
]
Account = Annotated[
    str | None, typer.Option(metavar="NAME", help="Account that pays. Default: the site's.")
]
Qos = Annotated[
    str | None, typer.Option(metavar="NAME", help="Quality of service. Default: the site's.")
]
Sbatch = Annotated[
    list[str],
    typer.Option(
        metavar="KEY=VALUE",
        help="Another option of sbatch, as in exclude=node07. Can be repeated; comes before the "
        "site's sbatch_arguments.",
    ),
]
Dependency = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE:JOB", help="Jobs to wait for, as sbatch --dependency takes them: afterok:123."
    ),
]
Mail = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Have Slurm send a mail when the job has finished or given up, and when a node dies.",
    ),
]
EvaluateCheckpoints = Annotated[
    bool,
    typer.Option(
        "--evaluate-checkpoints",
        help="Evaluate each checkpoint when it is complete, in a job of its own.",
    ),
]
After = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN", help="Start when this run's job has ended well, whatever its restarts."
    ),
]

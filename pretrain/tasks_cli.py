"""Define `pretrain evaluate-tasks`, as pretrain/cli.py does the other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.config.arguments import Overrides, Sources


def evaluate_tasks(
    sources: Sources,
    tasks: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Which to measure.")
    ] = "needle,induction,documents",
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Lengths of the context in tokens. Default: evaluation.lengths of the config, "
            "else 1, 2, 4, 8 and 16 times the training length, as far as the text reaches.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Samples of each task at each length. More make intervals narrower: half as wide "
            "with four times as many.",
        ),
    ] = 64,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the results to this file, and CSV, figures and Markdown beside it.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Measure what a model makes of a long context, beyond perplexity.

    \b
    needle     32 tokens of text stand somewhere in a long context and are repeated at its end
    induction  the same with random tokens, at several distances: nothing but copying helps
    documents  the second half of long documents, with all the context and with L tokens of it

    Each says how much lower the loss is with the context that can help than without it, in nats per
    token: 0 means that the model makes no use of it. The training length is L. Under torchrun or
    srun all processes share the work.

    \b
    Example:
      pretrain evaluate-tasks runs/demo/alibi runs/demo/sinusoidal \\
          --out runs/demo/report/tasks.json
    """
    from pretrain.evaluate.tasks.request import TasksRequest

    request = TasksRequest.parse(tasks, lengths, samples)
    from pretrain.evaluate.tasks.command import evaluate_tasks as run

    run(sources, request, overrides, out)

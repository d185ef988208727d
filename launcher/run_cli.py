"""Define `launcher run`, which does a whole experiment."""

from __future__ import annotations

from pretrain.config import EvaluationRequest
from pretrain.config.arguments import Config, Overrides
from pretrain.launcher.options import (
    BOTH_PROTOCOLS,
    Lengths,
    MaxTokens,
    Nodes,
    SiteFile,
    TimeLimit,
)


def run(
    config: Config,
    site: SiteFile,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    nodes: Nodes = None,
    time: TimeLimit = None,
    lengths: Lengths = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Build the data, train, evaluate and report on a Slurm cluster.

    Does what is not done yet, in this order: builds the data set with `launcher data build`, has
    Slurm check the job, submits it with --evaluate-checkpoints, prints what the ranks print until
    the run is finished, waits for the evaluations and prints perplexity by length over the
    training steps, as in RUN/evaluations/report.md.

    Ctrl-C ends only the watching, except that it cancels a build. The same command goes on where
    the run is: a job in the queue is followed, a finished run is reported.

    \b
    Examples:
      launcher run configs/demo.toml --site slurm/site.toml
      launcher run configs/cc100_roberta/alibi_1024.toml --site slurm/site.toml
    """
    from pretrain.launcher.login import run as experiment

    request = EvaluationRequest.parse(lengths, BOTH_PROTOCOLS, None, max_tokens)
    experiment.run(config, overrides, site, nodes, time, request)

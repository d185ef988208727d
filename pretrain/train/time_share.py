"""Bound the time of the evaluations in the training loop by a share of the time of training.

An evaluation scores the same tokens whenever it is done, so that the points of a curve, and the
curves of several runs, stay comparable. What adapts is how often: an evaluation that would take too
much is left out, and the next one is due an interval later.

The decision follows from the run's metrics.jsonl alone, which holds the seconds of every step and
every evaluation. A restart therefore decides as the run did before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import RunConfig
from pretrain.evaluate.windows import Protocol
from pretrain.model.flops import flops_per_token
from pretrain.rundir.metrics import Record, is_evaluation, read_metrics

SECONDS, SHARE = "evaluation_seconds", "evaluation_time_share"
"""Keys of an evaluation's record: what this protocol and length took, and what all evaluations of
the run so far have taken, as a share of the seconds in training steps."""


@dataclass(frozen=True)
class Spent:
    """Seconds that a run has spent up to a step."""

    training: float = 0.0
    """In training steps; steps that were lost and taken again count once."""
    evaluations: float = 0.0
    """In evaluations."""
    newest: float | None = None
    """In the newest evaluation, all lengths together; None before the first one."""
    samples: int = 0
    """Sequences of the training steps."""

    @staticmethod
    def of(path: Path, step: int) -> Spent:
        """Add up the records of a metrics.jsonl.

        Args:
            path: The file; a missing one is empty.
            step: The last step that counts.
        """
        training, evaluations, samples = 0.0, {0: 0.0}, 0
        for record in read_metrics(path):
            number = record["step"]
            if number > step:
                continue
            if is_evaluation(record):
                seconds = evaluations.get(number, 0.0) + _number(record, SECONDS)
                evaluations[number] = seconds
            training += _number(record, "step_seconds")
            samples += int(_number(record, "global_batch_size"))
        newest = evaluations[max(evaluations)]
        return Spent(training, sum(evaluations.values()), newest or None, samples)

    def share(self, further: float = 0.0) -> float:
        """Return the share of the training steps' seconds that evaluations have taken.

        Args:
            further: Seconds of an evaluation to add.
        """
        total = self.evaluations + further
        return total / self.training if self.training else float(total > 0)

    def next_evaluation(
        self, config: RunConfig, protocols: Sequence[Protocol], tokens: int
    ) -> float:
        """Return the seconds that another evaluation will take: as many as the newest one.

        Before the first one they are estimated from the training steps. A forward pass has a third
        of the operations of a step, and as many tokens pass through the model as the windows hold.

        Args:
            config: The run.
            protocols: What is measured.
            tokens: Tokens that are scored.
        """
        if self.newest is not None:
            return self.newest
        length = config.data.sequence_length
        trained = self.samples * length * flops_per_token(config, length, causal=False)
        flops = 0.0
        for protocol in protocols:
            _, stride, window = protocol.key
            passing = tokens * window / stride
            flops += passing * flops_per_token(config, window, causal=False) / 3
        return self.training * flops / trained if trained else 0.0


def refusal(
    config: RunConfig, protocols: Sequence[Protocol], tokens: int, step: int, spent: Spent
) -> str | None:
    """Return why the evaluation after a step is left out, or None if it may be done.

    The last step is always evaluated.

    Args:
        config: The run.
        protocols: What is measured.
        tokens: Tokens that are scored.
        step: The step.
        spent: What the run has spent up to it.
    """
    limit = config.evaluation_time_share
    if limit is None or step >= config.train.num_steps:
        return None
    needed = spent.next_evaluation(config, protocols, tokens)
    share = spent.share(needed)
    if share <= limit:
        return None
    return (
        f"evaluation after step {step} left out: with its {needed:.3g} s, evaluations would take "
        f"{share:.2%} of the {spent.training:.3g} s of training so far "
        f"(evaluation.max_time_share = {limit:g}). The last step is evaluated in any case; a lower "
        "evaluation.max_tokens leaves time for more"
    )


def _number(record: Record, key: str) -> float:
    """Return a value of a record, or 0 where it is missing or damaged."""
    value = record.get(key)
    return value if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0

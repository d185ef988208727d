"""Name a run's numbers as W&B and TensorBoard show them: in groups, with axes to draw them over.

RUN/metrics.jsonl has names of its own, with units, which do not change. Here each gets the group
under which it is shown and, where there is one, the name that Hugging Face's Trainer uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pretrain.checkpoint.changes import trained_tokens
from pretrain.checkpoint.content import Change, TrainerState
from pretrain.config import RunConfig
from pretrain.rundir.metrics import Record, is_change, is_evaluation, read_metrics

TAGS = {
    "loss_nats": "train/loss",
    "gradient_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "global_batch_size": "train/global_batch_size",
    "consumed_samples": "train/consumed_samples",
    "tokens_per_second": "throughput/tokens_per_second",
    "step_seconds": "throughput/step_seconds",
    "data_wait_seconds": "throughput/data_wait_seconds",
    "tflops_per_second": "throughput/tflops_per_second",
    "tflops_per_second_causal": "throughput/tflops_per_second_causal",
    "model_flops_utilization": "throughput/model_flops_utilization",
    "model_flops_utilization_causal": "throughput/model_flops_utilization_causal",
    "peak_memory_bytes": "health/peak_memory_bytes",
    "loss_scale": "health/loss_scale",
    "skipped_updates": "health/skipped_updates",
    "rollbacks": "health/rollbacks",
    "rolled_back_from_step": "health/rolled_back_from_step",
}
"""Key of a step's record -> tag."""
GROUPS = ("train", "throughput", "health", "data", "eval")
"""What the tags begin with."""
STEP, TOKENS, SECONDS = "step", "tokens", "elapsed_seconds"
"""The axes: steps done, tokens trained on, and seconds in training steps, all since step 0 whatever
the number of starts. Saves, evaluations, and steps that were lost and taken again do not count."""
FIGURE = "eval/length_curve"
"""The tag of the figure of perplexity by length."""


def step_tags(record: Record) -> Record:
    """Return the numbers of a step's record by their tags, "group/name".

    A key without a tag is one of a corpus (`metrics.PASS`), and goes to the group "data".
    """
    return {
        TAGS.get(key, f"data/{key}"): value
        for key, value in record.items()
        if key != STEP and isinstance(value, int | float)
    }


def evaluation_tags(records: Sequence[Record]) -> Record:
    """Return an evaluation as eval/<measure>_<protocol>/<length>."""
    return {
        f"eval/{name}_{record['protocol']}/{record['length']}": record[key]
        for record in records
        for key, name in (("perplexity", "perplexity"), ("loss_nats", "loss"))
    }


class Axes:
    """Follows how far training has come, in tokens and in seconds."""

    def __init__(self, path: Path, config: RunConfig, changes: Sequence[Change]) -> None:
        """Begin where a metrics.jsonl ends.

        Args:
            path: The file, which holds the steps that were kept.
            config: The run's config.
            changes: What was changed on the way; a step may have had other lengths before.
        """
        self._path, self._config, self._changes = path, config, changes
        self.read()

    def read(self) -> None:
        """Read the file again, after records were dropped from it."""
        self._tokens, self._seconds = 0, 0.0
        for record in read_metrics(self._path):
            if not is_evaluation(record) and not is_change(record):
                self.step(record)

    def step(self, record: Record) -> None:
        """Go on by one step."""
        seconds, samples = record.get("step_seconds"), record.get("consumed_samples")
        # A file may be damaged.
        if isinstance(seconds, int | float):
            self._seconds += seconds
        if isinstance(samples, int):
            state = TrainerState(record["step"], samples)
            self._tokens = trained_tokens(self._config, state, self._changes)

    def values(self) -> Record:
        """Return the axes' present values, but for the step."""
        return {TOKENS: self._tokens, SECONDS: self._seconds}

"""What the loop calls after every step: measure and log, evaluate, save. A hook is shown the run; it never steers it.

What was asked of the run (`run.requests`) is the ranks' to agree on: an evaluation asks before each pass, a save after it.
Once they have agreed, an evaluation is left to the next start, and the step is saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from pretrain import platform
from pretrain.checkpoint.save import save_checkpoint
from pretrain.data.manifest import TOKENIZER
from pretrain.data.tokenizer import Tokenizer
from pretrain.evaluate.perplexity import Evaluator
from pretrain.evaluate.perplexity import Protocol as EvaluationProtocol
from pretrain.model.flops import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.train.metrics import MetricsWriter
from pretrain.train.start import Run, is_evaluated_after, protocols
from pretrain.train.step import agree
from pretrain.train.stopping import Interrupted


class Hook(Protocol):
    """Called on every rank: before the first step, after every step, and once at the end."""

    def at_start(self, run: Run) -> None:
        """What the run still owes to the step it was resumed at."""

    def after_step(self, run: Run, record: dict[str, float]) -> None:
        """`record` is what was measured about the step just taken."""

    def close(self) -> None:
        """Also after a failure."""


def make_hooks(run: Run) -> list[Hook]:
    """The hooks of a run, in the order in which they are called; evaluations are logged before the step is saved."""
    writer = (
        MetricsWriter(run.config, run.config.directory, run.progress.step)
        if run.topology.is_main
        else None
    )
    return [Log(run, writer), Evaluate(run, writer), Save(run)]


class Log:
    """Adds rates to the record and hands it to the writer (rank 0)."""

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        self.writer = writer
        self.peak = peak_tflops_per_second(platform.device_name())
        length = run.config.data.sequence_length
        self.flops = {
            name: flops_per_token(run.config, length, causal=causal)
            for name, causal in (("", False), ("_causal", True))
        }

    def at_start(self, run: Run) -> None:
        """The step was logged before it was saved."""

    def after_step(self, run: Run, record: dict[str, float]) -> None:
        """Rates count the whole job's tokens over the step; TFLOP/s and MFU are a device's."""
        if self.writer is None:
            return
        rate = run.config.tokens_per_step / record["step_seconds"]
        record["tokens_per_second"] = rate
        for name, flops in self.flops.items():
            rate_of_device = rate / run.topology.layout.world_size
            record[f"tflops_per_second{name}"] = flops * rate_of_device / 1e12
            if self.peak:
                record[f"model_flops_utilization{name}"] = model_flops_utilization(
                    rate_of_device, flops, self.peak
                )
        record["peak_memory_bytes"] = platform.peak_memory_bytes()
        if run.optimizer.is_fp16:
            record["loss_scale"] = float(run.optimizer.zero.loss_scale)
        self.writer.step(record)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Evaluate:
    """Perplexity at several lengths every evaluation.interval_steps and after the last step: the curve as it grows."""

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        c = run.config
        self.writer = writer
        self.evaluator = Evaluator(
            run.chunks,
            run.topology,
            run.validation_stream,
            Tokenizer(c.data_directory / TOKENIZER).eos_id,
            tokens_per_batch=c.evaluation.tokens_per_batch,
            max_tokens=c.evaluation.max_tokens,
            engine=None if run.optimizer.stage == 1 else run.optimizer.engine,
        )

    def at_start(self, run: Run) -> None:
        """The evaluation in which the run was stopped."""
        self._evaluate(run, run.standing.unevaluated)

    def after_step(self, run: Run, record: dict[str, float]) -> None:
        """All ranks score, rank 0 writes."""
        if is_evaluated_after(run.config, run.progress.step):
            self._evaluate(run, protocols(run.config))

    def _evaluate(self, run: Run, those: Sequence[EvaluationProtocol]) -> None:
        """All of `those`, or nothing: what was scored before a stop is dropped."""
        if not those or run.requests.agreed:
            return
        step = run.progress.step

        def before_pass() -> None:
            run.account.progress(step)
            agree(run.requests)
            if run.requests.agreed:
                raise Interrupted

        with run.account.during("evaluating", step), contextlib.suppress(Interrupted):
            results = [
                self.evaluator.evaluate(protocol, before_pass=before_pass) for protocol in those
            ]
            if self.writer is not None:
                self.writer.evaluation(
                    [{"step": step, "evaluation": True, **result.record()} for result in results]
                )

    def close(self) -> None:
        """Nothing to close."""


class Save:
    """A checkpoint every checkpoint.interval_steps, after the last step, and when the run is asked to stop."""

    def __init__(self, run: Run) -> None:
        self.saved = run.standing.saved

    def at_start(self, run: Run) -> None:
        """A run that is stopped now has nothing new, unless it began with another run's checkpoint."""
        if run.requests.agreed:
            self._save(run)

    def after_step(self, run: Run, record: dict[str, float]) -> None:
        """All ranks together."""
        step, last = run.progress.step, run.config.train.num_steps
        if run.requests.agreed or step % run.config.checkpoint.interval_steps == 0 or step == last:
            self._save(run)
        if self.saved == step < last and not run.requests.agreed:
            agree(
                run.requests
            )  # asked while it saved: stops here, not a step and a second save later

    def _save(self, run: Run) -> None:
        step = run.progress.step
        if step == self.saved:
            return
        with run.account.during("saving", step, saved=step):
            save_checkpoint(run.config, run.topology, run.optimizer, run.progress)
            dist.barrier()
        self.saved = step

    def close(self) -> None:
        """Nothing to close."""

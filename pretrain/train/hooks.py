"""What the loop calls after every step: measure and log, evaluate, save. A hook is shown the run; it never steers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from pretrain import platform
from pretrain.checkpoint.save import save_checkpoint
from pretrain.data.manifest import TOKENIZER
from pretrain.data.tokenizer import Tokenizer
from pretrain.evaluate.perplexity import Evaluator
from pretrain.evaluate.perplexity import Protocol as EvaluationProtocol
from pretrain.model.flops import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.train.metrics import MetricsWriter

if TYPE_CHECKING:
    from pretrain.train.loop import Run


class Hook(Protocol):
    """Called on every rank after every step, and once at the end."""

    def after_step(self, run: Run, record: dict[str, float]) -> None:
        """`record` is what was measured about the step just taken."""

    def close(self) -> None:
        """Also after a failure."""


def make_hooks(run: Run) -> list[Hook]:
    """The hooks of a run, in the order in which they are called; evaluations are logged before the step is saved."""
    writer = MetricsWriter(run.config, run.config.directory, run.progress.step) if run.topology.is_main else None
    return [Log(run, writer), Evaluate(run, writer), Save()]


class Log:
    """Adds rates to the record and hands it to the writer (rank 0)."""

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        self.writer = writer
        self.peak = peak_tflops_per_second(platform.device_name())
        length = run.config.data.sequence_length
        self.flops = {name: flops_per_token(run.config, length, causal=causal) for name, causal in
                      (("", False), ("_causal", True))}  # fmt: skip

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
                record[f"model_flops_utilization{name}"] = model_flops_utilization(rate_of_device, flops, self.peak)
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
        self.protocols = [EvaluationProtocol(name, length, c.evaluation_stride)
                          for name in c.evaluation.protocols for length in c.evaluation_lengths]  # fmt: skip
        self.evaluator = Evaluator(
            run.chunks, run.topology, run.validation_stream, Tokenizer(c.data_directory / TOKENIZER).eos_id,
            tokens_per_batch=c.evaluation.tokens_per_batch, max_tokens=c.evaluation.max_tokens,
            engine=None if run.optimizer.stage == 1 else run.optimizer.engine,
        )  # fmt: skip

    def after_step(self, run: Run, record: dict[str, float]) -> None:
        """All ranks score, rank 0 writes."""
        step = run.progress.step
        if step % run.config.evaluation.interval_steps and step != run.config.train.num_steps:
            return
        results = [self.evaluator.evaluate(protocol) for protocol in self.protocols]
        if self.writer is not None:
            self.writer.evaluation([{"step": step, "evaluation": True, **result.record()} for result in results])

    def close(self) -> None:
        """Nothing to close."""


class Save:
    """A checkpoint every checkpoint.interval_steps and after the last step."""

    def after_step(self, run: Run, record: dict[str, float]) -> None:
        """All ranks together."""
        step = run.progress.step
        if step % run.config.checkpoint.interval_steps == 0 or step == run.config.train.num_steps:
            save_checkpoint(run.config, run.topology, run.optimizer, run.progress)
            dist.barrier()

    def close(self) -> None:
        """Nothing to close."""

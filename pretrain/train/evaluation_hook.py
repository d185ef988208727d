"""The hook that evaluates a run while it trains."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Sequence

from pretrain.config.evaluation import recorded_protocol
from pretrain.evaluate.memory import check_memory
from pretrain.evaluate.perplexity import Evaluator
from pretrain.evaluate.records import HASH_DIGITS
from pretrain.evaluate.text import ScoredText
from pretrain.evaluate.windows import Protocol
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import Phase
from pretrain.topology import on_main
from pretrain.train.hook import Hook
from pretrain.train.metrics import MetricsWriter
from pretrain.train.start import Run
from pretrain.train.start_point import is_evaluated_after
from pretrain.train.step import agree
from pretrain.train.stopping import Interrupted
from pretrain.train.time_share import SECONDS, SHARE, Spent, refusal


class EvaluationHook(Hook):
    """Measure perplexity at several lengths, every evaluation.interval_steps and at the end.

    An evaluation between may be left out, where evaluation.max_time_share bounds their time.
    """

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        config, text = run.config.evaluation, run.validation_stream
        self.writer = writer
        self.clock = time.perf_counter
        self.metrics = RunPaths(run.config.directory).metrics
        # Checked at the start, because the first evaluation may be thousands of steps later.
        check_memory(run.config, run.topology, run.start_point.evaluations)
        self.evaluator = Evaluator(
            run.chunks,
            run.topology,
            ScoredText(text, config.max_tokens),
            tokens_per_batch=config.tokens_per_batch,
            schedule_module=run.optimizer.schedule_module,
            mask_id=run.config.mask_id if run.config.is_masked else None,
        )
        self.common = {
            "evaluation": True,
            "tokenizer": text.tokenizer_sha256[:HASH_DIGITS],
            "validation": text.identity[:HASH_DIGITS],
        }

    def at_start(self, run: Run) -> None:
        """Do the evaluations that the previous attempt was stopped in."""
        self._evaluate(run, run.start_point.pending_evaluations)

    def is_due(self, run: Run) -> bool:
        """Return True if the step is to be evaluated."""
        return is_evaluated_after(run.config, run.state.step)

    def between_steps(self, run: Run) -> None:
        """Evaluate if it is due. All ranks score; rank 0 writes."""
        # A loss of an earlier step says nothing about the checkpoint of this one.
        run.origin = dataclasses.replace(run.origin, validation_loss_nats=None)
        if self.is_due(run):
            self._evaluate(run, run.start_point.evaluations)

    def _evaluate(self, run: Run, pending: Sequence[Protocol]) -> None:
        """Evaluate and write all of `pending`, or nothing if the ranks agree to stop meanwhile."""
        step = run.state.step
        if not pending or run.requests.agreed or self._is_left_out(run):
            return

        def before_pass() -> None:
            run.reporter.progress(step)
            agree(run.requests)
            if run.requests.agreed:
                raise Interrupted

        # All results are written at once or not at all, so that the metrics never hold a part of
        # an evaluation: what was scored before a stop is dropped and done again.
        with run.reporter.during(Phase.EVALUATING, step), contextlib.suppress(Interrupted):
            results, seconds = [], []
            for protocol in pending:
                begin = self.clock()
                results.append(self.evaluator.evaluate(protocol, before_pass=before_pass))
                seconds.append(self.clock() - begin)
            if self.writer is not None:
                share = Spent.of(self.metrics, step).share(sum(seconds))
                self.writer.evaluation(
                    [
                        {"step": step, **self.common, **result.record(), SECONDS: own, SHARE: share}
                        for result, own in zip(results, seconds)
                    ]
                )
            trained = (
                recorded_protocol(run.config, "nonoverlapping"),
                run.config.data.sequence_length,
            )
            for result in results:
                is_trained = (result.protocol.name, result.protocol.length) == trained
                if is_trained and math.isfinite(result.loss_nats):
                    run.origin = dataclasses.replace(
                        run.origin, validation_loss_nats=result.loss_nats
                    )

    def _is_left_out(self, run: Run) -> bool:
        """Return True if the time for an evaluation is not there, alike on all ranks.

        Rank 0 decides, which has the metrics, and says so.
        """
        if run.config.evaluation_time_share is None:
            return False
        step, tokens = run.state.step, self.evaluator.text.tokens
        protocols = run.start_point.evaluations

        def why() -> str | None:
            spent = Spent.of(self.metrics, step)
            return refusal(run.config, protocols, tokens, step, spent)

        reason = on_main(run.topology, why)
        if reason is not None and run.topology.is_main:
            print(reason, file=sys.stderr, flush=True)
        return reason is not None

"""Test which evaluations a run has time for, by a clock that the test sets."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pretrain.config import RunConfig
from pretrain.evaluation.windows import Protocol
from pretrain.rundir.metrics import MetricsFile
from pretrain.training.hooks import Spent, refusal
from tests.conftest import tiny_config

PROTOCOLS = (Protocol("nonoverlapping", 32, 32), Protocol("sliding", 64, 16))
TOKENS = 2048


def config_with(**evaluation: object) -> RunConfig:
    return tiny_config(train={"num_steps": 2000}, evaluation=evaluation)


def simulate(
    config: RunConfig, path: Path, seconds: random.Random, cost: float, restart_at: int | None
) -> list[int]:
    """Return the steps that are evaluated, of a run whose steps take 1 s and more.

    Checks after every step that evaluations have not taken more than their share.
    """
    limit, evaluated = config.evaluation_time_share, []
    assert limit is not None
    trained = spent = 0.0
    metrics = MetricsFile(path, 0)
    for step in range(1, 2001):
        took = 1 + seconds.random()
        trained += took
        metrics.write({"step": step, "step_seconds": took, "global_batch_size": 8})
        if step == restart_at:
            metrics.close()
            metrics = MetricsFile(path, step)
        if step % config.evaluation_interval_steps and step != 2000:
            continue
        found = Spent.of(path, step)
        assert found.training == pytest.approx(trained)
        assert found.evaluations == pytest.approx(spent)
        reason = refusal(config, PROTOCOLS, TOKENS, step, found)
        if reason is None:
            evaluated.append(step)
            for length in (32, 64):
                record = {"step": step, "evaluation": True, "length": length}
                metrics.write(record | {"evaluation_seconds": cost / 2})
            spent += cost
        else:
            assert f"step {step} left out" in reason and "evaluation.max_time_share" in reason
        # All but the last one fit: it is done in any case.
        assert spent <= limit * trained + (cost if step == 2000 else 0)
    metrics.close()
    return evaluated


# The first evaluation is estimated: 3,072 x 4 tokens pass through the model at a third of a step's
# operations, where a step of 256 tokens takes 1.5 s. That is 15 s and more.
@pytest.mark.parametrize(
    ("cost", "share", "steps"), [(20.0, 0.02, 3), (20.0, 0.1, 15), (1.0, 0.5, 20)]
)
def test_evaluations_never_exceed_their_share_but_for_the_last(
    tmp_path: Path, cost: float, share: float, steps: int
) -> None:
    config = config_with(interval_steps=100, max_time_share=share)
    once = simulate(config, tmp_path / "a.jsonl", random.Random(1), cost, None)
    assert len(once) == pytest.approx(steps, abs=1) and once[-1] == 2000
    again = simulate(config, tmp_path / "b.jsonl", random.Random(1), cost, 1234)
    assert again == once


def test_the_first_evaluation_is_estimated_from_the_steps(tmp_path: Path) -> None:
    config = config_with(max_time_share=0.02)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2):
        metrics.write({"step": step, "step_seconds": 3.0, "global_batch_size": 8})
    metrics.close()
    spent = Spent.of(tmp_path / "metrics.jsonl", 2)
    assert spent == Spent(training=6.0, samples=16)
    # Nonoverlapping windows of the training length: 512 tokens took 6 s, three operations each.
    alone = spent.next_evaluation(config, PROTOCOLS[:1], TOKENS)
    assert alone == pytest.approx(6 * TOKENS / 512 / 3)
    # Windows of 64 by 16 pass four times as many tokens, at some more operations each.
    both = spent.next_evaluation(config, PROTOCOLS, TOKENS)
    assert 5 * alone < both < 5.5 * alone
    assert refusal(config, PROTOCOLS, TOKENS, 2, spent) is not None


def test_a_missing_or_damaged_file_counts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert Spent.of(path, 10) == Spent()
    bad = ['{"step": 1, "step_seconds": "x", "global_batch_size": null}', '{"step": 2, "step_sec']
    whole = ['{"step": 3, "evaluation": true, "length": 32}', '{"step": 4, "step_seconds": 5.0}']
    path.write_text("\n".join(bad + whole) + "\n")
    # The evaluation has lost its seconds; what is after step 3 does not count.
    assert Spent.of(path, 3) == Spent()
    assert Spent.of(path, 4) == Spent(training=5.0)
    config = config_with(max_time_share=0.02)
    assert refusal(config, PROTOCOLS, TOKENS, 3, Spent()) is None


def test_an_interval_that_is_set_is_kept() -> None:
    spent = Spent(training=1.0, evaluations=50.0, newest=50.0, samples=8)
    given = config_with(interval_steps=10)
    assert given.evaluation_time_share is None and given.evaluation_interval_steps == 10
    assert refusal(given, PROTOCOLS, TOKENS, 10, spent) is None
    free = config_with()
    assert free.evaluation_time_share == 0.02 and free.evaluation_interval_steps == 1000
    # 50 s and another 50 s, of 1 s.
    assert "would take 10000.00% of the 1 s of" in str(refusal(free, PROTOCOLS, TOKENS, 10, spent))
    assert refusal(free, PROTOCOLS, TOKENS, 2000, spent) is None
    both = config_with(interval_steps=10, max_time_share=0.5)
    assert both.evaluation_time_share == 0.5 and both.evaluation_interval_steps == 10

"""A rank that holds up the others is named; without a reason nobody is."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import subprocess
import sys
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pretrain.config import RunConfig
from pretrain.rundir.metrics import read_metrics
from pretrain.rundir.paths import RunPaths
from pretrain.topology import initialize
from pretrain.training import stragglers
from pretrain.training.stragglers import (
    LOST_SECONDS,
    SLOW_RATIO,
    WINDOW_STEPS,
    Place,
    StepTimes,
    Stragglers,
    places,
)
from tests.conftest import ALL_LAYOUTS, directories, mark_torture, tiny_config

SLEEP = 0.4
WINDOW = 4
FIRST, LAST = WINDOW + 1, 3 * WINDOW
"""The steps that one rank sleeps in."""


def train_slowed(config: RunConfig, slow: int, **constants: float) -> str:
    """Train a run in which one rank sleeps in some steps; return what this rank printed.

    Args:
        config: The run's config.
        slow: The rank; -1 for none.
        **constants: Values of constants of `pretrain.training.stragglers`.
    """

    from pretrain.training import loop

    seed_step = loop.seed_step

    def own_seed(config: RunConfig, topology: Any, step: int) -> None:
        if dist.get_rank() == slow and FIRST <= step + 1 <= LAST:
            time.sleep(SLEEP)
        seed_step(config, topology, step)

    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        patch.object(loop, "seed_step", own_seed),
        patch.multiple(stragglers, **constants),
    ):
        assert loop.train(config) == 0
    return said.getvalue()


def waits_of_named_arguments(config: RunConfig) -> int:
    """Return how many waits are measured of a collective that is given its arguments by name."""

    from tests.distributed.health_tasks import build_run

    run = build_run(config)
    with run.times.measuring(run.topology, 1):
        work = dist.distributed_c10d._get_default_group().allreduce(tensors=[torch.ones(1)])
        work.wait(timeout=datetime.timedelta(minutes=5))
    return len(run.times.take())


def test_collectives_with_named_arguments_are_measured(pools, tiny_data, tmp_path):
    config = run_config(tiny_data, tmp_path, ALL_LAYOUTS["dp2"][1], LAST)
    assert pools(2).run(waits_of_named_arguments, config) == [1, 1]


CASES = [
    *[(layout, slow) for layout in ("dp2", "tp2") for slow in (0, 1)],
    *[(layout, 2) for layout in ("dp4", "tp2-dp2", "pp2-dp2", "tp2pp2sp")],
    *[(layout, 1) for layout in ("zero2-dp2", "zero3-dp2")],
]


@pytest.mark.parametrize(("layout", "slow"), mark_torture(CASES, {("dp2", 1), ("tp2", 0)}))
def test_a_slow_rank_is_named(pools, tiny_data, tmp_path, layout, slow):
    processes, parallel = ALL_LAYOUTS[layout]
    config = run_config(tiny_data, tmp_path, parallel, LAST)
    said = pools(processes).run(train_slowed, config, slow, LOST_SECONDS=0.5, WINDOW_STEPS=WINDOW)
    assert f"warning: rank {slow} ({os.uname().nodename}, cpu) is slow" in said[0]
    assert all(" is slow" not in each for each in said[1:])
    records = read_metrics(RunPaths(config.directory).metrics)
    records = [record for record in records if "slowest_rank" in record]
    assert [record["step"] for record in records] == [WINDOW, 2 * WINDOW, LAST]
    assert [record["slowest_rank"] for record in records[1:]] == [slow, slow]
    # On a busy machine the rank may have been slow in the window before, too.
    assert records[-1]["slow_since_step"] in (1, FIRST)
    assert records[-1]["slowest_ratio"] > SLOW_RATIO


def stages_of_all(config: RunConfig) -> list[int]:
    """Return the stage in which each rank is compared with others."""

    return [place.stage for place in places(initialize(config))]


def test_ranks_of_one_part_of_the_sequence_are_compared_with_each_other(pools):
    config = tiny_config(parallel=ALL_LAYOUTS["cp2-dp2"][1])
    assert pools(4).run(stages_of_all, config)[0] == [0, 1, 0, 1]


def measured_waits(late: int) -> tuple[float, float, bool]:
    """Return this rank's seconds of waiting: for a rank that comes late, and behind own work."""

    times, topology, number = StepTimes(), initialize(tiny_config()), torch.ones(1)
    before, found = (vars(dist.Work)["wait"], vars(dist.ProcessGroup)["allreduce"]), []
    for is_async in (False, True):
        dist.barrier()
        with times.measuring(topology, 1):
            if dist.get_rank() == late:
                time.sleep(SLEEP)
            work = dist.all_reduce(number, async_op=is_async)
            if work is not None:
                # All ranks compute for longer than the one was late.
                time.sleep(2 * SLEEP)
                work.wait()
        found.append(sum(end.seconds_since(begin) for begin, end in times.take()))
    after = vars(dist.Work)["wait"], vars(dist.ProcessGroup)["allreduce"]
    return found[0], found[1], before == after and not number.isnan()


def test_waits_are_those_for_others_and_no_computing(pools):
    (waited, behind, left), (late, late_behind, late_left) = pools(2).run(measured_waits, 1)
    assert waited > max(late, behind, late_behind)
    assert left and late_left


@pytest.mark.torture
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "tp2-dp2"])
@pytest.mark.parametrize("attempt", range(5))
def test_beside_busy_processes_nobody_is_named(pools, tiny_data, tmp_path, layout, attempt):
    processes, parallel = ALL_LAYOUTS[layout]
    config = run_config(tiny_data, tmp_path, parallel, 20 * WINDOW_STEPS)
    busy = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(busy) as one:
        try:
            said = pools(processes).run(train_slowed, config, -1)
        finally:
            one.kill()
    assert " is slow" not in said[0], said[0]


def run_config(tiny_data: Any, tmp_path: Any, parallel: dict[str, Any], steps: int) -> RunConfig:
    return tiny_config(
        **directories(tmp_path / "run", tiny_data),
        parallel=parallel,
        train={"num_steps": steps},
        evaluation={"lengths": [32]},
    )


# ---- what is judged ------------------------------------------------------------------------------
def judged(stages: list[int], windows: list[list[float]]) -> list[tuple[int, str]]:
    """Return (step, line) of each line that is said about windows of seconds by rank."""
    found = Stragglers([Place(f"n{i}, cuda:0", stage) for i, stage in enumerate(stages)], 8)
    lines = []
    for step, busy in enumerate(windows, start=1):
        record, line = found.judge(8 * step, busy)
        lines += [(8 * step, line)] if line else []
        assert not line or record["slow_since_step"] < 8 * step
    return lines


EVEN, SLOW = [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.5, 1.0]


def test_two_windows_in_a_row_make_a_slow_rank():
    windows = [EVEN, SLOW, EVEN, SLOW, SLOW, SLOW, EVEN, SLOW, SLOW]
    (step, line), (again, _) = judged([0, 0, 0, 0], windows)
    assert (step, again) == (40, 72)
    assert "rank 2 (n2, cuda:0) is slow" in line and "since step 25 it is busy 0.5 s" in line


def test_a_short_or_small_delay_names_nobody():
    """Under a tenth however long, and under three seconds however large their share."""
    assert judged([0, 0, 0, 0], [[1.0, 1.0, 1.1, 1.0]] * 50) == []
    assert judged([0, 0], [[1.0, 1.5], [1.5, 1.0]] * 9) == []
    lost = LOST_SECONDS / (4 * 8)
    assert judged([0, 0], [[0.01, 0.01 + lost * 0.99]] * 4) == []
    assert [step for step, _ in judged([0, 0], [[0.01, 0.01 + lost * 1.01]] * 4)] == [32]


def test_a_rank_is_compared_with_the_median_of_the_others_of_its_stage():
    assert judged([0, 0, 1, 1], [[1.0, 1.0, 2.0, 2.0]] * 9) == []
    assert "rank 3 " in judged([0, 0, 1, 1], [[1.0, 1.0, 2.0, 3.0]] * 9)[0][1]
    assert judged([0, 1], [[1.0, 2.0]] * 9) == []
    found = Stragglers([Place(name, 0) for name in "abcd"], 8)
    record, _ = found.judge(8, [3.0, 1.0, 9.0, 2.0])
    assert record == {"slowest_rank": 2, "slowest_place": "c", "slowest_ratio": 4.5}
    # A rank that shares nothing measured nothing.
    assert found.judge(8, [1.0, 0.0, 1.0, 1.0]) == ({}, None)

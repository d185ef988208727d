"""A rank that holds up the others is named, with its seconds; without a reason nobody is."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from pretrain.config import RunConfig
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.rundir.paths import RunPaths
from pretrain.training.stragglers import (
    LOST_SECONDS,
    WINDOW_STEPS,
    Place,
    Stragglers,
    _median_of_others,
)
from tests.conftest import ALL_LAYOUTS, mark_torture, tiny_config

SLEEP = 0.25
FIRST, LAST = 2 * WINDOW_STEPS + 1, 5 * WINDOW_STEPS
"""The steps that one rank is slowed in."""
STEPS = LAST + 4 * WINDOW_STEPS


def train_slowed(config: RunConfig, slow: int, kind: str) -> str:
    """Train a run in which one rank is slowed in some steps; return what this rank printed."""
    import torch.distributed as dist

    from pretrain.data import order
    from pretrain.training import loop

    seed_step, batches = loop.seed_step, order.batches

    def own_seed(config: RunConfig, topology: Any, step: int) -> None:
        if dist.get_rank() == slow and FIRST <= step + 1 <= LAST and kind == "computing":
            time.sleep(SLEEP)
        seed_step(config, topology, step)

    def own_batches(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for step, batch in enumerate(batches(*args, **kwargs), start=1):
            if dist.get_rank() == slow and FIRST <= step <= LAST and kind == "data":
                time.sleep(SLEEP)
            yield batch

    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        patch.object(loop, "seed_step", own_seed),
        patch.object(loop, "batches", own_batches),
    ):
        assert loop.train(config) == 0
    return said.getvalue()


def waits_of_named_arguments(config: RunConfig) -> int:
    """Return how many waits are measured of a collective that is given its arguments by name."""
    import torch
    import torch.distributed as dist

    from tests.distributed.health_tasks import build_run

    run = build_run(config)
    with run.times.measuring(run.topology, 1):
        work = dist.distributed_c10d._get_default_group().allreduce(tensors=[torch.ones(1)])
        work.wait(timeout=datetime.timedelta(minutes=5))
    return len(run.times.take())


def test_collectives_with_named_arguments_are_measured(pools, tiny_data, tmp_path):
    config = run_config(tiny_data, tmp_path, ALL_LAYOUTS["dp2"][1], STEPS)
    assert pools(2).run(waits_of_named_arguments, config) == [1, 1]


CASES = [
    *[(layout, slow, "computing") for layout in ("dp2", "tp2", "pp2") for slow in (0, 1)],
    *[(layout, 2, "computing") for layout in ("dp4", "tp2-dp2", "pp2-dp2", "tp2pp2sp")],
    *[(layout, 1, "computing") for layout in ("pp2vpp2", "zero2-dp2", "zero3-dp2")],
    ("dp2", 1, "data"),
]


@pytest.mark.parametrize(
    ("layout", "slow", "kind"),
    mark_torture(CASES, {("dp2", 1, "computing"), ("pp2", 0, "computing")}),
)
def test_a_slow_rank_is_named(pools, tiny_data, tmp_path, layout, slow, kind):
    """With the seconds that it sleeps in a step: three quarters of them to 1.4 times, under load.

    A rank that sleeps leaves its core to the others, and those that come together are slowed.
    """
    processes, parallel = ALL_LAYOUTS[layout]
    config = run_config(tiny_data, tmp_path, parallel, STEPS)
    said = pools(processes).run(train_slowed, config, slow, kind)
    lines = [line for line in said[0].splitlines() if line.startswith(("warning: rank", "rank"))]
    assert all("rank" not in each.split(" is ")[0] for each in said[1:])
    begin, end = lines
    does = "waits for data" if kind == "data" else "computes"
    name = f"rank {slow} (host {os.uname().nodename}, device cpu)"
    since = int(end.removeprefix(f"{name} is no longer slow, as it was since step "))
    # On a busy machine the windows before may have had a tenth of a step that is noise.
    assert since in range(1, FIRST + 1, WINDOW_STEPS)
    assert begin.startswith(f"warning: {name} is slow") and f" step {since} it {does} " in begin
    records = step_records(config)
    named = [record for record in records if "straggler_rank" in record]
    assert {record["step"] % WINDOW_STEPS for record in named} == {0}
    assert {record["straggler_rank"] for record in named} == {slow}
    assert {record["num_stragglers"] for record in named} == {1}
    assert named[0]["straggler_since_step"] == since and named[-1]["step"] < STEPS
    seconds = [r["straggler_seconds"] for r in named if FIRST + 1 < r["step"] <= LAST]
    assert 0.75 * SLEEP < statistics.median(seconds) < 1.4 * SLEEP, seconds
    check_lists(named[0], slow, kind)


def stages_of_all(config: RunConfig) -> list[int]:
    """Return the stage in which each rank is compared with others."""
    from pretrain.topology import initialize
    from pretrain.training.stragglers import places

    return [place.stage for place in places(initialize(config))]


def test_ranks_of_one_part_of_the_sequence_are_compared_with_each_other(pools):
    config = tiny_config(parallel=ALL_LAYOUTS["cp2-dp2"][1])
    assert pools(4).run(stages_of_all, config)[0] == [0, 1, 0, 1]


def measured_waits(late: int) -> tuple[float, float, bool]:
    """Return this rank's seconds of waiting: for a rank that comes late, and behind own work."""
    import torch
    import torch.distributed as dist

    from pretrain.topology import initialize
    from pretrain.training.stragglers import StepTimes

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
    assert waited > 0.9 * SLEEP and late < 0.5 * SLEEP
    assert behind < 0.5 * SLEEP and late_behind < 0.5 * SLEEP
    assert left and late_left


def check_lists(record: dict[str, Any], slow: int, kind: str) -> None:
    """The lists of all ranks: of a step's seconds, each is one of three."""
    columns = [record[f"rank_{name}_seconds"] for name in ("compute", "wait", "data")]
    least, *_ = sorted(columns[1])
    assert columns[1][slow] == least
    assert columns[2 if kind == "data" else 0][slow] > SLEEP
    assert record["compute_seconds"] <= max(columns[0]) * 1.001


@pytest.mark.torture
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "tp2-dp2"])
@pytest.mark.parametrize("attempt", range(5))
def test_beside_busy_processes_nobody_is_named(pools, tiny_data, tmp_path, layout, attempt):
    processes, parallel = ALL_LAYOUTS[layout]
    config = run_config(tiny_data, tmp_path, parallel, 20 * WINDOW_STEPS)
    busy = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(busy) as one:
        try:
            said = pools(processes).run(train_slowed, config, -1, "")
        finally:
            one.kill()
    assert "slow" not in said[0].replace("(the first is the slowest)", ""), said[0]
    assert not any("straggler_rank" in record for record in step_records(config))


def run_config(tiny_data: Any, tmp_path: Any, parallel: dict[str, Any], steps: int) -> RunConfig:
    return tiny_config(
        run={"directory": str(tmp_path / "run")},
        data={"directory": str(tiny_data)},
        parallel=parallel,
        train={"num_steps": steps},
        evaluation={"lengths": [32]},
    )


def step_records(config: RunConfig) -> list[dict[str, Any]]:
    records = read_metrics(RunPaths(config.directory).metrics)
    return [record for record in records if not is_evaluation(record)]


# ---- what is judged ------------------------------------------------------------------------------
def judged(stages: list[int], windows: list[list[float]], size: int = 8) -> list[tuple[int, str]]:
    """Return (step, line) of each line that is said about windows of seconds by rank."""
    places = [Place(f"n{i}", "cuda:0", stage) for i, stage in enumerate(stages)]
    found = Stragglers(places, WINDOW_STEPS)
    lines = []
    for number, busy in enumerate(windows, start=1):
        whole, step = max(busy) + 0.1, number * WINDOW_STEPS
        shared = [cell for own in busy for cell in (own, whole - own, 0.0)]
        record, said = found.judge(step, shared, size)
        assert bool(said) <= ("rank_compute_seconds" in record)
        lines += [(step, line) for line in said]
    return lines


EVEN, SLOW = [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.5, 1.0]


def test_two_windows_in_a_row_make_a_slow_rank_and_end_it():
    lines = judged([0, 0, 0, 0], [EVEN, SLOW, EVEN, SLOW, SLOW, SLOW, EVEN, SLOW, EVEN, EVEN])
    assert [step for step, _ in lines] == [40, 80]
    assert "rank 2 (host n2, device cuda:0) is slow" in lines[0][1] and "0.5 s" in lines[0][1]
    assert "since step 25 " in lines[0][1] and "since step 25" in lines[1][1]


def test_a_short_or_small_delay_names_nobody():
    """Under a tenth of a step however long, and three seconds however large their share."""
    assert judged([0, 0, 0, 0], [[1.0, 1.0, 1.1, 1.0]] * 50) == []
    lost = LOST_SECONDS / (4 * WINDOW_STEPS)
    assert judged([0, 0], [[0.01, 0.01 + lost * 0.99]] * 4) == []
    assert [step for step, _ in judged([0, 0], [[0.01, 0.01 + lost * 1.01]] * 4)] == [32]


def test_a_rank_is_compared_with_the_median_of_the_others():
    dice = random.Random(3)
    for count in (2, 3, 4, 7):
        busy = [dice.choice([1.0, 1.5, dice.random()]) for _ in range(count)]
        for rank, own in enumerate(busy):
            others = busy[:rank] + busy[rank + 1 :]
            assert _median_of_others(sorted(busy), own) == statistics.median(others)


def test_stages_of_a_pipeline_may_differ():
    """Each rank is compared with its stage; one that is alone there with its own past."""
    assert judged([0, 0, 1, 1], [[1.0, 1.0, 2.0, 2.0]] * 9) == []
    assert "rank 3 " in judged([0, 0, 1, 1], [[1.0, 1.0, 2.0, 3.0]] * 9)[0][1]
    assert judged([0, 1], [[1.0, 2.0]] * 9) == []
    [(_, line)] = judged([0, 1], [[1.0, 2.0]] * 3 + [[1.0, 3.0]] * 9)
    assert "rank 1 " in line and "1 s a step longer than before" in line
    # The machine became slower as a whole.
    assert judged([0, 1], [[1.0, 2.0]] * 3 + [[1.5, 3.0]] * 9) == []


def test_a_rank_that_shares_nothing_is_not_judged():
    found = Stragglers([Place("a", "cpu", 0), Place("b", "cpu", 0)], WINDOW_STEPS)
    assert found.judge(8, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], 8) == ({}, [])

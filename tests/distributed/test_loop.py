"""The loop reads a step's numbers while the next step runs, and all of them arrive."""

from __future__ import annotations

from pretrain.rundir.metrics import read_metrics
from pretrain.rundir.paths import RunPaths
from tests.conftest import directories, tiny_config
from tests.distributed import tasks


def _config(directory, data, **sections):
    return tiny_config(
        **directories(directory, data),
        train={"num_steps": 7},
        checkpoint={"interval_steps": 4},
        evaluation={"interval_steps": 100},
        **sections,
    )


def test_steps_do_not_wait_for_their_log(pools, tiny_data, tmp_path):
    """Step 4 is saved and step 7 is the last, so their numbers are needed before going on."""
    [events] = pools(1).run(tasks.order_of_events, _config(tmp_path / "run", tiny_data))
    assert events == [
        *[("queue", 1), ("queue", 2), ("read", 1), ("queue", 3), ("read", 2)],
        *[("queue", 4), ("read", 3), ("read", 4), ("save", 4)],
        *[("queue", 5), ("queue", 6), ("read", 5), ("queue", 7), ("read", 6), ("read", 7)],
        ("save", 7),
    ]
    steps = [
        r
        for r in read_metrics(RunPaths(tmp_path / "run").metrics)
        if "loss_nats" in r and "protocol" not in r
    ]
    assert [record["step"] for record in steps] == list(range(1, 8))
    assert all(record["step_seconds"] > 0 for record in steps)

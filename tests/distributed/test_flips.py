"""Single bits that flip in what a rank holds: which are noticed, by what, and after how many steps.

The table of docs/reliability.md is what the whole of it prints.
"""

from __future__ import annotations

import itertools

import pytest

from pretrain.rundir.attempts import read_attempts
from tests.conftest import ALL_LAYOUTS, directories, tiny_config
from tests.distributed import health_tasks as tasks

KINDS = ("master", "exp_avg", "exp_avg_sq", "weight", "host copy", "gradient", "activation")
BITS = (8, 16, 22, 30)
INTERVAL, FLIPPED = 4, 5
LEAST = 27, 23
"""Of the 28 flips, how many are noticed within one interval of saves. Bit 8 of the activation is
lost in rounding: the run ends with the same bits."""
DETECTORS = {
    "copy in": "sums of the host copy",
    "memory": "sums of the memory",
    "not finite": "limits of the state",
    "ranks differ": "replicas",
    "norm": "gradient norm",
    "computed twice": "a step computed twice",
}
WAYS = (
    {"memory_check_interval_steps": 1, "repeat_interval_steps": 1},
    {"memory_check_interval_steps": 1},
    {"memory_check_interval_steps": 10_000},
)


def _noticed(pools, data, directory, layout, kind, bit, recovery):
    """Train with one flip; return (steps until it was noticed or None, by what, rank named)."""
    processes, parallel = ALL_LAYOUTS[layout]
    config = tiny_config(
        **directories(directory, data),
        parallel=parallel,
        train={"num_steps": 10},
        checkpoint={"interval_steps": INTERVAL},
        evaluation={"interval_steps": 100, "lengths": [32], "max_tokens": 512},
        recovery=recovery,
    )
    after = INTERVAL if kind == "host copy" else FLIPPED
    results = pools(processes).run(
        tasks.train_flipped, config, [tasks.Flip(after, processes - 1, kind, bit)]
    )
    assert sum(result["flips"] for result in results) == 1
    assert {result["code"] for result in results} == {0}, results[0]["error"]
    [attempt] = read_attempts(directory)
    if (found := attempt.diagnosis) is None:
        return None, "", ""
    assert found.kind == "transient"
    by = next(name for words, name in DETECTORS.items() if words in found.what)
    steps = 0 if kind == "host copy" else found.step - after
    return steps, by, "named" if found.rank == processes - 1 else "not named"


@pytest.mark.torture
def test_flips_are_noticed_within_one_interval(pools, tiny_data, tmp_path, capsys):
    count = [0] * len(WAYS)
    for number, (kind, bit) in enumerate(itertools.product(KINDS, BITS)):
        layout = ("dp2", "tp2", "pp2")[number % 3]
        cells = []
        for way, recovery in enumerate(WAYS):
            directory = tmp_path / f"{number}-{way}"
            steps, by, rank = _noticed(pools, tiny_data, directory, layout, kind, bit, recovery)
            is_noticed = steps is not None and steps <= INTERVAL
            count[way] += is_noticed
            cells.append(f"{by}, {steps}, {rank}" if is_noticed else "-")
        with capsys.disabled():
            print(f"\n| {kind} | {bit} | {layout} | {' | '.join(cells)} |", flush=True)
    with capsys.disabled():
        print(f"\nnoticed of {len(KINDS) * len(BITS)}: {count}")
    assert all(found >= least for found, least in zip(count, LEAST))

"""[[phases]]: a run in phases is the chain of runs that a user would start by hand, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import load_config
from tests.distributed.test_resume import _state
from tests.end_to_end.commands import (
    metrics,
    running_ranks,
    sets,
    succeeds,
    untimed,
    wait_for,
)

PHASES = """
[[phases]]
steps = 3
data.sequence_length = 16

[[phases]]
tokens = 500
data.sequence_length = 32
batch.global_batch_size = 4
optimizer.learning_rate = 2e-3

[[phases]]
[phases.schedule]
lr_decay_style = "linear"
lr_warmup_steps = 2
[phases.position]
method = "rotary"
[phases.evaluation]
lengths = [64]
"""
BY_HAND = [
    ["data.sequence_length=16", "train.num_steps=3"],
    ["batch.global_batch_size=4", "optimizer.learning_rate=2e-3", "train.num_steps=7"],
    ["batch.global_batch_size=4", "optimizer.learning_rate=2e-3", "position.method=rotary"]
    + ["schedule.lr_decay_style=linear", "schedule.lr_warmup_steps=2"]
    + ["schedule.lr_begin_step=7", "evaluation.lengths=[64]"],
]
CHANGED = [
    {"data.sequence_length", "batch.global_batch_size", "optimizer.learning_rate"},
    {"position.method", *(f"schedule.lr_{key}" for key in ("decay_style", "warmup_steps"))}
    | {"schedule.lr_begin_step"},
]


@pytest.fixture(scope="module")
def phased(workspace: Path, config: Path) -> Path:
    """The config of a run of 8 steps and more in three phases, with checkpoints at borders only."""
    path = workspace / "phased.toml"
    path.write_text(f'base = "{config.name}"\n{PHASES}')
    return path


def steps(run: Path) -> list[dict]:
    return [record for record in untimed(run) if "loss_nats" in record and "length" not in record]


def test_it_is_the_chain_by_hand_killed_at_a_border_and_resumed_in_another_layout(
    workspace, config, phased
):
    """By hand: two ranks, then one; in phases: two ranks until after the first border, then one."""
    here, common = (
        workspace / "runs/phased",
        ["train.num_steps=10", "checkpoint.interval_steps=100", "batch.micro_batch_size=2"],
    )
    train = ["train", phased, *sets(f"run.directory={here}", *common)]
    with running_ranks(train, 2) as started:
        wait_for(
            lambda: "phase 2 of 3" in started.said(0) or started.processes[0].poll() is not None
        )
    assert [path.name for path in sorted((here / "checkpoints").glob("step-*"))] == [
        "step-00000003"
    ]
    said = succeeds(*train).err
    assert "phase 2 of 3, steps 4 to 7" in said and "phase 3 of 3, steps 8 to 10" in said
    assert "data.sequence_length = 16 -> 32  (changes training, as a phase asks)" in said

    by_hand, before = [], None
    for number, keys in enumerate(BY_HAND):
        there = workspace / f"runs/by-hand-{number}"
        by_hand.append(there)
        options = sets(f"run.directory={there}", *common, *keys)
        command = ["train", config, *options, "--resume", before or "none"]
        if number:
            command += [
                word for key in sorted(CHANGED[number - 1]) for word in ("--allow-changed", key)
            ]
        with running_ranks(command, 1 if number else 2) as started:
            assert [done.code for done in started.done()] == [0] * (1 if number else 2)
        last = load_config(config, keys).train.num_steps if number < 2 else 10
        before = there / f"checkpoints/step-{last:08d}"
    assert steps(here) == [record for run in by_hand for record in steps(run)]
    state, expected = _state(here, 10), _state(by_hand[-1], 10)
    assert state.keys() == expected.keys()
    assert all(state[name].equal(expected[name]) for name in state)

    origin = open_checkpoint(here / "checkpoints/step-00000010").origin
    assert {(c.step, c.key) for c in origin.changes} == {
        *((3, key) for key in CHANGED[0]),
        *((7, key) for key in CHANGED[1]),
    }
    marks = {r["step"]: (r["phase"], set(r["changed"])) for r in metrics(here) if "changed" in r}
    assert marks == {3: (2, CHANGED[0]), 7: (3, CHANGED[1])}
    # Each phase is evaluated as it asks, at its last step too.
    evaluated = {(r["step"], r["length"]) for r in metrics(here) if "length" in r}
    assert evaluated == {(s, n) for s in (3, 4, 7) for n in (32, 64)} | {(8, 64), (10, 64)}
    assert "nothing to train" in succeeds(*train).err

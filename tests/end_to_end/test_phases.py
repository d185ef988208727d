"""[[phases]]: a run in phases is the chain of runs that a user would start by hand, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrain.checkpoint.manifest import open_checkpoint
from tests.distributed.test_resume import _state
from tests.end_to_end.commands import (
    explained,
    metrics,
    pretrain,
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
LAST = [
    *("batch.global_batch_size=4", "optimizer.learning_rate=2e-3", "position.method=rotary"),
    *("schedule.lr_decay_style=linear", "schedule.lr_warmup_steps=2"),
    *("schedule.lr_begin_step=7", "evaluation.lengths=[64]"),
]
BY_HAND = {
    3: ["data.sequence_length=16", "train.num_steps=3"],
    7: ["batch.global_batch_size=4", "optimizer.learning_rate=2e-3", "train.num_steps=7"],
    10: LAST,
}
"""The last step of each run -> its settings."""
CHANGED = [
    set[str](),
    {"data.sequence_length", "batch.global_batch_size", "optimizer.learning_rate"},
    {"position.method", *(f"schedule.lr_{key}" for key in ("decay_style", "warmup_steps"))}
    | {"schedule.lr_begin_step"},
]


def steps(run: Path) -> list[dict[str, Any]]:
    """Return the records of steps, without the number of the phase, which no run by hand has."""
    found = [each for each in untimed(run) if "gradient_norm" in each]
    return [{key: value for key, value in each.items() if key != "phase"} for each in found]


def test_it_is_the_chain_by_hand_killed_at_a_border_and_resumed_in_another_layout(
    workspace, config
):
    """By hand: two ranks, then one; in phases: two ranks until after the first border, then one."""
    phased, here = workspace / "phased.toml", workspace / "runs/phased"
    phased.write_text(f'base = "{config.name}"\n{PHASES}')
    common = ["train.num_steps=10", "checkpoint.interval_steps=100", "batch.micro_batch_size=2"]
    train = ["train", phased, *sets(f"run.directory={here}", *common)]
    with running_ranks(train, 2) as started:
        first = started.processes[0]
        wait_for(lambda: "phase 2 of 3" in first.said() or first.poll() is not None)
    assert [path.name for path in (here / "checkpoints").glob("step-*")] == ["step-00000003"]
    said = succeeds(*train).err
    assert "phase 2 of 3, steps 4 to 7" in said and "phase 3 of 3, steps 8 to 10" in said
    assert "data.sequence_length = 16 -> 32  (changes training, as a phase asks)" in said

    before, by_hand = "none", []
    for number, (last, keys) in enumerate(BY_HAND.items()):
        there = workspace / f"runs/by-hand-{last}"
        allow = [word for key in CHANGED[number] for word in ("--allow-changed", key)]
        options = [*sets(*common, f"run.directory={there}", *keys), *allow]
        with running_ranks(["train", config, "--resume", before, *options], 1 + (last == 3)) as run:
            assert {done.code for done in run.done()} == {0}
        before = there / f"checkpoints/step-{last:08d}"
        by_hand += steps(there)
    assert steps(here) == by_hand and len(by_hand) == 10
    state, expected = _state(here, 10), _state(there, 10)
    assert state.keys() == expected.keys()
    assert all(state[name].equal(expected[name]) for name in state)

    origin = open_checkpoint(here / "checkpoints/step-00000010").origin
    changes = [(3, key) for key in CHANGED[1]] + [(7, key) for key in CHANGED[2]]
    assert {(c.step, c.key) for c in origin.changes} == set(changes)
    marks = {r["step"]: (r["phase"], set(r["changed"])) for r in metrics(here) if "changed" in r}
    assert marks == {0: (1, set()), 3: (2, CHANGED[1]), 7: (3, CHANGED[2])}
    # Each phase is evaluated as it asks, at its last step too.
    evaluated = {(r["step"], r["length"]) for r in metrics(here) if "length" in r}
    assert evaluated == {(s, n) for s in (3, 4, 7) for n in (32, 64)} | {(8, 64), (10, 64)}
    assert "nothing to train" in succeeds(*train).err
    # The last phase may go on, as a run without phases may.
    train += sets("train.num_steps=12")
    assert "going on from step 10, to step 12" in succeeds(*train).err
    # What has been trained is not rewritten.
    phased.write_text(phased.read_text().replace("sequence_length = 16", "sequence_length = 8"))
    explained(pretrain(*train), 2, "config.toml, phase 1, was trained with 16")


def test_a_backend_that_cannot_serve_a_later_phase_is_refused_before_the_first(workspace, config):
    phased = workspace / "folded.toml"
    phased.write_text(
        f'base = "{config.name}"\n[[phases]]\nsteps = 2\n[[phases]]\n[phases.position]\n'
        'method = "t5"\n'
    )
    here, folded = workspace / "runs/folded", ["model.attention_backend=folded"]
    common = [f"run.directory={here}", "train.num_steps=4", "train.precision=bf16", *folded]
    refused = pretrain("train", phased, *sets(*common))
    explained(refused, 2, "phase 2", "it folds ALiBi with fixed slopes")
    assert not list((here / "checkpoints").glob("step-*"))

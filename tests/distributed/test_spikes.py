"""A stretch of bad data makes a spike, and each policy does with it what it says."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.checkpoint.load import load_global_state
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.rundir.checkpoints import checkpoint_directory
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.rundir.paths import ExitCode, RunPaths
from tests.conftest import LAYOUTS, directories, tiny_config
from tests.distributed import health_tasks as tasks
from tests.distributed.tasks import in_fp16_on_cpu

STEPS, BAD_STEP, SAVED_STEP, BATCH = 14, 11, 9, 8
BAD = (BAD_STEP * BATCH, BAD_STEP * BATCH)
"""The samples of step 11."""


def _config(directory, data, parallel, policy, interval=SAVED_STEP, **train):
    return tiny_config(
        **directories(directory, data),
        # GPT-2's: the loss starts near that of a uniform guess, so bad data stands out at step 11.
        model={"num_layers": 2, "embedding_scale": 1.0, "embedding_init_method_std": 0.02},
        parallel=parallel,
        batch={"micro_batch_size": 4},
        train={
            "num_steps": STEPS,
            "spike_policy": policy,
            "spike_window_steps": 8,
            "spike_threshold": 8.0,
            **train,
        },
        checkpoint={"interval_steps": interval},
        evaluation={"interval_steps": 100, "lengths": [32], "max_tokens": 512},
        # What follows where nothing is replayed; test_replay.py replays.
        recovery={"replay": False},
    )


def _steps(directory):
    records = read_metrics(RunPaths(directory).metrics)
    return [record for record in records if not is_evaluation(record)]


def _spikes(directory, step):
    return open_checkpoint(checkpoint_directory(directory, step)).trainer_state.spikes


@pytest.mark.parametrize(("layout", "precision"), [("dp2", "bf16"), ("pp2", "fp32")])
def test_a_skipped_update_changes_nothing_and_is_counted(
    pools, tiny_data, tmp_path, layout, precision
):
    processes, parallel = LAYOUTS[layout]
    directory = tmp_path / "run"
    config = _config(directory, tiny_data, parallel, "skip", precision=precision)
    results = pools(processes).run(tasks.train_on_bad_data, config, *BAD)
    for result in results:
        assert result["code"] == 0
        assert [step for step, same in result["unchanged"].items() if same] == [BAD_STEP]
    records = _steps(directory)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert [r["skipped_updates"] for r in records] == [0] * (BAD_STEP - 1) + [1] * 4
    last = open_checkpoint(checkpoint_directory(directory, STEPS))
    assert last.adam_steps == STEPS - 1
    assert last.trainer_state.spikes["updates_skipped"] == [1]


def test_an_overflow_in_fp16_is_no_spike(pools, tiny_data, tmp_path):
    """The first steps overflow until the loss scale fits, and so do gradients of the bad data.

    Their update is left out in any case, and the loss of that data is not out of the ordinary.
    """
    directory = tmp_path / "run"
    config = _config(directory, tiny_data, {}, "skip", precision="fp16", num_steps=18)
    scale = config.optimizer.model_copy(update={"initial_loss_scale_power": 20})
    config = config.model_copy(update={"optimizer": scale})
    bad = 17 * BATCH
    [result] = pools(1).run(in_fp16_on_cpu, tasks.train_on_bad_data, config, bad, bad)
    assert result["code"] == 0
    records = _steps(directory)
    overflowed = [r["step"] for r in records if r["gradient_norm"] == float("inf")]
    assert overflowed[0] == 1 and overflowed[-1] == 17
    same = [step for step, same in result["unchanged"].items() if same]
    assert same == overflowed
    assert [r["skipped_updates"] for r in records] == [0] * 18
    assert _spikes(directory, 18)["steps_observed"] == [18 - len(overflowed)]


def test_a_resume_within_the_window_is_bit_for_bit(pools, tiny_data, tmp_path):
    """The checkpoint of step 9 lies in the window by which step 11 is judged."""
    processes, parallel = LAYOUTS["dp2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = _config(whole, tiny_data, parallel, "skip")
    pools(processes).run(tasks.train_on_bad_data, config, *BAD)
    resume = str(checkpoint_directory(whole, SAVED_STEP))
    config = _config(parts, tiny_data, parallel, "skip")
    pools(processes).run(tasks.train_on_bad_data, config, *BAD, resume)
    keys = ("step", "loss_nats", "gradient_norm", "skipped_updates")
    a, b = ([[r[key] for key in keys] for r in _steps(each)] for each in (whole, parts))
    assert a[SAVED_STEP:] == b and b[-1][-1] == 1
    assert _spikes(whole, STEPS) == _spikes(parts, STEPS)
    assert _spikes(whole, STEPS)["steps_observed"] == [STEPS]
    a, b = (
        load_global_state(open_checkpoint(checkpoint_directory(each, STEPS)))
        for each in (whole, parts)
    )
    assert all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("interval", [SAVED_STEP, BAD_STEP])
def test_a_run_that_stops_saves_nothing_after_the_spike(pools, tiny_data, tmp_path, interval):
    """Whether the spike is read when the next step is queued, or because it was to be saved."""
    directory = tmp_path / "run"
    config = _config(directory, tiny_data, {}, "stop", interval)
    results = pools(2).run(tasks.train_on_bad_data, config, *BAD)
    for result in results:
        assert result["code"] == ExitCode.FAILED
        assert result["error"].startswith(f"step {BAD_STEP}: a spike, with a loss of ")
        assert "(limit " in result["error"] and "train.spike_threshold" in result["error"]
        assert result["saved"] == (["step-00000009"] if interval == SAVED_STEP else [])
    assert [r["step"] for r in _steps(directory)] == list(range(1, BAD_STEP))


def test_a_rollback_skips_exactly_the_data_up_to_the_spike(pools, tiny_data, tmp_path):
    processes, parallel = LAYOUTS["dp2"]
    directory = tmp_path / "run"
    config = _config(directory, tiny_data, parallel, "rollback")
    logging = config.logging.model_copy(update={"tensorboard": True})
    config = config.model_copy(update={"logging": logging})
    results = pools(processes).run(tasks.train_on_bad_data, config, *BAD)
    assert {r["code"] for r in results} == {0}
    records = _steps(directory)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert [r["rollbacks"] for r in records] == [0] * SAVED_STEP + [1] * (STEPS - SAVED_STEP)
    assert [r["step"] for r in records if r.get("rolled_back_from_step") == BAD_STEP] == [10]
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("health/rollbacks")]
    assert shown == [(r["step"], r["rollbacks"]) for r in records]
    last = open_checkpoint(checkpoint_directory(directory, STEPS)).trainer_state
    assert last.consumed_samples == (STEPS + BAD_STEP - SAVED_STEP) * BATCH
    assert last.spikes["rolled_back_from"] == [BAD_STEP]
    assert last.spikes["rolled_back_to"] == [SAVED_STEP]
    # What a fresh process computes from that checkpoint and that place in the data.
    expected = pools(processes).run(
        tasks.losses_from,
        config,
        str(checkpoint_directory(directory, SAVED_STEP)),
        BAD_STEP * BATCH,
        STEPS - SAVED_STEP,
    )[0]
    assert [r["loss_nats"] for r in records[SAVED_STEP:]] == expected


def test_a_run_goes_back_to_a_checkpoint_a_few_times_only(pools, tiny_data, tmp_path):
    config = _config(tmp_path / "run", tiny_data, {}, "rollback", spike_max_rollbacks=2)
    [result] = pools(1).run(tasks.train_on_bad_data, config, BAD[0], 10_000)
    assert result["code"] == ExitCode.POISONED and result["saved"] == ["step-00000009"]
    assert (
        "has gone back to step 9 2 times already (train.spike_max_rollbacks = 2)"
        in (result["error"])
    )


def test_a_gradient_that_is_not_finite_is_gone_back_from(pools, tiny_data, tmp_path):
    config = _config(tmp_path / "run", tiny_data, {}, "rollback", interval=2)
    results = pools(2).run(tasks.train_with_a_bad_gradient, config, 4, float("nan"))
    assert {r["code"] for r in results} == {0}
    records = _steps(tmp_path / "run")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert records[2]["rolled_back_from_step"] == 4

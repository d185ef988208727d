"""What a failed check replays, what it finds out, and where the run goes on."""

from __future__ import annotations

import functools

import pytest
import torch

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import checkpoint_directory
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.rundir.paths import ExitCode, RunPaths
from tests.conftest import ALL_LAYOUTS, directories, tiny_config
from tests.distributed import health_tasks as tasks

WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"
STEPS = 10
EVERY_STEP, NEVER = ({"memory_check_interval_steps": steps} for steps in (1, 10_000))
TWICE = {"repeat_interval_steps": 4}
"""By the draw of each interval the steps after 3, 5 and 8."""


def _config(directory, data, layout, interval=4, recovery=None, **train):
    return tiny_config(
        **directories(directory, data),
        model={"num_layers": 2},
        parallel=ALL_LAYOUTS[layout][1],
        train={"num_steps": STEPS, **train},
        checkpoint={"interval_steps": interval, "keep": 1},
        evaluation={"interval_steps": 100, "lengths": [32], "max_tokens": 512},
        recovery=recovery or {},
    )


def _numbers(directory):
    records = [r for r in read_metrics(RunPaths(directory).metrics) if not is_evaluation(r)]
    return [(r["step"], r["loss_nats"], r["gradient_norm"]) for r in records]


def _masters(directory, step=STEPS):
    from pretrain.checkpoint.load import load_global_state

    checkpoint = open_checkpoint(checkpoint_directory(directory, step))
    return {kind: load_global_state(checkpoint, kind) for kind in ("master", "exp_avg_sq")}


@pytest.fixture(scope="module")
def undisturbed(pools, tiny_data, tmp_path_factory):
    """Return undisturbed(layout): the directory of a run that nothing disturbs."""

    @functools.cache
    def trained(layout):
        directory = tmp_path_factory.mktemp("undisturbed") / "run"
        pools(ALL_LAYOUTS[layout][0]).run(tasks.outcome, _config(directory, tiny_data, layout))
        return directory

    return trained


def _assert_same_end(one, other):
    a, b = _masters(one), _masters(other)
    assert all(torch.equal(a[kind][name], b[kind][name]) for kind in a for name in a[kind])


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("dp2", tasks.Flip(7, 1, "master", 30, WEIGHT)),
        pytest.param(
            "zero3-dp2", tasks.Flip(7, 0, "exp_avg", 30, WEIGHT), marks=pytest.mark.torture
        ),
        pytest.param("tp2pp2sp", tasks.Flip(2, 3, "gradient", 30), marks=pytest.mark.torture),
        ("dp2", tasks.Flip(8, 1, "host copy", 3)),
        pytest.param("tp2", tasks.Flip(5, 1, "weight", 22), marks=pytest.mark.torture),
        ("dp2", tasks.Flip(5, 1, "gradient", 8)),
    ],
)
def test_a_bit_that_flips_once_is_transient_and_the_run_ends_as_if_nothing_had_been(
    pools, tiny_data, tmp_path, undisturbed, layout, fault
):
    """The first is that of a master before step 8, the second save."""
    processes = ALL_LAYOUTS[layout][0]
    whole, run = undisturbed(layout), tmp_path / "run"
    # The last two are seen by the sums of the memory alone, and by computing twice.
    checked = {"weight": EVERY_STEP, "gradient": TWICE if fault.bit == 8 else {}}.get(fault.what)
    config = _config(run, tiny_data, layout, recovery=checked)
    results = pools(processes).run(tasks.train_flipped, config, [fault])
    assert {r["code"] for r in results} == {0}, results[0]["error"]
    assert sum(r["flips"] for r in results) == 1
    assert "warning" not in results[0]["said"], results[0]["said"]
    [attempt] = read_attempts(run)
    found = attempt.diagnosis
    assert (found.kind, found.rank) == ("transient", fault.rank)
    assert found.step >= fault.after and found.host and found.device
    assert _numbers(run) == _numbers(whole)
    _assert_same_end(run, whole)


def test_a_gradient_that_is_not_finite_again_reproduces_and_only_then_settings_are_named(
    pools, tiny_data, tmp_path
):
    """The fault is in the loss of step 6, on every rank alike, as with a division by zero."""
    config = _config(tmp_path / "run", tiny_data, "dp2")
    results = pools(2).run(tasks.train_scaled, config, 6, float("nan"))
    for result in results:
        assert result["code"] == ExitCode.POISONED
        assert (
            "it happens again with the same data, after equal numbers on every rank"
            in (result["error"])
        )
        for key in ("optimizer.learning_rate", "schedule.lr_warmup_steps", "optimizer.clip_grad"):
            assert key in result["error"]
        assert result["saved"] == ["step-00000004"]
    [attempt] = read_attempts(tmp_path / "run")
    assert (attempt.diagnosis.kind, attempt.diagnosis.step) == ("reproduces", 6)
    assert (attempt.diagnosis.rank, attempt.diagnosis.replayed_from) == (None, 0)
    off = config.optimizer.model_copy(update={"clip_grad": 0.0})
    run = config.run.model_copy(update={"directory": str(tmp_path / "unclipped")})
    config = config.model_copy(update={"optimizer": off, "run": run})
    [result, _] = pools(2).run(tasks.train_scaled, config, 6, float("nan"))
    assert "lr_warmup_steps" in result["error"] and "clip_grad" not in result["error"]


@pytest.mark.parametrize(("bit", "recovery"), [(22, EVERY_STEP), (30, NEVER)])
def test_a_rank_that_is_wrong_in_two_replays_ends_the_run_by_its_host(
    pools, tiny_data, tmp_path, bit, recovery
):
    """Its masters change before the same step, each time that it is taken.

    Where the norm tells it first, since the memory is not checked, a replay checks it.
    """
    faults = [tasks.Flip(5, 1, "master", bit, times=3)]
    config = _config(tmp_path / "run", tiny_data, "dp2", recovery=recovery)
    results = pools(2).run(tasks.train_flipped, config, faults)
    assert {r["code"] for r in results} == {ExitCode.FAILED}
    [attempt] = read_attempts(tmp_path / "run")
    found = attempt.diagnosis
    assert (found.kind, found.step, found.rank) == ("persistent", 6, 1)
    assert found.host == attempt.owner.host
    assert all(found.what in result["error"] for result in results)


@pytest.mark.parametrize(
    ("rank", "code", "kind", "said"),
    [
        (1, ExitCode.FAILED, "persistent", "Leave its host out"),
        (None, ExitCode.FINISHED, "reproduces", "cannot be told on which rank, since ranks 0 ("),
    ],
)
def test_a_rank_that_does_not_repeat_a_step_as_its_peer_does_ends_the_run_by_its_host(
    pools, tiny_data, tmp_path, rank, code, kind, said
):
    """Where no rank repeats them, the run goes on."""
    config = _config(
        tmp_path / "run", tiny_data, "dp2", recovery={"repeat_interval_steps": 2}, num_steps=6
    )
    results = pools(2).run(tasks.train_scaled, config, 0, 1.0, 1e-6, rank)
    assert {r["code"] for r in results} == {code}
    [attempt] = read_attempts(tmp_path / "run")
    found = attempt.diagnosis
    assert (found.kind, found.rank) == (kind, rank) and said in found.what
    assert found.step <= 2 and found.what.startswith(f"step {found.step}, computed twice, differed")


@pytest.mark.parametrize(("layout", "noise"), [("pp2", 0.0), ("dp2", 1e-6)])
def test_a_norm_far_above_all_others_is_replayed_and_accepted_if_it_comes_again(
    pools, tiny_data, tmp_path, layout, noise
):
    """Also with other bits, where no computation of a gradient repeats."""
    config = _config(tmp_path / "run", tiny_data, layout)
    results = pools(2).run(tasks.train_scaled, config, 6, 1e5, noise)
    assert {r["code"] for r in results} == {0}
    [attempt] = read_attempts(tmp_path / "run")
    assert (attempt.diagnosis.kind, attempt.diagnosis.step) == ("reproduces", 6)
    assert "Training goes on" in attempt.diagnosis.what
    assert ("differed from step 1 on" in attempt.diagnosis.what) == (noise > 0)
    assert [step for step, _, _ in _numbers(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_a_spike_of_the_data_is_replayed_before_the_policy_acts(pools, tiny_data, tmp_path):
    """With the data of test_spikes.py, whose step 11 is bad."""
    config = _config(
        tmp_path / "run",
        tiny_data,
        "dp2",
        interval=9,
        num_steps=14,
        spike_policy="rollback",
        spike_window_steps=8,
        spike_threshold=8.0,
    )
    model = {"embedding_scale": 1.0, "embedding_init_method_std": 0.02}
    config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    results = pools(2).run(tasks.train_on_bad_data, config, 88, 88)
    assert {r["code"] for r in results} == {0}
    [attempt] = read_attempts(tmp_path / "run")
    assert (attempt.diagnosis.kind, attempt.diagnosis.step) == ("reproduces", 11)
    last = open_checkpoint(checkpoint_directory(tmp_path / "run", 14)).trainer_state
    assert last.spikes["rolled_back_from"] == [11] and last.spikes["rolled_back_to"] == [9]
    assert last.consumed_samples == (14 + 2) * 8

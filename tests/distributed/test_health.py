"""A run whose state is poisoned, or whose ranks have drifted apart, stops and saves nothing."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from pretrain.data.stream import TokenStream
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.metrics import read_metrics
from pretrain.rundir.paths import ExitCode, RunPaths
from tests.conftest import ALL_LAYOUTS, LAYOUTS, directories, tiny_config
from tests.distributed import health_tasks as tasks

NORM = "decoder.final_layernorm.weight"
ROW_BIAS = "decoder.layers.1.mlp.linear_fc2.bias"
SPLIT = "decoder.layers.0.mlp.linear_fc1.weight"
TIED = "embedding.word_embeddings.weight"


def _config(directory, data, parallel, **train):
    return tiny_config(
        **directories(directory, data),
        model={"num_layers": 2},
        parallel=parallel,
        batch={"micro_batch_size": 4},
        train={"num_steps": 5, **train},
        checkpoint={"interval_steps": 3},
        evaluation={"interval_steps": 100, "lengths": [32], "max_tokens": 512},
        # What follows where nothing is replayed; test_replay.py replays.
        recovery={"replay": False},
    )


# ---- what is not finite --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "kind", "value", "step"),
    [
        ("one", "master", float("nan"), 3),
        ("tp2", "master", float("nan"), 5),
        ("zero3-dp2", "exp_avg_sq", 2.0**110, 3),
    ],
)
def test_state_that_is_not_finite_or_too_large_is_never_saved(
    pools, tiny_data, tmp_path, layout, kind, value, step
):
    """It comes into being after the last step before a save (3) and after the run's last (5)."""
    processes, parallel = ALL_LAYOUTS[layout]
    config = _config(tmp_path / "run", tiny_data, parallel)
    arguments = (config, step, processes - 1, SPLIT, kind, value)
    results = pools(processes).run(tasks.train_damaged, *arguments)
    assert results[-1]["damaged"]
    assert {r["code"] for r in results} == {ExitCode.POISONED}
    for result in results:
        assert result["error"].startswith(
            f"after step {step} the optimizer's state is not finite or too large to be true: "
            f"rank {processes - 1} ("
        )
        assert f"{kind} of {SPLIT} ({value})" in result["error"]
        assert result["saved"] == ([] if step == 3 else ["step-00000003"])
    [attempt] = read_attempts(tmp_path / "run")
    assert (attempt.ended.outcome, attempt.ended.code) == ("poisoned", 83)


def test_a_moment_that_grows_beyond_belief_is_not_saved_where_nothing_is_clipped(
    pools, tiny_data, tmp_path
):
    """Any size is allowed then, and the state is judged by the save of step 3."""
    config = _config(tmp_path / "run", tiny_data, {})
    off = config.optimizer.model_copy(update={"clip_grad": 0.0})
    config = config.model_copy(update={"optimizer": off})
    [result] = pools(1).run(tasks.train_damaged, config, 5, 0, SPLIT, "exp_avg_sq", 4.9e32)
    assert (result["code"], result["saved"]) == (ExitCode.POISONED, ["step-00000003"])
    assert f"exp_avg_sq of {SPLIT} (" in result["error"]


@pytest.mark.parametrize(("stage", "value", "step"), [(1, "nan", 2), (2, "inf", 3), (3, "inf", 4)])
def test_a_gradient_that_is_not_finite_is_told_by_its_name(
    pools, tiny_data, tmp_path, stage, value, step
):
    """It changes nothing, also where a save is due (3) or another step has been queued (4)."""
    config = _config(tmp_path / "run", tiny_data, {"zero_stage": stage})
    results = pools(2).run(tasks.train_with_a_bad_gradient, config, step, float(value))
    for result in results:
        assert result["error"].startswith(f"step {step}: the gradient norm is {value}. ")
        assert result["code"] == ExitCode.POISONED
        assert result["saved"] == ["step-00000003"] * (step > 3)
        assert result["unchanged"][step]
    records = read_metrics(RunPaths(tmp_path / "run").metrics)
    assert [r["step"] for r in records if "gradient_norm" in r] == list(range(1, step))


# ---- what differs --------------------------------------------------------------------------------
NOBODY = "no majority among ranks 0 ("
# Layout, parameter, what of it, the rank, and whom the message names.
NUDGES = [
    ("dp2", NORM, "weight", 1, NOBODY),
    ("cp2-dp2", SPLIT, "weight", 2, "ranks 2 ("),
    ("tp2", ROW_BIAS, "exp_avg_sq", 0, NOBODY),
    ("zero3-tp2sp-dp2", ROW_BIAS, "master", 3, "no majority among ranks 2 ("),
    ("pp2", TIED, "master", 1, NOBODY),
]


@pytest.mark.parametrize(("layout", "name", "kind", "rank", "who"), NUDGES)
def test_a_single_bit_on_a_single_rank_is_found_before_the_save(
    pools, tiny_data, tmp_path, layout, name, kind, rank, who
):
    processes, parallel = ALL_LAYOUTS[layout]
    config = _config(tmp_path / "run", tiny_data, parallel)
    results = pools(processes).run(tasks.train_damaged, config, 3, rank, name, kind, None)
    assert [r["damaged"] for r in results] == [r == rank for r in range(processes)]
    assert {r["code"] for r in results} == {ExitCode.DIVERGED}
    assert len({r["error"] for r in results}) == 1
    assert (
        f"after step 3 ranks differ in what must be equal. {name} ({kind}): {who}"
        in (results[0]["error"])
    )
    assert results[0]["error"].count(name) == results[0]["error"].count(": "), "nothing else"
    assert results[0]["saved"] == []
    [attempt] = read_attempts(tmp_path / "run")
    assert (attempt.ended.outcome, attempt.ended.code) == ("diverged", ExitCode.DIVERGED)


def test_a_copy_that_drifts_is_found_between_saves(pools, tiny_data, tmp_path):
    """Where no save is due, the next check is that of the interval, two steps after the nudge."""
    config = _config(
        tmp_path / "run", tiny_data, LAYOUTS["tp2"][1], num_steps=12, consistency_interval_steps=4
    ).model_copy(update={"checkpoint": tiny_config(checkpoint={"interval_steps": 12}).checkpoint})
    results = pools(2).run(tasks.train_damaged, config, 2, 1, NORM, "master", None)
    # By then it has spread from the nudged layer norm to others.
    assert results[0]["error"].startswith("after step 4 ranks differ in what must be equal. ")
    assert " more. Nothing is saved" in results[0]["error"] and results[0]["saved"] == []


@pytest.mark.parametrize(
    ("layout", "precision", "method", "wire"),
    [
        ("pp2vpp2", "bf16", "alibi", "fp32"),
        ("cp2-dp2", "bf16", "t5", "bf16"),
        ("zero2-tp2sp-dp2", "bf16", "alibi", "fp32"),
        ("zero3-tp2sp-dp2", "fp32", "fire", "fp32"),
    ],
)
def test_ranks_that_are_in_order_are_left_alone(pools, layout, precision, method, wire):
    """After each of 2 steps, with each kind of parallelism and what positions share in it."""
    processes, parallel = ALL_LAYOUTS[layout]
    config = tiny_config(
        parallel={**parallel, "gradient_reduce_dtype": wire},
        position={"method": method},
        # Two stages of two chunks have a layer in each.
        model={"num_layers": 4 if "vpp" in layout else 2, "hidden_dropout": 0.1},
        train={"precision": precision},
        batch={"micro_batch_size": 2},
    )
    steps = list(torch.randint(0, 500, (2, 8, 33), generator=torch.Generator().manual_seed(5)))
    compared = pools(processes).run(tasks.check_every_step, config, steps)
    assert all(compared), "nothing was compared"


# ---- other data on one rank ----------------------------------------------------------------------
def test_ranks_with_different_data_sets_are_refused_before_anything_is_written(
    pools, tiny_data, tmp_path
):
    """Pipeline stages would take inputs from one and targets from the other."""
    other = tmp_path / "other"
    shutil.copytree(tiny_data, other)
    shutil.rmtree(other / "train")
    shutil.copytree(tiny_data / "validation", other / "train")
    manifest = TokenStream(other / "train").manifest.model_copy(update={"split": "train"})
    (other / "train/manifest.json").write_text(manifest.text())
    config = _config(tmp_path / "run", tiny_data, {"pipeline_model_parallel_size": 2})
    for result in pools(2).run(tasks.train_on_own_data, config, [str(tiny_data), str(other)]):
        assert result["error"].startswith(f"data.directory = {other} on rank 1 (")
        assert "the SHA-256 for training is" in result["error"]
        assert not result["written"]
    copy = tmp_path / "copy"
    shutil.copytree(tiny_data, copy)
    for result in pools(2).run(tasks.train_on_own_data, config, [str(tiny_data), str(copy)]):
        assert result == {"error": "", "written": True}
    # One rank of a node looks at the files, and all hear of it.
    shard = next((copy / "train").glob("*.tar"))
    os.truncate(shard, 1000)
    config = _config(tmp_path / "again", tiny_data, {"pipeline_model_parallel_size": 2})
    for result in pools(2).run(tasks.train_on_own_data, config, [str(copy), str(tiny_data)]):
        assert result["error"].startswith(f"{shard}: truncated: 1000 bytes found")
        assert not result["written"]

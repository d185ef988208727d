"""Test that methods are measured in turns, all rounds of all of them, and how they are compared."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pretrain.bench import methods
from pretrain.bench.methods import efficiency_table, measure
from pretrain.bench.turns import ratio, take_turn
from pretrain.cli.bench import with_lengths as contestants
from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.model.gpt import build_model
from pretrain.topology import Topology
from tests.conftest import tiny_config


def contestant(method: str, length: int = 32) -> RunConfig:
    """One of which a step has 256 tokens."""
    return tiny_config(
        position={"method": method},
        data={"sequence_length": length},
        batch={"micro_batch_size": 64 // length, "global_batch_size": 256 // length},
    )


def measured(train: float, evaluation: float, memory: int) -> tuple[str, dict[str, float]]:
    values = train, evaluation, memory
    return "abacus", dict(zip((methods.TRAINING, methods.EVALUATION, methods.MEMORY), values))


def test_contestants_take_turns_back_and_forth_and_every_round_counts(monkeypatch) -> None:
    order: list[str] = []

    def turn(task: object, config: RunConfig, nproc: int) -> list[object]:
        assert nproc == 2
        order.append(config.position.method)
        # The slower rank counts, and the larger one.
        n = len(order)
        return [measured(1e9, 1e9, 5), measured(1000 / n, 500 / n, n)]

    monkeypatch.setattr(methods, "take_turn", turn)
    configs = [contestant(method) for method in ("alibi", "sinusoidal", "none")]
    result = measure(configs, 3, 2)
    a, s, n = "alibi", "sinusoidal", "none"
    assert order == [a, s, n, n, s, a, a, s, n]
    assert result["device"] == "2 x abacus" and result["rounds"] == 3 and result["failed"] == []
    assert [row["method"] for row in result["rows"]] == [a, s, n]
    for row, turns in zip(result["rows"], ([1, 6, 7], [2, 5, 8], [3, 4, 9])):
        assert row["train_length"] == 32
        assert row["train_tokens_per_second"] == [1000 / n for n in turns]
        assert row["evaluation_tokens_per_second"] == [500 / n for n in turns]
        assert row["peak_memory_bytes"] == max(5, turns[-1])


def test_a_contestant_that_fails_is_reported_and_the_others_go_on(monkeypatch) -> None:
    taken: list[str] = []

    def turn(task: object, config: RunConfig, nproc: int) -> list[object]:
        taken.append(config.position.method)
        if config.position.method == "t5" and len(taken) > 2:
            raise RunFailed("out of\nmemory")
        return [measured(1.0, 1.0, 7)]

    monkeypatch.setattr(methods, "take_turn", turn)
    result = measure([contestant("t5"), contestant("sinusoidal")], 3, 1)
    assert taken == ["t5", "sinusoidal", "sinusoidal", "t5", "sinusoidal"]
    assert [row["method"] for row in result["rows"]] == ["sinusoidal"]
    assert len(result["rows"][0]["train_tokens_per_second"]) == 3
    assert result["failed"] == [{"method": "t5", "train_length": 32, "reason": "out of\nmemory"}]
    assert "t5, 32 tokens: failed: memory" in efficiency_table(result)
    with pytest.raises(RunFailed, match="nothing could be measured"):
        measure([contestant("t5")], 2, 1)


def row(method: str, length: int, train: list[float], memory: int) -> dict[str, Any]:
    return {
        "method": method,
        "train_length": length,
        "train_tokens_per_second": train,
        "evaluation_tokens_per_second": [2 * speed for speed in train],
        "peak_memory_bytes": memory,
    }


def test_ratios_are_taken_round_by_round_to_the_same_length() -> None:
    alibi, own = (
        row("alibi", 64, [100, 30, 8], 3 << 20),
        row("sinusoidal", 64, [80, 60, 4], 4 << 20),
    )
    result = {
        "device": "1 x abacus",
        "rounds": 3,
        "rows": [alibi, own, row("alibi", 128, [1, 1, 1], 1 << 20)],
        "failed": [],
    }
    # 100 / 80, 30 / 60, 8 / 4. The ratio of the medians would be 30 / 60.
    assert ratio(alibi, own, "train_tokens_per_second") == "1.250 (0.500 to 2.000)"
    lines = efficiency_table(result).splitlines()
    assert lines[4] == (
        "| alibi | 64 | 30 | 1.250 (0.500 to 2.000) | 60 | 1.250 (0.500 to 2.000) | 3 MiB | 0.750 |"
    )
    # There is no sinusoidal model of 128 tokens to compare with.
    assert lines[6] == "| alibi | 128 | 1 | - | 2 | - | 1 MiB | - |"


def test_only_what_can_be_compared_is_measured(tmp_path: Path) -> None:
    alibi = contestant("alibi")
    with pytest.raises(ConfigError, match="alibi, 32 tokens: given twice"):
        measure([alibi, alibi], 1, 1)
    longer = tiny_config(data={"sequence_length": 64})
    with pytest.raises(ConfigError, match=r"alibi, 32 tokens takes 256, .* 64 tokens takes 512"):
        measure([alibi, longer], 1, 1)
    with pytest.raises(ConfigError, match="global_batch_size"):
        measure([alibi], 1, 3)


def test_contestants_keep_the_tokens_of_a_step_and_of_a_micro_batch() -> None:
    configs = contestants(Path("configs/demo.toml"), [], "alibi,t5", "64,128")
    sizes = [
        (c.position.method, c.data.sequence_length, c.batch.micro_batch_size, c.tokens_per_step)
        for c in configs
    ]
    assert sizes == [
        ("alibi", 64, 32, 4096),
        ("alibi", 128, 16, 4096),
        ("t5", 64, 32, 4096),
        ("t5", 128, 16, 4096),
    ]
    with pytest.raises(ConfigError, match="--lengths 96: does not divide the 4,096 tokens"):
        contestants(Path("configs/demo.toml"), [], "alibi", "96")
    with pytest.raises(ConfigError, match="--lengths 64,x: expected"):
        contestants(Path("configs/demo.toml"), [], "alibi", "64,x")
    with pytest.raises(ConfigError, match=r"position\.method"):
        contestants(Path("configs/demo.toml"), [], "albi", None)
    with pytest.raises(ConfigError, match="--methods alibi,: expected"):
        contestants(Path("configs/demo.toml"), [], "alibi,", None)


def pid_and_ranks(config: RunConfig, topology: Topology) -> tuple[int, int, int]:
    build_model(config)
    return os.getpid(), topology.tensor_rank, dist.get_world_size()


def killed(config: RunConfig, topology: Topology) -> None:
    if topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def refuses(config: RunConfig, topology: Topology) -> None:
    raise ConfigError("train.precision = fp16: no")


def test_a_turn_has_new_processes_and_leaves_none() -> None:
    config = tiny_config(parallel={"tensor_model_parallel_size": 2})
    turns = [take_turn(pid_and_ranks, config, 2) for _ in range(2)]
    pids = [pid for turn in turns for pid, _, _ in turn]
    assert len({os.getpid(), *pids}) == 5
    assert [(rank, world) for turn in turns for _, rank, world in turn] == [(0, 2), (1, 2)] * 2
    with pytest.raises(RunFailed, match="rank 1: the process was killed"):
        take_turn(killed, config, 2)
    with pytest.raises(RunFailed, match=r"rank .: train.precision = fp16: no"):
        take_turn(refuses, config, 2)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()

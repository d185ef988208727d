"""`pretrain bench`: whose turn it is, how contestants are compared, and what the commands write."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from pretrain.bench import timing
from pretrain.bench.timing import efficiency_table, measure, random_batches, take_turn
from pretrain.cli.commands import app
from pretrain.config import ConfigError, RunConfig, RunFailed, dump_config, load_config
from pretrain.topology import Topology
from tests.conftest import tiny_config

DEMO = Path("configs/demo.toml")


def contestant(method: str) -> RunConfig:
    return tiny_config(position={"method": method})


def measured(train: float, evaluation: float, memory: int) -> tuple[str, dict[str, float]]:
    values = train, evaluation, memory
    return "abacus", dict(zip((timing.TRAINING, timing.EVALUATION, timing.MEMORY), values))


def test_contestants_take_turns_back_and_forth_and_every_round_counts(monkeypatch) -> None:
    order: list[str] = []

    def turn(task: object, config: RunConfig, nproc: int) -> list[object]:
        order.append(config.position.method)
        if order.count("t5") > 1:
            order.remove("t5")
            raise RunFailed("out of memory")
        # The slower rank counts, and the larger one.
        n = len(order)
        return [measured(1e9, 1e9, 5), measured(1000 / n, 500 / n, n)]

    monkeypatch.setattr(timing, "take_turn", turn)
    configs = [contestant(method) for method in ("alibi", "sinusoidal", "t5")]
    result = measure(configs, 3, 2)
    a, s, n = "alibi", "sinusoidal", "t5"
    assert order == [a, s, n, s, a, a, s]
    assert result["device"] == "2 x abacus" and result["rounds"] == 3
    assert result["failed"] == [{"method": n, "train_length": 32, "reason": "out of memory"}]
    assert [row["method"] for row in result["rows"]] == [a, s]
    for row, turns in zip(result["rows"], ([1, 5, 6], [2, 4, 7])):
        assert row["train_tokens_per_second"] == [1000 / n for n in turns]
        assert row["evaluation_tokens_per_second"] == [500 / n for n in turns]
        assert row["peak_memory_bytes"] == max(5, turns[-1])
    assert "t5, 32 tokens: failed: out of memory" in efficiency_table(result)
    with pytest.raises(RunFailed, match="nothing could be measured"):
        order.append(n)
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
    rows = [
        row("alibi", 64, [100, 30, 8], 3 << 20),
        row("sinusoidal", 64, [80, 60, 4], 4 << 20),
        row("alibi", 128, [1, 1, 1], 1 << 20),
    ]
    lines = efficiency_table(
        {"device": "1 x abacus", "rounds": 3, "rows": rows, "failed": []}
    ).splitlines()
    # 100 / 80, 30 / 60, 8 / 4. The ratio of the medians would be 30 / 60.
    assert lines[4] == (
        "| alibi | 64 | 30 | 1.250 (0.500 to 2.000) | 60 | 1.250 (0.500 to 2.000) | 3 MiB | 0.750 |"
    )
    # There is no sinusoidal model of 128 tokens to compare with.
    assert lines[6] == "| alibi | 128 | 1 | - | 2 | - | 1 MiB | - |"


def test_only_what_can_be_compared_is_measured() -> None:
    alibi = contestant("alibi")
    longer = tiny_config(data={"sequence_length": 64})
    with pytest.raises(ConfigError, match=r"alibi, 32 tokens takes 256, .* 64 tokens takes 512"):
        measure([alibi, longer], 1, 1)
    with pytest.raises(ConfigError, match="global_batch_size"):
        measure([alibi], 1, 3)


def pid_and_ranks(config: RunConfig, topology: Topology) -> tuple[int, int, int]:
    return os.getpid(), topology.tensor_rank, dist.get_world_size()


def killed(config: RunConfig, topology: Topology) -> None:
    if topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_turn_has_new_processes_and_leaves_none() -> None:
    config = tiny_config(parallel={"tensor_model_parallel_size": 2})
    turns = [take_turn(pid_and_ranks, config, 2) for _ in range(2)]
    pids = [pid for turn in turns for pid, _, _ in turn]
    assert len({os.getpid(), *pids}) == 5
    assert [(rank, world) for turn in turns for _, rank, world in turn] == [(0, 2), (1, 2)] * 2
    with pytest.raises(RunFailed, match="rank 1: process 1 terminated with signal SIGKILL"):
        take_turn(killed, config, 2)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words])


def test_methods_measures_training_and_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(dump_config(tiny_config()))
    out = tmp_path / "methods.json"
    options = ("--methods", "t5", "--rounds", "1", "--out")
    refused = invoke("methods", str(file), *options, str(tmp_path / "none" / "out.json"))
    assert isinstance(refused.exception, ConfigError) and "none is not a" in str(refused.exception)
    ended = invoke("methods", str(file), *options, str(out))
    assert ended.exit_code == 0, ended.output
    [row] = json.loads(out.read_text())["rows"]
    assert (row["method"], row["train_length"]) == ("t5", 32)
    for speed in ("train_tokens_per_second", "evaluation_tokens_per_second"):
        assert len(row[speed]) == 1 and row[speed][0] > 0
    assert row["peak_memory_bytes"] > 0
    assert "| t5 | 32 |" in ended.output


def first_tokens(*overrides: str) -> torch.Tensor:
    """Return the tokens of the first step of 4 x 200 x 129."""
    batch = ["batch.micro_batch_size=200", "batch.global_batch_size=800"]
    config = load_config(DEMO, [*batch, "data.vocab_size=20_000", *overrides])
    return torch.cat(next(random_batches(config, 4)))


def test_tokens_of_an_adaptive_softmax_are_as_frequent_as_words() -> None:
    """Zipf's law: the first n of V ids have about log(n + 1) / log(V + 1) of the tokens."""
    tokens = first_tokens("model.adaptive_cutoffs=[2000, 8000]")
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 20_000
    for ids, share in ((1, 0.070), (2000, 0.7675), (8000, 0.9075)):
        # 103,200 draws: a standard error of 0.0013.
        assert abs((tokens < ids).double().mean().item() - share) < 0.006, ids
    # Those of other models are equally frequent.
    assert abs((first_tokens() < 2000).double().mean().item() - 0.1) < 0.006

"""Test the measurement of generation: whose turn it is, what is counted, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pretrain.bench.methods import (
    GenerationTurn,
    Sizes,
    inference_table,
    measure_inference,
    measure_inference_with,
)
from pretrain.cli.commands import app
from pretrain.config import ConfigError, RunConfig, RunFailed, dump_config
from tests.conftest import tiny_config


def test_methods_and_lengths_take_turns_and_every_round_counts() -> None:
    order: list[tuple[str, int]] = []

    def turn(config: RunConfig, sizes: Sizes, nproc: int) -> list[GenerationTurn]:
        order.append((config.position.method, sizes.length))
        if order[-1] == ("none", 16):
            raise RunFailed("no memory")
        return [GenerationTurn(2.0 * len(order), 1.0 * len(order), 64, 7, "abacus")]

    configs = [tiny_config(position={"method": method}) for method in ("sinusoidal", "none")]
    sizes = [Sizes(length, new_tokens=6, batch_size=3) for length in (8, 16)]
    result = measure_inference_with(turn, configs, sizes, 2, 1)
    s8, n8, s16, n16 = [(m, n) for n in (8, 16) for m in ("sinusoidal", "none")]
    assert order == [s8, n8, s16, n16, s16, n8, s8]
    assert result["failed"] == [{"method": "none", "length": 16, "reason": "no memory"}]
    # 3 prompts of 8 tokens in 2 s for each turn so far; 5 tokens follow the first of each.
    assert result["rows"][0] == {
        "method": "sinusoidal",
        "length": 8,
        "prefill_tokens_per_second": [24 / 2, 24 / 14],
        "decode_tokens_per_second": [15 / 1, 15 / 7],
        "cache_bytes": 64,
        "peak_memory_bytes": 7,
    }
    rows = [(row["method"], row["length"]) for row in result["rows"]]
    assert rows == [s8, n8, s16] and result["device"] == "1 x abacus"
    table = inference_table(result)
    # none at 8 tokens: turns 2 and 6, beside 1 and 7.
    assert "| none | 8 | 4.0 | 0.833 (0.500 to 1.167) |" in table
    assert "none, 16 tokens: failed: no memory" in table


def test_a_layout_that_cannot_generate_is_refused_before_any_process_starts() -> None:
    split = tiny_config(parallel={"tensor_model_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"--nproc 1: .* Give --nproc 2"):
        measure_inference([split], [Sizes(8, 2, 1)], 1, 1)
    stages = tiny_config(parallel={"pipeline_model_parallel_size": 2})
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size = 2"):
        measure_inference([stages], [Sizes(8, 2, 1)], 1, 2)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, words)


def test_the_command_measures_a_run_or_a_config(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(dump_config(tiny_config()))
    out = tmp_path / "generation.json"
    options = ("--lengths", "8,40", "--methods", "alibi,sinusoidal", "--rounds", "1")
    ended = invoke("bench", "generate", str(run), *options, "--out", str(out))
    assert ended.exit_code == 0, ended.output
    measured = json.loads(out.read_text())
    rows = [(row["length"], row["method"], row["cache_bytes"]) for row in measured["rows"]]
    # 4 layers of 8 heads of 12 numbers of 4 bytes, for keys and for values.
    assert rows == [
        (length, method, 2 * 4 * 8 * 12 * 4 * (length + 32))
        for length in (8, 40)
        for method in ("alibi", "sinusoidal")
    ]
    for row in measured["rows"]:
        assert min(*row["prefill_tokens_per_second"], *row["decode_tokens_per_second"]) > 0
        assert row["peak_memory_bytes"] > row["cache_bytes"]
    assert "| sinusoidal | 40 |" in ended.output


def test_the_command_measures_methods(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(dump_config(tiny_config()))
    out = tmp_path / "methods.json"
    options = ("--methods", "t5,sinusoidal", "--rounds", "1", "--out")
    refused = invoke("bench", "methods", str(file), *options, str(tmp_path / "none" / "out.json"))
    assert isinstance(refused.exception, ConfigError) and "none is not a" in str(refused.exception)
    ended = invoke("bench", "methods", str(file), *options, str(out))
    assert ended.exit_code == 0, ended.output
    measured = json.loads(out.read_text())
    assert [(row["method"], row["train_length"]) for row in measured["rows"]] == [
        ("t5", 32),
        ("sinusoidal", 32),
    ]
    assert all(len(row["train_tokens_per_second"]) == 1 for row in measured["rows"])
    assert "| t5 | 32 |" in ended.output

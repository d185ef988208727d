"""Test the measurement of generation: whose turn it is, what is counted, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pretrain.bench.methods import Sizes, measure_inference
from pretrain.cli.commands import app
from pretrain.config import ConfigError, dump_config, num_parameters
from tests.conftest import tiny_config


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
    for row in measured["rows"]:
        for speed in ("train_tokens_per_second", "evaluation_tokens_per_second"):
            assert len(row[speed]) == 1 and row[speed][0] > 0
        # Master weights and moments alone.
        assert row["peak_memory_bytes"] > 12 * num_parameters(tiny_config())
    assert "| t5 | 32 |" in ended.output

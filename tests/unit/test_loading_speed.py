"""Test the measurement of the loader: equal work for all, in turns, and what it refuses."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pretrain.bench import data
from pretrain.bench.data import CONTESTANTS, Contest, _write, loading_table
from pretrain.cli.commands import app
from pretrain.config import ConfigError, RunConfig, dump_config
from tests.conftest import tiny_config

LENGTH, TOKENS = 32, 60_000


def bench_config(**data: Any) -> RunConfig:
    sizes = {"sequence_length": LENGTH, "tokens_per_block": 1024, "tokens_per_shard": 16_384}
    return tiny_config(data=sizes | data, batch={"global_batch_size": 8, "micro_batch_size": 2})


@pytest.mark.parametrize(
    "corpora", [{}, {"books": {"paths": ["b"]}, "web": {"paths": ["w"]}}], ids=["one corpus", "two"]
)
def test_every_contestant_delivers_random_samples_of_the_same_tokens(
    tmp_path: Path, corpora: dict[str, Any]
) -> None:
    """Each takes half of the global batch, as a rank of two does, in micro batches of int64."""
    config = bench_config(corpora=corpora)
    stream = _write(config, tmp_path, TOKENS)
    contest = Contest(config, stream, tmp_path / "flat.bin", 2)
    assert np.array_equal(contest.memmap(), stream.read(0, TOKENS))
    # Every sample begins somewhere in the tokens: two ids in a row say nearly for sure where.
    tokens = contest.memmap().astype(np.int64)
    for name, make in CONTESTANTS.items():
        steps = list(islice(make(contest), 5))
        for step in steps:
            assert [(m.dtype, *m.shape) for m in step] == [(torch.int64, 2, LENGTH + 1)] * 2, name
        samples = torch.cat([micro for step in steps for micro in step]).numpy()
        starts = []
        for sample in samples:
            (places,) = np.nonzero(tokens[: TOKENS - LENGTH] == sample[0])
            same = [p for p in places if np.array_equal(tokens[p : p + LENGTH + 1], sample)]
            assert same, f"{name}: a sample that is not in the text"
            starts.append(same[0])
        assert starts != sorted(starts), f"{name}: in the order of the files"


@pytest.mark.parametrize("workers", [0, 1])
def test_no_contestant_runs_out_of_tokens(tmp_path: Path, workers: int) -> None:
    """A turn takes as long as it is told to, on however few tokens."""
    config = bench_config(num_workers=workers, tokens_per_shard=65_536)
    stream = _write(config, tmp_path, 2_000)
    contest = Contest(config, stream, tmp_path / "flat.bin", 1)
    for name, make in CONTESTANTS.items():
        # 2,000 tokens are 7 steps of 8 samples; webdataset ended there.
        assert len(list(islice(make(contest), 30))) == 30, name


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", "data", *words])


def test_the_command_writes_every_round_and_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "WAITED_STEPS", 2)
    file, out, place = tmp_path / "c.toml", tmp_path / "speed.json", tmp_path / "place"
    place.mkdir()
    file.write_text(dump_config(bench_config()))
    options = ("--rounds", "2", "--seconds", "0.01", "--directory", str(place))
    ended = invoke(str(file), "--tokens", str(TOKENS), *options, "--out", str(out))
    assert ended.exit_code == 0, ended.output
    assert list(place.iterdir()) == []
    result = json.loads(out.read_text())
    assert [row["loader"] for row in result["rows"]] == list(CONTESTANTS)
    assert result["samples_per_step"] == 8 and result["failed"] == []
    for row in result["rows"]:
        kinds = ("tokens_per_second", "tokens_per_processor_second", "wait_milliseconds")
        assert all(len(row[kind]) == 2 and min(row[kind]) > 0 for kind in kinds)
    assert loading_table(result) in ended.output
    assert "| memmap | " in ended.output and "1.000 (1.000 to 1.000)" in ended.output


def test_what_cannot_be_measured_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(dump_config(bench_config()))
    few = invoke(str(file), "--tokens", "256").exception
    assert isinstance(few, ConfigError) and "--tokens 256: a step of every corpus takes" in str(few)
    missing = invoke(str(file), "--directory", str(tmp_path / "missing")).exception
    assert isinstance(missing, ConfigError) and str(tmp_path / "missing") in str(missing)
    endless = invoke(str(file), "--seconds", "inf")
    assert endless.exit_code == 2 and "--seconds" in endless.output

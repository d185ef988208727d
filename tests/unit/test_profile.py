"""train.profile_steps in configs, and a profiler that fails."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from pretrain.config import ConfigError, dump_config
from pretrain.config.load import parse_config
from pretrain.config.schema import Effect
from pretrain.config.trajectory import effect_of
from pretrain.training import profile
from tests.conftest import tiny_config


@pytest.mark.parametrize("steps", [[3, 2], [0, 1], [20, 21], [1], [1, 2, 3]])
def test_steps_that_a_run_does_not_take_are_refused(steps):
    with pytest.raises(ConfigError, match=r"train.profile_steps"):
        tiny_config(train={"profile_steps": steps})


@pytest.mark.parametrize("steps", [[1, 1], [19, 20], [1, 20]])
def test_steps_stay_as_they_are_in_the_file(steps):
    import tomllib

    config = tiny_config(train={"profile_steps": steps})
    again = parse_config(tomllib.loads(dump_config(config)), "again")
    assert again.train.profile_steps == tuple(steps)
    assert effect_of("train.profile_steps") is Effect.FREE


def a_run(tmp_path, said, is_main=True):
    """A run of steps 2 and 3, and its hook."""
    config = tiny_config(run={"directory": str(tmp_path)}, train={"profile_steps": [2, 3]})
    run = SimpleNamespace(
        config=config,
        topology=SimpleNamespace(is_main=is_main),
        reporter=SimpleNamespace(warn=lambda kind, message: said.append(message)),
        state=SimpleNamespace(step=0),
        optimizer=SimpleNamespace(wait_for_weights=lambda: None),
    )
    return run, profile.ProfileHook(run)


def take(run, hook, *steps):
    for run.state.step in (step - 1 for step in steps):
        hook.before_step(run)


def test_a_profiler_that_fails_warns_and_is_left_alone(tmp_path, monkeypatch):
    """As on a GPU whose counters the user may not read."""
    said: list[str] = []

    def fails(first):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(profile, "Recording", fails)
    run, hook = a_run(tmp_path, said)
    take(run, hook, 1, 2, 3, 4)
    hook.at_end(run)
    assert len(said) == 1 and "INSUFFICIENT_PRIVILEGES" in said[0] and "goes on" in said[0]


def test_a_run_that_is_stopped_within_the_steps_keeps_what_was_recorded(tmp_path, capsys):
    run, hook = a_run(tmp_path, [])
    take(run, hook, 1, 2)
    torch.ones(8, 8) @ torch.ones(8, 8)
    hook.at_end(run)
    take(run, hook, 3)
    hook.at_end(run)
    [trace] = (tmp_path / "profile").iterdir()
    assert trace.name == "step-00000002-00000002.rank0.json.gz"
    assert capsys.readouterr().err.startswith(f"profile of step 2: {trace}; open it at ")


def test_no_weights_are_on_their_way_when_the_recording_ends(tmp_path, monkeypatch):
    """Torch's profiler may end the process if a collective ends after it."""
    run, hook = a_run(tmp_path, [])
    said: list[str] = []
    stop = profile.Recording.stop
    run.optimizer.wait_for_weights = lambda: said.append("weights")
    monkeypatch.setattr(profile.Recording, "stop", lambda self: (said.append("stop"), stop(self)))
    take(run, hook, 2)
    hook.at_end(run)
    assert said == ["weights", "stop"]


def test_a_run_that_fails_within_the_steps_writes_nothing(tmp_path):
    """Its messages may still be on their way."""
    run, hook = a_run(tmp_path, [])
    take(run, hook, 2)
    hook.close()
    assert not (tmp_path / "profile").exists()
    hook.at_end(run)


def test_other_ranks_record_nothing_and_part_the_steps_alike(tmp_path):
    for is_main in (True, False):
        run, hook = a_run(tmp_path, [], is_main)
        due = []
        for run.state.step in range(6):
            due.append(hook.is_due(run))
        assert due == [False, True, False, True, False, False]
    take(run, hook, 2)
    hook.at_end(run)
    assert not (tmp_path / "profile").exists()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_its_memory_is_written_as_well(tmp_path):
    run, hook = a_run(tmp_path, [])
    take(run, hook, 2)
    kept = torch.ones(1 << 20, device="cuda")
    hook.at_end(run)
    [memory] = (tmp_path / "profile").glob("*.pickle")
    found = SimpleNamespace(**pickle.loads(memory.read_bytes()))
    assert any(e["size"] >= kept.nbytes for trace in found.device_traces for e in trace)

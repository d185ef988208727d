"""Check that srun is told to end its step until it does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import load_config
from pretrain.launcher import ranks, slurm
from pretrain.launcher.ranks import SrunRanks
from pretrain.launcher.supervise import Signals, Supervisor
from pretrain.rundir.attempts import Attempt, read_attempts

# Takes SIGTERM as srun does while it starts its tasks: it forgets the first one.
FORGETFUL = """
import signal, sys
signals = {signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("runs", flush=True)
for _ in range(2):
    signal.sigwait(signals)
sys.exit(7)
"""


IGNORING = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("runs", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("srun", "seconds", "code", "signals"),
    [(FORGETFUL, 60, 7, []), (IGNORING, 1.5, -signal.SIGKILL, [signal.SIGKILL])],
    ids=["forgets its end, and is told again", "does not end, and slurmctld ends it"],
)
def test_a_step_is_ended(monkeypatch, srun: str, seconds: float, code: int, signals: Any) -> None:
    asked: list[int] = []
    monkeypatch.setattr(slurm, "signal_step", lambda job, name, number: asked.append(number))
    process = subprocess.Popen([sys.executable, "-c", srun], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"runs\n"
    slurm.end_step(process, "1", "train", seconds)
    assert process.returncode == code and asked == signals
    process.stdout.close()


# Has the agents of two ranks, of which one has failed, and waits for Slurm to end the others.
SLOW = """#!/bin/sh
echo '0: rank agent: {"code": null}'
echo '1: half a line rank agent: {"code": 9}'
cat
echo '0: rank agent: {"code": -9}'
exec sleep 600
"""


# Has the agents of two ranks, of which rank 1 has ended and rank 0 still uploads, until stdin ends.
UPLOADS = """#!/bin/bash
echo '0: rank agent: {"code": null}'
echo '1: rank agent: {"code": 0}'
read -r -t 3
[ $? -gt 128 ] && echo '0: uploaded'
echo '0: rank agent: {"code": 0}'
cat
"""


def attempt_with(srun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return how an attempt ends whose srun is this program. Only its own answers are awaited."""
    monkeypatch.setattr(ranks, "KILL_SECONDS", 0.5)
    monkeypatch.setattr(ranks, "ANSWER_SECONDS", 0.5)
    (program := tmp_path / "srun").write_text(srun)
    program.chmod(0o755)
    settings = [f"run.directory={tmp_path / 'run'}", "recovery.hang_seconds=60"]
    attempt = Attempt.begin(tmp_path / "run")
    step = [str(program), "--ntasks=2", "--ntasks-per-node=1"]

    def start(attempt: Attempt) -> SrunRanks:
        attempt.phase("training", 7)
        return SrunRanks(step, ["python"], "1", "a", {}, tmp_path / "log", ["n1", "n2"])

    config = load_config("configs/demo.toml", settings)
    return Supervisor(config, Signals(), lambda record: True).make_attempt(attempt, start).verdict


def test_a_rank_that_has_failed_is_the_cause_although_slurm_is_slow_to_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = attempt_with(SLOW, tmp_path, monkeypatch)
    assert (end.outcome, end.code, end.nodes) == ("failed", 9, ("n2",))
    assert end.reason == f"rank 1 on n2 ended with exit code 9; see {tmp_path / 'log'}, at step 7"
    assert read_attempts(tmp_path / "run")[0].ended is not None
    assert "1: half a line \n" in (tmp_path / "log").read_text()


def test_ranks_that_have_ended_well_leave_rank_0_the_time_to_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt_with(UPLOADS, tmp_path, monkeypatch)
    assert "0: uploaded" in (tmp_path / "log").read_text()

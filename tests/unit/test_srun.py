"""Check that srun is told to end its step until it does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pretrain.launcher.node import srun

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


def test_a_step_that_has_forgotten_its_end_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(srun, "signal_step", lambda job, name, number: asked.append(number))
    process = subprocess.Popen([sys.executable, "-c", FORGETFUL], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"runs\n"
    srun.end_step(process, "1", "train", 60)
    assert process.returncode == 7 and asked == []
    process.stdout.close()


def test_a_step_that_srun_does_not_end_is_ended_by_slurmctld(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(srun, "signal_step", lambda job, name, number: asked.append(number))
    ignoring = "import signal; signal.pthread_sigmask(0, {15}); print('runs', flush=True);"
    command = [sys.executable, "-c", f"{ignoring} signal.pause()"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"runs\n"
    srun.end_step(process, "1", "train", 1.5)
    assert process.returncode == -signal.SIGKILL and asked == [signal.SIGKILL]
    process.stdout.close()

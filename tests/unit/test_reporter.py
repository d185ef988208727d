"""A run that holds its own attempt keeps it alive, says how it ended, and yields to another."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pretrain.config import ConfigError
from pretrain.rundir.attempts import Attempt, Owner, read_attempts
from pretrain.training.reporter import AttemptReporter
from tests.end_to_end.commands import ROOT, TIMEOUT_SECONDS

HOLDER = """
import pathlib, sys, time
from pretrain.rundir.attempts import Owner
from pretrain.training import reporter
reporter.HEARTBEAT_SECONDS = 0.02
run = pathlib.Path(sys.argv[1])
with reporter.AttemptReporter() as mine:
    mine.begin(run, Owner.here())
    mine.phase("training", 7)
    heartbeat = run / "attempts/0001/heartbeat"
    begin = heartbeat.stat().st_mtime_ns
    while heartbeat.stat().st_mtime_ns == begin:
        time.sleep(0.01)
    (run / "attempts/0002").mkdir()  # what another starter does that saw no heartbeat for long
    time.sleep(60)
"""


def test_a_process_that_lost_the_run_ends(tmp_path):
    """At once, and not with an exception in a thread, which nobody would see."""
    done = subprocess.run(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 1, done.stderr
    assert f"error: {tmp_path}/attempts/0001: another attempt has taken over the run" in done.stderr
    ended = read_attempts(tmp_path)[0].ended
    assert (ended.outcome, ended.code, ended.step) == ("superseded", 1, 7)


@pytest.mark.parametrize(
    ("error", "code", "outcome", "reason"),
    [
        (ConfigError("a.toml: wrong\nmore"), 2, "refused", "a.toml: wrong"),
        (RuntimeError("it broke"), 1, "failed", "it broke"),
        (RuntimeError(), 1, "failed", "RuntimeError"),
        (KeyboardInterrupt(), 130, "stopped", "interrupted"),
    ],
)
def test_how_it_ended_is_written_after_a_failure(tmp_path, error, code, outcome, reason):
    with pytest.raises(type(error)), AttemptReporter() as reporter:
        reporter.begin(tmp_path, Owner.here())
        reporter.phase("training", 3)
        raise error
    [attempt] = read_attempts(tmp_path)
    assert (attempt.ended.code, attempt.ended.outcome, attempt.ended.reason) == (
        code,
        outcome,
        reason,
    )
    assert attempt.ended.step == 3
    AttemptReporter().begin(tmp_path, Owner.here())  # free again


def test_a_joined_attempt_is_the_supervisors_to_end(tmp_path):
    held = Attempt.begin(tmp_path)
    with pytest.raises(RuntimeError), AttemptReporter() as reporter:
        reporter.join(held.directory)
        with reporter.during("saving", 4, saved=4):
            reporter.progress(4)
        raise RuntimeError("it broke")
    [attempt] = read_attempts(tmp_path)
    assert attempt.ended is None
    assert [(p.phase, p.saved) for p in attempt.phases] == [
        ("starting", None),
        ("saving", None),
        ("training", 4),
    ]

"""A disk that is full, for good or for a moment, and an attempt that has lost its run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import complete_checkpoints
from pretrain.rundir.paths import ExitCode
from tests.end_to_end.commands import (
    LAUNCHER,
    PRETRAIN,
    Running,
    explained,
    forked,
    metrics,
    sets,
    succeeded,
    succeeds,
    wait_for,
)

SHORT = ("evaluation.lengths=[32]", "evaluation.max_tokens=512", "checkpoint.interval_steps=2")
DISK_BYTES = 4_000_000
FEW_FILES = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); "
    "from pretrain.__main__ import main; main()"
)


def fill(disk: Path, leave: int) -> Path:
    """Write a file of the user's that leaves `leave` bytes free."""
    found = os.statvfs(disk)
    path = disk / "users-file"
    path.write_bytes(b"x" * (found.f_bavail * found.f_frsize - leave))
    return path


def words(*settings: str) -> list[str]:
    return sets(*SHORT, *settings)


def test_a_full_disk_ends_the_run_once(config, disk):
    """The launcher says what is needed and free, keeps the checkpoints, and does not try again."""
    run = disk / "run"
    settings = words(f"run.directory={run}")
    succeeds("train", config, *settings, "--set", "train.num_steps=2")
    [saved] = complete_checkpoints(run)
    size = sum(path.stat().st_size for path in saved.iterdir())
    users = fill(disk, leave=size // 2)
    done = forked([*LAUNCHER, "local", str(config), "--nproc", "1", *settings])
    explained(done, ExitCode.NO_SPACE, "a checkpoint takes", "are free", "Make room")
    assert done.err.count("a checkpoint takes") == 1 and "no space" in done.err, done.err
    [_, record] = read_attempts(run)
    assert record.ended and (record.ended.outcome, record.ended.code) == ("no_space", 82)
    assert os.listdir(run / "checkpoints") == [saved.name] and users.exists()
    users.unlink()
    done = succeeded(forked([*LAUNCHER, "local", str(config), "--nproc", "1", *settings]))
    assert [r["step"] for r in metrics(run) if "evaluation" not in r] == list(range(1, 9))


def test_every_command_that_finds_the_disk_full_has_one_exit_code(config, disk, workspace):
    run = workspace / "runs/to-export"
    succeeds("train", config, *words(f"run.directory={run}", "train.num_steps=2"))
    plan = disk / "new"
    commands = [
        [*PRETRAIN, "export", run, plan / "hf"],
        [*PRETRAIN, "evaluate", run, "--max-tokens", 512, "--out", plan / "curve.json"],
        [*PRETRAIN, "data", "build", config, "--set", f"data.directory={plan / 'data'}"],
        [*PRETRAIN, "train", config, *words(f"run.directory={plan / 'run'}")],
        [*LAUNCHER, "local", config, "--nproc", "1", *words(f"run.directory={plan / 'local'}")],
    ]
    for leave in (0, 8192):
        plan.mkdir(exist_ok=True)
        users = fill(disk, leave)
        for command in commands:
            explained(forked([str(word) for word in command]), ExitCode.NO_SPACE, "Make room")
        users.unlink()


def test_a_limit_of_open_files_is_named(config, workspace):
    """Not in gloo's words."""
    settings = words(f"run.directory={workspace}/runs/few")
    done = forked([sys.executable, "-c", FEW_FILES, "train", config, *settings])
    explained(done, 1, "Too many open files. Raise the limit of open files (ulimit -n)")


def test_a_disk_that_is_full_for_a_moment_does_not_end_training(config, disk):
    """Status and numbers cannot be written between two saves, and nothing is lost by it."""
    run = disk / "run"
    settings = words(f"run.directory={run}", "checkpoint.interval_steps=4000")
    process = Running([*PRETRAIN, "train", config, *settings, "--set", "train.num_steps=4000"])
    try:
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(metrics_so_far(run)) > 5)
        users = fill(disk, leave=0)
        wait_for(lambda: process.poll() is not None or nothing_is_written(run))
        assert process.poll() is None
        users.unlink()
        after = len(metrics_so_far(run))
        wait_for(lambda: process.poll() is not None or len(metrics_so_far(run)) > after + 5)
        process.send_signal(signal.SIGTERM)
    finally:
        done = process.ended()
    assert done.code == ExitCode.STOPPED, done.text
    assert done.err.count("status cannot be written") == 1
    assert done.err.count("cannot be written for now") == 1
    steps = [r["step"] for r in metrics(run) if "evaluation" not in r]
    assert steps == list(range(1, steps[-1] + 1))


def metrics_so_far(run: Path) -> list[bytes]:
    return (run / "metrics.jsonl").read_bytes().splitlines()


def nothing_is_written(run: Path) -> bool:
    """Return True when the disk has refused the lines of steps for two seconds."""
    before = metrics_so_far(run)
    time.sleep(2)
    return metrics_so_far(run) == before

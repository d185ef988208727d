"""Check `launcher status`, `logs`, `cancel` and `requeue` on a run's files, without Slurm.

tests/slurm/test_follow.py checks them on a real Slurm.
"""

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.config import ConfigError, RunFailed
from pretrain.launcher import control
from pretrain.launcher.slurm import JobState
from pretrain.launcher.status import (
    HEAD,
    TAIL_BYTES,
    _row,
    attempts_of,
    detail,
    find_runs,
    read_rates,
    read_statuses,
    show_status,
    table,
)
from pretrain.rundir.attempts import Attempt, Owner, read_attempts
from pretrain.rundir.jobs import JobRecord, append_job


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch, tmp_path):
    """Hide Slurm, as on a laptop without squeue, and start in an empty directory."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)


def make_run(
    name: str, num_steps: int = 400, steps: int = 100, nproc: int = 2, job: str | None = None
) -> tuple[Path, Attempt]:
    """Make a run that trains: its attempt, its config and its metrics."""
    run = Path("runs") / name
    attempt = Attempt.begin(run, Owner.here(num_processes=nproc, slurm_job_id=job))
    (run / "config.toml").write_text(f"[train]\nnum_steps = {num_steps}\n")
    for phase in ("loading", "training"):
        attempt.phase(phase, 0)
    record = {"loss_nats": 3.0, "step_seconds": 0.5, "tokens_per_second": 21_300.0}
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s + 1} | record) + "\n" for s in range(steps))
    )
    (run / f"checkpoints/step-{steps:08d}").mkdir(parents=True)
    (run / f"checkpoints/step-{steps:08d}/manifest.json").touch()
    # Not complete: it has no manifest.
    (run / f"checkpoints/step-{steps + 1:08d}").mkdir()
    (run / "logs").mkdir()
    return run, attempt


def status_of(run: Path, now: float | None = None):
    return read_statuses([run], now)[0][0]


def test_rates_are_means_over_the_last_steps_of_a_long_file(tmp_path):
    dice, path = random.Random(1), tmp_path / "metrics.jsonl"
    steps = [
        {
            "step": s,
            "loss_nats": dice.random(),
            "step_seconds": dice.uniform(0.1, 2),
            "tokens_per_second": 1e4 * dice.random(),
            "padding": "x" * 300,
        }
        for s in range(1, 3001)
    ]
    with path.open("w") as file:
        for record in steps:
            file.write(json.dumps(record) + "\n")
            if record["step"] % 10 == 0:
                file.write(
                    json.dumps({"step": record["step"], "evaluation": True, "loss_nats": 99.0})
                    + "\n"
                )
        file.write('{"step": 3001, "loss_')
    assert path.stat().st_size > 3 * TAIL_BYTES
    rates, last = read_rates(path), steps[-50:]
    seconds = sum(r["step_seconds"] for r in last)
    assert rates.step == 3000 and rates.loss_nats == steps[-1]["loss_nats"]
    assert math.isclose(
        rates.tokens_per_second,
        sum(r["tokens_per_second"] * r["step_seconds"] for r in last) / seconds,
    )


def test_a_loss_that_is_no_number_and_a_file_without_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_rates(path) is None
    path.write_text(
        '{"step": 1, "loss_nats": null, "non_finite": {"loss_nats": "inf"}, "step_seconds": 1.0}\n'
    )
    assert read_rates(path).loss_nats == math.inf
    path.write_text('{"step": 1, "evaluation": true}\n[]\nnot json\n')
    assert read_rates(path) is None


def test_a_slow_rank_is_named_while_the_run_goes_on():
    run, attempt = make_run("a")
    path = run / "metrics.jsonl"
    [*_, last] = map(json.loads, path.read_text().splitlines())
    window = {"slowest_rank": 3, "slowest_place": "n7, cuda:1 NVIDIA H200", "slowest_ratio": 1.528}
    slow = window | {"slow_since_step": 17}

    def reason(*records):
        path.write_text("".join(json.dumps(last | record) + "\n" for record in records))
        return _row(status_of(run))[HEAD.split().index("REASON")]

    assert reason(slow, {}) == (
        "rank 3 (n7, cuda:1 NVIDIA H200) is slow since step 17, busy 1.53 times as long"
    )
    assert reason(slow, window) == reason({}) == ""
    path.write_text(json.dumps(last | slow) + "\n")
    attempt.end("finished", 0, "all steps are done", 100)
    assert "rank 3" not in detail(status_of(run))


def test_a_run_under_way_says_when_it_will_end():
    run, attempt = make_run("a")
    at = time.time()
    owner = attempt.directory / "owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"began_at": at - 100}))
    # 100 steps in 90 s, with what else is done between them: 300 steps will take 270 s.
    marks = [("starting", 100, 0), ("training", 90, 0), ("evaluating", 50, 60), ("saving", 10, 100)]
    lines = "".join(
        json.dumps({"at": at - ago, "phase": p, "step": s}) + "\n" for p, ago, s in marks
    )
    (attempt.directory / "phases.jsonl").write_text(lines)
    status = status_of(run, at)
    assert (status.state, status.restarts, status.step, status.num_steps, status.checkpoint) == (
        "running",
        0,
        100,
        400,
        100,
    )
    assert status.nodes == Owner.read(attempt.directory).host and abs(status.ends_at - at - 270) < 1
    text = detail(status)
    lines = dict(line.split(None, 1) for line in text.partition("\n\n")[0].splitlines())
    wanted = {"step": "100/400", "loss": "3.000", "tokens/s": "21.3k", "checkpoint": "100"}
    assert lines | wanted == lines and "ends" in lines


def test_a_run_whose_processes_are_gone_has_died():
    run, attempt = make_run("a")
    assert not status_of(run).is_over
    old = time.time() - 1000
    os.utime(attempt.directory / "heartbeat", (old, old))
    status = status_of(run)
    assert status.state == "died" and "no sign of life since" in status.reason and status.is_over
    # With a fresh heartbeat: the kernel knows sooner.
    run, attempt = make_run("b")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    owner = json.loads((attempt.directory / "owner.json").read_text())
    (attempt.directory / "owner.json").write_text(json.dumps(owner | {"pid": gone.pid}))
    assert status_of(run).state == "died"


def test_without_slurm_a_sent_run_is_unknown_until_its_files_tell(capsys):
    run = Path("runs/a")
    run.mkdir(parents=True)
    append_job(run, JobRecord("12", "train", "a", time.time(), "site", 2, 4, str(run)))
    statuses, away = read_statuses([run])
    assert statuses[0].state == "unknown" and not statuses[0].is_over and "no such command" in away
    show_status([run])
    assert "no such command" in capsys.readouterr().out.splitlines()[0]
    with pytest.raises(RunFailed, match=r"are unknown: squeue: no such command"):
        control.cancel(run, save=True)
    attempt = Attempt.begin(run)
    assert status_of(run).state == "running"
    attempt.end("finished", 0, "at step 9", 9)
    show_status([run])
    assert status_of(run).state == "finished" and "squeue" not in capsys.readouterr().out
    # By the node's clock its attempt began before it was submitted.
    late, attempt = make_run("b", job="13")
    append_job(late, JobRecord("13", "train", "b", time.time() + 30, "site", 2, 4, str(late)))
    attempt.end("finished", 0, "at step 9", 9)
    assert status_of(late).state == "finished"


def test_a_job_that_ends_to_be_requeued_keeps_its_attempt_and_starts_again():
    run, _ = make_run("a", job="7")
    job = JobState("7", "7", "COMPLETING", "", "n1", 1.0, None, None, None, "n1", 1)
    assert attempts_of(read_attempts(run), job) and control._starts_again(run, job)
    # Its last start ends.
    assert not control._starts_again(run, dataclasses.replace(job, restarts=0))


def test_a_table_of_many_runs_fits_the_terminal(monkeypatch):
    names = [f"sweep-of-the-position-methods/method-{i}/x{'x' * 5 * i}" for i in range(8)]
    for name in names:
        make_run(name, num_steps=1_000_000, steps=99)
    statuses = read_statuses(find_runs([]))[0]
    assert [str(status.run) for status in statuses] == sorted(f"runs/{name}" for name in names)
    head, *lines = table(statuses).splitlines()
    assert head.split() == HEAD.split() and len(lines) == 8
    assert all("99/1000000" in line and "21.3k" in line and "3.000" in line for line in lines)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, table(statuses).splitlines())) == 80


def test_what_is_no_run():
    with pytest.raises(ConfigError, match="no runs here"):
        find_runs([])
    Path("other").mkdir()
    for path, message in (("none", "no such run"), ("other", "not a run")):
        for command in (
            lambda p: find_runs([p]),
            control.show_log,
            lambda p: control.print_log(p, None, True),
            control.requeue,
            lambda p: control.cancel(p, False),
        ):
            with pytest.raises(ConfigError, match=message):
                command(Path(path))


def test_a_run_is_known_by_its_files_and_not_by_names():
    """A source tree beside the runs, with folders named as a run's, is none."""
    base, _ = make_run("base")
    imported = Path("runs/imported")
    imported.mkdir()
    (imported / "run.json").write_text('{"run_directory_version": 1}')
    package = Path("runs/package")
    for name in ("attempts/old", "launch", "logs"):
        (package / name).mkdir(parents=True)
    (package / "run.json").write_text('{"name": "another program\'s"}')
    record = Path("runs/study/records/alibi-64-s1")
    record.mkdir(parents=True)
    for name in ("metrics.jsonl", "record.json"):
        (record / name).write_text("{}")
    assert find_runs([]) == [base, imported]
    given = sorted(Path("runs").iterdir())
    assert find_runs([*given, Path("runs/none")]) == [base, imported, Path("runs/none")]
    with pytest.raises(ConfigError, match="not a run's directory"):
        find_runs([package])


def test_a_local_run_has_no_job_to_cancel_or_requeue():
    run, _ = make_run("a")
    with pytest.raises(ConfigError, match=f"kill {os.getpid()}` lets it save and stop"):
        control.cancel(run, save=True)
    with pytest.raises(ConfigError, match="submit"):
        control.requeue(run)


# ---- logs ----
def test_the_log_of_one_rank_has_its_lines_without_the_label(capfdbinary):
    run, _ = make_run("a", nproc=12, job="7")
    lines = [
        b" 0: one",
        b"10: ten: 1: x",
        b" 1: one",
        b"srun: error: task 1",
        b"10:",
        b"10:   indented",
    ]
    (run / "logs/attempt-0001.log").write_bytes(b"\n".join(lines) + b"\n")
    for rank, text in (
        (None, b"\n".join(lines) + b"\n"),
        (1, b"one\n"),
        (10, b"ten: 1: x\n\n  indented\n"),
        (11, b""),
    ):
        control.show_log(run, rank)
        assert capfdbinary.readouterr().out == text
    with pytest.raises(ConfigError, match="ranks 0 to 11"):
        control.show_log(run, 12)


def test_a_growing_log_is_read_in_whole_lines(tmp_path):
    path = tmp_path / "log"
    log = control.LogReader(path, 1)
    assert list(log.read()) == []
    with path.open("w") as file:
        file.write("0: a\n1: b\n1: cut")
        file.flush()
        assert list(log.read()) == [b"b\n"] and list(log.read()) == []
        file.write(" off\n0: other\n1: end")
        file.flush()
        assert list(log.read()) == [b"cut off\n"]
        assert list(log.read(to_end=True)) == [b"end\n"]

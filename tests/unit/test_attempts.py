"""The lock of a run, with real processes: who gets it, who does not, who is taken for dead."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.rundir.attempts import (
    Attempt,
    Owner,
    RunBusy,
    is_finished,
    read_attempts,
    read_progress,
)
from pretrain.rundir.checkpoints import newest_checkpoint_step
from tests.end_to_end.commands import ROOT, TIMEOUT_SECONDS

LINUX = sys.platform.startswith("linux")
IN_PROC = pytest.mark.skipif(not LINUX, reason="whether a process lives is read from /proc")

RACER = """
import sys, time
from pathlib import Path
from pretrain.rundir.attempts import Attempt, RunBusy
print("ready", flush=True)
for line in sys.stdin:
    run, start = line.rstrip().rsplit(" ", 1)
    while time.monotonic() < float(start):
        pass
    try:
        print("won", Attempt.begin(Path(run)).number, flush=True)
    except RunBusy as error:
        print("lost", error, flush=True)
"""
HOLDER = """
import sys, time
from pathlib import Path
from pretrain.rundir.attempts import Attempt
for run in sys.stdin.read().splitlines():
    Attempt.begin(Path(run))
print("held", flush=True)
time.sleep(600)
"""


def python(code: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **options,
    )


def held_by_another(*runs: Path) -> subprocess.Popen:
    """A process that has begun an attempt at each of `runs`, and lives."""
    holder = python(HOLDER)
    holder.stdin.write("".join(f"{run}\n" for run in runs))
    holder.stdin.close()
    assert holder.stdout.readline() == "held\n"
    return holder


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def plant(run: Path, **changes) -> Path:
    """Begin an attempt as this process, with changes to its owner; returns its directory."""
    attempt = Attempt.begin(run)
    owner = json.loads((attempt.directory / "owner.json").read_text())
    (attempt.directory / "owner.json").write_text(json.dumps(owner | changes))
    return attempt.directory


def test_what_a_killed_starter_leaves_goes_with_the_next_start(tmp_path):
    Attempt.begin(tmp_path).end("failed", 1, "", 0)
    for name, change in (("dead", {"pid_start": 1}), ("alive", {})):
        shutil.copytree(tmp_path / "attempts/0001", tmp_path / f"attempts/.{name}")
        path = tmp_path / f"attempts/.{name}/owner.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    Attempt.begin(tmp_path)
    assert sorted(os.listdir(tmp_path / "attempts")) == [".alive", "0001", "0002"]


# ---- who gets it ---------------------------------------------------------------------------------
def test_of_two_starters_one_wins_200_times(tmp_path):
    """On new runs, and on runs whose holder ended, was killed, or left a reused process id."""
    runs = [tmp_path / f"run {number}" for number in range(200)]
    for run in runs[1::4]:
        Attempt.begin(run).end("failed", 1, "", 0)
    kill(held_by_another(*runs[2::4]))
    if LINUX:
        for run in runs[3::4]:
            plant(run, pid_start=1)
    racers = [python(RACER) for _ in range(2)]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
    for number, run in enumerate(runs):
        start = time.monotonic() + 0.003
        for racer in racers:
            racer.stdin.write(f"{run} {start}\n")
            racer.stdin.flush()
        answers = sorted(racer.stdout.readline() for racer in racers)
        which = 2 if number % 4 else 1
        assert [answer.split()[0] for answer in answers] == ["lost", "won"], answers
        assert answers[1] == f"won {which}\n"
        assert (
            f"{run}: attempt {which} is being made by process" in answers[0]
            and "end it (kill" in answers[0]
        )
        assert sorted(os.listdir(run / "attempts")) == [
            f"{n:04d}" for n in range(1, which + 1)
        ]  # nothing left over
        assert read_attempts(run)[-1].owner.pid in [racer.pid for racer in racers]
    for racer in racers:
        racer.stdin.close()
        assert racer.wait(TIMEOUT_SECONDS) == 0
        racer.stdout.close()


@IN_PROC
@pytest.mark.parametrize("end", ["killed", "unreaped", "paused"])
def test_a_holder_on_this_host_is_gone_when_its_process_is(tmp_path, end):
    holder = held_by_another(tmp_path)
    with pytest.raises(
        RunBusy, match=rf"attempt 1 is being made by process {holder.pid} of .* on .*, since 20"
    ):
        Attempt.begin(tmp_path)
    holder.send_signal(signal.SIGSTOP if end == "paused" else signal.SIGKILL)
    if end == "paused":  # it may go on at any moment
        with pytest.raises(RunBusy):
            Attempt.begin(tmp_path)
        return kill(holder)
    if end == "killed":
        holder.wait()
    else:
        state = Path(f"/proc/{holder.pid}/stat")
        while state.read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)
    assert Attempt.begin(tmp_path).number == 2
    kill(holder)


# ---- holders that cannot be seen -----------------------------------------------------------------
@pytest.fixture
def lease(monkeypatch):
    monkeypatch.setattr("pretrain.rundir.attempts.LEASE_SECONDS", 1.5)
    monkeypatch.setattr("pretrain.rundir.attempts.POLL_SECONDS", 0.05)


def at_looks(monkeypatch, act: Callable[[int], object]) -> None:
    """Have `act` called with 1, 2, ... after each look of a starter that waits for a holder."""
    looks, sleep = itertools.count(1), time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (act(next(looks)), sleep(seconds)))


@pytest.mark.parametrize(
    "elsewhere",
    [{"host": "other"}, {"boot_id": "other"}, {"pid_namespace": "pid:[1]"}, {"pid_start": None}],
)
def test_a_holder_elsewhere_is_gone_after_a_lease_without_a_heartbeat(
    tmp_path, capfd, lease, elsewhere
):
    directory = plant(tmp_path, **elsewhere)
    assert Attempt.begin(tmp_path).number == 2
    # A store that an earlier test of this process left behind may speak here, too.
    [said] = [line for line in capfd.readouterr().err.splitlines() if str(tmp_path) in line]
    assert said.startswith(f"{directory}: begun by process {os.getpid()} ")
    assert "for its heartbeat" in said


@pytest.mark.parametrize("renews", [True, False])
def test_the_age_of_a_heartbeat_proves_nothing(tmp_path, lease, monkeypatch, renews):
    """A holder whose file server was away for long, or whose host has another clock, may live."""
    directory = plant(tmp_path, host="other")
    os.utime(directory / "heartbeat", (1, 1))
    began = time.monotonic()
    if renews:
        at_looks(monkeypatch, lambda look: look == 10 and os.utime(directory / "heartbeat"))
        with pytest.raises(RunBusy):
            Attempt.begin(tmp_path)
        return
    assert Attempt.begin(tmp_path).number == 2
    assert time.monotonic() - began >= 1.5


def test_a_starter_that_was_suspended_has_not_watched(tmp_path, lease, monkeypatch):
    """The holder may have been suspended with it, as on a virtual machine."""
    plant(tmp_path, host="other")
    looks = []

    def sleep(seconds, real=time.sleep):
        looks.append(seconds)
        real(0)

    real = time.monotonic
    # Every look comes an hour after the one before.
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3600 * len(looks))
    monkeypatch.setattr(time, "sleep", sleep)
    assert Attempt.begin(tmp_path).number == 2
    assert len(looks) >= 15


def of_job(job: str | None, restarts: int | None = None, cluster: str = "c") -> Owner:
    place = {"slurm_job_id": job, "slurm_restart_count": restarts, "slurm_cluster": cluster}
    return Owner.here(**place) if job else Owner.here()


@pytest.mark.parametrize(
    ("mine", "over", "taken"),
    [
        (of_job("5", 1), False, True),  # requeued
        (of_job("5", 0), False, False),  # twice in one job
        (of_job("6", 1), False, False),
        (of_job("6"), True, True),
        (of_job(None), True, True),  # from the login node
        (of_job("5_0", 1), False, False),  # a task of the array whose last task has the array's id
        (of_job("6"), None, False),  # slurmctld is away: the heartbeat decides
        (of_job("5", 1, "other"), True, False),  # another job 5
    ],
)
def test_what_slurm_knows_of_a_holder(tmp_path, lease, monkeypatch, mine, over, taken):
    place = {"slurm_job_id": "5", "slurm_restart_count": 0, "slurm_cluster": "c"}
    directory = plant(tmp_path, host="other", **place)
    at_looks(monkeypatch, lambda look: os.utime(directory / "heartbeat"))
    asked = []
    if taken:
        assert Attempt.begin(tmp_path, mine, lambda job: asked.append(job) or over).number == 2
    else:
        with pytest.raises(RunBusy):
            Attempt.begin(tmp_path, mine, lambda job: asked.append(job) or over)
    assert set(asked) <= {"5"}


@IN_PROC
def test_a_dead_holder_whose_job_still_ends_keeps_the_run(tmp_path):
    kill(held_by_another(tmp_path))
    path = tmp_path / "attempts/0001/owner.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"slurm_job_id": "5"}))
    with pytest.raises(RunBusy):
        Attempt.begin(tmp_path, job_is_over=lambda job: False)
    assert Attempt.begin(tmp_path, job_is_over=lambda job: None).number == 2


@pytest.mark.skipif(
    not LINUX or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="a PID namespace needs root",
)
def test_a_holder_in_a_pid_namespace_of_its_own_is_not_looked_up_here(tmp_path, lease):
    """Its process ids are others' here, with the outer /proc and with one of its own."""
    begin = f"Attempt.begin(Path({str(tmp_path)!r}) / '%s')"
    code = f"from pathlib import Path; from pretrain.rundir.attempts import Attempt; {begin}"
    for name, options in (("outer", []), ("own", ["--mount-proc"])):
        command = ["unshare", "--pid", "--fork", *options, sys.executable, "-c", code % name]
        subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_SECONDS)
        [record] = read_attempts(tmp_path / name)
        assert (record.owner.pid_namespace is None) == (name == "outer")
        assert record.owner.pid_namespace != os.readlink("/proc/self/ns/pid")
        assert Attempt.begin(tmp_path / name).number == 2  # after the lease


# ---- the handle ----------------------------------------------------------------------------------
def test_the_heartbeat_tells_who_was_taken_for_dead(tmp_path):
    first = Attempt.begin(tmp_path)
    os.utime(first.directory / "heartbeat", (1, 1))
    assert first.heartbeat() and not first.superseded()
    assert read_attempts(tmp_path)[0].last_heartbeat > 1
    first.end("failed", 1, "", 0)
    second = Attempt.begin(tmp_path)
    assert (
        second.heartbeat() and not first.heartbeat() and Attempt.join(first.directory).superseded()
    )
    shutil.rmtree(tmp_path / "attempts")
    assert not second.heartbeat()


def test_phases_and_progress_are_read_back(tmp_path):
    run = tmp_path / "run"
    assert read_attempts(run) == [] and newest_checkpoint_step(run) is None
    for name, whole in (
        ("step-00000003", True),
        ("step-00000009", False),
        (".step-00000011", True),
        ("step-12", True),
    ):
        (run / "checkpoints" / name).mkdir(parents=True)
        if whole:
            (run / "checkpoints" / name / "manifest.json").write_text("{}")
    began = time.time()
    holder = Attempt.begin(run, Owner.here(num_processes=4, submitted_at=12.5))
    rank_0 = Attempt.join(holder.directory)
    rank_0.phase("loading", 0)
    rank_0.phase("training", 3)
    for step in range(4, 50):
        rank_0.progress(step, "training")
    assert read_progress(holder.directory).step == 3  # at most every ten seconds
    # A run with little patience still has its signs of life seen in time.
    assert Attempt.join(holder.directory, 6).progress_seconds == 0.6
    rank_0.progress_seconds = 0.0
    rank_0.progress(50, "training")
    rank_0.phase("saving", 50)
    rank_0.phase("training", 50, saved=50)
    with open(holder.directory / "phases.jsonl", "a") as file:
        file.write('{"at": 1')  # as a power cut leaves it
    [record] = read_attempts(run)
    assert [(p.phase, p.step, p.saved) for p in record.phases] == [
        ("starting", 3, None),
        ("loading", 0, None),
        ("training", 3, None),
        ("saving", 50, None),
        ("training", 50, 50),
    ]
    assert began <= record.phases[0].at <= record.phases[-1].at
    assert record.progress.count == 51 and record.step == 50 and record.ended is None
    owner = record.owner
    assert (owner.checkpoint_step, owner.num_processes, owner.submitted_at) == (3, 4, 12.5)
    assert owner.pid == os.getpid()
    holder.end("hung", 137, "no progress", 50)
    ended = read_attempts(run)[0].ended
    assert (ended.outcome, ended.code, ended.reason, ended.step) == ("hung", 137, "no progress", 50)


def finish(run: Path) -> None:
    """Make an attempt that says of itself that 320 steps are done."""
    attempt = Attempt.begin(run)
    attempt.phase("ending", 320)
    attempt.end("finished", 0, "", 320)


def test_a_run_is_finished_when_an_attempt_did_all_its_steps(tmp_path):
    assert not is_finished(tmp_path)
    Attempt.begin(tmp_path).end("stopped", 80, "", 400)
    assert not is_finished(tmp_path, 400)
    # An exit code alone proves nothing: its ranks have not said so.
    Attempt.begin(tmp_path).end("finished", 0, "", 320)
    assert not is_finished(tmp_path, 320)
    finish(tmp_path)
    assert is_finished(tmp_path, 320) and not is_finished(tmp_path, 321)
    (tmp_path / "launch").mkdir()
    # Of 320 steps.
    (tmp_path / "launch/config.toml").write_text((ROOT / "configs/demo.toml").read_text())
    assert is_finished(tmp_path)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_finished(tmp_path):
    finish(tmp_path)
    folder = tmp_path / "checkpoints" / "step-00000320"
    # Whoever has exported a run may delete its checkpoints.
    assert is_finished(tmp_path, 320)
    folder.mkdir(parents=True)
    assert not is_finished(tmp_path, 320)
    (folder / "manifest.json").write_text("{}")
    assert is_finished(tmp_path, 320)
    # It went further since.
    folder.rename(folder.with_name("step-00000400"))
    assert not is_finished(tmp_path, 320)

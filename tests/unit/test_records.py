"""Count what `launcher status`, `logs --follow` and a run's signs of life open."""

import itertools
import json
import threading
from pathlib import Path

import pytest

from pretrain.launcher.status import find_runs, read_statuses, table
from pretrain.launcher.supervise import Repeater
from pretrain.rundir.attempts import Attempt, read_attempts, steps_done
from tests.end_to_end.commands import wait_for
from tests.unit.test_status import make_run, no_slurm  # noqa: F401  a fixture


def test_the_step_of_an_end_is_what_the_lines_of_the_steps_prove(tmp_path):
    attempt = Attempt.begin(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {s}}}\n' for s in range(1, 58)))
    # These may be lines of lost steps, until training begins.
    attempt.phase("loading", 3)
    assert steps_done(attempt.directory) == 3
    attempt.phase("training", 3)
    assert steps_done(attempt.directory) == 57
    assert read_attempts(tmp_path)[0].step == 3


def test_an_attempt_that_went_back_ends_at_the_step_that_it_reached(tmp_path):
    """The newest checkpoint, of step 60, was damaged, and the one of step 40 was loaded."""
    attempt = Attempt.begin(tmp_path)
    attempt.phase("training", 60)
    attempt.phase("loading", 40)
    attempt.phase("training", 40)
    attempt.phase("ending", 52)
    assert steps_done(attempt.directory) == read_attempts(tmp_path)[0].step == 52


# ---- runs that cannot be read --------------------------------------------------------------------
def damage_later_version(run):
    (run / "run.json").write_text('{"run_directory_version": 99}')


def damage_attempts(run):
    for path in (run / "attempts").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\0\xff{" * 9)


def damage_numbers(run):
    (run / "attempts/0001/owner.json").write_text(json.dumps({"began_at": -9e15}))
    lines = [{"at": at, "phase": "training", "step": 2**52} for at in (-8e15, 8e15, 0)]
    (run / "attempts/0001/phases.jsonl").write_text("\n".join(map(json.dumps, lines)))


def damage_config(run):
    (run / "config.toml").write_text("[train\nnum_steps = {")


def damage_nested(run):
    (run / "config.toml").write_text("x = " + "[" * 100_000)


def damage_metrics(run):
    lines = [{"step": 10**15, "step_seconds": 1e-300, "loss_nats": "x", "tokens_per_second": []}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) * 3)


def damage_kinds(run):
    (run / "jobs.jsonl").mkdir()
    (run / "attempts/0001/ended.json").mkdir()


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


def test_a_run_that_cannot_be_read_leaves_the_others_their_rows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    good, _ = make_run("good")
    for damage in DAMAGES:
        run, _ = make_run(damage.__name__)
        damage(run)
    Path("runs/notes").mkdir()
    given = [*sorted(Path("runs").iterdir()), Path("runs/missing")]
    for runs in (given, []):
        lines = table(read_statuses(runs or find_runs([]))[0]).splitlines()
        rows = {line.split()[0]: line for line in lines if line.startswith("runs/")}
        assert " running " in rows[str(good)], lines
        assert " unreadable " in rows["runs/damage_later_version"]
    statuses = {str(status.run): status for status in read_statuses(given)[0]}
    later = statuses["runs/damage_later_version"]
    assert "run_directory_version = 99" in later.reason and not later.is_over
    assert "no such run" in statuses["runs/missing"].reason
    assert "not a run" in statuses["runs/notes"].reason


@pytest.mark.parametrize("seed", range(3))
def test_files_cut_off_and_mixed_up_leave_the_others_their_rows(seed):
    import random

    dice, (good, _) = random.Random(seed), make_run("good")
    for number in range(30):
        run, _ = make_run(f"r{number}")
        files = sorted(path for path in run.rglob("*") if path.is_file())
        for path in dice.sample(files, 2):
            content = dice.choice(files).read_bytes() or b"9" * 30
            cut = dice.randrange(len(content))
            path.write_bytes(content[:cut] + dice.randbytes(dice.randrange(9)) + content[cut:])
    assert f"{good} " in table(read_statuses(find_runs([]))[0])


def test_a_call_is_repeated_in_a_thread_and_not_before_the_last_has_ended():
    calls, go_on = itertools.count(1), threading.Event()

    def slow():
        number = next(calls)
        go_on.wait(60)
        return number

    repeated = Repeater(0.0, slow)
    repeated.start()
    assert [repeated.new() for _ in range(100)] == [None] * 100
    go_on.set()
    wait_for(lambda: (repeated.new() or 0) > 2)
    repeated.stop()

"""Check the accounting of a run's time against made-up histories in which every moment is known."""

import dataclasses
import json
import os
import random
from pathlib import Path

import pytest

from pretrain.launcher.status import goodput, summary
from pretrain.rundir.attempts import Owner, read_attempts


class History:
    """Write attempts as the supervisor and rank 0 do, and count what they hold and keep."""

    def __init__(self, run: Path, job: str | None = None) -> None:
        self.run, self.job, self.now, self.number = run, job, 1_700_000_000.0, 0
        # Milliseconds of the attempts that count, and of training that a later one may lose, with
        # the step that has to be saved to keep it.
        self.held = 0
        self.trained: list[tuple[int, int]] = []
        # Steps with a checkpoint; 0 is a start from scratch.
        self.saves = [0]
        self.is_finished = self.is_worked = False

    def begin(self, wait: int) -> None:
        """Begin the next attempt, after `wait` milliseconds in the queue."""
        self.now = self.began = round(self.now + wait / 1000, 3)
        self.number += 1
        self.directory = self.run / "attempts" / f"{self.number:04d}"
        self.directory.mkdir(parents=True)
        owner = Owner(
            nonce=str(self.number),
            host="n1",
            slurm_job_id=self.job,
            began_at=self.now,
            checkpoint_step=max(self.saves) or None,
        )
        (self.directory / "owner.json").write_text(json.dumps(dataclasses.asdict(owner)))
        self.step, self.is_worked = 0, False

    def began_at_once(self, milliseconds: int) -> None:
        """Begin an attempt that trains from its first moment on."""
        self.begin(0)
        self.phase("training", milliseconds)

    def phase(self, name: str, milliseconds: int, saved: int | None = None) -> None:
        """Spend some time in a phase; `saved` is the step of the checkpoint just completed."""
        line = {"at": self.now, "phase": name, "step": self.step} | (
            {} if saved is None else {"saved": saved}
        )
        with open(self.directory / "phases.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        self.is_worked |= name in ("training", "evaluating", "saving")
        if name == "training":
            # A phase has the steps done at its beginning.
            self.trained.append((self.step + 1, milliseconds))
        self.now = round(self.now + milliseconds / 1000, 3)

    def end(self, outcome: str | None) -> None:
        """End the attempt. With None it is killed, and its last sign of life is a heartbeat."""
        (self.directory / "heartbeat").touch()
        os.utime(self.directory / "heartbeat", (self.now, self.now))
        if self.is_worked or outcome not in ("refused", "finished"):
            self.held += round((self.now - self.began) * 1000)
            self.is_finished = outcome == "finished"
        if outcome:
            ended = {"at": self.now, "code": 0, "outcome": outcome, "reason": "", "step": self.step}
            (self.directory / "ended.json").write_text(json.dumps(ended))

    def resume(self, step: int) -> None:
        """Resume from `step`: the work beyond it was lost and will be done again."""
        self.trained = [each for each in self.trained if each[0] <= step]
        self.saves = [each for each in self.saves if each <= step]
        self.step = step

    def work(self, dice: random.Random, step_limit: int) -> int | None:
        """Train, evaluate and save for a while; return the step just saved if a save came last."""
        saved = None
        for _ in range(dice.randrange(8)):
            self.phase("training", dice.randrange(50_000), saved)
            self.step, saved = self.step + dice.randrange(1, step_limit), None
            if dice.random() < 0.4:
                self.phase("evaluating", dice.randrange(9_000))
            if dice.random() < 0.5:
                self.phase("saving", dice.randrange(9_000))
                saved = self.step
                self.saves.append(saved)
        return saved


def random_history(run: Path, dice: random.Random) -> History:
    """Make up a run of one to six attempts, which end in every possible way."""
    history = History(run)
    for _ in range(dice.randrange(1, 7)):
        history.begin(dice.randrange(100_000))
        history.phase("starting", dice.randrange(20_000))
        if dice.random() < 0.2:
            history.end(dice.choice(["refused", "failed", None]))
            continue
        if history.is_finished and dice.random() < 0.5:
            history.phase("ending", dice.randrange(3_000))
            history.end("finished")
            continue
        history.phase("loading", dice.randrange(20_000))
        if dice.random() < 0.2:
            history.end(dice.choice(["failed", None]))
            continue
        # Mostly from the newest checkpoint, sometimes from an earlier one as a user may choose.
        history.resume(dice.choice(history.saves) if dice.random() < 0.2 else max(history.saves))
        history.phase("training", dice.randrange(1, 5_000))
        history.step += 1
        saved = history.work(dice, 9)
        if dice.random() < 0.5:
            history.phase("ending", dice.randrange(3_000), saved)
            ends = ["failed", "hung", "stopped", "restart"]
            history.end(dice.choice([*ends, "finished"] if saved is not None else ends))
        else:
            if saved is not None:
                history.phase("training", 0, saved)
            # Killed during a save.
            if dice.random() < 0.4:
                history.step += 1
                history.phase("saving", dice.randrange(9_000))
            history.end(None)
    # The last attempt has ended as well; the next one would resume from the newest checkpoint.
    history.resume(max(history.saves))
    return history


def test_random_histories(tmp_path):
    for seed in range(30):
        history = random_history(tmp_path / str(seed), random.Random(seed))
        kept, held = sum(milliseconds for _, milliseconds in history.trained), history.held
        found = goodput(read_attempts(history.run), max(history.saves))
        assert found == (pytest.approx(kept / held) if held else None), seed


def test_the_time_between_two_attempts_of_one_start_of_a_job_is_held(tmp_path):
    for job, held in ((None, 20), ("7", 30)):
        history = History(tmp_path / str(job), job)
        for _ in range(2):
            history.began_at_once(9_000)
            history.step = 5
            history.phase("saving", 1_000)
            history.end("failed")
            history.now += 10
        assert goodput(read_attempts(history.run), 5) == pytest.approx(9 / held)
        # A run on this machine alone holds no nodes.
        assert summary(history.run).endswith("of the time it held its nodes" if job else "it ran")


def test_an_attempt_that_notices_late_that_it_is_superseded_is_cut(tmp_path):
    history = History(tmp_path)
    history.began_at_once(10_000)
    history.step = 5
    history.phase("saving", 1_000)
    first = history.directory
    history.begin(0)
    history.phase("starting", 20_000)
    history.end("failed")
    (first / "ended.json").write_text(
        json.dumps({"at": history.now, "code": 1, "outcome": "superseded", "reason": "", "step": 0})
    )
    assert goodput(read_attempts(tmp_path), 5) == pytest.approx(10 / 31)

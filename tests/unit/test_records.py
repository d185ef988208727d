"""The step at which an attempt ended, and calls that are repeated beside it."""

import itertools
import threading

from pretrain.processes import Repeater
from pretrain.rundir.attempts import Attempt, read_attempts, steps_done
from tests.end_to_end.commands import wait_for


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

"""Signals to a run's processes at any moment.

The run saves, exits with the code for that signal, and when it is resumed it gives the same numbers
as a run that was never stopped.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.rundir.attempts import AttemptRecord, read_attempts
from pretrain.rundir.checkpoints import complete_checkpoints
from pretrain.rundir.paths import ExitCode
from tests.end_to_end.commands import (
    PRETRAIN,
    Running,
    Started,
    contents,
    explained,
    forked,
    pretrain,
    running_ranks,
    sets,
    succeeds,
    untimed,
    wait_for,
)

STEPS = 12
# An evaluation takes sixty passes, so that a signal can arrive between two of them. With dropout, a
# resumed run must draw the same masks.
LONG = [
    f"train.num_steps={STEPS}",
    "checkpoint.interval_steps=100",
    "evaluation.interval_steps=6",
    "evaluation.lengths=[32]",
    "evaluation.tokens_per_batch=32",
    "evaluation.max_tokens=2000",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "parallel.pipeline_model_parallel_size=2",
]


@pytest.fixture
def train(workspace: Path, config: Path) -> Callable[..., list[object]]:
    """Return train(name, *settings): the arguments that train workspace/runs/<name>."""

    def arguments(name: str, *settings: str) -> list[object]:
        settings = (f"run.directory={workspace}/runs/{name}", *settings)
        return ["train", config, *sets(*settings)]

    return arguments


def last_attempt(run: Path) -> AttemptRecord | None:
    return next(reversed(read_attempts(run)), None)


def phase(run: Path) -> tuple[str, int]:
    """Return the phase of the newest attempt and the number of steps done."""
    attempt = last_attempt(run)
    if not attempt or not attempt.phases:
        return "", 0
    return attempt.phases[-1].phase, attempt.phases[-1].step


def wait_for_running(group: Started, condition: Callable[[], Any]) -> None:
    """Return when condition() is true; fail if a rank ends before that."""
    wait_for(lambda: condition() or not all(p.poll() is None for p in group.processes))
    assert all(p.poll() is None for p in group.processes), [
        group.said(rank) for rank in range(len(group.processes))
    ]


def hold(process: int) -> None:
    """Stop a process with SIGSTOP and return when all its threads have stopped."""
    os.kill(process, signal.SIGSTOP)

    def is_held() -> bool:
        try:
            stats = [stat.read_text() for stat in Path(f"/proc/{process}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):
            return False  # A thread has ended between the two looks.
        return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)

    wait_for(is_held)


def weights(checkpoint: Path) -> dict[str, bytes]:
    """Return the files that the ranks wrote: equal bytes are equal masters and Adam moments."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


def test_a_run_that_is_stopped_again_and_again_is_the_undisturbed_one(workspace, train):
    """A run on pipeline 2 is stopped twice and equals the undisturbed run.

    The signal goes to one rank only: in an evaluation, and in the last evaluation.
    """
    whole, parts = workspace / "runs/undisturbed", workspace / "runs/disturbed"
    with running_ranks(train("undisturbed", *LONG), 2) as group:
        assert [done.code for done in group.done()] == [0] * 2
    stops = [
        (signal.SIGUSR1, 1, ExitCode.RESTART, lambda: phase(parts) == ("evaluating", 6)),
        (signal.SIGTERM, 0, ExitCode.STOPPED, lambda: phase(parts) == ("evaluating", STEPS)),
    ]
    for number, (name, rank, code, moment) in enumerate(stops, start=1):
        with running_ranks(train("disturbed", *LONG), 2) as group:
            wait_for_running(group, lambda: len(read_attempts(parts)) == number and moment())  # noqa: B023  called here
            os.kill(group.process_ids[rank], name)
            done = group.done()
        assert [each.code for each in done] == [code] * 2, done
        newest = complete_checkpoints(parts)[-1]
        step = int(newest.name.removeprefix("step-"))
        line = f"{parts}: {name.name}: step {step} is saved; the same command goes on from there"
        assert done[0].err.splitlines()[-1] == line and done[1].err == ""
        assert [r["step"] for r in untimed(parts) if "evaluation" not in r] == list(
            range(1, step + 1)
        )
        ended = last_attempt(parts).ended
        outcome = "restart" if code == ExitCode.RESTART else "stopped"
        assert (ended.code, ended.outcome, ended.step) == (code, outcome, step)
    # All steps are done, and the last evaluation was cut off.
    assert step == STEPS and untimed(parts)[-1]["step"] == STEPS
    assert "evaluation" not in untimed(parts)[-1]

    with running_ranks(train("disturbed", *LONG), 2) as group:
        done = group.done()
    assert [each.code for each in done] == [0] * 2, done
    assert f"{parts}: at step {STEPS} of {STEPS}, whose evaluation is left" in done[0].err
    assert untimed(parts) == untimed(whole)
    assert weights(complete_checkpoints(parts)[-1]) == weights(complete_checkpoints(whole)[-1])
    phases = [p.phase for p in last_attempt(parts).phases]
    assert phases == ["starting", "loading", "training", "evaluating", "training", "ending"]
    assert last_attempt(parts).ended.outcome == "finished"

    # On any layout, here one process, a finished run is left as it is.
    before = contents(parts)
    assert "nothing to train" in pretrain(*train("disturbed", *LONG[:-1])).err
    assert contents(parts) == before


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_signal_in_the_middle_of_a_save(workspace, train, asynchronous):
    """A rank that gets a signal before it votes at the end of a save: nothing more is trained.

    Rank 0 is held in its save, and rank 1 gets the signal. It cannot have voted: no rank leaves a
    save before rank 0 has seen a checkpoint published, which is the one before if saves go on
    beside training.
    """
    run = workspace / f"runs/saving-{asynchronous}"
    settings = "train.num_steps=100000", "checkpoint.interval_steps=1", "checkpoint.keep=2"
    settings += (f"checkpoint.asynchronous={asynchronous}",)
    with running_ranks(train(run.name, *settings), 2) as group:
        caught, writers = None, list[int]()
        if asynchronous == "true":
            # A checkpoint that its held writer has not written makes rank 0 wait in the next save.
            wait_for_running(group, lambda: phase(run)[1] > 1)
            tasks = Path(f"/proc/{group.process_ids[0]}/task").glob("*/children")
            writers = [int(child) for path in tasks for child in path.read_text().split()]
            assert len(writers) == 1
            hold(writers[0])
        while caught is None:
            wait_for_running(group, lambda: phase(run)[0] == "saving")
            hold(group.process_ids[0])
            name, step = phase(run)
            awaited = step - 1 if asynchronous == "true" else step
            published = not awaited or (run / f"checkpoints/step-{awaited:08d}").exists()
            if name == "saving" and not published:
                os.kill(group.process_ids[1], signal.SIGUSR1)
                caught = step
            os.kill(group.process_ids[0], signal.SIGCONT)
        for writer in writers:
            os.kill(writer, signal.SIGCONT)
        done = group.done()
    assert [each.code for each in done] == [ExitCode.RESTART] * 2, done
    assert complete_checkpoints(run)[-1].name == f"step-{caught:08d}"
    assert untimed(run)[-1]["step"] == caught


def test_who_loses_a_rank_says_so_in_a_line(workspace, train):
    run = workspace / "runs/lost"
    with running_ranks(
        train("lost", "train.num_steps=100000", "checkpoint.interval_steps=100000"), 2
    ) as group:
        wait_for_running(group, lambda: (run / "metrics.jsonl").exists() and len(untimed(run)) > 1)
        os.kill(group.process_ids[1], signal.SIGKILL)
        left, killed = group.done()
    assert killed.code == -signal.SIGKILL
    # Debian's /etc/hosts has 127.0.1.1 for the machine's own name.
    explained(left, 1, "lost the connection to another rank", "[127.0.")
    assert last_attempt(run).ended.outcome == "failed"


AGAIN = """
import runpy, sys
sys.torch = sys.modules["torch"]
for name in list(sys.modules):
    if name == "torch" or name.partition(".")[0] == "pretrain":
        del sys.modules[name]
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""
SIGNAL_IN_IMPORT = """
import os, sys
os.kill(os.getpid(), {number})
sys.modules["torch"] = sys.torch
"""


@pytest.mark.parametrize(
    ("name", "code"), [(signal.SIGTERM, ExitCode.STOPPED), (signal.SIGUSR1, ExitCode.RESTART)]
)
def test_a_signal_while_torch_is_imported(run, train, tmp_path, name, code):
    """Nothing is trained and nothing saved again.

    The process imports what is ours again, and with it another `torch`, which sends the signal.
    """
    directory, resumed = run.with_name(f"early-{code}"), code == ExitCode.STOPPED
    if resumed:
        shutil.copytree(run, directory)
    before = contents(directory / "checkpoints")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(SIGNAL_IN_IMPORT.format(number=int(name)))
    command = [PRETRAIN[0], "-c", AGAIN, *map(str, train(directory.name, "train.num_steps=12"))]
    done = forked(command, cwd=tmp_path)
    assert done.code == code, done.text
    reason = f"{name.name}: step 8 is saved" if resumed else f"{name.name} before the first step"
    *_, line, again = done.err.splitlines()
    assert line == f"{directory}: {reason}; go on with:"
    assert shlex.split(again)[1:] == command[-len(shlex.split(again)) + 1 :]
    assert contents(directory / "checkpoints") == before
    assert len(untimed(directory)) == (len(untimed(run)) if resumed else 0)
    assert last_attempt(directory).ended.code == code


CALL = """
import pretrain, signal, sys
result = pretrain.train(pretrain.load_config(sys.argv[1], sys.argv[2:]))
print(result.exit_code, result.step > 0, signal.getsignal(signal.SIGUSR1).name)
"""


def test_the_library_s_call_saves_and_returns_and_gives_the_signal_back(workspace, config):
    run = workspace / "runs/call"
    settings = f"run.directory={run}", "train.num_steps=100000"
    process = Running([PRETRAIN[0], "-c", CALL, config, *settings])
    wait_for(lambda: "\nstep 1/" in process.said())
    process.send_signal(signal.SIGUSR1)
    assert process.ended().out.endswith("75 True SIG_DFL\n")


# ---- one run, one process group ------------------------------------------------------------------


CTRL_C = (
    # Long enough to be stopped in the middle; worker processes get the SIGINT as well.
    "train.num_steps=100000",
    "checkpoint.interval_steps=5",
    "checkpoint.keep=1",
    "evaluation.interval_steps=1000000",
    "data.num_workers=1",
)


def test_a_second_ctrl_c_leaves_at_once(workspace, train):
    """In a step of many minutes, at whose end the run would save."""
    run = workspace / "runs/slow"
    settings = (*CTRL_C, "batch.global_batch_size=400000", "train.num_steps=2")
    process = Running([*PRETRAIN, *train("slow", *settings)])
    wait_for(lambda: process.poll() is not None or phase(run) == ("training", 0))

    def shows(words: str, number: int) -> bool:
        """Return True when its stacks, or what it says, hold the words."""
        assert process.poll() is None, process.said()
        process.send_signal(number)
        return words in process.said()

    # Not before the step, where a first Ctrl-C would end the run by itself.
    wait_for(lambda: shows("in queue_step", signal.SIGUSR2))
    process.press_ctrl_c()
    wait_for(lambda: shows("press Ctrl-C again to leave at once", 0))
    process.press_ctrl_c()
    done = process.ended()
    assert done.code == ExitCode.INTERRUPTED and done.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.text
    ended_at = last_attempt(run).ended
    assert (ended_at.code, ended_at.outcome) == (130, "stopped") and not complete_checkpoints(run)


# ---- checkpoints ---------------------------------------------------------------------------------
def test_a_checkpoint_is_kept_until_it_is_evaluated(workspace, train):
    run = workspace / "runs/awaited"
    settings = "checkpoint.interval_steps=1", "checkpoint.keep=1", "evaluation.lengths=[16]"
    (run / "evaluations/step-00000002").mkdir(parents=True)
    (run / "evaluations/plan.json").write_text("{}")
    succeeds(*train("awaited", *settings, "train.num_steps=4"))
    assert [path.name[-1] for path in complete_checkpoints(run)] == ["1", "3", "4"]
    for step in (1, 3, 4):
        (run / f"evaluations/step-0000000{step}").mkdir()
    succeeds(*train("awaited", *settings, "train.num_steps=6"))
    assert [path.name[-1] for path in complete_checkpoints(run)] == ["5", "6"]

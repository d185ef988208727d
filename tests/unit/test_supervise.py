"""Test restarts: ranks that are killed, suspended, asked to save, or fail, under `launcher local`.

The ranks are real processes. Each runs a small program that writes the same files and handles the
same signals as `pretrain train`, with steps of milliseconds. tests/slurm tests the same in Slurm
jobs, with real training.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.launcher import supervise
from pretrain.launcher.ranks import run_locally
from pretrain.launcher.slurm import first_failure, has_exited
from pretrain.launcher.supervise import Signals, Supervisor, Watchdog, without_progress
from pretrain.rundir.attempts import Attempt, AttemptRecord, Ended, Owner, read_attempts
from pretrain.rundir.checkpoints import newest_checkpoint_step
from tests.end_to_end.commands import ROOT, TIMEOUT_SECONDS, wait_for
from tests.rank_script import BEGIN
from tests.unit.test_launcher_local import alive

LAST = 12
"""Steps of a run."""

TRAINING = """
rank = int(os.environ['RANK'])
print('attempt', number, 'rank', rank, *sys.argv[1:], flush=True)
def die(number):
    os.kill(os.getpid(), number)
def together():
    # Wait for the other rank, and return the same signal on both if either received one.
    mine, other = (run + f'/{number}-{step}-{r}' for r in (rank, 1 - rank))
    write(mine, str(max(asked, default=0)))
    while not os.path.exists(other):
        time.sleep(0.005)
    return max(int(open(path).read()) for path in (mine, other))
BEGIN
if rank == 0:
    phase('training')
while step < LAST:
    time.sleep(0.01)
    step += 1
    if rank == 0:
        progress('training')
    STEP
    if agreed := together():
        if rank == 0:
            save()
        os._exit(75 if agreed == signal.SIGUSR1 else 80)
if rank == 0:
    save()
    phase('ending')
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervise, "DUMP_SECONDS", 0.5)
    monkeypatch.setattr("pretrain.launcher.ranks.KILL_AFTER_SECONDS", 0.5)


def training(step: str = "", begin: str = "") -> list[str]:
    """Return the command of a rank.

    Args:
        step: Python code to run after each step. It may use step, rank, number (of the attempt),
            save() and die(signal).
        begin: Python code to run before the first step.
    """
    code = BEGIN + TRAINING.replace("LAST", str(LAST)).replace("BEGIN", begin)
    return [
        sys.executable,
        "-c",
        code.replace("    STEP\n", "".join(f"    {line}\n" for line in step.splitlines())),
    ]


def config_of(run: Path, *settings: str):
    steps = [f"train.num_steps={LAST}", "schedule.lr_warmup_steps=1"]
    return load_config(ROOT / "configs/demo.toml", [f"run.directory={run}", *steps, *settings])


def train(run: Path, command: list[str], *settings: str, resume: str | None = None) -> int:
    return run_locally(config_of(run, *settings), 2, command, ["CONFIG"], resume)


def outcomes(run: Path) -> list[tuple[str, int, int]]:
    return [(a.ended.outcome, a.ended.code, a.ended.step) for a in read_attempts(run)]


# ---- failures ------------------------------------------------------------------------------------


def test_a_failure_that_repeats_itself_is_not_tried_a_third_time(tmp_path, capfd):
    assert (
        train(
            tmp_path, training("if rank == 0 and step == 3: sys.exit('error: step 3: loss is nan')")
        )
        == 1
    )
    assert outcomes(tmp_path) == [("failed", 1, 3), ("gave_up", 1, 3)]
    said = capfd.readouterr().err
    assert said.count("error: step 3: loss is nan") == 2
    assert said.endswith("given up: the attempt before failed in the same way at the same step\n")


def test_ranks_that_differ_start_again_from_the_checkpoint_before(tmp_path, capfd):
    step = "if rank == 0 and step == 4: save()\nif (step, number) == (6, 1): sys.exit(81)"
    assert train(tmp_path, training(step)) == 0
    assert [end[:2] for end in outcomes(tmp_path)] == [("diverged", 81), ("finished", 0)]
    first, second = read_attempts(tmp_path)
    assert first.ended.reason.startswith("the ranks differ in what must be equal, at step ")
    assert second.owner.checkpoint_step == 4
    assert f"{first.ended.reason}; starting again from step 4\n" in capfd.readouterr().err


def test_bad_input_is_not_tried_again(tmp_path, capfd):
    assert train(tmp_path, training(begin="time.sleep(600 * rank)\nsys.exit(2)")) == 2
    assert outcomes(tmp_path) == [("refused", 2, 0)] and capfd.readouterr().err == ""


# ---- ends are proven -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("first", "missing"),
    [
        # As when a step is killed while it saves, and srun ends with 0 all the same.
        ("if step == 5: os._exit(0)", """rank 0's last word was "training", at step 0 of 12"""),
        (
            "if step == 5:\n    if rank == 0: save()\n    step = LAST\n"
            "    if rank == 0: phase('ending')\n    os._exit(0)",
            "the newest checkpoint is of step 5",
        ),
    ],
)
def test_exit_code_0_is_no_proof_of_an_end(tmp_path, first, missing):
    lines = "".join(f"    {line}\n" for line in first.replace("LAST", str(LAST)).splitlines())
    assert train(tmp_path, training(f"if number == 1:\n{lines}")) == 0
    assert [end[:2] for end in outcomes(tmp_path)] == [("failed", 1), ("finished", 0)]
    reason = read_attempts(tmp_path)[0].ended.reason
    assert reason.startswith(f"the ranks ended with exit code 0, but {missing}"), reason


# ---- hangs ---------------------------------------------------------------------------------------
def test_a_paused_rank_is_found_and_every_rank_says_where_it_was(tmp_path, capfd):
    step = "if (rank, step) == (0, 3):\n    die(19)\n    time.sleep(600)"
    # The second attempt takes no step, during which a busy machine might hold it up for as long.
    command = training(step, begin=f"if number == 2: step = {LAST}")
    assert train(tmp_path, command, "recovery.hang_seconds=1.5") == 0
    assert [outcome for outcome, _, _ in outcomes(tmp_path)] == ["hung", "finished"]
    first = read_attempts(tmp_path)[0]
    assert first.ended.code == 137 and first.ended.reason.startswith(
        "no progress for 1.5 s while training, at step "
    )
    said = capfd.readouterr().err
    assert (
        "; every rank writes its stacks to its log and is then killed" in said
        and "starting again from scratch" in said
    )
    for text in (said, (tmp_path / "logs/rank-1.log").read_text()):
        assert "most recent call first" in text and 'File "<string>", line' in text


def test_phases_that_take_their_time_have_a_limit_of_their_own(tmp_path):
    slow = "phase('loading')\ntime.sleep(600)"
    limits = ["recovery.hang_seconds=0.2", "recovery.startup_seconds=2", "recovery.max_restarts=0"]
    assert train(tmp_path, training(begin=slow), *limits) == 137
    [attempt] = read_attempts(tmp_path)
    # A slow machine may need two seconds before rank 0 gets to `loading`.
    said = r"no progress for 2 s while (starting|loading), at step 0"
    assert re.fullmatch(said, attempt.ended.reason), attempt.ended.reason


def test_the_watchdog_does_not_count_the_time_in_which_nobody_looked(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watchdog = Watchdog(tmp_path, 10.0, 100.0)
    (tmp_path / "progress").write_text('{"count": 1, "step": 7, "phase": "training"}')
    # This process is suspended between the second look and the third.
    for now[0] in (1.0, 2.0, 4000.0, 4001.0, 4007.0):
        assert watchdog.stuck() is None
    for now[0] in (4008.0, 4009.0, 4010.0, 4011.0, 4012.0):
        found = watchdog.stuck()
    assert found == "no progress for 10 s while training, at step 7"
    (tmp_path / "progress").write_text('{"count": 2, "step": 7, "phase": "training"}')
    now[0] = 4013.0
    assert watchdog.stuck() is None


# ---- signals -------------------------------------------------------------------------------------
class Launched:
    """The launcher in a process of its own, for signals, with ranks that wait for one."""

    def __init__(
        self,
        run: Path,
        step: str = "while number == 1 and step == 2 and not asked: time.sleep(0.01)",
        begin: str = "",
    ) -> None:
        command = training(step, begin)
        code = (
            f"from tests.unit.test_supervise import train; from pathlib import Path; import sys\n"
            f"sys.exit(train(Path({str(run)!r}), {command!r}))"
        )
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )

    def wait_until_it_trains(self) -> None:
        wait_for(lambda: all((self.run / f"1-1-{rank}").exists() for rank in range(2)))

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=TIMEOUT_SECONDS)
        return self.process.returncode, said


def test_a_signal_that_comes_before_the_ranks_can_take_it_is_not_lost(tmp_path):
    """SIGUSR1 would end a Python process that has not installed its handler yet."""
    launched = Launched(tmp_path)
    wait_for(lambda: read_attempts(tmp_path))
    launched.process.send_signal(signal.SIGUSR1)
    code, said = launched.end()
    assert code == 0 and [outcome for outcome, _, _ in outcomes(tmp_path)] == [
        "restart",
        "finished",
    ], said


def test_a_second_sigterm_does_not_end_the_save_under_way(tmp_path):
    """As a service manager sends it while a slow disk flushes."""
    save = (
        "if step == 2 and rank == 0:\n"
        "    while not asked: time.sleep(0.01)\n"
        "    phase('saving')\n"
        "    while len(asked) < 2: time.sleep(0.01)\n"
        "    time.sleep(0.2)"
    )
    launched = Launched(tmp_path, save)
    launched.wait_until_it_trains()
    launched.process.send_signal(signal.SIGTERM)
    wait_for(lambda: any(mark.phase == "saving" for mark in read_attempts(tmp_path)[0].phases))
    launched.process.send_signal(signal.SIGTERM)
    code, said = launched.end()
    assert code == 80 and newest_checkpoint_step(tmp_path) == 2, said
    assert read_attempts(tmp_path)[0].ended.reason == "saved at step 2"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux's"
)
def test_a_killed_launcher_leaves_no_process(tmp_path):
    note = "write(run + f'/pid-{rank}', str(os.getpid()))\ntime.sleep(600)"
    launched = Launched(tmp_path, begin=f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{note}")
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    wait_for(lambda: all(path.exists() for path in pids))
    launched.process.kill()
    launched.end()
    wait_for(lambda: not any(alive(int(path.read_text())) for path in pids))


# ---- the lock ------------------------------------------------------------------------------------


def test_who_was_taken_for_dead_leaves_the_run_alone(tmp_path, monkeypatch, capfd):
    """As after a suspension of its host: the ranks are killed at once, without saving."""
    monkeypatch.setattr(supervise, "HEARTBEAT_SECONDS", 0.1)

    def take_over():
        wait_for(lambda: (tmp_path / "1-3-0").exists())
        (tmp_path / "attempts/0002").mkdir()

    thread = threading.Thread(target=take_over)
    thread.start()
    command = training(
        "write(run + f'/pid-{rank}', str(os.getpid()))\nif step == 5: time.sleep(600)"
    )
    assert train(tmp_path, command) == 1
    thread.join()
    first = read_attempts(tmp_path)[0]
    assert first.ended.outcome == "superseded" and newest_checkpoint_step(tmp_path) is None
    assert capfd.readouterr().err.endswith(f"attempt 1: superseded: {first.ended.reason}\n")
    assert not any(alive(int(path.read_text())) for path in tmp_path.glob("pid-[01]"))


# ---- how it is started again ---------------------------------------------------------------------
def arguments(run: Path) -> list[list[str]]:
    lines = (run / "logs/rank-1.log").read_text().splitlines()
    return [line.split()[4:] for line in lines if line.startswith("attempt ")]


@pytest.mark.parametrize(
    ("resume", "saves", "then"),
    [
        (None, False, []),
        ("none", False, ["--resume", "auto"]),
        ("elsewhere/step-00000090", False, ["--resume", "elsewhere/step-00000090"]),
        ("elsewhere/step-00000090", True, ["--resume", "auto"]),
    ],
)
def test_what_a_restart_goes_on_from(tmp_path, resume, saves, then):
    save = "if rank == 0 and step == 4: save()\n" if saves else ""
    assert (
        train(
            tmp_path, training(f"{save}if (rank, step, number) == (0, 6, 1): die(9)"), resume=resume
        )
        == 0
    )
    first = ["--resume", resume] if resume else []
    frozen = str(tmp_path / "attempts/0002/config.toml")
    assert arguments(tmp_path) == [["CONFIG", *first], [frozen, *then]]
    assert load_config(Path(frozen)) == config_of(tmp_path)


# ---- counting and evaluating ---------------------------------------------------------------------
def record(
    run: Path, number: int, began_with: int | None, outcome: str | None, job: str = "5"
) -> AttemptRecord:
    ended = Ended(0.0, 1, outcome, "", 0) if outcome else None
    directory = run / "attempts" / f"{number:04d}"
    return AttemptRecord(
        number, directory, Owner(slurm_job_id=job, checkpoint_step=began_with), ended=ended
    )


@pytest.mark.parametrize(
    ("records", "newest", "count"),
    [
        ([], None, 0),
        ([(None, "failed")], None, 1),
        ([(None, "failed")], 5, 0),
        # The second attempt died with its node.
        ([(None, "failed"), (None, None), (None, "restart")], None, 3),
        ([(None, "failed"), (5, "hung"), (5, "failed")], 5, 2),
        ([(None, "failed"), (5, "hung"), (5, "failed")], 6, 0),
        ([(5, "failed"), (5, "gave_up"), (5, "failed")], 5, 1),
        # The first attempt was made by another job.
        ([(5, "failed", "4"), (5, "failed")], 5, 1),
    ],
)
def test_attempts_without_progress(tmp_path, records, newest, count):
    if newest:
        (tmp_path / f"checkpoints/step-{newest:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{newest:08d}/manifest.json").write_text("{}")
    read = [record(tmp_path, number + 1, *each) for number, each in enumerate(records)]
    assert without_progress(read, lambda each: each.owner.slurm_job_id == "5") == count


def test_a_slow_answer_about_evaluations_does_not_delay_the_next_attempt(tmp_path, monkeypatch):
    """squeue may take minutes, and the job must be requeued before its time is over."""
    monkeypatch.setattr(supervise, "STOP_SECONDS", 0.1)
    asked, answers, calls = threading.Event(), threading.Event(), []

    class Fails:
        failure, nodes = "rank 0 failed", ()

        def poll(self) -> int | None:
            return 1 if asked.is_set() else None

    def evaluate(last: bool) -> None:
        calls.append(last)
        asked.set()
        answers.wait(TIMEOUT_SECONDS)

    with Signals() as signals:
        supervisor = Supervisor(config_of(tmp_path), signals, lambda each: True)
        end = supervisor.make_attempt(Attempt.begin(tmp_path), lambda attempt: Fails(), evaluate)
    # The call is still waiting for its answer.
    assert end.again and not answers.is_set() and calls == [False]
    assert any(thread.is_alive() for thread in threading.enumerate() if thread.daemon)
    assert read_attempts(tmp_path)[0].ended.outcome == "failed"
    answers.set()


# ---- what srun says ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        (
            [
                "srun: error: n1: task 0: Exited with exit code 75",
                "srun: launch/slurm: _step_signal: Terminating StepId=1.0",
                "srun: error: n2: tasks 2-3: Killed",
            ],
            137,
            ("n1: task 0: Exited with exit code 75", ("n1",)),
        ),
        # A wrapper that a signal ends, and the others because of it.
        (
            ["srun: error: n2: task 1: Killed", "srun: error: n1: task 0: Killed"],
            137,
            ("n2: task 1: Killed", ("n2",)),
        ),
        (
            ["srun: error: Unable to create step: Job violates limits"],
            1,
            ("Unable to create step: Job violates limits", ()),
        ),
        # The ranks of other nodes may end first, when their connections break.
        (
            [
                "srun: error: n1: task 0: Exited with exit code 1",
                "srun: launch/slurm: _step_signal: Terminating StepId=1.0",
                "srun: error: Node failure on n2",
            ],
            137,
            ("Node failure on n2", ("n2",)),
        ),
        (
            [
                "srun: error: Task launch for StepId=2.1 failed on node n3: Communication "
                "connection failure",
                "srun: error: Application launch failed: Communication connection failure",
            ],
            1,
            (
                "Task launch for StepId=2.1 failed on node n3: Communication connection failure",
                ("n3",),
            ),
        ),
        # A bug: more than one node.
        (
            [
                "srun: error: n1: task 0: Exited with exit code 1",
                "srun: error: n2: tasks 2-3: Exited with exit code 1",
            ],
            1,
            ("n1: task 0: Exited with exit code 1", ()),
        ),
    ],
)
def test_the_first_to_fail_is_read_from_what_srun_wrote(said, code, expected):
    """Lines as Slurm 22.05 wrote them."""
    words, nodes = expected
    whole = f"srun ended with exit code {code} ({words})", nodes
    assert first_failure(["0: training", *said], code) == whole
    assert first_failure(["0: training"], code) == (f"srun ended with exit code {code}", ())


def test_a_task_that_was_killed_while_it_starts_has_not_exited():
    task = "srun: error: n[2-9]: tasks 16-127: "
    assert has_exited(["0: training", task + "Exited with exit code 2"])
    assert not has_exited([task + "Terminated", task + "Killed", "srun: error: Exited"])


def test_a_step_that_cannot_be_started_gives_the_run_back(tmp_path):
    with Signals() as signals, pytest.raises(OSError, match="no such thing"):

        def start(attempt: Attempt):
            raise OSError("no such thing")

        Supervisor(config_of(tmp_path), signals, lambda each: True).make_attempt(
            Attempt.begin(tmp_path), start
        )
    [attempt] = read_attempts(tmp_path)
    assert (attempt.ended.outcome, attempt.ended.reason) == ("failed", "OSError: no such thing")


@pytest.mark.skipif(not os.path.exists("/proc"), reason="signal masks are read from /proc")
def test_what_this_process_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(signal.SIGHUP, signal.SIGUSR1) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.received == [signal.SIGUSR1] and signals.stops == 0
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)

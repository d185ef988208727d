"""`launcher status`, `logs`, `requeue` and `cancel` on runs that are damaged or made to do harm.

Whatever lies in a run's directory, a command prints something or refuses, and it neither ends with
a traceback nor waits for ever nor sends the terminal anything but text.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import ConfigError, RunFailed
from pretrain.config.errors import PlainStream
from pretrain.launcher import control, status
from pretrain.launcher.status import read_statuses
from pretrain.rundir.attempts import Attempt, Diagnosis, Owner
from pretrain.rundir.files import make_directory
from pretrain.rundir.jobs import JobRecord, append_job
from pretrain.rundir.paths import RunPaths
from tests.end_to_end.commands import TIMEOUT_SECONDS, executable
from tests.unit.test_trust import LAUNCH

STEERING = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\x08\r\n\x00"
STEERING_CHARACTERS = {c for c in STEERING if not c.isprintable()} - {"\x1b", "\r", "\n"}
CASES = 120


@pytest.fixture(autouse=True)
def forgetful_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Slurm that has forgotten every job and takes new ones, for what is done beyond it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, answer in (("squeue", ""), ("sbatch", "echo 8"), ("scontrol", ""), ("scancel", "")):
        executable(folder / name, f"#!/bin/sh\n{answer}\n")
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def make_run(run: Path) -> None:
    """A run with every file that the commands read."""
    paths = RunPaths(run)
    owner = Owner.here(num_processes=2, slurm_job_id="7")
    for ends in (True, False):
        attempt = Attempt.begin(run, owner, lambda other: True)
        attempt.phase("training", 0)
        attempt.phase("saving", 4, saved=4)
        Diagnosis("transient", 4, 1, "n1", "cpu", "what a replay found").write(attempt.directory)
        if ends:
            attempt.end("failed", 1, "rank 1 on n1 ended", 4, ["n1"])
        (run / "logs").mkdir(exist_ok=True)
        paths.attempt_log(attempt.number).write_text("0: a\n1: b\n")
    record = {"step": 4, "loss_nats": 3.0, "step_seconds": 0.5, "tokens_per_second": 9e3}
    paths.metrics.write_text(json.dumps(record) + "\n")
    make_directory(paths.launch)
    paths.launch_config.write_text("[train]\nnum_steps = 9\n")
    paths.config.write_text("[train]\nnum_steps = 9\n")
    paths.launch_record.write_text(json.dumps(LAUNCH))
    paths.launch_script.write_text("#!/bin/sh\n")
    paths.version.write_text('{"run_directory_version": 1, "created_at": 1.0}\n')
    append_job(run, JobRecord("7", "train", "a", time.time(), "here", 1, 2, str(run)))
    append_job(run, JobRecord("8", "evaluate", "e", time.time(), "here", 1, 2, str(run)))
    checkpoint = paths.checkpoints / "step-00000004"
    make_directory(checkpoint)
    branch = {"id": "b", "since": 0}
    lineage = {"id": "c", "step": 4, "parent": None, "branches": [branch]}
    (checkpoint / "manifest.json").write_text(json.dumps(lineage))
    make_directory(paths.evaluations / "step-00000004")
    paths.evaluation_plan.write_text("{}")
    (paths.evaluations / "step-00000004/curve.json").write_text("{}")
    make_directory(paths.abandoned / "0001")
    why = {"at": 1.0, "reason": "r", "checkpoints": {"step-00000004": "c"}}
    (paths.abandoned / "0001/why.json").write_text(json.dumps(why))


# ---- damage --------------------------------------------------------------------------------------
VALUES: list[Any] = [
    None, True, -1, 0, 10**18, -(10**18), 10**400, 1e308, -1e308, float("nan"), float("inf"),
    1e-320, 2.0**52, -(2.0**52), 253402300800, "", "7", STEERING, "\ud800", "x" * 100_000, [], [[]],
    {}, {"a": 1}, ["a", 1], [STEERING], "../../..", "7_0", "\u0660", "finished", "training",
    "step-99999999",
]  # fmt: skip


def changed_value(dice: random.Random, text: str) -> str:
    """Replace, remove or add values in a JSON text or in each line of it."""
    lines = []
    for line in text.splitlines() or [""]:
        try:
            content = json.loads(line)
            assert isinstance(content, dict) and content
        except (ValueError, AssertionError, RecursionError):
            lines.append(line)
            continue
        for key in dice.sample(sorted(content), dice.randint(1, min(3, len(content)))):
            if dice.random() < 0.15:
                del content[key]
            else:
                content[key] = dice.choice(VALUES)
        lines.append(json.dumps(content))
    return "\n".join(lines) + "\n"


WHOLE = [
    b"",
    b"\0" * 5000,
    b"[" * 100_000,
    b"a = " + b"[" * 50_000,
    b'{"step": ' + b"9" * 50_000 + b"}\n",
    b"\xff\xfe" * 100,
    b"null\n[]\n1\n",
    b"0: " + STEERING.encode() + b"\n" + b"9" * 6000 + b": x\n",
    b"x" * 3_000_000,
]
"""What stands in the place of a file's content."""


def put_something_else(dice: random.Random, path: Path) -> None:
    """Put what is no file in the place of one."""
    match dice.randrange(9):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(path)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            path.symlink_to("/none")
        case 5:
            path.symlink_to("/proc/self/mem")
        case 6:
            # Not readable, except for root.
            path.touch(mode=0)
        # Of a log it would all be printed.
        case 7 if path.suffix != ".log":
            with path.open("wb") as file:
                file.truncate(2**40)
        case _:
            path.symlink_to("/")


def damage(dice: random.Random, run: Path) -> str:
    """Damage a run in one way; return in words how, for the report of a failure."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
    folders = sorted(path for path in run.rglob("*") if path.is_dir() and not path.is_symlink())
    kind = dice.choice(["value"] * 3 + ["whole", "other", "folder"])
    path = dice.choice(folders if kind == "folder" else files)
    if kind == "value" and path.stat().st_size < 2**20:
        text = path.read_text(errors="replace")
        path.write_bytes(changed_value(dice, text).encode(errors="replace"))
    elif kind == "whole":
        path.write_bytes(dice.choice(WHOLE))
    else:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        put_something_else(dice, path)
    return f"{kind} of {path}"


# ---- the commands --------------------------------------------------------------------------------
COMMANDS: dict[str, Callable[[Path], object]] = {
    "status RUN": lambda run: status.show_status([run]),
    "status": lambda run: print(status.table(read_statuses([run])[0])),
    "summary": lambda run: print(status.summary(run)),
    "logs": lambda run: control.show_log(run),
    "logs --rank": lambda run: control.show_log(run, 1),
    "cancel": lambda run: control.cancel(run, save=False),
    "requeue": control.requeue,
}


class Hung(Exception):
    """A command has not ended within TIMEOUT_SECONDS."""


@contextlib.contextmanager
def not_for_ever() -> Iterator[None]:
    def hung(number: int, frame: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(TIMEOUT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def output_of(command: Callable[[Path], object], run: Path) -> str:
    """Run a command and return what it prints, or its error as `launcher` prints it."""
    # As `main` makes it of stdout.
    terminal = PlainStream(io.BytesIO(), encoding="utf-8", newline="", errors="backslashreplace")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with contextlib.redirect_stdout(terminal), not_for_ever():
        try:
            command(run)
        except (ConfigError, RunFailed, OSError) as error:
            print(error)
        terminal.flush()
    return terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]


def check_case(seed: int, folder: Path) -> None:
    dice, run = random.Random(seed), folder / f"run{seed}"
    # Mostly without Slurm, because each of its commands is a process.
    os.environ["PATH"] = f"{folder}/bin:/bin:/usr/bin" if seed % 4 == 0 else str(folder)
    make_run(run)
    done = [damage(dice, run) for _ in range(dice.choice([1, 1, 2, 5]))]
    for name, command in COMMANDS.items():
        try:
            said = output_of(command, run)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {name}: {error!r} after {done}") from error
        lines = said.replace("\t", " ").replace("\r", "\n").split("\n")
        assert all(map(str.isprintable, lines)), (seed, name, done, said[:2000])
    # The others keep their rows.
    assert read_statuses([run, folder / "good"])[0][1].step == 4, (seed, done)
    shutil.rmtree(run)


@pytest.mark.parametrize("part", range(6))
def test_no_run_ends_a_command_with_a_traceback(part: int, tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    for seed in range(part, CASES, 6):
        check_case(seed, tmp_path)


# ---- what a terminal gets ------------------------------------------------------------------------
def test_every_text_of_a_run_is_printed_without_what_steers_a_terminal(tmp_path: Path) -> None:
    run = tmp_path / "r\x1b[2Jn"
    make_run(run)
    Attempt.join(run / "attempts/0002").end("failed", 1, "", 4)
    owner = Owner.here(nodes=STEERING, num_processes=2)
    attempt = Attempt.begin(run, owner, lambda other: True)
    attempt.phase(STEERING, 4)
    assert all(map(str.isprintable, output_of(COMMANDS["status RUN"], run).splitlines()))
    attempt.end(STEERING, 1, f"because {STEERING}", 4)
    log = RunPaths(run).rank_log(1)
    log.write_bytes(b"\x1b[31mred\x1b[0m \x1b]0;owned\x07\xff\ta\r50%\n")
    # The two others refuse the runs of others.
    for name in ("status RUN", "status", "summary", "logs", "logs --rank"):
        said = output_of(COMMANDS[name], run)
        assert "\x1b" not in said.replace("\x1b[31m", "").replace("\x1b[0m", "")
        assert not STEERING_CHARACTERS & {*said}
    said = output_of(COMMANDS["status RUN"], run)
    assert "because \\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\u2066\\x08" in said
    assert "\x1b[31mred\x1b[0m \\x1b]0;owned\\x07\\xff\ta\r50%\n" in output_of(
        lambda run: control.show_log(run, 1), run
    )


def test_a_log_goes_to_a_pipe_as_it_is(tmp_path: Path, capfdbinary: Any) -> None:
    make_run(tmp_path / "run")
    content = b"0: \x1b]0;title\x07\xff\0\n"
    RunPaths(tmp_path / "run").attempt_log(2).write_bytes(content)
    control.show_log(tmp_path / "run")
    sys.stdout.flush()
    assert capfdbinary.readouterr().out == content


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name)
    shutil.rmtree(tmp_path / "a/checkpoints")
    (tmp_path / "a/checkpoints").symlink_to("checkpoints")
    statuses, _ = read_statuses([tmp_path / "a", tmp_path / "b"])
    assert [status.step for status in statuses] == [None, 4]
    assert statuses[0].state == "unreadable" and statuses[0].reason
    assert "unreadable" in status.table(statuses)

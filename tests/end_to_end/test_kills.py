"""SIGKILL at any moment, half of them inside an asynchronous save; the same command goes on.

A run on two ranks under `launcher local` saves after every second step. A rank, rank 0, a writing
process, the launcher or all of them at once are killed again and again. In the end the run is, bit
for bit, the one that nobody disturbed. Its fused operations are compiled; in `make torture`, whole
layers too, and nothing in the 500 kills.

All processes are forked (tests/end_to_end/forks.py), because the imports of each start would take
longer than the rest of it. tests/slurm/test_survive.py compares such a run with ranks that are not.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import complete_checkpoints
from pretrain.rundir.files import PARTIAL
from tests.end_to_end.commands import (
    LAUNCHER,
    TIMEOUT_SECONDS,
    Running,
    forked,
    sets,
    succeeded,
    untimed,
    wait_for,
)
from tests.end_to_end.forks import SAID_IN
from tests.end_to_end.test_stopping import weights

STEPS, INTERVAL = 24, 2
KILLS, TORTURE_KILLS = 2, 500
KILLS_OF_A_RUN = 6
"""So many fit into the steps of one run, which is why the torture takes many runs."""
VICTIMS = ("rank", "rank 0", "writer", "launcher", "all")
SETTINGS = (
    f"train.num_steps={STEPS}",
    f"checkpoint.interval_steps={INTERVAL}",
    "checkpoint.keep=2",
    "checkpoint.asynchronous=true",
    "evaluation.lengths=[32]",
    "evaluation.max_tokens=512",
    f"evaluation.interval_steps={STEPS}",
    "model.hidden_dropout=0.1",
)


def command(config: Path, run: Path, fusion: str) -> list[str]:
    settings = sets(*SETTINGS, f"run.directory={run}", f"train.fusion={fusion}")
    return [*LAUNCHER, "local", str(config), "--nproc", "2", *settings]


# ---- processes -----------------------------------------------------------------------------------
def read(path: Path) -> bytes:
    """Return what a file in /proc holds; nothing when the process is gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def children(process: int) -> list[int]:
    found = [
        number
        for task in Path(f"/proc/{process}/task").glob("*")
        for number in read(task / "children").split()
    ]
    return [int(number) for number in found]


def family(launcher: int, said: Path) -> dict[int, str]:
    """Return process id -> what it is, of a launcher and all that it has started."""
    found, left = {launcher: "launcher"}, children(launcher)
    while left:
        process = left.pop()
        words = read(said / str(process))
        rank = next((e[5:].decode() for e in words.split(b"\0") if e.startswith(b"RANK=")), "")
        is_writer = b"pretrain.checkpoint.writer" in words
        parent_is_rank = process not in children(launcher)
        found[process] = "writer" if is_writer else "other" if parent_is_rank else f"rank {rank}"
        left += children(process)
    return found


def kill(launcher: int, said: Path, victim: str, dice: random.Random) -> str:
    """Kill a victim, or the launcher where none of its kind runs; return what was killed."""
    found = family(launcher, said)
    if victim == "all":
        # The launcher first: it must not see the others die.
        chosen = sorted(found, key=lambda process: found[process] != "launcher")
    else:
        wanted = [p for p, what in found.items() if what.startswith(victim)]
        victim = victim if wanted else "launcher"
        chosen = [dice.choice(wanted)] if wanted else [launcher]
    for process in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return victim


def lives(process: str) -> bool:
    """Tell whether a process lives; the dead wait for their parent, or are gone."""
    return read(Path(f"/proc/{process}/stat")).rpartition(b") ")[2][:1] not in (b"", b"Z")


# ---- moments -------------------------------------------------------------------------------------
def newest_step(run: Path) -> int:
    found = complete_checkpoints(run)
    return int(found[-1].name[5:]) if found else 0


def save_under_way(run: Path) -> Path | None:
    """Return the hidden folder of a save that has begun and is not published."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(run / "checkpoints"):
            if name.startswith(".step-") and name.endswith(PARTIAL):
                return run / "checkpoints" / name
    return None


def wait_for_moment(process: Running, run: Path, in_save: bool, dice: random.Random) -> Path | None:
    """Wait for some progress, then for a save or for a random time.

    Args:
        process: The launcher.
        run: The run's directory.
        in_save: Return when a save has just begun, or a random moment later.
        dice: Draws the moment.

    Returns:
        The hidden folder of the save.
    """
    if not in_save and dice.random() < 0.2:
        # While it starts.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(dice.uniform(0, 8))
        return None
    goal = newest_step(run) + INTERVAL * dice.randint(1, 2)
    wait_for(lambda: process.poll() is not None or newest_step(run) >= goal)
    if not in_save:
        time.sleep(dice.uniform(0, 0.3))
        return None
    # What is seen first may be a save that is about to end. The next is seen from its beginning.
    seen, deadline = save_under_way(run), time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        partial = save_under_way(run)
        if partial is not None and partial != seen:
            time.sleep(dice.choice((0, 0, dice.uniform(0, 0.02))))
            return partial
        time.sleep(0.0005)
    return None


def disturbed(words: list[str], run: Path, kills: int, dice: random.Random) -> Counter[str]:
    """Train a run to its end, and kill something up to `kills` times on the way.

    Args:
        words: The command that trains it.
        run: The run's directory.
        kills: At most so many; fewer when the run has finished before.
        dice: Draws moments and victims.

    Returns:
        How often each victim was killed, and how many kills fell "inside a save".
    """
    counts: Counter[str] = Counter()
    said = run.with_name(f"{run.name}-processes")
    said.mkdir()
    process = Running(words, {SAID_IN: str(said)})
    for number in range(kills):
        partial = wait_for_moment(process, run, number % 2 == 0, dice)
        was_alive = process.poll() is None
        if was_alive:
            killed = kill(process.pid, said, dice.choice(VICTIMS), dice)
            counts["inside a save"] += partial is not None and partial.exists()
            counts[killed] += 1
        # Not before the kill, which a short save would not wait for.
        attempts, step = len(read_attempts(run)), newest_step(run)
        if was_alive and killed in ("launcher", "all"):
            # A checkpoint that was published meanwhile is no sign that it goes on.
            process.wait(30)
        wait_for_consequences(process, run, attempts, step)
        if process.poll() is not None:
            done = process.ended()
            nothing_runs(said)
            if done.code == 0:
                return counts
            assert was_alive, done.text
            process = Running(words, {SAID_IN: str(said)})
    succeeded(process.ended())
    nothing_runs(said)
    return counts


def wait_for_consequences(process: Running, run: Path, attempts: int, step: int) -> None:
    """Wait until the launcher has ended, or the run goes on.

    The launcher starts the ranks again, if it lives, and the saver its writing process.

    Args:
        process: The launcher.
        run: The run's directory.
        attempts: The number of attempts before the kill.
        step: The newest checkpoint's step before the kill.
    """
    wait_for(
        lambda: (
            process.poll() is not None
            or len(read_attempts(run)) > attempts
            or newest_step(run) > step
        )
    )


def nothing_runs(said: Path) -> None:
    wait_for(lambda: not any(map(lives, os.listdir(said))))


def numbers(run: Path) -> list[dict[str, Any]]:
    return [record for record in untimed(run) if "evaluation" not in record]


@pytest.mark.parametrize(
    ("fusion", "kills"),
    [
        # What "auto" chooses on a GPU.
        ("on", KILLS),
        pytest.param("layers", KILLS, marks=pytest.mark.torture),
        pytest.param("auto", TORTURE_KILLS, marks=[pytest.mark.torture, pytest.mark.timeout(0)]),
    ],
)
def test_a_run_that_is_killed_again_and_again_is_the_undisturbed_one(
    config, workspace, fusion, kills, capsys
):
    whole = workspace / f"runs/not-killed-{fusion}-{kills}"
    succeeded(forked(command(config, whole, fusion)))
    counts: Counter[str] = Counter()
    dice, round_number, made = random.Random(kills), 0, 0
    # At least one kill falls inside a save, which a round begins with.
    while made < kills or not counts["inside a save"]:
        round_number += 1
        run = workspace / f"runs/killed-{fusion}-{kills}-{round_number}"
        left = min(KILLS_OF_A_RUN, max(1, kills - made))
        counts += disturbed(command(config, run, fusion), run, left, dice)
        made = counts.total() - counts["inside a save"]
        context = f"run {round_number}: {dict(counts)}"
        assert [path.name for path in complete_checkpoints(run)] == [
            path.name for path in complete_checkpoints(whole)
        ], context
        for mine, other in zip(complete_checkpoints(run), complete_checkpoints(whole)):
            assert weights(mine) == weights(other), (mine, context)
        assert [record["step"] for record in numbers(run)] == list(range(1, STEPS + 1)), context
        assert numbers(run) == numbers(whole), context
        names = sorted(os.listdir(run / "checkpoints"))
        assert names == sorted(os.listdir(whole / "checkpoints")), context
        assert not (run / "abandoned").exists(), context
        shutil.rmtree(run)
        if kills > KILLS:
            with capsys.disabled():
                print(f"\n{round_number} runs, kills: {dict(counts)}", end="", flush=True)
    if kills > KILLS:
        assert all(counts[victim] for victim in VICTIMS), counts
        assert counts["inside a save"] > kills / 4, counts

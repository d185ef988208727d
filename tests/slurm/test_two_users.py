"""Two users on one cluster: one prepares a directory, the other one is asked to use it.

Both are made-up users on the real cluster, and the ranks' Python is a script that says who it is.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.rundir.paths import RunPaths
from tests.end_to_end.commands import Done, explained
from tests.slurm.cluster import Cluster
from tests.slurm.test_submit import DEMO, Desk

VICTIM, ATTACKER = (pwd.getpwnam(name).pw_uid for name in ("daemon", "nobody"))
"""Two users that every Debian has: Slurm wants to know a job's user by name."""
WHO = """#!/bin/sh
id -u > "$NOTES/ran.$SLURM_PROCID"
"""


class Users:
    """A shared directory that both may write to, and the victim's home."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.desk = cluster, Desk(cluster, folder)
        desk = self.desk
        self.shared, self.home = folder / "shared", folder / "victim"
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        self.home.mkdir()
        self.mine = self.home / "mine.txt"
        self.mine.write_text("mine")
        for path in (self.home, self.mine):
            os.chown(path, VICTIM, VICTIM)
        desk.python.write_text(WHO)
        desk.site()
        for path in (desk.work, desk.notes, *desk.work.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o644)

    def launcher(self, *words: object, user: int = VICTIM) -> Done:
        """Run `launcher` as a user does, from the directory that both may write to."""
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        done = self.cluster.run(
            *become,
            sys.executable,
            "-m",
            "pretrain.launcher",
            *words,
            cwd=self.desk.work,
            environment={"HOME": str(self.home), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def submit(self, run: Path, user: int = VICTIM) -> Done:
        settings = [f"run.directory='{run}'", "data.directory='data'"]
        options = [word for each in settings for word in ("--set", each)]
        return self.launcher("submit", DEMO, "--site", "site.toml", *options, user=user)

    def ran_as(self) -> set[str]:
        return {path.read_text().strip() for path in self.desk.notes.glob("ran.*")}


@pytest.fixture
def users(cluster: Cluster, tmp_path: Path) -> Iterator[Users]:
    # pytest's own folders are root's alone.
    opened = [parent for parent in tmp_path.parents if "pytest" in parent.name]
    modes = {path: path.stat().st_mode for path in (tmp_path, *opened)}
    for path in modes:
        path.chmod(path.stat().st_mode | 0o055)
    python = Path(sys.executable)
    done = cluster.run(
        "setpriv",
        f"--reuid={VICTIM}",
        f"--regid={VICTIM}",
        "--clear-groups",
        python,
        "-c",
        "import pretrain",
    )
    if done.returncode:
        pytest.skip(f"another user cannot run {python}: {done.stderr[-200:]}")
    yield Users(cluster, tmp_path)
    for path, mode in modes.items():
        path.chmod(mode)


def prepared_by_the_attacker(users: Users, name: str) -> Path:
    """A run that the attacker submitted, opened to everybody and edited to run something else."""
    run = users.shared / name
    done = users.submit(run, user=ATTACKER)
    assert done.code == 0, done.text
    users.desk.wait_until_over(*job_ids(run))
    assert users.ran_as() == {str(ATTACKER)}
    for path in users.desk.notes.iterdir():
        path.unlink()
    for path in (run, *run.rglob("*")):
        path.chmod(0o777)
    paths = RunPaths(run)
    launch = json.loads(paths.launch_record.read_text())
    launch["command"] = ["sh", "-c", f"echo owned > {users.mine}"]
    paths.launch_record.write_text(json.dumps(launch))
    paths.launch_script.write_text(f"#!/bin/sh\necho owned > {users.mine}\n")
    for path in (paths.metrics, paths.logs / "attempt-0002.log", paths.attempts / "0002"):
        path.symlink_to(users.mine)
        os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)
    os.mkfifo(paths.logs / "rank-1.log")
    return run


def job_ids(run: Path) -> list[str]:
    return [json.loads(line)["job_id"] for line in RunPaths(run).jobs.read_text().splitlines()]


def test_a_run_that_another_user_prepared_is_shown_and_not_run(users: Users) -> None:
    run = prepared_by_the_attacker(users, "theirs")
    before = job_ids(run)
    shown = users.launcher("status", run)
    assert shown.code == 0 and "of 320" in shown.out, shown.text
    for done in (
        users.submit(run),
        users.launcher("requeue", run),
        users.launcher("cancel", run),
        users.launcher("evaluate-checkpoints", run, "--site", "site.toml"),
        users.launcher("attempt", run),
    ):
        explained(done, 2, f"{run}: belongs to another user (owner nobody, mode 0777)", "cp -rL")
    assert users.mine.read_text() == "mine" and users.ran_as() == set()
    assert job_ids(run) == before


def test_a_user_s_own_run_holds_nothing_of_others(users: Users) -> None:
    run = users.shared / "mine"
    done = users.submit(run)
    assert done.code == 0, done.text
    users.desk.wait_until_over(*job_ids(run))
    assert users.ran_as() == {str(VICTIM)}
    # In the moment in which the victim had opened it, the attacker left a link and a name.
    paths, planted = RunPaths(run), RunPaths(run).logs / "attempt-0002.log"
    planted.symlink_to(users.mine)
    os.chown(planted, ATTACKER, ATTACKER, follow_symlinks=False)
    explained(users.launcher("requeue", run), 2, f"{planted}: belongs to another user")
    planted.unlink()
    paths.launch_record.chmod(0o666)
    explained(users.launcher("requeue", run), 2, "launch.json: everybody may write to it")
    paths.launch_record.chmod(0o640)
    # Also a job that waits when that happens: the batch script's command looks again.
    (users.desk.notes / "ran.0").unlink()
    done = users.launcher("requeue", run)
    assert done.code == 0, done.text
    users.desk.wait_until_over(*job_ids(run))
    assert users.ran_as() == {str(VICTIM)} and users.mine.read_text() == "mine"
    shutil.rmtree(run)

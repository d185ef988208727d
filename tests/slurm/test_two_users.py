"""Two users on one cluster: one prepares a directory, the other one is asked to use it.

Both are made-up users on the real cluster, and the ranks' Python is a script that says who it is.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import site
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.rundir.paths import RunPaths
from tests.end_to_end.commands import ROOT, Done, explained, sets, succeeded
from tests.slurm.cluster import Cluster
from tests.slurm.runs import with_scripted_ranks
from tests.slurm.test_submit import DEMO, Desk

VICTIM, ATTACKER = (pwd.getpwnam(name).pw_uid for name in ("daemon", "nobody"))
"""Two users that every Debian has: Slurm wants to know a job's user by name."""
WHO = """#!/bin/sh
case "$*" in *launcher.agent*) PYTHONPATH={path} exec {python} "$@";; esac
id -u > "$NOTES/ran.$SLURM_PROCID"
# Refused, after which no other attempt is made.
exit 2
"""


PACKAGES = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *site.getsitepackages()]),
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Variables with which another Python of the same version finds the project and what it needs."""


def as_user(user: int) -> list[str]:
    """Return a command that becomes another user and runs what follows it."""
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    # Not directly: setpriv would still have root's rights when it looks for the program.
    return [*become, "sh", "-c", 'exec "$@"', "sh"]


def python_of_all_users(cluster: Cluster) -> str | None:
    """Return a Python that other users may run: this one may lie in root's home directory."""
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, system):
        command = [*as_user(VICTIM), python, "-c", "import pretrain.launcher.cli"]
        if cluster.run(*command, cwd="/", environment=PACKAGES).returncode == 0:
            return python
    return None


class Users:
    """A shared directory that both may write to, and the victim's home."""

    def __init__(self, cluster: Cluster, folder: Path, python: str) -> None:
        self.cluster, self.desk, self.python = cluster, Desk(cluster, folder), python
        desk = self.desk
        self.shared, self.home = folder / "shared", folder / "victim"
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        self.home.mkdir()
        self.mine = self.home / "mine.txt"
        self.mine.write_text("mine")
        for path in (self.home, self.mine):
            os.chown(path, VICTIM, VICTIM)
        desk.python.write_text(WHO.format(path=PACKAGES["PYTHONPATH"], python=python))
        desk.site()
        for path in (desk.work, desk.notes, *desk.work.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o644)

    def launcher(self, *words: object, user: int = VICTIM) -> Done:
        """Run `launcher` as a user does, from the directory that both may write to."""
        done = self.cluster.run(
            *as_user(user),
            self.python,
            "-m",
            "pretrain.launcher",
            *with_scripted_ranks(words),
            cwd=self.desk.work,
            environment=PACKAGES | {"HOME": str(self.home)},
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def submit(self, run: Path, user: int = VICTIM) -> Done:
        options = sets(f"run.directory='{run}'", "data.directory='data'")
        return self.launcher("submit", DEMO, "--site", "site.toml", *options, user=user)

    def ran_as(self) -> set[str]:
        return {path.read_text().strip() for path in self.desk.notes.glob("ran.*")}


@pytest.fixture
def users(cluster: Cluster) -> Iterator[Users]:
    python = python_of_all_users(cluster)
    if python is None:
        pytest.skip("no Python here that other users may run has the project's packages")
    # Not tmp_path: every pytest that starts makes its parent root's alone.
    with tempfile.TemporaryDirectory(prefix="users-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Users(cluster, Path(name), python)


def prepared_by_the_attacker(users: Users, name: str) -> Path:
    """A run that the attacker submitted, opened to everybody and edited to run something else."""
    run = users.shared / name
    succeeded(users.submit(run, user=ATTACKER))
    users.desk.wait_until_over(*users.desk.job_ids(run))
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


def test_a_run_that_another_user_prepared_is_shown_and_not_run(users: Users) -> None:
    run = prepared_by_the_attacker(users, "theirs")
    before = users.desk.job_ids(run)
    shown = users.launcher("status", run)
    assert shown.code == 0 and "0/320" in shown.out, shown.text
    for done in (
        users.submit(run),
        users.launcher("requeue", run),
        users.launcher("cancel", run),
        users.launcher("evaluate-checkpoints", run, "--site", "site.toml"),
        users.launcher("attempt", run),
    ):
        explained(
            done, 2, f"{run}: belongs to another user (owner {ATTACKER}, mode 0777)", "`cp -r`"
        )
    assert users.mine.read_text() == "mine" and users.ran_as() == set()
    assert users.desk.job_ids(run) == before


def test_a_user_s_own_run_holds_nothing_of_others(users: Users) -> None:
    run = users.shared / "mine"
    succeeded(users.submit(run))
    users.desk.wait_until_over(*users.desk.job_ids(run))
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
    succeeded(users.launcher("requeue", run))
    users.desk.wait_until_over(*users.desk.job_ids(run))
    assert users.ran_as() == {str(VICTIM)} and users.mine.read_text() == "mine"
    shutil.rmtree(run)

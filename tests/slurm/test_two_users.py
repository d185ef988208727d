"""Two users on one cluster: one prepares a directory, the other one is asked to use it.

Both are made-up users on the real cluster, and the ranks' Python is a script that says who it is.
"""

from __future__ import annotations

import json
import os
import pwd
import shlex
import shutil
import site
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pretrain.config import dump_config
from pretrain.rundir.paths import RunPaths
from tests.end_to_end.commands import ROOT, Done, explained, succeeded, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.runs import with_scripted_ranks, write_site
from tests.slurm.test_submit import DEMO, Desk
from tests.unit.test_data_build import config, write_text

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
        settings = [f"run.directory='{run}'", "data.directory='data'"]
        options = [word for each in settings for word in ("--set", each)]
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
    assert job_ids(run) == before


def test_a_user_s_own_run_holds_nothing_of_others(users: Users) -> None:
    run = users.shared / "mine"
    succeeded(users.submit(run))
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
    succeeded(users.launcher("requeue", run))
    users.desk.wait_until_over(*job_ids(run))
    assert users.ran_as() == {str(VICTIM)} and users.mine.read_text() == "mine"
    shutil.rmtree(run)


HELD = """#!/bin/sh
while test -e {hold}; do touch {hold}.seen; sleep 0.1; done
PYTHONPATH={path} exec {python} "$@"
"""
"""The Python of a build's tasks, which start when nothing holds them any more."""


def test_a_task_of_a_build_takes_no_orders_of_another_user(users: Users) -> None:
    """Who may rename the folder of a build puts his own there, between submission and start."""
    root, parent = users.shared.parent / "build", users.home / "data"
    folder, hold = parent / ".building-set", root / "hold"
    for path in (root, parent):
        path.mkdir()
        os.chown(path, VICTIM, VICTIM)
        path.chmod(0o755)
    hold.touch()
    # Two tasks, of which one waits in the queue meanwhile.
    made = config(root, directory=str(parent / "set"), bytes_per_task=15_000)
    write_text(root)
    (root / "config.toml").write_text(dump_config(made))
    held = root / "python"
    held.write_text(HELD.format(hold=hold, path=PACKAGES["PYTHONPATH"], python=users.python))
    held.chmod(0o755)
    site = write_site(root / "site.toml", python=str(held))
    words = ("data", "build", root / "config.toml", "--site", site, "--nodes", 1)
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(users.launcher, *words)
        try:
            wait_for(lambda: building.done() or hold.with_name("hold.seen").exists())
            assert not building.done(), building.result().text
            # The slip without which nobody else can rename it. The attacker cannot read the folder.
            array = folder / "logs/scan/array.json"
            orders = array.read_text()
            parent.chmod(0o777)
            plant = (
                f"mv {folder} {parent}/taken && mkdir -p {folder}/logs/scan {folder}/scan && "
                f"printf %s {shlex.quote(orders)} > {array} && chmod -R a+rwX {folder}"
            )
            planted = users.cluster.run(*as_user(ATTACKER), "sh", "-c", plant, cwd="/")
            assert planted.returncode == 0, planted.stderr
        finally:
            hold.unlink()
        done = building.result()
    assert done.code != 0 and "Traceback" not in done.text, done.text
    logs = "logs/scan/slurm-*.log"
    first, second = [*(parent / "taken").glob(logs), *folder.glob(logs)]
    for log in (first, second):
        assert f"{parent}: everybody may rename what lies in it" in log.read_text()
    # Slurm itself makes the log.
    assert [path for path in folder.rglob("*") if path.stat().st_uid == VICTIM] == [second]

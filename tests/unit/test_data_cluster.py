"""Test how a build of data runs job arrays, without a Slurm: tests/slurm has it with one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pretrain.config import RunFailed, dump_config
from pretrain.data.build.folder import BuildFolder
from pretrain.data.build.tasks import Cluster, run_on_cluster
from pretrain.launcher import submit as data
from pretrain.launcher.site import load_site
from tests.end_to_end.commands import LAUNCHER, ROOT
from tests.unit.test_data_build import config, write_text


def stage(root: Path, command: str = "true", tasks: int = 3):
    """Run the scan of some tasks, of which none is done, with a command of the shell."""
    folder = BuildFolder(root / "build")
    cluster = Cluster(["sh", "-c", command, "command"], 2)
    run_on_cluster(folder, "scan", [folder.scan(rank) for rank in range(tasks)], cluster)


def test_a_command_that_fails_says_why_itself_unless_it_was_killed(tmp_path, capfd):
    with pytest.raises(SystemExit) as end:
        stage(tmp_path, "echo error: no such partition >&2; exit 3")
    assert end.value.code == 1 and capfd.readouterr().err == "error: no such partition\n"
    with pytest.raises(RunFailed, match="was killed"):
        stage(tmp_path, "kill -9 $$")


def test_tasks_without_a_result_are_counted_and_a_log_is_named(tmp_path):
    with pytest.raises(RunFailed, match=r"3 of 3 tasks of the stage scan .* slurm-\*_0\.log in "):
        stage(tmp_path)


# ---- the job -------------------------------------------------------------------------------------


def test_the_jobs_of_a_data_set_have_a_name_of_their_own():
    name = data.build_name(Path("/a/data"))
    assert name == data.build_name(Path("/a/b/../data")) and name.startswith("data-data-")
    assert len({name, data.build_name(Path("/b/data")), data.build_name(Path("/a/data2"))}) == 3
    odd = data.build_name(Path("/" + "é,$(x) %j" * 30))
    assert odd.isascii() and "," not in odd and len(odd) <= 64


# ---- the command ---------------------------------------------------------------------------------
def command(root: Path, *words: object, path: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    write_text(root)
    (root / "config.toml").write_text(dump_config(config(root)))
    (root / "site.toml").write_text((ROOT / "slurm/site.v100.toml").read_text())
    return subprocess.run(
        [*LAUNCHER, "data", "build", "config.toml", "--site", "site.toml", *map(str, words)],
        cwd=root,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_a_dry_run_shows_the_files_and_writes_nothing(tmp_path):
    done = command(tmp_path, "--dry-run", "--nodes", 2, "--time", "3:00:00")
    assert done.returncode == 0, done.stderr
    assert "text: 12 files" in done.stdout
    assert not any(path.name.endswith("data") for path in tmp_path.iterdir())


def test_what_cannot_work_is_refused_at_once(tmp_path):
    assert load_site(ROOT / "slurm/site.v100.toml").nodes == 16
    many = command(tmp_path, "--nodes", 17)
    assert many.returncode == 2 and "nodes = 17: site v100 has 16 nodes" in many.stderr
    time = command(tmp_path, "--time", "soon")
    assert time.returncode == 2 and "time limit 'soon'" in time.stderr
    nowhere = command(tmp_path)
    assert nowhere.returncode == 2 and "scontrol: no such command here" in nowhere.stderr
    assert not any(path.name.startswith(".building") for path in tmp_path.iterdir())

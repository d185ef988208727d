"""Nothing that another user put into a run is executed, believed or written through.

The tests make files of another user with chown, which needs root. tests/slurm/test_two_users.py has
two users at work.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain import platform
from pretrain.config import ConfigError, RunFailed
from pretrain.data.build.folder import BuildFolder, locked
from pretrain.launcher import control, evaluations, slurm
from pretrain.launcher.ranks import LocalRanks
from pretrain.rundir import trust
from pretrain.rundir.attempts import Attempt
from pretrain.rundir.files import (
    append_json_line,
    make_directory,
    new_directory,
    open_by_steps,
    open_own,
    replace_file,
)
from pretrain.rundir.jobs import JobRecord, append_job, read_launch
from pretrain.rundir.metrics import MetricsFile
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.trust import check_trusted, read_trusted
from tests.end_to_end.commands import ROOT
from tests.unit.test_job import job as make_job
from tests.unit.test_site import CPU

STRANGER = 12_345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
RECORD = JobRecord("7", "train", "a", 1.0, "here", 1, 1, "/run")
LAUNCH = {
    "command": ["srun"],
    "python": "python3",
    "num_tasks": 1,
    "nodes": 1,
    "sbatch": ["--requeue"],
    "site": {},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run as it was submitted and started once, with a file of the user's elsewhere."""
    run = tmp_path / "runs/mine"
    Attempt.begin(run).end("stopped", 80, "asked", 3)
    paths = RunPaths(run)
    for folder in (paths.launch, paths.logs, paths.evaluations, paths.checkpoints, paths.abandoned):
        make_directory(folder)
    paths.launch_record.write_text(json.dumps(LAUNCH))
    paths.launch_script.write_text("#!/bin/sh\n")
    paths.launch_config.write_text("[train]\nnum_steps = 9\n")
    paths.evaluation_plan.write_text("{}")
    append_job(run, RECORD)
    (tmp_path / "mine.txt").write_text("mine")
    return run


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def all_of(run: Path) -> dict[str, Callable[[], object]]:
    """Everything that executes or believes what lies in a run."""
    return {
        "attempt and requeue": lambda: read_launch(run),
        "submit": lambda: check_trusted(run),
        "local": lambda: Attempt.begin(run),
        "evaluation": lambda: evaluations.read_plan(run),
        "cancel": lambda: control.cancel(run, save=False),
        "requeue": lambda: control.requeue(run),
    }


# ---- what is refused -----------------------------------------------------------------------------
PLACES = [
    ".",
    "launch",
    "launch/launch.json",
    "launch/train.sbatch",
    "launch/config.toml",
    "jobs.jsonl",
    "logs",
    "attempts",
    "attempts/0001",
    "evaluations",
    "evaluations/plan.json",
    "checkpoints",
    "abandoned",
]


@needs_root
@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_to_another_user_is_refused(run: Path, place: str) -> None:
    check_trusted(run)
    give_away(run / place)
    for action in all_of(run).values():
        with pytest.raises(ConfigError) as error:
            action()
        assert str(error.value).startswith(f"{run / place}: belongs to another user (owner 12345, ")
        assert "`cp -r`" in str(error.value)


@pytest.mark.parametrize("place", PLACES)
def test_what_everybody_may_write_is_refused_until_it_is_mended_as_advised(
    run: Path, place: str
) -> None:
    (run / place).chmod(0o1777)
    for action in all_of(run).values():
        with pytest.raises(ConfigError) as error:
            action()
        assert f"{run / place}: everybody may write to it (owner " in str(error.value)
    subprocess.run(str(error.value).split("`")[1], shell=True, check=True)
    check_trusted(run)
    assert read_launch(run).python == "python3"


@needs_root
def test_a_link_or_a_name_that_another_user_left_is_refused(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    for place in ("metrics.jsonl", "logs/attempt-0002.log", "launch/new", "attempts/0002", "wandb"):
        (run / place).symlink_to(mine)
        give_away(run / place)
        with pytest.raises(ConfigError, match=f"{place}: belongs to another user"):
            check_trusted(run)
        (run / place).unlink()
    for place in ("logs/rank-1.log", "jobs.jsonl"):
        (run / place).unlink(missing_ok=True)
        # The user's own file, under a second name: its owner tells nothing.
        os.link(mine, run / place)
        with pytest.raises(ConfigError, match=f"{place}: has 2 names") as error:
            check_trusted(run)
        subprocess.run(str(error.value).split("`")[1], shell=True, check=True)
        check_trusted(run)
        assert mine.stat().st_nlink == 1 and (run / place).read_text() == "mine"
    (tmp_path / "linked").symlink_to(run)
    check_trusted(tmp_path / "linked")
    give_away(tmp_path / "linked")
    with pytest.raises(ConfigError, match="linked: belongs to another user"):
        check_trusted(tmp_path / "linked")


@needs_root
def test_a_group_may_write_only_if_it_is_the_owner_s_private_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "launch").chmod(0o770)
    # root's own group, as useradd makes one for each user.
    private = grp.getgrgid(0)
    assert private.gr_name == pwd.getpwuid(0).pw_name
    check_trusted(run)
    with monkeypatch.context() as patch:
        both = grp.struct_group((private.gr_name, "x", 0, ["root", "eve"]))
        patch.setattr(trust.grp, "getgrgid", lambda gid: both)
        with pytest.raises(ConfigError, match="launch: group 0 may write to it"):
            check_trusted(run)
    os.chown(run / "launch", 0, STRANGER)
    with pytest.raises(ConfigError, match="launch: group 12345 may write to it"):
        check_trusted(run)
    (run / "launch").chmod(0o2750)
    check_trusted(run)


def access_list(*entries: tuple[int, int, int]) -> bytes:
    """An access control list as Linux keeps it: version 2, then tag, permissions and id of each."""
    no_id = 2**32 - 1
    rows = [
        struct.pack("<HHI", tag, bits, who if who >= 0 else no_id) for tag, bits, who in entries
    ]
    return struct.pack("<I", 2) + b"".join(rows)


OWNER, USER, OWN_GROUP, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


def test_an_access_list_counts_as_the_group_s_bits(run: Path, tmp_path: Path) -> None:
    own = [(OWNER, 7, -1), (OWN_GROUP, 5, -1), (MASK, 7, -1), (OTHER, 0, -1)]
    stranger = access_list(own[0], (USER, 7, STRANGER), *own[1:])
    team = access_list(*own[:2], (GROUP, 7, STRANGER), *own[2:])
    shared = tmp_path / "shared"
    shared.mkdir()
    try:
        os.setxattr(run / "launch", trust.ACCESS_LIST, stranger)
        os.setxattr(shared, "system.posix_acl_default", team)
    except OSError:
        pytest.skip("this file system has no access control lists")
    assert stat.S_IMODE((run / "launch").stat().st_mode) == 0o770
    with pytest.raises(ConfigError, match="launch: group"):
        check_trusted(run)
    # A project's folder whose default list lets a group write everything: a run is still its own.
    (shared / "probe").mkdir()
    assert (shared / "probe").stat().st_mode & stat.S_IWGRP
    Attempt.begin(shared / "run").end("stopped", 80, "asked", 0)
    append_job(shared / "run", RECORD)
    make_directory(shared / "run/logs")
    # As Slurm makes it: with the mode of all programs, which the list of the folder makes its own.
    (shared / "run/logs/slurm-7.log").touch()
    check_trusted(shared / "run")
    # The team may still read.
    assert (shared / "run/logs/slurm-7.log").stat().st_mode & stat.S_IRGRP
    assert os.getxattr(shared / "run/logs", "system.posix_acl_default") == access_list(
        own[0], (OWN_GROUP, 5, -1), (GROUP, 5, STRANGER), (MASK, 5, -1), own[3]
    )


def test_links_that_the_user_made_are_followed(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "scratch"
    elsewhere.mkdir()
    # checkpoints on another file system, runs itself a link, and a sweep's link to a log.
    (run / "checkpoints").rename(elsewhere / "checkpoints")
    (run / "checkpoints").symlink_to(elsewhere / "checkpoints")
    (run.parent).rename(elsewhere / "runs")
    (run.parent).symlink_to(elsewhere / "runs")
    (run.parent / ".logs").mkdir()
    (run / "logs/slurm-7_0.log").symlink_to("../../.logs/slurm-7_0.log")
    (run / "data").symlink_to("/usr/share")
    check_trusted(run)
    assert read_launch(run).num_tasks == 1
    (elsewhere / "checkpoints").chmod(0o777)
    with pytest.raises(ConfigError, match="checkpoints: everybody may write"):
        check_trusted(run)


@needs_root
def test_the_folder_of_a_data_build_is_the_builder_s_alone(tmp_path: Path) -> None:
    folder = BuildFolder(tmp_path / ".building-data")
    with locked(folder):
        pass
    give_away(folder.path)
    with pytest.raises(ConfigError, match="belongs to another user"), locked(folder):
        pass
    os.chown(folder.path, 0, 0)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="everybody may rename"), locked(folder):
        pass


# ---- what is not written through -----------------------------------------------------------------
def writers(run: Path) -> dict[str, Callable[[Path], object]]:
    def local(path: Path) -> None:
        for attempt in (1, 2):
            LocalRanks(["true"], 2, RunPaths(run), attempt=attempt).end()

    return {
        "jobs.jsonl": lambda path: append_job(run, RECORD),
        "attempts/0001/phases.jsonl": lambda path: Attempt.join(path.parent).phase("loading", 1),
        "metrics.jsonl": lambda path: MetricsFile(path, 10).close(),
        "logs/attempt-0002.log": lambda path: open_own(path).write(b"x"),
        "logs/rank-0.log": local,
        "logs/rank-1.log": local,
    }


@pytest.mark.parametrize("place", writers(Path()))
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_file_is_not_written_through_what_lies_in_its_place(
    run: Path, tmp_path: Path, place: str, kind: str
) -> None:
    path, mine = run / place, tmp_path / "mine.txt"
    path.unlink(missing_ok=True)
    match kind:
        case "link":
            path.symlink_to(mine)
        case "dangling":
            path.symlink_to(tmp_path / "new.txt")
        case "pipe":
            os.mkfifo(path)
    try:
        writers(run)[place](path)
    except (OSError, RunFailed) as error:
        assert str(path) in str(error)
    else:
        # metrics.jsonl is written anew beside it, and renamed.
        assert place == "metrics.jsonl" and stat.S_ISREG(path.lstat().st_mode)
    assert mine.read_text() == "mine" and not (tmp_path / "new.txt").exists()


@pytest.mark.parametrize(
    ("harm", "said", "kept"),
    [
        (lambda path: os.truncate(path, 0), "was cut short", (3, 4)),
        (os.unlink, "was removed or replaced", (1, 2, 3, 4)),
        (lambda path: replace_file(path, "{}\n"), "was removed or replaced", (1, 2, 3, 4)),
    ],
)
def test_metrics_that_are_emptied_removed_or_replaced_are_noticed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], harm: Any, said: str, kept: tuple[int, ...]
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2, 3, 4):
        if step == 3:
            assert "warning" not in capfd.readouterr().err
            harm(path)
        file.write({"step": step})
    file.close()
    assert capfd.readouterr().err.count(f"metrics.jsonl: {said} while the run trains") == 1
    assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in kept)


@needs_root
def test_a_file_of_another_user_is_neither_emptied_nor_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.log"
    path.write_text("theirs")
    give_away(path)
    with pytest.raises(OSError, match="belongs to another user"):
        open_own(path)
    with pytest.raises(OSError, match="belongs to another user"):
        append_json_line(path, {})
    assert path.read_text() == "theirs"


@needs_root
def test_what_is_read_to_be_executed_is_checked_when_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text("{}")
    assert read_trusted(path) == "{}"
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="everybody may write"):
        read_trusted(path)
    path.chmod(0o644)
    give_away(path)
    with pytest.raises(ConfigError, match="another user"):
        read_trusted(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        read_trusted(tmp_path / "link")


# ---- what a process looks for in its working directory -------------------------------------------
def planted(folder: Path) -> Path:
    """A working directory in which somebody left modules of common names."""
    folder.mkdir()
    for name in ("typer", "tomli_w", "pydantic"):
        (folder / f"{name}.py").write_text("import os; os._exit(99)\n")
    return folder


def test_a_module_in_the_working_directory_is_not_imported_by_a_job(tmp_path: Path) -> None:
    folder = planted(tmp_path / "work")
    command = (sys.executable, "-m", "pretrain.launcher", "--help")
    script = make_job(CPU, directory=folder, commands=(command,)).script()
    unsafe = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert unsafe.returncode == 99
    for path in ("", f":{os.environ.get('PYTHONPATH', '')}:"):
        # As sbatch gets it, with the empty entries that PYTHONPATH=$PYTHONPATH:... leaves.
        environment = {**slurm.slurm_environment(), **({"PYTHONPATH": path} if path else {})}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", environment)
            environment = slurm.slurm_environment()
        done = subprocess.run(
            ["bash", "-s"], input=script, text=True, env=environment, capture_output=True
        )
        assert done.returncode == 0 and "sweep" in done.stdout, done.stderr


# ---- compiled code -------------------------------------------------------------------------------
def test_scratch_is_a_folder_of_this_user_s_own(tmp_path: Path) -> None:
    command = ("sh", "-c", 'echo "$TMPDIR $TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR"')
    shared = tmp_path / "scratch"
    shared.mkdir(mode=0o777)
    shared.chmod(0o1777)
    job = make_job(CPU | {"scratch": str(shared)}, commands=(command,), directory=tmp_path)
    own = shared / f"pretrain-{os.getuid()}"

    def ran() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-s"], input=job.script(), text=True, capture_output=True)

    done = ran()
    assert done.stdout.split() == [str(own), f"{own}/triton", f"{own}/torchinductor"]
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o777)
    assert ran().returncode == 0 and stat.S_IMODE(own.stat().st_mode) == 0o700
    if os.geteuid() == 0:
        give_away(own)
        done = ran()
        assert done.returncode == 2 and f"{own}: is not yours" in done.stderr and not done.stdout
    shutil.rmtree(own)
    own.symlink_to(tmp_path)
    assert ran().returncode == 2


def test_a_rank_makes_its_caches_and_refuses_those_of_others(tmp_path: Path) -> None:
    def ran(**variables: object) -> str:
        def made() -> str:
            for name in [name for name in os.environ if "CACHE_DIR" in name]:
                del os.environ[name]
            os.environ.update({name: str(value) for name, value in variables.items()})
            # A library may ask for it when it is imported, while the directory is missing.
            tempfile.tempdir = None
            tempfile.gettempdir()
            platform.make_caches_private()
            return f"{os.environ['TORCHINDUCTOR_CACHE_DIR']} {tempfile.gettempdir()}"

        return in_a_fork(made)

    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    own = shared / "pretrain-0"
    done = ran(TMPDIR=own, TRITON_CACHE_DIR=own / "triton")
    assert done.split() == [f"{own}/torchinductor_{os.getuid()}", str(own)]
    assert {stat.S_IMODE(p.stat().st_mode) for p in (own, *own.iterdir())} == {0o700}
    # The default in a shared /tmp, which another user has made first.
    default = shared / f"torchinductor_{os.getuid()}"
    default.mkdir()
    default.chmod(0o777)
    assert f"ConfigError: {default}: everybody may write to it" in ran(TMPDIR=shared)
    if os.geteuid() == 0:
        default.chmod(0o755)
        give_away(default)
        assert f"{default}: belongs to another user" in ran(TMPDIR=shared)
        give_away(own)
        done = ran(TMPDIR=own, TRITON_CACHE_DIR=own / "triton")
        assert f"{own}: belongs to another user" in done


# ---- what is renamed while it is used ------------------------------------------------------------
def as_user(user: int, do: Callable[[], object]) -> str:
    """Do something as another user in a forked process, and return the error that it ends with."""

    def done() -> None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        do()

    return in_a_fork(done)


def in_a_fork(do: Callable[[], object]) -> str:
    """Do something in a forked process; return its result, or the error that it ends with."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            said = str(do() or "")
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as file:
        return file.read()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which every user may rename what lies there."""
    with tempfile.TemporaryDirectory(prefix="open-", dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)


@needs_root
@pytest.mark.parametrize("mode", [0o1733, 0o711, 0o700])
def test_a_run_may_lie_in_a_folder_that_may_be_entered_and_not_listed(
    open_folder: Path, mode: int
) -> None:
    run = open_folder / "run"
    run.mkdir()
    give_away(run)
    open_folder.chmod(mode)
    said = as_user(STRANGER, lambda: Attempt.begin(run).end("finished", 0, "done", 9))
    if mode == 0o700:
        assert f"{run}" in said and "ermission denied" in said and "/proc" not in said
        return
    assert said == "" and (run / "run.json").is_file()
    if mode & 0o002:
        # Also what is published there by a rename, as a data set.
        made = new_directory(open_folder / "data")
        assert as_user(STRANGER, lambda: (made.__enter__(), made.__exit__(None, None, None))) == ""
        assert (open_folder / "data").is_dir()


@needs_root
def test_a_file_is_read_from_what_was_checked_though_it_is_renamed(tmp_path: Path) -> None:
    folder, path = tmp_path / "launch", tmp_path / "launch/launch.json"
    folder.mkdir()
    path.write_text("mine")
    swapped = []

    def swap(where: Path, found: os.stat_result, descriptor: int) -> None:
        if where == folder and not swapped:
            folder.rename(tmp_path / "gone")
            folder.mkdir()
            path.write_text("theirs")
            swapped.append(where)

    with open(open_by_steps(path, swap)) as file:
        assert file.read() == "mine" and swapped


# ---- links in another user's run -----------------------------------------------------------------
@needs_root
@pytest.mark.parametrize("linked", ["logs/attempt-0001.log", "logs", "."])
def test_the_log_of_another_user_s_run_leads_to_no_file_of_mine(
    run: Path, tmp_path: Path, linked: str, capfd: pytest.CaptureFixture[str]
) -> None:
    paths, mine = RunPaths(run), tmp_path / "home"
    mine.mkdir()
    for name in ("attempt-0001.log", "rank-0.log"):
        (mine / name).write_text("my secret\n")
    for name in ("rank-0.log", "attempt-0001.log"):
        place = paths.logs / name if linked.endswith(".log") else paths.logs
        if linked != "." and not place.is_symlink():
            if place.is_dir():
                shutil.rmtree(place)
            place.symlink_to(mine / name if linked.endswith(".log") else mine)
    if linked == ".":
        shutil.rmtree(paths.logs)
        paths.logs.symlink_to("../../home")
    for path in (run, *run.rglob("*")):
        give_away(path)
    with contextlib.suppress(ConfigError):
        control.print_log(run, None, following=False)
    out = capfd.readouterr()
    assert "secret" not in out.out + out.err


def test_nothing_that_others_could_have_written_is_unpickled() -> None:
    word = re.compile(r"^\s*(import|from) (pickle|joblib|dill)|_object(_list)?\(|allow_pickle=True")
    for folder in ("pretrain", "launcher", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text().splitlines():
                assert not re.search(r"dist\.\w+_object", line) and not word.match(line), path
                assert "torch.load(" not in line or "weights_only=True" in line, path

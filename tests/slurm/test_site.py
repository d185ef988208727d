"""Check on a real Slurm what a site and a user may ask for beside the launcher's own options.

The ranks' Python is a script, as in test_submit.py; all before it is real.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pretrain.rundir.checkpoints import checkpoint_directory
from tests.end_to_end.commands import explained, sets, succeeded
from tests.slurm.cluster import Cluster, pyxis_options
from tests.slurm.runs import AS_AGENT, write_configs
from tests.slurm.test_submit import DEMO, Desk, desk, files, nothing_starts

__all__ = ["desk"]
CHANGES = {"JobId", "SubmitTime", "EligibleTime", "AccrueTime", "LastSchedEval", "Priority"}
CHANGES |= {"StartTime", "EndTime", "Command", "ArrayJobId", "Reason"}
"""Fields of a job that tell when and from which file it was sent."""
SHAPES = {
    "ARRAY_INX": "0-2",
    "EXPORT": "NONE",
    "GPUS": "1",
    "JOB_NAME": "other",
    "MEM_PER_NODE": "9",
    "NO_REQUEUE": "1",
    "OUTPUT": "out",
    "SIGNAL": "USR2@9",
    "TIMELIMIT": "9",
}
"""Some of the variables SBATCH_... that change a job's shape, each with such a value."""


def described(cluster: Cluster, job_id: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`, with JOB for its id in names of logs."""
    fields: dict[str, str] = {}
    for line in cluster.run("scontrol", "show", "job", job_id).stdout.splitlines():
        # A value may have blanks; a field begins with a word and "=" behind a blank.
        for name, value in re.findall(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|$)", line):
            # scontrol shows the id also for the %j of "%%j", which is a plain "%j" to slurmd.
            for mark in ("slurm-", "%"):
                value = value.replace(f"{mark}{job_id}", f"{mark}JOB")
            fields[name] = value.strip()
    return {name: value for name, value in fields.items() if name not in CHANGES}


# ---- the script with its options -----------------------------------------------------------------
def test_sending_the_script_by_hand_sends_the_same_job(
    cluster: Cluster, desk: Desk, tmp_path: Path
) -> None:
    """Whatever its names; from another directory; whether or not it is an array."""
    comment = "a\"b 'c' \\d \\\\ %j #x $(touch canary) `e` = : é"
    desk.site(
        gpus_per_node=2,
        tasks_per_node=2,
        cpus_per_node=4,
        memory_per_node="1G",
        account="'; touch canary; '",
        sbatch_arguments=[f"--comment={comment}", "--exclude=n3"],
    )
    names = ["a b's \"c %j %A %% 100%", "@OPTIONS@ é # $(touch canary)"]
    with nothing_starts(cluster):
        for name in [*names, "sweep"]:
            if name == "sweep":
                configs = write_configs(desk.work, DEMO, {name: "", "sweep-2": ""})
                words = [*configs, *sets("data.directory=data", "batch.micro_batch_size=8")]
                done = desk.launcher("sweep", "--site", desk.work / "site.toml", *words)
            else:
                done = desk.submit(name, "--set", "batch.micro_batch_size=8")
            assert done.code == 0, done.text
            script = desk.work / name / "launch/train.sbatch"
            sent = cluster.run("sbatch", "--parsable", script, cwd=tmp_path)
            assert sent.returncode == 0, sent.stderr
            [ours], theirs = desk.job_ids(name), sent.stdout.strip()
            first, second = described(cluster, ours.split("_")[0]), described(cluster, theirs)
            if name == "sweep":
                assert second["ArrayTaskId"] == "0-1%2" and "-%A_%a.log" in script.read_text()
                # The record of one task has these of its own.
                for field in ("ArrayTaskId", "JobName", "StdOut", "StdErr"):
                    first.pop(field), second.pop(field)
            assert first == second
            assert first["WorkDir"] == str(desk.work) and "--exclude" not in first
            assert first["ExcNodeList"] == "n3" and first["Comment"] == comment, first
    assert not list(desk.work.rglob("canary")) and not (tmp_path / "canary").exists()


# ---- inherited variables -------------------------------------------------------------------------
def test_inherited_variables_do_not_change_the_shape_of_a_job(cluster: Cluster, desk: Desk) -> None:
    desk.site(environment={}, time_limit="30")
    with nothing_starts(cluster):
        clean = desk.submit("one")
        shaped = desk.submit("two", **{f"SBATCH_{name}": value for name, value in SHAPES.items()})
        assert clean.code == 0 and shaped.code == 0, shaped.text
        one, two = (described(cluster, *desk.job_ids(name)) for name in ("one", "two"))
        assert {k: v.replace("two", "one") for k, v in two.items()} == one
    desk.wait_until_over(*desk.job_ids("two"))
    variables = dict(
        line.split("=", 1) for line in desk.noted(desk.job_ids("two")[0], "environment")[0]
    )
    assert not [name for name in variables if name.startswith("SBATCH_")]


def test_inherited_variables_of_the_place_stand_in_for_what_the_site_leaves_out(
    cluster: Cluster, desk: Desk
) -> None:
    site = desk.work / "site.toml"
    desk.site()
    assert desk.submit("run", "--dry-run", SBATCH_PARTITION="elsewhere").code == 0
    site.write_text(site.read_text().replace('partition = "main"\n', ""))
    place = {"SBATCH_PARTITION": "elsewhere", "SBATCH_ACCOUNT": "theirs"}
    explained(desk.submit("run", **place), 1, "invalid partition specified: elsewhere")
    with nothing_starts(cluster):
        assert desk.submit("run", "--partition", "main", **place).code == 0
        fields = cluster.job(*desk.job_ids("run"))
        assert (fields["Partition"], fields["Account"]) == ("main", "theirs")


# ---- what Slurm is asked before ------------------------------------------------------------------
def test_what_slurm_could_never_start_is_refused(cluster: Cluster, desk: Desk) -> None:
    """sbatch itself takes each of these."""
    before = files(desk.work) | {"site.toml", "s1.toml", "s2.toml"}
    desk.site(nodes=99)
    configs = write_configs(desk.work, DEMO, {"s1": "", "s2": ""})
    sweep = ["sweep", *configs, "--site", "site.toml", *sets("data.directory=data"), "--nodes", 32]
    small = ["--set", "batch.micro_batch_size=1"]
    for refused in (desk.submit("run", "--nodes", 32, *small), desk.launcher(*sweep, *small)):
        explained(refused, 1, "sbatch: allocation failure", "not available")
    assert files(desk.work) == before


# ---- options of the commands ---------------------------------------------------------------------
def test_options_of_sbatch_are_passed_on_or_refused(cluster: Cluster, desk: Desk) -> None:
    desk.site(sbatch_arguments=["--exclude=n1", "--nice=3"])
    options = ["--sbatch", "exclude=n2,n3", "--sbatch", "--exclusive"]
    options += ["--qos", "fast", "--account", "a b", "--sbatch", "comment=x y", "--partition"]
    shown = succeeded(
        desk.submit("run", *options, "main", "--dependency", "singleton", "--dry-run")
    )
    [sent] = [line for line in shown.out.splitlines() if line.startswith("sbatch ")]
    assert shlex.split(sent)[1:3] == ["--dependency=singleton", "--kill-on-invalid-dep=yes"]
    assert "--exclude=n1" not in sent
    wanted = "--qos=fast --nice=3 --exclude=n2,n3 --exclusive"
    assert all(f" {word} " in sent for word in wanted.split())
    assert "'--account=a b'" in sent and "'--comment=x y'" in sent
    with nothing_starts(cluster):
        assert desk.submit("run", *options, "main").code == 0
        fields = described(cluster, *desk.job_ids("run"))
        assert fields["ExcNodeList"] == "n[2-3]" and fields["OverSubscribe"] == "NO"
    explained(desk.submit("other", "--sbatch", "nodes=1-4"), 2, "sets this option")
    explained(desk.submit("other", "--sbatch", "het-group=1"), 1, "unrecognized option")
    explained(desk.submit("other", "--dependency", "never:1"), 1, "ependency")
    explained(desk.submit("other", "--dependency", ""), 2, "--dependency: is empty")
    assert not (desk.work / "other").exists()


# ---- containers ----------------------------------------------------------------------------------
INSIDE = (
    f"#!/bin/sh\n{AS_AGENT}"
    + """\
grep -q pytorch /etc/os-release && INSIDE=yes
echo "$INSIDE $PWD $*" >> "$NOTES/inside"
for last; do :; done
case "$*" in *" evaluate "*) mkdir -p "$(dirname "$last")" ;; esac
"""
)


@pytest.mark.parametrize("way", ["pyxis", "container"])
def test_all_that_runs_where_the_ranks_run_is_in_the_container(
    cluster: Cluster, desk: Desk, tmp_path: Path, way: str
) -> None:
    """Ranks, the evaluation of a checkpoint, its report, and a task of a build."""
    if way == "pyxis" and cluster.without_pyxis:
        pytest.skip(f"no pyxis here: {cluster.without_pyxis}")
    desk.python.write_text(INSIDE)
    if way == "pyxis":
        # Without the directory to start in, which the launcher knows.
        image = [word for word in pyxis_options(tmp_path) if "workdir" not in word]
        desk.site(srun_arguments=image)
    else:
        desk.site(container=["env", "INSIDE=yes"])
    assert desk.submit("run").code == 0
    checkpoint = checkpoint_directory(desk.work / "run", 1)
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    desk.wait_until_over(*desk.job_ids("run"))
    succeeded(desk.launcher("evaluate-checkpoints", "run", "--site", "site.toml"))
    desk.wait_until_over(*desk.job_ids("run"))
    lines = (desk.notes / "inside").read_text().splitlines()
    said = {word for line in lines for word in line.split() if word in KINDS}
    assert said == set(KINDS), (lines, [p.read_text() for p in desk.work.rglob("*.log")])
    assert {tuple(line.split()[:2]) for line in lines} == {("yes", str(desk.work))}, lines


KINDS = ("train", "evaluate", "report")

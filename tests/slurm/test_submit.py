"""Check `launcher submit` and `launcher sweep` on a real Slurm.

What is requested from Slurm, what is refused before that, and names and values that try to break
out of quoting. The ranks' Python is a script that notes how it was started; all before it is real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from pretrain.config import dump_config, load_config
from pretrain.launcher import slurm
from pretrain.rundir.attempts import Attempt
from pretrain.rundir.jobs import JobRecord, append_job, read_jobs
from tests.end_to_end.commands import (
    ROOT,
    Done,
    executable,
    explained,
    launcher,
    sets,
    succeeded,
    wait_for,
)
from tests.slurm.cluster import Cluster
from tests.slurm.runs import AS_AGENT, with_scripted_ranks, write_configs, write_site

DEMO = ROOT / "configs/demo.toml"
PAPER = ROOT / "configs/cc100_roberta/alibi_1024.toml"
NUM_STEPS = 320
"""Steps of configs/demo.toml."""
SECRET = "0123456789abcdef0123456789abcdef01234567"
# Runs as the ranks' Python. Writes its working directory, arguments and environment, with a NUL
# after each. The exit code is that of wrong input, after which no attempt follows.
NOTES = (
    f"#!/bin/sh\n{AS_AGENT}"
    + """\
{ pwd | tr '\\n' '\\0'; printf '%s\\0' "$@"; } > "$NOTES/$SLURM_JOB_ID.$SLURM_PROCID.arguments"
env -0 > "$NOTES/$SLURM_JOB_ID.$SLURM_PROCID.environment"
umask > "$NOTES/$SLURM_JOB_ID.$SLURM_PROCID.umask"
exit 2
"""
)


class Desk:
    """A user's directory on the login node, with built data, and a home that has to stay empty."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.work, self.home, self.notes = folder / "work", folder / "home", folder / "notes"
        for path in (self.work, self.home, self.notes):
            path.mkdir()
        self.python = executable(folder / "python", NOTES)
        self.build_data("data")

    def build_data(self, name: str) -> None:
        for split in ("train", "validation"):
            (self.work / name / split).mkdir(parents=True)
            (self.work / name / split / "manifest.json").touch()

    def site(self, name: str = "site.toml", **values: Any) -> Path:
        values = {"nodes": 2, "python": str(self.python)} | values
        values["environment"] = {"NOTES": str(self.notes)} | values.get("environment", {})
        return write_site(self.work / name, **values)

    def launcher(self, *words: object, **environment: str) -> Done:
        """Run `launcher` as a user does, in this directory."""
        variables = os.environ | self.cluster.environment | {"HOME": str(self.home), **environment}
        return launcher(with_scripted_ranks(words), self.work, variables)

    def submit(self, run: str, *words: object, data: str = "data", **environment: str) -> Done:
        return self.launcher(
            *("submit", DEMO, "--site", self.work / "site.toml"),
            *sets(f"run.directory={quoted(run)}", f"data.directory={quoted(data)}"),
            *words,
            **environment,
        )

    def wait_until_over(self, *ids: str) -> None:
        def is_over() -> bool:
            states = self.cluster.run(
                "squeue", "--noheader", "--array", f"--jobs={','.join(ids)}", "--format=%T"
            ).stdout
            return states.strip() == ""

        wait_for(is_over)

    def noted(self, job_id: str, what: str = "arguments") -> dict[int, list[str]]:
        """Return what each rank of a job has noted."""
        files = self.notes.glob(f"{job_id}.*.{what}")
        return {
            int(path.suffixes[-2][1:]): path.read_bytes().decode().split("\0")[:-1]
            for path in files
        }

    def job_ids(self, run: str | Path) -> list[str]:
        return [job.job_id for job in read_jobs(self.work / run)]


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path, here: None) -> Desk:
    return Desk(cluster, tmp_path)


@contextmanager
def nothing_starts(cluster: Cluster) -> Iterator[None]:
    """Keep jobs in the queue: those of a partition that is down stay pending."""
    change = ("scontrol", "update", "PartitionName=main")
    done = cluster.run(*change, "State=DOWN")
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        cluster.run(*change, "State=UP")


def quoted(text: str) -> str:
    return tomli_w.dumps({"x": text}).removeprefix("x = ").strip()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def all_jobs(cluster: Cluster) -> list[str]:
    return sorted(
        cluster.run("squeue", "--noheader", "--array", "--states=all", "--format=%i").stdout.split()
    )


# ---- proof 5: the paper's run ----
def test_the_paper_s_run_fits_its_site_exactly(cluster: Cluster, desk: Desk) -> None:
    """Use the V100 site as shipped, with the cores and memory of the tests' nodes."""
    site = tomllib.loads((ROOT / "slurm/site.v100.toml").read_text()) | {
        "cpus_per_node": cluster.cpus,
        "memory_per_node": "48G",
    }
    (desk.work / "v100.toml").write_text(tomli_w.dumps(site))
    before, jobs = files(desk.work), all_jobs(cluster)
    done = succeeded(desk.launcher("submit", PAPER, "--site", "v100.toml", "--dry-run"))
    assert "16 nodes x 8 ranks = tensor 1 x pipeline 1 x data 128, 8 micro batches of 2" in done.out
    assert (
        "#!/bin/bash" in done.out
        and "\nsbatch --requeue --job-name=cc100_roberta.alibi_1024 " in done.out
    )
    said = done.out.rsplit("# sbatch --test-only: ", 1)[1]
    assert "to start at" in said and "on nodes n[1-16] in partition main" in said
    assert "no built data set" in done.err
    more = desk.launcher("submit", PAPER, "--site", "v100.toml", "--nodes", 17)
    explained(more, 2, "nodes = 17", "site v100 has 16")
    explained(desk.launcher("submit", PAPER, "--site", "v100.toml"), 2, "pretrain data build")
    # Slurm may have forgotten jobs of earlier tests meanwhile.
    assert files(desk.work) == before and set(all_jobs(cluster)) <= set(jobs)


# ---- what is submitted ----
def test_every_rank_is_a_task_of_its_own_with_the_node_s_gpus(cluster: Cluster, desk: Desk) -> None:
    desk.site(gpus_per_node=2, tasks_per_node=2, cpus_per_node=4, environment={"COLOUR": "blue"})
    allowed = ["--allow-changed", "optimizer.learning_rate", "--allow-changed", "data.directory"]
    done = succeeded(
        desk.submit(
            "runs/one",
            "--nodes",
            2,
            "--set",
            "batch.micro_batch_size=8",
            *allowed,
            WANDB_API_KEY=SECRET,
            RANK="7",
            SLURM_MEM_PER_CPU="1",
        )
    )
    [job_id] = desk.job_ids("runs/one")
    assert f"job {job_id}: " in done.out and "launcher status runs/one" in done.out
    fields = cluster.job(job_id)
    wanted = {
        "JobName": "runs.one",
        "NumTasks": "4",
        "CPUs/Task": "2",
        "Requeue": "1",
        "TimeLimit": "00:30:00",
    }
    assert {name: fields[name] for name in wanted} == wanted
    desk.wait_until_over(job_id)
    run = desk.work / "runs/one"
    started, environments = desk.noted(job_id), desk.noted(job_id, "environment")
    assert sorted(started) == [0, 1, 2, 3]
    command = [str(desk.work), "-m", "pretrain", "train", str(run / "launch/config.toml")]
    command += allowed
    assert all(words == command for words in started.values())
    for rank, lines in environments.items():
        variables = dict(line.split("=", 1) for line in lines)
        assert (
            variables["SLURM_LOCALID"] == str(rank % 2)
            and variables["CUDA_VISIBLE_DEVICES"] == "0,1"
        )
        assert (
            variables["OMP_NUM_THREADS"] == "2"
            and variables["COLOUR"] == "blue"
            and "RANK" not in variables
        )
        # Inherited by the ranks, but written nowhere, as the following lines check.
        assert variables["WANDB_API_KEY"] == SECRET
    holders = [
        path
        for folder in (run, desk.home)
        for path in folder.rglob("*")
        if path.is_file() and SECRET in path.read_text()
    ]
    assert holders == [] and (run / "launch/train.sbatch").is_file()
    assert {path.read_text() for path in desk.notes.glob("*.umask")} == {"0027\n"}
    assert not any(path.stat().st_mode & 0o007 for path in [run, *run.rglob("*")])
    # A later start is allowed the same, and says that the clone has changed since.
    record = json.loads((run / "launch/launch.json").read_text())
    (run / "launch/launch.json").write_text(json.dumps(record | {"commit": "0123" * 10}))
    desk.wait_until_over(
        succeeded(desk.launcher("requeue", run)).out.split("job ")[-1].split(";")[0]
    )
    assert all(words == command for words in desk.noted(desk.job_ids("runs/one")[-1]).values())
    log = run / f"logs/slurm-{desk.job_ids('runs/one')[-1]}.log"
    assert "submitted from commit 012301230123" in log.read_text()


def test_a_run_is_trained_by_one_job_at_a_time_and_keeps_what_was_sent(
    cluster: Cluster, desk: Desk
) -> None:
    desk.site()
    with nothing_starts(cluster):
        assert desk.submit("run").code == 0
        [job_id] = desk.job_ids("run")
        sent = {path: path.read_text() for path in (desk.work / "run/launch").iterdir()}
        explained(
            desk.submit("run", "--set", "train.num_steps=70"),
            2,
            f"job {job_id} (PENDING)",
            "launcher cancel",
        )
        assert sent == {path: path.read_text() for path in (desk.work / "run/launch").iterdir()}
        config = load_config(desk.work / "run/launch/config.toml")
        assert (config.run.directory, config.train.num_steps) == ("run", NUM_STEPS)
        cluster.run("scancel", *desk.job_ids("run"))
    desk.wait_until_over(job_id)
    assert slurm.is_over(job_id) is True
    succeeded(desk.submit("run", "--set", "train.num_steps=70"))
    assert load_config(desk.work / "run/launch/config.toml").train.num_steps == 70
    desk.wait_until_over(desk.job_ids("run")[1])
    # What sbatch refuses after its test leaves what `launcher requeue` would submit.
    sent = {path: path.read_text() for path in (desk.work / "run/launch").iterdir()}
    real = shutil.which("sbatch", path=cluster.environment["PATH"])
    refuses = f'#!/bin/bash\n[[ "$*" == *--test-only* ]] && exec {real} "$@"\nexit 1\n'
    executable(desk.home / "sbatch", refuses)
    path = f"{desk.home}:{cluster.environment['PATH']}"
    explained(desk.submit("run", "--set", "train.num_steps=80", PATH=path), 1, "sbatch")
    assert sent == {path: path.read_text() for path in (desk.work / "run/launch").iterdir()}


def test_what_slurm_refuses_leaves_no_trace(desk: Desk) -> None:
    desk.site(partition="elsewhere")
    before = files(desk.work)
    explained(desk.submit("new/run"), 1, "sbatch", "invalid partition")
    assert files(desk.work) == before
    explained(desk.submit("new/run", "--dry-run"), 1, "sbatch", "invalid partition")
    explained(desk.submit("new/run", "--time", "2"), 2, "time limit 2", "--time", "--save-before")
    assert (
        "--signal=USR1@30 "
        in desk.submit("new/run", "--time", "2", "--save-before", 30, "--dry-run").out
    )
    assert files(desk.work) == before


def test_while_slurmctld_is_away_nothing_is_sent_or_written(
    cluster: Cluster, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.site()
    # This slurm.conf names a port on which nobody listens.
    conf = Path(cluster.environment["SLURM_CONF"]).read_text()
    conf = re.sub(
        r"MessageTimeout=\d+",
        "MessageTimeout=1",
        re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", conf),
    )
    (tmp_path / "slurm.conf").write_text(conf)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    before = files(desk.work)
    assert slurm.job("1") is None and slurm.is_over("1") is None
    away = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    explained(desk.submit("run", **away), 1, "sbatch", "Nothing was submitted")
    # A dry run shows the job all the same, also of a run that had one.
    (desk.work / "had").mkdir()
    append_job(desk.work / "had", JobRecord("9", "train", "x", 1.0, "s", 1, 1, "/r"))
    for name in ("run", "had"):
        shown = desk.submit(name, "--dry-run", **away)
        assert shown.code == 0 and "test-only: not asked: sbatch: " in shown.out, shown.text
    shutil.rmtree(desk.work / "had")
    assert files(desk.work) == before


def test_without_slurm_a_dry_run_still_shows_the_job(desk: Desk) -> None:
    desk.site()
    done = desk.submit("run", "--dry-run", PATH="/nowhere")
    assert (
        done.code == 0 and "exec " in done.out and "not asked: sbatch: no such command" in done.out
    )
    explained(desk.submit("run", PATH="/nowhere"), 2, "sbatch: no such command", "launcher local")


# ---- sweeps ----
def test_a_sweep_is_an_array_of_runs_with_names_and_a_limit(cluster: Cluster, desk: Desk) -> None:
    site = desk.site()
    names = ["sw/alibi-64", "sw/alibi-128", "sw/rotary-64", "sw/rotary-128"]
    own = 'position.method = "{}"\ndata.sequence_length = {}'
    runs = {name: own.format(*name.removeprefix("sw/").split("-")) for name in names}
    configs = write_configs(desk.work, DEMO, runs)
    finished = Attempt.begin(desk.work / "sw/rotary-64")
    for phase in ("training", "ending"):
        finished.phase(phase, NUM_STEPS)
    finished.end("finished", 0, "all steps done", NUM_STEPS)
    (finished.directory.parents[1] / "config.toml").write_text(dump_config(load_config(configs[2])))
    words = ["sweep", *configs, "--site", site, *sets("data.directory=data")]
    before = files(desk.work)
    shown = desk.launcher(*words, "--concurrent", 1, "--dry-run")
    assert shown.code == 0 and "--array=0-2%1 " in shown.out and "to start at" in shown.out, (
        shown.text
    )
    assert files(desk.work) == before
    [two] = write_configs(desk.work, DEMO, {"sw/two": "parallel.world_size = 2"})
    explained(desk.launcher(*words, two), 2, "1 x 1 and 2 x 1")
    assert not (desk.work / "sw/two").exists()
    with nothing_starts(cluster):
        done = desk.launcher(*words, "--concurrent", 1)
        assert done.code == 0 and "sw/rotary-64: finished, left out" in done.out, done.text
        names.remove("sw/rotary-64")
        ids = [id for name in names for id in desk.job_ids(name)]
        assert [id.split("_")[1] for id in ids] == ["0", "1", "2"]
        # The tasks of an array have one name. The command says which of them trains which run.
        assert {cluster.job(id)["JobName"] for id in ids} == {"work.sw"}
        assert all(f"job {id}: {name}\n" in done.out for id, name in zip(ids, names))
        again = desk.launcher(*words)
        assert again.code == 0 and again.out.splitlines() == [
            f"sw/alibi-64: job {ids[0]} (PENDING) trains it, left out",
            f"sw/alibi-128: job {ids[1]} (PENDING) trains it, left out",
            "sw/rotary-64: finished, left out",
            f"sw/rotary-128: job {ids[2]} (PENDING) trains it, left out",
        ], again.text
    desk.wait_until_over(*ids)
    trained = {path.read_text().split("\0")[4] for path in desk.notes.glob("*.arguments")}
    assert trained == {str(desk.work / f"{name}/launch/config.toml") for name in names}
    for name in names:
        config = load_config(desk.work / f"{name}/launch/config.toml")
        assert f"sw/{config.position.method}-{config.data.sequence_length}" == name
        assert config.run.directory == name
    assert not (finished.directory.parents[1] / "launch").exists()
    assert all(
        (desk.work / f"{name}/logs/slurm-{id}.log").is_file() for name, id in zip(names, ids)
    )


# ---- proof 7: hostile names and values ----
RUN_AS_THEY_ARE = [
    "a b's \"c %j %A %% 100% `touch canary`",
    # No names of variables.
    "$(touch canary) $1 ${x $- x && touch canary | touch canary; > canary",
    "-dash --wrap=touch canary",
    "a,b=c *?[a-z] ~ !! #x {a,b} @COMMAND@ {job} é 名 " + "long " * 20,
]
# The variable in the last one is not set.
REFUSED_NAMES = ["new\nline", "\x1b[31mred", "back\\slash", "$HOME ${IFS}x"]
VALUES = {
    "A": "$(touch canary)",
    "B": "`touch canary`",
    "C": "'; touch canary; '",
    "D": '"; touch canary; "',
    "E": "two\nlines",
    "F": "${HOME}\\",
    "G": "@SETUP@ %j",
    "H": " \t*",
    "I": "é\u202e",
}
REFUSED_BY_SLURM: list[dict[str, Any]] = [
    {"partition": "main; touch canary"},
    {"constraint": "$(touch canary)"},
    {"sbatch_arguments": ["--no-such-option=`id`"]},
]


def test_hostile_directories_are_used_exactly_or_refused(desk: Desk) -> None:
    hostile = "$(touch canary)"
    desk.build_data(hostile + " data")
    site, config = desk.site(f"a {hostile}.toml"), desk.work / "-c `touch canary`.toml"
    config.write_text(DEMO.read_text())
    for name in RUN_AS_THEY_ARE:
        settings = [f"run.directory={quoted(name)}", f"data.directory={quoted(hostile + ' data')}"]
        settings.append(f"logging.wandb_project={hostile}")
        words = ("submit", "--site", site, *sets(*settings))
        done = desk.launcher(*words, "--", config.name)
        assert done.code == 0, (name, done.text)
    for wrong in (["--time", "1; touch canary"], ["--set", "$(touch canary)=1"]):
        refused = desk.launcher(*words, *wrong, "--", config.name)
        assert refused.code == 2 and "Traceback" not in refused.text and refused.err.strip()
    desk.site()
    top = {"data", "site.toml", site.name, config.name, hostile + " data", *RUN_AS_THEY_ARE}
    assert {path.name for path in desk.work.iterdir()} == top
    for name in REFUSED_NAMES:
        explained(desk.submit(name), 2, "run.directory = ")
    ids = {name: desk.job_ids(name)[0] for name in RUN_AS_THEY_ARE}
    desk.wait_until_over(*ids.values())
    for name, job_id in ids.items():
        run = desk.work / name
        assert (run / f"logs/slurm-{job_id}.log").is_file(), name
        resolved = run / "launch/config.toml"
        assert desk.noted(job_id) == {
            0: [str(desk.work), "-m", "pretrain", "train", str(resolved)]
        }, name
        assert load_config(resolved).run.directory == name
        assert load_config(resolved).logging.wandb_project == hostile
    assert {path.name for path in desk.work.iterdir()} == top and list(desk.home.iterdir()) == []
    assert not [path for path in desk.work.rglob("*") if path.name == "canary"]


def test_hostile_values_of_a_site_are_passed_exactly_or_refused(
    cluster: Cluster, desk: Desk
) -> None:
    contained = "$(touch canary) '\"\\"
    desk.site(
        environment=VALUES,
        account="'; touch canary; '",
        container=["env", f"INSIDE={contained}"],
        scratch="/tmp/$(touch canary)",
    )
    assert (done := desk.submit("run")).code == 0, done.text
    [job_id] = desk.job_ids("run")
    desk.wait_until_over(job_id)
    variables = dict(line.split("=", 1) for line in desk.noted(job_id, "environment")[0])
    assert VALUES | {
        "INSIDE": contained,
        "TMPDIR": f"/tmp/$(touch canary)/pretrain-{os.getuid()}",
    } == {name: variables[name] for name in [*VALUES, "INSIDE", "TMPDIR"]}
    assert (
        "Account='; touch canary; ' "
        in cluster.run("scontrol", "--oneliner", "show", "job", job_id).stdout
    )
    before = files(desk.work)
    # tests/unit/test_site.py has what the launcher refuses.
    for values in REFUSED_BY_SLURM:
        desk.site(**values)
        explained(desk.submit("other"), 1)
        assert files(desk.work) == before, values
    # There is no such module, so the job ends where it loads it.
    desk.site(modules=["x; touch canary"])
    assert desk.submit("modules").code == 0
    desk.wait_until_over(*desk.job_ids("modules"))
    assert (
        cluster.job(desk.job_ids("modules")[0])["JobState"] == "FAILED"
        and desk.noted(desk.job_ids("modules")[0]) == {}
    )
    assert not [
        path for path in [*desk.work.rglob("*"), *desk.home.rglob("*")] if path.name == "canary"
    ]

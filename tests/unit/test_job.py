"""Test jobs before they are submitted.

Tested are sbatch's arguments, the script as bash runs it, what is refused, and jobs.jsonl.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import tomli_w

from pretrain.config import ConfigError, RunFailed, dump_config, load_config
from pretrain.launcher.cli import app as launcher
from pretrain.launcher.site import SlurmRequest, parse_site
from pretrain.launcher.slurm_job import OUR_OPTIONS, Job
from pretrain.launcher.submit import (
    TrainingRun,
    allocate,
    check_runs,
    check_time,
    signal_seconds,
    start_seconds,
    sweep,
)
from pretrain.rundir.attempts import Attempt, Owner
from pretrain.rundir.checkpoints import checkpoint_directory
from pretrain.rundir.jobs import is_done
from pretrain.rundir.paths import claim_version
from tests.conftest import tiny_config
from tests.unit.test_site import CPU, GPU


def job(site=CPU, **fields):
    given = {
        "name": "a.b",
        "directory": Path("/"),
        "logs": Path("/logs"),
        "commands": (("true",),),
        **fields,
    }
    return Job(site=parse_site(site, "site"), **given)


def test_a_site_may_give_no_option_that_jobs_are_sent_with():
    site = GPU | {
        "partition": "p",
        "account": "a",
        "qos": "q",
        "constraint": "c",
        "memory_per_node": "8G",
    }
    words = job(site, commands=(("a",), ("b",)), time_limit="9", signal_seconds=9).arguments()
    assert {word.split("=")[0].removeprefix("--") for word in words} <= set(OUR_OPTIONS)


# ---- the allocation on the site ----
def run_config(world_size=None, **sections):
    return tiny_config(
        parallel={"world_size": world_size} if world_size else {},
        batch={"global_batch_size": 1664},
        **sections,
    )


@pytest.mark.parametrize(
    ("world_size", "nodes", "allocation"),
    [
        (None, None, (1, 8)),
        (None, 4, (4, 8)),
        (16, None, (2, 8)),
        (4, None, (1, 4)),
        (8, 2, (2, 4)),
        (32, 4, (4, 8)),
    ],
)
def test_nodes_follow_from_the_config_or_are_given(world_size, nodes, allocation):
    run = allocate(run_config(world_size), parse_site(GPU, "site"), nodes)
    assert (run.nodes, run.tasks_per_node) == allocation


@pytest.mark.parametrize(
    ("world_size", "nodes", "sections", "says"),
    [
        (None, 5, {}, ["nodes = 5", "has 4 nodes with 8 GPUs"]),
        (64, None, {}, ["nodes = 8", "has 4 nodes", "parallel.world_size=32"]),
        (16, 1, {}, ["parallel.world_size = 16", "not 1 times 1 to 8"]),
        (
            None,
            None,
            {"train": {"precision": "bf16"}},
            ["train.precision = bf16", "V100", "Set train.precision=fp16"],
        ),
        (None, 3, {}, ["batch.global_batch_size = 1664", "24 data-parallel ranks"]),
        (None, None, {"run": {"directory": "a\nb"}}, ["run.directory", "control characters"]),
    ],
)
def test_what_the_site_has_not_is_refused(world_size, nodes, sections, says):
    with pytest.raises(ConfigError) as error:
        allocate(run_config(world_size, **sections), parse_site(GPU, "site"), nodes)
    assert all(words in str(error.value) for words in says), str(error.value)


def finish(config):
    """Leave what a run leaves that has done all its steps, and nothing of its metrics."""
    attempt = Attempt.begin(config.directory)
    for phase in ("training", "ending"):
        attempt.phase(phase, config.train.num_steps)
    attempt.end("finished", 0, "all steps done", config.train.num_steps)
    (config.directory / "config.toml").write_text(dump_config(config))


def test_a_run_is_done_when_nothing_is_left_to_train_or_to_evaluate(tmp_path):
    config = run_config(run={"directory": str(tmp_path)})
    assert not is_done(config)
    finish(config)

    def changed(section, **values):
        changed = getattr(config, section).model_copy(update=values)
        return config.model_copy(update={section: changed})

    longer = changed("train", num_steps=30)
    more, fewer = (changed("evaluation", lengths=lengths) for lengths in ((64, 999), (64,)))
    assert is_done(config) and is_done(fewer) and not is_done(longer) and not is_done(more)
    # An attempt that has only begun to evaluate them proves nothing, though its config is there.
    killed = Attempt.begin(tmp_path)
    killed.phase("evaluating", 20)
    (tmp_path / "config.toml").write_text(dump_config(more))
    killed.end("failed", 1, "killed", 20)
    assert not is_done(more)
    records = [
        {"step": 20, "evaluation": True, "protocol": name, "stride": stride, "length": length}
        | {"tokens": 64, "loss_nats": 1.0, "perplexity": 2.7}
        for length in (64, 999)
        for name, stride in (("nonoverlapping", length), ("sliding", more.evaluation_stride))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert is_done(more)


def test_a_run_that_cannot_go_on_from_its_checkpoint_is_refused(tmp_path):
    """On the login node, from the checkpoint's config alone."""
    site = parse_site(CPU, "site")
    sections = {"run": {"directory": str(tmp_path / "run")}}
    sections["data"] = {"directory": str(built_data(tmp_path))}
    checkpoint = checkpoint_directory(tmp_path / "run", 10)
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.toml").write_text(dump_config(run_config(**sections)))
    (checkpoint / "manifest.json").touch()
    run = allocate(run_config(**sections, optimizer={"learning_rate": 2e-3}), site, None)
    with pytest.raises(ConfigError, match=f"learning_rate = 0.002: {checkpoint} was trained with"):
        check_runs([run])
    check_runs([dataclasses.replace(run, allow_changed=("optimizer.learning_rate",))])
    (checkpoint / "config.toml").write_text("torn")
    # Which checkpoint the run then goes on from, the ranks find out.
    check_runs([run])


def test_what_a_job_reads_stays_where_slurm_may_have_taken_it(tmp_path, monkeypatch):
    says = "Unable to contact slurm controller"
    (tmp_path / "bin").mkdir()
    sbatch = f'case "$*" in *--test-only*) exit 0 ;; esac; echo "{says}" >&2; exit 1'
    for name, script in (("sbatch", sbatch), ("squeue", "exit 0")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    run, config = tmp_path / "run", tmp_path / "run.toml"
    sections = {"run": {"directory": str(run)}, "data": {"directory": str(built_data(tmp_path))}}
    config.write_text(dump_config(run_config(**sections)))
    (tmp_path / "site.toml").write_text(tomli_w.dumps(CPU))
    with pytest.raises(RunFailed, match=says):
        launcher(
            ["submit", str(config), "--site", str(tmp_path / "site.toml")], standalone_mode=False
        )
    assert (run / "launch/train.sbatch").exists()


def built_data(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / "manifest.json").touch()
    return tmp_path / "data"


# ---- the signal before the limit -----------------------------------------------------------------
def test_the_signal_is_estimated_from_the_size_of_the_model(tmp_path):
    config = load_config("configs/cc100_roberta/alibi_1024.toml")
    # 1.36 billion parameters of 12 bytes at 200 MB/s take 81.6 s, twice. A step takes a minute, and
    # Slurm may send the signal a minute early.
    assert signal_seconds(TrainingRun(config, tmp_path / "none", 16, 8)) == pytest.approx(
        2 * 81.6 + 60 + 60, abs=2
    )


def test_the_signal_follows_what_the_run_has_seen(tmp_path):
    directory = Attempt.begin(tmp_path).directory
    times = [
        (100, "loading", 0, None),
        (110, "training", 0, None),
        (210, "saving", 20, None),
        (240, "training", 20, 20),
        (340, "saving", 50, None),
        (350, "ending", 50, 50),
        (400, "saving", 60, None),
    ]
    lines = [
        {"at": at, "phase": p, "step": s} | ({"saved": saved} if saved else {})
        for at, p, s, saved in times
    ]
    (directory / "phases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # The longest save took 30 s and the slowest steps 5 s each.
    assert signal_seconds(TrainingRun(run_config(), tmp_path, 1, 1)) == 60 + 2 * 30 + 5


def test_the_time_to_start_is_what_the_run_has_seen(tmp_path):
    config = run_config()
    # A minute, and a checkpoint of 0.1 million parameters is read in a moment.
    assert start_seconds(tmp_path, config) == 61
    owner = Owner(began_at=1000.0)
    first, second = Attempt.begin(tmp_path), None
    (first.directory / "owner.json").write_text(json.dumps(dataclasses.asdict(owner)))
    lines = [(1001, "starting"), (1030, "loading"), (1090.5, "training"), (1200, "saving")]
    text = "".join(json.dumps({"at": at, "phase": p, "step": 0}) + "\n" for at, p in lines)
    (first.directory / "phases.jsonl").write_text(text)
    assert start_seconds(tmp_path, config) == 91
    first.end("stopped", 80, "asked", 0)
    # Asked to save before its first step, after 200 s: so long at least.
    second = Attempt.begin(tmp_path)
    (second.directory / "owner.json").write_text(json.dumps(dataclasses.asdict(owner)))
    (second.directory / "ended.json").write_text(
        json.dumps({"at": 1200, "code": 75, "outcome": "restart", "reason": "asked", "step": 0})
    )
    assert start_seconds(tmp_path, config) == 200


def test_a_limit_without_time_before_the_signal_is_refused(tmp_path):
    check_time("3:01", 180)
    check_time(None, 180)
    with pytest.raises(ConfigError, match=r"time limit 3:00.*--time"):
        check_time("3:00", 180)
    runs = [TrainingRun(run_config(), tmp_path, 1, 1)]
    # The run takes 61 s to start.
    check_time("5", 239, runs)
    with pytest.raises(ConfigError, match=r"takes 61 s to start and is asked to save 240 s before"):
        check_time("5", 240, runs)
    # A larger model beside it takes longer to read.
    large = run_config(model={"hidden_size": 1024, "num_layers": 48})
    with pytest.raises(ConfigError, match="nothing would be saved"):
        check_time("5", 239, [*runs, TrainingRun(large, tmp_path, 1, 1)])
    with pytest.raises(ConfigError, match="65535"):
        check_time(None, 70_000)


# ---- sweeps --------------------------------------------------------------------------------------


def test_a_new_run_lies_in_no_other_run_s_directory(tmp_path):
    outer, inside = tmp_path / "runs/outer", tmp_path / "runs/outer/x/y"
    (tmp_path / "link").symlink_to(outer)
    # A folder that another program calls attempts makes no run.
    (tmp_path / "attempts/2024").mkdir(parents=True)
    for directory in (inside, outer):
        is_done(run_config(run={"directory": str(directory)}))
    Attempt.begin(outer)
    claim_version(outer)
    for directory in (inside, tmp_path / "link/checkpoints"):
        with pytest.raises(ConfigError, match=f"{directory}: lies inside {outer}, which is"):
            is_done(run_config(run={"directory": str(directory)}))
    # A run that is there goes on, and so does one that was put inside of it since.
    is_done(run_config(run={"directory": str(outer)}))
    inside.mkdir(parents=True)
    claim_version(inside)
    is_done(run_config(run={"directory": str(inside)}))


def test_the_runs_of_a_sweep_have_directories_of_their_own():
    site = parse_site(CPU | {"tasks_per_node": 2}, "s")
    with pytest.raises(ConfigError, match="is another run's of this sweep"):
        sweep([Path("configs/demo.toml")] * 2, site, [], SlurmRequest(), dry_run=True)
    stored = ["checkpoint.upload_to=file:///s"]
    with pytest.raises(ConfigError, match="upload_to = file:///s is another run's of this sweep"):
        both = [Path("configs/demo.toml"), Path("configs/demo_debian.toml")]
        sweep(both, site, stored, SlurmRequest(), dry_run=True)

"""Test evaluation jobs without Slurm, with real processes.

Tested are which checkpoints wait for an evaluation, and what a job leaves when it is killed.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.config import ConfigError, EvaluationRequest
from pretrain.launcher import evaluations
from pretrain.launcher.cli import app
from pretrain.launcher.evaluations import (
    PendingEvaluations,
    evaluate_once,
    plan_evaluations,
    read_plan,
    write_plan,
)
from pretrain.launcher.site import parse_site
from pretrain.rundir.checkpoints import checkpoints_awaiting_evaluation
from pretrain.rundir.paths import RunPaths
from tests.conftest import tiny_config
from tests.end_to_end.commands import ROOT, wait_for

SITE = parse_site({"name": "tests", "nodes": 4, "gpus_per_node": 8, "cpus_per_node": 16}, "tests")
STEP = "step-00000100"


def waiting(run: Path) -> list[str]:
    return [path.name for path in checkpoints_awaiting_evaluation(run)]


class Shell:
    """Ranks that run a shell command, a real process that starts quickly."""

    failure = ""

    def __init__(self, script, *arguments):
        self.process = subprocess.Popen(["sh", "-c", script, "sh", *map(str, arguments)])

    def poll(self):
        return self.process.poll()

    def kill(self):
        self.process.kill()
        self.process.wait()


def evaluating(run, seconds=0.0):
    """Return a `start` for evaluate_once, whose ranks write run/begun, then a curve.json.

    Half of the curve is written `seconds` before the rest.
    """
    script = 'echo begun >> "$2"; mkdir -p "$(dirname "$1")" && echo half > "$1" '
    script += '&& sleep "$3" && echo "{}" > "$1"'
    return lambda out: Shell(script, out, run / "begun", seconds)


def planned(run, **changes):
    """Write a plan for evaluations into a run's directory, and return it."""
    request = EvaluationRequest((32, 64), ("nonoverlapping",), None, 1000)
    plan = plan_evaluations(request, tiny_config(**changes), run, SITE, 8, "12:00:00")
    write_plan(run, plan)
    return plan


def save(run, step):
    """Make a checkpoint that the launcher takes for complete, and return its name."""
    checkpoint = run / f"checkpoints/step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    return checkpoint.name


# ---- the plan ------------------------------------------------------------------------------------
def test_a_plan_reads_back_and_the_job_is_smaller_than_trainings(tmp_path):
    plan = planned(tmp_path)
    assert read_plan(tmp_path) == plan
    # Jobs that `launcher cancel` has ended are no attempts.
    evaluations.pause(tmp_path)
    evaluations.resume(tmp_path)
    assert read_plan(tmp_path).made_at > plan.made_at
    arguments = plan.job(tmp_path).arguments()
    assert {"--nodes=1", "--ntasks-per-node=8", "--requeue", "--time=12:00:00"} <= set(arguments)
    assert not any(argument.startswith("--signal") for argument in arguments)


@pytest.mark.parametrize(
    ("tensor", "tasks", "kept"), [(1, 8, False), (2, 8, True), (4, 4, True), (4, 1, False)]
)
def test_tensor_parallelism_is_kept_where_it_fits(tmp_path, tensor, tasks, kept):
    # Training splits sequences into parts that a length of the request is no multiple of, and each
    # of its processes that would be one more sample.
    request = EvaluationRequest((35,), ("sliding",), None, None)
    parallel = {"pipeline_model_parallel_size": 2, "context_parallel_size": 8}
    parallel |= {"tensor_model_parallel_size": tensor, "world_size": 16 * tensor}
    config = tiny_config(parallel=parallel, batch={"micro_batch_size": 4, "global_batch_size": 4})
    plan = plan_evaluations(request, config, tmp_path, SITE, tasks, "30")
    assert plan.overrides == ((f"parallel.tensor_model_parallel_size={tensor}",) if kept else ())
    assert (plan.tasks_per_node, plan.time_limit) == (tasks, "30")


def test_options_of_evaluations_need_evaluations(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["submit", "configs/demo.toml", "--site", "slurm/site.h100.toml", "--dry-run"]
    words += ["--set", f"run.directory={tmp_path}/run", "--lengths", "128"]
    with pytest.raises(ConfigError, match="have no effect without --evaluate-checkpoints"):
        app(words, standalone_mode=False)


# ---- what waits ----------------------------------------------------------------------------------
def test_what_waits_for_an_evaluation(tmp_path):
    assert waiting(tmp_path) == []
    two, one = save(tmp_path, 20), save(tmp_path, 10)
    # Without a plan nothing is evaluated.
    assert waiting(tmp_path) == []
    planned(tmp_path)
    assert waiting(tmp_path) == [one, two]
    (tmp_path / "checkpoints/.step-00000030.partial").mkdir()
    # A checkpoint without a manifest is not complete.
    (tmp_path / "checkpoints/step-00000030").mkdir()
    # An evaluation that has begun has no result yet.
    (tmp_path / f"evaluations/.{two}.x").mkdir(parents=True)
    (tmp_path / "evaluations" / one).mkdir()
    assert waiting(tmp_path) == [two]


def test_giving_up_does_not_hide_a_result(tmp_path):
    planned(tmp_path)
    assert evaluate_once(tmp_path, STEP, evaluating(tmp_path)) == 0
    evaluations._give_up(tmp_path, STEP, ["7"])
    assert os.listdir(tmp_path / "evaluations" / STEP) == ["curve.json"]
    assert sorted(os.listdir(tmp_path / "evaluations")) == ["plan.json", STEP]


def test_training_is_never_disturbed(tmp_path, capsys, monkeypatch):
    """Without Slurm's commands or with a damaged plan there is a message, and no exception."""
    monkeypatch.setenv("PATH", str(tmp_path))
    planned(tmp_path)
    submit_pending = PendingEvaluations(tmp_path)
    submit_pending()
    # No checkpoint waits, so Slurm is not asked.
    assert capsys.readouterr().err == ""
    save(tmp_path, 10)
    submit_pending()
    assert "sbatch: no such command here" in capsys.readouterr().err
    submit_pending(at_once=True)
    # It is not said again.
    assert capsys.readouterr().err == ""
    RunPaths(tmp_path).evaluation_plan.write_text("[]")
    submit_pending()
    # Once a minute, or when there is a new checkpoint.
    assert capsys.readouterr().err == ""
    save(tmp_path, 20)
    submit_pending()
    assert "not a plan" in capsys.readouterr().err


def test_a_killed_evaluation_leaves_nothing_and_is_made_again(tmp_path):
    code = f"""
from pathlib import Path
from tests.unit.test_evaluations import *
evaluate_once(Path({str(tmp_path)!r}), STEP, evaluating(Path({str(tmp_path)!r}), 600))
"""
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, process_group=0)
    try:
        wait_for(lambda: list(tmp_path.glob(f"evaluations/.{STEP}.*/result/curve.json")))
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
    assert not (tmp_path / "evaluations" / STEP).exists()
    assert evaluate_once(tmp_path, STEP, evaluating(tmp_path)) == 0
    assert (tmp_path / "evaluations" / STEP / "curve.json").read_text() == "{}\n"
    assert (tmp_path / "begun").read_text() == "begun\n" * 2
    assert os.listdir(tmp_path / "evaluations") == [STEP]
    # What is there is not made again.
    assert evaluate_once(tmp_path, STEP, evaluating(tmp_path)) == 0
    assert (tmp_path / "begun").read_text() == "begun\n" * 2


def test_the_result_of_a_checkpoint_that_was_replaced_is_not_published(tmp_path):
    manifest = tmp_path / f"checkpoints/{save(tmp_path, 100)}/manifest.json"

    def begin(out):
        lineage = {"id": "b", "step": 100, "parent": None, "branches": [{"id": "r", "since": 0}]}
        manifest.write_text(json.dumps(lineage))
        return evaluating(tmp_path)(out)

    assert evaluate_once(tmp_path, STEP, begin) == 1
    assert not (tmp_path / "evaluations" / STEP).exists()
    assert evaluate_once(tmp_path, STEP, begin) == 0

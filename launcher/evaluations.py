"""Train short, evaluate long: one evaluation job for each checkpoint of a run, beside training and never in its way.

RUN/evaluations/plan.json says how checkpoints are to be evaluated. Whoever looks (the supervisor of training, an
evaluation job at its end, a person) sends a job for each complete checkpoint without a result or a live job, so what fell
behind is caught up with. Sending one twice does no harm: a job takes its checkpoint as a run is taken
(pretrain.rundir.lock), one gets it, and the result appears whole, as RUN/evaluations/step-########, exactly once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import ConfigError, EvaluationRequest, RunFailed, writing
from pretrain.launcher import slurm
from pretrain.launcher.cluster import parse_site
from pretrain.launcher.job import (
    Job,
    launcher_command,
)
from pretrain.launcher.terminal import say
from pretrain.rundir.checkpoints import checkpoints_awaiting_evaluation
from pretrain.rundir.files import publish_directory, read_json, replace_file, replace_json
from pretrain.rundir.jobs import JobRecord, append_job, read_jobs
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import JobKind

TRIES = 3
"""Jobs that may end without a result before a checkpoint is given up."""
ASK_SECONDS = 60.0
"""Between two questions to Slurm about the same checkpoints."""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Plan:
    """How a run's checkpoints are evaluated (plan.json): what is measured, and by what kind of job."""

    request: EvaluationRequest
    job: Job
    """As each of them is sent, but for its command."""
    overrides: tuple[str, ...] = ()
    """--set of `pretrain evaluate`."""
    made_at: float = dataclasses.field(default_factory=time.time)
    """Unix seconds. Tries from before do not count: a new plan is a new chance."""

    def dump(self) -> str:
        """As JSON."""
        job = {
            "name": self.job.name,
            "site": self.job.site.model_dump(mode="json"),
            "directory": str(self.job.directory),
            "tasks_per_node": self.job.tasks_per_node,
            "time_limit": self.job.time_limit,
        }
        rest = {"overrides": self.overrides, "made_at": self.made_at, "job": job}
        return json.dumps(dataclasses.asdict(self.request) | rest, indent=1) + "\n"


def write_plan(run: Path, plan: Plan) -> None:
    """In one move, for whoever reads it meanwhile."""
    path = RunPaths(run).evaluation_plan
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, plan.dump())


def read_plan(run: Path) -> Plan:
    """Raises ConfigError when there is none, or it is damaged."""
    path = RunPaths(run).evaluation_plan
    try:
        values = json.loads(path.read_text())
        lengths, job = values["lengths"], values["job"]
        request = EvaluationRequest(
            lengths if lengths is None else tuple(lengths),
            tuple(values["protocols"]),
            values["stride"],
            values["max_tokens"],
        )
        return Plan(
            request,
            Job(
                name=job["name"],
                site=parse_site(job["site"], str(path)),
                directory=Path(job["directory"]),
                logs=RunPaths(run).logs,
                commands=(),
                tasks_per_node=job["tasks_per_node"],
                time_limit=job["time_limit"],
            ),
            tuple(values["overrides"]),
            values["made_at"],
        )
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing. Plan with `launcher evaluate-checkpoints`") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: not a plan ({error}). Plan anew with `launcher evaluate-checkpoints`"
        ) from None


# ---- sending jobs ----------------------------------------------------------------------------------------------------
def submit_pending(run: Path, at_once: bool = False) -> None:
    """Sends an evaluation job for each complete checkpoint that has none. Never raises: what fails is tried again.

    Cheap when nothing is new, two directory listings, so call it as often as you like. Slurm is asked when a checkpoint
    is new and otherwise once a minute, or with `at_once` in any case.
    """
    try:
        waiting = [path.name for path in checkpoints_awaiting_evaluation(run)]
        if waiting and (at_once or _is_time(run, waiting)):
            submit_waiting(run, read_plan(run), waiting)
    except (ConfigError, RunFailed, OSError) as error:
        say(f"evaluation jobs of {run}: {error}. Tried again later")


def _is_time(run: Path, waiting: list[str]) -> bool:
    """Whether to ask Slurm about them now, which is then noted."""
    asked = RunPaths(run).evaluation_asked
    before, now = read_json(asked), time.time()
    if before.get("waiting") == waiting and 0 <= now - before.get("at", 0) < ASK_SECONDS:
        return False
    replace_json(asked, {"at": now, "waiting": waiting})
    return True


def submit_waiting(run: Path, plan: Plan, waiting: list[str]) -> None:
    sent = [
        record
        for record in read_jobs(run)
        if record.kind == JobKind.EVALUATE and record.checkpoint in waiting
    ]
    states = slurm.jobs(record.job_id for record in sent)
    if states is None:
        raise slurm.SlurmAway("squeue: slurmctld does not answer")
    # A job that is here to say that it failed is as good as over.
    over = {
        None,
        os.environ.get("SLURM_JOB_ID"),
        *(job_id for job_id, state in states.items() if state.is_over),
    }
    for name in waiting:
        mine = [record for record in sent if record.checkpoint == name]
        if any(record.job_id in states and record.job_id not in over for record in mine):
            continue
        tries = [record.job_id for record in mine if record.submitted_at >= plan.made_at]
        if len(tries) >= TRIES:
            _give_up(run, name, tries)
        else:
            _send(run, plan, name)


def _send(run: Path, plan: Plan, name: str) -> None:
    with writing(plan.job.logs):
        plan.job.logs.mkdir(parents=True, exist_ok=True)
    job = dataclasses.replace(plan.job, commands=(launcher_command("evaluation", str(run), name),))
    job_id = slurm.submit(sending(job)[1:], job.script())
    say(f"evaluation job {job_id}: {name}")
    append_job(
        run,
        JobRecord(
            job_id,
            JobKind.EVALUATE,
            job.name,
            time.time(),
            job.site.name,
            job.nodes,
            job.num_tasks,
            str(run),
            checkpoint=name,
        ),
    )


def sending(job: Job) -> list[str]:
    """The sbatch of an evaluation. Jobs of one name, a run's, go one after the other."""
    return ["sbatch", "--dependency=singleton", *job.arguments()]


def _give_up(run: Path, name: str, tries: Sequence[str]) -> None:
    """Leaves failed.json in place of a result, so that neither jobs nor checkpoints pile up."""
    paths = RunPaths(run)
    reason = (
        f"jobs {', '.join(tries)} ended without a result; see {paths.evaluation_log(name)}. "
        "`launcher evaluate-checkpoints` tries again"
    )
    folder = paths.evaluations / f".{name}.{uuid.uuid4().hex}"
    with writing(folder):
        folder.mkdir()
        (folder / "failed.json").write_text(
            json.dumps({"reason": reason, "jobs": list(tries)}) + "\n"
        )
    try:
        publish_directory(folder, paths.evaluations / name)
        say(f"{name}: {reason}")
    except OSError:  # there is a result after all
        shutil.rmtree(folder)


def pause(run: Path) -> None:
    """No more jobs are sent for the run's checkpoints, until it goes on (`resume`) or there is another plan."""
    paths = RunPaths(run)
    with contextlib.suppress(FileNotFoundError):
        paths.evaluation_plan.replace(paths.paused_evaluation_plan)


def resume(run: Path) -> None:
    """After `pause`. Where there was none, nothing is done."""
    paths = RunPaths(run)
    if not paths.evaluation_plan.exists() and paths.paused_evaluation_plan.exists():
        paths.paused_evaluation_plan.replace(paths.evaluation_plan)

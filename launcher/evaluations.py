"""Submit one evaluation job for each checkpoint of a run, beside training and never in its way.

RUN/evaluations/plan.json says how checkpoints are evaluated. Three processes look for checkpoints
that are complete and have neither a result nor a job, and submit a job for each: the supervisor of
training, an evaluation job at its end, and `launcher evaluate-checkpoints`. So a checkpoint that
one of them missed is found by the next.

Two jobs for one checkpoint do no harm. A job claims its checkpoint as an attempt claims a run
(pretrain.rundir.lock), only one succeeds, and its result appears whole in one move as
RUN/evaluations/step-########.
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
from pretrain.launcher.script import Job, launcher_command
from pretrain.launcher.site import parse_site
from pretrain.launcher.terminal import say
from pretrain.rundir.checkpoints import checkpoints_awaiting_evaluation
from pretrain.rundir.files import (
    DIRECTORY_MODE,
    make_directory,
    publish_directory,
    read_json,
    replace_file,
    replace_json,
)
from pretrain.rundir.jobs import JobRecord, append_job, job_id_of, read_jobs
from pretrain.rundir.paths import JobKind, RunPaths
from pretrain.rundir.trust import check_trusted, read_trusted

TRIES = 3
"""A checkpoint is given up after this many jobs without a result."""
ASK_SECONDS = 60.0
"""Time between two queries to Slurm about the same checkpoints. The supervisor looks every few
seconds, and slurmctld serves the whole cluster."""


@dataclass(frozen=True)
class Plan:
    """The plan by which a run's checkpoints are evaluated (plan.json)."""

    request: EvaluationRequest
    """The lengths and protocols to measure."""
    job: Job
    """The job of each evaluation, without its command."""
    overrides: tuple[str, ...] = ()
    """Values of --set for `pretrain evaluate`."""
    made_at: float = dataclasses.field(default_factory=time.time)
    """Unix seconds. Jobs from before do not count towards TRIES: a new plan is a new chance."""

    def dump(self) -> str:
        """Return the plan as JSON."""
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
    """Write RUN/evaluations/plan.json in one move. Raises RunFailed when the disk refuses."""
    path = RunPaths(run).evaluation_plan
    with writing(path):
        make_directory(path.parent)
        replace_file(path, plan.dump())


def read_plan(run: Path) -> Plan:
    """Read RUN/evaluations/plan.json.

    Raises:
        ConfigError: There is no plan, or it is damaged, or another user may have put it there.
    """
    path = RunPaths(run).evaluation_plan
    try:
        # Commands of the site in this file are executed, so its owner must be trusted.
        check_trusted(run)
        values = json.loads(read_trusted(path))
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
        raise ConfigError(
            f"{path}: missing. Make a plan with `launcher evaluate-checkpoints`"
        ) from None
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: not a plan ({error}). Make a new one with `launcher evaluate-checkpoints`"
        ) from None


# ---- submitting jobs -----------------------------------------------------------------------------
def submit_pending(run: Path, at_once: bool = False) -> None:
    """Submit an evaluation job for each complete checkpoint that has none.

    This does not raise: errors are printed, and the next call tries again. It is cheap when nothing
    is new, two directory listings, so it may be called often.

    Args:
        run: The run's directory.
        at_once: Ask Slurm in any case. By default it is asked when a checkpoint is new, and
            otherwise once a minute.
    """
    try:
        waiting = [path.name for path in checkpoints_awaiting_evaluation(run)]
        if waiting and (at_once or _is_time(run, waiting)):
            submit_waiting(run, read_plan(run), waiting)
    except (ConfigError, RunFailed, OSError) as error:
        say(f"{run}: evaluation jobs cannot be submitted yet and will be tried again: {error}")


def _is_time(run: Path, waiting: list[str]) -> bool:
    """Return True if it is time to ask Slurm about these checkpoints, and record the time."""
    asked = RunPaths(run).evaluation_asked
    before, now = read_json(asked), time.time()
    at = before.get("at")
    recent = isinstance(at, int | float) and 0 <= now - at < ASK_SECONDS
    if before.get("waiting") == waiting and recent:
        return False
    replace_json(asked, {"at": now, "waiting": waiting})
    return True


def submit_waiting(run: Path, plan: Plan, waiting: list[str]) -> None:
    """Submit a job for each checkpoint that has none, or give up those that failed too often.

    Args:
        run: The run's directory.
        plan: How its checkpoints are evaluated.
        waiting: Names of complete checkpoints without a result.

    Raises:
        SlurmError: Slurm refused a job, or does not answer.
        RunFailed: The disk refused.
    """
    sent = [
        record
        for record in read_jobs(run)
        if record.kind == JobKind.EVALUATE and record.checkpoint in waiting
    ]
    states = slurm.jobs((record.job_id for record in sent), slurm.TRIES)
    if states is None:
        raise slurm.SlurmAway("squeue: slurmctld does not answer")
    # An evaluation job calls this at its end. If its own checkpoint still waits, it has failed, and
    # counts as over although Slurm says that it runs.
    over = {
        None,
        job_id_of(os.environ),
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
            _submit(run, plan, name)


def _submit(run: Path, plan: Plan, name: str) -> None:
    """Submit the evaluation job of one checkpoint, and record it in RUN/jobs.jsonl."""
    with writing(plan.job.logs):
        make_directory(plan.job.logs)
    job = dataclasses.replace(plan.job, commands=(launcher_command("evaluation", str(run), name),))
    # Slurm runs jobs of one name and user one after the other. The name is this run's own, so its
    # evaluations take at most one node from training, and runs do not wait for each other.
    job_id = slurm.submit(["--dependency=singleton", *job.arguments()], job.script())
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


def _give_up(run: Path, name: str, tries: Sequence[str]) -> None:
    """Publish failed.json in place of a result.

    Without it, jobs would be submitted forever, and checkpoint.keep would spare the checkpoint
    forever because it awaits its evaluation.

    Args:
        run: The run's directory.
        name: The checkpoint's name.
        tries: Ids of the jobs that ended without a result.
    """
    paths = RunPaths(run)
    reason = (
        f"jobs {', '.join(tries)} ended without a result; see {paths.evaluation_log(name)}. "
        "`launcher evaluate-checkpoints` tries again"
    )
    folder = paths.evaluations / f".{name}.{uuid.uuid4().hex}"
    with writing(folder):
        folder.mkdir(mode=DIRECTORY_MODE)
        (folder / "failed.json").write_text(
            json.dumps({"reason": reason, "jobs": list(tries)}) + "\n"
        )
    try:
        publish_directory(folder, paths.evaluations / name)
        say(f"{name}: {reason}")
    except OSError:
        # There is a result after all, and it must stay.
        shutil.rmtree(folder)


def pause(run: Path) -> None:
    """Submit no more evaluation jobs for a run, until `resume` or another plan."""
    paths = RunPaths(run)
    with contextlib.suppress(FileNotFoundError):
        paths.evaluation_plan.replace(paths.paused_evaluation_plan)


def resume(run: Path) -> None:
    """Undo `pause`; do nothing when the run is not paused."""
    paths = RunPaths(run)
    if not paths.evaluation_plan.exists() and paths.paused_evaluation_plan.exists():
        paths.paused_evaluation_plan.replace(paths.evaluation_plan)

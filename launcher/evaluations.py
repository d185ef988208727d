"""Train short, evaluate long: one evaluation job for each checkpoint of a run, beside training and never in its way.

RUN/evaluations/plan.json says how checkpoints are to be evaluated. Whoever looks (the supervisor of training, an
evaluation job at its end, a person) sends a job for each complete checkpoint without a result or a live job, so what fell
behind is caught up with. Sending one twice does no harm: a job takes its checkpoint as a run is taken
(pretrain.attempts), one gets it, and the result appears whole, as RUN/evaluations/step-########, exactly once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import slurm
from launcher.cluster import Site, parse_site
from launcher.job import Job, JobRecord, append_job, check_path, check_time, job_name, launcher_command, read_jobs
from launcher.srun import SrunStep, job_is_over, job_owner
from launcher.step import Step, say
from launcher.submit import PLAN, TrainingRun
from pretrain.attempts import HEARTBEAT_SECONDS, Attempt, Owner, RunBusy, unknown
from pretrain.config import ConfigError, EvaluationRequest, RunConfig, RunFailed, load_config, writing

TRIES = 3
"""Jobs that may end without a result before a checkpoint is given up."""
ASK_SECONDS = 60.0
"""Between two questions to Slurm about the same checkpoints."""
POLL_SECONDS = 0.1
PAUSED = "plan.paused.json"
CHECKPOINT = re.compile(r"step-\d{8,}")


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
        job = {"name": self.job.name, "site": self.job.site.model_dump(mode="json"), "directory": str(self.job.directory),
               "tasks_per_node": self.job.tasks_per_node, "time_limit": self.job.time_limit}  # fmt: skip
        rest = {"overrides": self.overrides, "made_at": self.made_at, "job": job}
        return json.dumps(dataclasses.asdict(self.request) | rest, indent=1) + "\n"


@dataclass(frozen=True)
class Asked:
    """What a person asks for with --evaluate-checkpoints."""

    request: EvaluationRequest
    tasks: int | None = None
    """GPUs of one node; None: as many as training has on each of its."""
    time_limit: str | None = None
    """None: training's."""

    def plan(self, run: TrainingRun, training: Job) -> str:
        """RUN/evaluations/plan.json for a run that `training` trains."""
        return make_plan(run.config, run.directory, training, self).dump()


def ask(
    config: Path, overrides: Sequence[str], request: EvaluationRequest, tasks: int | None, time_limit: str | None
) -> Asked:
    """Raises ConfigError when the run's model cannot be evaluated as `request` says."""
    # One process holds whole sequences, however training shares them.
    load_config(config, [*overrides, *request.overrides(), "parallel.sequence_parallel=false"])
    return Asked(request, tasks, time_limit)


def make_plan(config: RunConfig, run: Path, training: Job, asked: Asked) -> Plan:
    """For a run that `training` trains.

    A model that tensor parallelism split stays split where these divide (it may not fit otherwise). The rest is
    data-parallel: weights alone are a small part of what a GPU holds in training, so pipeline stages are not needed.
    Raises ConfigError when a node has not so many.
    """
    most = training.site.max_tasks_per_node
    tasks = asked.tasks or training.tasks_per_node
    if tasks > most:
        raise ConfigError(
            f"evaluation tasks = {tasks}: a node of site {training.site.name} takes {most}. Ask for fewer"
        )
    tensor = config.parallel.tensor_model_parallel_size
    split = (f"parallel.tensor_model_parallel_size={tensor}",) if tensor > 1 and tasks % tensor == 0 else ()
    # A name for this run alone: jobs of one name wait for each other.
    name = f"eval-{training.name[:40]}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:8]}"
    job = Job(name=job_name(name), site=training.site, directory=training.directory, logs=run / "logs", commands=(),
              tasks_per_node=tasks, time_limit=asked.time_limit or training.time_limit)  # fmt: skip
    check_time(job.time_limit, 0)
    return Plan(asked.request, job, split)


def plan_path(run: Path) -> Path:
    """Where it stands, checkpoints are evaluated."""
    return run / PLAN


def write_plan(run: Path, plan: Plan) -> None:
    """In one move, for whoever reads it meanwhile."""
    path = plan_path(run)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, plan.dump())


def read_plan(run: Path) -> Plan:
    """Raises ConfigError when there is none, or it is damaged."""
    path = plan_path(run)
    try:
        values = json.loads(path.read_text())
        lengths, job = values["lengths"], values["job"]
        request = EvaluationRequest(lengths if lengths is None else tuple(lengths), tuple(values["protocols"]),
                                    values["stride"], values["max_tokens"])  # fmt: skip
        return Plan(
            request,
            Job(name=job["name"], site=parse_site(job["site"], str(path)), directory=Path(job["directory"]),
                logs=run / "logs", commands=(), tasks_per_node=job["tasks_per_node"], time_limit=job["time_limit"]),
            tuple(values["overrides"]), values["made_at"],
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing. Plan with `launcher evaluate-checkpoints`") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not a plan ({error}). Plan anew with `launcher evaluate-checkpoints`") from None


# ---- sending jobs ----------------------------------------------------------------------------------------------------
def submit_pending(run: Path, at_once: bool = False) -> None:
    """Sends an evaluation job for each complete checkpoint that has none. Never raises: what fails is tried again.

    Cheap when nothing is new, two directory listings, so call it as often as you like. Slurm is asked when a checkpoint
    is new and otherwise once a minute, or with `at_once` in any case.
    """
    try:
        waiting = waiting_checkpoints(run)
        if waiting and (at_once or _is_time(run, waiting)):
            _submit(run, read_plan(run), waiting)
    except (ConfigError, RunFailed, OSError) as error:
        say(f"evaluation jobs of {run}: {error}. Tried again later")


def waiting_checkpoints(run: Path) -> list[str]:
    """Complete checkpoints without a result, oldest first; none where no plan says that they are evaluated."""
    if not plan_path(run).exists():
        return []
    names = _step_names(run / "checkpoints") - _step_names(run / "evaluations")
    return sorted(name for name in names if (run / "checkpoints" / name / "manifest.json").is_file())


def _step_names(directory: Path) -> set[str]:
    try:
        return {name for name in os.listdir(directory) if CHECKPOINT.fullmatch(name)}
    except FileNotFoundError:
        return set()


def _is_time(run: Path, waiting: list[str]) -> bool:
    """Whether to ask Slurm about them now, which is then noted."""
    asked = run / "evaluations" / "asked.json"
    before: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(asked.read_text())
    now = time.time()
    if before.get("waiting") == waiting and 0 <= now - before["at"] < ASK_SECONDS:
        return False
    _replace(asked, json.dumps({"at": now, "waiting": waiting}))
    return True


def _submit(run: Path, plan: Plan, waiting: list[str]) -> None:
    sent = [record for record in read_jobs(run) if record.kind == "evaluate" and record.checkpoint in waiting]
    states = slurm.jobs(record.job_id for record in sent)
    if states is None:
        raise slurm.SlurmAway("squeue: slurmctld does not answer")
    # A job that is here to say that it failed is as good as over.
    over = {None, os.environ.get("SLURM_JOB_ID"), *(job_id for job_id, state in states.items() if state.is_over)}
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
    append_job(run, JobRecord(job_id, "evaluate", job.name, time.time(), job.site.name, job.nodes, job.num_tasks, str(run),
                              checkpoint=name))  # fmt: skip


def sending(job: Job) -> list[str]:
    """The sbatch of an evaluation. Jobs of one name, a run's, go one after the other."""
    return ["sbatch", "--dependency=singleton", *job.arguments()]


def _give_up(run: Path, name: str, tries: Sequence[str]) -> None:
    """Leaves failed.json in place of a result, so that neither jobs nor checkpoints pile up."""
    reason = (f"jobs {', '.join(tries)} ended without a result; see {log_path(run, name)}. "
              "`launcher evaluate-checkpoints` tries again")  # fmt: skip
    folder = run / "evaluations" / f".{name}.{uuid.uuid4().hex}"
    with writing(folder):
        folder.mkdir()
        (folder / "failed.json").write_text(json.dumps({"reason": reason, "jobs": list(tries)}) + "\n")
    try:
        folder.rename(run / "evaluations" / name)
        say(f"{name}: {reason}")
    except OSError:  # there is a result after all
        shutil.rmtree(folder)


def evaluate_run(run: Path, site: Site, asked: Asked) -> None:
    """Plans for a run that was sent without --evaluate-checkpoints, or gives what was given up a new chance.

    Jobs start in the present directory, as training's did. Raises ConfigError, and SlurmError when Slurm refuses.
    """
    check_path("RUN", run)
    config = load_config(run_config(run))
    like = Job(job_name(".".join(run.parts[-2:])), site, Path.cwd(), run / "logs", (),
               tasks_per_node=site.max_tasks_per_node, time_limit=site.time_limit)  # fmt: skip
    plan = make_plan(config, run, like, asked)
    write_plan(run, plan)
    for failed in (run / "evaluations").glob("step-*/failed.json"):
        shutil.rmtree(failed.parent)
    if waiting := waiting_checkpoints(run):
        _submit(run, plan, waiting)
    else:
        say(f"{run}: no checkpoint waits for an evaluation; those that training still saves will get theirs")


def pause(run: Path) -> None:
    """No more jobs are sent for the run's checkpoints, until it goes on (`resume`) or there is another plan."""
    with contextlib.suppress(FileNotFoundError):
        plan_path(run).replace(plan_path(run).with_name(PAUSED))


def resume(run: Path) -> None:
    """After `pause`. Where there was none, nothing is done."""
    paused = plan_path(run).with_name(PAUSED)
    if not plan_path(run).exists() and paused.exists():
        paused.replace(plan_path(run))


def run_config(run: Path) -> Path:
    """The config that a run was sent or started with. Raises ConfigError."""
    found = [path for path in (run / "launch" / "config.toml", run / "config.toml") if path.is_file()]
    if not found:
        raise ConfigError(f"{run}: not a run's directory (no config.toml). Give the run.directory of its config")
    return found[0]


# ---- the job ---------------------------------------------------------------------------------------------------------
def run_job(run: Path, name: str) -> int:
    """Evaluates a checkpoint, if nobody did; brings the run's curve up to date; sends what is left. The exit code."""
    if not CHECKPOINT.fullmatch(name) or not (run / "checkpoints" / name).is_dir():
        raise ConfigError(f"{run / 'checkpoints' / name}: no such checkpoint")
    plan, job_id = read_plan(run), os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        raise ConfigError("launcher evaluation: runs in a Slurm job. Use `launcher evaluate-checkpoints`, or on this machine "
                          "`pretrain evaluate`")  # fmt: skip
    python = [plan.job.site.ranks_python or sys.executable, "-m", "pretrain"]

    def start(out: Path) -> Step:
        settings = [word for override in plan.overrides for word in ("--set", override)]
        evaluate = ["evaluate", str(run / "checkpoints" / name), *plan.request.options(), *settings, "--out", str(out)]
        return SrunStep([*plan.job.step(), *python, *evaluate], job_id, name, {}, log_path(run, name))

    code = evaluate_once(run, name, start, job_owner(job_id, plan.job.num_tasks), job_is_over)
    if (run / "evaluations" / name).exists():  # another's too: it may have been killed before this
        reported = subprocess.run([*plan.job.site.container, *python, "report", str(run)], check=False).returncode
        code = code or reported
    submit_pending(run, at_once=True)
    return code


def evaluate_once(run: Path, name: str, start: Callable[[Path], Step], owner: Owner | None = None,
                  job_is_over: Callable[[Owner], bool | None] = unknown) -> int:  # fmt: skip
    """Evaluates a checkpoint of `run` unless that is done, or another is at it; returns the exit code.

    `start` is given the curve.json to write and returns the ranks that do it. Killed at any moment this leaves nothing
    that the next one, which begins anew, would take for a result.
    """
    result, step = run / "evaluations" / name, int(name.removeprefix("step-"))
    if result.exists():
        say(f"{name}: evaluated before")
        return 0
    try:
        claim = Attempt.begin(run / "evaluations" / "claims" / name, owner, job_is_over)
    except RunBusy as busy:
        say(f"{name}: left to another: {busy}")
        return 0
    if result.exists():  # since we looked
        claim.end("finished", 0, "evaluated before", step)
        say(f"{name}: evaluated before")
        return 0
    out = claim.directory / "result"
    ranks = start(out / "curve.json")
    try:
        code = _wait(ranks, claim)
    finally:
        if ranks.poll() is None:
            ranks.kill()
    if code is None:
        say(f"{name}: another job took this one for dead and evaluates it")
        return 1
    if code:
        claim.end("failed", code, ranks.failure, step)
        say(f"{name}: not evaluated: {ranks.failure or f'exit code {code}'}")
        return code
    try:
        out.rename(result)
    except OSError:
        if not result.exists():
            raise
    claim.end("finished", 0, "evaluated", step)
    say(f"{name}: evaluated; {result}/report.md")
    return 0


def _wait(ranks: Step, claim: Attempt) -> int | None:
    """The ranks' exit code; None when the claim is lost."""
    beat = time.monotonic()
    while (code := ranks.poll()) is None:
        if time.monotonic() - beat >= HEARTBEAT_SECONDS:
            beat = time.monotonic()
            if not claim.heartbeat():
                return None
        time.sleep(POLL_SECONDS)
    return None if claim.superseded() else code


def log_path(run: Path, name: str) -> Path:
    """What the ranks of a checkpoint's evaluations say."""
    return run / "logs" / f"evaluate-{name}.log"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(text)
    temporary.replace(path)

"""Submit one evaluation job for each checkpoint of a run, without delaying training.

RUN/evaluations/plan.json says how checkpoints are evaluated. Three processes look for checkpoints
that are complete and have neither a result nor a job, and submit a job for each: the supervisor of
training, an evaluation job at its end, and `launcher evaluate-checkpoints`. So a checkpoint that
one of them missed is found by the next.

Two jobs for one checkpoint do no harm. The jobs of a run have one name and run one after the other,
and a complete result is published in one rename as RUN/evaluations/step-########, so the second job
finds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from pretrain.config import (
    ConfigError,
    EvaluationRequest,
    RunConfig,
    load_config,
    parse_config,
    writing,
)
from pretrain.config.errors import say
from pretrain.config.schema import Section
from pretrain.launcher import slurm, slurm_job
from pretrain.launcher.ranks import SrunRanks
from pretrain.launcher.site import Site
from pretrain.launcher.submit import check_time, write_files
from pretrain.launcher.supervise import Ranks, Signals, job_signals
from pretrain.rundir.checkpoints import (
    checkpoint_step,
    checkpoints_awaiting_evaluation,
    named_by_step,
    read_lineage,
)
from pretrain.rundir.files import make_directory, publish_directory
from pretrain.rundir.jobs import append_job, job_id_of, read_jobs
from pretrain.rundir.paths import ExitCode, JobKind, RunPaths, check_version
from pretrain.rundir.trust import check_trusted, read_trusted

TRIES = 3
"""The number of jobs without a result after which a checkpoint is not tried again."""
BACK_OFF_SECONDS = 300
"""The delay of the second job for a checkpoint. It doubles for each further job, because the cause
of the failure, such as a file server that does not answer, may be gone by then."""
ASK_SECONDS = 60.0
"""Time between two queries to Slurm about the same checkpoints. The supervisor looks every few
seconds, and slurmctld serves the whole cluster."""


class Plan(Section):
    """The plan for evaluating the checkpoints of a run: the content of plan.json."""

    request: EvaluationRequest
    """The lengths and protocols to measure."""
    name: str
    """Name of the jobs, unique to this run. Jobs of one name run one after the other."""
    site: Site
    directory: str
    """The working directory, from which relative paths in the run's config start."""
    tasks_per_node: int
    time_limit: str | None
    overrides: tuple[str, ...] = ()
    """Values of --set for `pretrain evaluate`."""
    made_at: float = Field(default_factory=time.time)
    """Unix seconds. Jobs submitted before do not count toward TRIES, so a new plan tries again."""

    def job(self, run: Path, *command: str) -> slurm_job.Job:
        """Return the job of an evaluation of a run."""
        return slurm_job.Job(
            name=self.name,
            site=self.site,
            directory=Path(self.directory),
            logs=RunPaths(run).logs,
            commands=(command,),
            tasks_per_node=self.tasks_per_node,
            time_limit=self.time_limit,
            # Jobs of one name and user run one after the other, so the evaluations of a run take at
            # most one node from training (and repeated ones another), and runs do not wait for each
            # other.
            dependency="singleton",
        )

    def __str__(self) -> str:
        return self.model_dump_json(indent=1) + "\n"


def write_plan(run: Path, plan: Plan) -> None:
    """Write RUN/evaluations/plan.json atomically. Raises RunFailed if it cannot be written."""
    write_files({RunPaths(run).evaluation_plan: str(plan)})


def read_plan(run: Path) -> Plan:
    """Read RUN/evaluations/plan.json.

    Raises:
        ConfigError: There is no plan, or it is damaged, or another user may have put it there.
    """
    path = RunPaths(run).evaluation_plan
    try:
        # Commands of the site in this file are executed, so its owner must be trusted.
        check_trusted(run)
        return Plan.model_validate_json(read_trusted(path))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: missing. Create it with `launcher evaluate-checkpoints`"
        ) from None
    except (OSError, ValidationError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"{path}: not a plan ({words}). Create a new one with `launcher evaluate-checkpoints`"
        ) from None


# ---- submitting jobs -----------------------------------------------------------------------------
class PendingEvaluations:
    """On each call, submits an evaluation job for each complete checkpoint that has none.

    A call never raises: errors are printed, and the next call tries again. Without new checkpoints
    a call costs only two directory listings, so it may be made often.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._asked: tuple[list[str], float] = [], 0.0
        self._printed = ""

    def __call__(self, at_once: bool = False) -> None:
        """Submit what is missing.

        Args:
            at_once: Always ask Slurm. By default Slurm is asked when there is a new checkpoint, and
                otherwise once a minute.
        """
        try:
            waiting = [path.name for path in checkpoints_awaiting_evaluation(self._run)]
            before, at = self._asked
            recent = waiting == before and time.monotonic() - at < ASK_SECONDS
            if waiting and (at_once or not recent):
                self._asked = waiting, time.monotonic()
                submit_waiting(self._run, read_plan(self._run), waiting)
        # Any error at all: a failed evaluation must not end the training beside which this runs.
        except Exception as error:
            if str(error) != self._printed:
                say(
                    f"{self._run}: evaluation jobs cannot be submitted yet and will be tried "
                    f"again: {error}"
                )
            self._printed = str(error)


def submit_waiting(run: Path, plan: Plan, waiting: list[str]) -> None:
    """Submit a job for each checkpoint that has none; give up checkpoints that failed too often.

    Args:
        run: The run's directory.
        plan: How its checkpoints are evaluated.
        waiting: Names of complete checkpoints without a result.

    Raises:
        SlurmError: Slurm refused a job, or does not answer.
        RunFailed: A file cannot be written.
    """
    sent = [each for each in read_jobs(run, JobKind.EVALUATE) if each.checkpoint in waiting]
    states = slurm.jobs((record.job_id for record in sent), slurm.TRIES)
    # An evaluation job calls this at its end. If its own checkpoint is still waiting, the job has
    # failed, and counts as over although Slurm says that it is running.
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
            _submit(run, plan, name, BACK_OFF_SECONDS * 2 ** (len(tries) - 1) if tries else 0)


def _submit(run: Path, plan: Plan, name: str, delay_seconds: int) -> None:
    """Submit the evaluation job of one checkpoint, and record it in RUN/jobs.jsonl."""
    job = plan.job(run, *slurm_job.launcher_command("evaluation", str(run), name))
    if delay_seconds:
        # A name of its own, because Slurm holds back later jobs of the name until it has begun.
        job = dataclasses.replace(job, delay_seconds=delay_seconds, name=f"{job.name}-again")
    with writing(job.logs):
        make_directory(job.logs)
    job_id = job.submit()
    say(f"evaluation job {job_id}: {name}")
    append_job(run, job.record(job_id, JobKind.EVALUATE, run, checkpoint=name))


def _give_up(run: Path, name: str, tries: Sequence[str]) -> None:
    """Publish failed.json instead of a result.

    Without this file, jobs would be submitted forever, and checkpoint.keep would never delete the
    checkpoint, because it would still await its evaluation.

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
    out = _new_folder(run, name) / "failed"
    with writing(out):
        make_directory(out)
        (out / "failed.json").write_text(json.dumps({"reason": reason, "jobs": list(tries)}) + "\n")
    if _publish(out, paths.evaluations / name):
        say(f"{name}: {reason}")


def _new_folder(run: Path, name: str) -> Path:
    """Make a folder for the result of a checkpoint, and remove those that killed jobs have left."""
    evaluations = RunPaths(run).evaluations
    with writing(evaluations):
        make_directory(evaluations)
        for left in evaluations.glob(f".{name}.*"):
            shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f".{name}.", dir=evaluations))


def _publish(out: Path, result: Path) -> bool:
    """Move a result to its final path, unless there is one, and remove the folder it was made in.

    Returns:
        True if the result was moved.

    Raises:
        OSError: The result cannot be moved.
    """
    try:
        publish_directory(out, result)
    except OSError:
        # Publishing fails if there already is a result, which must be kept.
        if not result.exists():
            raise
        return False
    finally:
        shutil.rmtree(out.parent, ignore_errors=True)
    return True


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
        # Jobs that were cancelled do not count as attempts.
        write_plan(run, read_plan(run).model_copy(update={"made_at": time.time()}))


def plan_evaluations(
    request: EvaluationRequest,
    config: RunConfig,
    run: Path,
    site: Site,
    tasks: int,
    time_limit: str | None,
) -> Plan:
    """Return the plan for the checkpoints of a run.

    A model that training splits by tensor parallelism stays split where the evaluation's tasks
    allow it, because it may not fit on one GPU otherwise. The remaining ranks are data-parallel.
    Pipeline stages are not needed: weights alone are a small part of what a GPU holds in training.

    Args:
        request: The lengths and protocols to measure.
        config: The run's config.
        run: The run's directory.
        site: The cluster.
        tasks: GPUs of one evaluation, on one node.
        time_limit: Time limit of one evaluation; None for the partition's default.

    Raises:
        ConfigError: The model cannot be evaluated as requested, for example at a length beyond its
            position embeddings; a node of the site has fewer GPUs; or the time limit is malformed.
    """
    # An evaluation does not split sequences between ranks, even where training does.
    values = config.model_dump(mode="json", exclude_none=True)
    split = ("sequence_parallel", "context_parallel_size", "world_size")
    whole = parse_config(values, str(run), [f"parallel.{key}=" for key in split])
    request.applied_to(whole, str(run))
    if tasks > site.max_tasks_per_node:
        raise ConfigError(
            f"--nproc {tasks}: a node of site {site.name} takes {site.max_tasks_per_node}. "
            "Request fewer"
        )
    tensor = config.parallel.tensor_model_parallel_size
    is_split = tensor > 1 and tasks % tensor == 0
    # Jobs of one name wait for each other. The hash separates runs whose shortened names are equal.
    name = slurm_job.job_name(".".join(run.parts[-2:]))
    digest = hashlib.sha256(os.fsencode(run)).hexdigest()[:8]
    # An evaluation saves nothing before its time limit, so it needs no time before the signal.
    check_time(time_limit, 0)
    return Plan(
        request=request,
        name=slurm_job.job_name(f"eval-{name[:40]}-{digest}"),
        site=site,
        directory=str(Path.cwd()),
        tasks_per_node=tasks,
        time_limit=time_limit,
        overrides=(f"parallel.tensor_model_parallel_size={tensor}",) if is_split else (),
    )


def evaluate_run(
    run: Path,
    site: Site,
    request: EvaluationRequest,
    tasks: int | None = None,
    time_limit: str | None = None,
) -> None:
    """Plan the evaluation of a run, and submit jobs for the checkpoints that it has.

    Checkpoints that were given up after failed evaluations are tried again. The jobs start in the
    current directory. Relative paths of the run's config must start there, as they did in training.

    Args:
        run: The run's directory, absolute.
        site: The cluster.
        request: The lengths and protocols to measure.
        tasks: As in `plan_evaluations`; by default all GPUs of a node.
        time_limit: As in `plan_evaluations`; by default the site's.

    Raises:
        ConfigError: `run` is not a run's directory, or the plan does not fit the site.
        SlurmError: Slurm refused a job.
    """
    slurm_job.check_path("RUN", run)
    check_trusted(run)
    check_version(run)
    config = RunPaths(run).newest_config()
    if config is None:
        raise ConfigError(
            f"{run}: not a run's directory (no config.toml). Give the run.directory of its config"
        )
    tasks, time_limit = tasks or site.max_tasks_per_node, time_limit or site.time_limit
    plan = plan_evaluations(request, load_config(config), run, site, tasks, time_limit)
    # Written before the jobs are submitted, because they read the plan when they start.
    write_plan(run, plan)
    # A folder with failed.json takes the place of a result. When it is removed, the checkpoint
    # counts again as not evaluated.
    for result in named_by_step(RunPaths(run).evaluations):
        if (result / "failed.json").exists():
            shutil.rmtree(result)
    if waiting := [path.name for path in checkpoints_awaiting_evaluation(run)]:
        submit_waiting(run, plan, waiting)
    else:
        say(
            f"{run}: no checkpoint is waiting for an evaluation; checkpoints that training saves "
            "from now on will be evaluated"
        )


POLL_SECONDS = 0.1
"""Time between two polls of the ranks."""


def run_job(run: Path, name: str) -> int:
    """Evaluate a checkpoint, update the run's report, and submit evaluations that are pending.

    Args:
        run: The run's directory.
        name: The checkpoint's name, step-########.

    Returns:
        The exit code of the job.

    Raises:
        ConfigError: No such checkpoint, no plan for evaluations, or not inside a Slurm job.
        RunFailed: A file cannot be written.
    """
    paths = RunPaths(run)
    checkpoint = paths.checkpoints / name
    if checkpoint_step(name) is None or not checkpoint.is_dir():
        raise ConfigError(
            f"{checkpoint}: no such checkpoint. Name one of the folders step-######## in "
            f"{paths.checkpoints}"
        )
    plan, job_id = read_plan(run), slurm.own_job_id("launcher evaluation")
    job, state = plan.job(run), slurm.job(job_id)
    python = [plan.site.ranks_python, "-m", "pretrain"]

    def start(out: Path) -> Ranks:
        settings = [word for override in plan.overrides for word in ("--set", override)]
        evaluate = ["evaluate", str(checkpoint), *plan.request.options(), *settings]
        # A directory that no other evaluation has.
        environment = {"PRETRAIN_RENDEZVOUS": str(out.parents[1])}
        command = [*python, *evaluate, "--out", str(out)]
        return SrunRanks(job.step(), command, job_id, name, environment, paths.evaluation_log(name))

    # SIGUSR1 asks to save and start again. An evaluation has nothing to save, so it continues.
    with job_signals() as signals:
        code = evaluate_once(run, name, start, signals)
        # At its time limit it is tried again. Whoever cancels it wants no other one.
        if signals.stops and not (state and state.ends_at and time.time() > state.ends_at - 60):
            return code
        # Also if another job made the result, as that job may have been killed before its report.
        if (paths.evaluations / name).exists():
            report = [*job.single(), *python, "report", str(run)]
            code = code or subprocess.run(report, check=False).returncode
        PendingEvaluations(run)(at_once=True)
        return code


def evaluate_once(
    run: Path, name: str, start: Callable[[Path], Ranks], signals: Signals | None = None
) -> int:
    """Evaluate a checkpoint, unless that was done before.

    The result is written in a hidden folder and published in one rename, so that a kill at any time
    leaves nothing that could be taken for a result. The next job starts from the beginning.

    Args:
        run: The run's directory.
        name: The checkpoint's name, step-########.
        start: Starts the ranks that evaluate; its argument is the curve.json to write.
        signals: Signals to this process. A signal that asks to stop ends the ranks.

    Returns:
        The exit code: 0 also when there was nothing to do.
    """
    result, signals = RunPaths(run).evaluations / name, signals or Signals()
    if result.exists():
        say(f"{name}: evaluated before")
        return ExitCode.FINISHED
    checkpoint = RunPaths(run).checkpoints / name
    out, lineage = _new_folder(run, name) / "result", read_lineage(checkpoint)
    ranks = start(out / "curve.json")
    try:
        while (code := ranks.poll()) is None:
            if signals.stops:
                ranks.kill()
            time.sleep(POLL_SECONDS)
    finally:
        if ranks.poll() is None:
            ranks.kill()
    if code:
        why = "asked to stop" if signals.stops else ranks.failure or f"exit code {code}"
        say(f"{name}: not evaluated: {why}")
        return code
    if read_lineage(checkpoint) != lineage:
        say(f"{name}: not evaluated: the run went back and saved another checkpoint of that name")
        return ExitCode.FAILED
    _publish(out, result)
    say(f"{name}: evaluated; see {result}/report.md")
    return ExitCode.FINISHED

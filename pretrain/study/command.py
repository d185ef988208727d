"""Run `pretrain study`: train missing runs, evaluate finished runs, and write the report."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import hashlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from pretrain.config import ConfigError, EvaluationRequest, RunFailed, dump_config, writing
from pretrain.config.errors import say
from pretrain.config.trajectory import settings_hash
from pretrain.data.stream import open_stream
from pretrain.evaluation.records import grouped, length_table, read_records, records_json
from pretrain.processes import Processes, Stopped
from pretrain.rundir.checkpoints import lock_alone
from pretrain.rundir.files import make_directory, read_json, replace_json
from pretrain.rundir.paths import ExitCode
from pretrain.study.reading import count_unigram, read_results
from pretrain.study.runs import (
    CURVE,
    FAILED,
    FINISHED,
    LOCK,
    State,
    Study,
    StudyRun,
    check_directory,
    check_records,
    check_runs,
    compare_losses,
    data_sets,
    dump_study,
    is_recorded,
    load_study_file,
    other_differences,
    records_of,
    request_of,
    resolve,
    runs_table,
    state_of,
    states_of,
    write_changed,
    write_record,
    write_study,
)

# ---- Evaluate finished runs that have no record yet ----


def evaluate(work: Work, runs: Sequence[StudyRun]) -> None:
    """Evaluate finished runs with one `pretrain evaluate`, and write their records.

    Raises:
        ConfigError: The text is shorter than a length that the study file names.
        RunFailed: The evaluation failed, as it has printed.
    """
    study = work.study
    with tempfile.TemporaryDirectory(prefix="pretrain-study-") as folder:
        curve = Path(folder) / CURVE
        command = [
            *(sys.executable, "-m", "pretrain", "evaluate"),
            *(run.config.run.directory for run in runs),
            *_request(study, runs[0]).options(),
            *("--out", str(curve)),
        ]
        work.run("pretrain evaluate", *ranks(command, work.request.nproc, folder))
        found = grouped(read_records(curve), lambda record: PurePath(record["run"]).name)
    for run in runs:
        write_record(study, run, found[run.name])


def ranks(command: Sequence[str], nproc: int, rendezvous: str) -> list[list[str]]:
    """Return the command lines of `nproc` processes that execute one command together.

    Args:
        command: The command.
        nproc: Processes on this machine.
        rendezvous: A folder in which rank 0 publishes the address on which it listens.
    """
    if nproc == 1:
        return [list(command)]
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    return [
        [
            # Set by env(1), because only the launcher may read the environment. A port set by the
            # user is dropped: a second run on this machine would connect to the first run there.
            *("env", "--unset=MASTER_PORT", f"RANK={rank}", f"LOCAL_RANK={rank}"),
            *(f"WORLD_SIZE={nproc}", f"LOCAL_WORLD_SIZE={nproc}", "MASTER_ADDR=127.0.0.1"),
            *(f"OMP_NUM_THREADS={threads}", f"PRETRAIN_RENDEZVOUS={rendezvous}"),
            *command,
        ]
        for rank in range(nproc)
    ]


def _request(study: Study, run: StudyRun) -> EvaluationRequest:
    """Return the request for `pretrain evaluate`, without default lengths longer than the text.

    Args:
        study: The study.
        run: Any of its runs, for the validation text.
    """
    request = request_of(study.asked.evaluation, study.lengths)
    if study.asked.evaluation.lengths is not None:
        return request
    tokens = len(open_stream(run.config, "validation"))
    tokens = min(tokens, request.max_tokens or tokens)
    reached = tuple(length for length in study.lengths if length <= tokens)
    if not reached:
        raise ConfigError(
            f"{study.file}: the {tokens:,} tokens that are scored are less than one window of "
            f"{study.lengths[0]}. Hold out more text, or raise evaluation.max_tokens"
        )
    for length in study.lengths[len(reached) :]:
        print(f"length {length:,} left out: the text that is scored has {tokens:,} tokens")
    return dataclasses.replace(request, lengths=reached)


COSTS: Any = {
    **dict.fromkeys(("model", "parallel", "batch"), True),
    "train": {"recompute_granularity", "fusion"},
    "evaluation": {"tokens_per_batch"},
}
"""Keys that decide speed or memory and do not change training. What changes training may cost time
as well, so all of it counts."""


@dataclass(frozen=True)
class Request:
    """Options that a user gave to `pretrain study`."""

    nproc: int = 1
    """Processes of each run, of the evaluation and of the measurement of efficiency."""
    site: Path | None = None
    """The site file of a Slurm cluster to which the runs are submitted; None trains here."""
    report_only: bool = False
    """Train nothing."""
    only: str = "*"
    """A pattern: only missing runs whose names match are trained."""
    again: bool = False
    """Train the matching runs again although they are recorded, if their weights are not here, and
    compare the losses with the record."""


@dataclass
class Work:
    """A study in progress."""

    study: Study
    request: Request
    processes: Processes = field(default_factory=Processes)
    launched: dict[str, str] = field(default_factory=dict)
    """Run -> how the launcher failed in this command, for runs for which it did."""

    @property
    def again(self) -> str:
        """Return the command that continues the study, as the user typed it."""
        return shlex.join(["pretrain", *sys.argv[1:]])

    def run(self, what: str, *commands: list[str]) -> None:
        """Run commands at the same time until all have ended.

        Args:
            what: What the commands do, for the message.
            commands: The arguments of each command.

        Raises:
            RunFailed: A command failed, as it has printed.
            Stopped: The user asked to stop.
        """
        code = self.processes.run(commands)
        if code:
            _stop_if_asked(self)
            raise RunFailed(
                f"{what} ended with exit code {code}; see above. Once that is fixed, go on with "
                f"{self.again}"
            )

    def record(self) -> list[tuple[StudyRun, State]]:
        """Write study.json, and return every run with its state."""
        states = states_of(self.study, self.launched)
        write_study(self.study, states)
        return states


def _open(path: Path, nproc: int | None, only: str, again: bool = False) -> Study:
    """Load and check a study before anything is written, and print in what its runs differ."""
    study = resolve(path, load_study_file(path))
    check_directory(study)
    check_runs(study, nproc)
    chosen = _matching(states_of(study), only)
    check_records(study, {run.name for run, _ in chosen} if again else ())
    for line in other_differences(study):
        say(f"{path}: the runs differ in more than method, length and seed: {line}")
    return study


def run_study(path: Path, request: Request) -> int:
    """Do all work of a study that is not done yet.

    Args:
        path: The study file.
        request: The options of the command.

    Returns:
        The exit code: 1 if a run failed, 80 if the user stopped it, else 0.

    Raises:
        ConfigError: The study cannot work; no run was started.
        RunFailed: The data could not be built, or runs could not be submitted or evaluated.
    """
    nproc = None if request.site or request.report_only else request.nproc
    study = _open(path, nproc, request.only, request.again)
    work = Work(study, request)
    with writing(study.directory), _alone(study):
        try:
            with work.processes.listening():
                return _work(work)
        except Stopped:
            work.record()
            say(f"stopped; go on with:\n  {work.again}")
            return ExitCode.STOPPED


def print_plan(path: Path, nproc: int | None, only: str, again: bool) -> None:
    """Print every run, in the order in which they would train, and what is left to do.

    Args:
        path: The study file.
        nproc: Processes of each run; None to skip the check of the layout.
        only: Pattern of the names of runs to print.
        again: As in `Request`.

    Raises:
        ConfigError: The study cannot work, or no run matches.
    """
    study = _open(path, nproc, only, again)
    states = _to_train(_matching(states_of(study), only), again)
    for run, state in states:
        last = run.config.train.num_steps
        start = f"from step {state.step}" if state.step else "from scratch"
        to_do = "finished" if state.state == FINISHED else f"{start}, to step {last}"
        why = f" ({state.state}: {state.reason})" if state.state == FAILED else ""
        print(
            f"{run.name}: {run.trained.tokens_per_step:,} tokens a step, seed {run.seed}, "
            f"{to_do}{why}"
        )
    left = [run for run, state in states if state.state != FINISHED]
    for run in data_sets(left):
        print(f"{run.config.data.directory}: not built yet; it would be built first")
    lengths = ", ".join(f"{length:,}" for length in study.lengths)
    print(f"{len(left)} of {len(states)} runs would train; the lengths evaluated are {lengths}")


def _matching(states: list[tuple[StudyRun, State]], only: str) -> list[tuple[StudyRun, State]]:
    """Return the runs whose names match the pattern of --only."""
    if chosen := [each for each in states if fnmatch.fnmatchcase(each[0].name, only)]:
        return chosen
    names = ", ".join(run.name for run, _ in states)
    raise ConfigError(f"--only {only}: matches no run. The runs are {names}")


def _to_train(states: list[tuple[StudyRun, State]], again: bool) -> list[tuple[StudyRun, State]]:
    """Return the states; with --again those of the weights, whatever has been recorded."""
    return [(r, state_of(r) if again and r.record.exists() else state) for r, state in states]


def _work(work: Work) -> int:
    """Train, evaluate, measure and report, as far as that is not done yet."""
    study = work.study
    write_changed(study.directory / "study.toml", dump_study(study.asked))
    for run in study.runs:
        write_changed(study.config_file(run), dump_config(run.config))
    named = {run.name for run in study.runs}
    for row in read_json(study.directory / "study.json").get("runs", []):
        if row["name"] not in named:
            # Removed, because `launcher sweep STUDY/configs/*.toml` would train it.
            (study.directory / "configs" / f"{Path(row['name']).name}.toml").unlink(missing_ok=True)
    states = work.record()
    chosen = _matching(states, work.request.only)
    again = [run for run, _ in chosen if work.request.again and run.record.exists()]
    to_train = _to_train(chosen, work.request.again)
    left = [run for run, state in to_train if state.state != FINISHED]
    if left and not work.request.report_only:
        for run in data_sets(left):
            say(f"{run.config.data.directory}: not built yet; building it")
            words = ["data", "build", str(study.config_file(run))]
            command = [sys.executable, "-m", "pretrain", *words]
            work.run(f"{run.config.data.directory}: the build", command)
        # Checked again, because data that was just built must equal that of runs trained before.
        check_runs(study, None)
        if work.request.site is not None:
            return _submit(work, left)
        _train(work, left)
        states = work.record()
    compared = {run.name: compare_losses(run) for run in again if state_of(run).state == FINISHED}
    for _, line in compared.values():
        say(line)
    # A run with other losses is not evaluated, because that would replace its record.
    other = {
        name: State(FAILED, line.removeprefix(f"{name}: "))
        for name, (same, line) in compared.items()
        if not same
    }
    return _report(work, [(run, other.get(run.name, state)) for run, state in states])


# ---- training ------------------------------------------------------------------------------------
def _train(work: Work, left: list[StudyRun]) -> None:
    """Train runs one after another with `launcher local`; a failure does not stop the others.

    Args:
        work: The study in progress.
        left: The runs that are not finished.

    Raises:
        Stopped: The user asked to stop.
    """
    for number, run in enumerate(left, 1):
        say(f"{run.name}: run {number} of the {len(left)} that are left")
        words = ["local", str(work.study.config_file(run)), f"--nproc={work.request.nproc}"]
        code = work.processes.run([_launcher(*words)])
        _stop_if_asked(work)
        if code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
            # Somebody stopped the run from outside, so the next run is not begun either.
            raise Stopped
        if code:
            work.launched[run.name] = f"launcher local ended with exit code {code}"
            say(f"{run.name}: failed with exit code {code}; the other runs go on")
        work.record()


def _submit(work: Work, left: list[StudyRun]) -> int:
    """Submit runs to Slurm as one job array, and print the next step.

    Raises:
        RunFailed: The launcher refused, as it has printed.
    """
    study = work.study
    files = [str(study.config_file(run)) for run in left]
    work.run("launcher sweep", _launcher("sweep", *files, "--site", str(work.request.site)))
    print(runs_table(work.record()).plain())
    print(f"next: {work.again}")
    print("      sends what failed again, and reports when all runs are finished.")
    print(f"      To report on those that are:\n      {study.command} --report-only")
    return ExitCode.FINISHED


# ---- evaluation and report -----------------------------------------------------------------------
def _report(work: Work, states: list[tuple[StudyRun, State]]) -> int:
    """Evaluate finished runs, measure efficiency, and write the report.

    Args:
        work: The study in progress.
        states: Every run with its state.

    Returns:
        The exit code of the study.

    Raises:
        RunFailed: The evaluation failed, as it has printed.
    """
    study, runs = work.study, [run for run, state in states if state.state == FINISHED]
    if fresh := [run for run in runs if not is_recorded(study, run)]:
        say(f"evaluating {len(fresh)} of {len(study.runs)} runs")
        evaluate(work, fresh)
    write_changed(study.curve, records_json(records_of(study)).decode())
    if runs:
        _count_unigram(study, runs[0])
    measured = _measure(work)
    # Imported here, because the libraries for figures take a while to import.
    from pretrain.study.report import write_reports

    results = [read_results(part, states) for part in study.parts]
    write_reports(study, results)
    _stop_if_asked(work)
    if len(runs) == len(study.runs) and not (work.processes.launches or measured):
        say(f"{study.directory}: finished already; nothing to train or to evaluate")
    print(runs_table(states).plain())
    for part in results:
        if part.evidence.curves:
            print(f"\n{part.study.title}. {length_table(part.evidence.curves).plain()}")
    print(f"\nreport: {study.report / 'report.md'}")
    return ExitCode.FAILED if any(s.state == FAILED for _, s in states) else ExitCode.FINISHED


def _count_unigram(study: Study, run: StudyRun) -> None:
    """Count how often each token of the scored text occurs, unless that has been done."""
    try:
        stream = open_stream(run.config, "validation")
        count_unigram(study.directory, stream, study.asked.evaluation.max_tokens)
    except ConfigError as error:
        say(f"token frequencies of the scored text: not counted: {error}")


def _measure(work: Work) -> bool:
    """Measure efficiency, unless it has been measured or the study asks for none.

    An existing efficiency.json is removed if it is of other configs. It counts if it has the same
    number of rounds. Its "device" says how many processes it is of: a clone keeps it as it is.

    Returns:
        True if something was measured.
    """
    study, rounds = work.study, work.study.asked.efficiency.rounds
    file = study.directory / "efficiency.json"
    # The speed at its last length does not tell how long a run of several lengths was trained.
    timed = [
        run
        for run in study.runs
        if all(p.config.data.sequence_length == run.train_length for p in run.config.parts)
    ]
    contestants = {(run.method, run.train_length): run for run in reversed(timed)}
    runs = [run for run in timed if run in contestants.values()]
    asked, there = measured_as(runs), read_json(file)
    if there and there.get("asked") != asked:
        say(f"{file}: is of other configs than the study's; removed")
        file.unlink()
        there = {}
    if not rounds or not runs or there.get("rounds") == rounds:
        return False
    if work.request.site is not None or work.request.report_only:
        say("efficiency: measured without --site and --report-only, on a machine that trains")
        return False
    from pretrain.bench.timing import measure

    for run in study.runs:
        if run not in timed:
            say(f"efficiency: {run.name} is left out, because its phases differ in length")
    say(f"measuring speed and memory of {len(runs)} methods and lengths, {rounds} rounds")
    try:
        result = measure([run.trained for run in runs], rounds, work.request.nproc)
    except RunFailed as error:
        say(f"efficiency: not measured: {error}")
        return False
    replace_json(file, {**result, "asked": asked}, indent=1)
    return True


def measured_as(runs: Sequence[StudyRun]) -> str:
    """Return a hash of all that the speed and memory of runs depend on besides the machine."""
    configs = [run.trained for run in runs]
    parts = [settings_hash(c, None) + c.model_dump_json(include=COSTS) for c in configs]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# ---- helpers -------------------------------------------------------------------------------------
@contextlib.contextmanager
def _alone(study: Study) -> Iterator[None]:
    """Hold the study's lock while the block runs.

    Raises:
        ConfigError: Another command holds the lock.
    """
    make_directory(study.directory)
    with (study.directory / LOCK).open("w") as file:
        if not lock_alone(file.fileno()):
            raise ConfigError(
                f"{study.directory}: another `pretrain study` works on it. Wait until it ends"
            )
        yield


def _stop_if_asked(work: Work) -> None:
    """Raise Stopped if the user asked to stop."""
    if work.processes.stopped:
        raise Stopped


def _launcher(*words: str) -> list[str]:
    """Return a command line of the launcher."""
    return [sys.executable, "-m", "pretrain.launcher", *words]

"""Check `launcher status`, `logs`, `cancel` and `requeue` on a real Slurm.

They are tried on jobs, on tasks of an array, and while slurmctld is down. The ranks' Python is a
script that counts instead of training; supervisor, signals, jobs and files are real.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from pretrain.rundir.attempts import AttemptRecord, read_attempts
from pretrain.rundir.jobs import JobRecord, append_job, read_jobs
from tests.end_to_end.commands import (
    LAUNCHER,
    ROOT,
    TIMEOUT_SECONDS,
    Done,
    launcher,
    sets,
    wait_for,
)
from tests.slurm.cluster import Cluster
from tests.slurm.runs import with_scripted_ranks, write_configs, write_site
from tests.slurm.scripted import ScriptedRun, prepare


class Desk:
    """A researcher's directory on the login node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        write_site(folder / "site.toml", nodes=4, python=prepare(folder))

    def launcher(self, *words: object, code: int = 0, **environment: str) -> Done:
        variables = os.environ | self.cluster.environment | {"COLUMNS": "120"} | environment
        done = launcher(with_scripted_ranks(words), self.folder, variables)
        assert done.code == code, done.text
        return done

    def send(self, command: str, *words: object, run: str = "runs/a") -> Done:
        given = ("data.directory=data", f"run.directory={run}", "batch.micro_batch_size=8")
        for setting in given:
            words = ("--set", setting, *words)
        return self.launcher(command, ROOT / "configs/demo.toml", "--site", "site.toml", *words)

    def sweep(self, lengths: Sequence[int], *words: object, **options: Any) -> Done:
        """Send the runs runs/a/LENGTH as one array."""
        own = {f"runs/a/{length}": f"data.sequence_length = {length}" for length in lengths}
        configs = write_configs(self.folder, ROOT / "configs/demo.toml", own)
        settings = sets("data.directory=data", "batch.micro_batch_size=8")
        words = (*configs, "--site", "site.toml", *settings, *words)
        return self.launcher("sweep", *words, **options)

    @contextlib.contextmanager
    def started(self, *words: object, output: IO[str]) -> Iterator[subprocess.Popen[str]]:
        command = [str(word) for word in (*LAUNCHER, *words)]
        process = subprocess.Popen(
            command,
            env=os.environ | self.cluster.environment,
            cwd=self.folder,
            text=True,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def wait_for_step(self, run: str, attempt: int) -> AttemptRecord:
        """The attempt with this number, once it trains and has taken a few steps."""
        sent = ScriptedRun(self.cluster, self.folder / run)
        wait_for(lambda: sent.trains(attempt))
        return sent.attempts[-1]

    def job_states(self) -> dict[str, str]:
        """Return the state of each job in the queue, an array's tasks separately."""
        done = self.cluster.run("squeue", "--noheader", "--array", "--format=%i %T")
        return {job_id: state for job_id, state in map(str.split, done.stdout.splitlines())}


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path) -> Desk:
    return Desk(cluster, tmp_path)


def fields(text: str) -> dict[str, str]:
    """Parse a table of one run: column -> value.

    A value begins or ends where the head of its column does.
    """
    head, row = (
        [(m[0], m.start(), m.end()) for m in re.finditer(r"\S+(?: \S+)*", line)]
        for line in text.splitlines()[-2:]
    )
    return {
        name: value
        for name, begin, end in head
        for value, first, last in row
        if begin == first or end == last
    }


def check_followed(text: str, run: Path) -> None:
    """Check that `logs --follow --rank 1` printed the two attempts' lines from some line on."""
    said = [line for line in text.splitlines() if "took" in line]
    logs = [(run / f"logs/attempt-{number:04d}.log").read_text() for number in (1, 2)]
    first, second = (re.findall(r"^ *1: (.* took .*)$", log, re.MULTILINE) for log in logs)
    assert said == [*first[len(second) - len(said) :], *second] and said[0] in first


def test_a_run_is_followed_requeued_saved_stopped_and_sent_again(desk: Desk) -> None:
    run, job = "runs/a", desk.send("submit", "--nodes", 2).out.split()[1].strip(":")
    desk.wait_for_step(run, 1)
    row = fields(desk.launcher("status").out)
    assert row["RUN"] == run and row["STATE"] == "RUNNING" and row["RESTARTS"] == "0"
    assert (
        row["NODES"] == desk.cluster.job(job)["NodeList"]
        and row["TOKENS/S"] == "4.00k"
        and row["LOSS"] == "2.500"
    )
    assert 0 < int(row["STEP"].removesuffix("/320")) < 320

    log = desk.folder / "followed"
    with (
        log.open("w") as output,
        desk.started("logs", run, "--follow", "--rank", 1, output=output) as following,
    ):
        wait_for(lambda: "attempt 1: rank 1 took step" in log.read_text())
        assert f"job {job}: asked to save" in desk.launcher("requeue", run).out
        second = desk.wait_for_step(run, 2)
        first = read_attempts(desk.folder / run)[0]
        assert (
            first.ended
            and first.ended.outcome == "restart"
            and second.owner.checkpoint_step == first.ended.step
        )
        assert (
            desk.job_states()[job] == "RUNNING"
            and fields(desk.launcher("status").out)["RESTARTS"] == "1"
        )

        evaluation = desk.cluster.run(
            "sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 300"
        ).stdout.strip()
        append_job(
            desk.folder / run,
            JobRecord(evaluation, "evaluate", "e", time.time(), "tests", 1, 1, run),
        )
        done = desk.launcher("cancel", run, "--save")
        assert f"job {evaluation}: evaluates a checkpoint, not cancelled" in done.out
        step = max(int(path.name[5:]) for path in (desk.folder / run / "checkpoints").iterdir())
        assert (
            f"stopped after step {step}; newest checkpoint step-{step:08d}" in done.out
            and step > second.step
        )
        following.wait(TIMEOUT_SECONDS)
    check_followed(log.read_text(), desk.folder / run)
    assert f"{run}: stopped: saved at step {step}" in log.read_text()

    shown = desk.launcher("status", run).out
    assert re.search(r"^state +stopped$", shown, re.M) and "goodput" in shown
    assert re.search(rf"^checkpoint +{step}$", shown, re.M)
    whole = desk.launcher("logs", run).out
    assert {"0", "1"} == {
        line.split(":")[0].strip() for line in whole.splitlines() if " took " in line
    }
    assert "ranks 0 to 1" in desk.launcher("logs", run, "--rank", 2, code=2).err

    wait_for(lambda: job not in desk.job_states())
    assert f"job {evaluation}: cancelled; it was to evaluate" in desk.launcher("cancel", run).out
    # Another test's evaluation may still wait for its second attempt.
    wait_for(lambda: not {job, evaluation} & desk.job_states().keys())
    assert "no job in the queue (stopped" in desk.launcher("cancel", run, code=2).err
    new = desk.launcher("requeue", run).out.split("job ")[-1].split(";")[0].strip()
    assert new != job and read_jobs(desk.folder / run)[-1].job_id == new
    third = desk.wait_for_step(run, 3)
    assert third.owner.checkpoint_step == step and third.owner.slurm_job_id == new
    (desk.folder / run / "finish").touch()
    wait_for(lambda: read_attempts(desk.folder / run)[-1].ended)
    wait_for(lambda: new not in desk.job_states())
    assert fields(desk.launcher("status").out)["STATE"] == "finished"
    assert "is finished; nothing to do" in desk.launcher("requeue", run).out


def test_tasks_of_an_array_and_a_controller_that_is_away(desk: Desk) -> None:
    desk.sweep((128, 256), "--concurrent", 1)
    one, two = "runs/a/128", "runs/a/256"
    first, second = (read_jobs(desk.folder / run)[0].job_id for run in (one, two))
    assert (first.split("_")[1], second.split("_")[1]) == ("0", "1")
    desk.wait_for_step(one, 1)
    rows = {line.split()[0]: line for line in desk.launcher("status").out.splitlines()}
    assert (
        " RUNNING " in rows[one]
        and " PENDING " in rows[two]
        and all(len(row) <= 120 for row in rows.values())
    )
    assert "State: PENDING" in desk.launcher("logs", two, code=2).err
    assert "starts by itself" in desk.launcher("requeue", two).out

    desk.cluster.kill_controller()
    try:
        text = desk.launcher("status").out
        assert "slurmctld does not answer" in text.splitlines()[0]
        rows = {line.split()[0]: line for line in text.splitlines()}
        assert " running " in rows[one] and " unknown " in rows[two]
    finally:
        desk.cluster.start_controller()

    assert f"job {second}: cancelled; it was waiting" in desk.launcher("cancel", two).out
    wait_for(lambda: second not in desk.job_states())
    assert (
        " ended "
        in {line.split()[0]: line for line in desk.launcher("status").out.splitlines()}[two]
    )
    sent = desk.launcher("requeue", two).out
    again = read_jobs(desk.folder / two)[-1].job_id
    assert f"submitted again as job {again}" in sent and again != second and again.endswith("_1")
    desk.wait_for_step(two, 1)
    assert desk.cluster.job(again)["JobName"] == read_jobs(desk.folder / two)[0].name
    assert desk.cluster.job(first)["JobName"] == "runs.a"
    assert desk.job_states().keys() == {first, again}
    assert "cancelled; it may save" in desk.launcher("cancel", one).out
    wait_for(lambda: desk.job_states().keys() == {again})

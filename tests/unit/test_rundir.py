"""The run's directory: names, publication, damaged files, and the page that describes it all."""

import dataclasses
import json
import math
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pretrain.config import ConfigError, RunFailed
from pretrain.evaluation.report import report_run
from pretrain.launcher import slurm
from pretrain.launcher.control import _submit_again
from pretrain.rundir.attempts import Attempt, read_attempts
from pretrain.rundir.checkpoints import (
    MANIFEST,
    checkpoint_directory,
    checkpoint_step,
    checkpoints_awaiting_evaluation,
    complete_checkpoints,
    find_checkpoint,
    newest_checkpoint_step,
)
from pretrain.rundir.files import append_json_line, publish_directory, read_json_lines
from pretrain.rundir.jobs import JobRecord, LaunchRecord, append_job, read_jobs
from pretrain.rundir.metrics import MetricsFile, evaluation_records, evaluations_at, read_metrics
from pretrain.rundir.paths import VERSION, RunPaths, check_version, claim_version

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/run_directory.md").read_text()


def complete(run: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_directory(run, step).mkdir(parents=True)
        (checkpoint_directory(run, step) / MANIFEST).write_text("{}")


# ---- names of checkpoints ----
@pytest.mark.parametrize(
    "name",
    ["step-0000001", "step-0000000100", ".step-00000100.partial", "step-²²²²²²²²", "step-١١١١١١١١"],
)
def test_what_is_no_checkpoints_name(name):
    assert checkpoint_step(name) is None


def test_a_step_of_nine_digits_comes_after_one_of_eight(tmp_path):
    steps = [99_999_999, 100_000_000, 1_000_000_000, 5]
    complete(tmp_path, *steps)
    assert [checkpoint_step(p.name) for p in complete_checkpoints(tmp_path)] == sorted(steps)
    assert newest_checkpoint_step(tmp_path) == 1_000_000_000
    assert find_checkpoint(tmp_path) == checkpoint_directory(tmp_path, 1_000_000_000)
    # The launcher's lock and the evaluation jobs see the same checkpoint.
    assert Attempt.begin(tmp_path) and read_attempts(tmp_path)[0].owner.checkpoint_step == 10**9
    RunPaths(tmp_path).evaluations.mkdir()
    RunPaths(tmp_path).evaluation_plan.write_text("{}")
    assert checkpoints_awaiting_evaluation(tmp_path) == complete_checkpoints(tmp_path)


# ---- publication ----


def test_one_of_two_publishers_wins(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    publish_directory(tmp_path / "one", tmp_path / "final")
    with pytest.raises(OSError):
        publish_directory(tmp_path / "two", tmp_path / "final")
    assert (tmp_path / "final/content").read_text() == "one"


def test_a_checkpoints_link_to_nowhere_is_no_fresh_start(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
    with pytest.raises(ConfigError, match=r"links to .*not mounted, which is not there"):
        complete_checkpoints(tmp_path)


# ---- damaged files ----
DAMAGE = {
    "half a line": b'{"step": 3, "loss_n',
    "NULs": b"\0" * 4096,
    "not UTF-8": b'{"step": 3, "loss_nats": "\xff\xfe"',
    "an empty line": b"\n\n",
    "a number": b"17\n",
    "a list": b"[1, 2]\n",
    "a step that is none": b'{"step": "x"}\n{"step": null}\n{"step": true}\n{"loss_nats": 1.0}\n',
    "deeply nested": b"[" * 100_000 + b"\n",
}


def step(number: int, loss: float = 1.0) -> dict:
    return {"step": number, "loss_nats": loss, "step_seconds": 0.5}


def evaluation(number: int, length: int = 128) -> dict:
    key = {"protocol": "sliding", "stride": 64, "length": length, "tokens": 1024}
    return {**step(number), "evaluation": True, **key, "perplexity": 3.0}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_metrics_are_read_and_continued_whatever_a_crash_left(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    records = [step(1), step(2, math.nan), evaluation(2), evaluation(2, 256)]
    file = MetricsFile(path, 0)
    for record in records:
        file.write(record)
    file.close()
    with path.open("ab") as damaged:
        damaged.write(damage)
    assert repr(list(read_metrics(path))) == repr(records)
    assert [record["length"] for record in evaluation_records(path, 2)] == [128, 256]
    assert evaluations_at(path, 2) == {("sliding", 64, 128), ("sliding", 64, 256)}
    # A resume drops the damage and what came after the checkpoint.
    file = MetricsFile(path, 2)
    file.write(step(3, -math.inf))
    file.close()
    assert repr(list(read_metrics(path))) == repr([*records, step(3, -math.inf)])
    assert b"\0" not in path.read_bytes()
    assert all(json.loads(line)["step"] for line in path.read_text().splitlines())


def test_a_change_is_kept_until_training_goes_on_from_before_it(tmp_path):
    """At the very step it is dropped: the run writes it again as far as it still holds."""
    path = tmp_path / "metrics.jsonl"
    change = {"step": 2, "changed": {"optimizer.clip_grad": [1.0, "inf"]}}
    records = [step(1), step(2), evaluation(2), change, step(3)]
    for resumed, kept in ((3, records), (2, records[:3]), (1, records[:1])):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        MetricsFile(path, resumed).close()
        assert list(read_metrics(path)) == kept
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert evaluation_records(path, 2) == [evaluation(2)]
    assert len(evaluations_at(path, 2)) == 1
    for resumed, kept in ((1, [{**change, "step": 0}]), (0, [])):
        path.write_text(json.dumps({**change, "step": 0}) + "\n")
        MetricsFile(path, resumed).close()
        assert list(read_metrics(path)) == kept


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path, capfd):
    """What it takes of a line stays, and the rest follows; `flush` says that not all is there."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    with no_file_beyond(70):
        for number in (1, 2, 3):
            file.write(step(number))
        assert path.stat().st_size == 70
        with pytest.raises(RunFailed, match="cannot be written"):
            file.flush()
    file.write(step(4))
    file.flush()
    file.close()
    assert list(read_metrics(path)) == [step(number) for number in (1, 2, 3, 4)]
    # stderr is a file as well here, so the warning may be cut off.
    assert capfd.readouterr().err.count("warning: ") == 1


def test_a_line_after_a_torn_one_stands_alone(tmp_path):
    path = tmp_path / "jobs.jsonl"
    append_json_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"a": 2, "b')
    append_json_line(path, {"a": 3})
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 3}]


def test_a_line_that_the_disk_took_in_part_is_an_error(tmp_path):
    """The job was sent, so a record that is cut off must not look like success."""
    (tmp_path / "jobs.jsonl").write_text("x" * 1000)
    with no_file_beyond(1010), pytest.raises(OSError, match="No space left"):
        append_json_line(tmp_path / "jobs.jsonl", {"job_id": "a job's number"})


# ---- the version ----
def test_a_directory_of_another_version_is_refused(tmp_path):
    check_version(tmp_path)
    claim_version(tmp_path)
    written = json.loads(RunPaths(tmp_path).version.read_text())
    assert written["run_directory_version"] == VERSION
    for version in (VERSION + 1, "2", 0, True, None):
        RunPaths(tmp_path).version.write_text(json.dumps({"run_directory_version": version}))
        for use in (check_version, claim_version, Attempt.begin, find_checkpoint, report_run):
            with pytest.raises(ConfigError, match=r"run\.json: run_directory_version = "):
                use(tmp_path)
    for damaged in ("x", "{}"):
        RunPaths(tmp_path).version.write_text(damaged)
        with pytest.raises(ConfigError, match=r"= None: the file is damaged\..*move it away"):
            claim_version(tmp_path)
    assert read_attempts(tmp_path) == []


# ---- the page ----
def table(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    lines = PAGE[PAGE.index(f"\n## {heading}\n") :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def undocumented(run: Path) -> list[str]:
    """What lies in a run's directory and has no row in the page. Hidden files are temporary."""
    patterns = []
    paths = [names(row[0])[0] for row in table("Paths")]
    for each in paths:
        pattern = re.escape(each.rstrip("/"))
        pattern = pattern.replace(r"\#" * 8, r"\d{8,}").replace(r"\#" * 4, r"\d{4,}")
        pattern = re.sub(r"<\w+>", r"[\\w]+", pattern)
        # A folder's row stands for what is in it, unless its files have rows of their own.
        inner = any(path != each and path.startswith(each) for path in paths)
        patterns.append(pattern + ("(/.*)?" if each.endswith("/") and not inner else ""))
    allowed = re.compile("|".join(patterns))
    found = []
    for path in run.rglob("*"):
        name = path.relative_to(run).as_posix()
        if path.is_file() and not allowed.fullmatch(name):
            found.append(name)
    return sorted(found)


def test_a_job_belongs_to_the_directory_it_was_sent_for_and_not_to_a_copy(tmp_path):
    run, copy, moved = (tmp_path / name for name in ("run", "copy", "moved"))
    run.mkdir()
    append_job(run, JobRecord("7", "train", "run", 1.0, "site", 1, 1, str(run)))
    shutil.copytree(run, copy)
    run.rename(moved)
    assert read_jobs(copy) == [] and [job.job_id for job in read_jobs(moved)] == ["7"]
    # The batch script would start what lies at the former path.
    with pytest.raises(ConfigError, match=f"was submitted as {run}, and moved since"):
        _submit_again(moved, read_jobs(moved)[0])


def test_what_is_submitted_again_is_the_run_of_the_script(tmp_path, monkeypatch):
    """Slurm refused a later sweep: RUN/launch has its script, the newest record an earlier task."""
    sent = []
    monkeypatch.setattr(slurm, "submit_script", lambda *given: sent.append(given) or "9")
    record = JobRecord("7_3", "train", "b", 1.0, "site", 1, 1, str(tmp_path))
    words = ("--array=0-1", f"--output={tmp_path}/sweep/slurm-%A_%a.log")
    launch = LaunchRecord(("srun",), "python", 1, 1, words, {}, 1)
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    paths.launch_record.parent.mkdir()
    paths.launch_record.write_text(json.dumps(dataclasses.asdict(launch)))
    paths.launch_script.write_text("script")
    _submit_again(tmp_path, record)
    assert sent == [(["--array=1", words[1]], "script")]
    assert read_jobs(tmp_path)[-1].job_id == "9_1"
    assert paths.slurm_log("9_1").readlink() == Path("../sweep/slurm-9_1.log")

"""Run `pretrain study` as a user types it: real trainings, stopped at any moment and gone on."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.commands import PRETRAIN, ROOT, Done, Running, succeeded, wait_for
from tests.end_to_end.conftest import CONFIG

STUDY = """
title = "Two methods"
directory = "s"
configs = [{configs}]
settings = ["recovery.max_restarts=0"]

[evaluation]
lengths = [16, 32, 64]
stride = 16
max_tokens = 2048
"""
LEARNING_RATES = {"alibi": "1e-3", "sinusoidal": "1e-3", "none": "1e30"}
"""Without positions, training diverges at once."""


class Desk:
    """A researcher's folder, with a config for each method."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        for method, rate in LEARNING_RATES.items():
            text = CONFIG.format(folder=folder, data=data).replace("1e-3", rate)
            text += f'\n[position]\nmethod = "{method}"\n'
            (folder / f"{method}.toml").write_text(text)

    def write(self, *methods: str) -> None:
        """Write the study file of these methods."""
        configs = ", ".join(f'"{method}.toml"' for method in methods)
        (self.folder / "study.toml").write_text(STUDY.format(configs=configs))

    def start(self, *words: str, file: str = "study.toml") -> Running:
        command = [*PRETRAIN, "study", file, *words]
        return Running(command, {"PYTHONPATH": str(ROOT)}, self.folder)

    def study(self, *words: str) -> Done:
        return self.start(*words).ended()

    def attempts(self) -> dict[str, int]:
        """Return how many attempts each run has."""
        runs = sorted(path.parent for path in (self.folder / "s/runs").glob("*/attempts"))
        return {run.name: len(list((run / "attempts").glob("0*"))) for run in runs}

    def evaluation(self) -> os.stat_result:
        """Return what tells one evaluation from another that wrote the same."""
        return (self.folder / "s/evaluation/curve.json").stat()

    def runs(self) -> dict[str, dict[str, str]]:
        """Return study.json's runs by name."""
        runs = json.loads((self.folder / "s/study.json").read_text())["runs"]
        return {run["name"]: run for run in runs}


def moved(desk: Desk, folder: Path, *without: str) -> Desk:
    """Return a copy of a desk in another folder, but for what has these names."""
    shutil.copytree(desk.folder / "s", folder / "s", ignore=shutil.ignore_patterns(*without))
    for file in desk.folder.glob("*.toml"):
        shutil.copy(file, folder)
    found = copy.copy(desk)
    found.folder = folder
    return found


class Whole(NamedTuple):
    """A study that was stopped in its first run, and went on."""

    desk: Desk
    stopped: Done
    stopped_runs: dict[str, dict[str, str]]
    failed: Done
    """Gone on, with a run that diverges."""
    failed_runs: dict[str, dict[str, str]]
    finished: Done
    """Without it."""
    before: tuple[dict[str, int], os.stat_result]
    after: tuple[dict[str, int], os.stat_result]
    """Attempts and evaluation before and after the second."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Whole:
    desk = Desk(tmp_path_factory.mktemp("whole"), tiny_data)
    desk.write("alibi", "none", "sinusoidal")
    process = desk.start()
    log = desk.folder / "s/runs/alibi-32-s1234/metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (log.exists() and log.stat().st_size))
    process.press_ctrl_c()
    stopped, stopped_runs = process.ended(), desk.runs()
    failed = desk.study()
    runs, before = desk.runs(), (desk.attempts(), desk.evaluation())
    desk.write("alibi", "sinusoidal")
    finished = desk.study()
    return Whole(
        desk,
        stopped,
        stopped_runs,
        failed,
        runs,
        finished,
        before,
        (desk.attempts(), desk.evaluation()),
    )


def test_ctrl_c_saves_and_the_same_command_goes_on(whole: Whole) -> None:
    assert whole.stopped.code == 80, whole.stopped.text
    end = "stopped; go on with:\n  pretrain study study.toml\n"
    assert whole.stopped.err.endswith(end), whole.stopped.err
    assert {run["state"] for run in whole.stopped_runs.values()} == {"waiting"}
    attempts = whole.desk.attempts()
    assert (attempts["alibi-32-s1234"], attempts["sinusoidal-32-s1234"]) == (2, 1)


def test_a_run_that_fails_is_reported_and_the_others_finish(whole: Whole) -> None:
    assert whole.failed.code == 1, whole.failed.text
    states = {name: run["state"] for name, run in whole.failed_runs.items()}
    assert states == {
        "alibi-32-s1234": "finished",
        "none-32-s1234": "failed",
        "sinusoidal-32-s1234": "finished",
    }
    assert "none-32-s1234: failed with exit code 83; the other runs go on" in whole.failed.err
    assert whole.failed_runs["none-32-s1234"]["reason"].startswith("poisoned: rank 0 ended with")
    lines = whole.failed.out.rpartition("Runs of the study")[2].splitlines()
    assert lines[-1] == "report: s/report/report.md"
    rows = {line.split()[0]: line for line in lines if "-32-s1234 " in line}
    assert "  failed    poisoned: rank 0" in rows["none-32-s1234"]
    for method in ("alibi", "sinusoidal"):
        assert rows[f"{method}-32-s1234"].split()[4:] == ["finished", "-"]
        # Perplexities follow, under both protocols.
        assert len([line for line in lines if line.startswith(f"{method}  ")]) == 2


def test_a_finished_study_does_nothing_and_says_so(whole: Whole) -> None:
    assert whole.finished.code == 0, whole.finished.text
    assert whole.after == whole.before
    assert "s: finished already; nothing to train or to evaluate" in whole.finished.err
    assert list(whole.desk.runs()) == ["alibi-32-s1234", "sinusoidal-32-s1234"]


def test_each_size_has_a_report_and_all_have_one_of_their_gap(whole: Whole, tmp_path: Path) -> None:
    """The records of one study stand for those of two sizes, which are equal."""
    desk, sizes = moved(whole.desk, tmp_path, "*"), ("1m", "3m")
    for size, run in itertools.product(sizes, ("alibi-32-s1234", "sinusoidal-32-s1234")):
        record = tmp_path / f"s/records/{size}-{run}"
        shutil.copytree(whole.desk.folder / "s/records" / run, record)
        curve = record / "curve.json"
        curve.write_text(curve.read_text().replace(f"/{run}", f"/{size}-{run}"))
    with (tmp_path / "study.toml").open("a") as file:
        file.write("\n[sizes]\n1m = []\n3m = []\n")
    assert "nothing to train or to evaluate" in succeeded(desk.study()).err
    report = tmp_path / "s/report"
    first, second = (json.loads((report / size / "claims.json").read_text()) for size in sizes)
    alone = json.loads((whole.desk.folder / "s/report/claims.json").read_text())
    assert first == second == alone
    rows = [line for line in (report / "report.md").read_text().splitlines() if "m |" in line]
    # At L and 2 L, under both protocols.
    assert len(rows) == 2 * 4 and rows[0].replace(" 1m |", " 3m |") == rows[1]
    assert (report / "figures/compute.svg").exists() and desk.attempts() == {}


def test_runs_of_eight_steps_decide_no_claim(whole: Whole) -> None:
    """They predict worse than token frequencies do, alike at all lengths."""
    folder = whole.desk.folder / "s"
    claims = json.loads((folder / "report/claims.json").read_text())
    assert {row["verdict"].partition(":")[0] for row in claims} == {"cannot be judged"}
    said = (folder / "report/report.md").read_text()
    assert "**No better at L, and so part of no claim: alibi, L = 32:" in said
    assert json.loads((folder / "unigram.json").read_text())["tokens"] == 2048


def test_a_second_seed_leaves_finished_runs_where_they_are_and_in_the_report(
    whole: Whole, tmp_path: Path
) -> None:
    """The same with a seed that was taken away again, whose runs are kept."""
    desk, before = moved(whole.desk, tmp_path), whole.after[0]
    file = tmp_path / "study.toml"
    text = file.read_text()
    file.write_text(text.replace("[evaluation]", "seeds = [7, 1234]\n\n[evaluation]", 1))
    succeeded(desk.study("--report-only"))
    runs = desk.runs()
    finished = {name for name, run in runs.items() if run["state"] == "finished"}
    added = {"alibi-32-s7", "sinusoidal-32-s7"}
    assert runs.keys() == {"alibi-32-s1234", "sinusoidal-32-s1234"} | added
    assert finished == runs.keys() - added
    assert {name: n for name, n in desk.attempts().items() if name not in added} == before
    shown = (tmp_path / "s/report/report.md").read_text()
    for name in runs:
        assert f"| {name} |" in shown
    assert " L = 32 | alibi-32-s1234 | 8 | 1234 |" in shown
    file.write_text(text.replace("[evaluation]", "seeds = [7]\n\n[evaluation]", 1))
    succeeded(desk.study("--report-only"))
    assert {name: n for name, n in desk.attempts().items() if name not in added} == before
    assert "alibi-32-s1234" not in (tmp_path / "s/report/report.md").read_text()


def test_an_edited_study_file_mixes_no_experiments(whole: Whole) -> None:
    file = whole.desk.folder / "edited.toml"
    text = (whole.desk.folder / "study.toml").read_text()
    file.write_text(text.replace("recovery.max_restarts=0", "train.num_steps=16"))
    done = whole.desk.start(file=file.name).ended()
    assert done.code == 2 and done.out == "", done.text
    for run in ("alibi-32-s1234", "sinusoidal-32-s1234"):
        assert f"edited.toml: {run}: train.num_steps = 16: s/runs/{run}/checkpoints/" in done.err
    # Of each run the record and the newest checkpoint.
    assert done.err.count("A study does not mix experiments") == 4
    assert (whole.desk.attempts(), whole.desk.evaluation()) == whole.after


def test_a_record_is_compared_beside_checkpoints(whole: Whole, tmp_path: Path) -> None:
    """As when a run is trained on after it was recorded; also if its newest checkpoint is bad."""
    desk = moved(whole.desk, tmp_path)
    for recorded in tmp_path.glob("s/records/*/config.toml"):
        recorded.write_text(recorded.read_text().replace("num_steps = 8", "num_steps = 6"))
    (tmp_path / "s/runs/alibi-32-s1234/checkpoints/step-00000008/state.json").write_text("{")
    refused = desk.study("--dry-run")
    for run in ("alibi-32-s1234", "sinusoidal-32-s1234"):
        said = f"{run}: train.num_steps = 8: s/records/{run} was trained with 6. "
        assert refused.code == 2 and said in refused.err, refused.text


def test_a_clone_with_the_records_alone_has_finished_and_repeats_a_run_to_the_bit(
    whole: Whole, tmp_path: Path
) -> None:
    desk, report = moved(whole.desk, tmp_path, "runs"), tmp_path / "s/report"
    before = {path.name: path.read_bytes() for path in report.glob("*.[mj]*")}
    assert "nothing to train or to evaluate" in succeeded(desk.study()).err
    assert {path.name: path.read_bytes() for path in report.glob("*.[mj]*")} == before
    assert desk.attempts() == {}
    file = tmp_path / "study.toml"
    text = file.read_text()
    file.write_text(text.replace("recovery.max_restarts=0", "optimizer.learning_rate=0.5"))
    assert "optimizer.learning_rate = 0.5: s/records/alibi-32-s1234 was trained" in desk.study().err
    file.write_text(text)
    again = succeeded(desk.study("--only", "alibi-*", "--again"))
    assert "alibi-32-s1234: all 8 losses are those recorded" in again.err
    assert desk.attempts() == {"alibi-32-s1234": 1}
    metrics = tmp_path / "s/records/alibi-32-s1234/metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text(
        "\n".join(lines).replace('"step": 4, "loss_nats": ', '"step": 4, "loss_nats": 1')
    )
    other = desk.study("--only", "alibi-*", "--again")
    assert other.code == 1, other.text
    assert "1 of 8 losses are not those recorded; the first is at step 4: " in other.err
    assert "--only none: matches no run" in desk.study("--only", "none").err
    curve = metrics.with_name("curve.json")
    curve.write_text(curve.read_text()[:500])
    damaged = desk.study()
    assert damaged.code == 2 and "alibi-32-s1234/curve.json: not a curve.json that" in damaged.err

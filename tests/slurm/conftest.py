"""Start one cluster for all tests of this folder, when the first test asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.scripted import Script

LOG_LINES = 40


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Start a real Slurm of 16 nodes with 8 fake GPUs each.

    Where that is impossible the test is skipped, but with $CI it fails: CI has to have a Slurm.
    """
    reason = missing()
    if reason and os.environ.get("CI"):
        pytest.fail(f"no Slurm, and CI is set: {reason}")
    if reason:
        pytest.skip(f"no Slurm here: {reason}")
    slurm = Cluster()
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start whatever a test has killed, and cancel the jobs that it has left."""
    slurm = request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    yield
    if slurm is not None:
        slurm.restore()
        # Killed first: a job that is asked to end may submit another one, such as an evaluation's
        # next try, which the next test would find in the queue.
        slurm.run("scancel", "--quiet", "--user=root", "--state=running", "--full", "--signal=KILL")
        slurm.run("scancel", "--quiet", "--user=root")


@pytest.fixture
def here(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pretrain.launcher.slurm in this process find the cluster."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def script(cluster: Cluster, tmp_path: Path) -> Script:
    """Return what submits runs of scripted ranks."""
    return Script(cluster, tmp_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    """Add the cluster's state and the ends of the runs' logs to the report of a failed test."""
    report = yield
    values: dict[str, Any] = getattr(item, "funcargs", {})
    if report.failed and isinstance(values.get("cluster"), Cluster):
        report.sections.append(("cluster", values["cluster"].report()))
        folders = [getattr(value, "folder", value) for value in values.values()]
        for log in sorted(
            log
            for folder in folders
            if isinstance(folder, Path)
            for log in folder.rglob("*.log")
            if log.is_file()
        ):
            tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            report.sections.append((str(log), "\n".join(tail)))
    return report

"""One cluster for all tests of the session, started by the first that asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, missing

LOG_LINES = 40


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real Slurm of 16 nodes with 8 fake GPUs each. Without one the test is skipped; where CI is set it fails."""
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
    """Every test finds all of the cluster alive, whatever the one before has killed."""
    slurm = request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    yield
    if slurm is not None:
        slurm.restore()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    """A test that failed shows the cluster's state and the ends of its runs' logs."""
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

"""A pytest plugin that writes each test's result as a row, and does not repeat what has passed.

python -m pytest -p benchmarks.gpu_day.pytest_rows --rows RESULTS PART ...
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_day.results import Rows

_rows = pytest.StashKey[Rows]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the results."""
    parser.addoption("--rows", nargs=2, metavar=("RESULTS", "PART"), required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Open the rows, and receive the reports of this session."""
    out, part = config.getoption("--rows")
    rows = Rows(Path(out), part)
    config.stash[_rows] = rows
    config.pluginmanager.register(_Reporter(rows), "gpu-day-reporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that passed in an earlier call that was cut off."""
    passed = {row["test"] for row in config.stash[_rows] if row["outcome"] == "passed"}
    again = [item for item in items if item.nodeid in passed]
    if again:
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if item.nodeid not in passed]


class _Reporter:
    """Write a row as soon as a test has ended."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what pytest reports of a test: of its call, or of a set-up that did not pass."""
        if report.when != "call" and report.passed:
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            # The log has the whole traceback.
            crash = getattr(report.longrepr, "reprcrash", None)
            row["message"] = crash.message if crash else report.longreprtext[-200:]
        elif report.skipped and isinstance(report.longrepr, tuple):
            row["message"] = report.longrepr[2]
        self.rows.add(row)

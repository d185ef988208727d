"""Run `pretrain study`: train what is missing, evaluate what is finished, and write the report."""

from __future__ import annotations

from pathlib import Path


def run_study(
    path: Path,
    nproc: int = 1,
    site: Path | None = None,
    dry_run: bool = False,
    report_only: bool = False,
) -> int:
    """Do what a study still lacks, and return the exit code: 1 if a run failed.

    Args:
        path: The study file.
        nproc: Processes of each run, of the evaluation and of the measurement of efficiency.
        site: Submit the runs to this Slurm cluster instead.
        dry_run: Only print what would be done.
        report_only: Train nothing; evaluate what is finished and write the report.
    """
    raise NotImplementedError

"""Write the report of a study: its curves beside the published ones, and a verdict per claim."""

from __future__ import annotations

from pathlib import Path


def write_study_report(directory: Path) -> None:
    """Write STUDY/report/ from what the study has so far.

    Reads STUDY/study.json, STUDY/evaluation/ and, where they are there, STUDY/efficiency.json and
    the metrics.jsonl of the runs. What is missing or has failed is said in the report. Equal files
    give an equal report, byte for byte.

    Args:
        directory: STUDY, the study's directory.

    Raises:
        ConfigError: `directory` holds no study.json, or a file in it cannot be read.
    """
    raise NotImplementedError

"""Make one report of several: of runs that were evaluated, and of reports that were written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError
from pretrain.evaluate.checkpoints import read_evaluations
from pretrain.evaluate.existing import check_overwrites
from pretrain.evaluate.reading import read_records
from pretrain.evaluate.records import check_objectives
from pretrain.evaluate.report import check_report_path, format_table, write_report
from pretrain.rundir.files import make_directory
from pretrain.rundir.paths import check_version


def combine(sources: Sequence[Path], out: Path | None) -> str:
    """Write one report of the results of several sources; return its tables for the terminal.

    Losses by position stay in the sources' own reports.

    Args:
        sources: Runs, of which the newest evaluated checkpoint is taken, or curve.json files.
        out: FILE.json of the report, whose other files are written beside it; None for no report.

    Raises:
        ConfigError: A source has no results, some predict masked tokens and some next ones, or the
            report cannot be written to `out`.
    """
    found = [(source, record) for source in sources for record in _records(source)]
    check_objectives((str(source), record["protocol"]) for source, record in found)
    records = [record for _, record in found]
    if out is not None:
        check_report_path(out)
        check_overwrites(out)
        make_directory(out.parent)
        write_report(out, records)
    return format_table(records)


def _records(source: Path) -> list[dict[str, Any]]:
    """Return the records of a run's newest evaluated checkpoint, or of a curve.json."""
    if source.is_dir():
        check_version(source)
        evaluated = read_evaluations(source / "evaluations")
        for name, reason in evaluated.missing.items():
            print(f"warning: {source}: {name}: {reason}", file=sys.stderr, flush=True)
        if not evaluated.records:
            raise ConfigError(
                f"{source}: none of its checkpoints has been evaluated. Name a curve.json that "
                "`pretrain evaluate --out` wrote, or evaluate the run first"
            )
        newest = evaluated.records[-1]["step"]
        print(f"{source}: step {newest}, the newest evaluated")
        found = [record for record in evaluated.records if record["step"] == newest]
        return [{**record, "run": record["run"] or str(source)} for record in found]
    try:
        records = read_records(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source}: neither a run's directory nor a curve.json that `pretrain evaluate --out` "
            f"wrote ({error})"
        ) from None
    if not records:
        raise ConfigError(f"{source}: holds no results. Leave it out")
    return records

"""The commands of docs/guide.md that need no cluster run as they are written, one after another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.guide import GUIDE, Workspace, blocks


def follow(folder: Path, *conditions: str) -> Workspace:
    """Follow the guide in a folder: save its files and run its blocks of these conditions."""
    found = blocks(GUIDE.read_text())
    workspace = Workspace(folder)
    workspace.write_files(found)
    for block in found:
        if block.kind == "run" and block.argument in conditions:
            workspace.run(block)
    return workspace


def test_the_guide_runs_as_it_is_written(tmp_path):
    runs = follow(tmp_path, "").folder / "runs"
    # What its reader has at the end: a run that went on, its curve and its export.
    assert sorted(p.name for p in (runs / "small/checkpoints").iterdir())[-1] == "step-00000030"
    curve = json.loads((runs / "small/report/curve.json").read_text())["records"]
    assert {(r["step"], r["length"]) for r in curve} == {(30, 64), (30, 256), (30, 1024)}
    assert (runs / "small/hf/model.safetensors").is_file()
    assert "license: cc0-1.0" in (runs / "small/hf/README.md").read_text()


@pytest.mark.torture
def test_the_guide_s_study_runs_as_it_is_written(tmp_path):
    assert (follow(tmp_path, "", "torture").folder / "runs/study/report/report.md").is_file()

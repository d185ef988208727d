"""train.profile_steps: what is recorded, and that losses do not change."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.end_to_end.commands import metrics, sets, succeeds
from tests.unit.test_rundir import undocumented

PROFILED = "train.profile_steps=[3,4]"


def losses(run: Path) -> list[tuple[float, float]]:
    records = [record for record in metrics(run) if "evaluation" not in record]
    return [(record["loss_nats"], record["gradient_norm"]) for record in records]


def events(trace: Path) -> list[dict[str, Any]]:
    """Return what a viewer would show: the complete events of the trace."""
    found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in found if event.get("ph") == "X"]


def test_two_steps_of_rank_0_are_recorded_and_the_losses_are_the_same(run, config, tmp_path):
    """Of four ranks, rank 0 alone is recorded in test_position_method.py."""
    profiled = tmp_path / "profiled"
    settings = ["train.num_steps=6", "evaluation.interval_steps=2", "checkpoint.interval_steps=2"]
    done = succeeds("train", config, *sets(f"run.directory={profiled}", *settings, PROFILED))
    assert losses(profiled) == losses(run)[:6] and len(losses(profiled)) == 6
    assert not (run / "profile").exists()
    [trace] = (profiled / "profile").iterdir()
    assert trace.name == "step-00000003-00000004.rank0.json.gz"
    assert f"profile of steps 3 to 4: {trace}; open it at https://ui.perfetto.dev" in done.err
    assert undocumented(profiled) == []
    steps = [each for each in events(trace) if each["name"].startswith("ProfilerStep")]
    assert len(steps) == 2
    # Two layers of four products each way, in two micro batches of two steps, are there; the
    # evaluations and saves after steps 2 and 4 are not: every product lies within a step.
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in steps]
    products = [e for e in events(trace) if e["name"] in ("aten::mm", "aten::addmm")]
    assert len(products) >= 2 * 2 * 4 * 3
    assert all(any(a <= e["ts"] <= b for a, b in spans) for e in products)

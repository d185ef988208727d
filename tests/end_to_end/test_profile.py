"""train.profile_steps: what is recorded, that losses do not change, and that no run ends of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.end_to_end.commands import metrics, pretrain, running_ranks, sets, succeeded
from tests.unit.test_rundir import undocumented

PROFILED = "train.profile_steps=[3,4]"
LARGEST_FILE = 1_000_000
"""Bytes: more than any other file of these runs has, and less than a trace of two steps."""


def losses(run: Path) -> list[tuple[float, float]]:
    records = [record for record in metrics(run) if "evaluation" not in record]
    return [(record["loss_nats"], record["gradient_norm"]) for record in records]


def events(trace: Path) -> list[dict[str, Any]]:
    """Return what a viewer would show: the complete events of the trace."""
    found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in found if event.get("ph") == "X"]


def test_two_steps_of_rank_0_are_recorded_and_the_losses_are_the_same(config, tmp_path):
    runs = {name: tmp_path / name for name in ("plain", "profiled")}
    settings = ["train.num_steps=6", "evaluation.interval_steps=2", "checkpoint.interval_steps=2"]
    said = {}
    for name, run in runs.items():
        more = [PROFILED] if name == "profiled" else []
        arguments = ["train", config, *sets(f"run.directory={run}", *settings, *more)]
        with running_ranks(arguments, 2) as ranks:
            done = ranks.done()
        assert [each.code for each in done] == [0, 0], done
        said[name] = "".join(each.err for each in done)
    assert losses(runs["profiled"]) == losses(runs["plain"]) and len(losses(runs["plain"])) == 6
    assert not (runs["plain"] / "profile").exists()
    [trace] = (runs["profiled"] / "profile").iterdir()
    assert trace.name == "step-00000003-00000004.rank0.json.gz"
    assert (
        f"profile of steps 3 to 4: {trace}; open it at https://ui.perfetto.dev"
        in (said["profiled"])
    )
    assert undocumented(runs["profiled"]) == []
    names = [event["name"] for event in events(trace)]
    assert [name for name in names if name.startswith("step ")] == ["step 3", "step 4"]
    # Two layers of four products each way, in two micro batches of two steps, are there; the
    # evaluations and saves after steps 2 and 4 are not: every product lies within a step.
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events(trace) if e["name"].startswith("step ")]
    products = [e for e in events(trace) if e["name"] in ("aten::mm", "aten::addmm")]
    assert len(products) >= 2 * 2 * 4 * 3
    assert all(any(a <= e["ts"] <= b for a, b in spans) for e in products)


def test_a_trace_that_the_disk_refuses_is_said_once_and_training_goes_on(config, tmp_path):
    run = tmp_path / "run"
    settings = sets(f"run.directory={run}", PROFILED)
    done = succeeded(pretrain("train", config, *settings, largest_file=LARGEST_FILE))
    assert done.err.count("warning: train.profile_steps: no profile") == 1, done.err
    assert len(losses(run)) == 8 and list((run / "profile").iterdir()) == []

"""The preflight's diagnosis over what the processes of up to 128 nodes say."""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.launcher.preflight import STAGES, Readings, diagnose
from pretrain.launcher.supervise import failing_nodes
from pretrain.rundir.attempts import Ended, Owner, Preflight, read_attempt
from pretrain.rundir.files import replace_json


def readings(num_nodes: int = 4, silent: dict[int, str] | None = None, **others: Any) -> Readings:
    """What two processes of each node say: all is well, but for some ranks.

    Args:
        num_nodes: Nodes n1, n2, ...
        silent: By rank, the first stage of which it says nothing.
        others: By "rank_stage", the error instead.
    """
    made = Readings([f"n{i}" for i in range(1, num_nodes + 1)], 2, "/usr/bin/python")
    for process in made.processes:
        for stage in STAGES:
            if stage == (silent or {}).get(process.rank):
                break
            error = others.get(f"r{process.rank}_{stage}")
            found = {"error": error, "number": None} if error else {}
            made.take(f"{process.rank:>4}: {json.dumps({'stage': stage, **found})}")
            if error:
                break
    return made


def causes(made: Readings) -> dict[str, str]:
    faults, warnings, refusal = diagnose(made)
    assert (warnings, refusal) == ([], "")
    return faults


def test_up_to_128_nodes_that_are_well_are_fit() -> None:
    assert diagnose(readings(128)) == ({}, [], "") == diagnose(readings(1))
    assert readings(128).are_over() and not readings(silent={2: "gemm"}).are_over()
    # The others wait in vain for one that has failed.
    waiting = dict.fromkeys((0, 1, 3, 4, 5, 6, 7), "all")
    assert readings(silent=waiting, r2_node="reset by peer").are_over()


@pytest.mark.parametrize(
    ("others", "cause"),
    [
        ({"r2_directory": "No such file"}, "process 2 failed while it writes to the run's dir"),
        ({"r3_memory": "29 %"}, "process 3 failed while it looks at the memory of its GPU (29 %)"),
        ({"r2_node": "NCCL error"}, "in the all-reduce of its node (NCCL error)"),
        ({"silent": {3: "device"}}, "process 3 does not answer while it looks at its device"),
        # The other process of the node waits for it.
        ({"silent": {2: "node", 3: "gemm"}}, "process 3 does not answer while it multiplies"),
        ({"silent": {2: "node"}, "r3_gemm": "7 wrong"}, "process 3 failed while it multiplies"),
    ],
)
def test_a_faulty_node_is_named_with_its_cause(others: dict[str, Any], cause: str) -> None:
    [(node, said)] = causes(readings(**others)).items()
    assert node == "n2" and cause in said, said


def test_what_srun_says_is_read() -> None:
    made = readings(silent={0: "start", 1: "start", 5: "gemm"})
    for line in (
        "srun: error: n1: tasks 0-1: Exited with exit code 2",
        "   5: Fatal Python error: Bus error",
        "srun: error: n3: task 5: Bus error",
        "srun: error: Node failure on n4",
    ):
        made.take(line)
    found = {node: fault.cause for node in made.nodes if (fault := made.fault_of(node))}
    assert "/usr/bin/python -m pretrain cannot be started there (Exited with" in found["n1"]
    # srun itself ends what it has started when it cannot start everything.
    assert "n3" not in found and found["n4"] == "Slurm starts no processes there (it died)"
    made.lost.clear()
    said = made.fault_of("n3")
    assert said and said.cause.endswith("matrices (Bus error: Fatal Python error: Bus error)")


def test_what_all_nodes_have_is_the_run_s_fault_or_nobody_s() -> None:
    everyone = range(4)
    for stage in ("directory", "torch", "device"):
        made = readings(2, **{f"r{rank}_{stage}": "no" for rank in everyone})
        assert diagnose(made)[2].startswith("all 2 nodes: process 0 failed while it")
    # One node by itself is suspected.
    assert set(causes(readings(1, r0_device="no driver"))) == {"n1"}
    faults, [warning], refusal = diagnose(readings(2, silent=dict.fromkeys(everyone, "node")))
    assert (faults, refusal) == ({}, "") and "all 2 nodes" in warning
    waiting = dict.fromkeys((0, 1, 2, 4, 5, 6, 7), "all")
    faults, [warning], refusal = diagnose(readings(silent=waiting, r3_all="reset by peer"))
    assert (faults, refusal) == ({}, "") and "all nodes fails (reset by peer)" in warning


def test_a_node_that_takes_long_to_load_is_only_warned_of() -> None:
    faults, [warning], _ = diagnose(readings(silent={2: "torch", 3: "torch"}))
    assert faults == {} and warning == "n2: process 2 does not answer while it imports torch"


def test_a_node_that_a_preflight_named_is_not_used_again(tmp_path: Path) -> None:
    attempt = tmp_path / "0001"
    attempt.mkdir()
    record = Preflight(1.0, 2.0, ("n1", "n2"), {"n2": "no GPU"}, ("slow",), "")
    replace_json(attempt / "preflight.json", vars(record))
    read = read_attempt(attempt)
    assert read.preflight == record and failing_nodes([read]) == {"n2": "no GPU"}
    assert read.owner == Owner() and read.ended is None
    assert Ended(1.0, 1, "failed", "", 0).nodes == ()

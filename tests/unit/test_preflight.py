"""The preflight's diagnosis over what up to 128 nodes say, and its processes themselves."""

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.launcher.preflight import (
    IDLE_SECONDS,
    SILENT_SECONDS,
    Diagnosis,
    Expected,
    Readings,
    diagnose,
)
from pretrain.launcher.supervise import failing_nodes
from pretrain.rundir.attempts import Ended, Owner, Preflight, read_attempt
from pretrain.rundir.files import replace_json

ROOT = Path(__file__).parents[2]
NOW = 20.0
"""The time at which the check is over, on the clock of the readings."""
UNIX = 1_800_000_000.0
GPU = {
    "count": 8,
    "gpu": "H200",
    "capability": [9, 0],
    "architectures": ["sm_80", "sm_90"],
    "free": 140 * 2**30,
    "total": 141 * 2**30,
}
STAGES = ("started", "directory", "torch", "device", "gemm", "ready")


class Cluster:
    """Nodes whose processes say that all is well, unless a test has them say something else."""

    def __init__(self, num_nodes: int = 4, per_node: int = 2, gpus: int = 0) -> None:
        self.nodes = [f"n{i}" for i in range(1, num_nodes + 1)]
        self.expected = Expected(
            tuple(self.nodes), per_node, gpus, "/usr/bin/python", "/scratch/run", 2**30
        )
        self.readings = Readings()
        self.others: dict[int, dict[str, dict[str, Any] | None]] = {}
        self.spoken = False

    def ranks(self, node: str) -> range:
        first = self.nodes.index(node) * self.expected.per_node
        return range(first, first + self.expected.per_node)

    def say(self, node: str, stage: str, result: dict[str, Any] | None, which: int = 0) -> None:
        """Have one process of a node give this result of a stage; None ends it before it does."""
        self.others.setdefault(self.ranks(node)[which], {})[stage] = result

    def line(self, rank: int, node: str, at: float, **said: Any) -> None:
        text = json.dumps({"node": node, "at": UNIX + at, **said})
        self.readings.take(f"{rank:>4}: {text}", at)

    def speak_all(self) -> None:
        for node in self.nodes:
            for local, rank in enumerate(self.ranks(node)):
                self.speak(rank, node, local)
        self.spoken = True

    def diagnose(self) -> Diagnosis:
        if not self.spoken:
            self.speak_all()
        return diagnose(self.readings, self.expected, NOW)

    def speak(self, rank: int, node: str, local: int) -> None:
        device: dict[str, Any] = {"count": 0, "free": 64 * 2**30}
        if self.expected.gpus:
            device = {**GPU, "index": local, "uuid": f"{node}-{local}"}
        said = {"device": device, "gemm": {"seconds": 0.01}, "ready": {"port": 1, "address": node}}
        if self.expected.per_node > 1:
            said["round node"] = {"seconds": 0.01}
        said["round all"] = {"seconds": 0.02}
        other = self.others.get(rank, {})
        for stage in (*STAGES, "round node", "round all"):
            result = other.get(stage, said.get(stage, {}))
            if result is None:
                return
            self.line(rank, node, 1.0, stage=stage, **result)
            if "error" in result and stage in STAGES:
                break
        self.line(rank, node, NOW, stage="alive", during="waiting", busy=1.0)


@pytest.mark.parametrize(("num_nodes", "per_node", "gpus"), [(1, 1, 0), (2, 4, 0), (128, 8, 8)])
def test_nodes_that_are_well_are_not_blamed(num_nodes, per_node, gpus):
    assert Cluster(num_nodes, per_node, gpus).diagnose() == Diagnosis()


FAULTS = {
    "directory": ("directory", {"error": "no such file", "number": errno.ENOENT}, "/scratch/run"),
    "torch": ("torch", {"error": "libcudart.so.12: cannot open"}, "torch cannot be imported there"),
    "no GPU": ("device", {"count": 0, "why": "driver too old"}, "none of its 8 GPUs (driver too"),
    "device": ("device", {"error": "uncorrectable ECC error"}, "(uncorrectable ECC error)"),
    "architecture": (
        "device",
        {**GPU, "index": 1, "capability": [7, 0]},
        "GPU 1 (H200) has compute capability 7.0, and torch is built for sm_80, sm_90",
    ),
    "memory in use": (
        "device",
        {**GPU, "index": 1, "free": 2**30},
        "140.0 GiB of the 141.0 GiB of GPU 1 (H200) are in use by others",
    ),
    "two ranks on one GPU": (
        "device",
        {**GPU, "index": 1, "uuid": "n77-1"},
        "its 8 processes have only 7 different GPUs",
    ),
    "wrong product": ("gemm", {"error": "3 wrong numbers"}, "computes wrongly or not at all (3"),
    "much too slow": ("gemm", {"seconds": 0.06}, "takes 6.0 times as long"),
    "sum within the node": ("round node", {"error": "NCCL error"}, "cannot add up numbers (NCCL"),
}


@pytest.mark.parametrize(("stage", "result", "cause"), FAULTS.values(), ids=FAULTS.keys())
def test_one_node_of_128_is_named_with_its_cause(stage, result, cause):
    cluster = Cluster(128, 8, 8)
    cluster.say("n77", stage, result, which=0)
    diagnosis = cluster.diagnose()
    assert list(diagnosis.faults) == ["n77"] and cause in diagnosis.faults["n77"]
    assert not diagnosis.refusal


@pytest.mark.parametrize(
    ("stage", "result"),
    [
        ("directory", {"error": "no such file", "number": errno.ENOENT}),
        ("torch", {"error": "no module named torch"}),
        ("device", {**GPU, "capability": [7, 0], "index": 0}),
        ("device", {"count": 0}),
    ],
)
def test_what_all_nodes_have_in_common_is_the_runs_fault(stage, result):
    cluster = Cluster(16, 1, 1)
    for node in cluster.nodes:
        cluster.say(node, stage, result)
    diagnosis = cluster.diagnose()
    assert diagnosis.faults == {} and diagnosis.refusal.startswith("all 16 nodes: ")
    # One node that is well shows that it is the others' fault.
    cluster = Cluster(16, 1, 1)
    for node in cluster.nodes[1:]:
        cluster.say(node, stage, result)
    diagnosis = cluster.diagnose()
    assert list(diagnosis.faults) == cluster.nodes[1:] and not diagnosis.refusal


@pytest.mark.parametrize(
    "result", [{**GPU, "index": 0, "free": 2**30}, {"error": "NCCL error"}], ids=["memory", "sum"]
)
def test_a_doubt_that_all_nodes_share_keeps_no_run_from_training(result):
    cluster = Cluster(3, 2, 2)
    for node in cluster.nodes:
        cluster.say(node, "device" if "free" in result else "round node", result)
    diagnosis = cluster.diagnose()
    assert diagnosis.faults == {} and not diagnosis.refusal
    assert any("all 3 nodes alike: " in line for line in diagnosis.warnings)


def test_the_only_node_is_blamed_for_its_gpu_and_not_for_the_runs_container():
    cluster = Cluster(1, 2, 2)
    cluster.say("n1", "device", {**GPU, "index": 0, "free": 2**30})
    assert list(cluster.diagnose().faults) == ["n1"]
    cluster = Cluster(1, 2, 2)
    cluster.say("n1", "torch", {"error": "no module named torch"})
    assert cluster.diagnose().refusal.startswith("n1: torch cannot be imported")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_nodes_fault(number):
    cluster = Cluster(4)
    cluster.say("n2", "directory", {"error": "no space", "number": number})
    diagnosis = cluster.diagnose()
    assert diagnosis.is_full and "no space" in diagnosis.refusal and diagnosis.faults == {}


@pytest.mark.parametrize("stage", ["directory", "device", "ready", "round node", "round all"])
def test_a_silent_process_is_named_with_what_it_did(stage):
    cluster = Cluster(128)
    cluster.say("n77", stage, None, which=1)
    diagnosis = cluster.diagnose()
    assert list(diagnosis.faults) == ["n77"] and diagnosis.warnings == []
    assert "process 153 gives no sign of life any more" in diagnosis.faults["n77"]


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("started", "1 of 2 processes gave no sign of life"),
        ("torch", "process 153 gives no sign of life any more, while it imports torch"),
    ],
)
def test_a_node_that_still_loads_its_container_or_torch_is_not_excluded(stage, words):
    """As after a boot, beside nodes that have both in memory."""
    cluster = Cluster(128)
    cluster.say("n77", stage, None, which=1)
    diagnosis = cluster.diagnose()
    assert diagnosis.faults == {} and diagnosis.warnings == [f"n77: {words}"]


@pytest.mark.parametrize("busy", [True, False], ids=["works", "hangs"])
def test_only_a_process_that_does_not_work_hangs(busy):
    cluster = Cluster(3, 1)
    cluster.say("n2", "gemm", None)
    cluster.speak_all()
    for tick in range(1, 2 * int(NOW)):
        at = tick / 2
        cluster.line(1, "n2", at, stage="alive", during="gemm", busy=at if busy else 1.0)
    diagnosis = cluster.diagnose()
    assert IDLE_SECONDS < NOW and SILENT_SECONDS < NOW
    if busy:
        assert diagnosis.faults == {}
        assert diagnosis.warnings[0].startswith("n2: process 1 works, but is not done yet")
    else:
        assert list(diagnosis.faults) == ["n2"] and "hangs while it mult" in diagnosis.faults["n2"]


def test_a_sign_of_life_that_a_result_overtook_says_nothing_of_the_stage():
    cluster = Cluster()
    cluster.say("n2", "gemm", None)
    cluster.speak_all()
    cluster.line(2, "n2", NOW, stage="alive", during="directory")
    cluster.readings.take("srun: error: n2: task 2: Killed", NOW)
    words = "process 2 ended while it multiplies matrices (Killed)"
    assert cluster.diagnose().faults == {"n2": words}


def test_nodes_that_are_all_silent_are_not_blamed():
    cluster = Cluster(5, 1)
    for node in cluster.nodes:
        cluster.say(node, "torch", None)
    cluster.say("n5", "started", None)
    diagnosis = cluster.diagnose()
    assert diagnosis.faults == {} and not diagnosis.refusal and len(diagnosis.warnings) == 5


def test_a_sum_that_is_late_is_blamed_where_others_were_in_time():
    late = {"error": "not complete within 8.0 s", "late": True}
    for num_nodes, result, blamed in ((4, {"seconds": 0.1}, ["n2"]), (4, late, []), (1, late, [])):
        cluster = Cluster(num_nodes)
        for node in cluster.nodes:
            for which in (0, 1):
                cluster.say(node, "round node", late if node == "n2" else result, which)
        diagnosis = cluster.diagnose()
        assert list(diagnosis.faults) == blamed and bool(diagnosis.warnings) is not bool(blamed)


@pytest.mark.parametrize(("gpus", "times"), [(0, 50.0), (2, 3.0)])
def test_a_slow_node_is_a_warning(gpus, times):
    cluster = Cluster(5, 2, gpus)
    cluster.say("n4", "gemm", {"seconds": 0.01 * times}, which=1)
    diagnosis = cluster.diagnose()
    assert diagnosis.faults == {}
    assert diagnosis.warnings == [
        f"n4: a product of matrices takes {times:.1f} times as long as on the others"
    ]


@pytest.mark.parametrize("free", [2 * 2**30, 2 * 2**30 - 1])
def test_the_memory_of_a_node_must_hold_the_model(free):
    cluster = Cluster(2)
    cluster.say("n2", "device", {"count": 0, "free": free})
    assert list(cluster.diagnose().faults) == ([] if free == 2 * 2**30 else ["n2"])


# ---- what srun says ------------------------------------------------------------------------------
def test_python_that_does_not_start_is_a_fault_of_the_node_or_of_the_run():
    def diagnosis(*missing: str) -> Diagnosis:
        cluster = Cluster(3, 2)
        for node in missing:
            for which, rank in enumerate(cluster.ranks(node)):
                cluster.say(node, "started", None, which)
                words = f"{rank}: slurmstepd-{node}: error: execve(): python: No such file"
                cluster.readings.take(words, 1.0)
            ranks = f"{cluster.ranks(node)[0]}-{cluster.ranks(node)[-1]}"
            ended = f"srun: error: {node}: tasks {ranks}: Exited with exit code 2"
            cluster.readings.take(ended, 1.0)
        return cluster.diagnose()

    faults = diagnosis("n2").faults
    assert list(faults) == ["n2"] and "execve(): python: No such file" in faults["n2"]
    assert diagnosis("n1", "n2", "n3").refusal.startswith(
        "all 3 nodes: /usr/bin/python -m pretrain"
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("Task launch for StepId=1.3 failed on node n2: Communication failure", "Communication f"),
        ("Node failure on n2", "it died"),
    ],
)
def test_a_node_without_slurmd_is_named(line, why):
    cluster = Cluster(3, 1)
    cluster.say("n2", "started", None)
    cluster.readings.take(f"srun: error: {line}", 1.0)
    faults = cluster.diagnose().faults
    assert list(faults) == ["n2"]
    assert faults["n2"].startswith(f"Slurm starts no processes there ({why}")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "0: ",
        "0: {}",
        "0: [1]",
        '0: {"stage": "started"}',
        '0: {"stage": 1, "at": "x", "node": 3}',
        '0: {"stage": "alive", "at": 1, "busy": "x"}',
        "srun: error: n1: tasks -: x",
        "99999999999: {",
        "\udcff: \x1b[31m",
    ],
)
def test_lines_that_others_print_disturb_nothing(line):
    cluster = Cluster(2, 1)
    cluster.readings.take(line, 1.0)
    assert cluster.diagnose().faults == {}


# ---- GPUs and torch ------------------------------------------------------------------------------
# ---- records -------------------------------------------------------------------------------------
def test_a_node_that_a_preflight_names_is_failing_at_once(tmp_path):
    attempt = tmp_path / "attempts/0001"
    attempt.mkdir(parents=True)
    found = Preflight(UNIX, 4.5, ("n1", "n2"), {"n2": "torch finds none of its 8 GPUs"}, ("slow",))
    replace_json(attempt / "preflight.json", dataclasses.asdict(found))
    record = read_attempt(attempt)
    assert record.preflight == found
    assert failing_nodes([record]) == {"n2": "torch finds none of its 8 GPUs"}
    ended = Ended(UNIX, 1, "failed", "rank 0 was killed", 3, ("n1",))
    once = dataclasses.replace(record, ended=ended, preflight=None)
    assert failing_nodes([once]) == {} and list(failing_nodes([once, once])) == ["n1"]
    (attempt / "preflight.json").write_text('{"faults": ["n1"]')
    assert read_attempt(attempt).preflight is None and Owner.read(attempt) == Owner()


# ---- the processes -------------------------------------------------------------------------------

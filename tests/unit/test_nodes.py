"""Test which nodes a run's next attempt uses, from what its attempts and the ranks' stacks say."""

from collections import Counter
from pathlib import Path

import pytest

from pretrain.launcher.job import choose_nodes
from pretrain.launcher.ranks import _stuck_nodes
from pretrain.launcher.slurm_job import lead_seconds, nodes_of_ranks
from pretrain.launcher.supervise import count_failures, failing_nodes, why_permanent
from pretrain.rundir.attempts import AttemptRecord, Diagnosis, Ended, Owner
from pretrain.rundir.paths import ExitCode


def failed(number: int, *nodes: str) -> AttemptRecord:
    ended = Ended(0.0, 1, "failed", f"reason {number}", 5, nodes)
    return AttemptRecord(number, Path(f"attempts/{number:04d}"), Owner(), ended=ended)


def test_a_node_that_failed_twice_is_named_with_its_last_reason():
    running = AttemptRecord(4, Path("attempts/0004"), Owner())
    records = [failed(1, "n1"), failed(2, "n2", "n3"), failed(3, "n1", "n1"), running]
    assert failing_nodes(records) == {"n1": "reason 3"}
    assert failing_nodes(records[:2]) == {}
    assert count_failures(records) == Counter(n1=2, n2=1, n3=1)


def test_a_replay_decides_for_certain_about_a_node_or_about_the_next_attempt(tmp_path):
    def diagnosed(kind: str, rank: int | None, host: str | None) -> AttemptRecord:
        Diagnosis(kind, 9, rank, host, "cpu", "what was seen", 4).write(tmp_path)
        return AttemptRecord(1, tmp_path, Owner(), diagnosis=Diagnosis.read(tmp_path))

    persistent, again = diagnosed("persistent", 3, "n2"), diagnosed("reproduces", None, None)
    assert failing_nodes([persistent]) == {"n2": "what was seen"}
    assert failing_nodes([diagnosed("transient", 3, "n2"), again]) == {}
    assert "a replay from step 4" in why_permanent([again], ExitCode.POISONED, 1, 3, False)
    assert why_permanent([again], ExitCode.POISONED, 1, 3, False, goes_back=True) is None
    assert why_permanent([persistent], ExitCode.FAILED, 1, 3, False) is None
    assert "other host than n2" in why_permanent([persistent], ExitCode.FAILED, 1, 3, True)


@pytest.mark.parametrize(
    ("unusable", "failures", "chosen"),
    [
        ([], {}, ["n1", "n2"]),
        (["n1"], {}, ["n2", "n10"]),
        # Slurm's order is kept, by which ranks are told apart.
        ([], {"n2": 1}, ["n1", "n10"]),
        ([], {"n1": 2, "n2": 1, "n10": 1}, ["n2", "n10"]),
        # Needed all the same.
        (["n10"], {"n2": 1}, ["n1", "n2"]),
        (["n1", "n10"], {}, ["n2"]),
    ],
)
def test_the_nodes_of_the_next_attempt(unusable, failures, chosen):
    assert choose_nodes(["n1", "n2", "n10"], 2, unusable, Counter(failures)) == chosen


STACK = "{}: Current thread 0x1 (most recent call first):\n{}:   File {} in f\n"
HERE, THERE = '"/x/train/step.py", line 3', '"/x/torch/distributed/distributed_c10d.py", line 9'


@pytest.mark.parametrize(
    ("stacks", "nodes"),
    [
        # Nobody can say anything: not the ranks' fault.
        ([], ()),
        ([(0, THERE), (1, THERE), (2, THERE), (3, THERE)], ()),
        # Rank 2 is silent; so are both ranks of n2.
        ([(0, THERE), (1, THERE), (3, THERE)], ("n2",)),
        ([(0, HERE), (1, HERE)], ("n2",)),
        # Rank 1 alone is not in a collective.
        ([(0, THERE), (1, HERE), (2, THERE), (3, THERE)], ("n1",)),
        ([(0, THERE), (1, HERE), (2, HERE), (3, THERE)], ()),
    ],
)
def test_the_node_of_a_rank_that_hangs_by_itself(stacks, nodes):
    where = nodes_of_ranks(["srun", "--ntasks-per-node=2", "--ntasks=4"], ["n1", "n2"])
    said = "".join(STACK.format(rank, rank, file) for rank, file in stacks) + "srun: got SIGCONT\n"
    assert _stuck_nodes(said.encode(), where) == nodes
    # Slurm has named no node.
    assert _stuck_nodes(said.encode(), []) == ()


def test_the_time_that_another_attempt_needs():
    assert lead_seconds(["--requeue", "--signal=USR1@240", "--time=10"]) == 240
    assert lead_seconds(["--time=10"]) == 0

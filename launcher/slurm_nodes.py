"""Ask Slurm about the nodes of a running job, and whether it takes them away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pretrain.launcher.slurm_command import SlurmError, run_command

UNUSABLE = ("down", "fail", "drained", "error", "unknown", "power", "reboot", "maint")
"""Parts of the states, as sinfo words them, of nodes on which no step should be started."""


def hostnames(nodes: str) -> list[str]:
    """Return the nodes of a node list, in its order: "n[1,3]" becomes n1, n3.

    Raises:
        SlurmError: This is no node list.
    """
    return run_command("scontrol", ["show", "hostnames", nodes]).stdout.split() if nodes else []


def unusable_nodes(names: Sequence[str]) -> dict[str, str]:
    """Return those of these nodes that are down or do not answer, each with its state.

    A node that is being drained still takes the steps of the jobs on it. Nothing is returned while
    slurmctld does not answer.
    """
    query = ["--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T"]
    try:
        lines = run_command("sinfo", query).stdout.splitlines()
    except SlurmError:
        return {}
    states = dict(line.split(maxsplit=1) for line in lines if " " in line.strip())
    # A star: the node does not answer.
    return {
        node: state.strip()
        for node, state in states.items()
        if "*" in state or any(word in state for word in UNUSABLE)
    }


def exclude(job_id: str, nodes: Iterable[str]) -> None:
    """Keep a job that waits in the queue off some nodes, beside those it avoids already."""
    job = f"--jobs={job_id}"
    before = run_command("squeue", ["--noheader", job, "--Format=ExcNodes:|"]).stdout
    excluded = hostnames(before.strip().rstrip("|").replace("(null)", ""))
    listed = ",".join(dict.fromkeys([*excluded, *nodes]))
    run_command("scontrol", ["update", f"JobId={job_id}", f"ExcNodeList={listed}"])


@dataclass(frozen=True)
class Preemption:
    """The facts that tell a preempted job from one that a user cancelled."""

    state: str
    """RUNNING in the grace time, COMPLETING once Slurm ends the job."""
    restarts: int
    """One more than in the job's own environment once Slurm has requeued it."""
    preempted_at: str | None
    """Unix seconds at which Slurm chose the job to make room; None if it did not."""


def preemption(job_id: str) -> Preemption | None:
    """Return if a job is being preempted; None when Slurm does not say."""
    columns = "State:|,RestartCnt:|,PreemptTime:|"
    query = ["--noheader", "--array", "--states=all", f"--jobs={job_id}", f"--Format={columns}"]
    try:
        lines = run_command("squeue", query).stdout.split()
    except SlurmError:
        return None
    fields = lines[0].split("|") if lines else []
    if len(fields) < 3 or not fields[1].isdigit():
        return None
    return Preemption(fields[0], int(fields[1]), fields[2] if fields[2] != "N/A" else None)


def has_lost_batch_host(job_id: str) -> bool:
    """Return True if a running job no longer holds the node on which its batch script ran."""
    query = ["--noheader", "--array", f"--jobs={job_id}", "--format=%T|%B|%N"]
    try:
        state, batch_host, nodes = run_command("squeue", query).stdout.strip().split("|")
        return state == "RUNNING" and batch_host not in hostnames(nodes)
    except (SlurmError, ValueError):
        return False

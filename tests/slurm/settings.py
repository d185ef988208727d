"""Make the configuration files of the tests' cluster: slurm.conf, gres.conf and cgroup.conf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NODE_TIMEOUT_SECONDS = 5
MUNGE_SECONDS = 5
"""The time for which a credential is valid, 5 s at least.

slurmctld starts a requeued job only after the credentials of its last start have expired.
"""
GRACE_SECONDS = 60
"""The time that a preempted job of "low" and "low_cancel" has to end by itself."""
PARTITIONS = {
    "main": "Default=YES PriorityTier=5 PreemptMode=OFF",
    "low": f"PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_SECONDS}",
    "low_nograce": "PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
    "low_cancel": f"PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_SECONDS}",
    "low_cancel_nograce": "PriorityTier=1 PreemptMode=CANCEL GraceTime=0",
    "high": "PriorityTier=10 PreemptMode=OFF",
}
"""Each has all nodes. A job of "high" preempts those of the "low" ones, which differ in what
becomes of a preempted job. Jobs of "main" are never preempted; "main" and "high" preempt "low"."""


def slurm_conf(
    root: Path, controller: str, port: int, nodes: Mapping[str, int], cpus: int, gpus: int
) -> str:
    """Return the slurm.conf of a cluster whose daemons all listen on 127.0.0.1.

    Args:
        root: The cluster's directory.
        controller: The hostname of slurmctld.
        port: The port of slurmctld.
        nodes: The port of each node's slurmd. All nodes are in each of PARTITIONS.
        cpus: Processors per node.
        gpus: GPUs per node.
    """
    resources = f"CPUs={cpus} RealMemory=64000 Gres=gpu:{gpus}"
    lines = [
        f"NodeName={node} NodeAddr=127.0.0.1 Port={port} {resources} State=UNKNOWN"
        for node, port in nodes.items()
    ]
    partitions = [
        f"PartitionName={name} Nodes=ALL {settings} MaxTime=INFINITE State=UP"
        for name, settings in PARTITIONS.items()
    ]
    return f"""\
ClusterName=tests
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire={MUNGE_SECONDS}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
# Nodes have the resources written here, whatever slurmd finds on this machine.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Notice a new job, a dead node and one that is back at once.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdTimeout={NODE_TIMEOUT_SECONDS}
MessageTimeout=5
KillWait=3
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{chr(10).join(lines)}
{chr(10).join(partitions)}
"""


def gres_conf(root: Path, gpus: int) -> str:
    """Return gres.conf with the fake GPUs, whose numbers Slurm puts in CUDA_VISIBLE_DEVICES."""
    return (
        f"AutoDetect=off\nName=gpu File={root}/dev/nvidia[0-{gpus - 1}] Flags=nvidia_gpu_env\n"
        if gpus
        else ""
    )


def cgroup_conf() -> str:
    """Return a cgroup.conf, without which slurmd uses the machine's. The cluster has no cgroups."""
    return "ConstrainCores=no\n"

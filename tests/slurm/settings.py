"""The configuration files of the tests' cluster (slurm.conf(5), gres.conf(5), cgroup.conf(5))."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NODE_TIMEOUT_SECONDS = 5
MUNGE_SECONDS = 5
"""How long a credential lives, at least 5. A requeued job waits for the old ones to expire before it starts again."""


def slurm_conf(
    root: Path, controller: str, port: int, nodes: Mapping[str, int], cpus: int, gpus: int
) -> str:
    """slurm.conf of a cluster in `root` whose daemons listen on 127.0.0.1, `nodes` (name -> port) in partition "main"."""
    lines = [
        f"NodeName={node} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=64000 Gres=gpu:{gpus} State=UNKNOWN"
        for node, port in nodes.items()
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
# the machine is not what the nodes say they are
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
# see a job, a death and a return at once
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdTimeout={NODE_TIMEOUT_SECONDS}
MessageTimeout=5
KillWait=3
ReturnToService=2
JobRequeue=1
{chr(10).join(lines)}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def gres_conf(root: Path, gpus: int) -> str:
    """gres.conf: the fake GPUs. Slurm numbers them in CUDA_VISIBLE_DEVICES."""
    return (
        f"AutoDetect=off\nName=gpu File={root}/dev/nvidia[0-{gpus - 1}] Flags=nvidia_gpu_env\n"
        if gpus
        else ""
    )


def cgroup_conf() -> str:
    """cgroup.conf, without which slurmd looks for the machine's; nothing here uses cgroups."""
    return "CgroupAutomount=no\n"

"""This process's place in tensor x pipeline x data, over Megatron's parallel_state."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from pretrain import platform
from pretrain.config import ConfigError, Layout, RunConfig, RunFailed
from pretrain.rundir.attempts import Owner

T = TypeVar("T")

# Long enough for a slow file system at a barrier; a watchdog outside the process handles true hangs.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=15)


@dataclass(frozen=True)
class Process:
    """Who this process is, as its launcher says: `launcher local`, torchrun, srun, or nobody (one process)."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int

    @staticmethod
    def from_environment() -> Process:
        """Reads torchrun's variables, else srun's, else stands alone. Raises ConfigError when they are incomplete."""
        env = os.environ
        if "RANK" in env and "WORLD_SIZE" in env:
            return Process(
                int(env["RANK"]),
                int(env["WORLD_SIZE"]),
                int(env.get("LOCAL_RANK", 0)),
                env.get("MASTER_ADDR", "127.0.0.1"),
                int(env.get("MASTER_PORT", 29500)),
            )
        if (
            "SLURM_PROCID" in env
            and int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", 1))) > 1
        ):
            nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
            # Two jobs on one node must not meet: the port follows from the job's number.
            port = 15_000 + int(env.get("SLURM_JOB_ID", 0)) % 20_000
            return Process(
                int(env["SLURM_PROCID"]),
                int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", 1))),
                int(env.get("SLURM_LOCALID", 0)),
                env.get("MASTER_ADDR") or first_host(nodes),
                int(env.get("MASTER_PORT", port)),
            )
        return Process(0, 1, 0, "127.0.0.1", 0)


def supervised_attempt() -> Path | None:
    """The attempt that a supervisor has begun for these processes (PRETRAIN_ATTEMPT); None: they were started by hand."""
    directory = os.environ.get("PRETRAIN_ATTEMPT")
    return Path(directory) if directory else None


def owner() -> Owner:
    """This process as the holder of an attempt, with what Slurm says of it."""
    env, processes = os.environ, Process.from_environment().world_size
    if "SLURM_JOB_ID" not in env:
        return Owner.here(num_processes=processes)
    return Owner.here(
        slurm_job_id=env["SLURM_JOB_ID"],
        slurm_restart_count=int(env.get("SLURM_RESTART_COUNT", 0)),
        slurm_cluster=env.get("SLURM_CLUSTER_NAME"),
        num_processes=processes,
        nodes=env.get("SLURM_JOB_NODELIST", ""),
    )


def first_host(nodes: str) -> str:
    """First host of a Slurm node list: "gpu[003-007,12],login1" -> "gpu003". Raises ConfigError when there is none."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\]([^,]*))?", nodes)
    if not match:
        raise ConfigError(f"SLURM_JOB_NODELIST = {nodes!r}: no host in it. Set MASTER_ADDR")
    prefix, ranges, suffix = match.groups()
    return prefix + (re.split("[-,]", ranges)[0] + (suffix or "") if ranges else "")


@dataclass(frozen=True)
class Topology:
    """Sizes and this process's ranks along each axis."""

    rank: int
    layout: Layout
    tensor_rank: int
    pipeline_rank: int
    data_rank: int

    @property
    def is_main(self) -> bool:
        """The one process that prints and writes what is written once."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.layout.pipeline - 1


def initialize(config: RunConfig, process: Process | None = None) -> Topology:
    """Joins the process group and splits it by `config.parallel`.

    A second call with another layout in the same processes re-splits them (the tests share processes so). Raises
    ConfigError when the processes cannot share the run.
    """
    process = process or Process.from_environment()
    layout = config.layout(process.world_size)
    platform.check_precision(config.train.precision)
    platform.prepare(process.local_rank)
    from megatron.core import parallel_state

    if not dist.is_initialized():
        if process.world_size == 1:
            store: dist.Store | None = dist.HashStore()  # alone: no port to take
            dist.init_process_group(platform.backend(), store=store, rank=0, world_size=1)
        else:
            dist.init_process_group(
                platform.backend(),
                init_method=f"tcp://{process.address}:{process.port}",
                rank=process.rank,
                world_size=process.world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
    _leave_groups()
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        config.parallel.virtual_pipeline_model_parallel_size,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    platform.seed_generators(config.run.seed, parallel_state.get_tensor_model_parallel_rank())
    return Topology(
        process.rank,
        layout,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )


def on_main(place: Topology, function: Callable[[], T]) -> T:
    """What `function` gave on rank 0, which alone calls it, or the ConfigError or RunFailed it raised, on every rank."""
    answer: list[Any] = [None, None]
    if place.is_main:
        try:
            answer[0] = function()
        except (ConfigError, RunFailed) as error:
            answer[1] = error
    dist.broadcast_object_list(answer, device=platform.device())
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def finish() -> None:
    """Leaves the process group; a second call does nothing."""
    if dist.is_initialized():
        _leave_groups()
        dist.destroy_process_group()


def _leave_groups() -> None:
    """Megatron's `destroy_model_parallel` forgets its groups without closing them: threads and sockets, some thirty each."""
    from megatron.core import parallel_state

    for group in parallel_state._global_process_group_list or []:
        if group is not None:  # the default group
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()

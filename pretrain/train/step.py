"""One optimizer step: micro batches through the schedule, gradients through ZeRO."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain import platform
from pretrain.config import RunConfig
from pretrain.model.forward import is_reporting_rank, run_schedule
from pretrain.optim.zero import ZeroOptimizer
from pretrain.topology import Topology
from pretrain.train.stopping import Requests


def forward_backward(
    chunks: list[GPTModel], optimizer: ZeroOptimizer, batches: list[Tensor]
) -> list[Tensor]:
    """Gradients of the mean loss over `batches`, accumulated; returns each micro batch's mean loss (last stage only)."""
    engine = None if optimizer.stage == 1 else optimizer.engine
    return run_schedule(chunks, batches, _mean_loss, engine=engine)


def average_loss(
    losses: list[Tensor], topology: Topology, requests: Requests | None = None
) -> float:
    """Mean loss in nats over all micro batches of all ranks; every rank gets it.

    The same reduction carries `requests`, so that agreeing on them costs a step nothing.
    """
    total = torch.tensor(
        [0.0, *(requests.votes() if requests else ())],
        dtype=torch.float64,
        device=platform.device(),
    )
    if is_reporting_rank():
        total[0] = torch.stack(losses).double().mean() / topology.layout.data
    dist.all_reduce(total)
    loss, *votes = total.tolist()
    if requests:
        requests.settle(votes)
    return loss


def agree(requests: Requests) -> None:
    """Has all ranks agree on `requests` where no step's loss carries them. All ranks together."""
    votes = torch.tensor(requests.votes(), device=platform.device())
    dist.all_reduce(votes)
    requests.settle(votes.tolist())


def seed_step(config: RunConfig, topology: Topology, step: int) -> None:
    """Seeds this rank's dropout as a function of (run.seed, step, place).

    So a resume needs no generator state, and replicas and stages drop different channels while tensor ranks agree.
    """
    if not config.model.hidden_dropout and not config.model.attention_dropout:
        return
    place = f"{config.run.seed}/{step}/{topology.data_rank}/{topology.pipeline_rank}"
    digest = hashlib.sha256(place.encode()).digest()
    platform.seed_generators(int.from_bytes(digest[:4], "little") >> 1, topology.tensor_rank)


def _mean_loss(token_losses: Tensor) -> tuple[Tensor, Tensor]:
    loss = token_losses.float().mean()
    return loss, loss.detach().clone()

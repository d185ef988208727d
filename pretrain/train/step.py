"""The parts of one training step: forward and backward, the averaged loss, dropout's seed."""

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
    """Accumulate the gradients of the mean loss over a step's micro batches. All ranks together.

    Args:
        chunks: This rank's model chunks.
        optimizer: Their optimizer, which says what the schedule has to call.
        batches: Token ids of each micro batch, int64 [B, S + 1].

    Returns:
        The mean loss in nats of each micro batch, on the last pipeline stage; [] elsewhere.
    """
    optimizer.begin_step(len(batches))
    return run_schedule(chunks, batches, _mean_loss, schedule_module=optimizer.schedule_module)


def average_loss(
    losses: list[Tensor], topology: Topology, requests: Requests | None = None
) -> float:
    """Average the loss over all micro batches of all ranks. All ranks together.

    Args:
        losses: This rank's micro batch losses, as `forward_backward` returns them.
        topology: The layout of the processes.
        requests: Settled in passing: the ranks' votes are summed in the same reduction, so that
            agreeing on them costs a step nothing.

    Returns:
        The mean loss in nats, the same on every rank.
    """
    total = torch.tensor(
        [0.0, *(requests.votes() if requests else ())],
        dtype=torch.float64,
        device=platform.device(),
    )
    # One rank of each data-parallel replica contributes its mean; all replicas have equally many
    # micro batches, so the mean of means is the mean over all tokens.
    if is_reporting_rank():
        total[0] = torch.stack(losses).double().mean() / topology.layout.data
    dist.all_reduce(total)
    loss, *votes = total.tolist()
    if requests:
        requests.settle(votes)
    return float(loss)


def agree(requests: Requests) -> None:
    """Settle `requests` by a reduction of their own, between steps. All ranks together."""
    votes = torch.tensor(requests.votes(), device=platform.device())
    dist.all_reduce(votes)
    requests.settle(votes.tolist())


def seed_step(config: RunConfig, topology: Topology, step: int) -> None:
    """Seed this rank's dropout as a function of run.seed, the step and the rank's coordinates.

    A resumed run thus draws the masks it would have drawn, without any saved generator state.
    Data-parallel replicas and pipeline stages draw different masks. Tensor ranks get the same
    seed: they must drop the same channels of activations that they all hold, and Megatron's
    tracked generator adds the tensor rank for those that are split (platform.seed_generators).

    Args:
        config: The run.
        topology: This process's coordinates.
        step: The step about to be taken, counted from 0.
    """
    if not config.model.hidden_dropout and not config.model.attention_dropout:
        return
    key = f"{config.run.seed}/{step}/{topology.data_rank}/{topology.pipeline_rank}"
    digest = hashlib.sha256(key.encode()).digest()
    platform.seed_generators(int.from_bytes(digest[:4], "little") >> 1, topology.tensor_rank)


def _mean_loss(token_losses: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce the tokens' losses [B, S] to (loss to differentiate, loss to keep)."""
    loss = token_losses.float().mean()
    # Cloned, because Megatron divides the first one in place by the number of micro batches
    # (megatron/core/pipeline_parallel/schedules.py, `forward_step_calc_loss`).
    return loss, loss.detach().clone()

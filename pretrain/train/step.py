"""The parts of one training step: forward and backward, the averaged loss, dropout's seed."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain import platform
from pretrain.config import RunConfig, RunFailed
from pretrain.model.forward import is_reporting_rank, run_schedule
from pretrain.optim.zero import ZeroOptimizer
from pretrain.rundir.metrics import Record
from pretrain.topology import Topology
from pretrain.train.start import Run
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


def average_loss(losses: list[Tensor], topology: Topology) -> float:
    """Average the loss over all micro batches of all ranks, and wait for it. All ranks together.

    Args:
        losses: This rank's micro batch losses, as `forward_backward` returns them.
        topology: The layout of the processes.

    Returns:
        The mean loss in nats, the same on every rank.
    """
    return float(_sum_over_ranks(losses, topology, [])[0])


def _sum_over_ranks(losses: list[Tensor], topology: Topology, votes: list[float]) -> Tensor:
    """Return [mean loss, sums of the votes], the same on every rank; fp64, on the device.

    Args:
        losses: This rank's micro batch losses.
        topology: The layout of the processes.
        votes: This rank's votes. They travel with the loss, so that agreeing on requests costs a
            step nothing.
    """
    total = platform.to_device(torch.tensor([0.0, *votes], dtype=torch.float64))
    # One rank of each data-parallel replica contributes its mean; all replicas have equally many
    # micro batches, so the mean of means is the mean over all tokens.
    if is_reporting_rank():
        total[0] = torch.stack(losses).double().mean() / topology.layout.data
    dist.all_reduce(total)
    return total


class QueuedStep:
    """A step that the device may still be working on, and what is measured in it.

    The host queues a step's work faster than the device does it. `read` waits for the step's
    numbers, so it is called when the next step has been queued: the device then never waits for the
    host to log.
    """

    def __init__(
        self,
        run: Run,
        losses: list[Tensor],
        norm: Tensor,
        begin: platform.Moment,
        record: Record,
    ) -> None:
        """Start to bring the step's numbers to the host. All ranks together.

        Args:
            run: The run, whose requests to stop are voted on.
            losses: This rank's micro batch losses.
            norm: The global gradient norm, a scalar.
            begin: When the step began.
            record: What is already known.
        """
        self._requests, self._precision = run.requests, run.config.train.precision
        self._begin, self._record = begin, record
        total = _sum_over_ranks(losses, run.topology, run.requests.votes())
        norm = norm.to(total)
        self._readback = platform.Readback(torch.cat([norm.view(1), total]))

    @property
    def end(self) -> platform.Moment:
        """When the step ends."""
        return self._readback.arrival

    def read(self) -> Record:
        """Wait for the step's numbers, and settle the requests to stop.

        Returns:
            What was measured, with the unit in each name. `step` counts the steps done, this one
            included; `loss_nats` is the mean over the global batch, before the update.

        Raises:
            RunFailed: The gradient norm is not finite, and the precision is not fp16, where the
                loss scale is lowered and the update skipped.
        """
        norm, loss, *votes = self._readback.numbers()
        if not math.isfinite(norm) and self._precision != "fp16":
            raise RunFailed(
                f"step {self._record['step']}: the gradient norm is {norm}. Resume from the last "
                "checkpoint with a lower optimizer.learning_rate, a longer "
                "schedule.lr_warmup_steps or a smaller optimizer.clip_grad"
            )
        self._requests.settle(votes)
        step_seconds = self.end.seconds_since(self._begin)
        numbers = {"loss_nats": loss, "gradient_norm": norm, "step_seconds": step_seconds}
        return {**self._record, **numbers}


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

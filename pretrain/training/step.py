"""The parts of one training step: forward and backward, the averaged loss, dropout's seed."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain import platform
from pretrain.checkpoint.manifest import TrainerState
from pretrain.config import Poisoned, RunConfig
from pretrain.data.order import mask_samples, rank_samples
from pretrain.model.forward import Batch, MaskedBatch, is_reporting_rank, run_schedule
from pretrain.optim.health import changed_memory, checksum
from pretrain.optim.zero import ZeroOptimizer
from pretrain.rundir.metrics import Record
from pretrain.topology import Topology
from pretrain.training.reporter import NUM_VOTES, Requests
from pretrain.training.start import Run
from pretrain.training.stragglers import SHARED

# ---- The interface of the hooks that the loop calls around its steps ----
# The numbers of a step reach the hooks while the device works on the next step. A hook that needs
# the model as it is after a step reports that it is due, and is called between two steps.
#
# Hooks read the run and never steer it, with one exception: all ranks have to agree on a request to
# stop, and a hook that runs for long has the ranks agree in between. An evaluation does so before
# each of its passes and is interrupted once they have agreed; a save does so when it is done. A
# stopped run then saves its step, and the evaluation is done at the next start.


class Spike(Exception):
    """Raised on every rank when the numbers of a spike are read."""

    ranks: tuple[int, ...] = ()

    def __init__(self, seen: str, state: TrainerState) -> None:
        """Describe the spike.

        Args:
            seen: In words: the step, its numbers and their limits.
            state: The state of training after the spike.
        """
        super().__init__(seen)
        self.seen, self.state = seen, state


class Jump(Spike):
    """A gradient norm too large for any training, with a train.spike_policy that ignores spikes."""


class Hook:
    """The interface that the loop calls on every rank. Each hook overrides what it needs."""

    def at_start(self, run: Run) -> None:
        """Finish the work that the previous attempt left undone at this step."""

    def before_step(self, run: Run) -> None:
        """Act right before the step after `run.state.step` is queued."""

    def after_step(self, run: Run, record: Record) -> None:
        """Act on a step's numbers (`QueuedStep.read`), while the next step may be in progress."""

    def is_due(self, run: Run) -> bool:
        """Return True, on all ranks alike, if the hook must act before the next step begins."""
        return False

    def between_steps(self, run: Run) -> None:
        """Act with no step in progress. Called on all hooks as soon as one of them is due."""

    def newest_checkpoint(self, run: Run) -> Path | None:
        """Return the run's newest checkpoint, once it is complete, from the hook that saves."""
        return None

    def before_rollback(self, run: Run) -> None:
        """Write out and close files of which a part will be set aside. On rank 0 alone."""

    def after_rollback(self, run: Run) -> None:
        """Forget the steps after `run.state.step`, which will be taken again."""

    def at_end(self, run: Run) -> None:
        """Act after the last step of a run that is finished or stopped, but not of a failed one."""

    def close(self) -> None:
        """Release the hook's resources; called once, also after a failure."""


def forward_backward(
    chunks: list[GPTModel],
    optimizer: ZeroOptimizer,
    batches: Sequence[Batch],
    eos_id: int | None = None,
    *,
    holds_back: bool = False,
) -> list[Tensor]:
    """Accumulate the gradients of the mean loss over a step's micro batches. All ranks together.

    Args:
        chunks: This rank's model chunks.
        optimizer: Their optimizer, which also knows the module that the schedule must call.
        batches: The micro batches.
        eos_id: End-of-document token, if attention stays within documents; else None.
        holds_back: Do not send gradients before the update.

    Returns:
        The mean loss in nats of each micro batch, on the last pipeline stage; [] elsewhere.
    """
    optimizer.begin_step(len(batches), holds_back=holds_back)
    return run_schedule(
        chunks, batches, _mean_loss, schedule_module=optimizer.schedule_module, eos_id=eos_id
    )


def masked_batches(
    config: RunConfig, topology: Topology, consumed: int, batches: Sequence[Tensor]
) -> list[MaskedBatch]:
    """Mask a step's micro batches, by the run's seed and each sample's consumed-sample index.

    Args:
        config: The run.
        topology: This process's coordinates.
        consumed: Samples consumed before the step, over all ranks.
        batches: This rank's micro batches, int64 [B, S + 1]. In each sample the first S tokens are
            the text; the last token is the first of the next sample.
    """
    size = config.batch_size_at(consumed)
    samples = iter(rank_samples(consumed, size, topology.data_rank, topology.layout.data))
    masked = []
    for batch in batches:
        labels = batch[:, :-1].contiguous()
        inputs, chosen = mask_samples(
            labels.numpy(),
            list(itertools.islice(samples, len(labels))),
            config.run.seed,
            config.mask_id,
        )
        masked.append(MaskedBatch(torch.from_numpy(inputs), labels, torch.from_numpy(chosen)))
    return masked


def average_loss(losses: list[Tensor], topology: Topology) -> float:
    """Average the loss over all micro batches of all ranks, and wait for it. All ranks together.

    Args:
        losses: This rank's micro batch losses, as `forward_backward` returns them.
        topology: The layout of the processes.

    Returns:
        The mean loss in nats, the same on every rank.
    """
    own = torch.zeros(1, dtype=torch.float64, device=platform.device())
    return float(_sum_over_ranks(losses, topology, own)[0])


def _sum_over_ranks(losses: list[Tensor], topology: Topology, own: Tensor) -> Tensor:
    """Return [mean loss, sums of the other numbers], the same on every rank; fp64, on the device.

    Args:
        losses: This rank's micro batch losses.
        topology: The layout of the processes.
        own: [0, this rank's other numbers], fp64. They travel with the loss, so that summing them
            costs a step nothing. The first element becomes this rank's share of the loss.
    """
    # One rank of each replica contributes its mean. All replicas have equally many micro batches
    # and tokens, so the mean of means is the mean over all tokens.
    if is_reporting_rank():
        own[0] = torch.stack(losses).double().mean() / topology.layout.replicas
    total = own.clone()
    dist.all_reduce(total)
    return total


@dataclass(frozen=True)
class Updated:
    """The numbers of an update, on the device."""

    norm: Tensor
    """Global gradient norm, a scalar."""
    total: Tensor
    """fp64: mean loss, sums of the votes, number of ranks with new metrics, the numbers of
    `StepTimes.shared`; if the memory was checked, the number of ranks whose state has changed, and
    0 if the weights are equal; and if the step was computed twice, the number of ranks on which it
    differed."""
    num_memory: int
    """How many numbers of `total` are about the memory: 2 or 0."""
    is_repeated: bool
    """The step was computed twice."""
    own: list[Tensor]
    """fp64: this rank's contributions to `total` and to the squared norm, and the result of its
    check of the memory."""


def computed_bits(run: Run, losses: list[Tensor]) -> Tensor:
    """Return a checksum of each of this rank's losses and of its gradients, int64."""
    return torch.stack([checksum(each) for each in (*losses, *run.optimizer.own_sums)])


def update(
    run: Run, losses: list[Tensor], learning_rate: float, repeats: Sequence[Tensor] = ()
) -> Updated:
    """Update the weights, and average the loss over all ranks. All ranks together.

    Args:
        run: The run, whose requests to stop are voted on.
        losses: This rank's micro batch losses.
        learning_rate: The optimizer's learning rate for this step.
        repeats: The `computed_bits` of both times, if the step was computed twice.
    """
    resting = run.ledger.resting if run.ledger else None
    checked = resting.check() if resting else None

    def average() -> tuple[Tensor, Tensor]:
        votes = [0.0, *run.requests.votes(), float(run.metrics.has_new())]
        votes += run.times.shared(run.topology, run.state.step + 1)
        own = platform.to_device(torch.tensor(votes, dtype=torch.float64))
        if checked is not None:
            own = torch.cat([own, checked[:2]])
        if repeats:
            own = torch.cat([own, repeats[0].ne(repeats[1]).any().to(own)[None]])
        return own, _sum_over_ranks(losses, run.topology, own)

    spikes = run.spikes
    if spikes is None:
        norm = run.optimizer.step(learning_rate)
        own, total = average()
    else:
        # The loss is averaged first, because it may decide whether there is an update.
        own, total = average()
        if run.config.train.spike_policy == "skip":
            norm = run.optimizer.step(
                learning_rate, lambda norm: spikes.observe(total[0], norm, skips=True)
            )
        else:
            norm = run.optimizer.step(learning_rate)
            spikes.observe(total[0], norm.to(total), skips=False)
    square = run.optimizer.own_square
    parts = [own, square if square is None else square.view(1), checked]
    if run.ledger:
        run.ledger.take_memory(run.state.step + 1)
    return Updated(
        norm,
        total,
        0 if checked is None else 2,
        bool(repeats),
        [part for part in parts if part is not None],
    )


class QueuedStep:
    """A step that the device may still be working on, and its measurements.

    The host queues the work of a step faster than the device does it. `read` waits for the step's
    numbers, so it is called after the next step has been queued; then the device never waits for
    the host to log.
    """

    def __init__(
        self,
        run: Run,
        updated: Updated,
        begin: platform.Moment,
        record: Record,
    ) -> None:
        """Start to copy the step's numbers to the host. All ranks together.

        Args:
            run: The run, as it is after the step.
            updated: The result of `update`.
            begin: When the step began.
            record: The numbers that the host already knows.
        """
        self._requests, self._train, self._state = run.requests, run.config.train, run.state
        self._begin, self._record = begin, record
        self._metrics, self._ledger = run.metrics.take(), run.ledger
        self._times, self._waits = run.times, run.times.take()
        total, self._num_memory = updated.total, updated.num_memory
        self._is_repeated = updated.is_repeated
        spikes = [] if run.spikes is None else [run.spikes.summary]
        own = updated.own if run.ledger and run.ledger.resting else []
        parts = [[updated.norm.to(total).view(1)], [total], self._metrics.numbers, spikes, own]
        self._sizes = [sum(tensor.numel() for tensor in part) for part in parts]
        self._readback = platform.Readback(torch.cat(list(itertools.chain(*parts))))

    @property
    def end(self) -> platform.Moment:
        """Return the moment at which the device has done the step and its numbers are copied."""
        return self._readback.arrival

    def read(self) -> Record:
        """Wait for the step's numbers, and settle the requests to stop.

        Returns:
            The measurements, with the unit in each name. `step` counts the steps done, including
            this one; `loss_nats` is the mean over the global batch, before the update.

        Raises:
            Poisoned: The gradient norm is not finite. Not with fp16, where the loss scale is
                lowered and the update skipped instead.
            Spike: The step was a spike, on which train.spike_policy decides; or (Jump) its norm
                must be replayed.
        """
        numbers, step = iter(self._readback.numbers()), self._record["step"]
        parts = [list(itertools.islice(numbers, size)) for size in self._sizes]
        [norm], (loss, *others), recorded, judged, own = parts
        votes, (num_lacking, *shared) = others[:NUM_VOTES], others[NUM_VOTES:]
        num_unsteady = shared.pop() if self._is_repeated else 0
        memory = [shared.pop() for _ in range(self._num_memory)]
        policy = self._train.spike_policy
        if self._ledger is not None and own:
            square, digest = own[len(others) + 1 :][:1], own[-1] if memory else None
            self._ledger.note(step, [norm, loss, own[0], sum(square), digest])
            if any(memory):
                raise changed_memory(step, own[-3:])
            if num_unsteady:
                self._ledger.differed(step, bool(own[len(others)]))
        if not math.isfinite(norm) and self._train.precision != "fp16":
            seen = f"step {step}: the gradient norm is {norm}"
            if policy == "rollback":
                raise Spike(seen, self._state)
            raise Poisoned(
                seen,
                "Resume from the last checkpoint. With recovery.replay = true the run finds out "
                "whether it comes from the data and the settings or from a machine",
            )
        if policy == "none" and own and self._ledger and self._ledger.jumps(step, norm):
            seen = f"step {step}: the gradient norm is {norm:.4g}, and before it never exceeded "
            raise Jump(f"{seen}{self._ledger.most:.4g}", self._state)
        measured: Record = {"loss_nats": loss, "gradient_norm": norm}
        if judged:
            is_spike, loss_limit, norm_limit, num_skipped = judged
            if policy == "skip":
                measured["skipped_updates"] = int(num_skipped)
            elif is_spike:
                seen = (
                    f"step {step}: a spike, with a loss of {loss:.4g} nats (limit "
                    f"{loss_limit:.4g}) and a gradient norm of {norm:.4g} (limit {norm_limit:.4g})"
                )
                raise Spike(seen, self._state)
        self._requests.settle(votes)
        seconds = measured["step_seconds"] = self.end.seconds_since(self._begin)
        self._times.add(seconds, self._waits)
        if shared:
            measured[SHARED] = shared
        metrics = self._metrics.record(recorded, is_lacking=num_lacking > 0)
        return {**self._record, **measured, **metrics}


def agree(requests: Requests) -> None:
    """Settle `requests` by a separate reduction, between steps. All ranks together."""
    votes = torch.tensor(requests.votes(), device=platform.device())
    dist.all_reduce(votes)
    requests.settle(votes.tolist())


def seed_step(config: RunConfig, topology: Topology, step: int) -> None:
    """Seed this rank's dropout as a function of run.seed, the step and the rank's coordinates.

    A resumed run thus draws the same masks as an uninterrupted run, without any saved generator
    state. Replicas and pipeline stages draw different masks. Tensor ranks get the same seed,
    because they must drop the same channels of activations that they all hold; for activations that
    are split, Megatron's tracked generator adds the tensor rank (platform.seed_generators).

    Args:
        config: The run.
        topology: This process's coordinates.
        step: The step about to be taken, counted from 0.
    """
    m = config.model
    if not (m.hidden_dropout or m.attention_dropout or m.activation_dropout or m.adaptive_dropout):
        return
    key = f"{config.run.seed}/{step}/{topology.replica}/{topology.pipeline_rank}"
    digest = hashlib.sha256(key.encode()).digest()
    platform.seed_generators(int.from_bytes(digest[:4], "little") >> 1)


def _mean_loss(token_losses: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce the tokens' losses, of any shape, to (loss to differentiate, loss to keep)."""
    loss = token_losses.float().mean()
    # Cloned, because Megatron divides the first loss in place by the number of micro batches
    # (megatron/core/pipeline_parallel/schedules.py, `forward_step_calc_loss`).
    return loss, loss.detach().clone()

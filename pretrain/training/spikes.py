"""Follow train.spike_policy: judge every step, and go back to a checkpoint after a spike."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pretrain.checkpoint.manifest import TrainerState
from pretrain.config import Poisoned, RunConfig, RunFailed
from pretrain.optim.health import SpikeDetector
from pretrain.optim.sharded_step import Veto
from pretrain.rundir.metrics import Record

NUM_NUMBERS = 4
"""How many numbers of a step `SpikeWatch.numbers` holds."""


class Spike(Exception):
    """Raised on every rank when a spike's numbers are read, to go back to a checkpoint."""

    def __init__(self, message: str, state: TrainerState) -> None:
        """Note what was seen.

        Args:
            message: Which step it was, its numbers and their limits.
            state: How far training had come after the spike.
        """
        super().__init__(message)
        self.state = state


class SpikeWatch:
    """Judges every step of a run and counts its rollbacks; the same on every rank."""

    def __init__(self, config: RunConfig, saved: dict[str, list[float]] | None) -> None:
        """Go on from what a checkpoint holds.

        Args:
            config: The run; its spike policy is not "none".
            saved: `TrainerState.spikes`.
        """
        train = config.train
        self.policy, self._max_rollbacks = train.spike_policy, train.spike_max_rollbacks
        self.detector = SpikeDetector(train.spike_threshold, train.spike_window_steps)
        self.detector.load(saved)
        steps = [(saved or {}).get(key, []) for key in ("rolled_back_from", "rolled_back_to")]
        self.rollbacks = [(int(a), int(b)) for a, b in zip(*steps)]
        """(step of the spike, step of the checkpoint) of each time that the run went back."""

    def veto(self, loss: Tensor) -> Veto | None:
        """Return what leaves out the update of a spike; None unless the policy is to skip it.

        Args:
            loss: The step's mean loss in nats, a scalar on the device.
        """
        if self.policy != "skip":
            return None
        return lambda norm: self.detector.observe(loss, norm, skips=True)

    def numbers(self) -> Tensor:
        """Return what is read of the last step observed: `judge` takes it; fp64 [NUM_NUMBERS]."""
        return self.detector.summary

    def judge(
        self, state: TrainerState, loss: float, norm: float, numbers: Sequence[float]
    ) -> None:
        """Do what the policy says if a step was a spike.

        Args:
            state: How far training had come after the step.
            loss: Its mean loss in nats.
            norm: Its gradient norm.
            numbers: `numbers()` on the host.

        Raises:
            RunFailed: It was, and the policy is to stop.
            Spike: It was, and the policy is to go back.
        """
        is_spike, loss_limit, norm_limit, _ = numbers
        if not is_spike or self.policy == "skip":
            return
        seen = (
            f"step {state.step}: a spike, with a loss of {loss:.4g} nats (limit {loss_limit:.4g}) "
            f"and a gradient norm of {norm:.4g} (limit {norm_limit:.4g})"
        )
        if self.policy == "rollback":
            raise Spike(seen, state)
        raise RunFailed(
            f"{seen}. Nothing after it is saved. Resume from the last checkpoint with a lower "
            'optimizer.learning_rate, with train.spike_policy = "skip" or "rollback", or, if it '
            "was no spike, with a higher train.spike_threshold"
        )

    def record(self, step: int) -> Record:
        """Return what the record of a step says about going back.

        Args:
            step: The step, counted from 1.
        """
        if self.policy != "rollback":
            return {}
        record: Record = {"rollbacks": len(self.rollbacks)}
        if self.rollbacks and self.rollbacks[-1][1] == step - 1:
            record["rolled_back_from_step"] = self.rollbacks[-1][0]
        return record

    def check_rollback(self, spike: Spike, step: int) -> None:
        """Check that the run may go back to `step` once more.

        Raises:
            Poisoned: It has done so train.spike_max_rollbacks times.
        """
        times = sum(to == step for _, to in self.rollbacks)
        if times >= self._max_rollbacks:
            raise Poisoned(
                f"{spike}. The run has gone back to step {step} {times} times already "
                f"(train.spike_max_rollbacks = {self._max_rollbacks}), so it is not the data. "
                "Resume from an earlier checkpoint, or with a lower optimizer.learning_rate"
            )

    def went_back(self, spike: Spike, restored: TrainerState) -> None:
        """Note that the run went back, and restore the window that the checkpoint holds."""
        self.rollbacks.append((spike.state.step, restored.step))
        self.detector.load(restored.spikes)

    def to_lists(self) -> dict[str, list[float]]:
        """Return what a checkpoint has to hold, `TrainerState.spikes`. Waits for the device."""
        return {
            **self.detector.to_lists(),
            "rolled_back_from": [float(spike) for spike, _ in self.rollbacks],
            "rolled_back_to": [float(step) for _, step in self.rollbacks],
        }

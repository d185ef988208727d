"""The records of what was counted: kernels, collectives and synchronisations of a step."""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field
from enum import StrEnum

from pretrain.plan.operators import OpClass


class Phase(StrEnum):
    """The parts of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BETWEEN_PASSES = "between passes"
    """What the pipeline schedule does outside of both: sends, receives and the loss."""
    GRADIENT_REDUCTION = "gradient reduction"
    OPTIMIZER_STEP = "optimizer step"
    WEIGHT_GATHER = "weight gather"
    LOSS_AVERAGE = "loss average"
    OTHER = "other"


@dataclass
class Kernels:
    """The cost of some kernels together."""

    launches: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    def add(self, launches: int, bytes_read: int, bytes_written: int) -> None:
        """Add the cost of further kernels.

        Args:
            launches: Kernel launches.
            bytes_read: Bytes that they read.
            bytes_written: Bytes that they write.
        """
        self.launches += launches
        self.bytes_read += bytes_read
        self.bytes_written += bytes_written


@dataclass
class Collective:
    """One call of torch.distributed."""

    name: str
    """The operator in torch's namespace c10d, without underscores at its ends."""
    group: str
    """"world", "data", "tensor", "pipeline", "embedding", "model" (tensor x pipeline), or a list of
    ranks."""
    group_size: int
    dtype: str
    num_bytes: int
    """Size of the message: of the whole tensor for an all-reduce, of the gathered result for an
    all-gather, of the input for a reduce-scatter."""
    phase: Phase
    """When it was issued."""
    asynchronous: bool
    """False if the caller had the stream wait for it at once."""
    hidden_behind: Kernels | None = None
    """Kernels launched after it was issued and before the caller waited for it, except those of the
    gradient reduction itself. None if nobody has waited, or if the processes are real, where waits
    are not seen."""
    awaited_in: Phase | None = None
    """When the caller waited for it."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank sends, by the ring algorithms that NCCL's bandwidths refer to.

        Origin: nccl-tests, doc/PERFORMANCE.md. A received message counts for its sender.
        """
        share = (self.group_size - 1) / self.group_size
        if self.name in ("recv", "barrier"):
            return 0.0
        if self.name == "send":
            return float(self.num_bytes)
        return self.num_bytes * share * (2 if self.name.startswith("allreduce") else 1)

    @property
    def is_exposed(self) -> bool:
        """True if nothing was launched that it could hide behind."""
        hidden_behind = self.hidden_behind
        return not self.asynchronous or (hidden_behind is not None and not hidden_behind.launches)


@dataclass
class StepCounts:
    """The cost of one optimizer step of one rank."""

    kernels: dict[tuple[Phase, OpClass, str], Kernels] = field(default_factory=dict)
    """By phase, class and name of the operator."""
    collectives: list[Collective] = field(default_factory=list)
    """In the order in which they were issued."""
    synchronisations: Tally[tuple[Phase, str]] = field(default_factory=Tally)
    """How often the host waited for the device, by phase and cause."""

    def total(
        self, phase: Phase | None = None, kind: OpClass | None = None, name: str | None = None
    ) -> Kernels:
        """Return the cost of all kernels of a phase, a class and a name.

        Args:
            phase: A phase; None means all.
            kind: A class of operators; None means all.
            name: The name of an operator; None means all.
        """
        result = Kernels()
        for (its_phase, its_kind, its_name), cost in self.kernels.items():
            if phase in (None, its_phase) and kind in (None, its_kind) and name in (None, its_name):
                result.add(cost.launches, cost.bytes_read, cost.bytes_written)
        return result

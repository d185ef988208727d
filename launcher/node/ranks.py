"""Define what a supervisor needs of the ranks that it watches.

There are two implementations: `LocalRanks` (local.py) starts them as processes of this machine,
`SrunRanks` (srun.py) starts them with srun on the nodes of a Slurm job.
"""

from __future__ import annotations

from typing import Protocol


class Ranks(Protocol):
    """The ranks of one attempt, which have been started."""

    failure: str
    """The first failure, in one line for the user. Set when `poll` returns a code other than 0."""

    nodes: tuple[str, ...]
    """The nodes that the failure came from, where that is known. Set with `failure`."""

    def poll(self) -> int | None:
        """Return None while the ranks run, then the exit code of all of them together.

        That is 0 when every rank ended with 0, else the code of the rank that failed first (128 + n
        for signal n). Only the first failure tells what happened: the other ranks are ended because
        of it.
        """

    def signal(self, number: int) -> None:
        """Send a signal to every rank."""

    def have_failed(self) -> bool:
        """Return True if a rank is known to have ended badly while `poll` still returns None."""

    def stuck_nodes(self) -> tuple[str, ...]:
        """Return the nodes of ranks that hang by themselves, by the stacks written since SIGUSR2.

        The ranks that only wait for them in a collective operation are left out. Nothing is
        returned where that cannot be told.
        """

    def end(self) -> int:
        """End every rank, after a short grace period where there is one, and wait for that.

        Returns:
            The exit code.
        """

    def kill(self) -> None:
        """End every rank at once, without letting it save, and wait until all are gone."""

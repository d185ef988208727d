"""The interface of what the loop calls around its steps.

Numbers of a step reach the hooks while the device works on the next one. A hook that needs the
model as it stands after a step says that it is due, and is called between two steps.

Hooks read the run and never steer it, with one exception: a request to stop has to be agreed on by
all ranks, and where a hook runs for long it has the ranks agree in between. An evaluation does so
before each of its passes and is broken off when they have agreed; a save does so when it is done.
A stopped run then saves its step, and the evaluation is done at the next start.
"""

from __future__ import annotations

from pathlib import Path

from pretrain.rundir.metrics import Record
from pretrain.train.start import Run


class Hook:
    """The interface that the loop calls on every rank. Each hook overrides what it needs."""

    def at_start(self, run: Run) -> None:
        """Finish the work that the previous attempt left undone at this step."""

    def before_step(self, run: Run) -> None:
        """Act right before the step after `run.state.step` is queued."""

    def after_step(self, run: Run, record: Record) -> None:
        """Act on a step's numbers (`QueuedStep.read`), while the next step may be under way."""

    def is_due(self, run: Run) -> bool:
        """Return True if the hook has to act before the next step begins, alike on all ranks."""
        return False

    def between_steps(self, run: Run) -> None:
        """Act with no step under way. Called on all hooks as soon as one of them is due."""

    def before_rollback(self, run: Run) -> None:
        """Finish what is under way: the run goes back to its newest checkpoint next."""

    def newest_checkpoint(self, run: Run) -> Path | None:
        """Return the newest checkpoint of the run as it stands, from the hook that saves."""
        return None

    def after_rollback(self, run: Run) -> None:
        """Forget the steps after `run.state.step`, which are taken again."""

    def close(self) -> None:
        """Release what the hook holds; called once, also after a failure."""

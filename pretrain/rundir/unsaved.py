"""Say what a run would lose if it ended at once, as Ctrl-C asks and is told."""

from __future__ import annotations

from pretrain.rundir.checkpoints import checkpoint_name


def saving_then_stopping(step: int, saved: int | None) -> str:
    """Return the line with which a first Ctrl-C is answered.

    Args:
        step: Steps done.
        saved: The step of the newest checkpoint; None if there is none.
    """
    lost = steps_lost(step, saved)
    losing = f", losing {lost}" if lost else ""
    return f"saving, then stopping; press Ctrl-C again to leave at once{losing}"


def steps_lost(step: int, saved: int | None) -> str:
    """Return "3 steps since step-00000020", or "" where nothing would be lost.

    Args:
        step: Steps done.
        saved: The step of the newest checkpoint; None if there is none.
    """
    count = step - (saved or 0)
    if count <= 0:
        return ""
    since = "the start" if saved is None else checkpoint_name(saved)
    return f"{count} step{'s' if count > 1 else ''} since {since}"

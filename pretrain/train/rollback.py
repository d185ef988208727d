"""Take a run back to its newest checkpoint after a spike, and on with the data that follows it.

Chowdhery et al. 2022 (PaLM, section 5.1) went back about 100 steps before a spike and skipped 200
to 500 batches, and the spike did not return: it takes the data and the state of the model together.
Here the run goes back to its newest checkpoint, and skips all samples from there up to and
including the spike's. Steps are counted from the checkpoint again; `consumed_samples` goes on.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import ConfigError, RunFailed
from pretrain.train.hook import Hook
from pretrain.train.spikes import Spike
from pretrain.train.start import Run


def roll_back(run: Run, spike: Spike, hooks: Sequence[Hook]) -> None:
    """Restore the newest checkpoint into `run`, and pass over the data. All ranks together.

    Args:
        run: The run; steps after the checkpoint have been taken.
        spike: What was seen, the same on every rank.
        hooks: The run's hooks.

    Raises:
        RunFailed: There is no checkpoint, it cannot be loaded, or the run has gone back to it too
            often.
    """
    assert run.spikes is not None
    # A save may be under way beside training: its checkpoint is then the newest.
    for hook in hooks:
        hook.before_rollback(run)
    paths = [path for hook in hooks if (path := hook.newest_checkpoint(run)) is not None]
    if not paths:
        raise RunFailed(
            f"{spike}. There is no checkpoint to go back to. Start again with a lower "
            "optimizer.learning_rate or a longer schedule.lr_warmup_steps, or save earlier "
            "(checkpoint.interval_steps)"
        )
    try:
        checkpoint = open_checkpoint(paths[-1])
        run.spikes.check_rollback(spike, checkpoint.trainer_state.step)
        # The weights of the last update are still being gathered into what is overwritten.
        run.optimizer.wait_for_weights()
        restored = load_checkpoint(checkpoint, run.optimizer)
    # The command's input was right: at the next start, an earlier checkpoint may be good.
    except ConfigError as error:
        raise RunFailed(f"{spike}. {error}") from None
    run.state = dataclasses.replace(
        restored,
        consumed_samples=spike.state.consumed_samples,
        # The data goes on in the present blend, which may have begun after the checkpoint.
        segment=spike.state.segment,
    )
    run.spikes.went_back(spike, restored)
    for hook in hooks:
        hook.after_rollback(run)
    if run.topology.is_main:
        skipped = spike.state.consumed_samples - restored.consumed_samples
        print(
            f"{spike}; back to step {restored.step}, and on after the {skipped} samples since",
            file=sys.stderr,
            flush=True,
        )

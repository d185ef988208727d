"""Check a start before anything is written, sent or begun: what it cannot do, and what is done.

The ranks check the same and more, together with the data. But a start that is refused or has
nothing to do should be known before: it would be an attempt of the run, and under Slurm a job.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.config.evaluation import recorded_protocol
from pretrain.config.run import is_url
from pretrain.config.trajectory import check_differences, differences
from pretrain.rundir.attempts import is_finished, is_idle, read_attempts
from pretrain.rundir.checkpoints import checkpoint_step, complete_checkpoints
from pretrain.rundir.metrics import evaluations_at
from pretrain.rundir.paths import DATA_MANIFESTS, RunPaths, check_apart, check_version
from pretrain.rundir.states import Outcome
from pretrain.rundir.trust import check_trusted


def is_done(config: RunConfig, allow_changed: Collection[str] = ()) -> bool:
    """Return True if a start of the run would find nothing to train and nothing to evaluate.

    Args:
        config: The run, which would go on from its newest checkpoint.
        allow_changed: The keys of --allow-changed.

    Raises:
        ConfigError: The run cannot go on with this config; see `check_goes_on`.
    """
    check_goes_on(config, allow_changed)
    run, num_steps = config.directory, config.train.num_steps
    if not is_finished(run, num_steps):
        return False
    missing = _evaluations(config)
    # Cheaper than metrics.jsonl, and it knows which lengths the ranks left out of the default.
    ended = [each.ended for each in read_attempts(run) if not is_idle(each)]
    if ended and ended[-1] and ended[-1].outcome == Outcome.FINISHED:
        try:
            missing -= _evaluations(load_config(RunPaths(run).config))
        except ConfigError:
            # Damaged, or of another version. That the attempt finished is all that is known.
            return True
    if missing:
        missing -= evaluations_at(RunPaths(run).metrics, num_steps)
    return not missing


def already_done(config: RunConfig) -> str:
    """Return the line that says that a start of the run has nothing to do."""
    return (
        f"{config.run.directory}: finished already, at step {config.train.num_steps}; nothing to "
        "do. To train it further, increase train.num_steps; for a new run, choose another "
        "run.directory"
    )


def check_goes_on(config: RunConfig, allow_changed: Collection[str] = ()) -> None:
    """Check that the run may go on from its newest checkpoint, as far as its config tells.

    Args:
        config: The run.
        allow_changed: The keys of --allow-changed.

    Raises:
        ConfigError: The directory belongs to another user, has another layout or
            lies inside another run's or a data set's, or the run differs from the checkpoint in
            what may not change, or has done more steps.
    """
    check_trusted(config.directory)
    check_version(config.directory)
    check_apart(config.directory)
    found = complete_checkpoints(config.directory)
    if not found:
        return
    try:
        before = load_config(found[-1] / "config.toml")
    except ConfigError:
        # Damaged, which only reading all of it can tell; the ranks do.
        return
    check_differences(differences(before, config), found[-1], allow_changed)
    step, last = checkpoint_step(found[-1].name) or 0, config.train.num_steps
    if step > last:
        raise ConfigError(
            f"train.num_steps = {last}: {found[-1]} has done {step} steps already. Set {step} or "
            "more, or --resume an earlier checkpoint"
        )


def missing_data(config: RunConfig) -> Path | None:
    """Return the first file that the run's data set lacks, or None if it is built or lies at a URL.

    What lies at a URL is looked at by the ranks, which may have rights that this machine lacks.
    """
    if is_url(config.data.directory):
        return None
    needed = (config.data_directory / name for name in DATA_MANIFESTS)
    return next((path for path in needed if not path.is_file()), None)


def check_data(config: RunConfig) -> None:
    """Raise ConfigError unless the run's data set is built."""
    if missing := missing_data(config):
        raise ConfigError(
            f"data.directory = {config.data_directory}: no built data set ({missing} is missing). "
            "Build it first with `pretrain data build CONFIG`"
        )


def _evaluations(config: RunConfig) -> set[tuple[str, int, int]]:
    """Return protocol, stride and length of each evaluation that follows the last step."""
    return {
        (
            recorded_protocol(config, name),
            length if name == "nonoverlapping" else config.evaluation_stride,
            length,
        )
        for name in config.evaluation.protocols
        for length in config.evaluation_lengths
    }

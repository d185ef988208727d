"""Check the nodes of a Slurm job before its ranks start, and tell which of them must not train.

`pretrain preflight` runs as one job step on all nodes, a process for each rank. The processes say
on stdout what they find, and this side says on stdin who shall add up numbers with whom. So the
check needs no shared directory, which may be what is broken, and no process that is broken can hold
up the others: it is left out of the next group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.config import ConfigError, NoSpace, RunConfig, free_bytes, in_bytes, writing
from pretrain.config.parameters import num_parameters, num_parameters_of_rank
from pretrain.launcher.node.checking import Check, Interrupted, StepWords
from pretrain.launcher.node.diagnosis import Diagnosis, Expected
from pretrain.launcher.node.signals import Signals
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import PREFLIGHT, Preflight
from pretrain.rundir.checkpoints import check_room
from pretrain.rundir.files import replace_json
from pretrain.rundir.jobs import LaunchRecord
from pretrain.rundir.lock import Attempt
from pretrain.rundir.paths import RunPaths

MOST_LINES = 20
"""Lines that are printed; the attempt's preflight.json has all."""
LEAST_BYTES = 4
"""Bytes that a rank needs per parameter it holds at the very least: a weight and a gradient."""


def check_nodes(
    launch: LaunchRecord,
    config: RunConfig,
    nodes: Sequence[str],
    attempt: Attempt,
    job_id: str,
    signals: Signals,
) -> dict[str, str]:
    """Run `pretrain preflight` on every node of the job, and return the nodes that must not train.

    It takes at most recovery.preflight_seconds, renews the attempt's lease meanwhile, and ends at
    once when this process gets a signal. What it finds is printed, and kept in the attempt's
    preflight.json.

    Args:
        launch: How the run starts its ranks.
        config: The run's config. With recovery.preflight_seconds = 0 nothing is checked.
        nodes: The nodes to check: those that will train and the spares.
        attempt: The attempt, which this process has begun.
        job_id: The job this process runs in.
        signals: The signals that this process receives.

    Returns:
        The causes by node. A node that is only odd, as a slow one, is none of them.

    Raises:
        ConfigError: The ranks could start on none of the nodes, and the cause is the run's: the
            container, the directory, torch. No node is to blame.
        NoSpace: No checkpoint fits on the disk.
        RunFailed: The run's directory cannot be written to.
    """
    if not config.recovery.preflight_seconds:
        return {}
    began = time.monotonic()
    paths = RunPaths(attempt.run)
    checkpoint = config.state_bytes * num_parameters(config)
    _check_room(paths.checkpoints, checkpoint)
    token = attempt.directory / f".preflight-{secrets.token_hex(8)}"
    with writing(token):
        token.touch()
    gpus = launch.site.get("gpus_per_node", 0)
    per_node = launch.num_tasks // launch.nodes
    expected = Expected(
        nodes=tuple(nodes),
        per_node=per_node,
        gpus=per_node if gpus else 0,
        python=launch.python,
        directory=str(attempt.run),
        memory=LEAST_BYTES * max(_parameters_of_ranks(config)),
    )
    command = [launch.python, "-m", "pretrain", "preflight", str(token)]
    command += ["--precision", config.train.precision]
    check = Check(
        _step(launch.command, command),
        expected,
        config.recovery.preflight_seconds,
        attempt,
        job_id,
        signals,
    )
    try:
        diagnosis = check.run()
    except Interrupted:
        return {}
    finally:
        check.end()
        # A process that was killed may have left its own file.
        for left in attempt.directory.glob(f"{token.name}*"):
            with contextlib.suppress(OSError):
                left.unlink()
    free = free_bytes(paths.checkpoints)
    if free is not None and free < 2 * checkpoint:
        diagnosis.warnings.append(
            f"{paths.checkpoints}: {in_bytes(free)} are free, less than two checkpoints take"
        )
    _record(attempt, expected, diagnosis, time.monotonic() - began)
    if diagnosis.refusal:
        raise (NoSpace if diagnosis.is_full else ConfigError)(f"preflight: {diagnosis.refusal}")
    return diagnosis.faults


def _check_room(checkpoints: Path, needed: int) -> None:
    """Raise NoSpace when not even one checkpoint fits."""
    free, left = free_bytes(checkpoints), 0
    # The next attempt removes what unfinished saves have left, under hidden names.
    for path in checkpoints.glob(".*/**/*"):
        with contextlib.suppress(OSError):
            left += path.stat().st_size
    if free is not None and free + left < needed:
        check_room(checkpoints, needed)


def _parameters_of_ranks(config: RunConfig) -> list[int]:
    stages = config.parallel.pipeline_model_parallel_size
    return [num_parameters_of_rank(config, stage) for stage in range(stages)]


def _step(step: Sequence[str], command: Sequence[str]) -> StepWords:
    """Return a function that makes srun's command line from the step's name, nodes and tasks."""
    # What comes after --label may be the container's. Of an option given twice, srun takes the
    # last.
    end = list(step).index("--label") + 1 if "--label" in step else len(step)

    def words(name: str, nodes: Sequence[str], num_tasks: int) -> list[str]:
        """Return srun's command line for a step of this name, on these nodes."""
        return [
            *step[:end],
            "--label",
            f"--job-name={name}",
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            f"--ntasks={num_tasks}",
            "--distribution=block",
            # A process that fails does not end the others, which have findings of their own.
            "--kill-on-bad-exit=0",
            "--wait=0",
            # What is left of it on a broken node must not keep the ranks from starting.
            "--overlap",
            "--input=all",
            *step[end:],
            *command,
        ]

    return words


def _record(attempt: Attempt, expected: Expected, diagnosis: Diagnosis, seconds: float) -> None:
    """Print what was found and write the attempt's preflight.json."""
    lines = [
        *(f"{node}: {cause}; not used" for node, cause in diagnosis.faults.items()),
        *diagnosis.warnings,
    ]
    for line in lines[:MOST_LINES]:
        say(f"preflight: {line}")
    if len(lines) > MOST_LINES:
        say(f"preflight: and {len(lines) - MOST_LINES} more; see {attempt.directory / PREFLIGHT}")
    fit = len(expected.nodes) - len(diagnosis.faults)
    if not diagnosis.refusal:
        say(f"preflight: {fit} of {len(expected.nodes)} nodes are fit, in {seconds:.1f} s")
    record = Preflight(
        at=time.time(),
        seconds=round(seconds, 3),
        nodes=expected.nodes,
        faults=diagnosis.faults,
        warnings=tuple(diagnosis.warnings),
        refusal=diagnosis.refusal,
    )
    # On a full disk the printed lines have to do.
    with contextlib.suppress(OSError):
        replace_json(attempt.directory / PREFLIGHT, dataclasses.asdict(record))

"""Submit several runs as one job array: one for each combination of values, or for each config."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.config.load import key_of
from pretrain.launcher import slurm
from pretrain.launcher.site import Site, SlurmRequest
from pretrain.launcher.submit import (
    TrainingRun,
    allocate,
    check_runs,
    jobs_of,
    only_warned,
    print_dry_run,
    send,
    training_job,
)
from pretrain.rundir.jobs import is_done

# ---- Name the runs of a sweep: one for each combination of values, or for each config ----


NAME_LENGTH = 80
"""Longest name of a run's directory, before its hash."""


def wanted_runs(
    paths: Sequence[Path], axes: dict[str, list[str]], overrides: Sequence[str]
) -> list[RunConfig]:
    """Return the runs that a command line names.

    Args:
        paths: The configs, each of which is a run, or with axes one for each combination.
        axes: The keys and their values.
        overrides: Settings of all runs, as --set takes them.

    Raises:
        ConfigError: A value is wrong, --set gives a key that is swept over, or the directory of one
            run is another's.
    """
    runs: dict[str, RunConfig] = {}
    for path in paths:
        for config in sweep_runs(path, axes, overrides):
            directory = os.path.realpath(config.directory)
            if directory in runs:
                raise ConfigError(
                    f"{path}: run.directory = {config.run.directory} is another run's of this "
                    "sweep. Name another directory, or make the runs with --over"
                )
            runs[directory] = config
    return list(runs.values())


def parse_axes(axes: Sequence[str]) -> dict[str, list[str]]:
    """Parse the arguments of --over: the values of each key, as `--set` reads them.

    Raises:
        ConfigError: An argument is not of the form section.key=value,value, or a key is given
            twice.
    """
    parsed: dict[str, list[str]] = {}
    for text in axes:
        key, separator, values = (part.strip() for part in text.partition("="))
        if not (separator and re.fullmatch(r"\w+\.\w+", key, re.ASCII)):
            raise ConfigError(
                f"--over {text}: want section.key=value,value, for example "
                "--over position.method=alibi,rotary"
            )
        if key in parsed:
            raise ConfigError(f"--over {key}: given twice. List all its values in one --over")
        parsed[key] = split_values(values, text)
    return parsed


def split_values(text: str, argument: str) -> list[str]:
    """Split the values of an axis at the commas between them.

    "512,1024" becomes ["512", "1024"]. Commas inside TOML's brackets and quotes do not separate:
    "[1, 2],[3]" becomes ["[1, 2]", "[3]"].

    Args:
        text: The values, as the user typed them.
        argument: The whole argument of --over, for error messages.

    Returns:
        The values, each as TOML writes it, or as it is when the text is not TOML.

    Raises:
        ConfigError: Brackets or quotes do not match, or a value is missing.
    """
    # The text is read as a TOML array, since TOML knows where a value ends.
    try:
        values = [_toml(value) for value in tomllib.loads(f"values = [{text}]")["values"]]
    except ValueError:
        if re.search(r"[\[\]{}\"']", text):
            raise ConfigError(
                f"--over {argument}: not values separated by commas. Write them as TOML does: "
                'strings "a","b", lists [1, 2],[3, 4]'
            ) from None
        # Plain words, as in alibi,rotary, are not TOML; nobody quotes each of them in a shell.
        values = [value.strip() for value in text.split(",")]
    if not values or "" in values:
        raise ConfigError(f"--over {argument}: a value is missing")
    return values


def run_name(over: dict[str, Any]) -> str:
    """Return the name of the directory of a run, for example "alibi-512".

    A hash of the keys and values is appended when the values alone would be ambiguous or too long.
    Different combinations therefore never share a directory.

    Args:
        over: The keys and values of the run.
    """
    name = "-".join(map(_word, over.values()))
    exact = all(value is not None and _word(value) == str(value) for value in over.values())
    if exact and len(name) <= NAME_LENGTH:
        return name
    # Sorted, so that the order of the --over arguments does not matter.
    text = json.dumps(over, sort_keys=True, default=str)
    return f"{name[:NAME_LENGTH]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def sweep_runs(path: Path, axes: dict[str, list[str]], overrides: Sequence[str]) -> list[RunConfig]:
    """Return one run for each combination of values; the config's own run without axes.

    The runs of the run.directory runs/mine lie in runs/mine-sweep.

    Args:
        path: The config that the runs have in common.
        axes: The keys and their values.
        overrides: Settings of all runs, as --set takes them.

    Raises:
        ConfigError: A value is wrong, or --set gives a key that is swept over.
    """
    for override in overrides:
        # One of the two would be lost.
        if (key := key_of(override)) in axes:
            raise ConfigError(
                f"--set {override}: --over gives {key} its values. Leave one of the two out"
            )
    if not axes:
        return [load_config(path, overrides)]
    runs = []
    for values in itertools.product(*axes.values()):
        settings = [f"{key}={value}" for key, value in zip(axes, values)]
        config = load_config(path, [*overrides, *settings])
        name = run_name({key: _value(config, key) for key in axes})
        own = config.run.model_copy(update={"directory": f"{config.directory}-sweep/{name}"})
        runs.append(config.model_copy(update={"run": own}))
    return runs


def _value(config: RunConfig, key: str) -> Any:
    """Return the value of "section.key" in a config; lists and tables as JSON has them."""
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _toml(value: Any) -> str:
    """Return a value as TOML writes it, a table in one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(part)}' for key, part in value.items())}}}"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def _word(value: Any) -> str:
    """Return a value as a part of a file name.

    Text keeps no dash, because `run_name` joins the parts with dashes. The result is never empty,
    "." or "..", and has no "/".
    """
    # Before the substitution below: 1e-05 keeps its dash.
    if isinstance(value, float):
        return str(value)
    parts = list(value.values()) if isinstance(value, dict) else value
    text = "_".join(map(str, parts)) if isinstance(parts, list) else str(parts)
    return re.sub(r"[^\w.+=]+", "_", text, flags=re.ASCII).strip("._") or "value"


LOGS = ".logs"
"""Folder of the array's logs, beside the runs; hidden, so that a shell's `*` gives only runs."""


def sweep(
    paths: Sequence[Path],
    site: Site,
    axes: Sequence[str],
    overrides: Sequence[str],
    request: SlurmRequest,
    *,
    concurrent: int | None = None,
    dry_run: bool = False,
    allow_changed: Sequence[str] = (),
) -> None:
    """Submit one run for each combination of values, or for each config, as one job array.

    Finished runs and those that a job trains are left out, so a sweep may be repeated, also with
    more values. All other runs are checked before anything is sent.

    Args:
        paths: The configs, each of which is a run, or with axes one for each combination.
        site: The cluster.
        axes: The keys and their values, as "section.key=value,value".
        overrides: Settings of all runs, as --set takes them.
        request: What this command asks of Slurm.
        concurrent: How many runs may train at the same time; by default all.
        dry_run: Only print the array.
        allow_changed: Keys that may differ from the checkpoints' although they change training.

    Raises:
        ConfigError: The axes are malformed, or a run cannot work; nothing was sent.
        SlurmError: Slurm refused the array; nothing is left of it on disk.
    """
    site = request.site(site)
    wanted = wanted_runs(paths, parse_axes(axes), overrides)
    parents = [os.path.dirname(os.path.abspath(each.directory)) for each in wanted]
    folder = Path(os.path.commonpath(parents))
    runs = [allocate(each, site, request.nodes, allow_changed) for each in wanted]
    if not (runs := _to_send(runs, dry_run)):
        return
    _check_same_size(runs)
    check_runs(runs, dry_run)
    job = training_job(
        runs,
        site,
        request,
        concurrent or len(runs),
        slurm.job_name(folder.name if axes else ".".join(folder.parts[-2:])),
        folder / LOGS,
    )
    if dry_run:
        print_dry_run(runs, job, {})
        return
    # squeue shows one name for all tasks of an array. Names of their own would take a call of
    # scontrol each, and split the array's one record in slurmctld into as many.
    for job_id, run in zip(ids := send(runs, job, {}), runs):
        print(f"job {job_id}: {run.config.run.directory}")
    print(
        f"submitted {len(ids)} runs of {runs[0].nodes} nodes x {runs[0].tasks_per_node} ranks, at "
        f"most {job.concurrent} at the same time"
    )
    folders = sorted({str(Path(each.run.directory).parent) for each in wanted})
    print("next: launcher status", *(f"{shlex.quote(folder)}/*" for folder in folders))


def _to_send(runs: Sequence[TrainingRun], dry_run: bool) -> list[TrainingRun]:
    """Return the runs that need a job, and say which do not.

    Raises:
        ConfigError: A run cannot go on.
        SlurmAway: slurmctld does not answer, and it is no dry run, which goes on with a warning.
    """
    left_out = {run.directory: "finished" for run in runs if is_done(run.config, run.allow_changed)}
    left = [run for run in runs if run.directory not in left_out]
    with only_warned(dry_run, slurm.SlurmAway):
        left_out |= {run: f"{job} trains it" for run, job in jobs_of(left).items()}
    for run in runs:
        if run.directory in left_out:
            print(f"{run.config.run.directory}: {left_out[run.directory]}, left out")
    return [run for run in left if run.directory not in left_out]


def _check_same_size(runs: Sequence[TrainingRun]) -> None:
    """Raise ConfigError unless all runs have the same allocation, as a job array requires."""
    sizes = {(run.nodes + run.spare_nodes, run.tasks_per_node) for run in runs}
    if len(sizes) > 1:
        shown = " and ".join(f"{nodes} x {tasks}" for nodes, tasks in sorted(sizes))
        raise ConfigError(
            f"these runs need {shown} ranks (nodes x ranks per node), but all tasks of a "
            "job array have the same size. Sweep over each size separately"
        )

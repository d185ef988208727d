"""A config with several values for some of its keys -> one run for each combination, as one job array."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from pretrain.config import ConfigError, load_config
from pretrain.launcher import slurm
from pretrain.launcher.cluster import Site
from pretrain.launcher.job import job_name
from pretrain.launcher.login.submit import TrainingRun, check_runs, place, send, show, training_job
from pretrain.rundir.attempts import is_finished
from pretrain.rundir.files import read_json
from pretrain.rundir.paths import RunPaths

NAME_LENGTH = 80
LOGS = ".logs"  # hidden, so that RUN/* are the runs
# What a run keeps in its own directory is no name for a run below it.
_TAKEN = {
    "launch",
    "logs",
    "attempts",
    "checkpoints",
    "evaluations",
    "wandb",
    "tensorboard",
    "data",
}


@dataclass(frozen=True)
class Axis:
    """A key and the values that it takes, each as `--set` reads it."""

    key: str
    values: tuple[str, ...]


def sweep(
    path: Path,
    site: Site,
    axes: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    nodes: int | None = None,
    time_limit: str | None = None,
    save_before: int | None = None,
    concurrent: int | None = None,
    dry_run: bool = False,
) -> None:
    """Sends one run for each combination of the values of `axes` ("section.key=a,b"), in the config's run.directory.

    At most `concurrent` of them run at once. Those that are finished are left out; every other is checked before
    anything is sent. Raises ConfigError, and SlurmError when Slurm refuses the array.
    """
    base = str(load_config(path, overrides).directory)
    runs = _runs(path, site, parse_axes(axes), overrides, base, nodes)
    finished = [run for run in runs if is_finished(run.directory, run.config.train.num_steps)]
    for run in finished:
        print(f"{run.config.run.directory}: finished, left out")
    runs = [run for run in runs if run not in finished]
    if not runs:
        return
    _check_same_size(runs)
    check_runs(runs, site, dry_run)
    folder = Path.cwd() / base
    job = training_job(
        runs,
        site,
        time_limit,
        save_before,
        concurrent or len(runs),
        job_name(folder.name),
        folder / LOGS,
    )
    if dry_run:
        show(runs, job)
        return
    for job_id, run in zip(ids := send(runs, job), runs):
        try:
            slurm.rename(job_id, run.name)
        except slurm.SlurmError as error:
            print(f"warning: job {job_id} keeps the name {job.name}: {error}")
        print(f"job {job_id}: {run.config.run.directory}")
    print(
        f"{len(ids)} runs of {runs[0].nodes} nodes x {runs[0].tasks_per_node} ranks, at most {job.concurrent} at once"
    )
    print(f"next: launcher status {shlex.quote(base)}/*")


def parse_axes(axes: Sequence[str]) -> list[Axis]:
    """--over's arguments. Raises ConfigError for what is no key with values, and for a key or a value given twice."""
    parsed = []
    for text in axes:
        key, separator, values = text.partition("=")
        if not (separator and re.fullmatch(r"\w+\.\w+", key.strip(), re.ASCII)):
            raise ConfigError(
                f"--over {text}: want section.key=value,value, as in --over position.method=alibi,rotary"
            )
        parsed.append(Axis(key.strip(), tuple(split_values(values, text))))
    keys = [axis.key for axis in parsed]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError(
            f"--over {min(twice)}: given twice. Name its values in one --over, between commas"
        )
    if "run.directory" in keys:
        raise ConfigError(
            "--over run.directory: each run gets a directory of its own. Leave it out"
        )
    return parsed


def split_values(text: str, argument: str) -> list[str]:
    """'512,1024' -> ['512', '1024']; TOML's brackets and quotes hold together: '[1, 2],[3]' -> ['[1, 2]', '[3]']."""
    try:
        values = [_toml(value) for value in tomllib.loads(f"values = [{text}]")["values"]]
    except tomllib.TOMLDecodeError:
        if re.search(r"[\[\]{}\"']", text):
            raise ConfigError(
                f'--over {argument}: not values between commas. Quote as TOML does: strings "a","b", '
                "lists [1, 2],[3, 4]"
            ) from None
        values = [
            value.strip() for value in text.split(",")
        ]  # unquoted strings, as a shell leaves them
    if not values or "" in values:
        raise ConfigError(f"--over {argument}: a value is missing")
    if len(set(values)) < len(values):
        raise ConfigError(f"--over {argument}: a value is given twice")
    return values


def run_name(over: dict[str, Any]) -> str:
    """'alibi-512': a directory's name for a combination of values.

    A mark of the keys and values is added where the values alone would not be exact, or would be a name in use.
    """
    name = "-".join(map(_word, over.values()))
    exact = all(value is not None and _word(value) == str(value) for value in over.values())
    if exact and len(name) <= NAME_LENGTH and name not in _TAKEN:
        return name
    mark = hashlib.sha256(json.dumps(over, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{name[:NAME_LENGTH]}-{mark}"


def _runs(
    path: Path,
    site: Site,
    axes: Sequence[Axis],
    overrides: Sequence[str],
    base: str,
    nodes: int | None,
) -> list[TrainingRun]:
    runs: dict[str, TrainingRun] = {}
    for values in itertools.product(*(axis.values for axis in axes)):
        settings = [f"{axis.key}={value}" for axis, value in zip(axes, values)]
        config = load_config(path, [*overrides, *settings])
        over = {axis.key: _value(config, axis.key) for axis in axes}
        directory = f"{base}/{run_name(over)}"
        if directory in runs:
            raise ConfigError(
                f"--over {' '.join(settings)}: makes the same run as {dict(runs[directory].over)}"
            )
        config = load_config(path, [*overrides, *settings, "run.directory=" + _toml(directory)])
        runs[directory] = place(config, site, nodes, over)
        _check_same_run(runs[directory])
    return list(runs.values())


def _check_same_run(run: TrainingRun) -> None:
    """The directory may be there from an earlier sweep, but only from one over the same keys and values."""
    before = read_json(RunPaths(run.directory).launch_record).get("over")
    if before is None:
        return
    if before != json.loads(json.dumps(run.over)):
        raise ConfigError(
            f"{run.directory}: is the run of {before}, not of {dict(run.over)}. Sweep into another place "
            "with --set run.directory=..."
        )


def _check_same_size(runs: Sequence[TrainingRun]) -> None:
    sizes = {(run.nodes, run.tasks_per_node) for run in runs}
    if len(sizes) > 1:
        shown = " and ".join(f"{nodes} x {tasks}" for nodes, tasks in sorted(sizes))
        raise ConfigError(
            f"--over: these runs need {shown} ranks, and the tasks of a job array are of one size. "
            "Sweep each size by itself"
        )


def _value(config: Any, key: str) -> Any:
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    return list(value) if isinstance(value, tuple) else value


def _toml(value: Any) -> str:
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def _word(value: Any) -> str:
    """A value as part of a file's name; no text among them has the dash that stands between words."""
    if isinstance(value, float):
        return str(value)
    text = "_".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"[^\w.+=]+", "_", text, flags=re.ASCII).strip("._") or "value"

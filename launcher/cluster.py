"""What a site is: the part of a cluster that our jobs may have, read from a TOML file. See slurm/site.*.toml."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from pretrain.config import ConfigError
from pretrain.config.schema import Section

# What a job's options are made of elsewhere; sbatch takes shortened names as well.
OUR_OPTIONS = (
    "account",
    "array",
    "batch",
    "chdir",
    "constraint",
    "cpus-per-task",
    "export",
    "gpus-per-node",
    "job-name",
    "mem",
    "nodes",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "error",
    "input",
    "no-kill",
    "export-file",
    "parsable",
    "partition",
    "qos",
    "requeue",
    "signal",
    "test-only",
    "time",
    "uid",
    "wait",
    "wrap",
)
_SECRETS = {
    "KEY",
    "APIKEY",
    "TOKEN",
    "SECRET",
    "SECRETS",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "CREDENTIALS",
}
# What says to a process who it is: Slurm's and the launcher's to set.
_PLACES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PRETRAIN_ATTEMPT"}
_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<clock>\d+(?::\d+){0,2})|(?P<plain>\d+(?::\d+){0,2}))")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)


class Site(Section):
    """A site file. One rank runs on one GPU; on a site without GPUs, `tasks_per_node` says how many a node takes."""

    name: str
    """For people, and in jobs.jsonl."""
    nodes: int = Field(gt=0)
    """Most nodes that one job may have."""
    gpus_per_node: int = Field(default=0, ge=0)
    tasks_per_node: int | None = Field(default=None, gt=0)
    """Without GPUs: ranks a node."""
    cpus_per_node: int = Field(gt=0)
    """Cores of a node that a job on the whole node takes; its ranks share them evenly."""
    gpu: str | None = None
    """The GPU's model, for people."""
    gpu_type: str | None = None
    """Its type in Slurm, where a partition has several: `scontrol show node` says Gres=gpu:v100:8."""
    precisions: tuple[Literal["fp32", "bf16", "fp16"], ...] = Field(
        default=("fp32",), min_length=1, strict=False
    )
    """Values of train.precision that the processors compute in: a V100 has no bf16."""
    memory_per_node: str | None = None
    """As "480G", for a job on the whole node; "0" is all of it. Left out, the partition's default."""
    time_limit: str | None = None
    """As in sbatch: "1-00:00:00", "12:00:00", "90" (minutes). Left out, the partition's default."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    modules: tuple[str, ...] = Field(default=(), strict=False)
    """Loaded in the job before anything else."""
    container: tuple[str, ...] = Field(default=(), strict=False)
    """What stands before the ranks' Python, an argument each: ["apptainer", "exec", "--nv", "image.sif"]."""
    python: str | None = None
    """The ranks' Python; left out, the one that runs `launcher`, or in a container `python3`."""
    environment: dict[str, str] = Field(default={})
    """Variables of the job, as they stand: nothing in them is expanded. No secrets: export those in your shell."""
    scratch: str | None = None
    """A directory for temporary files and compiled kernels that exists on every node."""
    sbatch_arguments: tuple[str, ...] = Field(default=(), strict=False)
    """What else sbatch needs here, as "--reservation=night"."""

    @property
    def max_tasks_per_node(self) -> int:
        """Ranks on a whole node: one a GPU."""
        return self.gpus_per_node or self.tasks_per_node or 1

    @property
    def ranks_python(self) -> str | None:
        return self.python or ("python3" if self.container else None)


def load_site(path: str | Path) -> Site:
    """Reads a site file. Raises ConfigError, naming file, key, value and remedy."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such site file. `pretrain config --list` shows the example sites; copy one "
            "and set your cluster's values"
        ) from None
    except (IsADirectoryError, NotADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable site file ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return parse_site(values, str(path))


def parse_site(values: dict[str, Any], origin: str) -> Site:
    """The same from a dictionary; `origin` stands in the messages."""
    try:
        site = Site.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{origin}: {_explain(e)}" for e in error.errors())) from None
    if refusals := [*_text(site), *_environment(site), *_sizes(site), *_arguments(site)]:
        raise ConfigError("\n".join(f"{origin}: {refusal}" for refusal in refusals))
    return site


def seconds_of(time_limit: str) -> int | None:
    """Slurm's "MM", "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS" in seconds; None for "UNLIMITED".

    Raises ConfigError for anything else, and for no time at all.
    """
    if time_limit.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(time_limit) if time_limit.isascii() else None
    if match and match["days"]:
        hours, minutes, seconds = ([int(part) for part in match["clock"].split(":")] + [0, 0])[:3]
        total = ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    elif match:
        parts = [int(part) for part in match["plain"].split(":")]
        hours, minutes, seconds = parts if len(parts) == 3 else (0, *[*parts, 0][:2])
        total = (hours * 60 + minutes) * 60 + seconds
    if not match or not total:
        raise ConfigError(
            f'time limit {time_limit!r}: not a time. Write "1-00:00:00" (days-hours:minutes:seconds), '
            '"12:00:00", or "90" for minutes'
        )
    return total


def share_of_memory(memory_per_node: str, tasks: int, of_tasks: int) -> str:
    """sbatch's --mem for `tasks` of a node's `of_tasks` ranks: ("480G", 1, 8) -> "61440M"; all ("0") stays all."""
    match = _MEMORY.fullmatch(memory_per_node)
    if not match:
        raise ConfigError(
            f'memory_per_node = {memory_per_node!r}: not an amount. Write it as "480G"'
        )
    amount, unit = int(match[1]), (match[2] or "M").upper()
    if tasks == of_tasks or not amount:
        return f"{amount}{unit}" if amount else "0"
    kibibytes = amount * 1024 ** "KMGT".index(unit) * tasks // of_tasks
    return f"{max(1, kibibytes // 1024)}M"


def is_plain(text: str) -> bool:
    """Whether `text` is printable UTF-8: no control characters, no NUL, nothing that a file cannot hold."""
    return text.isprintable()


def _text(site: Site) -> Iterator[str]:
    values = {
        key: value
        for key, value in site.model_dump().items()
        if key not in ("environment", "precisions")
    }
    for key, value in values.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not (text and is_plain(text)):
                yield f"{key} = {text!r}: {'has control characters' if text else 'is empty'}. " + (
                    "Write it in plain text" if text else "Leave it out"
                )


def _environment(site: Site) -> Iterator[str]:
    for name, value in site.environment.items():
        key = f"environment.{name}" if is_plain(name) else f"environment.{name!r}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            yield f"{key}: not a variable's name. Use letters, digits and underscores"
        elif _is_secret(name):
            yield (
                f"{key}: looks like a secret, which would be written into the job's script and the run directory. "
                f"Leave it out and `export {name}=...` in your shell: the job inherits it"
            )
        elif (
            name in _PLACES
            or name.startswith(("SLURM_", "SBATCH_", "BASH_FUNC_"))
            or name in ("BASH_ENV", "IFS")
        ):
            yield f"{key}: Slurm and the launcher set this themselves. Leave it out"
        elif "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            yield f"{key} = {value!r}: no variable can hold this. Write it in plain text"

    for key, words in (("container", site.container), ("sbatch_arguments", site.sbatch_arguments)):
        for name in [
            name for word in words for name in re.findall(r"(\w+)=", word) if _is_secret(name)
        ]:
            yield (
                f"{key}: {name} looks like a secret, which would be written into the run directory. Leave it out and "
                f"`export {name}=...` in your shell: the job inherits it"
            )


def _is_secret(name: str) -> bool:
    return bool(_SECRETS & set(name.upper().split("_")))


def _sizes(site: Site) -> Iterator[str]:
    if site.gpus_per_node and site.tasks_per_node not in (None, site.gpus_per_node):
        yield (
            f"tasks_per_node = {site.tasks_per_node}: one rank runs on each of gpus_per_node = {site.gpus_per_node}. "
            "Leave it out"
        )
    if not site.gpus_per_node and site.tasks_per_node is None:
        yield "gpus_per_node: missing. Set the GPUs a node has, or for a site without any tasks_per_node"
    if not site.gpus_per_node and site.gpu_type:
        yield f"gpu_type = {site.gpu_type}: gpus_per_node is 0. Leave it out, or set gpus_per_node"
    if site.cpus_per_node < site.max_tasks_per_node:
        yield (
            f"cpus_per_node = {site.cpus_per_node}: fewer than the {site.max_tasks_per_node} ranks of a node. "
            "Give each rank a core at least"
        )
    if site.gpu_type and not re.fullmatch(r"[\w.+-]+", site.gpu_type):
        yield f"gpu_type = {site.gpu_type!r}: not a type's name. `scontrol show node` has it in Gres=gpu:TYPE:8"
    try:
        share_of_memory(site.memory_per_node or "0", 1, 1)
        seconds_of(site.time_limit or "UNLIMITED")
    except ConfigError as error:
        yield str(error)


def _arguments(site: Site) -> Iterator[str]:
    for argument in site.sbatch_arguments:
        name = argument.removeprefix("--").split("=")[0]
        if not re.fullmatch(r"--[a-z][a-z-]+(=.*)?", argument):
            yield f'sbatch_arguments: {argument!r}: not an option. Write one a string, as "--reservation=night"'
        elif any(ours.startswith(name) for ours in OUR_OPTIONS):
            yield f"sbatch_arguments: {argument!r}: the launcher sets this option itself. Leave it out"


def _explain(error: Any) -> str:
    """One pydantic error in a line a person can act on."""
    key, keys = ".".join(str(part) for part in error["loc"]), list(Site.model_fields)
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, keys, 1, cutoff=0.5)
        return f"{key}: no such key" + (
            f", did you mean {near[0]}?" if near else f"; keys are {', '.join(keys)}"
        )
    if error["type"] == "missing":
        return f"{key}: missing; it has no default"
    got = error["input"]
    return (
        f"{key} = {got!r}: {error['msg'][:1].lower()}{error['msg'][1:]} (got {type(got).__name__})"
    )

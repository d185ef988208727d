"""Read what a Slurm cluster has (a site file), and the options of one command for its Slurm job."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from typer import Option

from pretrain.config import ConfigError
from pretrain.config.load import explain, read_toml
from pretrain.config.schema import Section
from pretrain.config.secrets import credential_among, credential_in, is_credential, refusal
from pretrain.launcher import slurm, slurm_job

# ---- Read a site file: what a Slurm cluster has, and which part of it the jobs may use ----
# A site is a TOML file that each user writes once per cluster. slurm/site.*.toml are examples. All
# values are checked here, because sbatch would accept many wrong ones and the job would fail hours
# later, when it starts.


class Site(Section):
    """The content of a site file.

    One rank runs on each GPU. On a site without GPUs, `tasks_per_node` says how many ranks run on a
    node.
    """

    name: str
    """A name for messages, also recorded in jobs.jsonl."""
    nodes: int = Field(gt=0)
    """The most nodes that one job may have."""
    gpus_per_node: int = Field(default=0, ge=0)
    """0 on a site without GPUs."""
    tasks_per_node: int | None = Field(default=None, gt=0)
    """Ranks per node on a site without GPUs."""
    cpus_per_node: int = Field(gt=0)
    """Cores of a node that its ranks share evenly."""
    gpu: str | None = None
    """The GPU's model, for messages."""
    gpu_type: str | None = Field(default=None, pattern=r"^[\w.+-]+$")
    """The GPU's type in Slurm, for a partition that mixes several: v100 if `scontrol show node`
    prints Gres=gpu:v100:8."""
    precisions: tuple[Literal["fp32", "bf16", "fp16"], ...] = Field(
        default=("fp32",), min_length=1, strict=False
    )
    """Values of train.precision that the hardware supports: a V100 has no bf16."""
    memory_per_node: str | None = None
    """Memory for a job on a whole node, such as "480G"; "0" is all of it. The default is the
    partition's."""
    time_limit: str | None = None
    """As in sbatch: "1-00:00:00", "12:00:00", "90" (minutes). The default is the partition's."""
    partition: str | None = None
    """The partition of the jobs, as `sinfo` lists it. The default is the cluster's."""
    account: str | None = None
    """The account that pays for the jobs, if the cluster requires one."""
    qos: str | None = None
    """The quality of service of the jobs, if the account has several."""
    constraint: str | None = None
    """A feature that the nodes must have, as `sinfo -o %f` shows it: "nvlink"."""
    modules: tuple[str, ...] = Field(default=(), strict=False)
    """Environment modules that the job loads before anything else."""
    container: tuple[str, ...] = Field(default=(), strict=False)
    """A command that starts each rank's Python in a container, one string per argument:
    ["apptainer", "exec", "--nv", "image.sif"]. If options of srun start the container, as with
    pyxis, they belong in `srun_arguments`."""
    python: str | None = None
    """The Python of the ranks. The default is the one that runs `launcher`, or `python3` in a
    container."""
    environment: dict[str, str] = Field(default={})
    """Environment variables of the job. Values are used literally; nothing in them is expanded.
    Secrets are refused, because the values are written into the run's directory: export them in
    your shell before you submit."""
    scratch: str | None = None
    """A directory that exists on every node. Users may share it: temporary files and compiled
    kernels go to pretrain-UID in it, which is made for this user alone."""
    sbatch_arguments: tuple[str, ...] = Field(default=(), strict=False)
    """Further options of sbatch, one string each: "--reservation=night"."""
    srun_arguments: tuple[str, ...] = Field(default=(), strict=False)
    """Further options of srun, one string each: "--container-image=/images/pretrain.sqsh". They
    apply to every step that needs the ranks' environment: ranks, checks and evaluations."""

    @property
    def max_tasks_per_node(self) -> int:
        """Return the number of ranks on a whole node."""
        return self.gpus_per_node or self.tasks_per_node or 1

    @property
    def ranks_python(self) -> str:
        """Return the Python of the ranks: the site's, or the one that runs this command."""
        return self.python or ("python3" if self.is_contained else sys.executable)

    @property
    def is_contained(self) -> bool:
        """Return True if the ranks run in a container, by a command or by options of srun."""
        options = (slurm_job.option_name(argument) for argument in self.srun_arguments)
        return bool(self.container) or "container-image" in options


def load_site(path: str | Path) -> Site:
    """Read and check a site file.

    Raises:
        ConfigError: The file is missing or wrong. Every line of the message names the file, a key,
            its value and what to do.
    """
    path = Path(path)
    try:
        values = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such site file. `pretrain config --list` shows the example sites; copy "
            "one and set your cluster's values"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable site file: {error}") from None
    return parse_site(values, str(path))


def parse_site(values: dict[str, Any], origin: str) -> Site:
    """Check the content of a site file.

    Args:
        values: The content.
        origin: Where the content comes from, for messages.

    Raises:
        ConfigError: A value is wrong.
    """
    if {"model", "run"} & set(values):
        raise ConfigError(
            f"{origin}: the config of a run, not a site file. `pretrain config --list` shows the "
            "example sites"
        )
    try:
        site = Site.model_validate(values)
    except ValidationError as error:
        lines = [explain(e, Site.model_fields, hides_value=True) for e in error.errors()]
        raise ConfigError("\n".join(f"{origin}: {line}" for line in lines)) from None
    # If there are secrets, only these messages are shown, because the others repeat the value.
    refusals = list(_refused_secrets(site)) or [
        *_refused_text(site),
        *_refused_variables(site),
        *_refused_sizes(site),
        *_refused_arguments(site),
    ]
    if refusals:
        raise ConfigError("\n".join(f"{origin}: {refusal}" for refusal in refusals))
    return site


def _refused_text(site: Site) -> Iterator[str]:
    """Refuse empty and unprintable text, which could not be passed to Slurm unchanged."""
    for key, value in site.model_dump(exclude={"environment"}).items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not (text and text.isprintable()):
                yield f"{key} = {text!r}: is empty or has control characters. Use printable text"


def _refused_variables(site: Site) -> Iterator[str]:
    """Refuse environment variables that bash or the ranks would not receive as written."""
    for name, value in site.environment.items():
        key = f"environment.{name}" if name.isprintable() else f"environment.{name!r}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            yield f"{key}: not a variable's name. Use letters, digits and underscores"
        elif slurm.is_own_variable(name):
            yield f"{key}: Slurm and the launcher set this themselves. Leave it out"
        elif "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            yield f"{key} = {value!r}: no variable can hold this. Use printable text"


def _refused_secrets(site: Site) -> Iterator[str]:
    """Refuse secrets in any value, such as --env WANDB_API_KEY=... of a container."""
    for name, value in site.environment.items():
        if what := name if is_credential(name) else credential_in(value):
            yield refusal(f"environment.{name}" if name.isprintable() else "environment", what)
    for key, value in site.model_dump(exclude={"environment"}).items():
        words = value if isinstance(value, tuple) else (value,)
        if what := credential_among(word for word in words if isinstance(word, str)):
            yield refusal(key, what)


def _refused_sizes(site: Site) -> Iterator[str]:
    """Refuse numbers that contradict each other, and amounts and times that Slurm rejects."""
    if site.gpus_per_node and site.tasks_per_node not in (None, site.gpus_per_node):
        yield (
            f"tasks_per_node = {site.tasks_per_node}: one rank runs on each GPU, and "
            f"gpus_per_node = {site.gpus_per_node}. Leave it out"
        )
    if not site.gpus_per_node and site.tasks_per_node is None:
        yield (
            "gpus_per_node: missing. Set it to the number of GPUs of a node, or on a site without "
            "GPUs set tasks_per_node to the number of ranks"
        )
    if site.cpus_per_node < site.max_tasks_per_node:
        yield (
            f"cpus_per_node = {site.cpus_per_node}: fewer than the {site.max_tasks_per_node} ranks "
            "of a node. Set at least one core per rank"
        )
    try:
        slurm_job.share_of_memory(site.memory_per_node or "0", 1, 1)
        slurm_job.seconds_of(site.time_limit or "UNLIMITED")
    except ConfigError as error:
        yield str(error)


def _refused_arguments(site: Site) -> Iterator[str]:
    """Refuse options that the launcher sets itself."""
    for key, ours in slurm_job.OPTIONS_OF_KEYS.items():
        for argument in getattr(site, key):
            if why := slurm_job.why_refused(argument, ours):
                yield f"{key}: {argument!r}: {why}. Leave it out"


@dataclass(frozen=True)
class SlurmRequest:
    """Options of the job that a command sends to Slurm; each field is an option of the command.

    Args:
        nodes: Number of nodes of each run. Default: as many as parallel.world_size needs, else 1.
        time: Time limit of the job, as in 1-00:00:00, 12:00:00 or 90 (minutes). Default: the site's
            time_limit.
        save_before: Save a checkpoint this long before the time limit. Default: the time of two
            checkpoints and one step, plus a minute.
        partition: Partition of the job. Default: the site's.
        account: Account that pays. Default: the site's.
        qos: Quality of service. Default: the site's.
        sbatch: Another option of sbatch, as in exclude=node07. Can be repeated; overrides the same
            option in the site's sbatch_arguments.
        dependency: Jobs to wait for, as sbatch --dependency takes them: afterok:123.
    """

    nodes: Annotated[int | None, Option(min=1, metavar="N")] = None
    time: Annotated[str | None, Option(metavar="LIMIT")] = None
    save_before: Annotated[int | None, Option(min=1, metavar="SECONDS")] = None
    partition: Annotated[str | None, Option(metavar="NAME")] = None
    account: Annotated[str | None, Option(metavar="NAME")] = None
    qos: Annotated[str | None, Option(metavar="NAME")] = None
    sbatch: Annotated[list[str], Option(metavar="KEY=VALUE")] = field(default_factory=list)
    dependency: Annotated[str | None, Option(metavar="TYPE:JOB")] = None

    def site(self, site: Site) -> Site:
        """Return the site with this command's options. Raises ConfigError for wrong options."""
        if self.dependency is not None and not self.dependency.strip():
            raise ConfigError("--dependency: is empty. Name the jobs to wait for, or leave it out")
        given = [_argument(text) for text in self.sbatch]
        names = {slurm_job.option_name(argument) for argument in given}
        kept = [a for a in site.sbatch_arguments if slurm_job.option_name(a) not in names]
        chosen = {"partition": self.partition, "account": self.account, "qos": self.qos}
        values = site.model_dump() | {"sbatch_arguments": [*kept, *given]}
        values |= {key: value for key, value in chosen.items() if value is not None}
        return parse_site(values, f"site {site.name} with the options of this command")


def _argument(text: str) -> str:
    """Return the option of sbatch for a value of --sbatch.

    Raises:
        ConfigError: It is not an option, or the launcher sets it itself, or it holds a secret.
    """
    # Checked first, because the other message repeats the value.
    if what := credential_in(text):
        raise ConfigError(refusal("--sbatch", what))
    argument = f"--{text.removeprefix('--')}"
    if why := slurm_job.why_refused(argument):
        raise ConfigError(
            f"--sbatch {text!r}: {why}. Use this command's option of that name, or leave it out"
        )
    return argument

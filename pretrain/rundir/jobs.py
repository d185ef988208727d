"""The starts of a run: its Slurm jobs (jobs.jsonl), how it is started, and its provenance.

launch.json says how a submitted run is started. Provenance is the code, versions, machine and
command line: rank 0 writes attempts/####/provenance.json when an attempt begins, and every
checkpoint includes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import platform
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, RunConfig, load_config, writing
from pretrain.config.run import recorded_protocol
from pretrain.config.secrets import redacted
from pretrain.config.trajectory import check_differences, differences, scheduled_changes
from pretrain.rundir.attempts import Owner, is_finished, is_idle, read_attempts
from pretrain.rundir.checkpoints import checkpoint_step, complete_checkpoints
from pretrain.rundir.files import (
    MAX_BYTES,
    append_json_line,
    from_json,
    parse_json,
    read_json_lines,
    replace_json,
)
from pretrain.rundir.metrics import evaluations_at
from pretrain.rundir.paths import (
    DATA_MANIFESTS,
    DIRECTORY,
    JobKind,
    Outcome,
    Place,
    RunPaths,
    check_apart,
    check_version,
    is_of_copied,
)
from pretrain.rundir.trust import check_trusted, read_trusted


@dataclass(frozen=True)
class JobRecord:
    """A line of jobs.jsonl: a job that was submitted for this run."""

    job_id: str
    """The id for squeue, scontrol and scancel: "123", or "123_0" for a task of an array."""
    kind: str
    """A `JobKind`: train or evaluate."""
    name: str
    """Slurm's job name; for a task of an array the run's name, where Slurm shows the array's."""
    submitted_at: float
    """Unix seconds."""
    site: str
    """The site's name."""
    nodes: int
    """The number of nodes requested."""
    num_tasks: int
    """The number of ranks on all nodes."""
    run: str
    """The run's directory, absolute."""
    checkpoint: str | None = None
    """For an evaluation, the checkpoint's name, step-########."""


@dataclass(frozen=True)
class LaunchRecord:
    """launch.json: how a submitted run is started, fixed when it was submitted."""

    command: tuple[str, ...]
    """The srun command line that starts the ranks, up to the Python."""
    python: str
    """The Python that each rank runs."""
    num_tasks: int
    """The number of ranks."""
    nodes: int
    """The number of nodes."""
    sbatch: tuple[str, ...]
    """The arguments of sbatch."""
    site: dict[str, Any]
    """The site file, resolved."""
    array_index: int | None = None
    """The run's task in the script, which is that of a sweep; None if the script starts one run."""
    allow_changed: tuple[str, ...] = ()
    """The keys of --allow-changed, which each attempt passes on to `pretrain train`."""
    commit: str | None = None
    """The commit of the code that submitted the run; None if it was not in a clone."""
    diff_sha256: str | None = None
    """The hash of the code's differences from the commit, as in `Source`."""


def job_id_of(environment: Mapping[str, str]) -> str | None:
    """Return the id of the Slurm job that a process with these variables runs in, or None.

    The id is "123", or "123_4" for a task of an array. Signals, records and messages all use this
    form. SLURM_JOB_ID of a task is another number, and for the last task that starts it is the
    number of the whole array, which every command would apply to all tasks.
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")


def owner_of(environment: Mapping[str, str], **known: Any) -> Owner:
    """Return this process as the owner of an attempt, with its Slurm job if it has one.

    Args:
        environment: The process's variables.
        **known: Further fields.
    """
    if (job_id := job_id_of(environment)) is not None:
        known |= {
            "slurm_job_id": job_id,
            "slurm_restart_count": int(environment.get("SLURM_RESTART_COUNT", 0)),
            "slurm_cluster": environment.get("SLURM_CLUSTER_NAME"),
            "nodes": environment.get("SLURM_JOB_NODELIST", ""),
        }
    return Owner.here(**known)


def append_job(run: Path, record: JobRecord) -> None:
    """Append a job to RUN/jobs.jsonl. Raises RunFailed if the file cannot be written."""
    path = RunPaths(run).jobs
    with writing(path):
        place = {DIRECTORY: dataclasses.asdict(Place.of(run))}
        append_json_line(path, dataclasses.asdict(record) | place)


def read_jobs(run: Path, kind: JobKind | None = None) -> list[JobRecord]:
    """Return the jobs submitted for a run, oldest first; none from the original of a copied run.

    Args:
        run: The run's directory.
        kind: Only the jobs of this kind; None: all.
    """
    lines = read_json_lines(RunPaths(run).jobs, MAX_BYTES)
    own = (from_json(JobRecord, line) for line in lines if not is_of_copied(line, run))
    # A job that began before its submission was recorded has recorded itself.
    records = {record.job_id: record for record in own if record is not None}
    return [record for record in records.values() if kind in (None, record.kind)]


def read_launch(run: Path) -> LaunchRecord:
    """Return the launch.json that `launcher submit` or `sweep` left in RUN/launch.

    Raises:
        ConfigError: The file is missing, damaged, or of another version, or somebody else may have
            put it there.
    """
    path = RunPaths(run).launch_record
    # The commands in this file are executed, so its owner must be trusted.
    check_trusted(run)
    try:
        content = parse_json(read_trusted(path))
    except OSError:
        content = {}
    record = from_json(LaunchRecord, content)
    if record is None:
        raise ConfigError(f"{path}: not what `launcher submit` writes. Submit the run again")
    return record


# ---- starts ----
# Check a start before anything is written, submitted or begun: whether it can work, and whether
# there is anything left to do.
#
# The ranks check the same and more, including the data. But a start that is refused or has nothing
# to do should be recognized earlier, because it would add an attempt to the run, and a Slurm job.


def is_done(config: RunConfig, allow_changed: Collection[str] = ()) -> bool:
    """Return True if a start of the run would find nothing to train and nothing to evaluate.

    Args:
        config: The run, which would resume from its newest checkpoint.
        allow_changed: The keys of --allow-changed.

    Raises:
        ConfigError: The run cannot resume with this config; see `check_goes_on`.
    """
    check_goes_on(config, allow_changed)
    run, num_steps = config.directory, config.train.num_steps
    if not is_finished(run, num_steps):
        return False
    missing = _evaluations(config)
    # Evaluations of the config that finished are done. This is cheaper than metrics.jsonl, and also
    # covers default lengths that the ranks left out.
    ended = [each.ended for each in read_attempts(run) if not is_idle(each)]
    if ended and ended[-1] and ended[-1].outcome == Outcome.FINISHED:
        try:
            missing -= _evaluations(load_config(RunPaths(run).config))
        except ConfigError:
            # The config is damaged or of another version, so only the attempt's end is known.
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
    """Check that the run may resume from its newest checkpoint, as far as its config tells.

    Args:
        config: The run.
        allow_changed: The keys of --allow-changed.

    Raises:
        ConfigError: The directory belongs to another user, has another layout, or lies inside that
            of another run or a data set; or the run differs from the checkpoint in a key that must
            not change; or the checkpoint has done more steps than train.num_steps.
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
        # The checkpoint may be damaged. Only a complete read can tell, which the ranks do.
        return
    step = checkpoint_step(found[-1].name) or 0
    phase = config.phase_after(step)
    allowed = {*allow_changed, *scheduled_changes(config, step)}
    check_differences(differences(before, phase.config), found[-1], allowed)
    check_num_steps(config, found[-1], step)


def check_num_steps(config: RunConfig, checkpoint: Path, step: int) -> None:
    """Raise ConfigError if a checkpoint of step `step` is beyond the end of the run."""
    if step > config.train.num_steps:
        raise ConfigError(
            f"train.num_steps = {config.train.num_steps}: {checkpoint} has done {step} steps "
            f"already. Set {step} or more, or --resume an earlier checkpoint"
        )


def missing_data(config: RunConfig) -> Path | None:
    """Return the first file that the run's data set lacks, or None if it is built."""
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
    config = config.parts[-1].config
    return {
        (
            recorded_protocol(config, name),
            length if name == "nonoverlapping" else config.evaluation_stride,
            length,
        )
        for name in config.evaluation.protocols
        for length in config.evaluation_lengths
    }


# ---- Find out which source code is running: the commit, and changes since ----


ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains the package `pretrain`: a clone, or site-packages."""
CODE = ("pretrain", "kernels", "launcher", "slurm")
"""The folders of the clone whose code runs."""
GIT_SECONDS = 5.0
"""Time limit of a call of git."""


@dataclass(frozen=True)
class Source:
    """The state of the source code."""

    commit: str | None = None
    """The full hash of the commit that is checked out; None outside a repository."""
    dirty: bool | None = None
    """True if a file of the code differs from the commit, or is not in it; None if unknown."""
    diff_sha256: str | None = None
    """The SHA-256 of all differences, if there are any."""


def read_source(root: Path = ROOT) -> Source:
    """Return the state of the code in a clone according to git; `Source()` outside of a clone."""
    if not (root / ".git").exists():
        # An installed package may lie inside another repository, so git is not asked.
        return Source()
    try:
        commit = _git(root, "rev-parse", "HEAD").decode().strip()
    except (OSError, subprocess.SubprocessError):
        # No git, no repository, no commit, or a folder that this user may not read.
        return Source()
    try:
        diff = ["diff", "--binary", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all"]
        changes = _git(root, *diff, "HEAD", "--", *CODE)
        others = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE)
        for name in sorted(filter(None, others.split(b"\0"))):
            content = (root / os.fsdecode(name)).read_bytes()
            changes += name + b"\0" + hashlib.sha256(content).digest()
    except (OSError, subprocess.SubprocessError):
        # git is too slow, or a file may not be read.
        return Source(commit)
    return Source(commit, bool(changes), hashlib.sha256(changes).hexdigest() if changes else None)


def why_other_code(launch: LaunchRecord) -> str:
    """Return how the running code differs from the code that submitted a run; "" if equal."""
    now = read_source()
    if (launch.commit, launch.diff_sha256) == (now.commit, now.diff_sha256):
        return ""

    def shown(commit: str | None, diff: str | None) -> str:
        changes = f" with changes {diff[:SHOWN_HASH]}" if diff else ""
        return f"commit {commit[:SHOWN_HASH]}{changes}" if commit else "no known commit"

    return (
        f"{ROOT}: this code is not the code that submitted the run. It was submitted from "
        f"{shown(launch.commit, launch.diff_sha256)}, and now runs "
        f"{shown(now.commit, now.diff_sha256)}. To train with the former, cancel the job, restore "
        "the clone and run `launcher requeue`"
    )


def _git(root: Path, *words: str) -> bytes:
    """Return the output of git. Raises OSError or SubprocessError if git fails or is too slow."""
    # safe.directory: the clone may belong to another user, whose code runs here anyway.
    return subprocess.run(
        ["git", "-c", "safe.directory=*", "--no-optional-locks", *words],
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=GIT_SECONDS,
        check=True,
    ).stdout


PROVENANCE = "provenance.json"
PACKAGES = (
    "torch",
    "megatron-core",
    "deepspeed",
    "transformers",
    "tokenizers",
    "sentencepiece",
    "safetensors",
    "numpy",
    "triton",
)
"""The packages whose version is recorded, if they are installed."""
SHOWN_HASH = 12
"""Number of digits of a hash that are shown."""


@dataclass(frozen=True)
class Provenance:
    """The code, versions, machine and command of an attempt (provenance.json)."""

    at: float = 0.0
    """Unix seconds."""
    version: str = ""
    """This project's version."""
    commit: str | None = None
    dirty: bool | None = None
    diff_sha256: str | None = None
    """As in `Source`."""
    versions: dict[str, str] = field(default_factory=dict)
    """Python, packages, CUDA, NCCL and driver -> version."""
    device: str = ""
    """The vendor's name of rank 0's device, or "cpu"."""
    num_processes: int = 1
    """The number of ranks, each with its own GPU if there are any."""
    host: str = ""
    """Rank 0's host."""
    nodes: str = ""
    """Slurm's node list, or the host."""
    slurm_job_id: str | None = None
    command: tuple[str, ...] = ()
    """The command line of rank 0, with *** in place of what looks like a secret."""
    directory: str = ""
    """The directory in which rank 0 was started, where the config's relative paths start."""

    @staticmethod
    def here(
        owner: Owner, command: Sequence[str], versions: Mapping[str, str], device: str
    ) -> Provenance:
        """Describe this process. Never fails, and takes about 50 milliseconds.

        Args:
            owner: The owner of the attempt, with its Slurm job.
            command: sys.argv.
            versions: Versions of what is not a package: CUDA, NCCL, the driver.
            device: Name of this process's device.
        """
        source = read_source()
        return Provenance(
            at=time.time(),
            version=_packages("pretrain").get("pretrain", "not installed"),
            **dataclasses.asdict(source),
            versions={"python": platform.python_version(), **_packages(*PACKAGES), **versions},
            device=device,
            num_processes=owner.num_processes,
            host=socket.gethostname(),
            nodes=owner.nodes,
            slurm_job_id=owner.slurm_job_id,
            command=tuple(_text(word) for word in (_program(command[0]), *redacted(command[1:]))),
            directory=_working_directory(),
        )

    @property
    def code(self) -> str:
        """Return the code in words: the commit and whether it was changed, or the version."""
        if self.commit is None:
            return f"version {self.version}"
        text = self.commit[:SHOWN_HASH]
        if self.dirty and self.diff_sha256:
            return f"{text} and changes {self.diff_sha256[:SHOWN_HASH]}"
        return f"{text} (git does not say if it was changed)" if self.dirty is None else text

    def facts(self) -> dict[str, str]:
        """Return by name everything that may change from one start to the next."""
        return {
            "code": self.code,
            **self.versions,
            "device": self.device,
            "nodes": self.nodes or self.host,
            "processes": str(self.num_processes),
        }


@functools.cache
def running_code() -> str:
    """Return the running code in words, as `Provenance.code`."""
    version = _packages("pretrain").get("pretrain", "not installed")
    return Provenance(version=version, **dataclasses.asdict(read_source())).code


def _text(word: str) -> str:
    r"""Return a word with \xff for bytes that are not UTF-8, which strict JSON readers refuse."""
    return os.fsencode(word).decode(errors="backslashreplace")


def _working_directory() -> str:
    try:
        return _text(os.getcwd())
    except OSError:
        # The working directory has been removed.
        return ""


def _program(path: str) -> str:
    """Return a program's name as a user types it, also for `python -m pretrain`."""
    name = os.path.basename(path)
    return "pretrain" if name in ("__main__.py", "-c", "-m") else name


def _packages(*names: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def write_provenance(attempt: Path, provenance: Provenance) -> None:
    """Write attempts/####/provenance.json. Raises OSError if it cannot be written."""
    replace_json(attempt / PROVENANCE, dataclasses.asdict(provenance), indent=1)

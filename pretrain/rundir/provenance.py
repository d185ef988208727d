"""Record what a run is made with: code, versions, machine and command line, for each attempt.

Rank 0 writes attempts/####/provenance.json when an attempt begins, and every checkpoint carries it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from pretrain.rundir.attempts import Owner
from pretrain.rundir.files import Json, from_json, replace_json
from pretrain.rundir.trust import redacted

# ---- Find out which source code is running: the commit, and how it was changed since ----


ROOT = Path(__file__).resolve().parents[2]
"""Where the package `pretrain` lies: a clone, or site-packages."""
CODE = ("pretrain", "kernels", "launcher", "slurm")
"""What runs: the folders of the clone that the package consists of."""
GIT_SECONDS = 5.0
"""The longest time for a call of git."""


@dataclass(frozen=True)
class Source:
    """The state of the source code."""

    commit: str | None = None
    """The full hash of the commit that is checked out; None outside a repository."""
    dirty: bool | None = None
    """True if a file of the code differs from the commit, or is not in it; None: not known."""
    diff_sha256: str | None = None
    """The SHA-256 of all differences, if there are any."""


def read_source(root: Path = ROOT) -> Source:
    """Return what git says of the code in a clone; nothing where there is none."""
    if not (root / ".git").exists():
        # A wheel may lie inside of another repository.
        return Source()
    try:
        commit = _git(root, "rev-parse", "HEAD").decode().strip()
    except (OSError, subprocess.SubprocessError):
        # No git, no repository, no commit, or a folder that this user may not look into.
        return Source()
    try:
        diff = ["diff", "--binary", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all"]
        changes = _git(root, *diff, "HEAD", "--", *CODE)
        others = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE)
        for name in sorted(filter(None, others.split(b"\0"))):
            content = (root / os.fsdecode(name)).read_bytes()
            changes += name + b"\0" + hashlib.sha256(content).digest()
    except (OSError, subprocess.SubprocessError):
        # Too slow, or a file that may not be read.
        return Source(commit)
    return Source(commit, bool(changes), hashlib.sha256(changes).hexdigest() if changes else None)


def _git(root: Path, *words: str) -> bytes:
    """Return what git prints. Raises OSError or SubprocessError when it does not answer."""
    # Also of a clone that another user keeps: its code runs here.
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
"""The packages whose version is recorded, where they are installed."""
SHOWN_HASH = 12
"""How much of a hash is shown."""


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
    """As in `source.Source`."""
    versions: dict[str, str] = field(default_factory=dict)
    """Python, packages, CUDA, NCCL and driver -> version."""
    device: str = ""
    """The vendor's name of rank 0's device, or "cpu"."""
    num_processes: int = 1
    """Ranks, of which each has a GPU where there are any."""
    host: str = ""
    """Rank 0's host."""
    nodes: str = ""
    """Slurm's node list, or the host."""
    slurm_job_id: str | None = None
    command: tuple[str, ...] = ()
    """The command line of rank 0, with *** for what looks like a secret."""
    directory: str = ""
    """The directory in which it was started, where the config's relative paths begin."""

    @staticmethod
    def here(
        owner: Owner, command: Sequence[str], versions: Mapping[str, str], device: str
    ) -> Provenance:
        """Describe this process. It never fails, and takes some 50 milliseconds.

        Args:
            owner: The owner of the attempt, with its Slurm job.
            command: sys.argv.
            versions: Versions that are not a package's: CUDA's, NCCL's, the driver's.
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

    @staticmethod
    def of_json(content: Json | None) -> Provenance | None:
        """Return what was recorded; None where nothing was, or it is damaged."""
        return from_json(Provenance, content or {})

    @property
    def code(self) -> str:
        """Return the code in words: the commit and if it was changed, or the version."""
        if self.commit is None:
            return f"version {self.version}"
        text = self.commit[:SHOWN_HASH]
        if self.dirty and self.diff_sha256:
            return f"{text} and changes {self.diff_sha256[:SHOWN_HASH]}"
        return f"{text} (git does not say if it was changed)" if self.dirty is None else text

    def facts(self) -> dict[str, str]:
        """Return what may change from one start to the next, by name."""
        return {
            "code": self.code,
            **self.versions,
            "device": self.device,
            "nodes": self.nodes or self.host,
            "processes": str(self.num_processes),
        }


def _text(word: str) -> str:
    r"""Return a word as UTF-8, with \xff for what is none: a strict reader refuses such JSON."""
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
    """Write attempts/####/provenance.json. Raises OSError when the disk refuses."""
    replace_json(attempt / PROVENANCE, dataclasses.asdict(provenance), indent=1)


def printable(text: str) -> str:
    """Return a text that another process recorded without control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

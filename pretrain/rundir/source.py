"""Find out which source code is running: the commit, and how it was changed since.

git is asked, and nothing of the repository is executed. Its config, hooks and attributes may name
programs that git would run (fsmonitor, filters, textconv), so git gets an empty git directory of
its own, which has none of them, and of the repository only the commit, the index and the objects.
For the same reason it does not matter whose the repository is.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pretrain.rundir.files import read_bytes, read_text

ROOT = Path(__file__).resolve().parents[2]
"""Where the package `pretrain` lies: a clone, or site-packages."""
CODE = ("pretrain", "kernels", "launcher", "slurm")
"""What runs: the folders of the clone that the package consists of."""
GIT_SECONDS = 2.0
"""The longest time for a call of git. Without its answer a commit is recorded all the same."""


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
    """Return the state of the code in `root`. It never fails: what cannot be found out is None."""
    try:
        git = _git_directory(root)
        commit = _commit(git) if git is not None else None
    except (OSError, ValueError):
        # A folder that this user may not look into, or a link to itself.
        return Source()
    if git is None or commit is None:
        return Source()
    try:
        changes = _changes(root, git, commit)
    except (OSError, ValueError, subprocess.SubprocessError):
        # No git, one that is too slow, or a kind of repository that it refuses.
        return Source(commit)
    digest = hashlib.sha256(changes).hexdigest() if changes else None
    return Source(commit, bool(changes), digest)


def _git_directory(root: Path) -> Path | None:
    """Return the git directory of `root` itself: a wheel may lie inside of another repository."""
    path = root / ".git"
    if path.is_dir():
        return path
    # In a further worktree it is a file.
    match = re.match(r"gitdir: (.+)", read_text(path))
    return (root / match[1].strip()).resolve() if match else None


def _common_directory(git: Path) -> Path:
    """Return the git directory that a worktree shares with others: objects and branches."""
    named = read_text(git / "commondir").strip()
    return (git / named).resolve() if named else git


def _commit(git: Path) -> str | None:
    """Return the hash of the commit that is checked out."""
    head = read_text(git / "HEAD").strip()
    if not head.startswith("ref: "):
        return _hash(head)
    name = head.removeprefix("ref: ")
    if ".." in name or not name.startswith("refs/"):
        return None
    common = _common_directory(git)
    for place in (git, common):
        if found := _hash(read_text(place / name).strip()):
            return found
    packed = re.search(rf"^([0-9a-f]+) {re.escape(name)}$", read_text(common / "packed-refs"), re.M)
    return _hash(packed[1]) if packed else None


def _hash(text: str) -> str | None:
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def _changes(root: Path, git: Path, commit: str) -> bytes:
    """Return all in which the code differs from a commit, as bytes that are the same again."""
    code = [name for name in CODE if (root / name).is_dir()]
    with tempfile.TemporaryDirectory(prefix="pretrain-git-") as folder:
        (Path(folder) / "refs").mkdir()
        (Path(folder) / "HEAD").write_text(f"{commit}\n")
        environment = {
            "GIT_DIR": folder,
            "GIT_WORK_TREE": str(root),
            "GIT_INDEX_FILE": str(git / "index"),
            "GIT_OBJECT_DIRECTORY": str(_common_directory(git) / "objects"),
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }
        options = ["--binary", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all"]
        diff = _git(["diff", *options, "HEAD", "--", *code], root, environment)
        others = ["ls-files", "--others", "--exclude-standard", "-z", "--", *code]
        untracked = sorted(_git(others, root, environment).split(b"\0"))
    for name in filter(None, untracked):
        path = root / name.decode(errors="surrogateescape")
        content = b"" if path.is_symlink() else _content(path)
        diff += name + b"\0" + hashlib.sha256(content).digest()
    return diff


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, follow=False)
    except OSError:
        return b""


def _git(words: list[str], root: Path, environment: dict[str, str]) -> bytes:
    """Return what git prints. Raises OSError or SubprocessError when it does not answer."""
    program = shutil.which("git")
    if program is None:
        raise FileNotFoundError("git")
    return subprocess.run(
        [program, "--no-optional-locks", *words],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=GIT_SECONDS,
        check=True,
    ).stdout

"""Test that a build goes on where it was interrupted, trusts nothing damaged, and has one owner."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pretrain.config import ConfigError, RunFailed
from pretrain.config.errors import NoSpace
from pretrain.data import build as command
from pretrain.data.build import Merger, build
from pretrain.data.build import folder as folder_module
from pretrain.data.build.folder import BuildFolder, locked
from pretrain.data.stream import verify
from tests.conftest import mark_torture
from tests.end_to_end.commands import fresh
from tests.unit.test_data_build import DOCUMENTS, built, config, contents, refused, write_text
from tests.unit.test_data_damage import flip

__all__ = ["built"]


class Killed(BaseException):
    """The process is dead; nothing that it still tries happens."""


TASKS = 4
"""Those that the text is cut into."""
CALLS = ("link", "rename", "replace", "mkdir", "unlink", "rmdir", "fsync")


class Machine:
    """Counts the calls by which a build changes the disk, and dies at one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, error: int | None = None) -> None:
        self.count, self.dies_at, self.error = 0, -1, error
        for name in CALLS:
            patch.setattr(os, name, self._shim(getattr(os, name)))

    def _shim(self, real):
        def shim(*args, **kwargs):
            self.count += 1
            if 0 <= self.dies_at < self.count:
                if self.error is None:
                    raise Killed
                if self.count == self.dies_at + 1:
                    raise OSError(self.error, os.strerror(self.error), str(args[0]))
            return real(*args, **kwargs)

        return shim


@pytest.fixture
def text(built, tmp_path):
    """Return a config that builds the same data set elsewhere."""
    return config(built, directory=str(tmp_path / "data"))


def interrupted(settings, patch: pytest.MonkeyPatch, before: str) -> BuildFolder:
    """Build until all tasks are done, and die before the data set is put together or has a name."""
    with patch.context() as now:
        now.setattr(command, before, lambda *args: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            build(settings)
    return BuildFolder.beside(settings.data_directory)


@pytest.fixture(scope="module", params=["finish", "publish_directory"])
def halfway(request, built, tmp_path_factory):
    """The folder of a build of which every task is done."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("halfway") / "data"
        return interrupted(config(built, directory=str(directory)), patch, request.param).path


@pytest.fixture
def folder(halfway, text):
    """Return a copy of it, with which the build of `text` goes on."""
    found = BuildFolder.beside(text.data_directory)
    shutil.copytree(halfway, found.path)
    return found


# ---- interruptions -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def calls(built, tmp_path_factory) -> int:
    """The number of calls by which a build that nothing stops changes the disk."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        build(config(built, directory=str(tmp_path_factory.mktemp("calls") / "data")))
        return machine.count


SHARES = [(n / 60,) for n in range(60)]


@pytest.mark.parametrize(
    ("share",), mark_torture(SHARES, core={SHARES[n] for n in (0, 18, 37, 50, 54, 58)})
)
@pytest.mark.parametrize("error", [None, errno.ENOSPC], ids=["killed", "full"])
def test_a_build_that_dies_anywhere_goes_on_to_the_same_bytes(built, text, calls, share, error):
    """It is killed, or the disk is full, before one of the calls that change the disk."""
    expected, root = contents(built / "data"), text.data_directory.parent
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, error)
        machine.dies_at = int(calls * share)
        try:
            build(text)
            # The error was one that costs nothing, such as a line of progress.
            assert error is not None
        except Killed:
            assert error is None
        except NoSpace as full:
            assert "cannot be written (No space left on device" in str(full)
        assert machine.count > machine.dies_at
    if text.data_directory.exists():
        # Only the removal of the build's folder is left.
        assert contents(text.data_directory) == expected
    build(text)
    assert contents(text.data_directory) == expected
    assert sorted(path.name for path in root.iterdir()) == ["data"]


@pytest.mark.parametrize(["first", "count"], mark_torture([(0, 8), (8, 300)], {(0, 8)}))
def test_no_damage_of_a_stopped_build_is_published(built, text, halfway, first, count):
    """One bit of any file, its end, or all of it: it is made again, or the plan is named."""
    expected, path = contents(built / "data"), BuildFolder.beside(text.data_directory).path
    for seed in range(first, first + count):
        shutil.copytree(halfway, path)
        rng = np.random.default_rng(seed)
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size)
        chosen = rng.choice(
            [p for p in files if p.name != "lock"] if seed else [path / "plan.jsonl"]
        )
        if chosen.name == "plan.jsonl" or seed % 4 < 2:
            flip(chosen, rng)
        elif seed % 4 == 2:
            os.truncate(chosen, chosen.stat().st_size // 2)
        else:
            chosen.unlink()
        try:
            build(text)
            assert chosen.name != "plan.jsonl"
            assert contents(text.data_directory) == expected, (seed, chosen)
            shutil.rmtree(text.data_directory)
        except ConfigError as error:
            assert str(error).startswith(f"{path}/plan.jsonl: damaged: line "), (seed, chosen)
            shutil.rmtree(path)


def test_finish_reads_records_and_checksums_and_no_shard(built, tmp_path, monkeypatch):
    """The shards of 10^12 tokens are 2 TB. Documents 16 times as long, as many tasks and shards."""
    read, shards, real = {}, {}, command.finish
    monkeypatch.setattr(command, "finish", lambda *args: read.update({scale: bytes_read(*args)}))

    def bytes_read(*args):
        before = int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])
        real(*args)
        files = [path for path in args[0].path.rglob("*") if path.is_file()]
        tars = [path for path in files if path.parts[-3] == "tokens" and path.suffix == ".tar"]
        shards[scale] = sum(path.stat().st_size for path in tars)
        # Of 10^12 tokens there are 39,000 tasks of one shard each: at most 160,000 files.
        inodes = {path.stat().st_ino for path in files}
        assert len(inodes) <= len(tars) + 3 * (TASKS + 1) + 16
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1]) - before

    for scale in (1, 16):
        (tmp_path / str(scale)).mkdir()
        for number, text in enumerate(DOCUMENTS):
            (tmp_path / str(scale) / f"{number:02d}.txt").write_text(text * scale)
        sizes = {"bytes_per_task": 6_000 * scale, "tokens_per_shard": 3_000 * scale}
        tokenizer = str(built / "data/tokenizer.model")
        build(config(tmp_path / str(scale), tokenizer=tokenizer, **sizes))
    # 8 bytes of checksums for 4 KiB, and the last block of a task is short.
    assert shards[16] > 8 * shards[1] and read[16] - read[1] < shards[16] / 100


def test_a_file_system_without_hard_links_holds_the_same_bytes(built, text, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    build(text)
    assert contents(text.data_directory) == contents(built / "data")


def test_a_task_that_fails_keeps_what_the_others_did(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "KEPT_BYTES", 0)
    write_text(tmp_path)
    bad = tmp_path / "08.txt"
    good = bad.read_text()
    bad.write_bytes("caf\u00e9".encode("latin1") * 100)
    with refused(r"08\.txt:0: byte 3 of this document is not UTF-8"):
        build(config(tmp_path))
    done = [p for p in (tmp_path / ".building-data/scan").iterdir() if not p.name.startswith(".")]
    assert not (tmp_path / "data").exists() and done
    bad.write_text(good)
    # Its size is another one, so the plan is as well; nothing is deleted unasked.
    with refused(
        r"holds an unfinished build from other inputs: .*08\.txt has \d+ bytes.*start over"
    ):
        build(config(tmp_path))
    assert (tmp_path / ".building-data/scan").is_dir()
    shutil.rmtree(tmp_path / ".building-data")
    build(config(tmp_path))
    verify(tmp_path / "data")


def test_a_small_build_that_fails_leaves_nothing(tmp_path):
    """The same command with the mended text does not meet an unfinished build of other inputs."""
    write_text(tmp_path)
    before = sorted(tmp_path.iterdir())
    good = (tmp_path / "08.txt").read_text()
    (tmp_path / "08.txt").write_bytes(b"caf\xe9")
    with refused(r"08\.txt:0: "):
        build(config(tmp_path))
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "08.txt").write_text(good)
    build(config(tmp_path))
    verify(tmp_path / "data")


@pytest.mark.parametrize("which", ["train", "validation"])
def test_a_file_that_changes_during_the_build_is_named(tmp_path, monkeypatch, which):
    """The new text of a validation file could stand in training, where nothing looked for it."""
    write_text(tmp_path)
    target = {"train": tmp_path / "05.txt", "validation": tmp_path / "own.held"}[which]
    (tmp_path / "own.held").write_text("held out before " * 50)
    real = Merger.run

    def run(merger):
        if which == "validation":
            target.write_text(DOCUMENTS[3])
        found = real(merger)
        target.write_text(target.read_text()[::-1])
        return found

    monkeypatch.setattr(Merger, "run", run)
    monkeypatch.setattr(command, "KEPT_BYTES", 0)
    held = {"validation_paths": [str(tmp_path / "own.held")]} if which == "validation" else {}
    with refused(rf"{target.name}:0: has changed since the build began\. Remove .*\.building-data"):
        build(config(tmp_path, **held))


# ---- one builder ---------------------------------------------------------------------------------


def test_a_lock_whose_folder_was_removed_is_not_taken_for_the_new_one(tmp_path):
    folder = BuildFolder(tmp_path / ".building-data")
    with locked(folder):
        shutil.rmtree(folder.path)
        with locked(folder), pytest.raises(ConfigError, match="is being built by"), locked(folder):
            pass


@pytest.mark.parametrize("stop", [0, 2, 4])
def test_what_a_killed_removal_leaves_is_taken_up_by_no_other_build(built, text, monkeypatch, stop):
    removed = shutil.rmtree

    def remove(path, **options):
        if text.data_directory.exists():
            begun.append(path)
        if len(begun) > stop:
            raise Killed
        removed(path, **options)

    begun: list[Path] = []
    with monkeypatch.context() as now:
        now.setattr(folder_module, "shutil", SimpleNamespace(rmtree=remove))
        with contextlib.suppress(Killed):
            build(text)
    shutil.rmtree(text.data_directory)
    other = config(built, directory=str(text.data_directory), validation_fraction=0.3)
    folder = BuildFolder.beside(text.data_directory)
    if folder.plan.exists():
        with refused("holds an unfinished build from other inputs"):
            build(other)
    else:
        assert not any(path.is_dir() for path in folder.path.glob("*"))


# ---- workers -------------------------------------------------------------------------------------
def test_a_worker_that_is_killed_ends_the_build_with_what_to_do(built, text, tmp_path):
    """As the system does when memory runs out. The builder must not wait for it for ever."""
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pretrain.data.build import tasks
real = tasks._cleaned
def dying(work, documents):
    if work.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(work, documents)
tasks._cleaned = dying
from pathlib import Path
from tests.unit.test_data_build import config
from pretrain.data.build import build
if __name__ == "__main__":
    from pretrain.config import RunFailed
    try:
        build(config(Path({str(built)!r}), directory={str(text.data_directory)!r}), workers=2)
    except RunFailed as error:
        print(error)
"""
    (tmp_path / "program.py").write_text(program)
    done = fresh([sys.executable, str(tmp_path / "program.py")])
    assert "a worker process was killed, often because memory ran out" in done.out, done.err
    build(text)
    assert contents(text.data_directory) == contents(built / "data")


def test_a_users_file_in_the_folder_of_a_build_stays(text):
    folder = BuildFolder.beside(text.data_directory)
    folder.path.mkdir()
    (folder.path / "thesis.txt").write_text("precious")
    (folder.path / ".plan.jsonl.0.partial").write_text("a build was killed while it planned")
    build(text)
    verify(text.data_directory)
    assert contents(folder.path) == {"thesis.txt": b"precious"}


def test_a_lock_that_is_a_link_writes_into_no_file(text):
    folder = BuildFolder.beside(text.data_directory)
    folder.path.mkdir()
    precious = folder.path.parent / "thesis.txt"
    precious.write_text("precious")
    (folder.path / "lock").symlink_to(precious)
    with pytest.raises(RunFailed, match="cannot be written"):
        build(text)
    assert precious.read_text() == "precious"

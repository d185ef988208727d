"""What an attempt records of code, versions and machine, in repositories of every kind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.tools import show_source
from pretrain.rundir import jobs
from pretrain.rundir.attempts import Owner
from pretrain.rundir.files import from_json
from pretrain.rundir.jobs import PROVENANCE, Provenance, Source, read_source, write_provenance
from tests.unit.saved import first_origin, save

NOBODY = 65534


def git(folder: Path, *words: str) -> str:
    """Run git as a user does, with a name to commit under."""
    name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *name, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with a package as this one's lies in its clone."""
    root = tmp_path / "clone"
    (root / "pretrain").mkdir(parents=True)
    (root / "kernels").mkdir()
    (root / "pretrain/gpt.py").write_text("print(1)\n")
    (root / "pretrain/kernels").symlink_to("../kernels")
    (root / "README.md").write_text("text\n")
    (root / ".gitignore").write_text("__pycache__\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    return root


def head(clone: Path) -> str:
    return git(clone, "rev-parse", "HEAD")


# ---- the source code -----------------------------------------------------------------------------
def test_a_clean_clone_is_its_commit(clone):
    assert read_source(clone) == Source(head(clone), False, None)
    # What does not run is no change: text, runs, and what git ignores.
    (clone / "README.md").write_text("other\n")
    (clone / "runs").mkdir()
    (clone / "runs/log").write_text("")
    (clone / "pretrain/__pycache__").mkdir()
    (clone / "pretrain/__pycache__/cli.pyc").write_text("")
    # A file that was written anew with the same content has another time alone.
    (clone / "pretrain/gpt.py").write_text("print(1)\n")
    assert read_source(clone) == Source(head(clone), False, None)


def test_every_change_of_the_code_is_seen_and_has_a_hash_of_its_own(clone):
    seen = [read_source(clone)]

    def changed() -> None:
        seen.append(read_source(clone))
        assert seen[-1].commit == head(clone) and seen[-1].dirty, seen[-1]

    (clone / "pretrain/gpt.py").write_text("print(2)\n")
    changed()
    (clone / "pretrain/gpt.py").write_text("print(3)\n")
    changed()
    git(clone, "add", "-A")
    assert read_source(clone) == seen[-1]
    (clone / "kernels/new.py").write_text("a = 1\n")
    changed()
    (clone / "kernels/new.py").write_text("a = 2\n")
    changed()
    (clone / "pretrain/gpt.py").unlink()
    changed()
    assert len({each.diff_sha256 for each in seen}) == len(seen)
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "two")
    assert read_source(clone) == Source(head(clone), False, None)


def test_without_git_or_a_repository_nothing_fails(clone, tmp_path, monkeypatch):
    # As a wheel in an environment that lies in a clone of something else.
    packages = clone / "venv/lib"
    packages.mkdir(parents=True)
    shutil.copytree(clone / "pretrain", packages / "pretrain", symlinks=True)
    assert read_source(packages) == Source()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_source(clone) == Source()
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(jobs, "GIT_SECONDS", 0.2)
    assert read_source(clone) == Source()
    monkeypatch.undo()
    shutil.rmtree(clone / ".git")
    assert read_source(clone) == Source()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_the_repository_of_somebody_else_is_read_all_the_same(clone):
    commit = head(clone)
    for path in (clone, *clone.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    done = subprocess.run(["git", "status"], cwd=clone, capture_output=True, text=True, check=False)
    assert "dubious ownership" in done.stderr
    assert read_source(clone) == Source(commit, False, None)


# ---- the record ----------------------------------------------------------------------------------
def made(**facts) -> Provenance:
    owner = Owner.here(num_processes=2)
    here = Provenance.here(owner, ["/bin/pretrain", "train", "a.toml"], {"cuda": "12.8"}, "cpu")
    return from_json(Provenance, dataclasses.asdict(here) | facts)


def test_the_record_reads_back_and_says_what_is_installed(tmp_path):
    here = made()
    write_provenance(tmp_path, here)
    assert from_json(Provenance, json.loads((tmp_path / PROVENANCE).read_text())) == here
    assert here.command == ("pretrain", "train", "a.toml") and here.num_processes == 2
    assert here.versions["cuda"] == "12.8"
    for package in ("torch", "megatron-core", "deepspeed", "transformers", "numpy"):
        code = f"from importlib.metadata import version; print(version('{package}'))"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert here.versions[package] == said.stdout.strip()


def test_odd_words_make_no_damaged_checkpoint(tmp_path, monkeypatch):
    """A strict reader of JSON refuses half a surrogate, which Python writes without a word."""
    latin = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(latin)
    monkeypatch.chdir(os.fsdecode(latin))
    words = ["pretrain", "train", os.fsdecode(b"caf\xe9.toml"), "a\0b", "é"]
    made = Provenance.here(Owner.here(), words, {}, "cpu")
    assert made.command[2:] == (r"caf\xe9.toml", "a\0b", "é")
    assert made.directory.endswith(r"/caf\xe9")
    saved = save(tmp_path / "run", 1, first_origin(provenance=made))
    assert open_checkpoint(saved.path).origin.provenance == made
    assert r"caf\xe9.toml" in show_source(saved.path)
    os.rmdir(latin)
    assert Provenance.here(Owner.here(), words, {}, "cpu").directory == ""

"""Checkpoints in a store that fsspec reaches: sent completely or not at all, verified when read."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from typer.testing import CliRunner

from pretrain.checkpoint.format import DamagedCheckpoint
from pretrain.checkpoint.load import fetch
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.store import Rounds, Store, StoreError, Uploader
from pretrain.checkpoint.tools import verify_checkpoint
from pretrain.checkpoint.writer import Writer
from pretrain.cli.commands import app
from pretrain.config import ConfigError, dump_config
from pretrain.rundir.attempts import Attempt, RunBusy
from pretrain.rundir.checkpoints import complete_checkpoints
from tests.conftest import tiny_config
from tests.unit.saved import after, flip, save


class FaultyFileSystem(LocalFileSystem):
    """A local file system that fails or cuts off at the n-th object that is written."""

    protocol: ClassVar[str] = "faulty"  # type: ignore[misc]
    cachable: ClassVar[bool] = False
    writes: ClassVar[list[str]] = []
    fail_at: ClassVar[int | None] = None
    cut_at: ClassVar[int | None] = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" not in mode:
            return super()._open(path, mode, **kwargs)
        self.makedirs(self._parent(path), exist_ok=True)
        number = len(self.writes)
        self.writes.append(Path(path).name)
        if number == self.fail_at:
            raise PermissionError("AccessDenied")
        file = super()._open(path, mode, **kwargs)
        if number == self.cut_at:
            write = file.write
            file.write = lambda data: write(data[: len(data) // 2])
        return file


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@pytest.fixture
def faults() -> Iterator[type[FaultyFileSystem]]:
    FaultyFileSystem.writes = []
    FaultyFileSystem.fail_at = FaultyFileSystem.cut_at = None
    yield FaultyFileSystem
    FaultyFileSystem.fail_at = FaultyFileSystem.cut_at = None


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def upload_all(run: Path, url: str) -> list[str]:
    return Rounds(run, Store(url)).upload()


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_what_comes_back_is_what_was_sent(tmp_path, protocol):
    first = save(tmp_path / "run", 2)
    second = save(tmp_path / "run", 4, after(first))
    base = {"file": f"file://{tmp_path}/store", "memory": f"memory://{uuid.uuid4().hex}"}
    store = Store(base[protocol])
    assert store.newest() is None and store.checkpoints() == []
    assert upload_all(tmp_path / "run", store.url) == []
    assert [s.step for s in store.checkpoints()] == [2, 4]
    newest = store.newest()
    assert newest is not None and newest.lineage == second.lineage
    assert [s.step for s in store.line_to(newest)] == [4, 2]
    assert store.verify(newest) == []
    (tmp_path / "back").mkdir()
    store.download(newest, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(second.path)


def test_the_manifest_is_sent_last_and_what_arrived_is_not_sent_again(tmp_path, faults):
    first = save(tmp_path / "run", 2)
    url = f"faulty://{tmp_path}/store"
    count = len(first.files) + 1
    for number in range(count):
        faults.writes, faults.fail_at = [], number
        store = Store(f"{url}{number}")
        with pytest.raises(StoreError, match="AccessDenied"):
            store.upload(first.path)
        assert store.checkpoints() == [] and store.newest() is None
        arrived = set(faults.writes[:number])
        faults.writes, faults.fail_at = [], None
        store.upload(first.path)
        assert faults.writes[-1] == "manifest.json"
        assert not {name for name in arrived & set(faults.writes) if name.startswith("rank-")}
        [stored] = store.checkpoints()
        assert store.verify(stored) == []
        faults.writes = []
        store.upload(first.path)
        assert faults.writes == []


def test_an_object_that_is_cut_off_is_noticed_before_the_manifest_is_sent(tmp_path, faults):
    first = save(tmp_path / "run", 2)
    for number in range(len(first.files)):
        faults.writes, faults.cut_at = [], number
        store = Store(f"faulty://{tmp_path}/store{number}")
        with pytest.raises(StoreError, match=r"bytes arrived of"):
            store.upload(first.path)
        assert "manifest.json" not in faults.writes and store.checkpoints() == []
        faults.cut_at = None
        store.upload(first.path)
        assert store.verify(store.checkpoints()[0]) == []
    # An uploader that is killed beside another one leaves it so: with a manifest.
    next(tmp_path.glob(f"store{number}/*/rank-00001*")).write_bytes(b"")
    store.upload(first.path)
    assert store.verify(store.checkpoints()[0]) == []


def test_what_is_damaged_on_the_disk_is_not_sent(tmp_path):
    first = save(tmp_path / "run", 2)
    flip(first.path / "rank-00001.safetensors")
    store = Store(f"file://{tmp_path}/store")
    with pytest.raises(DamagedCheckpoint, match="rank-00001"):
        store.upload(first.path)
    assert store.checkpoints() == []


def test_every_damage_in_a_store_is_found(tmp_path):
    first = save(tmp_path / "run", 2)
    upload_all(tmp_path / "run", f"file://{tmp_path}/store")
    [folder] = [path for path in (tmp_path / "store").iterdir() if path.is_dir()]
    store = Store(f"file://{tmp_path}/store")
    for name in (*first.files, "manifest.json"):
        before = (folder / name).read_bytes()
        for damage in (before[:-1], b"", bytes([before[0] ^ 1]) + before[1:], None):
            (folder / name).unlink()
            if damage is not None:
                (folder / name).write_bytes(damage)
            stored = store.stored(folder.name)
            cut_newline = name == "manifest.json" and damage == before[:-1]
            if stored is not None and not cut_newline:
                [problem] = store.verify(stored)
                assert f"{folder.name}/{name}" in problem
                (tmp_path / "back").mkdir()
                with pytest.raises(DamagedCheckpoint):
                    store.download(stored, tmp_path / "back")
                shutil.rmtree(tmp_path / "back")
            else:
                assert name == "manifest.json"
            (folder / name).write_bytes(before)
    found = store.stored(folder.name)
    assert found is not None and store.verify(found) == []


def test_a_failed_upload_warns_once_and_is_tried_again_with_the_next_checkpoint(
    tmp_path, faults, capsys
):
    run = tmp_path / "run"
    first = save(run, 2)
    rounds = Rounds(run, Store(f"faulty://{tmp_path}/store"))
    faults.fail_at = 0
    assert [line.split(": ")[0] for line in rounds.upload()] == [str(first.path)]
    warning = capsys.readouterr().err
    assert warning.count("warning:") == 1 and str(first.path) in warning
    assert "AccessDenied" in warning and "tried again" in warning
    second = save(run, 4, after(first))
    faults.fail_at = None
    assert rounds.upload() == [] and not capsys.readouterr().err
    assert [s.step for s in Store(f"faulty://{tmp_path}/store").checkpoints()] == [2, 4]
    newest = Store(f"faulty://{tmp_path}/store").newest()
    assert newest is not None and newest.lineage.id == second.lineage.id
    # Of those at hand the newest goes first.
    assert faults.writes.index("newest.json") < len(faults.writes) - 1
    # The store is not asked about what it has, and need not be there.
    (tmp_path / "store").rename(tmp_path / "away")
    assert rounds.upload() == [] and not (tmp_path / "store").exists()
    (tmp_path / "away").rename(tmp_path / "store")
    # A replay has gone back to the first and set the second aside.
    shutil.rmtree(second.path)
    assert rounds.upload() == []
    newest = Store(f"faulty://{tmp_path}/store").newest()
    assert newest is not None and newest.lineage.id == first.lineage.id
    # Of two saved since, the newest cannot be sent.
    third = save(run, 4, after(first))
    fourth = save(run, 6, after(third))
    flip(fourth.path / "rank-00001.safetensors")
    assert [line.split(": ")[0] for line in rounds.upload()] == [str(fourth.path)]
    # A later process, which cannot read that one either, does not name one before it.
    flip(third.path / "state.json")
    assert len(Rounds(run, Store(f"faulty://{tmp_path}/store")).upload()) == 2
    newest = Store(f"faulty://{tmp_path}/store").newest()
    assert newest is not None and newest.lineage.id == third.lineage.id


def test_a_process_that_dies_is_told_of_and_made_up_for(tmp_path, capsys):
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    save(run, 2)
    uploader = Uploader(run, url)
    uploader._process.kill()
    uploader._process.wait()
    for _ in range(2):
        uploader.check()
    warning = capsys.readouterr().err
    assert warning.count("warning:") == 1 and "ended with code -9" in warning
    assert uploader.finish(lambda: True) == []
    assert [s.step for s in Store(url).checkpoints()] == [2]


def test_what_else_the_processes_beside_training_print_is_no_answer(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('{}'); print('{', end='')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    save(tmp_path / "run", 2)
    assert Uploader(tmp_path / "run", f"file://{tmp_path}/store").finish(lambda: True) == []
    with closing(Writer()) as writer:
        writer.memory(8)
        writer.make_pages()
        writer.settle(60.0)
        assert writer.is_idle


# ---- bringing a checkpoint back ------------------------------------------------------------------
def config_for(run: Path, url: str) -> Any:
    return tiny_config(run={"directory": str(run)}, checkpoint={"upload_to": url})


def test_an_empty_run_gets_the_newest_good_checkpoint_of_the_runs_line(tmp_path, capsys):
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    first = save(run, 2)
    old = save(run, 8, after(first))
    upload_all(run, url)
    # The run goes back to step 2 and on from there: step 8 belongs to an abandoned line.
    shutil.rmtree(old.path)
    second = save(run, 4, after(first, branch=True))
    third = save(run, 6, after(second))
    upload_all(run, url)
    other = tmp_path / "other"
    assert fetch(config_for(other, url), "auto") == "auto"
    [path] = complete_checkpoints(other)
    assert contents(path) == contents(third.path)
    assert verify_checkpoint(path)[0] == []
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    # Damaged, it is passed over.
    name = f"step-00000006-{third.lineage.id}"
    flip(tmp_path / "store" / name / "rank-00000.safetensors")
    capsys.readouterr()
    assert fetch(config_for(tmp_path / "third", url), "auto") == "auto"
    assert "step-00000006" in capsys.readouterr().err
    [path] = complete_checkpoints(tmp_path / "third")
    assert open_checkpoint(path).lineage == second.lineage
    assert len(list(path.parent.iterdir())) == 1
    # One can be named, also of another line.
    named = f"{url}/step-00000008-{old.lineage.id}"
    resumed = fetch(config_for(tmp_path / "fourth", url), named)
    assert open_checkpoint(Path(resumed)).lineage == old.lineage


def test_of_several_lines_none_is_chosen_without_newest_json(tmp_path):
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    first = save(run, 2)
    left = save(run, 8, after(first))
    upload_all(run, url)
    shutil.rmtree(left.path)
    save(run, 4, after(first, branch=True))
    upload_all(run, url)
    (tmp_path / "store/newest.json").unlink()
    config = config_for(tmp_path / "other", url)
    with pytest.raises(ConfigError, match=r"several branches of checkpoints.*Choose") as caught:
        fetch(config, "auto")
    assert not complete_checkpoints(tmp_path / "other")
    named = f"{url}/step-00000008-{left.lineage.id}"
    assert named in str(caught.value)
    assert open_checkpoint(Path(fetch(config, named))).lineage == left.lineage


def test_what_a_run_has_on_its_disk_is_used_unless_the_store_is_ahead(tmp_path):
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    config = config_for(run, url)
    first = save(run, 2)
    upload_all(run, url)
    second = save(run, 4, after(first))
    assert fetch(config, "auto") == "auto"
    assert len(complete_checkpoints(run)) == 2
    # Another node went on from the store.
    metrics = [f'{{"step": {step}, "loss_nats": 1.0}}\n' for step in (1, 2, 3, 4)]
    (run / "metrics.jsonl").write_text("".join(metrics))
    upload_all(run, url)
    shutil.rmtree(second.path)
    (run / "metrics.jsonl").write_text("".join(metrics[:2]))
    assert fetch(config, "auto") == "auto"
    assert (run / "metrics.jsonl").read_text() == "".join(metrics)
    # Nothing more is downloaded, and the run may have gone on writing.
    (run / "metrics.jsonl").write_text("later")
    assert fetch(config, "auto") == "auto"
    assert (run / "metrics.jsonl").read_text() == "later"
    assert [p.name for p in complete_checkpoints(run)] == ["step-00000002", "step-00000004"]
    with pytest.raises(ConfigError, match="holds a run already"):
        fetch(config, "none")
    save(tmp_path / "another", 2)
    with pytest.raises(ConfigError, match="holds another run's checkpoints"):
        fetch(config_for(tmp_path / "another", url), "auto")


def test_a_store_that_cannot_be_read_stops_a_run_without_checkpoints_only(tmp_path, capsys):
    (tmp_path / "store").write_text("a file, not a folder")
    url = f"file://{tmp_path}/store"
    with pytest.raises(StoreError, match="cannot read"):
        fetch(config_for(tmp_path / "empty", url), "auto")
    save(tmp_path / "run", 2)
    assert fetch(config_for(tmp_path / "run", url), "auto") == "auto"
    assert "goes on from what is on the disk" in capsys.readouterr().err


def test_nothing_is_brought_into_a_run_that_another_process_trains(tmp_path):
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    save(run, 2)
    upload_all(run, url)
    attempt = Attempt.begin(tmp_path / "other")
    with pytest.raises(RunBusy):
        fetch(config_for(tmp_path / "other", url), "auto")
    attempt.end("stopped", 80, "test", 0)
    assert complete_checkpoints(tmp_path / "other") == []


# ---- commands and config -------------------------------------------------------------------------
def test_verify_and_upload_by_url(tmp_path):
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    first = save(run, 2)
    (run / "config.toml").write_text(dump_config(config_for(run, url)))

    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["checkpoint", *words])

    assert "every checkpoint is uploaded" in call("upload", str(run)).stdout
    assert (tmp_path / "store/newest.json").exists()
    # Another node has gone on since.
    second = save(run, 4, after(first))
    upload_all(run, url)
    shutil.rmtree(second.path)
    call("upload", str(run))
    newest = Store(url).newest()
    assert newest is not None and newest.lineage == second.lineage
    assert "every byte is as it was written" in call("verify", url).stdout
    flip(tmp_path / f"store/step-00000002-{first.lineage.id}/rank-00001.safetensors")
    result = call("verify", url)
    assert result.exit_code == 1 and "rank-00001.safetensors" in result.stdout


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://me:secret@bucket/run", r"upload_to = \*\*\*: holds a secret"),
        ("https://host/run?token=secret", "holds a secret"),
        ("https://host/run?x=1", "without a query"),
        ("runs/store", "not a URL"),
        ("simplecache::s3://bucket/run", "not a URL with one protocol"),
        ("s3://", "not a URL"),
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        tiny_config(checkpoint={"upload_to": url})
    assert "secret@" not in str(caught.value) and "token" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
    # As if it were not installed, where it is.
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match="Install s3fs"):
        Store("s3://bucket/run")
    with pytest.raises(ConfigError, match="Protocol not known: odd"):
        Store("odd://bucket/run")

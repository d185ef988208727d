"""pretrain checkpoint list, show, verify and prune."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pretrain.checkpoint.manifest import Change, Checkpoint
from pretrain.checkpoint.tools import policy_of, prune, show_source, verify_sources
from pretrain.cli.commands import app
from pretrain.config import ConfigError, RunFailed, dump_config
from pretrain.rundir.attempts import Attempt, RunBusy
from pretrain.rundir.checkpoints import complete_checkpoints, hold
from pretrain.rundir.history import Policy
from tests.conftest import tiny_config
from tests.unit.saved import after, flip, save


@pytest.fixture
def line(tmp_path: Path) -> list[Checkpoint]:
    """A run with checkpoints of steps 2, 4, 6 and 8, the last two on a second branch."""
    saved = [save(tmp_path / "run", 2)]
    saved.append(save(tmp_path / "run", 4, after(saved[-1], validation_loss_nats=3.25)))
    change = Change(4, "optimizer.learning_rate", 1e-3, 5e-4, 32)
    saved.append(save(tmp_path / "run", 6, after(saved[-1], branch=True, changes=(change,))))
    saved.append(save(tmp_path / "run", 8, after(saved[-1], changes=(change,))))
    return saved


def call(*words: object) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)], catch_exceptions=False)
    return f"{result.stdout}exit code {result.exit_code}"


def test_list_shows_lineage_sizes_losses_and_damage(line, tmp_path):
    run = tmp_path / "run"
    aside = run / "abandoned/0001"
    aside.mkdir(parents=True)
    (aside / "why.json").write_text('{"at": 1.0, "reason": "it went back"}')
    shutil.copytree(line[3].path, aside / line[3].path.name)
    flip(line[2].path / "state.json")
    # A tensor's byte is not read by a list.
    flip(line[1].path / "rank-00001.safetensors")
    # Not damaged: another version saved it.
    manifest = json.loads((line[3].path / "manifest.json").read_text())
    (line[3].path / "manifest.json").write_text(json.dumps(manifest | {"format": 3}))
    rows = json.loads(call("list", run, "--json").rpartition("exit")[0])
    first, second, third, fourth, gone = rows
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 8]
    assert second["parent"] == first["id"] == line[0].lineage.id and first["parent"] is None
    assert second["branch"] == first["branch"] != gone["branch"]
    assert second["validation_loss_nats"] == 3.25 and second["problem"] is None
    assert second["bytes"] == sum(line[1].files.values())
    assert third["problem"] == "DAMAGED: state.json: its SHA-256 is not the manifest's"
    assert fourth["problem"] == "cannot be read: manifest.json: format = 3, this version reads 2"
    assert gone["id"] == line[3].lineage.id and gone["abandoned"] == "abandoned/0001 (it went back)"
    text = call("list", run)
    assert "abandoned/0001 (it went back)" in text and "3.2500" in text
    assert not verify_sources([run])
    with pytest.raises(RunFailed, match="format = 3"):
        prune(run, Policy(1))
    assert len(complete_checkpoints(run)) == 4


def test_show_tells_what_a_checkpoint_is(line, tmp_path):
    text = show_source(tmp_path / "run")
    last = line[3]
    for expected in (
        last.lineage.id, line[2].lineage.id, "8 of 20", f"{last.lineage.branches[1].id} from",
        "optimizer.learning_rate = 0.001 -> 0.0005", "300 x 700", "SHA-256 a",
    ):  # fmt: skip
        assert expected in text, expected


def test_verify_names_every_damaged_file(line, tmp_path):
    run = tmp_path / "run"
    assert call("verify", run).count("every byte is as it was written") == 4
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        flip(line[1].path / name)
    (line[2].path / "manifest.json").unlink()
    flip(line[3].path / "config.toml")
    said = call("verify", run, line[0].path)
    assert said.endswith("exit code 1") and said.count("every byte is as it was written") == 2
    damaged = [text.split(": ")[1:3] for text in said.splitlines() if "DAMAGED" in text]
    names = ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json", "config.toml"]
    assert damaged == [["DAMAGED", name] for name in names]


def test_a_manifest_that_is_a_pipe_is_not_waited_for(line):
    (line[0].path / "manifest.json").unlink()
    os.mkfifo(line[0].path / "manifest.json")
    assert "not a regular file" in call("list", line[0].path.parents[1])


def test_prune_deletes_by_the_rules_when_it_is_told_to(line, tmp_path):
    run = tmp_path / "run"
    command = ["prune", run, "--keep", "1", "--keep-best", "1"]
    assert call(*command).startswith(f"would be deleted with --yes: {line[0].path}\n")
    with hold(line[0].path):
        call(*command, "--yes")
    assert complete_checkpoints(run) == [c.path for c in line]
    # 4 is the best, 6 and 8 are the newest two.
    assert call(*command, "--yes").startswith(f"deleted {line[0].path}\n")
    assert complete_checkpoints(run) == [c.path for c in line[1:]]


def test_prune_keeps_all_if_the_newest_is_damaged_or_the_run_is_held(line, tmp_path, monkeypatch):
    run, held = tmp_path / "run", []
    # An attempt begins while the newest is verified.
    verified = "pretrain.checkpoint.tools.verify_checkpoint"
    monkeypatch.setattr(verified, lambda _: (held.append(Attempt.begin(run)) or [], 0))
    for _ in range(2):
        with pytest.raises(RunBusy):
            prune(run, Policy(1))
    monkeypatch.undo()
    held[0].end("stopped", 80, "test", 8)
    flip(line[3].path / "rank-00001.safetensors", 5000)
    with pytest.raises(RunFailed, match=r"DAMAGED: rank-00001.*nothing was deleted"):
        prune(run, Policy(1))
    assert len(complete_checkpoints(run)) == 4
    with pytest.raises(ConfigError, match=r"no checkpoint\.keep"):
        policy_of(run, None, 4, None)
    rules = tiny_config(checkpoint={"keep": 2, "keep_every": 6})
    (run / "config.toml").write_text(dump_config(rules))
    assert policy_of(run, None, 4, None) == Policy(2, 4)
    assert policy_of(run, 1, None, 3) == Policy(1, 6, 3)
    assert policy_of(run, 1, 0, 3) == Policy(1, None, 3)

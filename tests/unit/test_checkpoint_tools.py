"""pretrain checkpoint list, show, verify, diff, prune and consolidate."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from pretrain.checkpoint import listing as pruning
from pretrain.checkpoint import tensors as comparing
from pretrain.checkpoint.blocks import DamagedCheckpoint
from pretrain.checkpoint.listing import format_rows, list_run, verify_sources
from pretrain.checkpoint.manifest import MASTER, Change, Checkpoint
from pretrain.checkpoint.tensors import consolidate, show_source
from pretrain.cli.commands import app
from pretrain.config import ConfigError, RunFailed
from pretrain.rundir.checkpoints import MANIFEST, complete_checkpoints
from pretrain.rundir.lineage import Policy, hold
from pretrain.rundir.lock import Attempt, RunBusy
from tests.conftest import tiny_config
from tests.unit.saved import SHAPES, after, flip, save, values


@pytest.fixture
def line(tmp_path: Path) -> list[Checkpoint]:
    """A run with checkpoints of steps 2, 4, 6 and 8, the last two on a second branch."""
    saved = [save(tmp_path / "run", 2)]
    saved.append(save(tmp_path / "run", 4, after(saved[-1], validation_loss_nats=3.25)))
    change = Change(4, "optimizer.learning_rate", 1e-3, 5e-4, 32)
    saved.append(save(tmp_path / "run", 6, after(saved[-1], branch=True, changes=(change,))))
    saved.append(save(tmp_path / "run", 8, after(saved[-1], changes=(change,))))
    return saved


# ---- list ----------------------------------------------------------------------------------------
def test_list_shows_lineage_sizes_losses_readers_and_damage(line, tmp_path):
    run = tmp_path / "run"
    aside = run / "abandoned/0001"
    aside.mkdir(parents=True)
    shutil.copytree(line[3].path, aside / line[3].path.name)
    flip(line[2].path / "state.json")
    # A tensor's byte is not read by a list.
    flip(line[1].path / "rank-00001.safetensors")
    (run / "evaluations").mkdir()
    (run / "evaluations/plan.json").write_text("{}")
    (run / f"evaluations/{line[0].path.name}").mkdir()
    with hold(line[0].path):
        rows = list_run(run)
    assert [(row.step, row.abandoned) for row in rows] == [
        (2, None), (4, None), (6, None), (8, None), (8, "0001"),
    ]  # fmt: skip
    first, second, third, fourth, gone = rows
    assert first.is_held and not second.is_held and first.parent is None
    assert second.parent == first.id == line[0].lineage.id
    assert second.branch == first.branch != fourth.branch and fourth.branch_since == 4
    assert second.validation_loss_nats == 3.25 and second.damage is None
    assert second.bytes == sum(
        path.stat().st_size for path in line[1].path.iterdir() if path.name != "manifest.json"
    )
    assert third.damage == "state.json: its SHA-256 is not the manifest's" and third.id is None
    assert (first.awaits_evaluation, second.awaits_evaluation) == (False, True)
    assert fourth.changes == 1 and gone.id == fourth.id
    text = format_rows(run, rows)
    assert "DAMAGED: state.json" in text and "abandoned/0001" in text and "3.2500" in text
    assert "Only manifests and other small files were read" in text
    result = CliRunner().invoke(app, ["checkpoint", "list", str(run), "--json"])
    assert [row["step"] for row in json.loads(result.stdout)] == [2, 4, 6, 8, 8]


def test_a_checkpoint_of_another_version_is_not_called_damaged(line, tmp_path, capsys):
    """Neither by its manifest's format nor by the index's own numbers."""
    run = tmp_path / "run"
    manifest = json.loads((line[3].path / "manifest.json").read_text())
    manifest["format"] = 3
    (line[3].path / "manifest.json").write_text(json.dumps(manifest))
    rows = list_run(run)
    assert [row.damage for row in rows] == [None] * 4
    assert rows[3].unread == f"{MANIFEST}: format = 3, this version reads 2"
    text = format_rows(run, rows)
    assert "cannot be read: manifest.json" in text and "DAMAGED" not in text
    assert not verify_sources([run])
    said = capsys.readouterr().out
    assert "DAMAGED" not in said and said.count("every byte is as it was written") == 3
    with pytest.raises(ConfigError, match="format = 3") as error:
        pruning.prune(run, Policy(1))
    assert not isinstance(error.value, DamagedCheckpoint)
    assert len(complete_checkpoints(run)) == 4


# ---- show ----------------------------------------------------------------------------------------
def test_show_tells_what_a_checkpoint_is(line, tmp_path):
    text = show_source(tmp_path / "run")
    last = line[3]
    for expected in (
        last.lineage.id, line[2].lineage.id, "step", "8 of 20", "tokens", "2,048 (64 samples)",
        "optimizer.learning_rate = 0.001 -> 0.0005", "300 x 700", "rank-00001.safetensors",
        f"{last.lineage.branches[1].id} from step 4", "training         SHA-256 a",
    ):  # fmt: skip
        assert expected in text, expected
    assert "norm of" not in text
    norm = np.linalg.norm(values(8)["exp_avg/layer.weight"].astype(np.float64))
    assert f"{norm:.6g}" in show_source(last.path, tensors=True)


# ---- verify --------------------------------------------------------------------------------------
def test_verify_names_every_damaged_file(line, tmp_path, capsys):
    run = tmp_path / "run"
    assert verify_sources([run])
    assert capsys.readouterr().out.count("every byte is as it was written") == 4
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        flip(line[1].path / name)
    (line[2].path / "manifest.json").unlink()
    flip(line[3].path / "config.toml")
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(run), str(line[0].path)])
    assert result.exit_code == 1
    damaged = [text for text in result.stdout.splitlines() if "DAMAGED" in text]
    assert len(damaged) == 4
    for found, name in zip(
        damaged,
        ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json", "config.toml"],
    ):
        assert f"DAMAGED: {name}: " in found
    assert "3 of 5 checkpoints are damaged" in result.stdout


# ---- diff ----------------------------------------------------------------------------------------
def test_diff_of_equal_and_of_changed_tensors(tmp_path):
    before = values(1)
    after_ = {name: array.copy() for name, array in before.items()}
    after_["master/embedding.weight"][299, 699] += 0.5
    after_["exp_avg/layer.bias"][:] = -after_["exp_avg/layer.bias"]
    first = save(tmp_path / "run", 2, tensors=before)
    same = save(tmp_path / "other", 2, tensors=before, world_size=3)
    second = save(
        tmp_path / "run", 4, after(first, data={"training": "b", "tokenizer": "c"}),
        tensors=after_, world_size=3,
        config=tiny_config(optimizer={"learning_rate": 2e-3}),
    )  # fmt: skip
    found = comparing.compare(first, same)
    assert found.is_same_training and found.relation.startswith("unrelated")
    found = comparing.compare(first, second)
    assert found.relation == "A is an ancestor of B, 2 steps before it"
    assert found.config == ["optimizer.learning_rate = 0.001 -> 0.002"]
    assert [row.split(":")[0] for row in found.data] == ["training split", "tokenizer"]
    assert {name for name, t in found.tensors.items() if not t.is_equal} == {
        "master/embedding.weight",
        "exp_avg/layer.bias",
    }
    changed = found.tensors["master/embedding.weight"]
    assert changed.max_absolute == pytest.approx(0.5, rel=1e-6)
    norm = np.linalg.norm(before["master/embedding.weight"].astype(np.float64))
    assert changed.relative == pytest.approx(0.5 / norm, rel=1e-6)
    # The norm of x - (-x) is twice that of x.
    assert found.tensors["exp_avg/layer.bias"].relative == pytest.approx(2.0)
    text = comparing.report(first, second, found)
    assert "weights: 2 of 3 bit-equal" in text and "learning_rate = 0.001 -> 0.002" in text


def test_diff_tells_minus_zero_from_zero_and_other_shapes(tmp_path):
    zeros = {name: np.zeros_like(array) for name, array in values(1).items()}
    minus = {name: -array for name, array in zeros.items()}
    other = values(1, {**SHAPES, "layer.bias": (8,)})
    paths = [
        save(tmp_path / str(number), 2, tensors=tensors)
        for number, tensors in enumerate((zeros, minus, other))
    ]
    found = comparing.compare(paths[0], paths[1])
    assert not found.is_same_training
    assert all(not t.is_equal and t.max_absolute == 0 for t in found.tensors.values())
    found = comparing.compare(paths[0], paths[2])
    assert found.tensors["master/layer.bias"].problem == "[7] and [8]"


def test_relations(line):
    assert comparing.relation(line[3].lineage, line[1].lineage) == (
        "B is an ancestor of A, 4 steps before it"
    )
    sibling = dataclasses.replace(
        line[1].lineage, id="f" * 16, step=9
    )  # The first branch went on to step 9.
    assert comparing.relation(line[3].lineage, sibling) == (
        "siblings: their line is the same up to step 4"
    )
    assert comparing.relation(line[0].lineage, line[0].lineage).startswith("the same")


# ---- prune ---------------------------------------------------------------------------------------
def test_prune_deletes_by_the_rules_when_it_is_told_to(line, tmp_path):
    run = tmp_path / "run"
    command = ["checkpoint", "prune", str(run), "--keep", "1", "--keep-best", "1"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ConfigError) and "add --yes" in str(result.exception)
    assert "1 checkpoints," in result.stdout and len(complete_checkpoints(run)) == 4
    with hold(line[0].path):
        assert CliRunner().invoke(app, [*command, "--yes"]).exit_code == 0
    assert complete_checkpoints(run) == [c.path for c in line]
    assert "1 deleted" in CliRunner().invoke(app, [*command, "--yes"]).stdout
    # 4 is the best, 6 and 8 are the newest two.
    assert complete_checkpoints(run) == [c.path for c in line[1:]]


def test_prune_keeps_everything_when_the_newest_is_damaged_or_the_run_is_trained(line, tmp_path):
    run = tmp_path / "run"
    attempt = Attempt.begin(run)
    with pytest.raises(RunBusy):
        pruning.prune(run, Policy(1))
    attempt.end("stopped", 80, "test", 8)
    flip(line[3].path / "rank-00001.safetensors", 5000)
    with pytest.raises(RunFailed, match=r"the newest checkpoint is damaged.*nothing was deleted"):
        pruning.prune(run, Policy(1))
    assert len(complete_checkpoints(run)) == 4
    with pytest.raises(ConfigError, match=r"no checkpoint\.keep"):
        pruning.policy_of(run, None, None, None)


# ---- consolidate ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_consolidated_weights_are_the_masters(tmp_path, dtype):
    save(tmp_path / "run", 2, tensors=values(1), world_size=3)
    [path, _] = reversed(consolidate(tmp_path / "run", tmp_path / "out", dtype))
    assert path.name == "model.safetensors"
    found = safetensors.torch.load_file(path)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert found.keys() == SHAPES.keys()
    for name in SHAPES:
        assert torch.equal(found[name], torch.from_numpy(values(1)[f"{MASTER}/{name}"]).to(kind))
    with pytest.raises(ConfigError, match="exists already"):
        consolidate(tmp_path / "run", tmp_path / "out", dtype)


def test_several_files_have_an_index_as_hugging_face_writes_it(tmp_path):
    tensors = values(1)
    save(tmp_path / "run", 2, tensors=tensors)
    out = tmp_path / "out"
    consolidate(tmp_path / "run", out, with_optimizer=True, max_shard_bytes=500_000)
    for stem, expected in (
        ("model", {name: tensors[f"{MASTER}/{name}"] for name in SHAPES}),
        ("optimizer", {name: a for name, a in tensors.items() if not name.startswith(MASTER)}),
    ):
        index = json.loads((out / f"{stem}.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(a.nbytes for a in expected.values())
        assert index["weight_map"].keys() == expected.keys()
        count = len(set(index["weight_map"].values()))
        assert set(index["weight_map"].values()) == {
            f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
        }
        assert count > 1
        for name, file in index["weight_map"].items():
            with safetensors.safe_open(out / file, "pt") as opened:
                assert np.array_equal(opened.get_tensor(name), expected[name])
                assert opened.metadata()["format"] == "pt"


def test_what_a_dtype_cannot_hold_and_what_is_damaged_leave_nothing_behind(tmp_path):
    tensors = dict(values(1))
    tensors["master/layer.bias"] = np.full(7, 1e5, np.float32)
    checkpoint = save(tmp_path / "run", 2, tensors=tensors)
    with pytest.raises(RunFailed, match=r"layer.bias: holds 100000, too large for fp16"):
        consolidate(tmp_path / "run", tmp_path / "out", "fp16")
    flip(checkpoint.path / "rank-00001.safetensors")
    with pytest.raises(ConfigError, match=r"rank-00001.safetensors: bytes"):
        consolidate(tmp_path / "run", tmp_path / "out", with_optimizer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

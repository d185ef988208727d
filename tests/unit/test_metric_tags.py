"""Groups, axes and figures in W&B and TensorBoard, each read back by another program; no wandb."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.checkpoint.manifest import Change
from pretrain.config import ConfigError
from pretrain.rundir.metrics import MetricsFile
from pretrain.training.metrics import (
    GROUPS,
    TAGS,
    Axes,
    MetricsWriter,
    check_wandb,
    is_installed,
    length_curve,
    step_tags,
)
from tests.unit.test_metrics import (
    ROOT,
    evaluation_records,
    make_config,
    step_record,
    wandb_history,
    wandb_records,
)

LENGTH = 128


def full_record(step: int) -> dict:
    return step_record(step, consumed_samples=32 * step, begun_pass_of_books=2)


def write(directory: Path, first: int, last: int, *settings: str) -> None:
    writer = MetricsWriter(make_config(*settings), directory, first - 1)
    for step in range(first, last + 1):
        writer.step(full_record(step))
    writer.evaluation(evaluation_records(last))
    writer.close()


def test_every_tag_is_in_a_group():
    tags = [*TAGS.values(), *step_tags(full_record(1))]
    assert {tag.partition("/")[0] for tag in tags} <= set(GROUPS)
    assert len(set(TAGS.values())) == len(TAGS)
    assert step_tags(full_record(1))["data/begun_pass_of_books"] == 2


def test_wandb_has_groups_and_three_axes_and_a_figure(tmp_path):
    write(tmp_path, 1, 3, "logging.wandb=offline")
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    axes = {}
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "metric":
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    assert axes == {"step": "", "tokens": "", "elapsed_seconds": ""} | {
        f"{group}/*": "step" for group in GROUPS
    }
    rows = wandb_history(tmp_path)
    for step, row in enumerate(rows[:3], 1):
        assert row["train/loss"] == 4.8123 and row["train/grad_norm"] == 0.8132
        assert (row["step"], row["tokens"]) == (step, step * 32 * LENGTH)
        assert row["elapsed_seconds"] == step * 0.5
        assert "loss_nats" not in row
    evaluated = rows[3]
    assert (evaluated["step"], evaluated["tokens"]) == (3, 3 * 32 * LENGTH)
    assert evaluated["eval/perplexity_nonoverlapping/256"] == 182.55
    assert evaluated["eval/loss_sliding/128"] == math.log(181.0)
    [picture] = tmp_path.glob("wandb/offline-run-*/files/media/images/eval/length_curve*.png")
    assert Image.open(picture).size[0] > 500


def test_axes_go_on_where_the_kept_steps_end(tmp_path):
    """Steps 4 and 5 are lost and taken again, and step 6 after a rollback; none counts twice."""
    write(tmp_path, 1, 5)
    write(tmp_path, 4, 6, "logging.tensorboard=true")
    writer = MetricsWriter(make_config("logging.tensorboard=true"), tmp_path, 6)
    writer.go_back(5)
    writer.step(full_record(6))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("elapsed_seconds")}
    assert found == {4: 2.0, 5: 2.5, 6: 3.0}
    tokens = {event.step: event.value for event in events.Scalars("tokens")}
    assert tokens == {step: step * 32.0 * LENGTH for step in (4, 5, 6)}


def test_tokens_follow_a_training_length_that_was_changed(tmp_path):
    """10 steps of 32 x 64 tokens, and 2 of 32 x 128."""
    change = Change(10, "data.sequence_length", 64, 128, 320)
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    for step in range(1, 13):
        file.write(full_record(step))
    file.close()
    axes = Axes(tmp_path / "metrics.jsonl", make_config(), (change,))
    assert axes.values()["tokens"] == 10 * 32 * 64 + 2 * 32 * 128


def test_the_figure_has_a_curve_for_each_protocol_and_a_gap_for_infinity():
    records = evaluation_records(7)
    records[1]["perplexity"] = math.inf
    figure = length_curve(records, LENGTH)
    [axes] = figure.axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines[:2]}
    assert curves["sliding"] == [[128.0, 181.0]]
    assert curves["nonoverlapping"][0] == [128.0, 183.1]
    assert math.isnan(curves["nonoverlapping"][1][1])
    assert axes.get_title() == "after step 7"


# ---- without wandb -------------------------------------------------------------------------------
def without_wandb(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, where the package wandb cannot be imported."""
    hidden = f"import sys, warnings; sys.modules['wandb'] = None; sys.path.insert(0, {str(ROOT)!r})"
    program = f"{hidden}\nwarnings.simplefilter('ignore')\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_folder_named_wandb_is_not_the_package(tmp_path):
    """As below a run's directory, which somebody may be in."""
    (tmp_path / "wandb").mkdir()
    code = f"""
import importlib.machinery, sys
sys.path[:] = [{str(tmp_path)!r}]
from importlib.util import find_spec
del sys.modules['wandb']
assert find_spec('wandb') is not None
"""
    check = "assert not is_installed()"
    program = f"from pretrain.training.metrics import is_installed\n{code}{check}"
    done = without_wandb(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert is_installed()


def test_offline_without_wandb_writes_everything_else_and_says_how_to_install_it(tmp_path):
    code = f"""
from pathlib import Path
from tests.unit.test_metric_tags import write
write(Path({str(tmp_path / "run")!r}), 1, 3, 'logging.wandb=offline', 'logging.tensorboard=true')
"""
    done = without_wandb(code, tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "wandb" in line]
    assert line.startswith("wandb: not installed") and "pip install 'pretrain[wandb]'" in line
    assert not (tmp_path / "run/wandb").exists()
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 6


def test_online_without_wandb_is_refused(monkeypatch):
    check_wandb(make_config("logging.wandb=online"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_wandb(make_config("logging.wandb=offline"))
    with pytest.raises(
        ConfigError, match=r"logging.wandb = online.*not installed.*pretrain\[wandb"
    ):
        check_wandb(make_config("logging.wandb=online"))

"""What W&B and TensorBoard get of a real run, also after a resume, and a run without wandb."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.training.metrics import GROUPS, PASS, TAGS
from tests.end_to_end.commands import explained, forked, metrics, sets, succeeds
from tests.unit.test_metrics import wandb_history, wandb_records

WITHOUT_WANDB = (
    "import sys; sys.modules['wandb'] = None; from pretrain.__main__ import main; "
    "sys.argv = ['pretrain', *sys.argv[1:]]; main()"
)


def test_wandb_and_tensorboard_have_the_numbers_of_the_run_after_a_resume(config, tmp_path):
    """A run of 4 steps that goes on to 8: every step once, as metrics.jsonl has it."""
    run = tmp_path / "run"
    settings = [f"run.directory={run}", "logging.wandb=offline", "logging.tensorboard=true"]
    for last in (4, 8):
        time.sleep(1)  # wandb names an offline run's folder by the second
        succeeds("train", config, *sets(*settings, f"train.num_steps={last}"))
    identifier = (run / "wandb_run_id").read_text().strip()
    first, _ = sorted(run.glob(f"wandb/offline-run-*/run-{identifier}.wandb"))
    axes = {
        record.metric.name or record.metric.glob_name: record.metric.step_metric
        for record in wandb_records(first)
        if record.WhichOneof("record_type") == "metric"
    }
    assert axes == {"step": ""} | {f"{group}/*": "step" for group in GROUPS}
    records = metrics(run)
    steps = [record for record in records if "evaluation" not in record]
    known = {*TAGS, "step"}
    assert all(key in known or key.startswith(PASS) for record in steps for key in record)
    rows = [row for row in wandb_history(run) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for key, tag in TAGS.items():
        expected = {record["step"]: record[key] for record in steps if key in record}
        assert {row["step"]: row[tag] for row in rows if tag in row} == expected
        if expected:
            found = {event.step: event.value for event in events.Scalars(tag)}
            # TensorBoard stores single precision.
            assert found == {step: float(np.float32(value)) for step, value in expected.items()}
    evaluated = [row for row in wandb_history(run) if any(key.startswith("eval/") for key in row)]
    assert [row["step"] for row in evaluated] == [4, 8]
    last = [record for record in records if "evaluation" in record][-2:]
    assert {record["length"]: record["perplexity"] for record in last} == {
        length: evaluated[-1][f"eval/perplexity_nonoverlapping/{length}"] for length in (32, 64)
    }


def test_a_run_without_wandb_trains_on_offline_and_is_refused_online(config, tmp_path):
    run = tmp_path / "run"
    settings = sets(f"run.directory={run}", "train.num_steps=2", "logging.wandb=online")
    command = [sys.executable, "-c", WITHOUT_WANDB, "train", str(config), *settings]
    explained(forked(command), 2, "logging.wandb = online", "pip install -e '.[wandb]'")
    assert not Path(run).exists()
    command[-1] = "logging.wandb=offline"
    done = forked(command)
    assert done.code == 0 and done.err.count("wandb: not installed") == 1, done.text
    assert [record["step"] for record in metrics(run) if "evaluation" not in record] == [1, 2]
    assert not (run / "wandb").exists()

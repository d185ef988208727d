"""Destinations of a run's numbers: each is read back by another program, and none stops a run.

What a whole run sends, also after a resume, is in tests/end_to_end/test_logging.py; how
metrics.jsonl survives a crash in tests/unit/test_rundir.py.
"""

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pretrain.checkpoint.manifest import Change, Origin
from pretrain.config import RunConfig, load_config
from pretrain.rundir.metrics import read_metrics
from pretrain.training.hooks import LoggingHook
from pretrain.training.metrics import GROUPS, TAGS, Console, MetricsWriter, step_tags
from pretrain.training.start import StartPoint
from pretrain.training.stragglers import Stragglers
from tests.end_to_end.commands import ROOT, wait_for


def make_config(*overrides: str) -> RunConfig:
    quiet = [
        "logging.wandb=disabled",
        "logging.tensorboard=false",
        "train.num_steps=120",
        "logging.interval_steps=10",
    ]
    return load_config(ROOT / "configs/demo.toml", [*quiet, *overrides])


def step_record(step: int, **changes: object) -> dict:
    record = {
        "step": step,
        "loss_nats": 4.8123,
        "gradient_norm": 0.8132,
        "learning_rate": 1.9e-3,
        "tokens_per_second": 21_300.0,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.01,
        "peak_memory_bytes": None,
    }
    return {**record, **changes}


def read(path: Path) -> list[dict]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")  # Python's reader would take NaN and Infinity

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_numbers_that_json_lacks_become_null_with_a_note(tmp_path):
    writer = MetricsWriter(make_config(), tmp_path, 0)
    writer.step(step_record(1, loss_nats=math.nan, gradient_norm=math.inf))
    writer.close()
    [record] = read(tmp_path / "metrics.jsonl")
    assert record["loss_nats"] is None and record["gradient_norm"] is None
    assert record["non_finite"] == {"loss_nats": "nan", "gradient_norm": "inf"}


# ---- console -------------------------------------------------------------------------------------


def writing_program(directory: Path, override: str = "logging.wandb=disabled") -> list[str]:
    """A process of its own that writes 120 steps to a MetricsWriter."""
    # Megatron-core warns of optional packages when it is imported; `pretrain` silences it likewise.
    code = f"""
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(ROOT / "tests/unit")!r})
from pathlib import Path
from test_metrics import MetricsWriter, make_config, step_record
writer = MetricsWriter(make_config({override!r}), Path({str(directory)!r}), 0)
for step in range(1, 121):
    writer.step(step_record(step))
writer.close()
"""
    return [sys.executable, "-c", code]


def test_every_tag_is_in_a_group():
    tags = step_tags(step_record(1, begun_pass_of_books=2))
    assert {tag.partition("/")[0] for tag in [*TAGS.values(), *tags]} <= set(GROUPS)
    assert len(set(TAGS.values())) == len(TAGS) and tags["data/begun_pass_of_books"] == 2


def test_a_first_loss_above_that_of_a_guess_is_explained(capsys):
    for loss in (11.0, 5.0):
        Console(make_config()).step(step_record(1, loss_nats=loss))
    assert capsys.readouterr().err.count("first predict the token that was read") == 1


# ---- wandb ---------------------------------------------------------------------------------------
def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: 7 bytes, then LevelDB's log format (its doc/log_format.md)."""
    position, parts = 7, []
    while position + 7 <= len(data):
        # The rest of a block may be too short for a record's header.
        if 32_768 - position % 32_768 < 7:
            position += 32_768 - position % 32_768
            continue
        # The checksum, the length, and whether it is whole, or its first, middle or last part.
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline run, whose last ones may be written after `finish` returns."""
    from wandb.proto.wandb_internal_pb2 import Record

    def records() -> list[Any]:
        return [Record.FromString(data) for data in log_records(path.read_bytes())]

    wait_for(lambda: any(record.WhichOneof("record_type") == "exit" for record in records()))
    return records()


def wandb_history(directory: Path) -> list[dict]:
    """Every logged row of the offline runs under `directory`, oldest run first."""
    rows = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append(
                    {
                        item.key or ".".join(item.nested_key): json.loads(item.value_json)
                        for item in items
                    }
                )
    return rows


def test_wandb_without_a_key_is_said_once_and_the_run_goes_on(tmp_path):
    # A process of its own, because wandb remembers credentials; a home, because of ~/.netrc.
    bare = {
        name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))
    }
    command, nothing = writing_program(tmp_path / "run", "logging.wandb=online"), subprocess.DEVNULL
    home = {**bare, "HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=home, stdin=nothing, capture_output=True, text=True, check=True
    )
    assert done.stderr.count("wandb: UsageError: ") == 1 and "continuing without it" in done.stderr
    assert len(read(tmp_path / "run/metrics.jsonl")) == 120


# ---- failures ------------------------------------------------------------------------------------
def test_a_destination_that_fails_later_is_left_alone(tmp_path, capsys):
    class Closed(Console):
        calls = closed = 0

        def step(self, record):
            Closed.calls += 1
            Path("/dev/full").write_text("no space")

        def close(self):
            Closed.closed += 1

    writer = MetricsWriter(make_config(), tmp_path, 0)
    writer.destinations = {"disk": Closed(make_config())}
    writer.step(step_record(1))
    writer.step(step_record(2))
    writer.close()
    assert (Closed.calls, Closed.closed) == (1, 1)
    assert capsys.readouterr().err == (
        "disk: OSError: [Errno 28] No space left on device; continuing without it; "
        "metrics.jsonl has every number\n"
    )


@pytest.mark.parametrize(("kept", "missing"), [(3, "steps 4 to 5 are missing"), (5, ""), (0, "")])
def test_records_that_are_missing_before_a_start_are_named(tmp_path, capsys, kept, missing):
    """Without any the run may have begun with another one's checkpoint."""
    lines = [json.dumps({"step": step}) for step in range(1, kept + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    MetricsWriter(make_config(), tmp_path, 5).close()
    said = capsys.readouterr().err
    assert missing in said and said.count("metrics.jsonl: ends at step") == bool(missing)


def test_a_rollback_keeps_what_was_allowed_to_change_at_its_step(tmp_path):
    change = Change(4, "optimizer.learning_rate", 1e-3, 5e-4, 32)
    run = SimpleNamespace(
        config=make_config(),
        whole=make_config(),
        start_point=StartPoint(),
        state=SimpleNamespace(step=4),
        origin=Origin(changes=(change,)),
        blend=None,
    )
    writer = MetricsWriter(run.config, tmp_path, 4)
    hook = LoggingHook(run, writer, Stragglers([], 8))
    hook.at_start(run)
    writer.step(step_record(5))
    hook.after_rollback(run)
    writer.step(step_record(5))
    hook.close()
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [record["step"] for record in records] == [4, 5]
    assert records[0]["changed"] == {"optimizer.learning_rate": [1e-3, 5e-4]}

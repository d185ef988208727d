"""Destinations of a run's numbers: each is read back by another program, and none stops a run."""

import json
import math
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.checkpoint.manifest import Change, Origin
from pretrain.config import RunConfig, load_config
from pretrain.training.hooks import LoggingHook
from pretrain.training.metrics import (
    Guarded,
    JsonLines,
    Lines,
    MetricsWriter,
    ProgressBar,
)
from tests.end_to_end.commands import wait_for

ROOT = Path(__file__).parents[2]


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


def evaluation_records(step: int) -> list[dict]:
    common = {"step": step, "evaluation": True}
    return [
        {
            **common,
            "length": 128,
            "protocol": "nonoverlapping",
            "loss_nats": math.log(183.1),
            "perplexity": 183.1,
            "tokens": 16384,
        },
        {
            **common,
            "length": 256,
            "protocol": "nonoverlapping",
            "loss_nats": math.log(182.55),
            "perplexity": 182.55,
            "tokens": 16384,
        },
        {
            **common,
            "length": 128,
            "protocol": "sliding",
            "loss_nats": math.log(181.0),
            "perplexity": 181.0,
            "tokens": 16384,
        },
    ]


def read(path: Path) -> list[dict]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")  # Python's reader would take NaN and Infinity

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write_steps(path: Path, first: int, last: int, resume_step: int, loss: float) -> None:
    lines = JsonLines(path, resume_step)
    for step in range(first, last + 1):
        lines.step(step_record(step, loss_nats=loss))
        if step % 5 == 0:
            lines.evaluation(evaluation_records(step))
    lines.close()


# ---- metrics.jsonl -------------------------------------------------------------------------------
def test_every_record_is_a_line_and_is_there_at_once(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl", 0)
    lines.step(step_record(1))
    lines.evaluation(evaluation_records(1))
    assert read(tmp_path / "metrics.jsonl") == [
        step_record(1),
        *evaluation_records(1),
    ]  # before it is closed
    lines.close()


def test_a_resumed_run_holds_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 13, resume_step=0, loss=1.0)
    write_steps(path, 11, 20, resume_step=10, loss=2.0)
    records = read(path)
    steps = [record for record in records if "evaluation" not in record]
    assert [r["step"] for r in steps] == list(range(1, 21))
    assert [r["loss_nats"] for r in steps] == [1.0] * 10 + [2.0] * 10
    assert [r["step"] for r in records if "evaluation" in r] == [5] * 3 + [10] * 3 + [15] * 3 + [
        20
    ] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("end", [15, -1, None])
def test_a_line_that_a_kill_cut_short_does_no_harm(tmp_path, end):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 4, resume_step=0, loss=1.0)
    whole, last = path.read_text().rsplit("\n", 2)[:2]
    path.write_text(
        whole + "\n" + last[:end]
    )  # in the middle, before the brace, before the newline alone
    write_steps(path, 4 if end else 5, 6, resume_step=4, loss=2.0)
    assert [r["step"] for r in read(path) if "evaluation" not in r] == [1, 2, 3, 4, 5, 6]


def test_a_fresh_start_keeps_nothing(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", 1, 5, resume_step=0, loss=1.0)
    write_steps(tmp_path / "metrics.jsonl", 1, 2, resume_step=0, loss=2.0)
    assert [r["loss_nats"] for r in read(tmp_path / "metrics.jsonl")] == [2.0, 2.0]


def test_numbers_that_json_lacks_become_null_with_a_note(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl", 0)
    lines.step(step_record(1, loss_nats=math.nan, gradient_norm=math.inf))
    lines.close()
    [record] = read(tmp_path / "metrics.jsonl")
    assert record["loss_nats"] is None and record["gradient_norm"] is None
    assert record["non_finite"] == {"loss_nats": "nan", "gradient_norm": "inf"}


# ---- console -------------------------------------------------------------------------------------
def test_a_plain_line_at_the_start_every_interval_and_at_the_end(capsys):
    lines = Lines(num_steps=125, interval=10)
    for step in range(101, 126):
        lines.step(step_record(step))
    numbers = "loss 4.812  lr 1.9e-03  grad 0.81  21.3k tokens/s"
    assert capsys.readouterr().err.splitlines() == [
        f"step 101/125  {numbers}  (the first is the slowest)",
        f"step 110/125  {numbers}  eta 0:08",  # 15 steps left at 0.5 s: 7.5 s, rounded to even
        f"step 120/125  {numbers}  eta 0:02",
        f"step 125/125  {numbers}  eta 0:00",
    ]


@pytest.mark.parametrize(
    "console", [lambda: Lines(120, 10), lambda: ProgressBar(120, 90)], ids=["lines", "bar"]
)
def test_an_evaluation_is_a_line_a_protocol(capsys, console):
    destination = console()
    destination.evaluation(evaluation_records(100))
    destination.close()
    lines = capsys.readouterr().err.splitlines()
    assert (
        "evaluation after step 100, nonoverlapping, 16,384 tokens, perplexity at  "
        "128: 183.10  256: 182.55" in lines
    )
    assert "evaluation after step 100, sliding, 16,384 tokens, perplexity at  128: 181.00" in lines


def test_the_progress_bar_starts_where_the_run_resumes(capsys):
    bar = ProgressBar(num_steps=120, resume_step=90)
    for step in range(91, 121):
        bar.step(step_record(step))
    bar.close()
    last = capsys.readouterr().err.rsplit("\r", 1)[1]
    assert "120/120" in last and "loss 4.812  lr 1.9e-03" in last


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


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(tmp_path):
    command = writing_program(tmp_path)
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    # The first step and every tenth one.
    assert len(piped.stderr.splitlines()) == 13 and piped.stdout == ""
    for columns, has_bar in ((120, True), (0, False)):
        shown = stderr_on_a_terminal(command, columns)
        assert ("120/120 [" in shown) == has_bar and ("step 10/120  loss" in shown) != has_bar
    assert len(read(tmp_path / "metrics.jsonl")) == 120


def stderr_on_a_terminal(command: list[str], columns: int) -> str:
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    process = subprocess.Popen(command, cwd=ROOT, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while block := os.read(master, 65_536):
            shown += block
    except OSError:  # Linux: everything is read and the other side is closed
        os.close(master)
    assert process.wait() == 0
    return shown.decode()


# ---- TensorBoard ---------------------------------------------------------------------------------
def scalars(directory: Path, tag: str) -> dict[int, float]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_tensorboard_reads_what_was_written_and_resumed(tmp_path):
    config = make_config("logging.tensorboard=true")
    for first, last, resume_step, loss in ((1, 6, 0, 1.0), (5, 8, 4, 2.0)):
        writer = MetricsWriter(config, tmp_path, resume_step)
        for step in range(first, last + 1):
            writer.step(step_record(step, loss_nats=loss, consumed_samples=32 * step))
        writer.evaluation(evaluation_records(last))
        writer.close()
    # 183.1 is stored in single precision: 24 bits, 6e-8 relative.
    assert scalars(tmp_path / "tensorboard", "eval/perplexity_nonoverlapping/128")[
        8
    ] == pytest.approx(183.1, rel=6e-8)
    expected = {step: 1.0 if step <= 4 else 2.0 for step in range(1, 9)}
    assert scalars(tmp_path / "tensorboard", "train/loss") == expected
    # 32 samples of 128 tokens and half a second a step, each counted once.
    tokens = {step: 32.0 * 128 * step for step in range(1, 9)}
    assert scalars(tmp_path / "tensorboard", "tokens") == tokens
    seconds = {step: 0.5 * step for step in range(1, 9)}
    assert scalars(tmp_path / "tensorboard", "elapsed_seconds") == seconds
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    # That after step 6 belongs to the steps which were lost.
    assert [event.step for event in events.Images("eval/length_curve")] == [8]


# ---- wandb ---------------------------------------------------------------------------------------
def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: 7 bytes, then LevelDB's log format (its doc/log_format.md)."""
    position, parts = 7, []
    while position + 7 <= len(data):
        if (
            32_768 - position % 32_768 < 7
        ):  # the rest of a block that is too short for a record's header
            position += 32_768 - position % 32_768
            continue
        _, length, kind = struct.unpack_from(
            "<IHB", data, position
        )  # checksum, length, whole/first/middle/last
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


def test_wandb_offline_writes_every_step_and_a_resume_continues_the_same_run(tmp_path):
    config = make_config("logging.wandb=offline")
    MetricsWriter(
        config, tmp_path, 0
    ).close()  # ended before its first step was saved, so the next starts from scratch too
    for resume_step in (0, 2):
        time.sleep(1)  # wandb names an offline run's folder by the second
        writer = MetricsWriter(config, tmp_path, resume_step)
        writer.step(step_record(resume_step + 1))
        writer.step(step_record(resume_step + 2))
        writer.evaluation(evaluation_records(resume_step + 2))
        writer.close()
    identifier = (tmp_path / "wandb_run_id").read_text().strip()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*/run-{identifier}.wandb"))) == 3
    rows = wandb_history(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 2, 3, 4, 4]
    assert (
        rows[0]["train/loss"] == 4.8123 and rows[2]["eval/perplexity_nonoverlapping/128"] == 183.1
    )


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
def test_tensorboard_that_cannot_write_is_said_once_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("in the way")
    writer = MetricsWriter(make_config("logging.tensorboard=true"), tmp_path, 0)
    writer.step(step_record(1))
    writer.step(step_record(2))
    writer.close()
    said = capsys.readouterr().err
    assert said.count("TensorBoard: FileExistsError") == 1 and "continuing without it" in said
    assert len(read(tmp_path / "metrics.jsonl")) == 2


def test_a_destination_that_fails_later_is_left_alone(capsys):
    class Closed(Lines):
        calls = closed = 0

        def step(self, record):
            Closed.calls += 1
            Path("/dev/full").write_text("no space")

        def close(self):
            Closed.closed += 1

    guarded = Guarded("disk", lambda: Closed(1, 1))
    guarded.step(step_record(1))
    guarded.step(step_record(2))
    guarded.evaluation(evaluation_records(2))
    guarded.close()
    assert (Closed.calls, Closed.closed) == (1, 1)
    assert capsys.readouterr().err == (
        "disk: OSError: [Errno 28] No space left on device; continuing without it; "
        "metrics.jsonl has every number\n"
    )


def test_a_user_who_stops_the_run_is_not_held_up(capsys):
    class Interrupted(Lines):
        def step(self, record):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded("any", lambda: Interrupted(1, 1)).step(step_record(1))


def test_a_rollback_keeps_what_was_allowed_to_change_at_its_step(tmp_path):
    changes = (
        Change(4, "optimizer.learning_rate", 1e-3, 5e-4, 32),
        Change(2, "run.seed", 1, 2, 16),
    )
    state = SimpleNamespace(step=4)
    config = make_config("logging.wandb=disabled", "logging.tensorboard=false")
    run = SimpleNamespace(state=state, origin=Origin(changes=changes), config=config, blend=None)
    writer = MetricsWriter(config, tmp_path, 4)
    hook = LoggingHook(run, writer)
    hook.at_start(run)
    writer.step(step_record(5))
    hook.after_rollback(run)
    writer.step(step_record(5))
    hook.close()
    records = read(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [4, 5]
    assert records[0]["changed"] == {"optimizer.learning_rate": [1e-3, 5e-4]}


def test_a_wait_for_data_is_shown_from_a_twentieth_of_a_step_on(tmp_path, capsys):
    writer = MetricsWriter(make_config("logging.interval_steps=1"), tmp_path, 0)
    for step, waited in enumerate((0.024, 0.026, 0.4), 1):
        writer.step(step_record(step, data_wait_seconds=waited))
    writer.close()
    lines = capsys.readouterr().err.splitlines()
    assert ["data wait" in line for line in lines] == [False, True, True]
    assert "data wait 5%" in lines[1] and "data wait 80%" in lines[2]


def test_the_end_of_a_corpus_is_said_at_its_step(tmp_path, capsys):
    """Although the log shows the first step and every tenth one alone."""
    writer = MetricsWriter(make_config(), tmp_path, 0)
    writer.step(step_record(1))
    assert capsys.readouterr().err.startswith("step 1/")
    writer.step(step_record(3, begun_pass_of_books=2))
    writer.step(step_record(4))
    writer.step(step_record(7, begun_pass_of_books=3, begun_pass_of_news=12))
    writer.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 3: corpus books begins its second pass",
        "step 7: corpus books begins its third pass",
        "step 7: corpus news begins pass 12",
    ]

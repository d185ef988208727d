"""`pretrain evaluate-tasks` as a user types it, with stock transformers as the outside oracle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pretrain.data.stream import TokenStream
from pretrain.evaluation.tasks import FIELDS, Arm, Text, long_documents, make_cell, measure
from pretrain.evaluation.tasks_command import SEED
from tests.end_to_end.commands import explained, pretrain, running_ranks, succeeds

LENGTHS, SAMPLES, TRAINED = [64, 96], 5, 32
WORDS = ["--lengths", "64,96", "--samples", SAMPLES]


def records(out: Path) -> list[dict]:
    return json.loads(out.read_text())["records"]


@pytest.fixture(scope="module")
def measured(workspace, run) -> tuple[Path, str]:
    """(the report of the run on one process, what was printed)."""
    out = workspace / "tasks/tasks.json"
    done = pretrain("evaluate-tasks", run, *WORDS, "--out", out)
    assert done.code == 0 and done.err == "", done.text
    return out, done.out


def test_a_report_has_every_task_at_every_length(run, measured):
    out, printed = measured
    found = records(out)
    assert [list(record) for record in found] == [list(FIELDS)] * len(found)
    assert {record["run"] for record in found} == {str(run)}
    assert {record["step"] for record in found} == {8}
    assert {(r["task"], r["length"]) for r in found} == {
        (task, length) for task in ("needle", "induction", "documents") for length in LENGTHS
    }
    assert {record["n"] for record in found} == {SAMPLES}
    assert f"{run}, step 8 (alibi)" in printed and "needle: gain in nats per token" in printed
    names = {path.name for path in out.parent.iterdir()}
    kinds = ("png", "svg", "pdf")
    drawn = {f"tasks{end}.{kind}" for end in ("", "_depth", "_distance") for kind in kinds}
    assert names == {"tasks.json", "tasks.csv", "tasks.md", *drawn}


def test_stock_transformers_gives_the_same(workspace, run, measured, tiny_data):
    from transformers import AutoModelForCausalLM

    folder = workspace / "hf-tasks"
    succeeds("export", run, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(arm: Arm) -> np.ndarray:
        found = []
        for row in arm.rows:
            tokens = torch.from_numpy(row.tokens())
            with torch.no_grad():
                logits = model(tokens[None, :-1]).logits[0, -arm.scored :]
            targets = tokens[-arm.scored :]
            right = (logits.argmax(-1) == targets).double().mean().item()
            losses = F.cross_entropy(logits, targets, reduction="none").double()
            found.append([losses.mean().item(), right])
        return np.array(found)

    stream = TokenStream(tiny_data / "validation")
    text = Text(stream, SEED, long_documents(stream, 2 * TRAINED))
    expected = [
        record
        for task in ("needle", "induction", "documents")
        for length in LENGTHS
        for record in measure(make_cell(task, text, length, SAMPLES, TRAINED), score)
    ]
    for ours, theirs in zip(records(measured[0]), expected, strict=True):
        # Both compute in fp32: losses near 6 nats agree to some 1e-6, gains are differences.
        assert ours["value"] == pytest.approx(theirs["value"], abs=1e-5), (ours, theirs)


def test_two_tensor_ranks_and_a_named_checkpoint_give_the_same(workspace, run, measured):
    checkpoint = run / "checkpoints/step-00000008"
    out = workspace / "tasks-of-two/tasks.json"
    words = [*WORDS, "--out", out, "--set", "parallel.tensor_model_parallel_size=2"]
    with running_ranks(["evaluate-tasks", checkpoint, *words], 2) as ranks:
        done = ranks.done()
    assert [each.code for each in done] == [0, 0], done
    assert done[1].out == ""
    for two, one in zip(records(out), records(measured[0]), strict=True):
        # Other batches, other sums: a few units in the last place of fp32.
        assert two["value"] == pytest.approx(one["value"], abs=1e-5)
        rest = {"value": None, "low": None, "high": None}
        assert {**two, **rest} == {**one, **rest}


def test_lengths_that_cannot_be_measured(workspace, run, tmp_path):
    """Those of the config are left out with a sentence, those of the command line refused."""
    done = succeeds("evaluate-tasks", run, "--samples", 2, "--tasks", "induction,documents")
    assert done.err.splitlines() == [
        f"{run}: induction at 32 tokens is left out: 64 tokens are the least, to plant 32 and to "
        "repeat them",
        f"{run}: documents at 32 tokens is left out: 64 tokens, twice the cut context, are the "
        "least",
    ]
    out = tmp_path / "out/tasks.json"
    said = "--lengths 32: the task needle cannot be measured"
    explained(pretrain("evaluate-tasks", run, "--lengths", "32", "--out", out), 2, said)
    assert not out.parent.exists()
    (tmp_path / "curve.json").write_text('{"records": [{"protocol": "sliding"}]}')
    explained(
        pretrain("evaluate-tasks", run, *WORDS, "--out", tmp_path / "curve.json"), 2, "overwritten"
    )

"""`pretrain evaluate-tasks` as a user types it, with stock transformers as the outside oracle."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pretrain.data.stream import TokenStream
from pretrain.evaluation.task_samples import TASKS, Text
from pretrain.evaluation.tasks import measure
from tests.end_to_end.commands import explained, pretrain, running_ranks, sets, succeeds

LENGTH, SAMPLES = 352, 2
WORDS = ["--tasks", ",".join(TASKS), "--lengths", LENGTH, "--samples", SAMPLES]


def records(out: Path) -> list[dict]:
    return json.loads(out.read_text())["records"]


@pytest.fixture(scope="module")
def measured(workspace, run) -> Path:
    """The report of the run on one process."""
    out = workspace / "tasks/tasks.json"
    done = pretrain("evaluate-tasks", run, *WORDS, "--out", out)
    assert done.code == 0 and done.err == "", done.text
    assert f"{run}, step 8 (alibi)" in done.out and "needle: gain in nats per token" in done.out
    return out


def test_stock_transformers_gives_the_same(workspace, run, measured, tiny_data):
    from transformers import AutoModelForCausalLM

    folder = workspace / "hf-tasks"
    # Beside it, the same weights in other programs, as far as they are installed.
    others = {"llama.cpp": "cyllama"}
    others = {name: reader for name, reader in others.items() if find_spec(reader)}
    done = succeeds("export", run, folder, "--for", "vllm", *(f"--for={name}" for name in others))
    card = (folder / "README.md").read_text()
    for name, reader in others.items():
        assert f"{name}: proven in {reader} " in done.out and f"- {name}: proven in" in card
    assert "- vllm: reads this folder; its source was read, it was not run." in card
    # Its table of biases is as long as is asked for.
    longer = {"dtype": torch.float32, "max_seq_len": LENGTH}
    model = AutoModelForCausalLM.from_pretrained(folder, **longer).eval()

    def score(length, rows) -> np.ndarray:
        found = []
        for tokens, scored in (row() for row in rows):
            prompt, targets = torch.from_numpy(tokens).split([length + 1 - scored, scored])
            whole = torch.from_numpy(tokens)[None, :-1]
            with torch.no_grad():
                logits = model(whole).logits[0, -scored:]
            right = (logits.argmax(-1) == targets).double().mean().item()
            losses = F.cross_entropy(logits, targets, reduction="none").double()
            greedy = {"max_new_tokens": scored, "do_sample": False, "eos_token_id": None}
            done = model.generate(prompt[None], **greedy)[0, -scored:] if right else targets + 1
            found.append([losses.mean().item(), right, float(torch.equal(done, targets))])
        return np.array(found)

    text = Text(TokenStream(tiny_data / "validation"))
    expected = [
        record for task in TASKS.values() for record in measure(task, text, LENGTH, SAMPLES, score)
    ]
    for ours, theirs in zip(records(measured), expected, strict=True):
        assert (ours["run"], ours["step"]) == (str(run), 8)
        keys = ("task", "length", "depth", "measure", "n")
        assert [ours[key] for key in keys] == [theirs[key] for key in keys]
        # Both compute in fp32: losses near 6 nats agree to some 1e-6, gains are differences.
        assert ours["value"] == pytest.approx(theirs["value"], abs=1e-5), (ours, theirs)
    names = {path.name for path in measured.parent.iterdir()}
    assert names == {"tasks.json", "tasks.md", "tasks.png", "tasks.svg"}


def test_ranks_that_share_a_sample_and_a_named_checkpoint_give_the_same(workspace, run, measured):
    """Two ranks hold a part of the vocabulary and of the heads, and two a part of the sequence."""
    checkpoint = run / "checkpoints/step-00000008"
    out = workspace / "tasks-of-four/tasks.json"
    # Their samples are scored alike.
    words, some = [*WORDS, "--out", out], ("needle", "induction", "vt")
    words[1] = ",".join(some)
    words += sets("parallel.tensor_model_parallel_size=2", "parallel.context_parallel_size=2")
    with running_ranks(["evaluate-tasks", checkpoint, *words], 4) as ranks:
        done = ranks.done()
    assert [each.code for each in done] == [0, 0, 0, 0], done
    assert done[1].out == ""
    whole = [record for record in records(measured) if record["task"] in some]
    for split, one in zip(records(out), whole, strict=True):
        # Other batches, other sums: a few units in the last place of fp32.
        assert split["value"] == pytest.approx(one["value"], abs=1e-5)
        rest = {"value": None, "low": None, "high": None}
        assert {**split, **rest} == {**one, **rest}


def test_lengths_that_cannot_be_measured(run, tmp_path):
    """Those of the config are left out with a sentence, those of the command line refused."""
    done = succeeds("evaluate-tasks", run, "--samples", 2, "--tasks", "induction")
    [said] = done.err.splitlines()
    assert said.startswith(f"{run}: left out: induction at 32 tokens: a context needs 63 tokens ")
    (tmp_path / "curve.json").write_text('{"records": [{"protocol": "sliding"}]}')
    for words, said in (
        (["--lengths", "32"], "--lengths: needle at 32 tokens: a context needs 63"),
        (["--lengths", "64,10000000"], "fewer than the validation text's 211,360"),
        (["--tasks", "needles"], "--tasks needles: unknown task"),
        (["--out", tmp_path / "curve.json"], "curve.json would be overwritten"),
    ):
        explained(pretrain("evaluate-tasks", run, *words), 2, said)

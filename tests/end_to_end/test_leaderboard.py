"""`pretrain leaderboard`: an entry is verified by its checkpoint; one changed number is found."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import GPTJForCausalLM

from pretrain.evaluation.leaderboard import NUMBERS
from tests.end_to_end.commands import pretrain, succeeds
from tests.unit.report_records import Page
from tests.unit.test_evaluate_folder import GPTJ, folder

__all__ = ["folder"]


def test_an_entry_is_verified_and_a_changed_one_is_not(run, refused, tmp_path):
    curve, board = tmp_path / "curve.json", tmp_path / "board"
    options = ("--lengths", "32,64", "--stride", "16", "--max-tokens", "1000")
    succeeds("evaluate", run, *options, "--out", curve)
    succeeds("leaderboard", "add", board, curve, "--name", "Tiny", "--equal", "tokens")
    verify = ("leaderboard", "verify", board, "tiny", run)
    assert "perplexity" in succeeds(*verify).out
    succeeds("leaderboard", "build", board)
    mark = json.loads((board / "verified/tiny.json").read_text())
    assert mark["difference"] < 1e-9 and mark["date"] in (board / "index.html").read_text()
    entry = json.loads((board / "tiny.json").read_text())
    flattered_copy_gains_nothing(board, entry, run)
    # The last row is that of sliding windows of 64 tokens.
    last = entry["records"][-1]
    bits, seed = last["bits_per_byte"] * (1 - 1e-5), last["seed"] * 2
    for key, value in {"bits_per_byte": bits, "trained_tokens": None, "seed": seed}.items():
        last[key] = value
        (board / "tiny.json").write_text(json.dumps(entry))
        done = pretrain(*verify)
        assert done.code == 1 and f"sliding by 16 at 64 tokens: {key} = " in done.err
    succeeds("leaderboard", "build", board)
    names = {(values[1], values[-1]) for _, values in Page((board / "index.html").read_text()).rows}
    assert names == {("Copy", mark["date"]), ("Tiny", "no")}
    refused(["leaderboard", "verify", board, "none", run], board / "none.json")


def flattered_copy_gains_nothing(board, entry, run):
    """It says that it ran on a GPU, and makes use of all that this allows."""
    copied = copy.deepcopy(entry) | {"name": "Copy"}
    for record in copied["records"]:
        record["device_seconds"] = record.pop("processor_seconds")
        record["blocks"]["losses"] = [loss * (1 - 9e-4) for loss in record["blocks"]["losses"]]
        record |= {key: record[key] * (1 - 9e-4) for key in NUMBERS if key != "blocks"}
    (board / "copy.json").write_text(json.dumps(copied))
    succeeds("leaderboard", "verify", board, "copy", run)
    succeeds("leaderboard", "build", board)
    rows = [values for _, values in Page((board / "index.html").read_text()).rows]
    tiny, theirs = ([row[:1] + row[2:] for row in rows if row[1] == n] for n in ("Tiny", "Copy"))
    assert tiny == theirs and len(tiny) == 4


@pytest.mark.parametrize("folder", [lambda: GPTJForCausalLM(GPTJ)], indirect=True)
def test_a_hugging_face_folder_enters_and_is_verified(folder, tmp_path):
    """Of a class that nothing here can export or import: transformers computes it."""
    curve, board, text = tmp_path / "curve.json", tmp_path / "board", tmp_path / "text"
    options = ("--lengths", "16,64", "--stride", "8", "--text", text)
    succeeds("evaluate", folder, *options, "--out", curve)
    succeeds("leaderboard", "add", board, curve, "--name", "GPT-J, random")
    verify = ("leaderboard", "verify", board, "gpt-j-random", folder, "--text", text)
    assert "perplexity" in succeeds(*verify).out
    succeeds("leaderboard", "build", board)
    page = (board / "index.html").read_text()
    assert "GPT-J, random" in page and "unknown (gptj)" in page
    mark = json.loads((board / "verified/gpt-j-random.json").read_text())
    assert mark["difference"] < 1e-9 and mark["date"] in page
    # Other weights under the same name are another model.
    GPTJForCausalLM(GPTJ).save_pretrained(folder)
    done = pretrain(*verify)
    assert done.code == 1 and "The entry is not verified" in done.err

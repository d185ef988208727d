"""`pretrain leaderboard`: an entry is verified by its checkpoint; one changed number is found."""

from __future__ import annotations

import json

from tests.end_to_end.commands import pretrain, succeeds


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
    # The last row is that of sliding windows of 64 tokens.
    for key, value in (("bits_per_byte", 1 - 1e-5), ("seed", 2)):
        entry["records"][-1][key] *= value
        (board / "tiny.json").write_text(json.dumps(entry))
        done = pretrain(*verify)
        assert done.code == 1 and f"sliding by 16 at 64 tokens: {key} = " in done.err
    succeeds("leaderboard", "build", board)
    assert mark["date"] not in (board / "index.html").read_text()
    refused(["leaderboard", "verify", board, "none", run], board / "none.json")

"""What a run is made with: recorded by every attempt and checkpoint, and said when it changes."""

from __future__ import annotations

import json
import shutil

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.tools import show_source
from pretrain.rundir.files import from_json
from pretrain.rundir.jobs import Provenance
from tests.end_to_end.commands import pretrain, sets, succeeds


def test_a_start_says_what_changed_since_the_last_one(workspace, config, run):
    record = run / "attempts/0001/provenance.json"
    first = from_json(Provenance, json.loads(record.read_text()))
    assert first.command[0] and first.num_processes == 1 and first.versions["torch"]
    assert open_checkpoint(run / "checkpoints/step-00000008").origin.provenance == first
    copy = shutil.copytree(run, workspace / "runs/source-copy")
    train = ["train", config, *sets(f"run.directory={copy}")]
    done = succeeds(*train, *sets("train.num_steps=9"))
    assert "step 9/9" in done.err
    shown = show_source(copy)
    assert f"nodes            {first.nodes}\n" in shown and "train.num_steps=9" in shown
    # Into another run: compared with the checkpoint's.
    there = workspace / "runs/there"
    done = pretrain("train", config, "--resume", run, *sets(f"run.directory={there}"))
    assert done.code == 0 and "not made with" not in done.err, done.err

"""No file of a whole run holds a secret of the environment, or one that was given in a URL."""

from __future__ import annotations

import json

from pretrain.config import dump_config
from tests.end_to_end.commands import LAUNCHER, PRETRAIN, explained, forked, sets, succeeded
from tests.unit.test_data_build import config, write_text

SECRET = "c0ffee5ec4e7" * 3 + "cafe"
"""Of the form of W&B's keys, so that wandb takes it."""
URL = f"https://me:{SECRET}@host/run"
ENVIRONMENT = {"WANDB_API_KEY": SECRET, "MY_PASSWORD": SECRET, "X": SECRET, "DATABASE": URL}


def test_no_file_of_a_whole_run_holds_a_password(tmp_path):
    file, run, store = tmp_path / "run.toml", tmp_path / "run", tmp_path / "store"
    write_text(tmp_path)
    file.write_text(dump_config(config(tmp_path)))
    settings = ["train.num_steps=2", "checkpoint.interval_steps=1", "logging.wandb=offline"]
    settings += ["evaluation.lengths=[16]", f"checkpoint.upload_to=file://{store}"]
    train = [*LAUNCHER, "local", file, "--nproc", "1", *sets(*settings)]
    said = ""
    for accepted in (
        [*PRETRAIN, "data", "build", file],
        train,
        [*PRETRAIN, "evaluate", run, "--out", tmp_path / "report/curve.json"],
        [*PRETRAIN, "export", run, tmp_path / "exported"],
    ):
        said += succeeded(forked(accepted, ENVIRONMENT)).text
    for refused in (
        [*train, "--set", f"checkpoint.upload_to={URL}"],
        [*PRETRAIN, "train", file, "--resume", URL],
        [*PRETRAIN, "data", "build", file, "--set", f"data.paths={json.dumps([URL])}"],
        [*PRETRAIN, "checkpoint", "upload", run, "--to", URL],
    ):
        done = forked(refused, ENVIRONMENT)
        explained(done, 2, "secret")
        said += done.text
    assert SECRET not in said
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not [path for path, content in written.items() if SECRET.encode() in content]
    # What was looked at is all that such a run writes.
    names = {str(path.relative_to(tmp_path)).partition("/")[0] for path in written}
    assert {"data", "run", "store", "report", "exported"} <= names
    assert list(run.glob("wandb/offline-run-*/*.wandb")) and list(run.glob("logs/*"))

"""Check `launcher run` where no cluster is needed; tests/slurm/test_run.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.config import EvaluationRequest
from pretrain.launcher import experiment
from pretrain.launcher.site import NO_REQUEST
from pretrain.launcher.slurm import NoSlurm
from pretrain.rundir.jobs import JobRecord, append_job

ROOT = Path(__file__).parents[2]
SITE = 'name = "here"\nnodes = 1\ntasks_per_node = 1\ncpus_per_node = 1\n'


def test_a_run_is_not_waited_for_on_a_machine_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, site = tmp_path / "run", tmp_path / "site.toml"
    run.mkdir()
    append_job(run, JobRecord("7", "train", "run", 1.0, "here", 1, 1, str(run)))
    site.write_text(SITE)
    monkeypatch.setenv("PATH", str(tmp_path))
    # Asked for again and again, it would not come.
    monkeypatch.setattr(experiment, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(experiment, "say", lambda text: pytest.fail(text))
    with pytest.raises(NoSlurm, match="squeue: no such command here"):
        evaluation = EvaluationRequest(None, ("nonoverlapping",), None, None)
        settings = [f"run.directory={run}"]
        experiment.run(ROOT / "configs/demo.toml", settings, site, NO_REQUEST, evaluation)

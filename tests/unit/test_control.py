"""Check what `launcher cancel` and `requeue` say about runs that are not the user's."""

import os

import pytest

from pretrain.config import ConfigError
from pretrain.launcher import control

NOBODY = 65534


@pytest.fixture
def as_nobody(tmp_path):
    """Give this process another user's rights to files."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    for folder in (tmp_path, *tmp_path.parents):
        # Those that pytest makes, one more of them in each of several processes.
        if "pytest-of" in str(folder):
            folder.chmod(0o755)

    def become():
        os.seteuid(NOBODY)

    yield become
    os.seteuid(0)


@pytest.mark.parametrize("hidden", ["jobs.jsonl", "attempts", "launch/launch.json", "."])
@pytest.mark.parametrize("command", [control.requeue, lambda run: control.cancel(run, save=True)])
def test_a_run_that_cannot_be_read_is_not_one_without_jobs(tmp_path, as_nobody, hidden, command):
    run = tmp_path / "run"
    for folder in (run / "attempts", run / "launch"):
        folder.mkdir(parents=True)
    (run / "jobs.jsonl").touch()
    (run / "launch/launch.json").touch()
    (run / hidden).chmod(0)
    as_nobody()
    with pytest.raises(ConfigError) as error:
        command(run)
    assert str(error.value).startswith(f"{run / hidden}: you may not read it")
    assert "by its owner, and by an operator" in str(error.value)

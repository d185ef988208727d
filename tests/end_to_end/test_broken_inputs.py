"""Wrong configs, command lines, layouts and data.

Each is refused with exit code 2 and a message that says what is wrong and what to do, and no file
changes.
"""

from __future__ import annotations

import resource
import sys

from tests.end_to_end.commands import (
    LAUNCHER,
    PRETRAIN,
    explained,
    fresh,
)

# ---- the config ----------------------------------------------------------------------------------
CONFIG_COMMANDS = ["train"], ["data", "build"], ["bench", "methods"]


def test_what_is_wrong_shows_before_torch_is_imported(config, tmp_path):
    """A wrong setting is reported fast, and on a login node without torch.

    The processes are real, and importing torch ends them with code 99.
    """
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import os\nos._exit(99)\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    assert fresh([sys.executable, "-c", "import torch"], environment).code == 99
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    bad = [str(config), "--set", "model.num_layers=two"]
    commands = [[*PRETRAIN, *words, *bad] for words in CONFIG_COMMANDS]
    commands.append([*LAUNCHER, "local", *bad, "--nproc", "2"])
    for command in commands:
        explained(fresh(command, environment), 2, "model.num_layers = 'two'")
    assert fresh([*PRETRAIN, "config", str(config)], environment).code == 0
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time does not depend on what else the machine does. Each command took 0.15 s on the
    # slowest machine seen.
    assert (end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime) / 6 < 1


# ---- data ----------------------------------------------------------------------------------------
def test_data_that_is_not_built(refused, config, run, tmp_path):
    setting = ["--set", f"data.directory={tmp_path}/none"]
    remedy = (
        f"{tmp_path}/none/train/manifest.json",
        "no finished data set",
        "`pretrain data build CONFIG`",
    )
    refused(["train", config, *setting], *remedy)
    refused(["data", "verify", config, *setting], *remedy)
    refused(
        ["evaluate", run, *setting],
        f"{tmp_path}/none/validation/manifest.json",
        "`pretrain data build CONFIG`",
    )
    assert not (tmp_path / "none").exists()

"""Wrong configs, command lines, layouts and data.

Each is refused with exit code 2 and a message that says what is wrong and what to do, and no file
changes.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import (
    LAUNCHER,
    PRETRAIN,
    ROOT,
    explained,
    fresh,
    replace,
    sets,
    succeeds,
)


@pytest.fixture
def data_copy(tiny_data: Path, tmp_path: Path) -> Path:
    """A copy of the data set made of hard links, whose files may be replaced but not written to."""
    return Path(shutil.copytree(tiny_data, tmp_path / "data", copy_function=os.link))


# ---- the config ----------------------------------------------------------------------------------
CONFIG_COMMANDS = {
    "config": ["config"],
    "train": ["train"],
    "data build": ["data", "build"],
    "data verify": ["data", "verify"],
    "bench train": ["bench", "train"],
    "bench methods": ["bench", "methods"],
}


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
    commands = [[*PRETRAIN, *CONFIG_COMMANDS[name], *bad] for name in CONFIG_COMMANDS]
    commands.append([*LAUNCHER, "local", *bad, "--nproc", "2"])
    for command in commands:
        explained(fresh(command, environment), 2, "model.num_layers = 'two'")
    assert fresh([*PRETRAIN, "config", str(config)], environment).code == 0
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time does not depend on what else the machine does. Each command took 0.15 s on the
    # slowest machine seen.
    assert (end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime) / 9 < 1


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


def test_the_tokenizer_of_another_data_set(refused, config, run, data_copy, tmp_path):
    settings = [
        "data.source=text",
        f'data.paths=["{ROOT}/LICENSE"]',
        f"data.directory={tmp_path}/other",
        "data.validation_fraction=0.3",
    ]
    succeeds("data", "build", config, *sets(*settings))
    replace(data_copy / "tokenizer.model", (tmp_path / "other/tokenizer.model").read_bytes())
    setting = ["--set", f"data.directory={data_copy}"]
    words = f"{data_copy}/tokenizer.model: wrong tokenizer", "SHA-256", "Restore it"
    for command in (
        ["train", config],
        ["evaluate", run],
        ["data", "verify", config],
        ["data", "build", config],
    ):
        refused([*command, *setting], *words)

"""A workspace like a user's: a config file, a built data set and a directory of runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.commands import contents, explained, pretrain, succeeds

CONFIG = """
[run]
directory = "{folder}/runs/alibi"

[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
make_vocab_size_divisible_by = 64

[batch]
micro_batch_size = 4
global_batch_size = 8

[data]
directory = "{data}"
source = "shakespeare"
sequence_length = 32
vocab_size = 512
tokens_per_block = 4096
tokens_per_shard = 500_000
tokenizer_training_bytes = 500_000

[optimizer]
learning_rate = 1e-3

[schedule]
lr_decay_style = "constant"

[train]
num_steps = 8

[checkpoint]
interval_steps = 4

[evaluation]
interval_steps = 4
lengths = [32, 64]
max_tokens = 2048

[logging]
interval_steps = 2
wandb = "disabled"
tensorboard = false
"""


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """A folder with run.toml, whose data set is built and whose runs go to runs/."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "run.toml").write_text(CONFIG.format(folder=folder, data=tiny_data))
    return folder


@pytest.fixture(scope="session")
def config(workspace: Path) -> Path:
    return workspace / "run.toml"


@pytest.fixture(scope="session")
def run(workspace: Path, config: Path) -> Path:
    """A run of 8 steps with checkpoints after 4 and 8."""
    succeeds("train", config)
    return workspace / "runs/alibi"


@pytest.fixture
def refused(workspace: Path) -> Callable[..., None]:
    """Return refused(arguments, *words), which checks that a command is refused.

    It exits with code 2, its message contains the words, and the workspace does not change.
    """

    def check(arguments: list[object], *words: object) -> None:
        before = contents(workspace)
        explained(pretrain(*arguments), 2, *words)
        assert contents(workspace) == before

    return check


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of so many bytes as the test's module says."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={request.module.DISK_BYTES}"]
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if not mounted or subprocess.run(["mount", *options, "none", str(folder)]).returncode:
        pytest.skip("a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)

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
    contents,
    explained,
    flip,
    forked,
    fresh,
    pretrain,
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
# What the messages say is tests/unit/test_messages.py's.
SETTINGS = {
    "model.num_layer=2": ["model.num_layer: no such key", "did you mean model.num_layers?"],
    "model.num_layers=two": ["model.num_layers = 'two'", "valid integer"],
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrong_setting(refused, config, setting):
    refused(["train", config, "--set", setting], *SETTINGS[setting])


FILES: dict[str, tuple[bytes | None, list[str]]] = {
    "missing.toml": (None, ["no such config file"]),
    "torn.toml": (b"[model\nnum_layers = 2", ["not a readable config file", "line 1"]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_config_file_that_cannot_be_read(tmp_path, name):
    content, words = FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    explained(pretrain("train", tmp_path / name), 2, f"error: {tmp_path / name}: ", *words)


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


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["evaluate"], "RUN|CHECKPOINT"),
        (["trane"], "trane"),
        (["train", "configs/demo.toml", "--allow-changed", "foo"], "no such key; there are run, "),
    ],
)
def test_a_wrong_command_line(arguments, word):
    done = pretrain(*arguments)
    assert done.code == 2 and word in done.err, done.text
    assert "Traceback" not in done.text


# ---- layouts -------------------------------------------------------------------------------------
def test_processes_that_cannot_share_a_run(workspace, config):
    before = contents(workspace)
    done = forked([*LAUNCHER, "local", str(config), "--nproc", "3"])
    explained(
        done,
        2,
        "batch.global_batch_size = 8: not divisible by",
        "3 data-parallel ranks",
        "Choose a multiple",
    )
    assert contents(workspace) == before


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


def test_a_truncated_shard(refused, config, run, data_copy):
    setting = ["--set", f"data.directory={data_copy}"]
    for split in ("train", "validation"):
        shard = sorted((data_copy / split).glob("shakespeare-*.tar"))[-1]
        whole = shard.read_bytes()
        replace(shard, whole[:-512])
        words = (
            f"{shard}: truncated: {len(whole) - 512} bytes found, {len(whole)} expected",
            "Restore it",
        )
        for command in (["train", config], ["data", "verify", config], ["data", "build", config]):
            refused([*command, *setting], *words)
        if split == "validation":
            refused(["evaluate", run, *setting], *words)
        replace(shard, whole)
    succeeds("data", "verify", config, *setting)


def test_a_missing_file_of_the_data(refused, config, data_copy):
    name = "train/shakespeare-000003.tar"
    (data_copy / name).unlink()
    refused(
        ["train", config, "--set", f"data.directory={data_copy}"],
        data_copy / name,
        "data build CONFIG",
    )


def test_a_flipped_bit_in_the_data(refused, config, data_copy):
    setting = ["--set", f"data.directory={data_copy}"]
    shard = data_copy / "train/shakespeare-000005.tar"
    checksums = data_copy / "validation/checksums.bin"
    flip(shard)
    refused(
        ["data", "verify", config, *setting], f"{shard}: damaged: its XXH3-128 is", "Restore it"
    )
    flip(shard)
    flip(checksums)
    refused(["data", "verify", config, *setting], f"{checksums}: damaged", "Restore it")


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

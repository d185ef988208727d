"""A torch that was not built for a GPU is refused before training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pretrain import platform
from pretrain.config import ConfigError


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80"], [8, 6], True),
        (["sm_80", "compute_80"], [9, 0], True),
        (["compute_90"], [8, 0], False),
        (["sm_90a"], [9, 0], True),
        (["sm_100f"], [10, 3], True),
        (["sm_75", "sm_80", "sm_90"], [7, 0], False),
    ],
)
def test_what_a_build_of_torch_runs_on(architectures, capability, runs):
    assert platform.is_supported(architectures, capability) is runs


def test_a_machine_with_gpus_that_torch_cannot_use_does_not_train_on_its_cpu(tmp_path, monkeypatch):
    if platform.has_cuda():
        pytest.skip("torch can use this machine's GPUs")
    platform.check_build()
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(platform, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="cannot use this machine's NVIDIA GPUs"):
        platform.check_build()
    # Someone who hides the GPUs wants the CPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    platform.check_build()
    # A machine may have the driver's control files without a GPU.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia0").rename(tmp_path / "nvidiactl")
    platform.check_build()


def test_what_triton_builds_its_launches_with(tmp_path, monkeypatch):
    """Triton itself, which builds the same way on a machine without a GPU, is the judge."""
    build = pytest.importorskip("triton.runtime.build")._build
    source = tmp_path / "launch.c"
    source.write_text("#include <Python.h>\n")

    def builds() -> bool:
        try:
            return Path(build("launch", str(source), str(tmp_path), [], [], [], [])).exists()
        except (RuntimeError, OSError, subprocess.CalledProcessError):
            return False

    assert (platform.lacking_for_triton() is None) == builds()
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert platform.lacking_for_triton() == f"a C compiler ({tmp_path / 'cc'})" and not builds()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert platform.lacking_for_triton() == "a C compiler (gcc or clang)" and not builds()


# In a process of its own, in which nothing has been imported and no group made.
PROCESS = """
import os, torch
asked = torch.cuda.is_available
def is_available():
    print("queues", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    return asked()
torch.cuda.is_available = is_available
from pretrain import platform
platform.check_build()
platform.prepare(0)
from pretrain import topology
from pretrain.config import load_config
config = load_config("configs/demo.toml")
for _ in range(4):
    topology.initialize(config)
    print("threads", len(os.listdir("/proc/self/task")))
"""


def test_a_new_process_sets_the_hardware_queues_and_closes_the_groups_of_a_layout():
    """The number of queues is set before anything can start CUDA.

    A process that sets up one layout after the other keeps no group of the former ones.
    """
    command = [sys.executable, "-W", "ignore", "-c", PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = [line.split() for line in done.stdout.splitlines()]
    assert {value for what, value in said if what == "queues"} == {"1"}
    first, *others = (value for what, value in said if what == "threads")
    assert others == [first] * 3

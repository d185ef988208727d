"""A torch that was not built for a GPU is refused before training."""

from __future__ import annotations

import pytest

from pretrain import platform
from pretrain.config import ConfigError
from pretrain.config.errors import is_supported


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80"], [8, 0], True),
        (["sm_80"], [8, 6], True),
        (["sm_86"], [8, 0], False),
        (["sm_80", "compute_80"], [9, 0], True),
        (["compute_90"], [8, 0], False),
        (["sm_90a"], [9, 0], True),
        (["sm_100f"], [10, 3], True),
        (["sm_75", "sm_80", "sm_90"], [7, 0], False),
        ([], [8, 0], False),
    ],
)
def test_what_a_build_of_torch_runs_on(architectures, capability, runs):
    assert is_supported(architectures, capability) is runs


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

"""A torch that was not built for a GPU is refused before a job is sent and before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain import platform
from pretrain.config import ConfigError
from pretrain.config.errors import is_supported
from pretrain.launcher.site import Site, parse_site
from pretrain.launcher.submit import check_build

SITE = {"name": "there", "nodes": 4, "gpus_per_node": 8, "cpus_per_node": 40, "gpu": "V100"}


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


def site(folder: Path, *printed: str, **changes: object) -> Site:
    """Return a site of V100s whose Python prints these lines, whatever it is asked."""
    python = folder / "python"
    lines = "".join(f"echo '{line}'\n" for line in printed)
    python.write_text(f"#!/bin/sh\n{lines}")
    python.chmod(0o755)
    values = {"gpu_compute_capability": "7.0", "python": str(python), **SITE, **changes}
    return parse_site(values, "site.toml")


def test_a_build_without_the_sites_gpu_is_refused(tmp_path):
    check_build(site(tmp_path, "2.13.0+cu126", "sm_70 sm_80 sm_90"))
    with pytest.raises(ConfigError) as caught:
        check_build(site(tmp_path, "the greeting of a module", "2.13.0+cu130", "sm_75 sm_80 sm_90"))
    message = str(caught.value)
    assert message.startswith("gpu_compute_capability = 7.0: V100 has compute capability 7.0, and")
    for part in ("torch is built for sm_75, sm_80, sm_90", "2.13.0+cu130", str(tmp_path)):
        assert part in message


def test_what_cannot_be_asked_is_left_to_the_job(tmp_path, capsys):
    check_build(site(tmp_path, "Segmentation fault"))
    check_build(site(tmp_path, python=str(tmp_path / "missing")))
    said = capsys.readouterr().err
    assert said.count("warning: ") == 2 and "The job's preflight will" in said
    # Without the key, and for a container, nothing is asked.
    check_build(site(tmp_path, "2.13.0", "", gpu_compute_capability=None))
    check_build(site(tmp_path, "2.13.0", "", container=["apptainer", "exec", "image.sif"]))
    assert capsys.readouterr().err == ""


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

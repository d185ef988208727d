"""Run the tests of this folder under a second version of Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT
from tests.slurm.cluster import PREFIX

HOUR_SECONDS = 3600


@pytest.mark.torture
@pytest.mark.timeout(2 * HOUR_SECONDS)
@pytest.mark.skipif(PREFIX is not None, reason="these tests run under another version already")
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("apt-get"), reason="building Slurm needs root and apt"
)
def test_all_of_these_tests_pass_under_a_later_slurm(tmp_path: Path) -> None:
    """Slurm 24.11 where apt has Debian's mirror, whatever version is installed."""
    prefix = tmp_path / "slurm"
    script = ROOT / "tests/slurm/build_slurm.sh"
    subprocess.run([script, prefix], check=True, timeout=HOUR_SECONDS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", ROOT / "tests/slurm"],
        env=os.environ | {"SLURM_PREFIX": str(prefix)},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout

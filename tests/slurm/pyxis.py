"""Build the tests' own pyxis (pyxis.c), and make the options with which a run starts in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.commands import ROOT

SOURCE = Path(__file__).with_name("pyxis.c")
PACKAGES = "g++ libslurm-dev"
IMAGE = "nvcr.io#nvidia/pytorch:24.01-py3"
"""An image in which pyxis sets torchrun's variables, as in all PyTorch images of NVIDIA."""


def build(folder: Path, include: Path | None) -> str | None:
    """Compile pyxis.c and write the plugstack.conf that loads it.

    Args:
        folder: Where slurm.conf is; gets pyxis.so and plugstack.conf.
        include: Where Slurm's headers are, if the compiler does not look there by itself.

    Returns:
        Why it cannot be compiled here, or None.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return f"no C compiler (Debian: apt-get install {PACKAGES})"
    options = [f"-I{include}"] if include else []
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", *options, "-o", folder / "pyxis.so", SOURCE],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"{done.stderr.splitlines()[0]} (Debian: apt-get install {PACKAGES})"
    (folder / "plugstack.conf").write_text(f"required {folder}/pyxis.so\n")
    return None


def options(*folders: Path, image: str = IMAGE) -> list[str]:
    """Return srun's options for a container that sees this project, its Python and `folders`.

    The first of `folders` is the working directory.
    """
    seen = dict.fromkeys(map(str, (ROOT, sys.prefix, sys.base_prefix, *folders)))
    mounts = ",".join(f"{path}:{path}" for path in seen)
    return [
        f"--container-image={image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={folders[0] if folders else ROOT}",
    ]

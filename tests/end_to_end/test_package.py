"""Install the project as a user does: use it away from its clone, and beside a package `kernels`.

A wheel is built from a copy of the clone and installed into a fresh environment, which sees the
libraries of this one but neither the clone nor its editable install.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, TIMEOUT_SECONDS, Done, succeeded

# What `pip` reads of a clone. Copied without caches, and with the links of pretrain/ as links.
SOURCES = ("pretrain", "kernels", "launcher", "configs", "slurm")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Environment:
    """A virtual environment in which a wheel of the project is installed."""

    folder: Path
    clone: Path
    wheel: Path

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def run(self, command: Sequence[str | Path], cwd: Path) -> Done:
        """Run a program of the environment with none of this process's variables.

        PATH holds the environment alone, so that Slurm's commands are absent as on a laptop.
        """
        program, *arguments = map(str, command)
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=cwd,
            env={"PATH": str(self.folder / "bin"), "HOME": str(cwd), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment with a wheel that was built from a clean copy of the clone."""
    folder = tmp_path_factory.mktemp("package")
    clone = copy_of_the_clone(folder / "clone")
    built = pip("wheel", clone, "--no-build-isolation", "--wheel-dir", folder / "wheels")
    assert built.returncode == 0, built.stderr
    [wheel] = (folder / "wheels").glob("*.whl")

    environment = Environment(folder / "environment", clone, wheel)
    create = [sys.executable, "-m", "venv", "--without-pip", str(environment.folder)]
    subprocess.run(create, check=True, timeout=TIMEOUT_SECONDS)
    answer = pip("install", wheel, python=environment.folder / "bin/python")
    assert answer.returncode == 0, answer.stderr
    # A line of a .pth file adds a folder to sys.path. Python does not read the .pth files in that
    # folder, and it is one of them through which an editable install of the clone would be found.
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (environment.site_packages / "libraries.pth").write_text("\n".join(sorted(libraries)) + "\n")
    return environment


def copy_of_the_clone(to: Path) -> Path:
    """Copy what pip reads of the clone, and add files of a user's that a wheel must not hold."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=ignored)
    for name in PROJECT_FILES:
        shutil.copy(ROOT / name, to / name)
    # The README tells users to make slurm/site.toml, which names their account.
    (to / "slurm/site.toml").write_text('name = "private"\n')
    (to / "configs/notes.txt").write_text("private\n")
    return to


def pip(
    command: str, *arguments: str | Path, python: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pip without network, for the environment of `python` or for this one."""
    words = ["--python", str(python)] if python else []
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            *words,
            command,
            *map(str, arguments),
            "--no-deps",
            "--no-index",
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


# ---- the wheel -----------------------------------------------------------------------------------
def shipped(clone: Path) -> Iterator[str]:
    """Yield the name in a wheel of every file that belongs there, from its place in a clone."""
    for name in SOURCES:
        inside = "pretrain" if name == "pretrain" else f"pretrain/{name}"
        for path in (clone / name).rglob("*"):
            relative = path.relative_to(clone / name).as_posix()
            is_code = path.suffix in (".py", ".jinja", ".css")
            is_code = is_code or relative in ("py.typed", "study/published.toml")
            is_config = name == "configs" and path.suffix == ".toml"
            is_site = name == "slurm" and re.fullmatch(r"job\.sbatch|site\.\w+\.toml", relative)
            # rglob does not follow the links in pretrain/, so it finds each file once.
            if is_code or is_config or is_site:
                yield f"{inside}/{relative}"


def test_the_wheel_holds_one_package_with_its_data(installed):
    names = zipfile.ZipFile(installed.wheel).namelist()
    ours = [name for name in names if not name.split("/")[0].endswith(".dist-info")]
    assert sorted(ours) == sorted(shipped(installed.clone))
    assert {name.split("/")[0] for name in ours} == {"pretrain"}
    for name in ("py.typed", "configs/demo.toml", "slurm/job.sbatch", "slurm/site.v100.toml"):
        assert f"pretrain/{name}" in ours


def test_nothing_of_the_clone_is_used_by_the_installed_package(installed, tmp_path):
    modules = (
        "pretrain",
        "pretrain.kernels.dispatch",
        "pretrain.launcher.cli",
        "pretrain.cli.commands",
    )
    imports = "\n".join(f"import {module}; print({module}.__file__)" for module in modules)
    done = succeeded(installed.run(["python", "-c", imports], tmp_path))
    paths = [Path(line) for line in done.out.splitlines()]
    assert len(paths) == 4 and all(installed.site_packages in path.parents for path in paths)


# ---- the commands, away from the clone -----------------------------------------------------------
@pytest.fixture(scope="module")
def listed(installed: Environment) -> list[Path]:
    done = succeeded(installed.run(["pretrain", "config", "--list"], installed.wheel.parent))
    return [Path(line.strip()) for line in done.out.splitlines() if line.endswith(".toml")]


def test_the_shipped_configs_and_sites_are_found(installed, listed):
    package = installed.site_packages / "pretrain"
    assert {p.relative_to(package).as_posix() for p in listed} == {
        name.removeprefix("pretrain/")
        for name in shipped(installed.clone)
        if name.endswith(".toml") and not name.startswith("pretrain/study/")
    }
    # From the clone's root they have the names that the README uses.
    done = installed.run(["python", "-m", "pretrain", "config", "--list"], installed.clone)
    assert "  configs/demo.toml\n" in done.out and "  slurm/site.v100.toml\n" in done.out


def test_a_shipped_config_is_shown(installed, listed, tmp_path):
    [demo] = [path for path in listed if path.match("configs/demo.toml")]
    done = succeeded(installed.run(["pretrain", "config", demo], tmp_path))
    assert 'directory = "runs/demo/alibi"' in done.out and "# parameters" in done.out
    assert not list(tmp_path.iterdir())


def test_a_shipped_config_makes_a_job_on_a_shipped_site(installed, listed, tmp_path):
    """The published run on its 16 nodes of 8 V100s, from another directory and without Slurm."""
    paths = {f"{path.parent.name}/{path.name}": path for path in listed}
    config, site = paths["cc100_roberta/alibi_1024.toml"], paths["slurm/site.v100.toml"]
    done = succeeded(
        installed.run(["launcher", "submit", config, "--site", site, "--dry-run"], tmp_path)
    )
    assert "16 nodes x 8 ranks = tensor 1 x pipeline 1 x data 128" in done.out
    assert f"cd -- {tmp_path} || {{\n" in done.out
    python = installed.folder / "bin/python"
    assert f"set -- {python} -m pretrain.launcher attempt {tmp_path}/runs/" in done.out
    assert "not asked: sbatch: no such command" in done.out
    assert not list(tmp_path.iterdir())


def test_the_version_is_the_wheels(installed, tmp_path):
    done = installed.run(["pretrain", "--version"], tmp_path)
    assert done == (0, f"pretrain {installed.wheel.name.split('-')[1]}\n", "")


# ---- beside Hugging Face's package `kernels` -----------------------------------------------------
@pytest.fixture
def hugging_face_kernels(installed: Environment) -> Iterator[Path]:
    """A distribution named `kernels`, as Hugging Face's, installed in the environment for one test.

    It offers every name that transformers imports from it, and a version that transformers takes.
    """
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    # A folder of its own on sys.path, after ours, so that a `kernels` that we installed would win.
    folder = installed.folder / "hugging_face"
    package = folder / "kernels"
    metadata = folder / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text(
        "from unittest.mock import MagicMock\n"
        "get_kernel = MagicMock(name='get_kernel')\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        "    return globals().setdefault(name, MagicMock(name=name))\n"
    )
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
    )
    (installed.site_packages / "hugging_face.pth").write_text(f"{folder}\n")
    yield package
    (installed.site_packages / "hugging_face.pth").unlink()
    shutil.rmtree(folder)


USES_KERNELS = """
import json, kernels
from transformers import BloomForCausalLM
from transformers.integrations import hub_kernels
from transformers.utils import is_kernels_available
import pretrain.kernels.dispatch

print(json.dumps({
    "kernels": kernels.__file__,
    "available": is_kernels_available(),
    "transformers uses theirs": hub_kernels.get_kernel_hub is kernels.get_kernel,
    "ours": pretrain.kernels.dispatch.__name__,
}))
"""


def test_transformers_gets_hugging_faces_kernels_in_the_clone(installed, hugging_face_kernels):
    """Python puts the clone's root first on sys.path here, and with it our folder kernels/."""
    done = succeeded(installed.run(["python", "-c", USES_KERNELS], installed.clone))
    assert json.loads(done.out.splitlines()[-1]) == {
        "kernels": str(hugging_face_kernels / "__init__.py"),
        "available": True,
        "transformers uses theirs": True,
        "ours": "pretrain.kernels.dispatch",
    }

"""The recipes for images: what they copy is what an install needs, the same in both."""

from __future__ import annotations

import re
import subprocess

from tests.changed import ROOT
from tests.end_to_end.test_package import PROJECT_FILES, SOURCES

FOLDER = ROOT / "containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
DEFINITION = (FOLDER / "pretrain.def").read_text()


def copied_by_docker() -> set[str]:
    """Return the files and folders that the Dockerfile copies into /src."""
    found = set()
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        *sources, target = line.split()
        # A folder's contents go into the folder that is named; files go into /src/.
        assert target == "/src/" or [target] == [f"/src/{name}" for name in sources]
        found |= set(sources)
    return found


def copied_by_apptainer() -> set[str]:
    files = re.search(r"^%files\n(.*?)\n\n", DEFINITION, re.MULTILINE | re.DOTALL)
    assert files is not None
    lines = [line.split() for line in files[1].splitlines()]
    assert all(target == "/src/" for _, target in lines)
    return {source for source, _ in lines}


def test_both_recipes_copy_what_an_install_needs():
    needed = {*SOURCES, *PROJECT_FILES, "constraints.txt", "constraints-v100.txt", "containers"}
    assert copied_by_docker() == copied_by_apptainer() == needed
    assert all((ROOT / name).exists() for name in needed)


def test_both_start_from_one_image_and_run_one_script():
    (image,) = re.findall(r"^FROM (\S+)$", DOCKERFILE, re.MULTILINE)
    (same,) = re.findall(r"^From: (\S+)$", DEFINITION, re.MULTILINE)
    assert image == same
    script = "/src/containers/install.sh"
    assert f"RUN {script} " in DOCKERFILE and f"    {script} " in DEFINITION
    assert (FOLDER / "install.sh").stat().st_mode & 0o111
    subprocess.run(["sh", "-n", FOLDER / "install.sh"], check=True)

"""The rooms of the house: imports go down only, and the environment is read in three places alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A room may import rooms of a lower floor, itself, and what is listed beside it.
FLOORS = [
    {"kernels", "pretrain.config"},
    {"pretrain.attempts"},
    {"pretrain.platform"},
    {"pretrain.topology"},
    {"pretrain.model", "pretrain.data"},
    {"pretrain.optim", "pretrain.checkpoint"},
    {"pretrain.train", "pretrain.evaluate", "pretrain.export"},
    {"pretrain.study"},
    {"pretrain.cli"},
    {"pretrain.__main__"},
]
BESIDE = {
    "pretrain.checkpoint": {"pretrain.optim"},  # saves and loads what the optimizer holds
    "pretrain.train": {"pretrain.evaluate"},  # evaluates in the loop
    "pretrain.export": {"pretrain.evaluate"},  # puts the length curve on the model card
}
READS_ENVIRONMENT = ("pretrain/platform.py", "pretrain/topology.py", "launcher/")
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """'pretrain.model.gpt' -> 'pretrain.model', 'launcher.local' -> 'launcher'."""
    return ".".join(module.split(".")[:2]) if module.startswith("pretrain.") else module.split(".")[0]


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(p for package in ("pretrain", "launcher", "kernels") for p in root.glob(f"{package}/**/*.py")):
        yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path


def imported(module: str, path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, inside functions too; `from pretrain import model` is pretrain.model."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def may_import(room: str, target: str) -> bool:
    if room == target or target in BESIDE.get(room, ()):
        return True
    if room == "launcher":
        return target in ("pretrain.config", "pretrain.attempts")
    return target in FLOOR and FLOOR[target] < FLOOR[room]


def wrong_imports(root: Path) -> list[str]:
    wrong = []
    for module, path in modules(root):
        room = room_of(module)
        if room not in {*FLOOR, "launcher", "pretrain"}:
            wrong.append(f"{path.relative_to(root)}: a new room; give it its floor in FLOORS")
            continue
        for line, name in imported(module, path, ast.parse(path.read_text())):
            target = room_of(name)
            ours = target.split(".")[0] in ("pretrain", "launcher", "kernels")
            if ours and (room == "pretrain" or not may_import(room, target)):
                wrong.append(f"{path.relative_to(root)}:{line}: {room} imports {target}")
    return list(dict.fromkeys(wrong))  # `from x import a, b` is one mistake


def environment_reads(root: Path) -> list[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    reads = []
    for _, path in modules(root):
        relative = path.relative_to(root).as_posix()
        if relative.startswith(READS_ENVIRONMENT):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            attribute = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and node.attr in names
            taken = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
            if attribute or taken:
                reads.append(f"{relative}:{node.lineno}: {ast.unparse(node)}")
    return reads


def test_imports_go_down_only():
    assert wrong_imports(ROOT) == []


def test_the_environment_is_read_in_three_places_alone():
    assert environment_reads(ROOT) == []


@pytest.mark.parametrize(
    ("file", "code", "says"),
    [
        ("pretrain/model/gpt.py", "from pretrain.train.loop import run", "pretrain.model imports pretrain.train"),
        ("pretrain/model/gpt.py", "from pretrain.data import order", "pretrain.model imports pretrain.data"),
        (
            "pretrain/config/load.py",
            "def f():\n    import pretrain.platform",
            "pretrain.config imports pretrain.platform",
        ),
        ("pretrain/optim/zero.py", "from pretrain import train", "pretrain.optim imports pretrain.train"),
        ("pretrain/evaluate/perplexity.py", "from ..train import step", "pretrain.evaluate imports pretrain.train"),
        ("pretrain/train/loop.py", "from pretrain.export import parity", "pretrain.train imports pretrain.export"),
        (
            "pretrain/optim/zero.py",
            "from pretrain.checkpoint import a, b",
            "pretrain.optim imports pretrain.checkpoint",
        ),
        ("kernels/dispatch.py", "from pretrain.config import RunConfig", "kernels imports pretrain.config"),
        ("pretrain/attempts/lock.py", "from pretrain import topology", "pretrain.attempts imports pretrain.topology"),
        ("pretrain/topology.py", "import launcher.local", "pretrain.topology imports launcher"),
        ("launcher/cli.py", "from pretrain.platform import device", "launcher imports pretrain.platform"),
        ("launcher/cli.py", "from pretrain import model", "launcher imports pretrain.model"),
        ("pretrain/__init__.py", "from pretrain.config import RunConfig", "pretrain imports pretrain.config"),
        ("pretrain/attic/box.py", "", "a new room"),
    ],
)
def test_a_way_up_is_found(tmp_path, file, code, says):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    [found] = wrong_imports(tmp_path)
    assert found.startswith(file) and says in found


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("pretrain/train/hooks.py", "from pretrain.evaluate import perplexity\nfrom ..config import RunConfig"),
        ("pretrain/export/parity.py", "from pretrain.evaluate.perplexity import evaluate\nimport kernels.dispatch"),
        ("pretrain/cli.py", "import os\nimport torch\nfrom pretrain.study import run"),
        (
            "launcher/cli.py",
            "from launcher import local\nfrom pretrain import attempts\nfrom pretrain.config import load_config",
        ),
        ("pretrain/model/gpt.py", "from . import positions\nfrom .positions import make"),
    ],
)
def test_a_way_down_is_allowed(tmp_path, file, code):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert wrong_imports(tmp_path) == []


@pytest.mark.parametrize(
    "code",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.getenv('A')",
        "from os import environ",
        "from os import getenv",
    ],
)
def test_a_read_of_the_environment_is_found(tmp_path, code):
    (tmp_path / "pretrain/data").mkdir(parents=True)
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher/local.py").write_text(code)
    assert environment_reads(tmp_path) == []
    (tmp_path / "pretrain/data/loader.py").write_text(code)
    assert len(environment_reads(tmp_path)) == 1


@pytest.mark.parametrize(
    "module", ["pretrain.config", "pretrain.attempts", "launcher.cli", "launcher.srun", "pretrain.model.flops"]
)
def test_light_modules_leave_torch_alone(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

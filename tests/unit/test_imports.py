"""The rooms of the house: imports go down, never in a circle; four places read the environment."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A room may import rooms of a lower floor, itself, and what is listed for it in BESIDE.
FLOORS = [
    {"pretrain.lean_imports"},
    {"pretrain"},
    {"pretrain.interrupt"},
    {"pretrain.kernels", "pretrain.config"},
    {"pretrain.positions"},
    {"pretrain.rundir"},
    {"pretrain.processes", "pretrain.platform"},
    {"pretrain.topology"},
    {"pretrain.model", "pretrain.data"},
    {"pretrain.optim", "pretrain.checkpoint"},
    {"pretrain.training", "pretrain.evaluation", "pretrain.huggingface"},
    {"pretrain.bench", "pretrain.plan"},
    {"pretrain.study"},
    {"pretrain.cli", "pretrain.library"},
    {"pretrain.__main__"},
]
BESIDE = {
    "pretrain.config": {"pretrain.positions"},  # [position] is an instance of the method's class
    "pretrain.checkpoint": {"pretrain.optim"},  # saves and loads what the optimizer holds
    "pretrain.training": {"pretrain.evaluation"},  # evaluates in the loop
    "pretrain.huggingface": {"pretrain.evaluation"},  # puts the length curve on the model card
}
APART = {
    "pretrain.optim.optimizers": "pretrain.config"
}  # its classes are the sections [optimizer] of a config
# The launcher has floors of its own, and of ours uses LAUNCHER_USES alone.
LAUNCHER = "pretrain.launcher"
LAUNCHER_USES = {"pretrain.config", "pretrain.rundir", "pretrain.interrupt"}
LAUNCHER_FLOORS = [
    {f"{LAUNCHER}.{name}" for name in names.split()}
    for names in (
        "terminal slurm site",
        "supervise status",
        "ranks look submit",
        "evaluations preflight",
        "job control sweep experiment",
        "cli",
        "main",
        "__main__",
    )
]
LINKED = ("kernels", "launcher")  # folders at the top level, which pretrain/ links to
READS_ENVIRONMENT = (
    "pretrain/platform.py",
    "pretrain/topology.py",
    "launcher/",
    # Which of an array's jobs this one is, Slurm says there alone.
    "pretrain/data/build/__main__.py",
    # $VARIABLE in a path, which the user wrote; nothing is read that no config names.
    "pretrain/config/toml.py",
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LAUNCHER_FLOOR = {room: number for number, rooms in enumerate(LAUNCHER_FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """'pretrain.model.gpt' -> 'pretrain.model'; of the launcher one part more."""
    for apart, room in APART.items():
        if module == apart or module.startswith(f"{apart}."):
            return room
    parts = module.split(".")
    return ".".join(parts[: 3 if module.startswith(f"{LAUNCHER}.") else 2])


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """(module, file) of every file of ours, each once; links are not followed."""
    for folder in ("pretrain", *LINKED):
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            if relative.parts[0] == "pretrain" and relative.parts[1] in LINKED:
                continue
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            yield name if folder == "pretrain" else f"pretrain.{name}", path


def walk(node: ast.AST, types: bool) -> Iterator[ast.AST]:
    """Every node; without `types`, not what stands below `if TYPE_CHECKING:`."""
    yield node
    if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        yield from walk(child, types)


def imported(
    module: str, path: Path, tree: ast.AST, types: bool = True
) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions; `types`: for types alone, too."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in walk(tree, types):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def may_import(room: str, target: str) -> bool:
    if room == target or target in BESIDE.get(room, ()):
        return True
    if room in LAUNCHER_FLOOR:
        if target in LAUNCHER_FLOOR:
            # Modules of the lowest floor may use each other; circles are a test of their own.
            low = LAUNCHER_FLOOR[target] < LAUNCHER_FLOOR[room]
            return low or LAUNCHER_FLOOR[target] == LAUNCHER_FLOOR[room] == 0
        return target in LAUNCHER_USES
    return room in FLOOR and target in FLOOR and FLOOR[target] < FLOOR[room]


def wrong_imports(root: Path) -> list[str]:
    wrong = []
    for module, path in modules(root):
        room = room_of(module)
        if room not in {*FLOOR, *LAUNCHER_FLOOR, "pretrain", LAUNCHER}:
            wrong.append(f"{path.relative_to(root)}: a new room; give it its floor in FLOORS")
            continue
        # `import pretrain` has the names of the library, which it imports when one is used.
        types = module != "pretrain"
        for line, name in imported(module, path, ast.parse(path.read_text()), types):
            target = room_of(name)
            if target.split(".")[0] in LINKED:
                wrong.append(
                    f"{path.relative_to(root)}:{line}: imports {name}, not pretrain.{name}"
                )
            elif target.split(".")[0] == "pretrain" and not may_import(room, target):
                wrong.append(f"{path.relative_to(root)}:{line}: {room} imports {target}")
    return list(dict.fromkeys(wrong))  # `from x import a, b` is one mistake


def circles(root: Path) -> list[str]:
    """A circle of imports between modules, if there is one; inside functions too."""
    known = dict(modules(root))
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        names = [name for _, name in imported(module, path, tree, types=False)]
        # `from a.b import c` is the module a.b.c, or a name in a.b.
        targets = {name if name in known else name.rpartition(".")[0] for name in names}
        # A package that gathers its modules' names is not part of what they import.
        graph[module] = {t for t in targets & known.keys() if known[t].name != "__init__.py"}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def environment_reads(root: Path) -> list[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    names |= {"expandvars"}
    reads = []
    for _, path in modules(root):
        relative = path.relative_to(root).as_posix()
        if relative.startswith(READS_ENVIRONMENT):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            attribute = (
                isinstance(node, ast.Attribute)
                and ast.unparse(node.value) in ("os", "os.path")
                and node.attr in names
            )
            taken = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and names & {a.name for a in node.names}
            )
            if attribute or taken:
                reads.append(f"{relative}:{node.lineno}: {ast.unparse(node)}")
    return reads


def test_every_room_that_is_named_exists():
    rooms = {room_of(module) for module, _ in modules(ROOT)}
    assert {*FLOOR, *LAUNCHER_FLOOR} <= rooms


def test_imports_go_down_only():
    assert wrong_imports(ROOT) == []


def test_no_module_imports_itself_through_others():
    assert circles(ROOT) == []


def test_four_places_read_the_environment():
    assert environment_reads(ROOT) == []


def write(root: Path, file: str, code: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)


@pytest.mark.parametrize(
    ("file", "code", "says"),
    [
        (
            "pretrain/model/gpt.py",
            "from pretrain.training.loop import run",
            "pretrain.model imports pretrain.training",
        ),
        (
            "pretrain/model/gpt.py",
            "from pretrain.data import order",
            "pretrain.model imports pretrain.data",
        ),
        (
            "pretrain/config/load.py",
            "def f():\n    import pretrain.platform",
            "pretrain.config imports pretrain.platform",
        ),
        (
            "pretrain/optim/zero.py",
            "from pretrain import training",
            "pretrain.optim imports pretrain.training",
        ),
        (
            "pretrain/evaluation/perplexity.py",
            "from ..training import step",
            "pretrain.evaluation imports pretrain.training",
        ),
        (
            "pretrain/training/loop.py",
            "from pretrain.huggingface import parity",
            "pretrain.training imports pretrain.huggingface",
        ),
        (
            "pretrain/optim/zero.py",
            "from pretrain.checkpoint import a, b",
            "pretrain.optim imports pretrain.checkpoint",
        ),
        (
            "kernels/dispatch.py",
            "from pretrain.config import RunConfig",
            "pretrain.kernels imports pretrain.config",
        ),
        (
            "pretrain/rundir/lock.py",
            "from pretrain import topology",
            "pretrain.rundir imports pretrain.topology",
        ),
        (
            "pretrain/topology.py",
            "import pretrain.launcher.cli",
            "pretrain.topology imports pretrain.launcher.cli",
        ),
        ("pretrain/topology.py", "import launcher.cli", "not pretrain.launcher.cli"),
        (
            "launcher/cli.py",
            "from pretrain.platform import device",
            "pretrain.launcher.cli imports pretrain.platform",
        ),
        (
            "launcher/cli.py",
            "from pretrain import model",
            "pretrain.launcher.cli imports pretrain.model",
        ),
        (
            "launcher/ranks.py",
            "from pretrain.launcher import submit",
            "pretrain.launcher.ranks imports pretrain.launcher.submit",
        ),
        (
            "launcher/slurm.py",
            "from pretrain.launcher.ranks import a",
            "pretrain.launcher.slurm imports pretrain.launcher.ranks",
        ),
        (
            "pretrain/__init__.py",
            "from pretrain.config import RunConfig",
            "pretrain imports pretrain.config",
        ),
        ("pretrain/attic/box.py", "", "a new room"),
        ("launcher/attic.py", "", "a new room"),
    ],
)
def test_a_way_up_is_found(tmp_path, file, code, says):
    write(tmp_path, file, code)
    [found] = wrong_imports(tmp_path)
    assert found.startswith(file) and says in found


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (
            "pretrain/training/hooks.py",
            "from pretrain.evaluation import perplexity\nfrom ..config import RunConfig",
        ),
        (
            "pretrain/huggingface/parity.py",
            "from pretrain.evaluation.perplexity import evaluate\nimport pretrain.kernels.dispatch",
        ),
        ("pretrain/cli/commands.py", "import os\nimport torch\nfrom pretrain.training import run"),
        (
            "launcher/cli.py",
            "from pretrain.launcher import ranks\nfrom pretrain.config import load_config",
        ),
        ("launcher/evaluations.py", "from pretrain.launcher import slurm\n"),
        ("pretrain/model/gpt.py", "from . import positions\nfrom .positions import make"),
    ],
)
def test_a_way_down_is_allowed(tmp_path, file, code):
    write(tmp_path, file, code)
    assert wrong_imports(tmp_path) == []


@pytest.mark.parametrize(
    "files",
    [
        {
            "pretrain/config/rules.py": "from pretrain.config.schema import RunConfig",
            "pretrain/config/schema.py": "def layout():\n    from pretrain.config import rules",
        },
        {
            "launcher/site.py": "from pretrain.launcher.terminal import say",
            "launcher/terminal.py": "from pretrain.launcher import slurm",
            "launcher/slurm.py": "import pretrain.launcher.site",
        },
    ],
    ids=["hidden in a function", "of three"],
)
def test_a_circle_is_found(tmp_path, files):
    for file, code in files.items():
        write(tmp_path, file, code)
    [found] = circles(tmp_path)
    assert all(Path(file).stem in found for file in files)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.getenv('A')",
        "from os import environ",
        "from os import getenv",
        "import os\nx = os.path.expandvars('$A')",
    ],
)
def test_a_read_of_the_environment_is_found(tmp_path, code):
    write(tmp_path, "launcher/ranks.py", code)
    assert environment_reads(tmp_path) == []
    write(tmp_path, "pretrain/data/loader.py", code)
    assert len(environment_reads(tmp_path)) == 1


@pytest.mark.parametrize(
    "module",
    [
        "pretrain.config",
        "pretrain.rundir",
        "pretrain.launcher.cli",
        "pretrain.launcher.ranks",
        "pretrain.model.flops",
    ],
)
def test_light_modules_leave_torch_alone(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

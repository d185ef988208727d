"""The rooms of the house: imports go down, never in a circle; four places read the environment."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.changed import LINKED, ROOT, imports, module_name

# A room may import rooms of a lower floor, itself, and what is listed for it in BESIDE.
FLOORS = [
    {"pretrain.startup"},
    {"pretrain"},
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
    "pretrain.evaluation": {"pretrain.huggingface"},  # a folder of transformers is evaluated too
    "pretrain.huggingface": {"pretrain.evaluation"},  # puts the length curve on the model card
    # Its processes look at their GPUs, and find each other, as ranks do.
    "pretrain.launcher.preflight": {"pretrain.platform", "pretrain.topology"},
}
APART = {
    "pretrain.optim.optimizers": "pretrain.config"
}  # its classes are the sections [optimizer] of a config
# The launcher has floors of its own, and of ours uses LAUNCHER_USES, and what BESIDE lists.
LAUNCHER = "pretrain.launcher"
LAUNCHER_USES = {"pretrain.config", "pretrain.rundir", "pretrain.startup", "pretrain.processes"}
LAUNCHER_FLOORS = [
    {f"{LAUNCHER}.{name}" for name in names.split()}
    for names in (
        "agent slurm slurm_job site",
        "supervise",
        "ranks status submit",
        "evaluations preflight",
        "job control",
        "cli",
        "__main__",
    )
]
READS_ENVIRONMENT = (
    "pretrain/platform.py",
    "pretrain/topology.py",
    "launcher/",
    # Which of an array's jobs this one is, Slurm says there alone.
    "pretrain/data/build/tasks.py",
    # $VARIABLE in a path, which the user wrote; nothing is read that no config names.
    "pretrain/config/load.py",
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
            yield module_name(str(relative)), path


def walk(node: ast.AST, types: bool) -> Iterator[ast.AST]:
    """Every node; without `types`, not what stands below `if TYPE_CHECKING:`."""
    yield node
    if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        yield from walk(child, types)


def imported(module: str, path: Path, types: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a file, also inside functions; `types`: for types, too."""
    return imports(module, str(path), walk(ast.parse(path.read_text()), types))


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
        for line, name in imported(module, path, types=module != "pretrain"):
            target, place = room_of(name), f"{path.relative_to(root)}:{line}"
            if target.split(".")[0] in LINKED:
                wrong.append(f"{place}: {room} imports {name}, not pretrain.{name}")
            elif target.split(".")[0] == "pretrain" and not may_import(room, target):
                wrong.append(f"{place}: {room} imports {target}")
    return list(dict.fromkeys(wrong))  # `from x import a, b` is one mistake


def circles(root: Path) -> list[str]:
    """A circle of imports between modules, if there is one; inside functions too."""
    known = dict(modules(root))
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        names = [name for _, name in imported(module, path, types=False)]
        targets = {name if name in known else name.rpartition(".")[0] for name in names}
        # A package that gathers its modules' names is not part of what they import.
        graph[module] = {t for t in targets & known.keys() if known[t].name != "__init__.py"}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def environment_reads(root: Path) -> list[str]:
    """Lines that name what os has of the environment, in files that have no business with it."""
    word = re.compile(r"\b(environb?|getenvb?|putenv|unsetenv|expandvars)\b")
    return [
        f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}"
        for _, path in modules(root)
        if not str(path.relative_to(root)).startswith(READS_ENVIRONMENT)
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and ast.unparse(node).startswith("os."))
        or (isinstance(node, ast.ImportFrom) and node.module == "os")
        if word.search(ast.unparse(node))
    ]


def test_every_room_that_is_named_exists():
    assert {*FLOOR, *LAUNCHER_FLOOR} <= {room_of(module) for module, _ in modules(ROOT)}


def test_imports_go_down_only_and_four_places_read_the_environment():
    assert wrong_imports(ROOT) == []
    assert circles(ROOT) == []
    assert environment_reads(ROOT) == []


def test_light_modules_leave_torch_alone():
    # tests/unit/test_command_line.py has those of both commands.
    light = ["config", "rundir", "plan.command", "launcher.ranks", "model"]
    code = f"import sys, pretrain.{', pretrain.'.join(light)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

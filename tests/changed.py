"""Run the tests that what changed may break: those that import it, directly or through others.

    python tests/changed.py [SINCE] [PYTEST ARGUMENTS]

SINCE is a commit. Without it everything counts that is not on main, committed or not; on main, what
is not committed. A file that is no module counts for the tests that name it. The tests whose way to
a change is shortest come first, and the first one that fails ends the run.

What a test reaches through one of ENTRANCES alone is left to `make test`: the command line imports
everything, and nearly every test uses a fixture.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("pretrain", "kernels", "launcher", "tests")
LINKED = ("kernels", "launcher")
"""Folders whose modules are named below pretrain."""

ENTRANCES = (
    "pretrain/__main__.py",
    "pretrain/cli/",
    "launcher/cli.py",
    "tests/conftest.py",
    "tests/end_to_end/commands.py",
    "tests/end_to_end/forks.py",
    "tests/end_to_end/preload.py",
)


def module_name(path: str) -> str:
    """'kernels/dispatch.py' -> 'pretrain.kernels.dispatch'; a package is called as its folder."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] in LINKED:
        parts.insert(0, "pretrain")
    return ".".join(parts).removesuffix(".__init__")


def tracked_and_new() -> list[str]:
    """Every file that git knows or would add."""
    return git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()


def changed_since(commit: str) -> set[str]:
    """Files that differ from a commit, also what is not committed and what is new."""
    new = git("ls-files", "--others", "--exclude-standard").splitlines()
    return {*git("diff", "--name-only", "--no-renames", commit).splitlines(), *new}


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def imports(module: str, path: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module's imports among these nodes may mean.

    `from a import b` is a.b, which is a module or a name in one.
    """
    package = module.split(".") if path.endswith("__init__.py") else module.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def imported(module: str, path: str, code: str) -> Iterator[str]:
    """Every dotted name that a module may import, also in functions and in code that is a text."""
    nodes = list(ast.walk(ast.parse(code)))
    yield from (name for _, name in imports(module, path, nodes))
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.replace(";", " ").replace(",", " ").split()
            yield from (word for word in words if word.startswith(("pretrain.", "tests.")))


def users(files: Iterable[str]) -> dict[str, set[str]]:
    """File -> the files whose imports lead to it directly. A conftest is used by its folder."""
    modules = {module_name(f): f for f in files if f.endswith(".py") and f.startswith(FOLDERS)}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        for target in imported(name, path, (ROOT / path).read_text()):
            # `from a.b import c` is the module a.b.c, or a name in a.b, whose __init__ runs too.
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target:
                found.setdefault(modules[target], set()).add(path)
        folder = Path(path).parent
        for above in (folder, *folder.parents):
            if str(above / "conftest.py") in modules.values():
                found.setdefault(str(above / "conftest.py"), set()).add(path)
    return found


def naming(files: Iterable[str], what: str) -> set[str]:
    """The test files in which a path stands that is no module: a config, a page, a script."""
    return {
        file
        for file in files
        if file.startswith("tests/") and file.endswith(".py") and what in (ROOT / file).read_text()
    }


def by_distance(files: list[str], changed: set[str]) -> dict[str, int]:
    """Every file that a change reaches -> the number of imports between."""
    graph = users(files)
    near = {file for file in changed if file.endswith(".py")}
    for file in changed - near:
        near |= naming(files, file)
    found: dict[str, int] = {}
    distance = 0
    while near:
        found |= dict.fromkeys(near, distance)
        ways = [file for file in near if file in changed or not file.startswith(ENTRANCES)]
        near = {user for file in ways for user in graph.get(file, ())} - found.keys()
        distance += 1
    return found


def main(arguments: list[str]) -> int:
    since = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
    base = since or git("merge-base", "main", "HEAD").strip()
    files = [file for file in tracked_and_new() if (ROOT / file).is_file()]
    reached = by_distance(files, changed_since(base))
    tests = [file for file in reached if Path(file).name.startswith("test_") and file in files]
    tests.sort(key=lambda file: (reached[file], file))
    if not tests:
        print(f"no test imports what has changed since {base[:10]}")
        return 0
    print(f"{len(tests)} test files import what has changed since {base[:10]}:", *tests, sep="\n  ")
    return subprocess.call([sys.executable, "-m", "pytest", "-x", *tests, *arguments], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

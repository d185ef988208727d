"""The rules of length, and of docstrings that say what the code does.

What is mended leaves the exceptions: they are compared, not passed over.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_imports import ROOT, modules

MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 80
LONG_FILES = {
    "launcher/login/status.py",
    "pretrain/rundir/checkpoints.py",
}
LONG_FUNCTIONS: set[str] = set()

HEAD = re.compile(r"^( *)(?:async def|def|class) ", re.MULTILINE)
QUESTION = re.compile(
    # The docstring of a module begins the file; those of classes and functions follow a colon.
    r'(?:\A|:\n) *r?"""((?:what|who|where|when|whether|how|why|which|whose)(?!\.?\w).*)',
    re.IGNORECASE,
)


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, text) of every file of ours."""
    for path in [*(path for _, path in modules(root)), *(root / "docs/hooks").glob("*.py")]:
        yield path.relative_to(root).as_posix(), path.read_text()


def long_files(root: Path) -> set[str]:
    return {file for file, text in sources(root) if len(text.splitlines()) > MOST_LINES_OF_A_FILE}


def may_have_a_long_function(text: str) -> bool:
    """Return True if so many lines follow a head up to the next that does not stand below it.

    Only such files are parsed, which is slow.
    """
    heads = [(text.count("\n", 0, found.start()), len(found[1])) for found in HEAD.finditer(text)]
    heads.append((text.count("\n") + 1, 0))
    return any(
        next(end for end, depth in heads[index + 1 :] if depth <= indent) - start
        > MOST_LINES_OF_A_FUNCTION
        for index, (start, indent) in enumerate(heads[:-1])
    )


def long_functions(root: Path) -> set[str]:
    found = set()
    for file, text in sources(root):
        for node in ast.walk(ast.parse(text)) if may_have_a_long_function(text) else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            # Triton makes one kernel of such a function and all that it calls.
            is_kernel = any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION and not is_kernel:
                found.add(f"{file}: {node.name}")
    return found


def questions(root: Path) -> set[str]:
    """Return the first lines of docstrings that open with a question word."""
    return {f"{file}: {line}" for file, text in sources(root) for line in QUESTION.findall(text)}


def test_a_file_has_at_most_400_lines():
    assert long_files(ROOT) == LONG_FILES


def test_a_function_has_at_most_80_lines():
    assert long_functions(ROOT) == LONG_FUNCTIONS


def test_no_docstring_opens_with_a_question_word():
    assert sorted(questions(ROOT)) == []


CHECKS = {"file": long_files, "function": long_functions, "question": questions}


@pytest.mark.parametrize(
    ("breach", "code"),
    [
        ("file", "x = 1\n" * 401),
        ("function", "class A:\n    def f(self):\n" + "        x = 1\n" * 80),
        ("function", "def f():\n    def g():\n        pass\n" + "    x = 1\n" * 78),
        ("function", "def f():\n    def g():\n" + "        x = 1\n" * 79 + "\n\ny = 1\n"),
        ("question", 'class A:\n    """What a run has."""'),
        ("question", 'class A:\n    @property\n    def end(self) -> int:\n        """When?"""'),
        ("question", '"""How it works."""'),
        ("", "x = 1\n" * 400),
        ("", "def f():\n" + "    x = 1\n" * 79 + "\n\ny = 1\n"),
        ("", "class A:\n" + "    x = 1\n" * 99),
        ("", '@triton.jit(do_not_specialize=["n"])\ndef kernel():\n' + "    x = 1\n" * 99),
        ("", '"""Whatever is left is removed."""\ndef f():\n    """Return what it has."""'),
    ],
)
def test_a_breach_is_found(tmp_path, breach, code):
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher/job.py").write_text(code)
    assert [name for name, check in CHECKS.items() if check(tmp_path)] == [breach][: bool(breach)]

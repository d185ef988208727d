"""DeepSpeed's internals are known in pretrain/optim alone, so that a new version is met there."""

import ast
from pathlib import Path

from tests.unit.test_imports import ROOT, modules

HOME = "pretrain/optim/"
MAY_IMPORT = (HOME, "pretrain/platform.py")  # platform keeps it from compiling an extension

# Fields of DeepSpeed's parameters, engine, optimizers and loss scaler, and our own handles on them.
INTERNAL = {
    "_hp_grad",
    "_hp_mapping",
    "ds_id",
    "ds_numel",
    "ds_pipe_replicated",
    "ds_shape",
    "ds_status",
    "ds_tensor",
    "cur_hysteresis",
    "cur_iter",
    "cur_scale",
    "last_overflow_iter",
    "loss_scaler",
    "needs_scaler",
    "allreduce_gradients",
    "engine",
}


def leaks(root: Path) -> list[str]:
    """Each use of a DeepSpeed internal outside pretrain/optim, as "file:line: name"."""
    found = []
    for _, path in modules(root):
        relative = path.relative_to(root).as_posix()
        if relative.startswith(HOME):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = None
            if isinstance(node, ast.Attribute) and node.attr in INTERNAL:
                name = node.attr
            elif isinstance(node, ast.Import | ast.ImportFrom):
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                if (module or "").split(".")[0] == "deepspeed":
                    name = None if relative.startswith(MAY_IMPORT) else "import deepspeed"
            if name:
                found.append(f"{relative}:{node.lineno}: {name}")
    return found


def test_deepspeed_is_known_in_the_optimizer_alone():
    assert leaks(ROOT) == []

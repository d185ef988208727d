"""Compare every attention backend with the reference in fp64, at the sizes of training.

    python -m benchmarks.gpu_day.attention_correctness --out RESULTS

The rule is that of the tests (tests/kernels/test_dispatch.py): an output or gradient may be twice
as far from the truth as plain torch is in the same data type, plus a few units in the last place of
the largest value. The rows say how much of that is used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from benchmarks.gpu_day.candidates import CANDIDATES, attend_by
from benchmarks.gpu_day.results import Rows
from benchmarks.gpu_day.sizes import CUDA
from pretrain.config.schema import ModelSection
from pretrain.kernels.reference import attention_reference
from pretrain.positions.alibi import alibi_slopes

PART = "attention-correctness"
DEVICE = "cuda" if CUDA else "cpu"
WRONG_CODE = 3
"""Exit code when a backend is further from the truth than is allowed."""
QUANTITIES = ("output", "dq", "dk", "dv", "dbias")


class Case(NamedTuple):
    """The shape of one call."""

    length: int
    batch: int
    heads: int
    head_dim: int
    bias: str
    """One of "slopes", "trained slopes", "table" (T5's) and "none"."""


CASES = (
    [
        Case(1024, 8, 16, 128, "slopes"),
        Case(1024, 8, 16, 128, "none"),
        Case(1024, 8, 16, 128, "table"),
        Case(1024, 8, 16, 128, "trained slopes"),
        Case(1024, 8, 16, 64, "slopes"),
        Case(4096, 2, 16, 128, "slopes"),
        Case(16_384, 1, 16, 128, "slopes"),
    ]
    if CUDA
    else [Case(128, 2, 4, 16, bias) for bias in ("slopes", "none", "table", "trained slopes")]
)


def backends() -> list[str]:
    """Return the names that model.attention_backend can have, without the reference."""
    names = get_args(ModelSection.model_fields["attention_backend"].annotation)
    return [name for name in names if name != "reference"]


def everyone() -> list[str]:
    """Return the backends and the candidates."""
    return [*backends(), *CANDIDATES]


def make(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return q, k, v [S, B, H, D] and the bias arguments, the same in every call."""
    generator = torch.Generator(DEVICE).manual_seed(case.length)
    shape = (case.length, case.batch, case.heads, case.head_dim)
    qkv = [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for _ in range(3)]
    if case.bias == "none":
        return qkv, {}
    if case.bias == "table":
        table = torch.randn(case.heads, 32, generator=generator, device=DEVICE)
        return qkv, {"relative_attention_bias": table.requires_grad_()}
    slopes = alibi_slopes(case.heads).to(DEVICE)
    return qkv, {"slopes": slopes.requires_grad_(case.bias == "trained slopes")}


def run(attend: Callable[..., Tensor], qkv: list[Tensor], bias: dict[str, Tensor]) -> list[Tensor]:
    """Return the output and every gradient, for a loss that weighs each output differently."""
    qkv = [x.detach().requires_grad_() for x in qkv]
    leaves = [*qkv, *(x for x in bias.values() if x.requires_grad)]
    out = attend(*qkv, **bias)
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = torch.randn(qkv[0].shape, generator=generator, device=DEVICE).to(qkv[0].dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


def reference(case: Case, dtype: torch.dtype, computed_in: torch.dtype) -> list[Tensor]:
    """Return what `run` returns, computed densely head by head, which bounds the memory.

    Args:
        case: The shape.
        dtype: Data type of q, k and v.
        computed_in: Data type of the computation.
    """
    qkv, bias = make(case, dtype)
    weights = torch.Generator(DEVICE).manual_seed(1)
    all_weights = torch.randn(qkv[0].shape, generator=weights, device=DEVICE).to(dtype)
    parts: list[list[Tensor]] = []
    for head in range(case.heads):
        one = slice(head, head + 1)
        leaves = [x[:, :, one].detach().requires_grad_() for x in qkv]
        added: dict[str, Any] = {
            name: x[one].detach().requires_grad_(x.requires_grad) for name, x in bias.items()
        }
        out = attention_reference(*leaves, **added, dtype=computed_in)
        leaves += [x for x in added.values() if x.requires_grad]
        gradients = torch.autograd.grad(out, leaves, all_weights[:, :, one].to(out.dtype))
        parts.append([out.detach(), *gradients])
    # Heads are dimension 2 of all but the gradient of the bias, where they are dimension 0.
    return [torch.cat(tensors, dim=2 if tensors[0].dim() == 4 else 0) for tensors in zip(*parts)]


def compare(ours: list[Tensor], plain: list[Tensor], exact: list[Tensor], epsilon: float) -> Any:
    """Return the part of the allowed error that each quantity uses, by its name.

    Args:
        ours: Output and gradients of the backend.
        plain: Those of plain torch in the same data type.
        exact: Those in fp64.
        epsilon: Unit of the data type.
    """
    used = {}
    for name, x, y, truth in zip(QUANTITIES, ours, plain, exact):
        units = 16 if name == "dbias" else 4
        truth = truth.double()
        allowed = 2 * (y.double() - truth).abs().max() + units * epsilon * truth.abs().max()
        used[name] = float((x.double() - truth).abs().max() / allowed)
    return used


def main() -> None:
    """Measure every case that has no row yet; exit with WRONG_CODE if a backend is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    rows = Rows(parser.parse_args().out, PART)
    capability = torch.cuda.get_device_capability() if CUDA else (8, 0)
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    for case in CASES:
        key = {**case._asdict(), "dtype": str(dtype)}
        missing = [b for b in everyone() if not rows.has(backend=b, **key)]
        if not missing:
            continue
        qkv, bias = make(case, dtype)
        # In fp64 the inputs are those in `dtype`, so rounding them is nobody's error.
        exact, plain = (reference(case, dtype, x) for x in (torch.float64, dtype))
        for backend in missing:
            rows.add({**key, "backend": backend, **_row(backend, qkv, bias, plain, exact)})
    if any(row["verdict"] == "WRONG" for row in rows):
        sys.exit(WRONG_CODE)


def _row(
    backend: str,
    qkv: list[Tensor],
    bias: dict[str, Tensor],
    plain: list[Tensor],
    exact: list[Tensor],
) -> dict[str, Any]:
    """Return a backend's verdict and errors; a refusal or a crash is a verdict, too.

    Args:
        backend: Name of the backend.
        qkv: Its inputs.
        bias: Its bias arguments.
        plain: Output and gradients of plain torch.
        exact: Output and gradients in fp64.
    """
    try:
        ours = run(attend_by(backend), qkv, bias)
    except ValueError as error:
        return {"verdict": f"refused: {error}"}
    except Exception as error:
        return {"verdict": f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"}
    used = compare(ours, plain, exact, torch.finfo(qkv[0].dtype).eps)
    return {"verdict": "ok" if max(used.values()) <= 1 else "WRONG", **used}


if __name__ == "__main__":
    main()

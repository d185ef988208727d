"""A description of one attention call, from which backends and `choose_backend` decide.

It holds no tensors and asks no GPU, so decisions for any GPU can be tested on a machine without.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pretrain.kernels.bias import ScoreBias

PACKAGES = ("triton", "flash_attn", "flash_attn.cute")
"""Optional packages that backends need: Triton, FlashAttention-2 and FlashAttention-4."""


NO_DOCUMENTS = "it has no mask by document"
"""The reason of the backends that cannot keep a query within its own document."""


class Call(NamedTuple):
    """The properties of an attention call on which the choice of a backend depends."""

    dtype: torch.dtype
    head_dim: int
    num_queries: int
    num_keys: int
    heads: int
    groups: int
    """Key heads."""
    bias: Literal["none", "slopes", "trained slopes", "table"]
    """What is added to the scores; "trained slopes" want a gradient."""
    causal: bool
    dropout: bool
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None on a CPU."""
    installed: frozenset[str]
    """Which of PACKAGES are installed."""
    documents: bool = False
    """Queries see no key before the start of their own document."""

    @property
    def is_cuda(self) -> bool:
        return self.capability is not None

    @property
    def is_half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def dtype_name(self) -> str:
        return {
            torch.float16: "fp16",
            torch.bfloat16: "bf16",
            torch.float32: "fp32",
            torch.float64: "fp64",
        }.get(self.dtype, str(self.dtype))

    def older_than(self, major: int, minor: int) -> bool:
        """Return True on a GPU of a compute capability below major.minor."""
        return self.capability is not None and self.capability < (major, minor)


def describe_call(
    q_SBHD: Tensor, k_SBGD: Tensor, bias: ScoreBias, dropout_p: float, documents: bool = False
) -> Call:
    """Return the description of an attention call.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D].
        bias: Score bias and causality.
        dropout_p: Probability that a weight is dropped.
        documents: Queries see no key before the start of their own document.
    """
    capability = torch.cuda.get_device_capability(q_SBHD.device) if q_SBHD.is_cuda else None
    return Call(
        dtype=q_SBHD.dtype,
        head_dim=q_SBHD.shape[3],
        num_queries=q_SBHD.shape[0],
        num_keys=k_SBGD.shape[0],
        heads=q_SBHD.shape[2],
        groups=k_SBGD.shape[2],
        bias=_kind(bias),
        causal=bias.causal,
        dropout=dropout_p > 0,
        capability=capability,
        installed=installed_packages(),
        documents=documents,
    )


def _kind(bias: ScoreBias) -> Literal["none", "slopes", "trained slopes", "table"]:
    if bias.table is not None:
        return "table"
    if bias.slopes is None:
        return "none"
    return "trained slopes" if bias.slopes.requires_grad else "slopes"


@cache
def installed_packages() -> frozenset[str]:
    """Return which of PACKAGES are installed, without importing them."""
    return frozenset(package for package in PACKAGES if _is_installed(package))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        # The package above a submodule is missing.
        return False

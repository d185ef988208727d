"""The choice of an attention backend, as a function of the call's description alone."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from pretrain.kernels import flash2, folded, sdpa
from pretrain.kernels.call import Call


class Choice(NamedTuple):
    """A backend and what the log says about it."""

    backend: str
    reason: str
    """Why this backend, and what it computes in."""


# Asked for each layer of each micro batch, with few different calls.
@lru_cache(maxsize=1024)
def choose_backend(call: Call) -> Choice:
    """Return the best backend for a call.

    The best is what is fastest among the kernels that compute the method exactly, as far as it is
    known: comparisons of methods must give each method its best kernel. Nothing is cast without the
    reason saying so. FlexAttention and FlashAttention-4 are only taken by name: they add a bias as
    the Triton kernel does, need Triton as well, and were not timed beside it.

    Args:
        call: Description of the call.

    Raises:
        ValueError: No kernel can serve it.
    """
    if not call.is_cuda:
        return Choice("sdpa", _cpu_reason(call))
    refusal = sdpa.refusal(call)
    if refusal is not None:
        # The other backends serve neither of these either.
        raise ValueError(
            f"attention in {call.dtype_name} on this GPU: {refusal}. Choose fp32 or fp16, or the "
            "backend reference, which is slow"
        )
    if call.bias == "none" and not call.documents:
        return Choice("sdpa", _unbiased_reason(call))
    triton = _triton_refusal(call)
    if triton is None:
        return Choice("triton", _triton_reason(call))
    if flash2.refusal(call) is None:
        return Choice(
            "flash2",
            f"it adds ALiBi inside its kernel, and the Triton kernel cannot serve, {triton}; "
            + _products(call),
        )
    folding = folded.refusal(call)
    if folding is None:
        return Choice(
            "folded",
            f"ALiBi stands in extra columns of q and k, exact in {call.dtype_name}, so that "
            f"torch's fused kernel needs no mask, and the Triton kernel cannot serve, {triton}; "
            + _products(call),
        )
    if call.bias == "none":
        return Choice(
            "sdpa",
            f"with a mask by document in blocks; {_products(call)}{_padding(call)}. The Triton "
            f"kernel cannot serve, {triton}",
        )
    cast = "" if call.dtype == torch.float32 else f" q, k and v are cast from {call.dtype_name},"
    return Choice(
        "sdpa",
        f"with a float mask in blocks; slow:{cast} products are in fp32{_padding(call)}. The "
        f"Triton kernel cannot serve, {triton}; folding cannot, {folding}",
    )


def _triton_refusal(call: Call) -> str | None:
    """Return the reason why the Triton kernel cannot serve a call on a GPU, or None if it can.

    `pretrain.kernels.flash.host.refusal` says the same of tensors, and of Triton's interpreter.
    """
    if "triton" not in call.installed:
        return "the package triton is not installed"
    if call.older_than(8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    if call.head_dim > 256:
        return f"it serves heads of width 256 at most, these have {call.head_dim}"
    return None


def _triton_reason(call: Call) -> str:
    """Return the reason for the Triton kernel, which has everything but q k^T v inside."""
    documents = "it hides other documents' keys inside the kernel; " if call.documents else ""
    if call.bias == "none":
        return documents + _products(call)
    return f"it makes the bias inside the kernel; {documents}{_products(call)}, bias in fp32"


def _products(call: Call) -> str:
    """Return in which dtypes a fused kernel on a GPU multiplies and adds."""
    return f"products of {call.dtype_name} numbers are added in fp32"


def _padding(call: Call) -> str:
    """Return what `sdpa` on a GPU says of heads that it pads, or nothing if it pads none."""
    width = sdpa.aligned(call.head_dim)
    if width == call.head_dim:
        return ""
    return f", heads of width {call.head_dim} are padded to {width}"


def _cpu_reason(call: Call) -> str:
    whole = call.num_queries == call.num_keys or not call.causal
    if call.bias == "none" and whole and not call.documents:
        return f"torch's kernel for CPUs, which needs no mask here; q, k and v in {call.dtype_name}"
    return (
        f"torch's kernel for CPUs with an fp32 mask in blocks; q, k and v in {call.dtype_name}; no "
        "other backend serves a CPU"
    )


def _unbiased_reason(call: Call) -> str:
    """Return the reason for torch's own kernel where nothing is added to the scores."""
    if not call.is_half or call.older_than(8, 0) or call.head_dim > 256:
        kernel = "memory-efficient kernel"
    else:
        kernel = "fastest fused kernel (cuDNN or flash)"
    return (
        f"nothing is added to the scores, so torch's {kernel} needs no mask; "
        f"{_products(call)}{_padding(call)}. Its backward pass may add in an order that varies; "
        "backend triton never does"
    )

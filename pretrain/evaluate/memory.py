"""Estimate the memory of an evaluation's forward pass, and refuse lengths that cannot fit.

Without it, a length that a machine cannot carry ends the process by the kernel's OOM killer, which
says nothing, and on a node with other processes may end one of those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from pretrain import platform
from pretrain.config import ConfigError, Layout, RunConfig, RunFailed, in_bytes
from pretrain.evaluate.windows import Protocol
from pretrain.kernels.call import Call, installed_packages
from pretrain.kernels.choice import choose_backend
from pretrain.kernels.sdpa import QUERY_BLOCK
from pretrain.topology import Topology, ranks_here

MARGIN = 1.2
"""What the allocator takes for a byte of a tensor: freed memory is not given out again at once."""
LOSS_PIECE_BYTES = 4 * 2**24
"""fp32 logits that the loss holds at once beside the whole ones (`pretrain.model.loss`)."""


def check_memory(config: RunConfig, topology: Topology, protocols: Iterable[Protocol]) -> None:
    """Check that one forward pass at each length fits into the memory that is free now.

    This is a collective operation: all ranks call it together, and it raises on all of them.

    Args:
        config: The run's config.
        topology: This process's ranks in the parallel layout.
        protocols: What is to be measured.

    Raises:
        ConfigError: A length does not fit.
    """
    free = platform.free_memory()
    if not platform.has_cuda():
        free //= ranks_here()
    everyones = [0] * dist.get_world_size()
    dist.all_gather_object(everyones, free)
    free = min(everyones)
    for length in sorted({protocol.length for protocol in protocols}):
        needed = forward_bytes(config, topology.layout, length)
        if needed > free:
            is_whole_batch = length <= config.evaluation.tokens_per_batch
            remedy = (
                "Lower evaluation.tokens_per_batch"
                if is_whole_batch
                else "Choose a shorter length, or split the model over more processes "
                "(parallel.tensor_model_parallel_size)"
            )
            raise ConfigError(
                f"length {length}: a forward pass takes about {in_bytes(needed)} of memory on each "
                f"process, and {in_bytes(free)} are free. {remedy}"
            )


@contextlib.contextmanager
def explained_memory(length: int) -> Iterator[None]:
    """Turn torch's errors about memory in the `with` block into one that says what to do.

    `check_memory` estimates, and other processes may take memory meanwhile.

    Args:
        length: Tokens in a window.

    Raises:
        RunFailed: The memory was not enough.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch raises a plain RuntimeError.
        is_torchs = isinstance(error, torch.OutOfMemoryError) or "CPUAllocator" in str(error)
        if not (isinstance(error, MemoryError) or is_torchs):
            raise
        raise RunFailed(
            f"length {length}: out of memory ({str(error).partition(chr(10))[0]}). Choose a "
            "shorter length, or lower evaluation.tokens_per_batch"
        ) from error


def forward_bytes(config: RunConfig, layout: Layout, length: int) -> int:
    """Return the bytes that a forward pass without gradients takes beside the weights.

    Counted are the tensors that are alive at the same time in attention, in the MLP and in the
    loss, of which the largest sum is taken. `docs/decisions.md` compares it with measurements.

    Args:
        config: The run's config.
        layout: How the processes share the model.
        length: Tokens in a window.
    """
    m, split = config.model, layout.tensor
    item = platform.DTYPES[config.train.precision].itemsize
    rows = max(1, config.evaluation.tokens_per_batch // length)
    tokens = rows * length
    hidden, heads = m.hidden_size, m.num_attention_heads // split
    width = config.head_dim
    query, key = heads * width, max(1, config.num_query_groups // split) * width
    # The residual, the output of its LayerNorm, and the input that is kept for the next sum.
    stream = 3 * hidden * item
    # Queries, keys and values joined and apart, and the output in pieces, joined and in order.
    attention = (2 * (query + 2 * key) + 3 * query) * item
    mlp = (2 * config.ffn_hidden_size // split + hidden) * item
    logits = _logit_bytes(config, split, item)
    # Token ids, positions, labels and the losses by position, of every micro batch of a pass.
    micro_batches = layout.pipeline * layout.virtual
    ids = (4 * 8 + 4 * 8) * micro_batches
    of_token = stream + max(attention, mlp, logits) + ids
    extra = _score_bytes(config, rows, length, heads)
    return int(MARGIN * tokens * of_token) + max(extra, LOSS_PIECE_BYTES)


def _logit_bytes(config: RunConfig, split: int, item: int) -> int:
    """Return the bytes of a token's logits on a rank.

    Args:
        config: The run's config.
        split: Tensor-parallel size.
        item: Bytes of a number in the training precision.
    """
    clusters = config.adaptive_clusters
    if not clusters:
        return config.padded_vocab_size // split * item
    if config.train.fusion == "off":
        # log p of all words in fp32, in parts and together.
        return 2 * config.padded_vocab_size * 4
    # The tails' logits follow the head's, and are those of few tokens: rare words are rare.
    return (clusters[0].size + len(clusters) - 1) * item


def _score_bytes(config: RunConfig, rows: int, length: int, heads: int) -> int:
    """Return the bytes of what attention stores of scores and masks, none in a fused kernel.

    Args:
        config: The run's config.
        rows: Windows in a forward pass.
        length: Tokens in a window.
        heads: Attention heads on this rank.
    """
    backend: str = config.model.attention_backend
    has_bias = config.position.method in ("alibi", "t5")
    if backend == "auto":
        backend = choose_backend(_call(config, length, heads)).backend
    if backend == "reference":
        # Scores, weights and the products between them, in fp64.
        return 3 * rows * heads * length**2 * 8
    if backend == "sdpa" and has_bias and platform.has_cuda():
        # The float mask of a block of queries, and q, k and v in fp32.
        return heads * length * 4 * (QUERY_BLOCK + 4 * rows * config.head_dim)
    return 0


def _call(config: RunConfig, length: int, heads: int) -> Call:
    """Return the description of attention in this model, as the kernels see it."""
    bias = {"alibi": "slopes", "t5": "table"}.get(config.position.method, "none")
    return Call(
        dtype=platform.DTYPES[config.train.precision],
        head_dim=config.head_dim,
        num_queries=length,
        num_keys=length,
        heads=heads,
        groups=max(1, heads * config.num_query_groups // config.model.num_attention_heads),
        bias=bias,  # type: ignore[arg-type]  # a literal
        causal=True,
        dropout=False,
        capability=torch.cuda.get_device_capability() if platform.has_cuda() else None,
        installed=installed_packages(),
    )

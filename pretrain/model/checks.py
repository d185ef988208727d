"""Check at the start of every run that attention adds the positions that the config asks for.

When one attention implementation is swapped for another, a score bias is easily lost without an
error. The check compares what the model will actually call with a dense reference, for the heads
of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain import platform
from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.kernels.alibi import chosen_slopes
from pretrain.kernels.reference import attention_reference
from pretrain.model.attention import CoreAttention

# Largest allowed difference from the fp64 reference. Outputs are of order 1, so these are a few
# units in the last place of the data type.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}

# Sequence length of the random inputs.
LENGTH = 64


@torch.no_grad()
def check_positions(config: RunConfig, chunks: list[GPTModel]) -> None:
    """Compare this rank's core attention with a dense reference on random inputs.

    One layer is run, since all layers share the position method; that every layer uses our
    attention at all is checked by counting.

    Raises:
        RunFailed: if the outputs differ, or if a layer uses another attention.
        ConfigError: if model.attention_backend cannot serve this model on this device.
    """
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, CoreAttention)]
    expected_layers = sum(len(chunk.decoder.layers) for chunk in chunks)
    if len(layers) != expected_layers:
        raise RunFailed(
            f"{expected_layers - len(layers)} of {expected_layers} layers on this rank do not use "
            "pretrain.model.attention.CoreAttention, so their attention would have no positions"
        )
    if not layers:
        return
    query, key, value = _random_inputs(config)
    terms = _expected_terms(config, chunks[0])
    starts = _document_starts(config)
    seen: dict[str, Any] = {"document_starts": starts, "causal": not config.is_masked}
    expected = attention_reference(query, key, value, **terms, **seen).float()
    without_terms = attention_reference(query, key, value, **seen).float()
    actual = _attend(config, layers[0], query, key, value, starts).view(expected.shape).float()
    error, tolerance = float((actual - expected).abs().max()), TOLERANCE[config.train.precision]
    # Written with "not", so that a NaN fails.
    if not error <= tolerance:
        is_absent = terms and float((actual - without_terms).abs().max()) <= tolerance
        raise RunFailed(
            f"position.method = {config.position.method}: attention differs from the dense "
            f"reference by {error:.2g}, and rounding explains at most {tolerance:.0e}"
            + (": the bias is absent" if is_absent else "")
        )


def _attend(
    config: RunConfig,
    core: CoreAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
) -> Tensor:
    """Return what a layer's core attention computes without dropout.

    Args:
        config: The run's config.
        core: The layer's core attention.
        query: [S, B, heads, D].
        key: [S, B, groups, D].
        value: [S, B, groups, D].
        starts: Where each token's document begins, int32 [B, S], or None.

    Returns:
        [S, B, heads * D].

    Raises:
        ConfigError: if model.attention_backend cannot serve, be it with dropout or without.
    """
    training = core.training
    try:
        # Some backends have no dropout. The call with dropout is made only to see it refused.
        if core.dropout:
            core.train()(query, key, value, starts)
        out: Tensor = core.eval()(query, key, value, starts)
        return out
    except ValueError as error:
        raise ConfigError(
            f"model.attention_backend = {config.model.attention_backend}: {error}"
        ) from None
    finally:
        core.train(training)


def _random_inputs(config: RunConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return random query [S, 1, heads, D], key and value [S, 1, groups, D] for this rank."""
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    generator = torch.Generator().manual_seed(0)
    heads = config.model.num_attention_heads // tensor_size
    groups = config.num_query_groups // tensor_size
    query, key, value = (
        torch.randn(LENGTH, 1, count, config.head_dim, generator=generator).to(
            platform.device(), platform.DTYPES[config.train.precision]
        )
        for count in (heads, groups, groups)
    )
    return query, key, value


def _document_starts(config: RunConfig) -> Tensor | None:
    """Return the starts of two documents of unequal lengths if the run parts them, int32 [1, S]."""
    if not config.data.per_document_attention:
        return None
    index = torch.arange(LENGTH, dtype=torch.int32, device=platform.device())
    first = LENGTH // 3
    return torch.where(index < first, 0, first)[None].int()


def _expected_terms(config: RunConfig, chunk: GPTModel) -> dict[str, Any]:
    """Return the keyword arguments of the reference: what should be added to this rank's scores.

    Fixed slopes are derived from the global head numbers here, and not taken from the position
    method, since that is what is being checked. Trained values have no other source than the model.
    """
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    num_heads = config.model.num_attention_heads
    count = num_heads // tensor_size
    first = parallel_state.get_tensor_model_parallel_rank() * count
    if config.position.method == "alibi":
        if config.position.trainable_slopes:
            return {"slopes": chunk.position.slopes.float()}
        slopes = chosen_slopes(config.slopes, num_heads)
        return {"slopes": slopes[first : first + count].to(platform.device())}
    if config.position.method == "t5":
        return {
            "relative_attention_bias": chunk.position.relative_attention_bias,
            "relative_attention_max_distance": config.position.relative_attention_max_distance,
        }
    return {}

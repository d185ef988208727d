"""At the start of every run: does attention add the positions the config asks for, in every layer, for this rank's heads?

An attention implementation swapped for another loses a bias silently; this compares what the model will call with the
dense reference.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain import platform
from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.kernels.alibi import alibi_slopes
from pretrain.kernels.reference import attention_reference
from pretrain.model.attention import CoreAttention

# Largest difference to the fp64 reference, relative to outputs of about 1: a few units in the last place of the dtype.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
LENGTH = 64


@torch.no_grad()
def check_positions(config: RunConfig, chunks: list[GPTModel]) -> None:
    """Runs this rank's core attention on random inputs of 64 tokens. Raises RunFailed, saying what differs; ConfigError
    where the backend that the config forces cannot serve."""
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, CoreAttention)]
    expected_layers = sum(len(chunk.decoder.layers) for chunk in chunks)
    if len(layers) != expected_layers:
        raise RunFailed(
            f"{expected_layers - len(layers)} of {expected_layers} layers do not use our attention"
        )
    if not layers:
        return
    query, key, value = _inputs(config)
    terms = _expected_terms(config, chunks[0])
    expected = attention_reference(query, key, value, **terms).float()
    plain = attention_reference(query, key, value).float()
    actual = _attend(config, layers[0], query, key, value).view(expected.shape).float()
    error, tolerance = float((actual - expected).abs().max()), TOLERANCE[config.train.precision]
    if not error <= tolerance:
        missing = float((actual - plain).abs().max()) <= tolerance
        raise RunFailed(
            f"position.method = {config.position.method}: attention differs from the dense reference by {error:.2g} "
            f"(at most {tolerance:.0e} is rounding)"
            + (": the bias is absent" if missing and terms else "")
        )


def _attend(
    config: RunConfig, core: CoreAttention, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """What `core` computes without dropout. Raises ConfigError where the config's backend cannot serve, with dropout or not."""
    training = core.training
    try:
        if core.dropout:  # which some backends do not have
            core.train()(query, key, value)
        return core.eval()(query, key, value)
    except ValueError as error:
        raise ConfigError(
            f"model.attention_backend = {config.model.attention_backend}: {error}"
        ) from None
    finally:
        core.train(training)


def _inputs(config: RunConfig) -> tuple[Tensor, Tensor, Tensor]:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    generator = torch.Generator().manual_seed(0)
    heads = (config.model.num_attention_heads // tensor, *[config.num_query_groups // tensor] * 2)
    tensors = [torch.randn(LENGTH, 1, n, config.head_dim, generator=generator) for n in heads]
    query, key, value = (
        t.to(platform.device(), platform.DTYPES[config.train.precision]) for t in tensors
    )
    return query, key, value


def _expected_terms(config: RunConfig, chunk: GPTModel) -> dict:
    """What should be added, from the global head numbers rather than through the position method."""
    count = (
        config.model.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
    )
    first = parallel_state.get_tensor_model_parallel_rank() * count
    if config.position.method == "alibi":
        slopes = alibi_slopes(config.model.num_attention_heads)[first : first + count].to(
            platform.device()
        )
        return {
            "slopes": chunk.position.slopes.float() if config.position.trainable_slopes else slopes
        }
    if config.position.method == "t5":
        distance = config.position.relative_attention_max_distance
        table = chunk.position.relative_attention_bias
        return {"relative_attention_bias": table, "relative_attention_max_distance": distance}
    return {}

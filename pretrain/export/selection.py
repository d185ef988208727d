"""Choose the transformers class that can hold a model, or refuse with every reason why none can."""

from __future__ import annotations

from collections.abc import Iterator

from pretrain.config import ConfigError, RunConfig
from pretrain.config.refusal import Refusal
from pretrain.export.targets import OPT_LAYERNORM_EPSILON, TARGETS, Target

_METHODS_WITHOUT_CLASS = {
    "t5": "no stock transformers decoder adds T5's relative bias",
    "none": "no stock transformers decoder goes without positions",
}
"""Position method -> reason why no transformers class can hold it."""


def check_exportable(config: RunConfig) -> Target:
    """Return the class that can hold this model.

    Raises:
        ConfigError: No class can. The message gives every reason, and what to train instead.
    """
    method, m = config.position.method, config.model
    if method in _METHODS_WITHOUT_CLASS:
        remedy = (
            "`pretrain evaluate` measures it here; to export, train with alibi, rotary, learned "
            "or sinusoidal"
        )
        reason = _METHODS_WITHOUT_CLASS[method]
        raise ConfigError(str(Refusal("position.method", method, reason, remedy)))
    if method == "alibi":
        # MPT has erf GELU and no biases, Bloom has tanh GELU, biases and a LayerNorm on the
        # embeddings. A model with tanh GELU and no biases is exported as Bloom, with biases of 0.
        is_mpt = m.hidden_act == "gelu" and not m.use_bias and not m.embedding_layernorm
        target = TARGETS["mpt" if is_mpt else "bloom"]
    else:
        target = TARGETS["gpt_neox" if method == "rotary" else "opt"]
    refusals = list(_refusals(config, target))
    if refusals:
        raise ConfigError("\n".join(str(r) for r in refusals))
    return target


def _refusals(config: RunConfig, target: Target) -> Iterator[Refusal]:
    """Yield each setting of the model that `target` does not support."""
    m, name = config.model, target.class_name
    if config.num_query_groups != m.num_attention_heads:
        yield Refusal(
            "model.num_query_groups",
            config.num_query_groups,
            f"{name} has one key and value head for each query head",
            f"Train with {m.num_attention_heads}, or leave it out",
        )
    if m.embedding_layernorm and target.model_type != "bloom":
        yield Refusal(
            "model.embedding_layernorm",
            True,
            f"{name} does not normalise its embeddings",
            "Train without it, or with alibi (BloomForCausalLM)",
        )
    if m.parallel_residual and target.model_type != "gpt_neox":
        yield Refusal(
            "model.parallel_residual",
            True,
            f"in {name} the MLP reads what attention has added to",
            "Train without it, or with rotary (GPTNeoXForCausalLM)",
        )
    if target.model_type == "opt" and m.layernorm_epsilon != OPT_LAYERNORM_EPSILON:
        yield Refusal(
            "model.layernorm_epsilon",
            m.layernorm_epsilon,
            f"{name} supports {OPT_LAYERNORM_EPSILON} only",
            f"Train with {OPT_LAYERNORM_EPSILON}",
        )
    if config.position.method == "alibi":
        yield from _alibi_refusals(config, target)


def _alibi_refusals(config: RunConfig, target: Target) -> Iterator[Refusal]:
    """Yield each setting that Bloom and MPT, the classes with ALiBi, do not support."""
    m, name = config.model, target.class_name
    if config.position.trainable_slopes:
        yield Refusal(
            "position.trainable_slopes",
            True,
            f"{name} computes its slopes from the number of heads",
            "Train with fixed slopes",
        )
    if config.ffn_hidden_size != 4 * m.hidden_size:
        yield Refusal(
            "model.ffn_hidden_size",
            config.ffn_hidden_size,
            f"{name} has 4 x hidden_size = {4 * m.hidden_size}",
            "Train with that, or leave it out; rotary (GPTNeoXForCausalLM) exports with any size",
        )
    if target.model_type == "bloom" and m.hidden_act != "gelu_pytorch_tanh":
        yield Refusal(
            "model.hidden_act",
            m.hidden_act,
            f"{name} computes gelu_pytorch_tanh",
            "Train with that, or with gelu and model.use_bias = false (MptForCausalLM)",
        )

"""Convert weights between our global names and a transformers class, in both directions.

`stored_tensors` says where a class stores each of our tensors and by which factor it is multiplied.
An export follows that list forward (`convert`), an import backward (`restore`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.config import ConfigError, RunConfig
from pretrain.export.tables import Transform
from pretrain.export.targets import Factors, Read, Target

SLOPES = "position.slopes"
"""Trained slopes, which a class in the folder has among its settings (`export.huggingface`)."""
EMBEDDING, FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm"

_WITHOUT_BIAS = (
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "output_layer",
)


@dataclass(frozen=True)
class Stored:
    """One of our tensors and where a class stores it."""

    name: str
    """Our global name."""
    theirs: tuple[str, ...]
    """Names in the class's state_dict."""
    transform: Transform
    factor: float = 1.0
    """The class stores our tensor multiplied by this."""
    is_absent: bool = False
    """True if our model has no such tensor, and the class stores zeros: a bias."""

    def export(self, config: RunConfig, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return what the class stores, under the names `theirs`, of our tensor."""
        return self.transform.export(config, _times(tensor, self.factor))

    def restore(self, config: RunConfig, parts: list[Tensor]) -> Tensor:
        """Return our tensor, of what the class stores under the names `theirs`."""
        return _divided(self.transform.restore(config, parts), self.factor)


def stored_tensors(target: Target, config: RunConfig, factors: Factors) -> Iterator[Stored]:
    """Yield every tensor of the class but those of `target.extra`; a weight before its bias.

    Args:
        target: The class.
        config: The run's config.
        factors: By what the class stores our weights multiplied.
    """
    m = config.model
    left_out = {
        "output_layer": m.tie_word_embeddings,
        "embedding.word_embeddings_layernorm": not m.embedding_layernorm,
        "embedding.position_embeddings": config.position.method != "learned",
    }
    # A tied output layer multiplies by the scaled embeddings too. Dividing the final LayerNorm by
    # the same factor cancels it in the logits.
    by_module = {
        "embedding.word_embeddings": factors.embedding,
        "embedding.word_embeddings_layernorm": factors.embedding_norm,
        "decoder.layers.{i}.self_attention.linear_proj": factors.stream,
        "decoder.layers.{i}.mlp.linear_fc2": factors.stream,
        FINAL_NORM: 1 / factors.embedding if m.tie_word_embeddings else 1.0,
    }
    for module, (transform, *theirs) in target.table.items():
        if left_out.get(module):
            continue
        has_bias = target.has_bias and module not in _WITHOUT_BIAS
        for i in range(m.num_layers if "{i}" in module else 1):
            for kind in ("weight", "bias") if has_bias else ("weight",):
                yield Stored(
                    f"{module.format(i=i)}.{kind}",
                    tuple(f"{name.format(i=i)}.{kind}" for name in theirs),
                    transform,
                    by_module.get(module, 1.0),
                    is_absent=kind == "bias" and not m.use_bias,
                )


def convert(
    target: Target, config: RunConfig, state: Mapping[str, Tensor], max_length: int
) -> dict[str, Tensor]:
    """Return the weights under the names and in the shapes of the target class, in fp32.

    Args:
        target: Class to convert to.
        config: The run's resolved config.
        state: Full fp32 tensors by global name.
        max_length: Longest sequence in tokens, which sizes OPT's table of positions.

    Returns:
        Tensors by their names in the class's state_dict.

    Raises:
        ConfigError: A tensor that the config needs is missing, one is left over, or the embeddings
            have another shape.
    """
    # Tensors are taken out of `rest` as they are converted, so that none can be forgotten.
    rest = dict(state)
    if target.stock and config.position.trainable_slopes:
        _take(rest, SLOPES)
    embedding = _take(dict(rest), EMBEDDING)
    shape = config.padded_vocab_size, config.model.hidden_size
    if embedding.shape != shape:
        raise ConfigError(
            f"{EMBEDDING}: has shape {tuple(embedding.shape)}, but the config asks for {shape}. "
            "Are these another run's weights?"
        )
    factors = target.factors(config, embedding)
    out = target.extra(config, factors, max_length)
    tensor = embedding
    for stored in stored_tensors(target, config, factors):
        # A bias that our model does not have follows its weight.
        absent = tensor.new_zeros(tensor.shape[0])
        tensor = absent if stored.is_absent else _take(rest, stored.name)
        for name, part in zip(stored.theirs, stored.export(config, tensor), strict=True):
            out[name] = part.float().contiguous()
    if rest:
        raise ConfigError(
            f"the weights hold tensors that the config does not have: "
            f"{', '.join(sorted(rest)[:5])}. Are these another run's weights?"
        )
    return out


def not_restored(
    target: Target, config: RunConfig, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return those of our tensors that `restore` would not give back bit for bit.

    That is so where the factor is no power of two (sqrt(hidden_size): of two neighbouring numbers,
    both may round to the same product), or where the product leaves fp32's normal range.

    Args:
        target: The class that is exported to.
        config: The run.
        state: Our fp32 masters by global name.
    """
    lost = {}
    factors = target.factors(config, state[EMBEDDING])
    for stored in stored_tensors(target, config, factors):
        if stored.factor != 1.0 and not stored.is_absent:
            tensor = state[stored.name]
            if not same_bits(_divided(_times(tensor, stored.factor), stored.factor), tensor):
                lost[stored.name] = tensor.contiguous()
    return lost


def restore(
    target: Target,
    config: RunConfig,
    factors: Factors,
    read: Read,
    originals: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield our tensors by global name, one at a time.

    Args:
        target: Class that the weights were stored in.
        config: The run's config.
        factors: By what the class stores our weights multiplied.
        read: Returns a tensor of the class by its name, in fp32.
        originals: What `not_restored` returned at the export; used where it still is what the class
            stores.

    Raises:
        ConfigError: The config has no biases, and one of the class's is not zero.
    """
    for stored in stored_tensors(target, config, factors):
        parts = [read(name) for name in stored.theirs]
        if stored.is_absent:
            if any(part.count_nonzero() for part in parts):
                raise ConfigError(
                    f"{stored.theirs[0]}: is not zero, but model.use_bias = false. The weights "
                    "were changed after the export"
                )
            continue
        original = originals.get(stored.name)
        if original is not None and _is_stored(stored, config, original, parts):
            yield stored.name, original
        else:
            yield stored.name, stored.restore(config, parts).contiguous()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two fp32 tensors have the same shape and bits; unlike ==, 0 is not -0."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def _is_stored(stored: Stored, config: RunConfig, original: Tensor, parts: list[Tensor]) -> bool:
    """Return True if the parts are what an export of the original would store."""
    if original.dtype != torch.float32:
        return False
    mine = stored.restore(config, parts)
    return mine.shape == original.shape and all(
        map(same_bits, stored.export(config, original), parts)
    )


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Return the product with `factor`; the tensor itself for 1, which keeps a NaN's bits."""
    return tensor if factor == 1.0 else tensor * factor


def _divided(product: Tensor, factor: float) -> Tensor:
    """Return a tensor whose product with `factor` is `product`, where there is one, else nearby."""
    if factor == 1.0:
        return product
    quotient = product / factor
    # The quotient is rounded. Its product almost always is the one again, but for sqrt(2048) and
    # 0x1.6a09e8 only the product of its neighbour is.
    for direction in (-torch.inf, torch.inf):
        neighbour = torch.nextafter(quotient, torch.full_like(quotient, direction))
        is_it = (quotient * factor != product) & (neighbour * factor == product)
        quotient = torch.where(is_it, neighbour, quotient)
    return quotient


def _take(rest: dict[str, Tensor], name: str) -> Tensor:
    """Remove a tensor from `rest` and return it; raise ConfigError if it is missing."""
    if name not in rest:
        raise ConfigError(
            f"{name}: missing from the weights, but the config needs it. Are these another run's "
            "weights?"
        )
    return rest.pop(name)

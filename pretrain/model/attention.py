"""Attention for Megatron's TransformerLayer, and the position method of a rank.

Core attention asks the position method what to add to the scores, and calls
`pretrain.kernels.dispatch.attention` to compute the result. Self-attention is Megatron's, except
that it can take the gradients of queries, keys and values from one buffer without a copy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch._C import _dispatch_tls_local_exclude_set, _dispatch_tls_local_include_set

from pretrain import platform
from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.config.run import RunPhase
from pretrain.kernels.call import of_heads
from pretrain.kernels.context import context_attention
from pretrain.kernels.dispatch import attention
from pretrain.kernels.reference import attention_reference
from pretrain.model.cache import KeyCache
from pretrain.model.loss import product
from pretrain.positions.base import OWN, layers
from pretrain.topology import context_group, own_part


class Positions(nn.Module):
    """The model's position method, for the heads of this tensor-parallel rank.

    All layers and chunks of the rank share one instance.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config, self.method = config, config.position
        # A list, so that the methods stay alive: `_fixed` has their ids as keys.
        self.methods = layers(config)
        tensor_size = parallel_state.get_tensor_model_parallel_world_size()
        count = config.model.num_attention_heads // tensor_size
        first = parallel_state.get_tensor_model_parallel_rank() * count
        self.heads = slice(first, first + count)
        for name, shape in self.method.tensors(config).items():
            if not name.startswith(OWN):
                continue
            is_shared = name.removeprefix(OWN) in self.method.shared_by_heads
            part = nn.Parameter(torch.empty(shape if is_shared else (count, *shape[1:])))
            # Mark parameters as Megatron does: shared ones for summing their gradients over tensor
            # ranks, and all others as split along dimension 0, the heads.
            if is_shared:
                part.sequence_parallel = True  # type: ignore[attr-defined]
            else:
                set_tensor_model_parallel_attributes(part, is_parallel=True, dim=0, stride=1)
            self.register_parameter(name.removeprefix(OWN), part)
        # Plain tensors, because casting the module to bf16 would round buffers.
        self._fixed: dict[tuple[torch.device, int], dict[str, Any]] = {}

    @property
    def megatron_type(self) -> str:
        """GPTModel's position_embedding_type.

        Raises:
            ConfigError: What the method adds to the embeddings would never be added.
        """
        method, rotates = self.method, self.method.rope() is not None
        if not method.adds_to_embeddings(self.config):
            return "rope" if rotates else "none"
        if rotates:
            raise ConfigError(
                f"{type(method).__name__} has `rope` and adds to the embeddings, and Megatron's "
                "GPTModel does only one of the two. Rotate in `queries_and_keys` instead"
            )
        # Makes GPTModel create a position table, which `AddedPositions` may replace.
        return "learned_absolute"

    def score_terms(self, device: torch.device, layer: int) -> dict[str, Any]:
        """Return what is added to the attention scores of this rank's heads.

        Args:
            device: The device of the queries.
            layer: The layer, from 0 in the whole model.

        Returns:
            Keyword arguments of `pretrain.kernels.dispatch.attention`.
        """
        method = self.methods[layer]
        # By attribute, because the attribute access makes ZeRO 3 gather a sharded parameter.
        all_own = {name: getattr(self, name) for name in self._parameters}
        if all_own and (own := self.method.own_of_layer(layer, all_own)):
            return method.score_terms(self.config, self.heads, own, device)
        key = device, id(method)
        if key not in self._fixed:
            self._fixed[key] = method.score_terms(self.config, self.heads, {}, device)
        return self._fixed[key]


class AddedPositions(nn.Module):
    """Map position ids [B, S] to what the method adds to the embeddings, [B, S, hidden]."""

    dtype_marker: Tensor
    """An empty buffer. Casting the model casts it too, so it has the dtype of the embeddings."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("dtype_marker", torch.empty(0), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        added = self.config.position.embedded(self.config, position_ids)
        assert added is not None, "a position method that overrides `embedded` returns a tensor"
        return added.to(self.dtype_marker.dtype)


class SelfAttention(megatron_attention.SelfAttention):  # type: ignore[misc]  # Megatron ships no types
    """Megatron's self-attention, with a split into queries, keys and values that saves a copy."""

    def __init__(self, *args: Any, is_gpu: bool, **named: Any) -> None:
        """Build Megatron's self-attention.

        Args:
            *args: Megatron's arguments.
            is_gpu: On a GPU, kernels may write the gradients of queries, keys and values to one
                buffer.
            **named: Megatron's arguments.
        """
        super().__init__(*args, **named)
        self.clip_qkv = self.core_attention.position[0].config.model.clip_qkv
        # Computed here, because a compiled layer must not depend on the class of a method.
        self.rotates = self.core_attention.method.rope() is not None
        self.split = _Split.apply if is_gpu else functools.partial(torch.split_with_sizes, dim=-1)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [S, B, hidden], and the bias, which the layer adds later.

        Args:
            hidden_states: Inputs of the layer, [S, B, hidden].
            attention_mask: As in `CoreAttention.forward`.
            rotary_pos_emb: Angles that Megatron's block passes to every layer. A layer whose method
                has no rotation ignores them.
        """
        mixed, _ = product(self.linear_qkv, hidden_states)
        if self.clip_qkv is not None:
            # Before any rotation, as in MPT and OLMo.
            mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
        length, batch, _ = mixed.shape
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = self.num_attention_heads_per_partition
        # [S, B, groups, heads of a group + 2, D]: the heads of a group are next to each other.
        mixed = mixed.view(length, batch, groups, -1)
        query, key, value = self.split(mixed, [heads // groups * width, width, width])
        if heads != groups:
            query = query.reshape(length, batch, heads, width)
        if self.config.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary_pos_emb is not None and self.rotates:
            whose = {"config": self.config, "cp_group": self.pg_collection.cp}
            query, key = (apply_rotary_pos_emb(x, rotary_pos_emb, **whose) for x in (query, key))
        attend = self.core_attention
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        return product(self.linear_proj, attend(query, key, value, attention_mask))


class _Split(torch.autograd.Function):
    """Split the last dimension. The backward pass copies nothing if the gradients share one buffer.

    The backward pass of torch.split concatenates the gradients, which reads and writes 3 x hidden
    values per token and layer.
    """

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        parts: tuple[Tensor, ...] = torch.split_with_sizes(mixed, sizes, dim=-1)
        return tuple(parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = joined_buffer(gradients, ctx.sizes)
        return (torch.cat(gradients, dim=-1) if whole is None else whole), None


def joined_buffer(parts: tuple[Tensor, ...], sizes: list[int]) -> Tensor | None:
    """Return the tensor of which `parts` are views, side by side in the last dimension, or None.

    Args:
        parts: Tensors whose shapes differ only in the last dimension.
        sizes: Their last dimensions.

    Returns:
        A contiguous tensor that shares the memory of all parts.
    """
    first = parts[0]
    shape = (*first.shape[:-1], sum(sizes))
    stride = torch.empty(shape, device="meta").stride()
    start = first.storage_offset()
    for part, size in zip(parts, sizes):
        same_memory = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        # The stride of a dimension with one element is arbitrary.
        strides = zip(part.shape, part.stride(), stride)
        same_layout = all(actual == wanted for n, actual, wanted in strides if n > 1)
        if not same_memory or not same_layout or part.storage_offset() != start:
            return None
        start += size
    return first.as_strided(shape, stride)


class CoreAttention(MegatronModule):  # type: ignore[misc]  # Megatron ships no types
    """Compute attention over the heads of this tensor-parallel rank.

    It replaces Megatron's DotProductAttention, which refuses a score bias
    (megatron/core/transformer/dot_product_attention.py).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        position: Positions,
        **unused: Any,
    ) -> None:
        """Initialize with the arguments that Megatron's SelfAttention passes, and `position`.

        Args:
            config: Megatron's configuration.
            layer_number: Number of the layer in the whole model, from 1.
            position: The position method, one instance for all layers of the rank.
            **unused: Values that come from the run's config here, features that this model does
                not have, and settings of Transformer Engine's context parallelism.
        """
        super().__init__(config=config)
        # The tuple hides the module from torch, which would otherwise register it as a submodule of
        # every layer, and list the parameters of the shared method once per layer.
        self.position = (position,)
        self.layer = layer_number - 1
        self.method = position.methods[self.layer]
        self.backend = position.config.model.attention_backend
        # In a masked model every token sees all others.
        self.causal = not position.config.is_masked
        self.part, self.parts = context_group().rank(), context_group().size()
        self.cache: KeyCache | None = None
        """Keys and values of the text so far, while a text is read in pieces."""
        self.dropout = config.attention_dropout
        # A tensor, because a compiled layer's graph would hold a number as a constant.
        self.number = torch.tensor(id(self))
        _CORES[id(self)] = self

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """Return the attention output of this rank's heads, [S, B, heads * D].

        Args:
            query: [S, B, heads, D].
            key: [S, B, groups, D].
            value: [S, B, groups, D].
            attention_mask: Not a mask, but the document_starts of
                `pretrain.kernels.dispatch.attention`, int32 [B, S] or None, for which Megatron has
                no argument. Kernels apply the causal mask themselves.
            **unused: Further arguments of Megatron's interface.
        """
        if torch.compiler.is_compiling():
            inputs = [query, key, value, *self.position[0]._parameters.values()]
            wanted = torch.is_grad_enabled()
            return core_attention(inputs, attention_mask, self.number, wanted)[0]  # type: ignore[no-any-return]  # torch's
        if self.cache is None:
            out = self._attend(query, key, value, attention_mask=attention_mask)
        else:
            slopes = self.slopes(query.device)
            assert slopes is not None
            scale = query.shape[3] ** -0.5
            out = self.cache.attend(query, key, value, slopes, scale, self._attend)
        return out.flatten(2)

    def slopes(self, device: torch.device) -> Tensor | None:
        """Return the slopes of this rank's heads, fp32 [heads], or None if the layer has none."""
        return self.position[0].score_terms(device, self.layer).get("slopes")

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: slice | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [S, B, heads, D]; `heads` selects some of this rank's."""
        dropout = self.dropout if self.training else 0.0
        position, part, parts = self.position[0], self.part, self.parts
        first, length = part * key.shape[0], parts * key.shape[0]
        query, key = self.method.queries_and_keys(position.config, query, key, first, length)
        terms = position.score_terms(query.device, self.layer)
        if heads is not None:
            terms = of_heads(terms, heads)
        # Tensor-parallel ranks hold different heads and must draw different masks, so dropout uses
        # the tracked generator that is seeded per tensor rank. Under sequence parallelism Megatron
        # has already forked it around all layers (megatron/core/transformer/transformer_block.py).
        fork = dropout > 0 and not self.config.sequence_parallel
        # With context parallelism this rank holds only a part of the sequence.
        compute = attention
        if parts > 1:
            compute = functools.partial(context_attention, group=context_group())
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            return compute(
                query,
                key,
                value,
                causal=self.causal,
                document_starts=attention_mask,
                dropout_p=dropout,
                backend=self.backend,
                **terms,
            )


# ---- Core attention as one opaque operation of a compiled layer ----
# The autograd graph of its forward pass is kept until the backward pass, under a number. The number
# is passed in a tensor, because operations of a compiled layer exchange only tensors. Autograd
# saves that tensor for the backward pass. Once autograd has freed it, no backward pass can follow,
# and the graph is freed, too.

_CORES: WeakValueDictionary[int, CoreAttention] = WeakValueDictionary()
_GRAPHS: dict[int, tuple[Tensor, list[Tensor]]] = {}
"""Outputs and inputs of the forward passes whose backward pass may still run."""
_NUMBERS = itertools.count()
_DISPATCH = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()
"""Dispatch keys of plain code. torch runs the body of an operation below autograd
(torch/_library/autograd.py); these turn autograd on again inside it."""


@torch.library.custom_op("pretrain::core_attention", mutates_args=())
def core_attention(
    inputs: list[Tensor], document_starts: Tensor | None, core: Tensor, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Return the output of `CoreAttention.forward`, and the number of its graph, int64.

    Args:
        inputs: Query, key and value of `CoreAttention.forward`, and all parameters of the position
            method.
        document_starts: The attention_mask of `CoreAttention.forward`.
        core: The number of the core attention, int64.
        wanted: Whether there will be a backward pass.
    """
    leaves = [x.detach().requires_grad_(wanted) for x in inputs[:3]]
    with torch._C._ForceDispatchKeyGuard(*_DISPATCH), torch.set_grad_enabled(wanted):
        out = _CORES[int(core)](*leaves, document_starts)
    # The memory of the number's tensor. It outlives the Python object of the tensor: autograd saves
    # the memory, and returns it in a new object.
    number = np.array(next(_NUMBERS))
    if wanted:
        _GRAPHS[int(number)] = out, [*leaves, *inputs[3:]]
        finalize(number, _GRAPHS.pop, int(number), None)
    return out.detach().contiguous(), torch.from_numpy(number)


@torch.library.custom_op("pretrain::core_attention_backward", mutates_args=())
def _core_attention_backward(d_out: Tensor, number: Tensor, like: list[Tensor]) -> list[Tensor]:
    out, inputs = _GRAPHS.pop(int(number))
    # Activation checkpointing within attention recomputes here, which needs autograd.
    with torch._C._ForceDispatchKeyGuard(*_DISPATCH):
        found = torch.autograd.grad(out, inputs, d_out, materialize_grads=True)
    return [x.contiguous() for x in found]


def _fake(inputs: list[Tensor], *others: Any) -> tuple[Tensor, Tensor]:
    out = inputs[0].new_empty(*inputs[0].shape[:2], inputs[0].shape[2:].numel())
    return out, torch.empty((), dtype=torch.int64, device="cpu")


def _backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[list[Tensor], None, None, None]:
    number, *like = ctx.saved_tensors
    return _core_attention_backward(d_out, number, like), None, None, None


core_attention.register_fake(_fake)
core_attention.register_autograd(
    _backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1], *inputs[0]),
)
_core_attention_backward.register_fake(lambda d, n, like: [x.new_empty(x.shape) for x in like])


# ---- Check at the start of every run that attention adds the config's positions ----
# When one attention implementation replaces another, a score bias is easily lost without an error.
# The check compares the function that the model will call with a dense reference, for the heads of
# this rank.


# Largest allowed difference from the fp64 reference. Outputs are of order 1, so these are a few
# units in the last place of the data type.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}

# Sequence length of the random inputs on each context rank.
LENGTH = 64


@torch.no_grad()
def check_positions(
    config: RunConfig, chunks: list[GPTModel], later: Sequence[RunPhase] = ()
) -> None:
    """Compare this rank's core attention with a dense reference on random inputs.

    One layer of each method is run. Counting checks that all layers use `CoreAttention`.

    Args:
        config: The run's config in the present phase.
        chunks: This rank's model.
        later: Further phases, whose attention is only called, so that a backend that cannot serve
            one is refused before the run trains.

    Raises:
        RunFailed: The outputs differ, or a layer uses another attention.
        ConfigError: model.attention_backend cannot serve this model on this device.
    """
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, CoreAttention)]
    expected_layers = sum(len(chunk.decoder.layers) for chunk in chunks)
    if len(layers) != expected_layers:
        raise RunFailed(
            f"{expected_layers - len(layers)} of {expected_layers} layers on this rank do not use "
            "pretrain.model.attention.CoreAttention, so their attention would have no positions"
        )
    for core in {id(core.method): core for core in layers}.values():
        _check_layer(config, core)
    for phase in later if layers else ():
        position = Positions(phase.config).to(platform.device())
        for number in {id(method): n for n, method in enumerate(position.methods, 1)}.values():
            core = CoreAttention(layers[0].config, number, position=position)
            try:
                _output(core, *_random_inputs(phase.config))
            except ConfigError as refusal:
                raise ConfigError(f"phase {phase.number}: {refusal}") from None


def _check_layer(config: RunConfig, core: CoreAttention) -> None:
    """Compare the core attention of one layer with the dense reference."""
    query, key, value, starts = whole = _random_inputs(config)
    length = len(query)
    training = core.training
    actual = _output(core, *whole)
    core.train(training)
    query, key = core.method.queries_and_keys(config, query, key, 0, length)
    expected = attention_reference(
        query,
        key,
        value,
        **_expected_terms(config, core),
        document_starts=starts,
        causal=not config.is_masked,
    )[own_part(length)].float()
    error = float((actual.view(expected.shape).float() - expected).abs().max())
    tolerance = TOLERANCE[config.train.precision]
    # Written with "not", so that a NaN fails.
    if not error <= tolerance:
        raise RunFailed(
            f"position.method = {core.method.method}: attention differs from the dense "
            f"reference by {error:.2g}, and rounding explains at most {tolerance:.0e}"
        )


def _output(
    core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None
) -> Tensor:
    """Return what the core attention of this context rank computes of whole sequences."""
    own = own_part(len(query))
    parts = query[own], key[own], value[own], None if starts is None else starts[:, own]
    try:
        # Some backends refuse dropout, so call once with dropout to raise that error now.
        if core.dropout:
            core.train()(*parts)
        return core.eval()(*parts)  # type: ignore[no-any-return]  # torch's
    except ValueError as refusal:
        raise ConfigError(f"model.attention_backend = {core.backend}: {refusal}") from None


def _random_inputs(config: RunConfig) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return random query [length, 1, heads, D], key, value [length, 1, groups, D] of a rank.

    Beside them document_starts [1, length], if the config has documents: two of unequal lengths.
    """
    length = LENGTH * context_group().size()
    starts = None
    if config.data.per_document_attention:
        index = torch.arange(length, dtype=torch.int32, device=platform.device())
        starts = torch.where(index < length // 3, 0, length // 3)[None].int()
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    generator = torch.Generator().manual_seed(0)
    heads = config.model.num_attention_heads // tensor_size
    groups = config.num_query_groups // tensor_size
    query, key, value = (
        torch.randn(length, 1, count, config.head_dim, generator=generator).to(
            platform.device(), platform.DTYPES[config.train.precision]
        )
        for count in (heads, groups, groups)
    )
    return query, key, value, starts


def _expected_terms(config: RunConfig, core: CoreAttention) -> dict[str, Any]:
    """Return the keyword arguments of the reference: what should be added to this rank's scores.

    Terms that are not learned are computed for all heads and then sliced, which checks that the
    rank has chosen its own heads. Learned terms can only come from the model.
    """
    (position,) = core.position
    if position.method.own_of_layer(core.layer, dict(position.named_parameters())):
        return position.score_terms(platform.device(), core.layer)
    every_head = slice(0, config.model.num_attention_heads)
    whole = core.method.score_terms(config, every_head, {}, platform.device())
    return of_heads(whole, position.heads)

"""Build this rank's chunks of Megatron's GPTModel from a config.

The model is Megatron's, with this project's core attention and position methods. Initial weights
are a pure function of (run.seed, global name), so that every layout starts from the same model.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from pretrain import platform
from pretrain.config import ConfigError, RunConfig
from pretrain.config.tensors import TIED
from pretrain.model import adaptive
from pretrain.model.attention import AddedPositions, CoreAttention, Positions, SelfAttention
from pretrain.model.loss import FusedLossLayer, FusedLossModel, product
from pretrain.positions.base import LEARNED_TABLE, Rope, generator
from pretrain.startup import compile_when_called
from pretrain.topology import own_part

# ---- Decide which operations of the model are fused, from `train.fusion` and the device ----
# Besides attention, three parts of the model have a fused form:
#
#     compiled regions    bias with GELU, bias with dropout and residual: Megatron's own functions
#                         under torch.compile (megatron/core/fusions)
#     fused loss          logits with cross-entropy (`pretrain.model.loss`)
#     weight gradients    added to fp32 buffers by the matrix product that computes them
#                         (`pretrain.model.loss`), where the optimizer keeps such buffers


@dataclass(frozen=True)
class Fusion:
    """Which operations of a model are fused."""

    compiled: bool
    """Compile small regions that torch.compile turns into one kernel each."""

    layers: bool
    """In training, compile every layer as a whole instead of regions of it."""

    loss: bool
    """Compute the loss from the hidden states, without a second copy of the logits."""

    weight_gradients: bool
    """Add weight gradients to fp32 buffers in the matrix product."""

    def activation(self, config: RunConfig) -> bool:
        """Return True if the activation is fused with its bias and its gate.

        Megatron has two such functions. One needs a bias and computes GELU's tanh approximation,
        whatever activation its configuration names (megatron/core/fusions/fused_bias_gelu.py). The
        other computes SwiGLU, with or without a bias (fused_bias_swiglu.py).
        """
        m = config.model
        has_function = m.use_bias and m.hidden_act == "gelu_pytorch_tanh"
        return self.compiled and (m.hidden_act == "silu" if m.gated_linear_unit else has_function)


def choose_fusion(config: RunConfig) -> Fusion:
    """Return what is fused in this process.

    By default nothing is fused on a CPU: compilation would take tens of seconds at every start.
    """
    is_gpu, can_compile, can_accumulate_products = _abilities()
    layers = config.train.fusion == "layers" and can_compile
    wanted = config.train.fusion in ("layers", "on") or (config.train.fusion == "auto" and is_gpu)
    return Fusion(
        compiled=wanted and can_compile and not layers,
        layers=layers,
        loss=wanted,
        # A compiled layer returns weight gradients instead of adding them to a buffer.
        weight_gradients=wanted and can_accumulate_products and not layers,
    )


def _abilities() -> tuple[bool, bool, bool]:
    """Return whether this is a GPU, can compile, and can accumulate products in fp32.

    Inside `pretrain.plan.simulation` the answers are those of the simulated GPU.
    """
    return platform.has_cuda(), platform.can_compile(), platform.can_accumulate_products()


ACTIVATIONS = {
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}
"""Value of model.hidden_act, which is Hugging Face's name -> function."""


def build_model(config: RunConfig, device: torch.device | None = None) -> list[GPTModel]:
    """Build and initialize this rank's model chunks.

    Args:
        config: The run's config. The process groups must have been set up from the same config
            (`pretrain.topology.initialize`).
        device: Where to put the model; None means this process's device. On the meta device
            nothing is allocated or initialized.

    Returns:
        One chunk, or one per virtual pipeline stage, in the data type of train.precision.
    """
    device = device or platform.device()
    transformer = transformer_config(config)
    num_virtual_stages = config.parallel.virtual_pipeline_model_parallel_size
    virtual_stages = range(num_virtual_stages) if num_virtual_stages else [None]
    # Weights are drawn on the CPU in fp32 and moved afterwards, so that they do not depend on the
    # device.
    with torch.device("meta" if device.type == "meta" else "cpu"):
        position = Positions(config)
        chunks = [_build_chunk(config, transformer, position, stage) for stage in virtual_stages]
    if device.type != "meta":
        initialize(config, chunks)
    dtype = platform.DTYPES[config.train.precision]
    return [chunk.to(device=device, dtype=dtype) for chunk in chunks]


def transformer_config(config: RunConfig) -> TransformerConfig:
    """Translate a config into Megatron's TransformerConfig. No other function makes one."""
    m, p, dtype = config.model, config.parallel, platform.DTYPES[config.train.precision]
    recompute = config.train.recompute_granularity
    fusion = choose_fusion(config)
    fuses_activation = fusion.activation(config)
    fuses_gelu = fuses_activation and not m.gated_linear_unit
    return TransformerConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.head_dim,
        qk_layernorm=m.qk_layernorm,
        ffn_hidden_size=config.ffn_hidden_size,
        gated_linear_unit=m.gated_linear_unit,
        # Megatron's fused bias-GELU is the tanh approximation, and is chosen by torch's exact GELU.
        activation_func=F.gelu if fuses_gelu else ACTIVATIONS[m.hidden_act],
        add_bias_linear=m.use_bias,
        add_qkv_bias=m.add_qkv_bias,
        layernorm_epsilon=m.layernorm_epsilon,
        hidden_dropout=m.hidden_dropout,
        attention_dropout=m.attention_dropout,
        tensor_model_parallel_size=p.tensor_model_parallel_size,
        pipeline_model_parallel_size=p.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline_model_parallel_size,
        # Megatron leaves attention over context ranks to Transformer Engine, which ours replaces.
        # Megatron still needs the size for the lengths of what it sends and rotates.
        context_parallel_size=p.context_parallel_size,
        pipeline_model_parallel_layout=_pipeline_layout(config),
        sequence_parallel=p.sequence_parallel,
        # `build_model` casts the initialized model to the training precision.
        params_dtype=torch.float32,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        # `initialize` fills the weights.
        perform_initialization=False,
        use_cpu_initialization=True,
        # Megatron's fusions of bias with GELU or SwiGLU and of bias with dropout and residual are
        # plain torch.compile (megatron/core/jit.py and megatron/core/fusions). Its fused
        # cross-entropy is not used, because it rounds the logits' gradient to bf16 in every
        # precision and keeps logits in fp32 (fused_cross_entropy.py): see `pretrain.model.loss`.
        bias_activation_fusion=fuses_activation,
        bias_dropout_fusion=fusion.compiled,
        # NCCL turns a batch of sends and receives into one call; gloo runs them one by one anyway.
        # The synchronization after a batch is a workaround for a bug of older PyTorch versions
        # (megatron/core/model_parallel_config.py).
        batch_p2p_comm=platform.device().type == "cuda",
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
    )


def _pipeline_layout(config: RunConfig) -> list[list[str]] | None:
    """Return the contents of every pipeline chunk, as Megatron's pipeline_model_parallel_layout.

    By default Megatron requires that the layers divide evenly among the chunks.
    """
    if config.parallel.pipeline_model_parallel_size == 1:
        return None
    stages = [["decoder"] * n for n in config.layers_per_chunk]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


class _Norm:
    """One of torch's norms, usable under sequence parallelism.

    Megatron's own wrapper of torch's norms refuses sequence parallelism
    (megatron/core/transformer/torch_norm.py).
    """

    def __init__(
        self: Any,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        is_partial: bool | None = None,
        **unused: Any,
    ) -> None:
        """Initialize with the arguments that Megatron's TransformerLayer passes.

        Args:
            config: Megatron's configuration.
            hidden_size: Size of the normalized dimension.
            eps: Added to the variance or the mean square.
            is_partial: Whether each tensor rank normalizes a different part of its input; None:
                only under sequence parallelism.
            **unused: Further arguments of Megatron's norms.
        """
        options = {"bias": config.add_bias_linear} if isinstance(self, nn.LayerNorm) else {}
        super().__init__(hidden_size, eps=eps, **options)  # type: ignore[call-arg]  # torch's norm
        mark_partial(self, config.sequence_parallel if is_partial is None else is_partial)


class LayerNorm(_Norm, nn.LayerNorm):
    """torch's LayerNorm."""


class RMSNorm(_Norm, nn.RMSNorm):
    """torch's RMSNorm."""


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
"""Values of model.normalization."""


def mark_partial(norm: nn.Module, is_partial: bool) -> None:
    """Mark whether the gradients of a norm's parameters must be summed over tensor ranks.

    They must if each rank normalizes a different part of the sequence, or different heads.
    """
    for parameter in norm.parameters():
        # The attribute's name is Megatron's (distributed/finalize_model_grads.py), and torch's
        # Parameter does not declare it. `pretrain.optim` reads it.
        parameter.sequence_parallel = is_partial  # type: ignore[attr-defined]


# ---- layers ----
# Megatron's layers with less work on the host. The originals check in every forward pass for
# features that this model never has (inference, offloading, cross-attention, profiler ranges). The
# operations and their order are Megatron's, so results are equal bit for bit.


class Block(TransformerBlock):  # type: ignore[misc]  # Megatron ships no types
    """Megatron's stack of layers."""

    # Megatron's __call__ looks for its own CUDA graphs, which are not used here.
    __call__ = nn.Module.__call__

    def forward(self, hidden_states: Any, **given: Any) -> Tensor:
        """Return the output of all layers and of the final norm, [S, B, hidden].

        Args:
            hidden_states: The embeddings, [S, B, hidden]; None on all stages after the first.
            **given: GPTModel's arguments, of which layers use attention_mask and rotary_pos_emb.
        """
        hidden: Tensor = hidden_states if self.pre_process else self.input_tensor
        of_layers = given["attention_mask"], given["rotary_pos_emb"]
        recomputes = self.config.recompute_granularity == "full" and self.training
        fork = self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            for layer in self.layers:
                if recomputes:
                    hidden = tensor_parallel.checkpoint(layer, False, hidden, *of_layers)
                else:
                    hidden = layer(hidden, *of_layers)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)


class Layer(TransformerLayer):  # type: ignore[misc]  # Megatron ships no types
    """Megatron's pre-LN layer, without features that this model never has.

    With model.parallel_residual the MLP reads the layer's input instead of the sum after attention:
    x + attention(norm(x)) + mlp(norm(x)), where the two norms have their own weights.
    """

    # Megatron's __call__ looks for its own CUDA graphs, which are not used here.
    __call__ = nn.Module.__call__

    def __init__(self, *args: Any, run: RunConfig, **named: Any) -> None:
        """Build Megatron's layer.

        Args:
            *args: Megatron's arguments.
            run: The run's config.
            **named: Megatron's arguments.
        """
        super().__init__(*args, **named)
        self.is_parallel = run.model.parallel_residual
        self.activation_dropout = run.model.activation_dropout
        # Always set, because compiled code does not notice an attribute that is added later.
        for module in (*self.self_attention.children(), *self.mlp.children()):
            module.is_float8 = run.train.fp8
        self.is_compiled = choose_fusion(run).layers

    def forward(self, *inputs: Any) -> Tensor:
        """Return the layer's output, [S, B, hidden]. Arguments are those of `compute`."""
        # Not in evaluation, whose windows of many lengths would each be compiled.
        compute = _compiled_layer if self.is_compiled and self.training else Layer.compute
        return compute(self, *inputs)

    def compute(self, hidden_states: Tensor, *of_attention: Tensor | None) -> Tensor:
        """Return the layer's output, [S, B, hidden].

        Args:
            hidden_states: The layer's input, [S, B, hidden].
            *of_attention: attention_mask and rotary_pos_emb of `SelfAttention.forward`.
        """
        # Nested calls, so that no variable keeps a tensor alive while the MLP runs.
        attended = self._added(
            self.self_attention(self.input_layernorm(hidden_states), *of_attention), hidden_states
        )
        read = hidden_states if self.is_parallel else attended
        return self._added(self._mlp(self.pre_mlp_layernorm(read)), attended)

    def _mlp(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what Megatron's MLP returns: the output [S, B, hidden] and the bias."""
        config, mlp = self.config, self.mlp
        inner, bias = product(mlp.linear_fc1, hidden_states)
        if config.bias_activation_fusion:
            is_gated = config.gated_linear_unit
            inner = (bias_swiglu_impl if is_gated else bias_gelu_impl)(inner, bias)
        else:
            if bias is not None:
                inner = inner + bias
            if config.gated_linear_unit:
                gate, inner = inner.chunk(2, dim=-1)
                inner = config.activation_func(gate) * inner
            else:
                inner = config.activation_func(inner)
        if self.activation_dropout and self.training:
            inner = self._dropped(inner)
        return product(mlp.linear_fc2, inner)

    def _dropped(self, activations: Tensor) -> Tensor:
        """Apply dropout to fc2's input, which Megatron does not.

        As in fairseq's feed-forward block (modules/transformer_layer.py,
        `activation_dropout_module`). Tensor ranks hold different channels, and must draw different
        masks: see the core attention's forward in `pretrain.model.attention`.
        """
        # A compiled layer is not split over tensor ranks, so it needs no generator of its own.
        fork = not (self.config.sequence_parallel or torch.compiler.is_compiling())
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            # F.dropout calls this on a GPU. On a CPU F.dropout would keep a mask in the input's
            # data type, and this keeps a mask of bytes.
            return torch.native_dropout(activations, self.activation_dropout, True)[0]

    def _added(self, part: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
        """Return residual + dropout(output + bias) of a part of the layer."""
        if self.config.bias_dropout_fusion:
            add = get_bias_dropout_add(self.training, True)
            return add(part, residual, self.hidden_dropout)  # type: ignore[no-any-return]  # Megatron's
        out, bias = part
        if bias is not None:
            out = out + bias
        if self.hidden_dropout and self.training:
            out = F.dropout(out, self.hidden_dropout)
        return residual + out


_compiled_layer = compile_when_called(Layer.compute, fullgraph=True)
"""Compiled once for all layers, whose weights are arguments of its graph."""


def _layer_spec(config: RunConfig, position: Positions) -> ModuleSpec:
    """Return the modules of a layer: Megatron's pre-LN layer with our core attention."""
    norm = NORMS[config.model.normalization]
    # All heads share the weights of these norms, and a tensor rank has only some of the heads.
    of_heads = IdentityOp
    if config.model.qk_layernorm:
        of_heads = ModuleSpec(norm, params={"is_partial": True})
    core = ModuleSpec(CoreAttention, {"position": position})
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=core,
        linear_proj=RowParallelLinear,
        q_layernorm=of_heads,
        k_layernorm=of_heads,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        Layer,
        {"run": config},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(SelfAttention, {"is_gpu": _abilities()[0]}, attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _build_chunk(
    config: RunConfig,
    transformer: TransformerConfig,
    position: Positions,
    virtual_stage: int | None,
) -> GPTModel:
    """Build one model chunk; the first includes the embedding, the last the output layer.

    Args:
        config: The run's config.
        transformer: Megatron's configuration of it.
        position: The position method, shared by all chunks of the rank.
        virtual_stage: Number of the chunk on this rank under the interleaved schedule, else None.
    """
    num_layers = get_num_layers_to_build(transformer, vp_stage=virtual_stage)
    # With None, Megatron's block has no norm after its last layer.
    final_norm = NORMS[config.model.normalization] if config.model.final_layernorm else None
    spec = TransformerBlockSubmodules([_layer_spec(config, position)] * num_layers, final_norm)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
    fusion = choose_fusion(config)
    is_adaptive = config.model.adaptive_cutoffs is not None
    # An adaptive softmax computes losses from few logits. With fusion = "off" it computes the
    # probabilities of all words instead, as a plain reference.
    fuses_loss = fusion.loss or (is_adaptive and config.train.fusion != "off")
    model_class = FusedLossModel if fuses_loss else GPTModel
    # GPTModel requires a base and a share even without rotation.
    rope = config.position.rope() or Rope(10_000.0, 1.0)
    model = model_class(
        transformer,
        spec,
        # Adaptive layers replace the embedding and the output layer.
        1 if is_adaptive else config.padded_vocab_size,
        config.position.table_end(config) or config.data.sequence_length,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=config.model.tie_word_embeddings and not is_adaptive,
        position_embedding_type=position.megatron_type,
        rotary_percent=rope.percent,
        rotary_base=rope.base,
        vp_stage=virtual_stage,
    )
    # GPTModel has no argument for the class of its stack of layers.
    model.decoder.__class__ = Block
    # A submodule, so that its parameters are trained and have names ("position.*").
    model.position = position
    if rope.inverse_frequencies is not None:
        found = rope.inverse_frequencies(2 * len(model.rotary_pos_emb.inv_freq))
        model.rotary_pos_emb.inv_freq = found.to(model.rotary_pos_emb.inv_freq)
    if config.position.rope() is not None and config.parallel.context_parallel_size > 1:
        _rotate_own_part(model)
    if is_adaptive:
        adaptive.install(config, model, fusion.compiled or fusion.layers)
    elif fusion.loss and last:
        # GPTModel has no argument for this class. The layer keeps its weight and Megatron's marks
        # on it; only its forward pass changes.
        model.output_layer.__class__ = FusedLossLayer
        model.output_layer.compiled = fusion.compiled or fusion.layers
    _mark_sharded_weights(model)
    if first:
        adds = config.position.adds_to_embeddings(config)
        if adds and LEARNED_TABLE not in config.position.tensors(config):
            model.embedding.position_embeddings = AddedPositions(config)
        if config.model.embedding_layernorm:
            _normalize_embeddings(model, NORMS[config.model.normalization])
        # Scale only the word embeddings, before the position table is added. A hook, because
        # Megatron's embedding has no such factor.
        scale = config.embedding_scale
        if scale != 1.0:
            model.embedding.word_embeddings.register_forward_hook(lambda _m, _i, out: out * scale)
    return model


def _rotate_own_part(model: GPTModel) -> None:
    """Give queries and keys the rotary angles of this context rank's part of the sequence.

    Megatron's rotary embedding returns the angles of two pieces, one from either end of the
    sequence, as Transformer Engine's ring attention needs them (get_pos_emb_on_this_cp_rank in
    megatron/core/models/common/embeddings/rope_utils.py). Without a group it returns all angles.
    """
    model.rotary_pos_emb.cp_group = None
    model.rotary_pos_emb.register_forward_hook(lambda _m, _i, out: out[own_part(len(out))])


def _normalize_embeddings(model: GPTModel, kind: type[LayerNorm | RMSNorm]) -> None:
    """Add a norm on the word embeddings; a hook, because Megatron's embedding has none."""
    embedding, config = model.embedding, model.config
    # Where a position table is added, the sequence is split after that, and every tensor rank
    # normalizes all of it (megatron/core/models/common/embeddings/language_model_embedding.py).
    is_partial = embedding.reduce_scatter_embeddings
    norm = kind(config, config.hidden_size, config.layernorm_epsilon, is_partial=is_partial)
    embedding.word_embeddings_layernorm = norm
    embedding.word_embeddings.register_forward_hook(lambda _m, _i, out: norm(out))


def _mark_sharded_weights(model: GPTModel) -> None:
    """Mark the dimension of each weight that is split over tensor ranks.

    Megatron marks only weights that it initializes itself
    (megatron/core/tensor_parallel/layers.py), and perform_initialization is off.
    `named_parameters` reads the marks.
    """
    for name, module in model.named_modules():
        is_row = isinstance(module, RowParallelLinear)
        is_column = isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding))
        # A tied output layer on the stage of the embedding has no weight itself.
        if (is_row or is_column) and module.weight is not None:
            # Megatron gives the bias the same stride: a gated MLP's outputs are two parts.
            stride = 1 + (name.endswith("linear_fc1") and model.config.gated_linear_unit)
            set_tensor_model_parallel_attributes(module.weight, True, int(is_row), stride)


# ---- Name every parameter of this rank, and say which part of it this rank holds ----
# The global name and shape of a parameter are those of the unsharded model on one process.
# Checkpoints, initial weights and tests use global names, so none of them depends on the layout
# (tensor x pipeline x data). Global names are Megatron's local names, with two exceptions:
#
#     local name                             global name
#     decoder.layers.0.* of a later chunk    decoder.layers.6.* (Megatron numbers layers per chunk)
#     output_layer.weight, if tied           embedding.word_embeddings.weight
#
# Where parameters are: how tensor ranks split them, which pipeline stages hold them, and which
# ranks hold copies:
#
#     parameter                            tensor ranks   pipeline stages     copies
#     linear_qkv, linear_fc1 weight, bias  split, dim 0   the layer's         none
#     linear_fc1 of a gated MLP            both halves    the layer's         none
#                                          split, dim 0
#     linear_proj, linear_fc2 weight       split, dim 1   the layer's         none
#     linear_proj, linear_fc2 bias; norms  replicated     the layer's         tensor rank > 0
#     word_embeddings (vocabulary)         split, dim 0   first; last, if     last stage, if tied
#                                                         tied
#     output_layer, untied (vocabulary)    split, dim 0   last                none
#     position_embeddings (learned);       replicated     first               tensor rank > 0
#     word_embeddings_layernorm
#     word_embeddings.* and output_layer.* whole          the only one    none
#     of an adaptive softmax
#     position.* (heads of slopes, table)  split, dim 0   every               stage > 0
#     position.* shared_by_heads           replicated     every               another rank's
#
# All data-parallel ranks hold the same parameters; `pretrain.optim` handles how ZeRO partitions
# them. Within a data-parallel replica, exactly one rank holds each element of the model with
# `is_copy` False, and saves it.


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start of a part of a tensor in each dimension, and the part's shape."""


@dataclass(frozen=True)
class Named:
    """A parameter of this rank, its global name, and which part of the global tensor it holds."""

    name: str
    """The global name."""

    parameter: nn.Parameter

    shape: tuple[int, ...]
    """Shape of this tensor rank's part."""

    global_shape: tuple[int, ...]
    """Shape in the unsharded model."""

    parts: tuple[Box, ...]
    """The parts of the global tensor that this rank holds, in order: one box, or two if a tensor
    rank has a part of an MLP's gate and a part of the gated projection."""

    is_copy: bool
    """True if another tensor rank or pipeline stage holds the same values and saves them."""

    def slice_of(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor."""
        found = []
        for offset, size in self.parts:
            part = full
            for axis, (start, count) in enumerate(zip(offset, size)):
                part = part.narrow(axis, start, count)
            found.append(part)
        return torch.cat(found) if len(found) > 1 else found[0]


def named_parameters(chunks: list[GPTModel]) -> Iterator[Named]:
    """Yield every parameter of this rank once, in the order of its chunks.

    Do not call this for a model under ZeRO 3, whose parameters have lost their shapes: use
    `ZeroOptimizer.parameters`, which lists them before that.
    """
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    is_first_stage = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    seen: set[int] = set()
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            # Every chunk of this rank has the same position module.
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = _global_name(local_name, chunk)
            shape = tuple(parameter.shape)
            sharded = getattr(parameter, "tensor_model_parallel", False)
            # Megatron marks a sharded parameter with its split dimension, and with the number of
            # consecutive parts of that dimension, each of which is split evenly.
            axis, num_parts = 0, 1
            if sharded:
                axis, num_parts = parameter.partition_dim, parameter.partition_stride
            ranks, rank = (tensor_size, tensor_rank) if sharded else (1, 0)
            parts = _parts(shape, axis, num_parts, ranks, rank)
            global_shape = tuple(n * (ranks if i == axis else 1) for i, n in enumerate(shape))
            # The tied output layer of the last stage repeats the first stage's embedding, and has a
            # mark of Megatron's (setup_embeddings_and_output_layer in megatron/core/models/common/
            # language_module/language_module.py). Every stage holds the position method.
            copy = (
                (not sharded and tensor_rank > 0)
                or getattr(parameter, "shared", False)
                or (name.startswith("position.") and not is_first_stage)
            )
            yield Named(name, parameter, shape, global_shape, parts, copy)


def _parts(
    shape: tuple[int, ...], axis: int, num_parts: int, ranks: int, rank: int
) -> tuple[Box, ...]:
    """Return the boxes that a rank holds of a tensor whose `num_parts` parts are split evenly."""
    size = tuple(n // (num_parts if i == axis else 1) for i, n in enumerate(shape))

    def start(part: int) -> tuple[int, ...]:
        return tuple((part * ranks + rank) * n if i == axis else 0 for i, n in enumerate(size))

    return tuple((start(part), size) for part in range(num_parts))


def _global_name(name: str, chunk: GPTModel) -> str:
    """Return the global name of a parameter that Megatron calls `name` in `chunk`."""
    if name.startswith("decoder.layers."):
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        offset = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        return f"decoder.layers.{int(number) + offset}.{rest}"
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return TIED
    return name


@torch.no_grad()
def initialize(config: RunConfig, chunks: list[GPTModel]) -> None:
    """Fill this rank's parameters with initial values.

    Weights are drawn from normal(0, model.init_method_std); word embeddings, a learned position
    table and an untied output layer from normal(0, config.embedding_init_method_std). The output
    projections of attention and MLP have a standard deviation smaller by sqrt(2 num_layers), as in
    GPT-2, so that the variance of the residual stream does not grow with depth. Norm weights are 1
    and biases 0. Adaptive inputs and an adaptive softmax start like fairseq's (`adaptive`). A
    position method may set its own parameters.

    Each full tensor is drawn from its own generator, seeded by (run.seed, global name), and then
    sliced. The weights therefore do not depend on the layout.

    Raises:
        ConfigError: The position method has initial values that do not fit its parameters.
    """
    _check_initial_values(config)
    for named in named_parameters(chunks):
        named.parameter.copy_(named.slice_of(_initial_value(config, named)))


def _check_initial_values(config: RunConfig) -> None:
    """Refuse an initial value that would be ignored or cut."""
    method = config.position
    shapes, wrong = method.tensors(config), f"{type(method).__name__}.initial_values: "
    for name, value in method.initial_values(config).items():
        if name not in shapes:
            known = ", ".join(shapes) or "none"
            raise ConfigError(f"{wrong}{name} is not among its `tensors`: {known}. Rename it")
        if (found := tuple(value.shape)) != tuple(shapes[name]):
            raise ConfigError(
                f"{wrong}{name} has the shape {found}, and in `tensors` the shape {shapes[name]}. "
                "Give both the shape in the whole model"
            )


def initial_part(config: RunConfig, named: Named) -> Tensor:
    """Return this rank's part of a parameter's initial value, in the data type of the model."""
    full = _initial_value(config, named).to(platform.DTYPES[config.train.precision])
    return named.slice_of(full).contiguous()


def _initial_value(config: RunConfig, named: Named) -> Tensor:
    """Return the full initial tensor of a parameter, fp32."""
    if named.name in (given := config.position.initial_values(config)):
        return given[named.name]
    if named.name.endswith("norm.weight"):
        return torch.ones(named.global_shape)
    if len(named.global_shape) == 1:
        return torch.zeros(named.global_shape)
    std = config.model.init_method_std
    if named.name.startswith(("embedding.", "output_layer.")):
        std = config.embedding_init_method_std
    if named.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * config.model.num_layers)
    seeded = generator(config, named.name)
    if config.adaptive_clusters and named.name.startswith(adaptive.NAMES):
        return adaptive.initial_value(config, named.name, named.global_shape, seeded)
    return torch.empty(named.global_shape).normal_(0.0, std, generator=seeded)

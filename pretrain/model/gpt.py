"""config -> this rank's stages of Megatron's GPTModel, with our core attention and positions.

Weights are a pure function of (run.seed, global name): every layout starts from the same model.
"""

from __future__ import annotations

import functools
import hashlib
import math

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from pretrain import platform
from pretrain.config import RunConfig
from pretrain.model.attention import CoreAttention
from pretrain.model.parameters import Named, named_parameters
from pretrain.model.positions import METHODS, PositionMethod

ACTIVATIONS = {
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


def build_model(config: RunConfig, device: torch.device | None = None) -> list[GPTModel]:
    """This rank's model chunks (one, or one a virtual stage), initialised, on `device` (default: the platform's).

    On the meta device nothing is allocated and nothing initialised.
    """
    device = device or platform.device()
    transformer = transformer_config(config)
    position = METHODS[config.position.method](config)
    virtual = config.parallel.virtual_pipeline_model_parallel_size
    with torch.device("meta" if device.type == "meta" else "cpu"):
        chunks = [
            _build_chunk(config, transformer, position, stage)
            for stage in (range(virtual) if virtual else [None])
        ]
    if device.type != "meta":
        initialise(config, chunks)
    return [
        chunk.to(device=device, dtype=platform.DTYPES[config.train.precision]) for chunk in chunks
    ]


def transformer_config(config: RunConfig) -> TransformerConfig:
    """Megatron's configuration; written here and nowhere else."""
    m, p, dtype = config.model, config.parallel, platform.DTYPES[config.train.precision]
    recompute = config.train.recompute_granularity
    return TransformerConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=config.num_query_groups,
        ffn_hidden_size=config.ffn_hidden_size,
        activation_func=ACTIVATIONS[m.hidden_act],
        add_bias_linear=m.use_bias,
        layernorm_epsilon=m.layernorm_epsilon,
        hidden_dropout=m.hidden_dropout,
        attention_dropout=m.attention_dropout,
        tensor_model_parallel_size=p.tensor_model_parallel_size,
        pipeline_model_parallel_size=p.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_layout=_stages(config),
        sequence_parallel=p.sequence_parallel,
        params_dtype=torch.float32,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        # Weights are made on the CPU by `initialise`; Megatron's fused kernels need CUDA builds or Transformer Engine.
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=platform.has_cuda(),
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
    )


def _stages(config: RunConfig) -> list[list[str]] | None:
    """Which layers stand in which pipeline chunk, in Megatron's words; uneven stages are the reason to say it."""
    if config.parallel.pipeline_model_parallel_size == 1:
        return None
    stages = [["decoder"] * n for n in config.layers_per_chunk]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


class LayerNorm(nn.LayerNorm):
    """torch's, with the mark that sequence parallelism needs (Megatron's WrappedTorchNorm refuses it, torch_norm.py)."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused
    ) -> None:
        super().__init__(hidden_size, eps=eps, bias=config.add_bias_linear)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _layer_spec(config: RunConfig, position: PositionMethod) -> ModuleSpec:
    core = ModuleSpec(
        CoreAttention, params={"position": position, "backend": config.model.attention_backend}
    )
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=core,
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        k_layernorm=IdentityOp,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=LayerNorm,
            self_attention=ModuleSpec(
                SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=LayerNorm,
            mlp=ModuleSpec(MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _build_chunk(
    config: RunConfig,
    transformer: TransformerConfig,
    position: PositionMethod,
    virtual_stage: int | None,
) -> GPTModel:
    layers = get_num_layers_to_build(transformer, vp_stage=virtual_stage)
    spec = TransformerBlockSubmodules([_layer_spec(config, position)] * layers, LayerNorm)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
    model = GPTModel(
        transformer,
        spec,
        config.padded_vocab_size,
        config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=config.model.tie_word_embeddings,
        position_embedding_type=position.megatron_type,  # type: ignore[arg-type]
        rotary_base=config.position.rotary_base,
        vp_stage=virtual_stage,
    )
    model.position = position
    _mark_sharded(model)
    if first:
        table = position.embedding_table()
        if table is not None:
            model.embedding.position_embeddings = table
        if position.embedding_scale != 1.0:
            model.embedding.word_embeddings.register_forward_hook(
                lambda _m, _i, out: out * position.embedding_scale
            )
    return model


def _mark_sharded(model: GPTModel) -> None:
    """Which axis of a weight is split over tensor ranks; Megatron marks only weights that it initialises itself."""
    for module in model.modules():
        if (
            isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding))
            and module.weight is not None
        ):
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=0, stride=1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=1, stride=1)


# ---- initial weights -------------------------------------------------------------------------------------------------
@torch.no_grad()
def initialise(config: RunConfig, chunks: list[GPTModel]) -> None:
    """Fills this rank's parameters: normal(0, init_method_std), output projections by sqrt(2 layers) less.

    Each full tensor is drawn from a generator seeded by (run.seed, its global name) and then sliced, so the weights
    do not depend on the layout.
    """
    for named in named_parameters(chunks):
        named.parameter.copy_(named.slice_of(_initial_value(config, named)))
    chunks[0].position.reset_parameters()


def _initial_value(config: RunConfig, named: Named) -> Tensor:
    """The full initial tensor of a global name."""
    if named.name.endswith("norm.weight"):
        return torch.ones(named.global_shape)
    if len(named.global_shape) == 1:
        return torch.zeros(named.global_shape)
    std = config.model.init_method_std
    if named.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * config.model.num_layers)
    digest = hashlib.sha256(f"{config.run.seed}/{named.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(named.global_shape).normal_(0.0, std, generator=generator)

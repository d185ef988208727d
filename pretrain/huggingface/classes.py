"""The transformers classes that hold our models: a table each, and which of them a run exports as.

The classes were read in transformers 5.17 and 5.23 (transformers/models/{bloom,mpt,opt,gpt_neox}/
modeling_*.py). `parity` measures at every export that the result is the same function.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pretrain.config import ConfigError, RunConfig
from pretrain.config.schema import WORDS
from pretrain.huggingface.base import (
    COMMON,
    EVEN_HEADS,
    HERE,
    NO_CLIPPING,
    NO_EMBEDDING_NORM,
    NO_QK_NORM,
    SEQUENTIAL,
    Both,
    Factors,
    HuggingFaceClass,
    InterleavedQkv,
    Ours,
    PastPadding,
    Row,
    SplitQkv,
    StackQkv,
    Theirs,
    Transposed,
    Unchanged,
    activation,
    sizes,
)
from pretrain.huggingface.llama import ROTARY, Llama, Mistral, Qwen2, Qwen3, Rotated
from pretrain.positions.alibi import MAX_SLOPE, bias_max_of, slopes_with

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.huggingface.base import Read

SLOPES = "position.slopes"
"""Trained slopes, which a class in the folder has among its settings."""
EXPORT_REACH = 16
"""An export reaches this many training lengths, as far as the default evaluation does."""
_ENDS = "It computes no token beyond; `pretrain export --max-length N` makes one that reaches N."


CLASSIC: tuple[Row, ...] = (
    *COMMON,
    EVEN_HEADS,
    Ours("model.normalization", "layernorm", "{name} has LayerNorms"),
    NO_QK_NORM,
    Ours("model.gated_linear_unit", False, "{name} has no gate in its MLP"),
    Ours("model.add_qkv_bias", False, "{name} has biases everywhere or nowhere"),
)
"""Rows of the classes of GPT's block: LayerNorms, an MLP without a gate."""
NARROW_MLP = Ours(
    "model.ffn_hidden_size",
    lambda config: 4 * config.model.hidden_size,
    "{name} has 4 x hidden_size = {only}",
)
STOCK_SLOPES = (
    # Bloom computes the published slopes. So does MPT: see `Mpt.load`. A function, because an
    # import of MPT reads the slopes from another row.
    Ours("position.slopes", lambda _: "published", "{name} computes the published slopes"),
    Ours("position.trainable_slopes", False, "{name} computes the published slopes"),
)


# ---- Bloom: ALiBi with biases and tanh GELU (models/bloom/modeling_bloom.py) ---------------------
# BloomModel applies word_embeddings_layernorm to the embeddings e. A model of ours that does not
# (model.embedding_layernorm) has it neutralised. With embeddings a e, weight w = r sqrt(eps) / a
# and bias 0 it computes
#
#     LN(a e) = a (e - mean(e)) w / sqrt(a^2 var(e) + eps)
#             = r (e - mean(e)) / sqrt(1 + a^2 var(e) / eps)
#
# For a small a the root is 1 up to a relative error of a^2 var(e) / (2 eps), below the rounding of
# fp32, and what remains is r (e - mean(e)). Subtracting the mean has no effect: in a pre-LN model
# the residual stream is read by LayerNorms only, which subtract the mean themselves.
#
# In fp16, whose smallest number is 2^-24, a must not be that small. So the whole residual stream is
# multiplied by a power of two s, which needs weights and biases of linear_proj and linear_fc2 times
# s, and epsilons times s^2: LN(s x) with s^2 eps is LN(x) with eps. Bloom has one epsilon, which
# the embedding LayerNorm shares, and for which a may be s times larger. s is no larger, because
# fp16 ends at 65504, in the residual stream and in w. r is s times the model's embedding_scale.
#
# Tied output weights are a e as well, so convert() divides the weight and bias of the final
# LayerNorm by a, which leaves the logits as they were: (a e) . (LN(h) / a) = e . LN(h).
#
# a and s are powers of two, so all scalings are exact in fp32.
BLOOM_STREAM_SCALE = 8.0
BLOOM_MAX_RELATIVE_ERROR = 2.0**-20
"""Largest error of the embeddings: sixteen roundings of fp32 (2^-24 each)."""
_BLOOM_NORM = "transformer.word_embeddings_layernorm"
_NEUTRAL = """\
Bloom applies a LayerNorm to its embeddings, which this model does not have. The export neutralises
it: the embeddings are stored multiplied by a small power of two, which the weight of that LayerNorm
undoes, and the residual stream by 8, for which `layer_norm_epsilon` is multiplied by 64. A program
that ignores `layer_norm_epsilon` computes another model from these files, which config.json marks
(`neutralised_embedding_layernorm`). Do not fine-tune this copy."""


class Bloom(HuggingFaceClass):
    model_type = "bloom"
    name = "BloomForCausalLM"
    positions = ("alibi",)
    rows = (
        *CLASSIC,
        *STOCK_SLOPES,
        *sizes("hidden_size", "n_layer", "n_head"),
        Both("layer_norm_epsilon", "model.layernorm_epsilon"),
        Both("hidden_dropout", "model.hidden_dropout"),
        Both("attention_dropout", "model.attention_dropout"),
        Theirs(
            "apply_residual_connection_post_layernorm",
            False,
            "our residual stream adds to what the LayerNorm reads, not to what it returns",
        ),
        NARROW_MLP,
        NO_CLIPPING,
        SEQUENTIAL,
        Ours(
            "model.hidden_act",
            "gelu_pytorch_tanh",
            "{name} computes gelu_pytorch_tanh",
            "Train with that, or with gelu and model.use_bias = false (MptForCausalLM)",
        ),
    )
    modules: ClassVar = {
        "embedding.word_embeddings": "transformer.word_embeddings",
        "embedding.word_embeddings_layernorm": _BLOOM_NORM,
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
    }
    layers = "transformer.h"
    layer: ClassVar = {
        "input_layernorm": "input_layernorm",
        # BloomAttention._reshape
        "self_attention.linear_qkv": InterleavedQkv("self_attention.query_key_value"),
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }
    length_key = "seq_length"
    # BloomAttention adds the biases m j of absolute positions j to its scores in the dtype of the
    # weights. In bf16, which has 8 bits, 256 m and 257 m are one number.
    precisions = "fp32"
    advice = (
        ". In bf16 and fp16 it rounds its ALiBi biases too much: for those train with "
        'model.hidden_act = "gelu" and model.use_bias = false (MptForCausalLM)'
    )

    def note(self, config: RunConfig, settings: Any) -> str:
        own = """\
Load it in float32: Bloom adds its ALiBi biases in the dtype of the weights, which in bfloat16 and
float16 rounds them too much. A model with exact GELU and without biases is exported as MPT, which
does not."""
        return own if config.model.embedding_layernorm else f"{_NEUTRAL}\n\n{own}"

    def settings(
        self, config: RunConfig, max_length: int, state: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        stream = 1.0 if config.model.embedding_layernorm else BLOOM_STREAM_SCALE
        scaled = {"layer_norm_epsilon": config.model.layernorm_epsilon * stream**2}
        return super().settings(config, max_length, state) | scaled

    def marks(self, config: RunConfig) -> dict[str, Any]:
        # A reader that ignores layer_norm_epsilon computes another model of such a folder.
        return {} if config.model.embedding_layernorm else {"neutralised_embedding_layernorm": True}

    def factors(self, config: RunConfig, embedding: Tensor) -> Factors:
        """Return the factors of an export, with the largest a that the embeddings allow."""
        if config.model.embedding_layernorm:
            return super().factors(config, embedding)
        stream = BLOOM_STREAM_SCALE
        largest = embedding.var(dim=1, unbiased=False).max().item()
        # a^2 largest / (2 stream^2 eps) is the error.
        allowed = 2 * stream**2 * config.model.layernorm_epsilon * BLOOM_MAX_RELATIVE_ERROR
        a = 2.0 ** math.floor(math.log2(allowed / largest) / 2) if largest else 1.0
        return Factors(embedding=a, stream=stream)

    def stored_factors(self, config: RunConfig, read: Read) -> Factors:
        """Return the factors of an export, whose a is in the weight of the LayerNorm."""
        if config.model.embedding_layernorm:
            return Factors(embedding_norm=config.embedding_scale)
        stream = BLOOM_STREAM_SCALE
        weight = read(f"{_BLOOM_NORM}.weight")[0].item()
        if not weight > 0:
            return Factors(stream=stream)
        exact = self._norm_weight(config, Factors(stream=stream)) / weight
        return Factors(embedding=2.0 ** round(math.log2(exact)), stream=stream)

    def _norm_weight(self, config: RunConfig, factors: Factors) -> float:
        """Return w, as derived above."""
        factor = factors.stream * config.embedding_scale
        root = math.sqrt(config.model.layernorm_epsilon)
        return factor * factors.stream * root / factors.embedding

    def extra(self, config: RunConfig, factors: Factors, max_length: int) -> dict[str, Tensor]:
        """Return the embedding LayerNorm that undoes itself, as derived above."""
        import torch

        if config.model.embedding_layernorm:
            return {}
        size = config.model.hidden_size
        return {
            f"{_BLOOM_NORM}.weight": torch.full((size,), self._norm_weight(config, factors)),
            f"{_BLOOM_NORM}.bias": torch.zeros(size),
        }


# ---- MPT: ALiBi without biases, with erf GELU (models/mpt/modeling_mpt.py) -----------------------
# Needs no algebra: linear layers are made without biases, and MptBlock sets those of its LayerNorms
# to None. build_mpt_alibi_tensor computes the slopes that our model has (test_export.py compares
# them for every number of heads to 40), in fp32 and for max_seq_len positions, where MPT ends.
_IGNORED = "stock transformers ignores it, and so would we"
_BIAS_MAX = Both(
    "attn_config.alibi_bias_max",
    "position.slopes",
    "position.slopes has a bias_max from 1 to 100",
    write=bias_max_of,
    read=slopes_with,
)


class Mpt(HuggingFaceClass):
    model_type = "mpt"
    name = "MptForCausalLM"
    # As MosaicML and its readers spell it; transformers itself goes by model_type.
    architecture = "MPTForCausalLM"
    positions = ("alibi",)
    rows = (
        *CLASSIC,
        *STOCK_SLOPES,
        *sizes("d_model", "n_layers", "n_heads"),
        Both("layer_norm_epsilon", "model.layernorm_epsilon"),
        Both("attn_config.attn_pdrop", "model.hidden_dropout", is_written=False),
        Both("attn_config.attn_pdrop", "model.attention_dropout", is_written=False),
        Theirs("no_bias", True, _IGNORED),
        Theirs("expansion_ratio", 4, _IGNORED),
        Theirs("logit_scale", None, _IGNORED),
        Theirs("norm_type", ("low_precision_layernorm", "layernorm"), "our norms are LayerNorms"),
        Theirs("attn_config.alibi", True, _IGNORED),
        _BIAS_MAX,
        Theirs("attn_config.qk_ln", False, _IGNORED),
        Theirs("attn_config.prefix_lm", False, _IGNORED),
        Theirs("attn_config.attn_uses_sequence_id", False, _IGNORED),
        Theirs("attn_config.attn_type", "multihead_attention", _IGNORED),
        Both("attn_config.clip_qkv", "model.clip_qkv"),
        Theirs(
            "attn_config.softmax_scale",
            None,
            "our scores are divided by the square root of the head size",
        ),
        Theirs("learned_pos_emb", False),
        Theirs("use_cache", True),
        NARROW_MLP,
        SEQUENTIAL,
        NO_EMBEDDING_NORM,
        Ours("model.hidden_act", "gelu", "{name} computes gelu"),
        Ours("model.use_bias", False, "{name} has no biases"),
    )
    modules: ClassVar = {
        "embedding.word_embeddings": "transformer.wte",
        "decoder.final_layernorm": "transformer.norm_f",
        "output_layer": "lm_head",
    }
    layers = "transformer.blocks"
    layer: ClassVar = {
        "input_layernorm": "norm_1",
        "self_attention.linear_qkv": StackQkv("attn.Wqkv"),
        "self_attention.linear_proj": "attn.out_proj",
        "pre_mlp_layernorm": "norm_2",
        "mlp.linear_fc1": "ffn.up_proj",
        "mlp.linear_fc2": "ffn.down_proj",
    }
    length_key = "max_seq_len"
    is_bounded = True

    def biased(self, config: RunConfig, module: str) -> bool:
        return False

    def note(self, config: RunConfig, settings: Any) -> str:
        return """\
Sequences can be at most as many tokens long as `max_seq_len` in config.json says, which can be
raised there."""

    def read_config(self, folder: Path) -> Any:
        values = json.loads((folder / "config.json").read_bytes())
        attention = values.get("attn_config")
        if isinstance(attention, dict) and isinstance(attention.get("clip_qkv"), int):
            # Published ones have 6, and transformers 5 wants a float.
            attention["clip_qkv"] = float(attention["clip_qkv"])
        return self.config_class.from_dict(values)

    def load(self, folder: Path, **options: Any) -> Any:
        """Return what from_pretrained does, with the slopes of alibi_bias_max.

        MptModel.forward does not hand it to its own build_mpt_alibi_tensor, so stock transformers
        always has the slopes of 8 (models/mpt/modeling_mpt.py), unlike the code with which models
        of other values were trained (llmfoundry/models/layers/attention.py, gen_slopes).
        """
        loaded = super().load(folder, **options)
        model = (loaded[0] if isinstance(loaded, tuple) else loaded).transformer
        bias_max = model.config.attn_config.alibi_bias_max
        model.build_mpt_alibi_tensor = partial(
            model.build_mpt_alibi_tensor, alibi_bias_max=bias_max
        )
        return loaded


# ---- Bloom and MPT with other slopes (modeling_slopes.py) ----------------------------------------
def _slopes(values: Sequence[float]) -> Sequence[float]:
    if not values or not all(0 <= slope <= MAX_SLOPE for slope in values):
        raise ValueError
    return values


class _WithSlopes(HuggingFaceClass):
    """A class in the folder, which is a stock class but for ALiBi's slopes."""

    architecture = ""
    heads_key: str
    advice = (
        ": a class in the folder, which is {stock} with these slopes. It is loaded with "
        "trust_remote_code=True, and stock loaders refuse the folder"
    )
    settings_tensors: ClassVar = {SLOPES: "slopes"}

    def settings(
        self, config: RunConfig, max_length: int, state: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        found = (state or {}).get(SLOPES, config.position.initial_values(config)[SLOPES])
        # The number of heads is null, so that the stock class refuses the folder: transformers 5
        # checks the type, and transformers 4 divides by it. The slopes are numbers of fp32, which
        # JSON keeps exactly; a weight would be rounded to 16 bit.
        own = {self.heads_key: None, "slopes": found.float().tolist()}
        return super().settings(config, max_length, state) | own

    def note(self, config: RunConfig, settings: Any) -> str:
        trained = ", as training left them" if SLOPES in config.position.tensors(config) else ""
        slopes = ", ".join(f"{slope:.4g}" for slope in settings.slopes)
        own = f"""\
The slopes of ALiBi are those in `slopes` of config.json{trained}: {slopes}. Stock
{self.stock} would compute others, so stock loaders refuse this folder, and the class that it
brings along has to be allowed with `trust_remote_code=True`.
"""
        return f"{own}\n{super().note(config, settings)}"


def _with_slopes(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    reason = f"position.slopes has a number from 0 to {MAX_SLOPE:.0f} for each head"
    row = Both("slopes", "position.slopes", reason, read=_slopes, is_written=False)
    return (*(row for row in rows if row not in (*STOCK_SLOPES, _BIAS_MAX)), row)


class BloomSlopes(_WithSlopes, Bloom):
    model_type = "bloom_slopes"
    name = "BloomSlopesForCausalLM"
    stock = Bloom.name
    rows = _with_slopes(Bloom.rows)
    heads_key = "n_head"


class MptSlopes(_WithSlopes, Mpt):
    model_type = "mpt_slopes"
    name = "MptSlopesForCausalLM"
    stock = Mpt.name
    rows = _with_slopes(Mpt.rows)
    heads_key = "n_heads"

    def settings(
        self, config: RunConfig, max_length: int, state: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        found = super().settings(config, max_length, state)
        if SLOPES not in config.position.tensors(config):
            # For programs that take the slopes from there.
            found["attn_config"]["alibi_bias_max"] = bias_max_of(config.value("position.slopes"))
        return found


# ---- OPT: learned and sinusoidal positions (models/opt/modeling_opt.py) --------------------------
# OPT adds a learned table of positions to its embeddings, which needs no algebra. With sinusoidal
# positions the table is filled with the sinusoids of the first max_length positions.
class Opt(HuggingFaceClass):
    model_type = "opt"
    name = "OPTForCausalLM"
    positions = ("learned", "sinusoidal")
    rows = (
        *CLASSIC,
        *sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim"),
        Both("dropout", "model.hidden_dropout"),
        Both("attention_dropout", "model.attention_dropout"),
        Both("max_position_embeddings", "position.max_position_embeddings", is_written=False),
        activation("activation_function"),
        Theirs(
            "do_layer_norm_before", True, "our layers normalise their inputs, not their outputs"
        ),
        Theirs("_remove_final_layer_norm", False, "our model ends with a LayerNorm"),
        Both("word_embed_proj_dim", "model.hidden_size", "our embeddings are as wide as the model"),
        Theirs("layer_norm_elementwise_affine", True, "our LayerNorms have weights"),
        Theirs("enable_bias", True, "without biases our LayerNorms have none either"),
        Theirs("layerdrop", 0.0, "our model leaves out no layers"),
        # OPTDecoderLayer makes its LayerNorms with torch's default epsilon.
        Ours("model.layernorm_epsilon", 1e-5, "{name} supports {only} only"),
        NO_CLIPPING,
        SEQUENTIAL,
        NO_EMBEDDING_NORM,
    )
    modules: ClassVar = {
        "embedding.word_embeddings": "model.decoder.embed_tokens",
        "embedding.position_embeddings": PastPadding("model.decoder.embed_positions"),
        "decoder.final_layernorm": "model.decoder.final_layer_norm",
        "output_layer": "lm_head",
    }
    layers = "model.decoder.layers"
    layer: ClassVar = {
        "input_layernorm": "self_attn_layer_norm",
        "self_attention.linear_qkv": SplitQkv(
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        ),
        "self_attention.linear_proj": "self_attn.out_proj",
        # OPT calls the LayerNorm before each MLP "final"; the last one of the decoder is another.
        "pre_mlp_layernorm": "final_layer_norm",
        "mlp.linear_fc1": "fc1",
        "mlp.linear_fc2": "fc2",
    }
    is_bounded = True

    def note(self, config: RunConfig, settings: Any) -> str:
        if config.position.table_end(config):
            return f"Sequences can be at most `{self.length_key}` tokens long, as in training."
        return f"""\
The sinusoidal positions are stored as a table of position embeddings, so sequences can be at most
`{self.length_key}` tokens long. {_ENDS}"""


# ---- GPT-2: as OPT, with any epsilon (models/gpt2/modeling_gpt2.py) ------------------------------
class Gpt2(Opt):
    model_type = "gpt2"
    name = "GPT2LMHeadModel"
    rows = (
        *CLASSIC,
        *sizes("n_embd", "n_layer", "n_head", "n_inner"),
        Both("layer_norm_epsilon", "model.layernorm_epsilon"),
        Both("resid_pdrop", "model.hidden_dropout"),
        Both("embd_pdrop", "model.hidden_dropout", "our dropout there is that of residuals"),
        Both("attn_pdrop", "model.attention_dropout"),
        Both("n_positions", "position.max_position_embeddings", is_written=False),
        activation("activation_function"),
        Theirs(
            "scale_attn_weights",
            True,
            "our scores are divided by the square root of the head size",
        ),
        Theirs("scale_attn_by_inverse_layer_idx", False, "our layers all scale alike"),
        Theirs("reorder_and_upcast_attn", False),
        NO_CLIPPING,
        SEQUENTIAL,
        NO_EMBEDDING_NORM,
    )
    modules: ClassVar = {
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
    }
    layers = "transformer.h"
    layer: ClassVar = {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": Transposed(StackQkv("attn.c_attn")),
        "self_attention.linear_proj": Transposed(Unchanged("attn.c_proj")),
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": Transposed(Unchanged("mlp.c_fc")),
        "mlp.linear_fc2": Transposed(Unchanged("mlp.c_proj")),
    }
    length_key = "n_positions"


# ---- GPT-NeoX: rotary positions (models/gpt_neox/modeling_gpt_neox.py) ---------------------------
# Needs no algebra either. rotate_half pairs channel k with channel k + n / 2, where n channels are
# rotated, as Megatron does unless rotary_interleaved is set.
class GptNeoX(Rotated):
    model_type = "gpt_neox"
    name = "GPTNeoXForCausalLM"
    positions = ("rotary",)
    rows = (
        *CLASSIC,
        *sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        Both("use_parallel_residual", "model.parallel_residual"),
        Both("layer_norm_eps", "model.layernorm_epsilon"),
        Both("hidden_dropout", "model.hidden_dropout"),
        Both("attention_dropout", "model.attention_dropout"),
        Theirs("attention_bias", True, "our model has biases everywhere or nowhere"),
        activation("hidden_act"),
        *ROTARY,
        Both("rope_parameters.partial_rotary_factor", "position.rotary_percent"),
        NO_CLIPPING,
        NO_EMBEDDING_NORM,
    )
    modules: ClassVar = {
        "embedding.word_embeddings": "gpt_neox.embed_in",
        "decoder.final_layernorm": "gpt_neox.final_layer_norm",
        "output_layer": "lm_head",
    }
    layers = "gpt_neox.layers"
    layer: ClassVar = {
        "input_layernorm": "input_layernorm",
        # GPTNeoXAttention.forward
        "self_attention.linear_qkv": InterleavedQkv("attention.query_key_value"),
        "self_attention.linear_proj": "attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }

    def marks(self, config: RunConfig) -> dict[str, Any]:
        # What transformers 4 had in place of rope_parameters, and its readers still look for.
        rope = config.position.rope()
        return {"rotary_pct": rope.percent, "rotary_emb_base": rope.base} if rope else {}

    def note(self, config: RunConfig, settings: Any) -> str:
        order = "parallel" if config.model.parallel_residual else "sequential"
        rope = config.position.rope()
        return f"""\
Rotary embeddings are applied to {100 * rope.percent if rope else 0:g} % of each head. Attention
and MLP are {order} (`use_parallel_residual`)."""


CLASSES: dict[str, HuggingFaceClass] = {
    each.model_type: each
    for each in (
        *(Bloom(), Mpt(), Opt(), Gpt2(), GptNeoX()),
        *(Llama(), Mistral(), Qwen2(), Qwen3()),
        *(BloomSlopes(), MptSlopes()),
    )
}
"""Every class that a model can be exported as and imported from, by model_type."""


# ---- Which class a run exports as ----------------------------------------------------------------
def class_of(config: RunConfig) -> HuggingFaceClass:
    """Return the class that can hold this run's model.

    Raises:
        ConfigError: No class can. The message gives every reason, and what to train instead.
    """
    if config.data.tokenizer == WORDS:
        remedy = f"{HERE} with a SentencePiece or Hugging Face tokenizer"
        reason = "a vocabulary of words is not exported"
        raise ConfigError(str(config.refusal("data.tokenizer", reason, remedy)))
    method = config.position.method
    candidates = [each for each in CLASSES.values() if method in each.positions]
    if not candidates:
        others = sorted({name for each in CLASSES.values() for name in each.positions})
        remedy = f"{HERE} with {', '.join(others[:-1])} or {others[-1]}"
        refusal = config.refusal("position.method", config.position.no_class, remedy)
        raise ConfigError(str(refusal))
    if chosen := config.export.model_type:
        names = ", ".join(each.model_type for each in candidates)
        candidates = [each for each in candidates if each.model_type == chosen]
        if not candidates:
            reason = f"no class of that name holds position.method = {method}"
            remedy = f"Choose one of {names}, or leave it out"
            raise ConfigError(str(config.refusal("export.model_type", reason, remedy)))
    # The one with the least in its way, stock classes first: min() takes the first of equals. A
    # model with ALiBi, tanh GELU and no biases is a Bloom with biases of 0, for example.
    found = min(candidates, key=lambda each: len(list(each.refusals(config))))
    refusals = []
    for row, refusal in found.refusals(config):
        wanted = row.wanted(config)
        shown = wanted if isinstance(wanted, str) else json.dumps(wanted)
        refusals.append(refusal._replace(remedy=refusal.remedy or f"Train with {shown}"))
    if refusals and chosen:
        # An import has set it, and the positions may have changed since.
        reason, remedy = "does not hold this model", "Remove it by --set export.model_type="
        refusals.append(config.refusal("export.model_type", reason, remedy))
    if refusals:
        raise ConfigError("\n".join(str(refusal) for refusal in refusals))
    return found


def export_length(config: RunConfig) -> int:
    """Return the longest sequence, in tokens, that an export accepts unless told otherwise.

    It reaches 16 training lengths and every length that is evaluated; a learned position table ends
    where it ends.
    """
    end = config.position.table_end(config)
    return end or max(EXPORT_REACH * config.data.sequence_length, *config.evaluation_lengths)

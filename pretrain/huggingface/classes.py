"""The transformers classes that hold our models: a table for each, and the choice between them.

The tables follow the code of transformers 5.17 and 5.23 (transformers/models/{bloom,mpt,opt,
gpt_neox}/modeling_*.py). `parity` checks at every export that both compute the same function.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
    PLAIN,
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
    refused,
    sizes,
)
from pretrain.huggingface.llama import ROTARY, Llama, Mistral, Qwen2, Qwen3, Rotated
from pretrain.positions.alibi import MAX_SLOPE, bias_max_of, slopes_with

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.huggingface.base import Read, State

SLOPES = "position.slopes"
"""Name of trained slopes, which the classes of `modeling_slopes` store among their settings."""
EXPORT_REACH = 16
"""An export accepts this many training lengths by default, like the default evaluation."""
_ENDS = "It computes no token beyond; `pretrain export --max-length N` makes one that reaches N."


CLASSIC: tuple[Row, ...] = (
    *COMMON,
    EVEN_HEADS,
    Ours("model.normalization", "layernorm", "{name} has LayerNorms"),
    NO_QK_NORM,
    Ours("model.gated_linear_unit", False, "{name} has no gate in its MLP"),
    Ours("model.add_qkv_bias", False, "{name} has biases everywhere or nowhere"),
)
"""Rows of the classes with GPT's block: LayerNorms and an MLP without a gate."""
NARROW_MLP = Ours(
    "model.ffn_hidden_size",
    lambda config: 4 * config.model.hidden_size,
    "{name} has 4 x hidden_size = {only}",
)
STOCK_SLOPES = (
    # Bloom computes the published slopes, and so does MPT (`Mpt.load`). The value is a function,
    # because an import of MPT takes the slopes from another row.
    Ours("position.slopes", lambda _: "published", "{name} computes the published slopes"),
    Ours("position.trainable_slopes", False, "{name} computes the published slopes"),
)
_SCALED = "our scores are divided by the square root of the head size"


# ---- Bloom: ALiBi with biases and tanh GELU (models/bloom/modeling_bloom.py) ---------------------
# BloomModel applies word_embeddings_layernorm to the embeddings e. If our model does not
# (model.embedding_layernorm = false), the export neutralizes that LayerNorm. With embeddings a e,
# weight w = r sqrt(eps) / a and bias 0 it computes
#
#     LN(a e) = a (e - mean(e)) w / sqrt(a^2 var(e) + eps)
#             = r (e - mean(e)) / sqrt(1 + a^2 var(e) / eps)
#
# For a small a the root is 1 up to a relative error of a^2 var(e) / (2 eps), below the rounding of
# fp32, and the result is r (e - mean(e)). Subtracting the mean has no effect: in a pre-LN model
# only LayerNorms read the residual stream, and they subtract the mean themselves.
#
# fp16, whose smallest number is 2^-24, cannot store embeddings with such a small a. Therefore the
# whole residual stream is multiplied by a power of two s: weights and biases of linear_proj and
# linear_fc2 times s, and epsilons times s^2, because LN(s x) with s^2 eps is LN(x) with eps. Bloom
# has only one epsilon, so the embedding LayerNorm gets the larger one too, and a may be s times
# larger. s cannot be larger still, because the residual stream and w must stay below fp16's maximum
# of 65504. r is s times the model's embedding_scale.
#
# Tied output weights are a e as well, so converted() divides the weight and bias of the final
# LayerNorm by a, which leaves the logits unchanged: (a e) . (LN(h) / a) = e . LN(h).
#
# a and s are powers of two, so all scalings are exact in fp32.
BLOOM_STREAM_SCALE = 8.0
BLOOM_MAX_RELATIVE_ERROR = 2.0**-20
"""Largest relative error of the embeddings: sixteen roundings of fp32 (2^-24 each)."""
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
            "our residual stream adds to the LayerNorm's input, not to its output",
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
    # BloomAttention adds biases m j of absolute positions j to its scores, in the dtype of the
    # weights. In bf16, with its 8 bits, 256 m and 257 m are the same number.
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

    def settings(self, config: RunConfig, max_length: int, state: State = None) -> dict[str, Any]:
        stream = 1.0 if config.model.embedding_layernorm else BLOOM_STREAM_SCALE
        scaled = {"layer_norm_epsilon": config.model.layernorm_epsilon * stream**2}
        return super().settings(config, max_length, state) | scaled

    def marks(self, config: RunConfig) -> dict[str, Any]:
        # Warns programs that ignore layer_norm_epsilon, which would compute another model.
        return {} if config.model.embedding_layernorm else {"neutralised_embedding_layernorm": True}

    def factors(self, config: RunConfig, embedding: Tensor) -> Factors:
        """Return the factors of an export, with the largest a that the embeddings allow."""
        if config.model.embedding_layernorm:
            return super().factors(config, embedding)
        stream = BLOOM_STREAM_SCALE
        largest = embedding.var(dim=1, unbiased=False).max().item()
        # The error is a^2 largest / (2 stream^2 eps).
        allowed = 2 * stream**2 * config.model.layernorm_epsilon * BLOOM_MAX_RELATIVE_ERROR
        a = 2.0 ** math.floor(math.log2(allowed / largest) / 2) if largest else 1.0
        return Factors(embedding=a, stream=stream)

    def stored_factors(self, config: RunConfig, read: Read) -> Factors:
        """Return the factors of an export, with a taken from the weight of the LayerNorm."""
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
        """Return the neutralized embedding LayerNorm, as derived above."""
        import torch

        if config.model.embedding_layernorm:
            return {}
        size = config.model.hidden_size
        return {
            f"{_BLOOM_NORM}.weight": torch.full((size,), self._norm_weight(config, factors)),
            f"{_BLOOM_NORM}.bias": torch.zeros(size),
        }


# ---- MPT: ALiBi without biases, with erf GELU (models/mpt/modeling_mpt.py) -----------------------
# Stores our weights unchanged: linear layers have no biases, and MptBlock sets the biases of its
# LayerNorms to None. build_mpt_alibi_tensor computes the slopes of our model (test_export.py
# compares them for every number of heads up to 40), in fp32 and for at most max_seq_len positions.
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
    # As MosaicML and programs that read its models spell it; transformers uses model_type.
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
        Theirs("attn_config.softmax_scale", None, _SCALED),
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
            # Published models have 6, and transformers 5 requires a float.
            attention["clip_qkv"] = float(attention["clip_qkv"])
        return self.config_class.from_dict(values)

    def load(self, folder: Path, **options: Any) -> Any:
        """Load a folder with from_pretrained, and make the model use alibi_bias_max.

        MptModel.forward does not pass it to build_mpt_alibi_tensor, so stock transformers always
        uses the slopes of 8 (models/mpt/modeling_mpt.py). The code that trained models with other
        values does not (llmfoundry/models/layers/attention.py, gen_slopes).
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
    """A class whose code is in the folder: a stock class with other ALiBi slopes."""

    architecture = ""
    advice = (
        ": a class in the folder, which is {stock} with these slopes. It is loaded with "
        "trust_remote_code=True, and stock loaders refuse the folder"
    )
    settings_tensors: ClassVar = {SLOPES: "slopes"}

    def settings(self, config: RunConfig, max_length: int, state: State = None) -> dict[str, Any]:
        import torch

        found = (state or {}).get(SLOPES, torch.tensor(config.position.head_slopes(config)))
        # The number of heads is null, so that stock classes refuse the folder: transformers 5
        # checks its type, and transformers 4 divides by it. JSON keeps the fp32 slopes exactly,
        # whereas loading in 16 bit would round slopes among the weights.
        heads_key = self.config_class.attribute_map["num_attention_heads"]
        own = {heads_key: None, "slopes": found.float().tolist()}
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


class MptSlopes(_WithSlopes, Mpt):
    model_type = "mpt_slopes"
    name = "MptSlopesForCausalLM"
    stock = Mpt.name
    rows = _with_slopes(Mpt.rows)

    def settings(self, config: RunConfig, max_length: int, state: State = None) -> dict[str, Any]:
        found = super().settings(config, max_length, state)
        if SLOPES not in config.position.tensors(config):
            # For programs that compute the slopes from this key.
            found["attn_config"]["alibi_bias_max"] = bias_max_of(config.value("position.slopes"))
        return found


# ---- OPT: learned and sinusoidal positions (models/opt/modeling_opt.py) --------------------------
# OPT adds a learned table of positions to its embeddings, so weights are stored unchanged. For
# sinusoidal positions the table holds the sinusoids of the first max_length positions.
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
            "do_layer_norm_before", True, "our layers normalize their inputs, not their outputs"
        ),
        Theirs("_remove_final_layer_norm", False, "our model ends with a LayerNorm"),
        Both("word_embed_proj_dim", "model.hidden_size", "our embeddings are as wide as the model"),
        Theirs("layer_norm_elementwise_affine", True, "our LayerNorms have weights"),
        Theirs("enable_bias", True, "without biases our LayerNorms have none either"),
        Theirs("layerdrop", 0.0, "our model leaves out no layers"),
        # OPTDecoderLayer creates its LayerNorms with torch's default epsilon.
        Ours("model.layernorm_epsilon", 1e-5, "{name} supports {only} only"),
        *PLAIN,
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
        # OPT calls the LayerNorm before each MLP "final". It is not the decoder's last LayerNorm.
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


# ---- GPT-2: like OPT, with any epsilon (models/gpt2/modeling_gpt2.py) ----------------------------
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
        Theirs("scale_attn_weights", True, _SCALED),
        Theirs("scale_attn_by_inverse_layer_idx", False, "our layers all scale alike"),
        Theirs("reorder_and_upcast_attn", False),
        *PLAIN,
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
# Stores our weights unchanged. With n rotated channels, rotate_half pairs channel k with channel
# k + n / 2, as Megatron does unless rotary_interleaved is set.
class GptNeoX(Rotated):
    model_type = "gpt_neox"
    name = "GPTNeoXForCausalLM"
    base_key = "rotary_emb_base"
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
    layer: ClassVar = Bloom.layer | {
        # GPTNeoXAttention.forward
        "self_attention.linear_qkv": InterleavedQkv("attention.query_key_value"),
        "self_attention.linear_proj": "attention.dense",
    }

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
"""model_type -> class, for every class that a model can be exported to and imported from."""


# ---- Which class a run exports as ----------------------------------------------------------------
def class_of(config: RunConfig) -> HuggingFaceClass:
    """Return the class that can hold this run's model.

    Raises:
        ConfigError: No class can. The message gives all reasons, and what to train instead.
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
    # The class with the fewest obstacles. min() takes the first of equal ones, and stock classes
    # come first. For example, ALiBi with tanh GELU and without biases is a Bloom with zero biases.
    found = min(candidates, key=lambda each: len(list(refused(each.rows, config, each.name))))
    refusals = []
    for row, refusal in refused(found.rows, config, found.name):
        wanted = row.wanted(config)
        shown = wanted if isinstance(wanted, str) else json.dumps(wanted)
        refusals.append(refusal._replace(remedy=refusal.remedy or f"Train with {shown}"))
    if refusals and chosen:
        # An import has set the key, and the positions may have changed since then.
        reason, remedy = "does not hold this model", "Remove it by --set export.model_type="
        refusals.append(config.refusal("export.model_type", reason, remedy))
    if refusals:
        raise ConfigError("\n".join(str(refusal) for refusal in refusals))
    return found


def export_length(config: RunConfig) -> int:
    """Return the longest sequence, in tokens, that an export accepts unless told otherwise.

    This is 16 training lengths or the longest length in evaluation.lengths, whichever is longer;
    for a learned position table, its number of rows.
    """
    end = config.position.table_end(config)
    return end or max(EXPORT_REACH * config.data.sequence_length, *config.evaluation_lengths)

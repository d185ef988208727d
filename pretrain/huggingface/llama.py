"""Classes with Llama's block: RMSNorms, a gated MLP, grouped query heads, rotary positions.

The tables follow the code of transformers 5.23 (transformers/models/{llama,mistral,qwen2,qwen3}/
modeling_*.py and modeling_rope_utils.py). The classes differ only in a row or two. A model that
several can hold exports as the first of them, unless `export.model_type` names another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pretrain.config import RunConfig
from pretrain.huggingface.base import (
    COMMON,
    EVEN_HEADS,
    K_NORM,
    NO_QK_NORM,
    PLAIN,
    PROJ,
    Q_NORM,
    QKV,
    Both,
    GateAndUp,
    GroupedQkv,
    HuggingFaceClass,
    Ours,
    Row,
    Theirs,
    activation,
    sizes,
)
from pretrain.positions.rotary import Linear, Llama3, Ntk, Yarn

if TYPE_CHECKING:
    from pretrain.huggingface.base import State

# ---- Rotary positions, whose settings are the same for all classes of transformers ---------------
_SCALINGS: dict[str, type[Linear]] = {"linear": Linear, "yarn": Yarn, "llama3": Llama3}
"""rope_type of transformers -> class of position.rotary_scaling, which has the same settings."""


def _rope_parameters(scaling: Any) -> dict[str, Any]:
    if scaling is None or isinstance(scaling, Ntk):
        # Ntk is written as a larger base: see `Rotated.settings`.
        return {"rope_type": "default"}
    found = scaling.model_dump(exclude_none=True)
    return {"rope_type": found.pop("type"), **found}


def _rotary_scaling(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    # `type` is transformers 4's name for rope_type; the last two have their own rows.
    other = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    found = {k: v for k, v in parameters.items() if k not in other and v is not None}
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return None
    _SCALINGS[kind].model_validate({"type": kind, **found})
    return {"type": kind, **found}


ROTARY: tuple[Row, ...] = (
    # Before the rows of its nested keys, which would otherwise be overwritten.
    Both(
        "rope_parameters",
        "position.rotary_scaling",
        f"position.rotary_scaling has {', '.join(_SCALINGS)}, without further settings",
        write=_rope_parameters,
        read=_rotary_scaling,
    ),
    Both("rope_parameters.rope_theta", "position.rotary_base"),
)


class Rotated(HuggingFaceClass):
    """A class with rotary positions."""

    positions = ("rotary",)
    base_key: ClassVar = "rope_theta"
    """transformers 4's name of the base."""

    def settings(self, config: RunConfig, max_length: int, state: State = None) -> dict[str, Any]:
        found = super().settings(config, max_length, state)
        method: Any = config.position
        if isinstance(getattr(method, "rotary_scaling", None), Ntk):
            channels = method.rotated_channels(config)
            base = method.rotary_scaling.larger_base(method.rotary_base, channels)
            found["rope_parameters"]["rope_theta"] = base
        return found

    def marks(self, config: RunConfig) -> dict[str, Any]:
        # Keys of transformers 4 in place of rope_parameters, which other programs still read.
        found = self.settings(config, config.data.sequence_length)["rope_parameters"]
        marks = {self.base_key: found.pop("rope_theta")}
        if (percent := found.pop("partial_rotary_factor", None)) is not None:
            marks["rotary_pct"] = percent
        return marks if found == {"rope_type": "default"} else marks | {"rope_scaling": found}


# ---- Llama ---------------------------------------------------------------------------------------
_BLOCK: tuple[Row, ...] = (
    *COMMON,
    *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
    Both("num_key_value_heads", "model.num_query_groups"),
    Both("intermediate_size", "model.ffn_hidden_size"),
    Both("rms_norm_eps", "model.layernorm_epsilon"),
    Both("attention_dropout", "model.attention_dropout"),
    activation("hidden_act"),
    *ROTARY,
    Ours("position.rotary_percent", 1.0, "{name} rotates whole heads"),
    Ours("model.normalization", "rmsnorm", "{name} has RMSNorms"),
    Ours("model.gated_linear_unit", True, "{name} has a gate in its MLP"),
    Ours("model.use_bias", False, "{name} has no biases in its MLP"),
    *PLAIN,
)
_HEAD_DIM = Both("head_dim", "model.kv_channels")
# Their attention has biases of queries, keys and values, and an output bias, which is zero here.
_QKV_BIAS = Both("attention_bias", "model.add_qkv_bias")


def _multiple(config: RunConfig) -> int:
    """Return the largest multiple of the number of heads that is at most hidden_size."""
    return config.model.hidden_size - config.model.hidden_size % config.model.num_attention_heads


class Llama(Rotated):
    model_type = "llama"
    name = "LlamaForCausalLM"
    rows = (
        *_BLOCK,
        _HEAD_DIM,
        Ours("model.hidden_size", _multiple, "that of {name} is a multiple of its heads"),
        _QKV_BIAS,
        NO_QK_NORM,
        Theirs("mlp_bias", False, "our model has biases everywhere or nowhere"),
    )
    modules: ClassVar = {
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
    }
    layers = "model.layers"
    layer: ClassVar = {
        "input_layernorm": "input_layernorm",
        QKV: GroupedQkv("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        PROJ: "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": GateAndUp("mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": "mlp.down_proj",
    }

    def biased(self, config: RunConfig, module: str) -> bool:
        return config.model.add_qkv_bias and module in (QKV, PROJ)

    def note(self, config: RunConfig, settings: Any) -> str:
        groups = f"{config.num_query_groups} of {config.model.num_attention_heads}"
        return f"""\
Keys and values have {groups} heads. Rotary embeddings are those of `rope_parameters` in config.json
("{settings.rope_parameters["rope_type"]}"). Tokens beyond `max_position_embeddings` are computed
too."""


# ---- Mistral -------------------------------------------------------------------------------------
_WINDOW = "our attention reaches all earlier tokens"


class Mistral(Llama):
    model_type = "mistral"
    name = "MistralForCausalLM"
    rows = (
        *_BLOCK,
        _HEAD_DIM,
        Ours("model.add_qkv_bias", False, "{name} has no biases"),
        NO_QK_NORM,
        Theirs("sliding_window", None, _WINDOW),
    )


# ---- Qwen ----------------------------------------------------------------------------------------
_NO_WINDOW = Theirs("use_sliding_window", False, _WINDOW)


class _Windowed(Llama):
    def read_config(self, folder: Path) -> Any:
        found = super().read_config(folder)
        # layer_types decides, whatever use_sliding_window says.
        found.use_sliding_window = "sliding_attention" in (found.layer_types or ())
        return found


class Qwen2(_Windowed):
    model_type = "qwen2"
    name = "Qwen2ForCausalLM"
    rows = (
        *_BLOCK,
        EVEN_HEADS,
        Ours("model.add_qkv_bias", True, "{name} has biases of queries, keys and values"),
        NO_QK_NORM,
        _NO_WINDOW,
    )

    def biased(self, config: RunConfig, module: str) -> bool:
        return module == QKV


class Qwen3(_Windowed):
    model_type = "qwen3"
    name = "Qwen3ForCausalLM"
    rows = (
        *_BLOCK,
        _HEAD_DIM,
        _QKV_BIAS,
        Ours("model.qk_layernorm", True, "{name} normalizes queries and keys"),
        _NO_WINDOW,
    )
    layer: ClassVar = Llama.layer | {
        Q_NORM: "self_attn.q_norm",
        K_NORM: "self_attn.k_norm",
    }

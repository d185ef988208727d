"""Base of the transformers classes: one table per class for export, import and refusals.

An export reads a table from our names to theirs (`settings`, `converted`), an import from theirs to
ours (`sections`, `restore`), and both refuse what the other side cannot hold (`refusals`,
`sections`). The tables are in `classes`. In this package "ours" means this project's model, and
"theirs" the transformers class.

Nothing here imports torch or transformers before it is needed, because `pretrain config` reads the
tables too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pretrain.config import ConfigError, RunConfig
from pretrain.config.errors import Refusal
from pretrain.positions.base import LEARNED_TABLE

if TYPE_CHECKING:
    from torch import Tensor

    Read = Callable[[str], Tensor]
    """Maps the class's name of a tensor to the tensor, in fp32."""
    State = Mapping[str, Tensor] | None
    """Our tensors by name, where some of them may be stored in the settings."""

CODE = Path(__file__).with_name("modeling_slopes.py")
"""The code that a folder contains if its class is not in transformers."""
EMBEDDING, FINAL_NORM = "embedding.word_embeddings", "decoder.final_layernorm"
EMBEDDING_NORM, OUTPUT = "embedding.word_embeddings_layernorm", "output_layer"
POSITIONS = "embedding.position_embeddings"
QKV, PROJ = "self_attention.linear_qkv", "self_attention.linear_proj"
Q_NORM, K_NORM = "self_attention.q_layernorm", "self_attention.k_layernorm"


# ---- Rows of settings ----------------------------------------------------------------------------
def _same(value: Any) -> Any:
    return value


class Both(NamedTuple):
    """A setting that both the class and our model have."""

    theirs: str
    """Key in config.json; dots separate nested keys."""
    ours: str
    """Key of our config, with its section."""
    reason: str = ""
    """Why our model cannot hold some of their values."""
    write: Callable[[Any], Any] = _same
    """Our value -> theirs."""
    read: Callable[[Any], Any] = _same
    """Their value -> ours. A KeyError or ValueError refuses the value."""
    is_written: bool = True
    """False leaves the class's default in an export, for settings that matter only in training."""


class Theirs(NamedTuple):
    """A setting that only the class has. Our model is equivalent to one of its values."""

    theirs: str
    only: Any
    """The value. If it is a tuple, an export writes the first, and an import accepts any."""
    reason: str = ""
    """Why other values are refused. If empty, all are accepted, since the class ignores them."""


class Ours(NamedTuple):
    """A setting that only our model has. The class is equivalent to one of its values."""

    ours: str
    only: Any
    """The value, or a function that returns it for a run's config."""
    reason: str
    """Why other values are refused; `{name}` stands for the class, `{only}` for the value."""
    remedy: str = ""
    """What to do instead. If empty: train with the value."""

    def wanted(self, config: RunConfig) -> Any:
        """Return the value for a run."""
        return self.only(config) if callable(self.only) else self.only


Row = Both | Theirs | Ours


def refused(rows: Sequence[Row], config: RunConfig, name: str) -> Iterator[tuple[Ours, Refusal]]:
    """Yield the rows of our settings that a run violates, with refusals for the class `name`."""
    for row in rows:
        if isinstance(row, Ours) and (value := config.value(row.ours)) != row.wanted(config):
            reason = row.reason.format(name=name, only=row.wanted(config), value=value)
            yield row, config.refusal(row.ours, reason, row.remedy)


def theirs(settings: Any, key: str) -> Any:
    """Return the value of a key of config.json; None if it is absent."""
    for name in key.split("."):
        in_section = isinstance(settings, dict)
        settings = settings.get(name) if in_section else getattr(settings, name)
    return settings


# ---- Rows that several classes have -------------------------------------------------------------
HERE = "`pretrain evaluate` measures it here; to export, train"
ACTIVATIONS = {
    "gelu": "gelu",
    # Three names of GELU's tanh approximation (transformers/activations.py).
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face's name of an activation -> model.hidden_act."""

COMMON: tuple[Row, ...] = (
    Both("tie_word_embeddings", "model.tie_word_embeddings"),
    Ours(
        "train.objective",
        "next_token",
        "no transformers class attends in both directions with these positions",
        f"{HERE} with next_token",
    ),
    Ours(
        "model.adaptive_cutoffs",
        None,
        "no stock transformers decoder with these positions has an adaptive softmax",
        f"{HERE} without it",
    ),
    Ours(
        "model.final_layernorm",
        True,
        "{name} has a norm after its last layer",
        "Train with it; `pretrain evaluate` measures this model here",
    ),
)
"""Rows of every class."""
NO_EMBEDDING_NORM = Ours(
    "model.embedding_layernorm", False, "{name} does not normalize its embeddings"
)
EVEN_HEADS = Ours(
    "model.kv_channels",
    lambda config: config.model.hidden_size // config.model.num_attention_heads,
    "the heads of {name} have hidden_size / heads = {only}",
)
NO_QK_NORM = Ours("model.qk_layernorm", False, "{name} does not normalize queries and keys")
NO_CLIPPING = Ours("model.clip_qkv", None, "{name} does not clip queries, keys and values")
SEQUENTIAL = Ours(
    "model.parallel_residual", False, "in {name} the MLP reads the sum after attention"
)
PLAIN = (NO_CLIPPING, SEQUENTIAL, NO_EMBEDDING_NORM)
"""Rows of the classes that have none of what Bloom, MPT and GPT-NeoX have alone."""


def sizes(hidden: str, layers: str, heads: str, ffn: str = "") -> tuple[Both, ...]:
    """Return the rows of the model's sizes, given the class's keys; `ffn` is "" if it has none."""
    keys = {"hidden_size": hidden, "num_layers": layers, "num_attention_heads": heads}
    keys |= {"ffn_hidden_size": ffn} if ffn else {}
    return tuple(Both(theirs, f"model.{name}") for name, theirs in keys.items())


def activation(key: str) -> Both:
    """Return the row of the MLP's activation, given the class's key."""
    reason = f"our activations are {', '.join(ACTIVATIONS)}"
    return Both(key, "model.hidden_act", reason, read=ACTIVATIONS.__getitem__)


# ---- How a class arranges a tensor ---------------------------------------------------------------
class Unchanged:
    """Keeps our tensor. Subclasses rearrange weights and biases alike, without changing values."""

    def __init__(self, *names: str) -> None:
        self.names = names
        """Names of the class's modules."""

    def export(self, config: RunConfig, ours: Tensor) -> Sequence[Tensor]:
        """Return their tensors."""
        return (ours,)

    def restore(self, config: RunConfig, theirs: Sequence[Tensor]) -> Tensor:
        """Return our tensor."""
        return theirs[0]


class GroupedQkv(Unchanged):
    """Queries, keys and values as three tensors, with rows [head, head_dim] and [group, head_dim].

    Megatron fuses them: the rows of linear_qkv are [group, (queries, key, value), head_dim].
    """

    def export(self, config: RunConfig, ours: Tensor) -> Sequence[Tensor]:
        fused = ours.view(config.num_query_groups, -1, config.head_dim, *ours.shape[1:])
        parts = self._stored(fused[:, :-2], fused[:, -2:-1], fused[:, -1:])
        return [part.flatten(0, 2) for part in parts]

    def _stored(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Return the stored tensors, given q, k and v [group, heads of it, head_dim, ...]."""
        return q, k, v

    def restore(self, config: RunConfig, theirs: Sequence[Tensor]) -> Tensor:
        import torch

        rows = config.num_query_groups, -1, config.head_dim
        q, k, v = (part.reshape(*rows, *part.shape[1:]) for part in theirs)
        return torch.cat([q, k[:, :1], v[:, :1]], dim=1).flatten(0, 2)


class SplitQkv(GroupedQkv):
    """For a class without groups: each query head gets a copy of its group's key and value.

    The class computes the same function, with more weights and a larger cache.
    """

    def _stored(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        return q, k.expand_as(q), v.expand_as(q)


class StackQkv(SplitQkv):
    """One tensor with rows [(q, k, v), head, head_dim]."""

    def export(self, config: RunConfig, ours: Tensor) -> Sequence[Tensor]:
        import torch

        return (torch.cat(list(super().export(config, ours))),)

    def restore(self, config: RunConfig, theirs: Sequence[Tensor]) -> Tensor:
        return super().restore(config, theirs[0].chunk(3))


class InterleavedQkv(SplitQkv):
    """One tensor with rows [head, (q, k, v), head_dim]."""

    def export(self, config: RunConfig, ours: Tensor) -> Sequence[Tensor]:
        import torch

        rows = -1, config.head_dim, *ours.shape[1:]
        by_head = [part.view(rows) for part in super().export(config, ours)]
        return (torch.stack(by_head, dim=1).flatten(0, 2),)

    def restore(self, config: RunConfig, theirs: Sequence[Tensor]) -> Tensor:
        by_head = theirs[0].view(-1, 3, config.head_dim, *theirs[0].shape[1:])
        return super().restore(config, [part.flatten(0, 1) for part in by_head.unbind(1)])


class Transposed(Unchanged):
    """A weight with the input dimension first, as in transformers' Conv1D."""

    def __init__(self, outputs: Unchanged) -> None:
        super().__init__(*outputs.names)
        self.outputs = outputs
        """How the outputs are arranged."""

    def export(self, config: RunConfig, ours: Tensor) -> Sequence[Tensor]:
        # t() does not change a bias.
        return [part.t() for part in self.outputs.export(config, ours)]

    def restore(self, config: RunConfig, theirs: Sequence[Tensor]) -> Tensor:
        return self.outputs.restore(config, [part.t() for part in theirs])


class GateAndUp(Unchanged):
    """The first weight of a gated MLP as two tensors: the gate and the gated projection."""

    def export(self, config: RunConfig, ours: Tensor) -> Sequence[Tensor]:
        return ours.chunk(2)

    def restore(self, config: RunConfig, theirs: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.cat(list(theirs))


class PastPadding(Unchanged):
    """A position table that begins with rows for padding, which our model does not have."""

    ROWS = 2
    """OPTLearnedPositionalEmbedding.offset: position p is in row p + 2."""

    def export(self, config: RunConfig, ours: Tensor) -> Sequence[Tensor]:
        import torch

        return (torch.cat([ours.new_zeros(self.ROWS, ours.shape[1]), ours]),)

    def restore(self, config: RunConfig, theirs: Sequence[Tensor]) -> Tensor:
        return theirs[0][self.ROWS :]


# ---- Factors -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Factors:
    """The factors by which an export multiplies our weights.

    Our model multiplies its word embeddings by config.embedding_scale, which no class does, so the
    export stores the product. If the same matrix is the output layer, the final LayerNorm is
    divided by the factor: (f e) . (LN(h) / f) = e . LN(h).
    """

    embedding: float = 1.0
    """Factor on word embeddings. With a tied output layer the final LayerNorm is divided by it."""
    embedding_norm: float = 1.0
    """Factor on the weights of a LayerNorm on the embeddings."""
    stream: float = 1.0
    """Factor on the residual stream, and so on the outputs of attention and MLP."""


@dataclass(frozen=True)
class Stored:
    """One of our tensors and where a class stores it."""

    name: str
    """Our global name."""
    theirs: tuple[str, ...]
    """Names in the class's state_dict."""
    arrangement: Unchanged
    factor: float = 1.0
    """The class stores our tensor multiplied by this factor."""
    is_absent: bool = False
    """True for a bias that our model does not have, and that the class stores as zeros."""

    def export(self, config: RunConfig, tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensors that the class stores for ours, in the order of `theirs`."""
        return self.arrangement.export(config, _times(tensor, self.factor))

    def restore(self, config: RunConfig, parts: list[Tensor]) -> Tensor:
        """Return our tensor, given the class's tensors in the order of `theirs`."""
        tensor = self.arrangement.restore(config, parts)
        return tensor if self.factor == 1.0 else tensor / self.factor


# ---- A table of tensors --------------------------------------------------------------------------
class TensorTable:
    """Maps our tensors to those of another format for the same model."""

    modules: ClassVar[Mapping[str, str | Unchanged]]
    """Our modules outside layers -> theirs."""
    layers: ClassVar[str]
    """Their name for decoder.layers."""
    layer: ClassVar[Mapping[str, str | Unchanged]]
    """Our modules of a layer -> theirs."""

    def factors(self, config: RunConfig, embedding: Tensor) -> Factors:
        """Return the factors of an export; `embedding` is our word embeddings."""
        # Our model scales embeddings after their LayerNorm, if there is one.
        has_norm = config.model.embedding_layernorm
        scale = config.embedding_scale
        return Factors(embedding_norm=scale) if has_norm else Factors(embedding=scale)

    def extra(self, config: RunConfig, factors: Factors, max_length: int) -> dict[str, Tensor]:
        """Return the tensors that only the class has, such as a table of computed positions."""
        import torch

        module = self.modules.get(POSITIONS)
        table = config.position.embedded(config, torch.arange(max_length)) if module else None
        if module is None or table is None:
            return {}
        stored = Unchanged(module) if isinstance(module, str) else module
        [name], [part] = stored.names, stored.export(config, table.float())
        return {f"{name}.weight": part}

    def biased(self, config: RunConfig, module: str) -> bool:
        """Return True if the class has a bias in this module; it is zero if ours has none."""
        if config.model.gated_linear_unit:
            # Classes with Llama's block have no other biases.
            return module == QKV
        return module not in (EMBEDDING, POSITIONS, OUTPUT)

    def left_out(self, config: RunConfig) -> dict[str, bool]:
        """Return which of our modules this run's model does not have."""
        m = config.model
        return {
            OUTPUT: m.tie_word_embeddings,
            EMBEDDING_NORM: not m.embedding_layernorm,
            POSITIONS: LEARNED_TABLE not in config.position.tensors(config),
            Q_NORM: not m.qk_layernorm,
            K_NORM: not m.qk_layernorm,
        }

    def stored_tensors(self, config: RunConfig, factors: Factors) -> Iterator[Stored]:
        """Yield every tensor of the class except those of `extra`; each weight before its bias.

        Args:
            config: The run's config.
            factors: The factors of the stored weights.
        """
        m, left_out = config.model, self.left_out(config)
        # A tied output layer multiplies by the scaled embeddings too. Dividing the final LayerNorm
        # by the same factor cancels the factor in the logits.
        by_module = {
            EMBEDDING: factors.embedding,
            EMBEDDING_NORM: factors.embedding_norm,
            "self_attention.linear_proj": factors.stream,
            "mlp.linear_fc2": factors.stream,
            FINAL_NORM: 1 / factors.embedding if m.tie_word_embeddings else 1.0,
        }
        parts = [("", "", self.modules)]
        for i in range(m.num_layers):
            parts.append((f"decoder.layers.{i}.", f"{self.layers}.{i}.", self.layer))
        for mine, other, modules in parts:
            for module, names in modules.items():
                if left_out.get(module):
                    continue
                stored = Unchanged(names) if isinstance(names, str) else names
                ours_has = m.use_bias or (m.add_qkv_bias and module == QKV)
                for kind in ("weight", "bias") if self.biased(config, module) else ("weight",):
                    yield Stored(
                        f"{mine}{module}.{kind}",
                        tuple(f"{other}{name}.{kind}" for name in stored.names),
                        stored,
                        by_module.get(module, 1.0),
                        is_absent=kind == "bias" and not ours_has,
                    )

    def converted(
        self, config: RunConfig, factors: Factors, state: Mapping[str, Tensor], max_length: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, one at a time, with the names and shapes of the class, in fp32.

        Args:
            config: The run's resolved config.
            factors: The factors of the stored weights.
            state: Full tensors by global name: fp32, or on "meta" to get only shapes.
            max_length: Longest sequence in tokens: the size of a table of positions.
        """
        import torch

        yield from self.extra(config, factors, max_length).items()
        rows = 0
        for stored in self.stored_tensors(config, factors):
            # A bias that our model does not have takes its size from the weight before it.
            tensor = torch.zeros(rows) if stored.is_absent else state[stored.name]
            rows = tensor.shape[0]
            for name, part in zip(stored.theirs, stored.export(config, tensor), strict=True):
                yield name, part.float().contiguous()


# ---- A class -------------------------------------------------------------------------------------
class HuggingFaceClass(TensorTable):
    """A transformers class, with the mapping between its models and ours.

    A subclass fills in the table. If the class computes something that our model does not, the
    subclass also overrides methods to rewrite the weights so that both compute the same function.
    """

    model_type: ClassVar[str]
    """Key of the class in AutoConfig."""
    name: ClassVar[str]
    """Name of the class that AutoModelForCausalLM loads."""
    architecture: ClassVar[str] = ""
    """The name under `architectures` in config.json, if it differs from `name`."""
    positions: ClassVar[tuple[str, ...]]
    """The position methods that the class can hold; an import uses the first."""
    rows: ClassVar[tuple[Row, ...]]
    """The table of settings, for export and import."""
    length_key: ClassVar[str] = "max_position_embeddings"
    """Key of config.json that holds the longest sequence in tokens."""
    is_bounded: ClassVar[bool] = False
    """True if the class computes no positions beyond that length."""
    precisions: ClassVar[str] = "fp32, bf16 and fp16"
    """Precisions in which the class computes the model accurately, for `pretrain config`."""
    advice: ClassVar[str] = ""
    """Further text for `pretrain config`; `{stock}` stands for the stock class."""
    stock: ClassVar[str] = ""
    """For a class of `modeling_slopes`, whose code is in the folder: the stock class that it
    modifies. Stock loaders refuse such a folder."""
    trust_remote_code: bool = False
    """Run code that a folder contains."""
    settings_tensors: ClassVar[Mapping[str, str]] = {}
    """Our tensors that are stored in config.json -> their keys."""

    def note(self, config: RunConfig, settings: Any) -> str:
        """Return text for the model card: what users of an export must know.

        Args:
            config: The run's resolved config.
            settings: The transformers config.
        """
        raise NotImplementedError

    # -- export: settings --
    def settings(self, config: RunConfig, max_length: int, state: State = None) -> dict[str, Any]:
        """Return the keyword arguments of the class's config.

        Args:
            config: The run's resolved config.
            max_length: Longest sequence in tokens.
            state: Our tensors, some of which may be stored in the settings.
        """
        # Always written, even if the class has another key or none, because programs that load a
        # model look for this key before they fall back to a shorter default.
        found: dict[str, Any] = {"max_position_embeddings": max_length}
        found |= {"vocab_size": config.padded_vocab_size, self.length_key: max_length}
        for row in self.rows:
            if isinstance(row, Ours) or (isinstance(row, Both) and not row.is_written):
                continue
            if isinstance(row, Both):
                value = row.write(config.value(row.ours))
            else:
                value = row.only[0] if isinstance(row.only, tuple) else row.only
            section, _, key = row.theirs.rpartition(".")
            (found.setdefault(section, {}) if section else found)[key] = value
        return found

    def transformers_config(
        self,
        config: RunConfig,
        max_length: int,
        special: Mapping[str, int],
        state: State = None,
    ) -> Any:
        """Return the transformers config of a model.

        Args:
            config: The run's resolved config.
            max_length: Longest sequence in tokens.
            special: bos_token_id, eos_token_id and pad_token_id, from `special_ids`.
            state: Our tensors, some of which may be stored in the settings.
        """
        import torch

        found = self.config_class(**special, **self.settings(config, max_length, state))
        found.architectures = [self.architecture or self.name]
        found.dtype = torch.float32
        if self.stock:
            own = {"AutoConfig": self.config_class, "AutoModelForCausalLM": self.code_class}
            found.auto_map = {k: f"{CODE.stem}.{each.__name__}" for k, each in own.items()}
        # Not by setattr, because transformers 5 stores rope_scaling as rope_parameters.
        vars(found).update(self.marks(config))
        return found

    def marks(self, config: RunConfig) -> dict[str, Any]:
        """Return keys of config.json for other programs; transformers ignores them."""
        return {}

    # -- import: settings --
    def sections(self, settings: Any) -> tuple[dict[str, dict[str, Any]], list[Refusal]]:
        """Return [model] and [position] of the model that a transformers config describes.

        Returns:
            The sections, and every reason why our model cannot hold that model.
        """
        found: dict[str, Any] = {
            "position.method": self.positions[0],
            "model.use_bias": True,
            "model.embedding_layernorm": EMBEDDING_NORM in self.modules,
            # The embedding gets exactly as many rows as the folder's, even if the tokenizer has
            # fewer pieces. None of the classes multiplies its embeddings.
            "model.make_vocab_size_divisible_by": settings.vocab_size,
            "model.embedding_scale": 1.0,
        }
        refused: list[Refusal] = []
        for row in self.rows:
            if isinstance(row, Ours):
                if not callable(row.only):
                    found[row.ours] = row.only
                continue
            value = theirs(settings, row.theirs)
            remedy = "This model cannot be imported"
            refusal = Refusal(row.theirs, value, row.reason, remedy)
            if isinstance(row, Theirs):
                known = row.only if isinstance(row.only, tuple) else (row.only,)
                if row.reason and value is not None and value not in known:
                    refused.append(refusal)
            elif value is not None:
                try:
                    mine = row.read(value)
                except (KeyError, ValueError):
                    refused.append(refusal)
                    continue
                if found.setdefault(row.ours, mine) != mine:
                    refused.append(refusal)
        sections: dict[str, dict[str, Any]] = {"model": {}, "position": {}}
        for key, value in found.items():
            section, _, name = key.partition(".")
            if section in sections and value is not None:
                sections[section][name] = value
        return sections, refused

    # -- classes of transformers --
    @property
    def config_class(self) -> Any:
        """The transformers config class."""
        if self.stock:
            return self.code_class.config_class
        from transformers import AutoConfig

        return type(AutoConfig.for_model(self.model_type))

    @property
    def code_class(self) -> Any:
        """Our own class whose code an export contains. A folder's copy of it is never run.

        Someone may have changed that copy, and running it would leave another copy in the user's
        cache (HF_MODULES_CACHE).
        """
        # Imported here, because transformers' modeling code takes seconds to load.
        from pretrain.huggingface import modeling_slopes

        return getattr(modeling_slopes, self.name)

    def read_config(self, folder: Path) -> Any:
        """Return the transformers config of a folder."""
        return self.config_class.from_pretrained(
            folder, local_files_only=True, trust_remote_code=self.trust_remote_code
        )

    def load(self, folder: Path, **options: Any) -> Any:
        """Load a folder with from_pretrained; code in it runs only with trust_remote_code.

        Args:
            folder: The folder.
            options: Options of from_pretrained.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        # Loading takes seconds, and a progress bar would fill a log file.
        disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
        kind = self.code_class if self.stock else AutoModelForCausalLM
        options.setdefault("config", self.read_config(folder))
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=self.trust_remote_code, **options
        )

    # -- import: tensors --
    def stored_factors(self, config: RunConfig, read: Read) -> Factors:
        """Return the factors by which the weights of a folder were multiplied."""
        return Factors(embedding=config.embedding_scale)

    def restore(
        self, config: RunConfig, read: Read, originals: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield our tensors by global name, one at a time: the reverse of `converted`.

        Args:
            config: The run's config.
            read: Returns a tensor of the class by its name, in fp32.
            originals: Copies that the export kept of tensors that cannot be restored bit for bit;
                used if they still match the class's tensors. Such tensors have a factor that is not
                a power of two, so that two neighboring numbers may round to the same product
                (sqrt(hidden_size)), or a product outside fp32's normal range.
        """
        for stored in self.stored_tensors(config, self.stored_factors(config, read)):
            parts = [read(name) for name in stored.theirs]
            if stored.is_absent:
                if any(part.any() for part in parts):
                    names = " and ".join(stored.theirs)
                    raise ConfigError(f"{names}: our model has no such bias, and it is not zero")
                continue
            tensor = stored.restore(config, parts).contiguous()
            if (original := originals.get(stored.name)) is not None:
                again = stored.export(config, original)
                tensor = original if all(map(same_bits, again, parts)) else tensor
            yield stored.name, tensor


# ---- Arithmetic on tensors -----------------------------------------------------------------------
def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two fp32 tensors have the same shape and bits; unlike ==, 0 is not -0."""
    import torch

    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Return tensor x factor; for 1 the tensor itself, which keeps the bits of a NaN."""
    return tensor if factor == 1.0 else tensor * factor

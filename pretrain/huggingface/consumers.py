"""Programs other than transformers that read an export: their files, and what they can compute.

An export is a folder for transformers. Files for another program are in a subfolder. They are made
from the run's weights and not from transformers' files, so they contain nothing that a class
rewrites (see `classes.Bloom`). All knowledge about these programs is in this file.

`HOLDS` follows the code of llama.cpp b9190 (src/models/{mpt,bloom,gptneox}.cpp,
src/llama-vocab.cpp) and vLLM 02d799b (model_executor/models/{mpt,bloom,opt,gpt_neox}.py; gpt2.py at
0176894, llama.py at 0035bdf, qwen3.py at 002456d). Every export compares the results if it can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

from pretrain.config import ConfigError, RunConfig
from pretrain.huggingface.base import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    K_NORM,
    OUTPUT,
    POSITIONS,
    Q_NORM,
    QKV,
    GateAndUp,
    GroupedQkv,
    HuggingFaceClass,
    Ours,
    StackQkv,
    TensorTable,
    refused,
)
from pretrain.huggingface.classes import (
    Bloom,
    Gpt2,
    GptNeoX,
    Mpt,
    MptSlopes,
    Opt,
    class_of,
    export_length,
)
from pretrain.huggingface.llama import Llama, Mistral, Qwen2, Qwen3
from pretrain.positions.alibi import BiasMax, bias_max_of
from pretrain.positions.rotary import inverse_frequencies

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.data.tokenizer import Tokenizer

TRANSFORMERS = "transformers"
"""The program that reads every export. Naming it in --for adds nothing."""


# ---- What each program holds ---------------------------------------------------------------------
def _any_gelu(config: RunConfig) -> str:
    act = config.model.hidden_act
    return act if act.startswith("gelu") else "gelu"


def _one_bias_max(config: RunConfig) -> Any:
    slopes = config.value("position.slopes")
    return slopes if isinstance(slopes, BiasMax) else "published"


_ONE_BIAS_MAX = (
    Ours("position.slopes", _one_bias_max, "it computes slopes that end at 2^-bias_max"),
    Ours("position.trainable_slopes", False, "it computes slopes that end at 2^-bias_max"),
)
_TIED = Ours("model.tie_word_embeddings", True, "its {name} skips lm_head.weight")
_GELU = Ours("model.hidden_act", _any_gelu, "its {name} computes GELU")
_SILU = Ours("model.hidden_act", "silu", "its {name} computes SiLU")
_PLAIN = Ours("position.rotary_scaling", None, "with its {name} only plain frequencies are written")
HOLDS: dict[str, dict[str, tuple[Ours, ...]]] = {
    # Known from its source only, because running it needs a GPU or a special build.
    "vllm": {
        Mpt.name: (
            Ours("model.layernorm_epsilon", 1e-5, "its MPT has {only}, not {value}"),
            Ours("model.tie_word_embeddings", True, "its MPT has no output layer of its own"),
        ),
        Bloom.name: (
            Ours("model.hidden_act", "gelu", "its Bloom computes exact GELU, not the tanh one"),
            Ours("model.tie_word_embeddings", True, "its Bloom skips lm_head.weight"),
        ),
        # True of older commits, one of which a user may have installed.
        **{each.name: (_TIED,) for each in (Opt, Gpt2)},
        GptNeoX.name: (_PLAIN,),
        **{each.name: (_SILU,) for each in (Llama, Mistral, Qwen2)},
        Qwen3.name: (_SILU, Ours("model.add_qkv_bias", False, "its Qwen3 has no bias behind them")),
    },
    # It computes both kinds of GELU as the tanh one, from a table in fp16: `LlamaCpp.rounding`.
    "llama.cpp": {
        Mpt.name: (),
        MptSlopes.name: _ONE_BIAS_MAX,
        Bloom.name: (),
        **{each.name: (_GELU,) for each in (Opt, Gpt2)},
        GptNeoX.name: (_GELU, _PLAIN),
        **{each.name: (_SILU,) for each in (Llama, Mistral, Qwen2)},
        Qwen3.name: (_SILU, _PLAIN),
    },
}
"""Program -> transformers class -> settings with which the program computes the class correctly.

A class that is missing here, such as ALiBi with other slopes, is refused for that program."""


# ---- A program -----------------------------------------------------------------------------------
class Export(NamedTuple):
    """A run's model and tokenizer, from which a program's files are made."""

    config: RunConfig
    state: Mapping[str, Tensor]
    """Full fp32 tensors by global name."""
    target: HuggingFaceClass
    folder: Path
    """The complete transformers folder."""
    tokenizer: Tokenizer
    special: Mapping[str, int]
    """bos_token_id, eos_token_id and pad_token_id."""
    max_length: int
    """Longest sequence in tokens."""

    def names(self, padding: str) -> list[str]:
        """Return a name for each row of the embedding; `padding` names rows without a token."""
        stock = self.tokenizer.to_hugging_face()
        tokens = [stock.id_to_token(i) for i in range(self.config.padded_vocab_size)]
        names, taken = list[str](), set(tokens)
        for i, token in enumerate(tokens):
            name = padding.format(i) if token is None else token
            # Names must be unique, because programs look up ids by name.
            while token is None and name in taken:
                name += "_"
            names.append(name)
        return names


class Loaded(NamedTuple):
    """A model as a program loaded it."""

    logits: Callable[[Tensor], Tensor]
    """Token ids [1, T] -> logits [1, T, V]."""
    encode: Callable[[str, bool], list[int]]
    """(A text, whether names of special tokens in it stand for those tokens) -> ids."""


class Consumer:
    """A program that reads exports. A subclass writes files for it, and loads them with it."""

    name: ClassVar[str]
    """Its name in --for and in `HOLDS`, and of the subfolder for its files."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Optional packages that writing the files needs."""
    reader: ClassVar[str] = ""
    """The package that loads the files for the comparison; "" for none."""

    def reasons(self, config: RunConfig, target: HuggingFaceClass) -> Iterator[str]:
        """Yield why the program would compute another model than the run's."""
        classes = HOLDS[self.name]
        if target.name not in classes:
            yield f"it has no {target.name}"
        for row, refusal in refused(classes.get(target.name, ()), config, target.name):
            yield f"{row.ours} = {refusal.value}: {refusal.reason}"

    def vocabulary_reasons(self, tokenizer: Tokenizer) -> Iterator[str]:
        """Yield why the program cannot tokenize a text like the run's tokenizer."""
        yield from ()

    def check(self, config: RunConfig, target: HuggingFaceClass, tokenizer: Tokenizer) -> None:
        """Check that the program supports this model, and that its files can be written here.

        Raises:
            ConfigError: It does not support the model, or a package is missing.
        """
        reasons = [*self.reasons(config, target), *self.vocabulary_reasons(tokenizer)]
        if reasons:
            raise ConfigError(
                "\n".join(f"--for {self.name}: {each}. Leave the option out" for each in reasons)
            )
        if missing := [name for name in self.packages if find_spec(name) is None]:
            raise ConfigError(
                f"--for {self.name}: its files are written by {' and '.join(missing)}, which is "
                "not installed. Run in the clone: pip install -e '.[consumers]'"
            )

    def write(self, export: Export, folder: Path) -> None:
        """Write the program's files into its existing folder."""
        raise NotImplementedError

    def load(self, export: Export, folder: Path) -> Loaded:
        """Load the files with the program, in fp32 on the CPU."""
        raise NotImplementedError

    def rounding(self, config: RunConfig) -> float:
        """Return the error allowed beyond fp32 rounding, relative to the largest logit."""
        return 0.0


class Vllm(Consumer):
    name = "vllm"


# ---- llama.cpp -----------------------------------------------------------------------------------
# Its MPT graph uses biases, a table of positions and an output layer if the file has them, and
# takes ALiBi's scale from the file, so it also computes a GPT with learned or sinusoidal positions.
# Its Bloom graph adds a LayerNorm on the embeddings.
class _Gguf(TensorTable):
    """gguf-py/gguf/constants.py, TENSOR_NAMES."""

    modules: ClassVar = {
        EMBEDDING: "token_embd",
        EMBEDDING_NORM: "token_embd_norm",
        POSITIONS: "position_embd",
        FINAL_NORM: "output_norm",
        OUTPUT: "output",
    }
    layers = "blk"
    layer: ClassVar = {
        "input_layernorm": "attn_norm",
        "self_attention.linear_qkv": StackQkv("attn_qkv"),
        "self_attention.linear_proj": "attn_output",
        "pre_mlp_layernorm": "ffn_norm",
        "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down",
    }


class _GgufLlama(_Gguf):
    """The tensor names of the graphs "llama" and "qwen3"."""

    layer: ClassVar = _Gguf.layer | {
        QKV: GroupedQkv("attn_q", "attn_k", "attn_v"),
        Q_NORM: "attn_q_norm",
        K_NORM: "attn_k_norm",
        "mlp.linear_fc1": GateAndUp("ffn_gate", "ffn_up"),
    }


class LlamaCpp(Consumer):
    name = "llama.cpp"
    packages = ("gguf",)
    reader = "cyllama"
    FILE = "model.gguf"

    def vocabulary_reasons(self, tokenizer: Tokenizer) -> Iterator[str]:
        from pretrain.data.tokenizer import PieceTokenizer

        if isinstance(tokenizer, PieceTokenizer):
            return
        for reason in _unlike_gpt2(json.loads(tokenizer.to_hugging_face().to_str())):
            yield (
                f"{tokenizer.path}: {reason}; it reads SentencePiece's BPE and GPT-2's byte-level "
                "BPE only"
            )

    def write(self, export: Export, folder: Path) -> None:
        import gguf

        config, m, rope = export.config, export.config.model, export.config.position.rope()
        graph = self._graph(config)
        writer = gguf.GGUFWriter(folder / self.FILE, graph)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        writer.add_context_length(export.max_length)
        writer.add_embedding_length(m.hidden_size)
        writer.add_feed_forward_length(config.ffn_hidden_size)
        writer.add_block_count(m.num_layers)
        writer.add_head_count(m.num_attention_heads)
        writer.add_layer_norm_eps(m.layernorm_epsilon)
        writer.add_layer_norm_rms_eps(m.layernorm_epsilon)
        slopes, has_slopes = config.value("position.slopes"), config.position.bias == "slopes"
        writer.add_max_alibi_bias(float(bias_max_of(slopes)) if has_slopes else 0.0)
        if m.clip_qkv is not None:
            writer.add_clamp_kqv(m.clip_qkv)
        if rope:
            writer.add_rope_dimension_count(int(config.head_dim * rope.percent))
            writer.add_rope_freq_base(float(rope.base))
            writer.add_parallel_residual(m.parallel_residual)
        self._add_vocabulary(writer, export)
        if m.gated_linear_unit:
            writer.add_head_count_kv(config.num_query_groups)
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        table = _GgufLlama() if m.gated_linear_unit else _Gguf()
        factors = table.factors(config, export.state[f"{EMBEDDING}.weight"])
        tensors = dict(table.converted(config, factors, export.state, export.max_length))
        if graph == "llama":
            tensors |= self._rotated(config, tensors, writer)
        if graph == "gptneox" and m.tie_word_embeddings:
            # Its GPT-NeoX graph requires an output layer, even if it is tied.
            tensors["output.weight"] = tensors["token_embd.weight"]
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _graph(self, config: RunConfig) -> str:
        m = config.model
        if m.gated_linear_unit:
            # Both graphs have Llama's block; qwen3 also normalizes queries and keys.
            return "qwen3" if m.qk_layernorm else "llama"
        return "gptneox" if config.position.rope() else "bloom" if m.embedding_layernorm else "mpt"

    def _rotated(
        self, config: RunConfig, tensors: Mapping[str, Tensor], writer: Any
    ) -> dict[str, Tensor]:
        """Return the tensors that differ in the graph "llama", which rotates neighboring channels.

        It pairs channel 2 i with 2 i + 1, where others pair i with i + head_dim / 2. It divides
        the frequencies by `rope_freqs`, which can hold the effect of any rotary scaling.
        """
        half = config.head_dim // 2
        found = {
            name: tensor.view(-1, 2, half, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            for name, tensor in tensors.items()
            if ".attn_q." in name or ".attn_k." in name
        }
        rope = config.position.rope()
        if rope is not None and rope.inverse_frequencies is not None:
            plain = inverse_frequencies(rope.base, config.head_dim)
            found["rope_freqs.weight"] = plain / rope.inverse_frequencies(config.head_dim)
            writer.add_rope_scaling_attn_factors(
                config.value("position.rotary_scaling").temperature
            )
        return found

    def _add_vocabulary(self, writer: Any, export: Export) -> None:
        """Write the tokenizer, which gives the same ids as the run's and adds no tokens."""
        from gguf import TokenType

        from pretrain.data.tokenizer import PieceTokenizer

        tokenizer, special = export.tokenizer, export.special
        names = export.names("[PAD{}]")
        control = {special["bos_token_id"], special["eos_token_id"], special["pad_token_id"]}
        kinds = [TokenType.NORMAL] * len(names)
        kinds[tokenizer.vocab_size :] = [TokenType.UNUSED] * (len(names) - tokenizer.vocab_size)
        if isinstance(tokenizer, PieceTokenizer):
            writer.add_tokenizer_model("llama")
            writer.add_tokenizer_pre("default")
            writer.add_add_space_prefix(tokenizer.proto.normalizer_spec.add_dummy_prefix)
            scores = [-1000.0] * len(names)
            for i, piece in enumerate(tokenizer.proto.pieces):
                scores[i], kinds[i] = piece.score, TokenType(piece.type)
                if kinds[i] == TokenType.CONTROL and i not in control:
                    # The name of a token that training never saw is plain text, as in the
                    # transformers folder.
                    kinds[i] = TokenType.UNUSED
            writer.add_token_scores(scores)
        else:
            content = json.loads(tokenizer.to_hugging_face().to_str())
            merges = content["model"]["merges"]
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
            for token in content["added_tokens"]:
                is_control = token["special"]
                kinds[token["id"]] = TokenType.CONTROL if is_control else TokenType.USER_DEFINED
        writer.add_token_list(names)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(special["bos_token_id"])
        writer.add_eos_token_id(special["eos_token_id"])
        writer.add_pad_token_id(special["pad_token_id"])
        if (unknown := tokenizer.special.get("unk")) is not None:
            writer.add_unk_token_id(unknown)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(False)

    def load(self, export: Export, folder: Path) -> Loaded:
        import numpy as np
        import torch
        from cyllama.llama import llama_cpp

        class Model(llama_cpp.LlamaModel):  # type: ignore[misc]  # untyped
            # LlamaContext.get_logits_ith of cyllama 0.2.18 reads this missing attribute.
            n_vocab = property(lambda self: self.get_vocab().n_vocab)

        llama_cpp.disable_logging()
        model = Model(str(folder / self.FILE), llama_cpp.LlamaModelParams())
        vocabulary = model.get_vocab()

        def logits(ids: Tensor) -> Tensor:
            length, params = ids.shape[1], llama_cpp.LlamaContextParams()
            params.n_ctx = params.n_batch = length
            params.n_threads = params.n_threads_batch = torch.get_num_threads()
            # GGML_TYPE_F32, because a cache in 16 bit would make the comparison inaccurate.
            params.type_k = params.type_v = params.flash_attn_type = 0
            context = llama_cpp.LlamaContext(model, params)
            batch = llama_cpp.LlamaBatch(n_tokens=length, embd=0, n_seq_max=1)
            batch.set_batch(ids[0].tolist(), 0, True)
            context.decode(batch)
            rows = [np.array(context.get_logits_ith(i), np.float32) for i in range(length)]
            return torch.from_numpy(np.stack(rows))[None]

        return Loaded(logits, lambda text, special: list(vocabulary.tokenize(text, False, special)))

    def rounding(self, config: RunConfig) -> float:
        # ggml_gelu takes the tanh approximation from an fp16 table (errors of 2^-11 in input and
        # output), and exact GELU differs from it by as much. Models of 2 to 4 layers showed half
        # of this bound.
        return config.model.num_layers * 2.0**-11 * config.model.hidden_act.startswith("gelu")


def _unlike_gpt2(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the features of a tokenizer.json that a GGUF file of GPT-2's tokenizer cannot hold."""
    split, model = content["pre_tokenizer"] or {}, content["model"]
    like = split.get("type") == "ByteLevel" and split.get("use_regex", True)
    if not like or split.get("add_prefix_space") or content["normalizer"] or model["type"] != "BPE":
        yield "it would split texts differently from this tokenizer"
        return
    options = "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"
    yield from (f"model.{name} is set" for name in options if model.get(name))
    if not model["vocab"].keys() >= set(ByteLevel.alphabet()):
        yield "model.vocab lacks some of the 256 bytes"
    for token in content["added_tokens"]:
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token[flag]]
        yield from (f"the added token {token['content']!r} has {flag}" for flag in flags)


CONSUMERS: dict[str, Consumer] = {each.name: each for each in (Vllm(), LlamaCpp())}


def chosen(names: Sequence[str]) -> list[Consumer]:
    """Return the programs that --for names, without transformers and without duplicates.

    Raises:
        ConfigError: There is no such program.
    """
    known = (TRANSFORMERS, *CONSUMERS)
    for name in names:
        if name not in known:
            raise ConfigError(f"--for {name}: unknown. Give one of {', '.join(known)}")
    return [CONSUMERS[name] for name in dict.fromkeys(names) if name in CONSUMERS]


# ---- The proof -----------------------------------------------------------------------------------
class Proof(NamedTuple):
    """The result of comparing a program's model and tokenizer with the run's."""

    program: str
    says: str
    """One sentence without a full stop, for the terminal and the model card."""
    passed: bool = True
    """False if they differ; True also if they could not be compared."""

    def __str__(self) -> str:
        return f"{self.program}: {self.says}"


def prove(
    program: Consumer,
    export: Export,
    logits_fn: Callable[[Tensor], Tensor],
    ids_by_length: Sequence[Tensor],
) -> Proof:
    """Load a program's files with that program, and compare the result with the run's model.

    Args:
        program: The program.
        export: The model and tokenizer from which its files were made.
        logits_fn: Token ids [1, T] -> our model's logits [1, T, V] in fp32.
        ids_by_length: Token ids [N, T] for each length T.
    """
    from transformers import PreTrainedTokenizerFast

    from pretrain.data.tokenizer import PROBES
    from pretrain.huggingface.parity import compare
    from pretrain.platform import release_memory

    if not program.reader:
        return Proof(program.name, "reads this folder; its source was read, it was not run")
    if find_spec(program.reader) is None:
        return Proof(program.name, f"not compared, because {program.reader} is not installed here")
    release_memory()
    loaded = program.load(export, export.folder / program.name)
    m, rounding = export.config.model, program.rounding(export.config)
    rows = [compare(logits_fn, loaded.logits, i, m.hidden_size, rounding) for i in ids_by_length]
    eos = export.names("")[export.special["eos_token_id"]]
    stock = PreTrainedTokenizerFast.from_pretrained(export.folder, local_files_only=True)
    names = [eos, *map(str, stock.get_added_vocab())]
    pairs = (f"{a}{b}  {a} {b}" for a, b in pairwise(names))
    texts = (*PROBES, *(f" a{each}b {each}\n" for each in names), *pairs, "".join(names))
    wrong = [
        text
        for text in texts
        if loaded.encode(text, False) != export.tokenizer.encode(text).tolist()
        or loaded.encode(text, True) != stock(text)["input_ids"]
    ]
    passed = not wrong and all(row.passed for row in rows)
    where = f"{program.reader} {version(program.reader)}"
    numbers = "; ".join(
        f"at {row.length:,} tokens perplexity {row.exported_perplexity:.4f} for "
        f"{row.perplexity:.4f}, logits within {row.max_logit_difference:.1e} "
        f"({row.logit_tolerance:.1e} allowed)"
        for row in rows
    )
    ids = f"other ids for {wrong[0]!r}" if wrong else f"the same ids for {len(texts)} odd texts"
    return Proof(
        program.name, f"{'proven' if passed else 'DIFFERS'} in {where}: {numbers}; {ids}", passed
    )


def not_for(
    config: RunConfig, target: HuggingFaceClass, written: Sequence[Consumer] = ()
) -> Iterator[str]:
    """Yield "PROGRAM: ..." for each program that has no files here: why, or how to write them."""
    for each in CONSUMERS.values():
        if each not in written:
            reasons = "; ".join(each.reasons(config, target))
            can = f"not exported for it (`pretrain export --for {each.name}`)"
            yield f"{each.name}: {f'it would compute another model: {reasons}' if reasons else can}"


# ---- Before training -----------------------------------------------------------------------------
def describe_export(config: RunConfig, obstacles: Sequence[str] = ()) -> Iterator[str]:
    """Yield lines with the class, precisions and programs of a run's export, or why it has none.

    Args:
        config: The run.
        obstacles: Further reasons why the run could not be exported.
    """
    reasons, found = [line for text in obstacles for line in text.splitlines()], None
    try:
        found = class_of(config)
    except ConfigError as error:
        reasons = [*str(error).splitlines(), *reasons]
    if reasons or found is None:
        yield from (f"none: {reason}" for reason in reasons)
        return
    advice = found.advice.format(stock=found.stock)
    yield f"{found.name} in {found.precisions}, for up to {export_length(config):,} tokens{advice}"
    programs: dict[str, list[str]] = {}
    for each in CONSUMERS.values():
        for reason in each.reasons(config, found):
            programs.setdefault(reason, []).append(each.name)
    yield from (f"not in {', '.join(names)}: {reason}" for reason, names in programs.items())

"""Describe a run: where each value of its config comes from, its size and length, its layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pretrain.config.errors import ConfigError, Refusal
from pretrain.config.run import RunConfig
from pretrain.config.schema import WORDS
from pretrain.config.tensors import num_parameters, num_parameters_of_rank

# ---- exports ----
# Choose the transformers class that a run will export as, or give every reason why none can.
#
# This is known before training, so `pretrain config` says it. `pretrain.huggingface` writes the
# classes.


OPT_LAYERNORM_EPSILON = 1e-5
"""OPTDecoderLayer makes its LayerNorms with torch's default epsilon; no setting changes it."""
VLLM_LAYERNORM_EPSILON = 1e-5
"""vLLM's MPT makes its LayerNorms with torch's default epsilon, whatever the config says."""
EXPORT_REACH = 16
"""An export reaches this many training lengths, as far as the default evaluation does."""


@dataclass(frozen=True)
class ExportClass:
    """A transformers class, stock or in the folder, as far as it is known without torch."""

    model_type: str
    """Key of its config class in AutoConfig."""
    class_name: str
    """Name of the class that AutoModelForCausalLM loads."""
    has_16_bit: bool = True
    """True if the class computes the model in bf16 and fp16 too."""
    stock: str = ""
    """Of a class in the folder: model_type of the stock class that it is but for its slopes."""

    @property
    def family(self) -> str:
        """Return the model_type of the stock class that has these settings and weights."""
        return self.stock or self.model_type


EXPORT_CLASSES = {
    # BloomAttention adds the biases m j of absolute positions j to its scores in the dtype of the
    # weights. In bf16, which has 8 bits, 256 m and 257 m are one number.
    "bloom": ExportClass("bloom", "BloomForCausalLM", has_16_bit=False),
    "mpt": ExportClass("mpt", "MptForCausalLM"),
    "opt": ExportClass("opt", "OPTForCausalLM"),
    "gpt_neox": ExportClass("gpt_neox", "GPTNeoXForCausalLM"),
    # Stock Bloom and MPT compute their slopes. These two hold any.
    "bloom_slopes": ExportClass("bloom_slopes", "BloomSlopesForCausalLM", stock="bloom"),
    "mpt_slopes": ExportClass("mpt_slopes", "MptSlopesForCausalLM", stock="mpt"),
}
"""Every class that a model can be exported as, by model_type."""


def export_class(config: RunConfig) -> ExportClass:
    """Return the class that can hold this run's model.

    Raises:
        ConfigError: No class can. The message gives every reason, and what to train instead.
    """
    _check_words(config)
    if config.is_masked:
        raise ConfigError(
            str(
                Refusal(
                    "train.objective",
                    config.train.objective,
                    "no transformers class looks both ways with these positions",
                    "`pretrain evaluate` measures it here; to export, train with next_token",
                )
            )
        )
    model_type, reason = config.position.held_by(config)
    if model_type is None:
        remedy = (
            "`pretrain evaluate` measures it here; to export, train with alibi, rotary, learned "
            "or sinusoidal"
        )
        method = config.position.method
        raise ConfigError(str(Refusal("position.method", method, reason, remedy)))
    found = EXPORT_CLASSES[model_type]
    refusals = list(_refusals(config, found))
    if refusals:
        raise ConfigError("\n".join(str(r) for r in refusals))
    return found


def _check_words(config: RunConfig) -> None:
    """Raise ConfigError if no class has such word embeddings, or the tokenizer is not exported."""
    cutoffs, refusal = config.model.adaptive_cutoffs, None
    remedy = "`pretrain evaluate` measures it here; to export, train"
    if cutoffs is not None:
        refusal = Refusal(
            "model.adaptive_cutoffs",
            list(cutoffs),
            "no stock transformers decoder with these positions has an adaptive softmax",
            f"{remedy} without it",
        )
    elif config.data.tokenizer == WORDS:
        refusal = Refusal(
            "data.tokenizer",
            WORDS,
            "a vocabulary of words is not exported",
            f"{remedy} with a SentencePiece or Hugging Face tokenizer",
        )
    if refusal is not None:
        raise ConfigError(str(refusal))


def export_length(config: RunConfig) -> int:
    """Return the longest sequence, in tokens, that an export accepts unless told otherwise.

    It reaches 16 training lengths and every length that is evaluated; a learned position table ends
    where it ends.
    """
    if (end := config.position.table_end(config)) is not None:
        return end
    return max(EXPORT_REACH * config.data.sequence_length, *config.evaluation_lengths)


def describe_export(config: RunConfig) -> list[str]:
    """Return lines that say what the run will export as and in which precisions, or why not."""
    try:
        found = export_class(config)
    except ConfigError as error:
        return [f"none: {line}" for line in str(error).splitlines()]
    reach = f"for up to {export_length(config):,} tokens"
    if found.stock:
        return [
            f"{found.class_name} in fp32, bf16 and fp16, {reach}: a class in the folder, which is "
            f"{EXPORT_CLASSES[found.stock].class_name} with these slopes. It is loaded with "
            "trust_remote_code=True, and stock loaders refuse the folder",
            *(f"not in vLLM: {reason}" for reason in vllm_reasons(config, found)),
        ]
    if found.has_16_bit:
        return [
            f"{found.class_name} in fp32, bf16 and fp16, {reach}",
            *(f"not in vLLM: {reason}" for reason in vllm_reasons(config, found)),
        ]
    lines = [
        f"{found.class_name} in fp32, {reach}. In bf16 and fp16 stock transformers rounds its "
        "ALiBi biases too much; trust_remote_code=True loads a class in the folder that does not",
        *(f"not as it is in vLLM: {reason}" for reason in vllm_reasons(config, found)),
    ]
    if not config.model.embedding_layernorm:
        lines.append(
            'with model.hidden_act = "gelu" and model.use_bias = false it would be '
            "MptForCausalLM, in fp32, bf16 and fp16"
        )
    return lines


def vllm_reasons(config: RunConfig, found: ExportClass) -> Iterator[str]:
    """Yield what vLLM computes otherwise than transformers, or refuses, of this model.

    Read in vLLM's vllm/model_executor/models/mpt.py and bloom.py.
    """
    m = config.model
    if found.stock:
        yield f"it has no {found.class_name}, and stock classes compute other slopes"
        return
    if found.model_type == "mpt" and m.layernorm_epsilon != VLLM_LAYERNORM_EPSILON:
        yield (
            f"its MPT has layernorm_epsilon = {VLLM_LAYERNORM_EPSILON}, not {m.layernorm_epsilon}"
        )
    if found.model_type == "mpt" and not m.tie_word_embeddings:
        yield "its MPT needs model.tie_word_embeddings = true"
    if found.model_type == "bloom":
        yield "its Bloom computes exact GELU, not the tanh approximation"
        if not m.tie_word_embeddings:
            yield "its Bloom skips lm_head.weight, so it needs model.tie_word_embeddings = true"


def _refusals(config: RunConfig, found: ExportClass) -> Iterator[Refusal]:
    """Yield each setting of the model that the class does not support."""
    m, name = config.model, found.class_name
    if config.num_query_groups != m.num_attention_heads:
        yield Refusal(
            "model.num_query_groups",
            config.num_query_groups,
            f"{name} has one key and value head for each query head",
            f"Train with {m.num_attention_heads}, or leave it out",
        )
    if not m.final_layernorm:
        yield Refusal(
            "model.final_layernorm",
            False,
            f"{name} has a LayerNorm behind its last layer",
            "Train with it; `pretrain evaluate` measures this model here",
        )
    if m.embedding_layernorm and found.family != "bloom":
        yield Refusal(
            "model.embedding_layernorm",
            True,
            f"{name} does not normalise its embeddings",
            "Train without it, or with alibi (BloomForCausalLM)",
        )
    if m.parallel_residual and found.model_type != "gpt_neox":
        yield Refusal(
            "model.parallel_residual",
            True,
            f"in {name} the MLP reads what attention has added to",
            "Train without it, or with rotary (GPTNeoXForCausalLM)",
        )
    if found.model_type == "opt" and m.layernorm_epsilon != OPT_LAYERNORM_EPSILON:
        yield Refusal(
            "model.layernorm_epsilon",
            m.layernorm_epsilon,
            f"{name} supports {OPT_LAYERNORM_EPSILON} only",
            f"Train with {OPT_LAYERNORM_EPSILON}",
        )
    if found.family in ("bloom", "mpt"):
        yield from _alibi_refusals(config, found)


def _alibi_refusals(config: RunConfig, found: ExportClass) -> Iterator[Refusal]:
    """Yield each setting that Bloom and MPT, the classes with ALiBi, do not support."""
    m, name = config.model, found.class_name
    if config.ffn_hidden_size != 4 * m.hidden_size:
        yield Refusal(
            "model.ffn_hidden_size",
            config.ffn_hidden_size,
            f"{name} has 4 x hidden_size = {4 * m.hidden_size}",
            "Train with that, or leave it out; rotary (GPTNeoXForCausalLM) exports with any size",
        )
    if found.family == "bloom" and m.hidden_act != "gelu_pytorch_tanh":
        yield Refusal(
            "model.hidden_act",
            m.hidden_act,
            f"{name} computes gelu_pytorch_tanh",
            "Train with that, or with gelu and model.use_bias = false (MptForCausalLM)",
        )


COMMENT_COLUMN = 48
"""Column in which the origins stand, beside values that are shorter."""


def with_origins(text: str, origins: Mapping[str, str]) -> str:
    """Return a resolved config with a comment behind each value: where it comes from.

    The text stays a config file, which loads back as the same config.

    Args:
        text: What `dump_config` returned.
        origins: Dotted key -> its origin, as `load_with_origins` returns them.
    """
    return "\n".join(_commented(text.rstrip("\n").split("\n"), origins))


def _commented(lines: list[str], origins: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a dumped config with the comments."""
    section = ""
    for line in lines:
        if header := re.fullmatch(r"\[(.+)\]", line):
            section = header[1]
        # The version stands above the sections. The elements of a list stand below its key, each on
        # an indented line of its own.
        if section and (pair := re.match(r"([A-Za-z0-9_-]+) = ", line)):
            origin = origins[f"{section}.{pair[1]}"]
            # No control character may stand in a comment, and a file's name may hold some.
            origin = origin if origin.isprintable() else ascii(origin)
            line = f"{line:<{COMMENT_COLUMN}} # {origin}"
        yield line


def describe(config: RunConfig, obstacles: Sequence[str] = ()) -> str:
    """Return the summary that `pretrain config` prints below the resolved config.

    Every line is a TOML comment, so that the output of the command can be saved and used as a
    config file.

    Args:
        config: The run.
        obstacles: Reasons beside the model's why the run could not be exported.
    """
    total = num_parameters(config)
    tokens = config.planned_tokens
    steps = f"{config.train.num_steps:,} steps of {config.tokens_per_step:,} tokens"
    if config.batch.rampup_batch_size is not None:
        start, _, samples = config.batch.rampup_batch_size
        begin = start * config.data.sequence_length
        steps = (
            f"{config.train.num_steps:,} steps of {begin:,} to {config.tokens_per_step:,} tokens"
        )
        steps += f" (ramped up over {samples:,} samples)"
    vocabulary = f"{config.data.vocab_size:,} padded to {config.padded_vocab_size:,}"
    if clusters := config.adaptive_clusters:
        parts = " + ".join(f"{cluster.size:,} x {cluster.dim}" for cluster in clusters)
        vocabulary += f" in clusters of {parts}"
    lengths = ", ".join(str(length) for length in config.evaluation_lengths)
    trained = f"trained at {config.data.sequence_length} tokens"
    if config.data.per_document_attention:
        trained += " within documents"
    if config.is_masked:
        trained += ", predicts masked tokens from both sides"
    rows = [
        ("parameters", f"{total:,} ({_short(total)}), vocabulary of {vocabulary}"),
        ("positions", f"{config.position.description(config)}, {trained}, evaluated at {lengths}"),
        ("training", f"{steps} = {tokens:,} tokens ({_short(tokens)})"),
        ("evaluations", _evaluations(config)),
        ("layout", _layout(config)),
        *_stages(config),
        *_export(config, obstacles),
    ]
    return "\n".join(f"# {name:<16} {text}" for name, text in rows)


def _evaluations(config: RunConfig) -> str:
    """Return when a run is evaluated while it trains, and in how much of its time."""
    share = config.evaluation_time_share
    bound = f", in at most {100 * share:.3g} % of the time" if share is not None else ""
    return f"every {config.evaluation_interval_steps:,} steps{bound}, and after the last one"


def _layout(config: RunConfig) -> str:
    """Return the parallel sizes, and where they are known the data-parallel size and batches."""
    p = config.parallel
    model = f"tensor {p.tensor_model_parallel_size} x pipeline {p.pipeline_model_parallel_size}"
    if p.world_size is None:
        return f"{model} x data (all remaining processes), ZeRO {p.zero_stage}"
    layout = config.layout(p.world_size)
    batches = f"{layout.num_microbatches} micro batches of {config.batch.micro_batch_size} a step"
    return (
        f"{layout.world_size} processes = {model} x data {layout.data}, {batches}, "
        f"ZeRO {p.zero_stage}"
    )


def _stages(config: RunConfig) -> list[tuple[str, str]]:
    """Return a row for each pipeline stage: layers of its chunks, and parameters of a rank."""
    pipeline = config.parallel.pipeline_model_parallel_size
    rows = []
    for stage in range(pipeline):
        layers = "+".join(map(str, config.layers_per_chunk[stage::pipeline]))
        parameters = num_parameters_of_rank(config, stage)
        rows.append((f"stage {stage}", f"{layers} layers, {parameters:,} parameters a rank"))
    return rows


def _export(config: RunConfig, obstacles: Sequence[str]) -> list[tuple[str, str]]:
    """Return rows that say what the run will export as, or every reason why it cannot be."""
    found = describe_export(config)
    if obstacles:
        # What the model would export as does not matter, only what else is in the way.
        reasons = [line for text in obstacles for line in text.splitlines()]
        found = [line for line in found if line.startswith("none: ")]
        found += [f"none: {reason}" for reason in reasons]
    return [("export", line) for line in found]


def _short(count: int) -> str:
    """Return a count in millions or billions: 1317632 -> "1.32M", 1359000000 -> "1.36B"."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"

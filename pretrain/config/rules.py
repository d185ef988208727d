"""Refuse runs that cannot work, before any process starts.

pydantic checks the type and range of each key by itself (`schema`). The rules here relate keys to
each other and to the number of processes. Each yields a Refusal with its remedy, and a user sees
all that apply at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config.errors import ConfigError, Refusal
from pretrain.config.schema import WORDS
from pretrain.config.secrets import credential_in_url

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig

DOCUMENT_BACKENDS = ("auto", "triton", "sdpa")
"""Values of model.attention_backend that serve data.per_document_attention."""


def check(config: RunConfig) -> None:
    """Check every rule that does not depend on the number of processes.

    Raises:
        ConfigError: With one line for each rule that is broken.
    """
    refusals = [
        *_model(config),
        *_adaptive(config),
        *config.position.refusals(config),
        *_tensor_parallel(config),
        *_context_parallel(config),
        *_pipeline(config),
        *_rampup(config),
        *config.optimizer.refusals(),
        *_schedule(config),
        *_objective(config),
        *_upload(config),
        *_evaluation(config),
        *_recovery(config),
        *_data(config),
    ]
    # Not after other refusals: a layout that is broken by itself would be reported twice.
    if config.parallel.world_size is not None and not refusals:
        refusals = list(_processes(config, config.parallel.world_size))
    _raise(refusals)


def _secrets(values: Any, key: str = "") -> Iterator[Refusal]:
    """Refuse values that hold a secret; `key`: their place in the config."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _secrets(value, f"{key}.{name}".lstrip("."))
    elif isinstance(values, str | Path) and credential_in_url(str(values)):
        yield Refusal(
            key,
            "***",
            "holds a secret, which would be copied to the run's and the data set's records, to "
            "checkpoints and to exports",
            "Leave it out: fsspec takes credentials from the environment and from the files in "
            "~/.config/fsspec (mode 0600)",
        )
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes):
        for value in values:
            yield from _secrets(value, key)


def check_secrets(values: Mapping[str, Any]) -> None:
    """Check that no value of a config holds a secret; before any other message could repeat it.

    Raises:
        ConfigError: Names the keys, and not their values.
    """
    _raise(list(_secrets(values)))


def check_layout(config: RunConfig, world_size: int) -> None:
    """Check that `world_size` processes can share the run.

    Raises:
        ConfigError: When they cannot, or parallel.world_size plans for another number.
    """
    planned = config.parallel.world_size
    if planned is not None and planned != world_size:
        started = f"{world_size} process{'es' * (world_size > 1)}"
        reason = f"the run was started with {started}"
        remedy = f"Start {planned}, or change the plan with --set parallel.world_size={world_size}"
        _raise([config.refusal("parallel.world_size", reason, remedy)])
    if not config.phases:
        # Without counting the tokens, since a plan checks many layouts.
        _raise(list(_processes(config, world_size)))
    for phase in config.parts if config.phases else ():
        if refusals := list(_processes(phase.config, world_size)):
            raise ConfigError("\n".join(f"phase {phase.number}: {each}" for each in refusals))


def _raise(refusals: list[Refusal]) -> None:
    if refusals:
        raise ConfigError("\n".join(str(refusal) for refusal in refusals))


def _divides(key: str, value: int, by: int, what: str, remedy: str = "") -> Iterator[Refusal]:
    """Check that a value is a multiple of a number.

    Args:
        key: The value's key.
        value: The value.
        by: The number.
        what: What the number is.
        remedy: What to do; by default to choose a multiple.
    """
    if value % by:
        remedy = remedy or f"Choose a multiple of {by}"
        yield Refusal(key, value, f"not divisible by {what}", remedy)


# ---- [model] -------------------------------------------------------------------------------------
def _model(c: RunConfig) -> Iterator[Refusal]:
    """Check that heads divide the model evenly."""
    m = c.model
    heads = f"model.num_attention_heads = {m.num_attention_heads}"
    if m.kv_channels is None:
        yield from _divides("model.hidden_size", m.hidden_size, m.num_attention_heads, heads)
    if m.num_attention_heads % c.num_query_groups:
        yield c.refusal(
            "model.num_query_groups",
            f"does not divide {heads}",
            f"Choose a divisor of {m.num_attention_heads}",
        )


def _adaptive(c: RunConfig) -> Iterator[Refusal]:
    """Check the clusters of words, and that one rank holds all of them."""
    if c.model.adaptive_cutoffs is None:
        return
    cutoffs = list(c.model.adaptive_cutoffs)
    if not cutoffs or any(a >= b for a, b in pairwise([*cutoffs, c.data.vocab_size])):
        yield c.refusal(
            "model.adaptive_cutoffs",
            "not the rising first ids of one or more tails of a vocabulary of data.vocab_size = "
            f"{c.data.vocab_size}",
            f"Choose rising numbers below {c.data.vocab_size}, or remove the key",
        )
    if c.model.adaptive_factor ** len(cutoffs) > c.model.hidden_size:
        why = f"leaves no channel of model.hidden_size = {c.model.hidden_size} to the last tail"
        yield c.refusal("model.adaptive_factor", why, "Lower it, or have fewer tails")
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if getattr(c.parallel, key) > 1:
            yield c.refusal(
                f"parallel.{key}",
                "every rank needs all of the adaptive inputs and the adaptive softmax of "
                "model.adaptive_cutoffs",
                f"Set parallel.{key} = 1; data parallelism and parallel.zero_stage work",
            )


# ---- [parallel] and [batch] ----------------------------------------------------------------------
def _tensor_parallel(c: RunConfig) -> Iterator[Refusal]:
    """Check that tensor-parallel ranks can split heads, MLP, vocabulary and sequence evenly."""
    tp = c.parallel.tensor_model_parallel_size
    size = f"parallel.tensor_model_parallel_size = {tp}"
    for key, value in (
        ("model.num_attention_heads", c.model.num_attention_heads),
        ("model.num_query_groups", c.num_query_groups),
        ("model.ffn_hidden_size", c.ffn_hidden_size),
        ("data.vocab_size, padded,", c.padded_vocab_size),
    ):
        remedy = "Choose a tensor-parallel size that divides it"
        yield from _divides(key, value, tp, size, remedy)
    if c.parallel.sequence_parallel and tp == 1:
        yield c.refusal(
            "parallel.sequence_parallel",
            "there is one tensor-parallel rank, and nothing to split the sequence over",
            "Remove the key, or raise parallel.tensor_model_parallel_size",
        )
    selective = c.train.recompute_granularity == "selective"
    if c.train.fusion == "layers" and (tp > 1 or c.parallel.zero_stage == 3 or selective):
        yield c.refusal(
            "train.fusion",
            "tensor ranks, ZeRO 3 and selective recomputation act within a layer, now one graph",
            'Choose "on"; or set parallel.tensor_model_parallel_size = 1, parallel.zero_stage = 1 '
            'or 2, and train.recompute_granularity = "none" or "full"',
        )
    if c.train.fp8 and c.train.fusion != "layers":
        reason = f'with train.fusion = "{c.train.fusion}" its casts would cost more than they save'
        yield c.refusal("train.fp8", reason, 'Set train.fusion = "layers", or train.fp8 = false')


def _context_parallel(c: RunConfig) -> Iterator[Refusal]:
    """Check that context ranks, and under sequence parallelism tensor ranks, split sequences."""
    p, size = c.parallel, c.parallel.context_parallel_size
    parts, what = size, f"parallel.context_parallel_size = {size}"
    if p.sequence_parallel:
        parts *= p.tensor_model_parallel_size
        ranks = f"the {p.tensor_model_parallel_size} ranks of sequence parallelism"
        what = ranks if size == 1 else f"{what} x {ranks}"
    for length in (c.data.sequence_length, *c.evaluation_lengths):
        yield from _divides("data.sequence_length or evaluation.lengths", length, parts, what)
    if size > 1 and c.is_masked:
        yield c.refusal(
            "parallel.context_parallel_size",
            'a rank reads the parts before its own, and train.objective = "masked" looks at those '
            "behind it, too",
            "Set parallel.context_parallel_size = 1",
        )


def _pipeline(c: RunConfig) -> Iterator[Refusal]:
    """Check that every pipeline chunk has a layer, and what ZeRO works with."""
    p = c.parallel
    pp, vpp = p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size
    sent = p.gradient_reduce_dtype
    if sent != "fp32" and p.zero_stage > 1:
        yield c.refusal(
            "parallel.gradient_reduce_dtype",
            f"at ZeRO {p.zero_stage} DeepSpeed would also add up in it, over all ranks",
            'Set parallel.gradient_reduce_dtype = "fp32", or parallel.zero_stage = 1',
        )
    if sent == "fp16" and c.train.precision != "fp16":
        yield c.refusal(
            "parallel.gradient_reduce_dtype",
            f"gradients of train.precision = {c.train.precision} are not scaled to the range of "
            "fp16",
            'Choose "fp32" or "bf16"',
        )
    if pp > 1 and p.zero_stage > 1:
        yield c.refusal(
            "parallel.zero_stage",
            f"ZeRO {p.zero_stage} does not work with pipeline stages "
            f"(parallel.pipeline_model_parallel_size = {pp})",
            "Set parallel.zero_stage = 1, or parallel.pipeline_model_parallel_size = 1",
        )
    recomputed = c.train.recompute_granularity != "none"
    if p.zero_stage > 1 and recomputed and c.has_position_parameters:
        yield c.refusal(
            "train.recompute_granularity",
            f"at ZeRO {p.zero_stage} DeepSpeed takes only the first of the gradients that "
            "recomputed layers give to a position parameter",
            'Set train.recompute_granularity = "none", or parallel.zero_stage = 1',
        )
    if vpp is not None and pp == 1:
        yield c.refusal(
            "parallel.virtual_pipeline_model_parallel_size",
            "the interleaved schedule needs more than one pipeline stage",
            "Remove the key, or raise parallel.pipeline_model_parallel_size",
        )
    if pp * (vpp or 1) > c.model.num_layers:
        yield c.refusal(
            "model.num_layers",
            f"fewer than the {pp * (vpp or 1)} pipeline chunks",
            "Lower parallel.pipeline_model_parallel_size",
        )
    if c.train.spike_policy == "skip" and p.zero_stage > 1:
        yield c.refusal(
            "train.spike_policy",
            f"at ZeRO {p.zero_stage} DeepSpeed measures the gradient norm and updates the "
            "weights in one call, so that no update can be left out",
            'Choose "rollback" or "stop", or set parallel.zero_stage = 1',
        )


def _recovery(c: RunConfig) -> Iterator[Refusal]:
    """Check that steps can be computed twice where that is asked for."""
    key, interval = "recovery.repeat_interval_steps", c.recovery.repeat_interval_steps
    remedy = f"or {key} = 0"
    if interval and not c.recovery.replay:
        why = "a step that differs is followed by a replay, and recovery.replay = false"
        yield c.refusal(key, why, f"Set recovery.replay = true, {remedy}")
    if interval and (stage := c.parallel.zero_stage) > 1:
        why = f"at ZeRO {stage} gradients are sent as they are computed, and can be taken once only"
        yield c.refusal(key, why, f"Set parallel.zero_stage = 1, {remedy}")


def _rampup(c: RunConfig) -> Iterator[Refusal]:
    """Check that the ramp-up ends at the full batch size."""
    if c.batch.rampup_batch_size is None:
        return
    (start, increment, _), full = c.batch.rampup_batch_size, c.batch.global_batch_size
    if start >= full or (full - start) % increment:
        yield c.refusal(
            "batch.rampup_batch_size",
            f"increments of {increment} do not lead from {start} up to batch.global_batch_size = "
            f"{full}",
            "Begin with fewer, or choose an increment that divides the difference",
        )


def _processes(c: RunConfig, world_size: int) -> Iterator[Refusal]:
    """Check that the processes divide into the layout, and the batch into micro batches."""
    p, b = c.parallel, c.batch
    model, context = p.ranks_per_copy, p.context_parallel_size
    if world_size % model:
        axes = ("tensor_model", "pipeline_model", *["context"] * (context > 1))
        yield Refusal(
            " x ".join(f"parallel.{axis}_parallel_size" for axis in axes),
            model,
            f"does not divide the {world_size} process{'es' * (world_size > 1)}",
            f"Start a multiple of {model} processes, or lower one of the sizes",
        )
        return
    data = world_size // model
    unit = b.micro_batch_size * data
    what = f"batch.micro_batch_size = {b.micro_batch_size} x {data} data-parallel ranks"
    if p.virtual_pipeline_model_parallel_size:
        # Megatron's interleaved schedule passes micro batches on in groups of the pipeline size.
        unit *= p.pipeline_model_parallel_size
        what += f" x {p.pipeline_model_parallel_size} pipeline stages of the interleaved schedule"
    remedy = f"Choose a multiple of {unit}, a smaller micro batch, or fewer processes"
    yield from _divides("batch.global_batch_size", b.global_batch_size, unit, what, remedy)
    for size in {*(b.rampup_batch_size or ())[:2]}:
        yield from _divides("batch.rampup_batch_size", size, unit, what, remedy)


# ---- [schedule] and [train] ----------------------------------------------------------------------
def _schedule(c: RunConfig) -> Iterator[Refusal]:
    """Check that the learning rate can rise and fall within the run, and what is profiled."""
    s, steps = c.schedule, c.train.num_steps
    first, last = c.train.profile_steps or (1, 1)
    if not first <= last <= steps:
        why = f"not the first and the last of some steps of a run of train.num_steps = {steps}"
        yield c.refusal("train.profile_steps", why, "Correct it, or remove the key")
    if (steps := c.lr_end_step - s.lr_begin_step) < 1:
        yield c.refusal(
            "schedule.lr_begin_step",
            f"the schedule would end before it begins, after {c.lr_end_step} steps",
            f"Choose less than {c.lr_end_step}",
        )
        return
    if s.lr_warmup_steps >= steps:
        where = f"train.num_steps = {steps}"
        if (s.lr_begin_step, c.lr_end_step) != (0, c.train.num_steps):
            where = f"the schedule, steps {s.lr_begin_step + 1} to {c.lr_end_step}"
        yield c.refusal(
            "schedule.lr_warmup_steps",
            f"the warm-up would not end within {where}",
            f"Choose less than {steps}",
        )
    for key in ("lr_warmup_init", "min_learning_rate"):
        if getattr(s, key) > c.optimizer.learning_rate:
            yield c.refusal(
                f"schedule.{key}",
                f"above the peak, optimizer.learning_rate = {c.optimizer.learning_rate}",
                "Lower it, or raise optimizer.learning_rate",
            )
    decayed = s.lr_decay_style == "warmup_stable_decay"
    if decayed and not 0 < s.lr_wsd_decay_steps <= steps - s.lr_warmup_steps:
        yield c.refusal(
            "schedule.lr_wsd_decay_steps",
            'schedule.lr_decay_style = "warmup_stable_decay" needs steps to decay in',
            f"Choose 1 to {steps - s.lr_warmup_steps}, the steps after the warm-up",
        )


def _objective(c: RunConfig) -> Iterator[Refusal]:
    """Check that nothing of a run with masked tokens needs a causal mask."""
    if not c.is_masked:
        return
    for key, is_set in (
        ("data.per_document_attention", c.data.per_document_attention),
        ("model.adaptive_cutoffs", c.model.adaptive_cutoffs is not None),
        ("evaluation.protocols", "sliding" in c.evaluation.protocols),
    ):
        if is_set:
            yield c.refusal(
                key,
                'works from left to right, and train.objective = "masked" looks both ways',
                'Remove the key, or set train.objective = "next_token"',
            )


# ---- [checkpoint], [evaluation] and [data] -------------------------------------------------------
def _upload(c: RunConfig) -> Iterator[Refusal]:
    """Refuse what is no URL with a path."""
    protocol, separator, rest = (c.checkpoint.upload_to or "file:///x").partition("://")
    if "?" in rest or not separator or not protocol or "::" in protocol or not rest.strip("/"):
        yield Refusal(
            "checkpoint.upload_to",
            f"{protocol}://***" if separator else "***",
            "not a URL with one protocol and a path, and without a query",
            "Set one like s3://bucket/prefix, or file:///directory",
        )


def _evaluation(c: RunConfig) -> Iterator[Refusal]:
    """Check that positions reach every length, and evaluation windows leave no token out."""
    end, remedy = c.position.table_end(c), "Choose a shorter length"
    if "max_position_embeddings" in type(c.position).model_fields:
        remedy += ", or train with a larger position.max_position_embeddings"
    evaluated = (("evaluation.lengths", length) for length in c.evaluation_lengths)
    for key, length in (("data.sequence_length", c.data.sequence_length), *evaluated):
        if end is not None and length > end:
            yield Refusal(
                key,
                length,
                f"{c.position.method} positions end at {end}",
                remedy,
            )
    shortest = min(c.evaluation_lengths, default=None)
    if shortest is not None and c.evaluation_stride > shortest:
        yield Refusal(
            "evaluation.stride",
            c.evaluation_stride,
            f"longer than the shortest window of {shortest} tokens, so that windows would leave "
            "tokens out",
            f"Choose {shortest} or less",
        )


LEAST_PIECES: dict[str | None, int] = {WORDS: 5, None: 260}
"""Least `data.vocab_size` of "words", which begin with fairseq's four, and of a SentencePiece BPE
that is trained on the text: 256 byte pieces, three control pieces and the text's characters."""


def _data(c: RunConfig) -> Iterator[Refusal]:
    """Check the vocabulary and the corpora, and that a shard holds a block."""
    d, backend = c.data, c.model.attention_backend
    # Of a vocabulary that is made of the text. One that is given in a file has as many as it has.
    if d.vocab_size < (least := LEAST_PIECES.get(d.tokenizer, 2)):
        yield c.refusal(
            "data.vocab_size",
            "less than what every vocabulary of data.tokenizer begins with",
            f"Choose {least} or more",
        )
    if d.tokens_per_shard < d.tokens_per_block:
        yield c.refusal(
            "data.tokens_per_shard",
            f"less than one block of data.tokens_per_block = {d.tokens_per_block}",
            f"Choose {d.tokens_per_block} or more, or lower data.tokens_per_block",
        )
    if d.per_document_attention and (d.tokenizer == WORDS or backend not in DOCUMENT_BACKENDS):
        yield c.refusal(
            "data.per_document_attention",
            f'it needs the token that ends a document, which data.tokenizer = "{WORDS}" puts at '
            f"each line's end, and model.attention_backend = {', '.join(DOCUMENT_BACKENDS)}",
            "Remove the key, or choose another tokenizer or backend",
        )
    if d.corpora and (d.paths or d.text_field):
        yield Refusal(
            "data.corpora",
            ", ".join(d.corpora),
            "data.paths or data.text_field is set too, and a data set has either one corpus or a "
            "table of them",
            "Remove data.corpora, or set them in its tables, as in --set "
            f"data.corpora.{next(iter(d.corpora))}.paths='[\"text/*.txt\"]'",
        )
    weights = [corpus.weight is not None for corpus in d.corpora.values()]
    has_epochs = any(corpus.epochs is not None for corpus in d.corpora.values())
    if any(weights) and (has_epochs or not all(weights)):
        yield Refusal(
            "data.corpora",
            ", ".join(d.corpora),
            "some have a weight, and others have none, or epochs",
            "Give every corpus a weight and none epochs, or use epochs alone",
        )

"""Refuse runs that cannot work, before any process starts.

pydantic checks the type and range of each key by itself (`schema`). The rules here relate keys to
each other and to the number of processes. Each yields a Refusal with its remedy, and a user sees
all that apply at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from pretrain.config.errors import ConfigError, Refusal
from pretrain.config.schema import LEAST_PIECES, WORDS, DataSection

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig


# ---- Rules of two shapes that many keys have ----


NEEDED = (
    ("schedule.lr_wsd_decay_steps", "schedule.lr_decay_style", "warmup_stable_decay"),
    ("schedule.lr_warmup_init", "schedule.lr_warmup_steps", None),
    ("model.adaptive_factor", "model.adaptive_cutoffs", None),
    ("model.adaptive_dropout", "model.adaptive_cutoffs", None),
    ("checkpoint.keep_every", "checkpoint.keep", None),
    ("checkpoint.keep_best", "checkpoint.keep", None),
)
"""A key, another one without which it has no meaning, and that one's value; None: any."""


def check_needed(c: RunConfig) -> Iterator[Refusal]:
    """Check that no key is set which would be ignored."""
    for key, other, wanted in NEEDED:
        section, _, name = key.partition(".")
        default = type(getattr(c, section)).model_fields[name].default
        value, found = attrgetter(key)(c), attrgetter(other)(c)
        if value != default and (found != wanted if wanted else not found):
            setting = f'{other} = "{wanted}"' if wanted else other
            yield Refusal(key, value, f"has no meaning without {setting}", "Remove it, or set that")


def check_divides(
    key: str, value: int, by: int, what: str, remedy: str | None = None
) -> Iterator[Refusal]:
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


# ---- Refuse a ramp-up of the batch size that would not end ----


def check_rampup(c: RunConfig) -> Iterator[Refusal]:
    """Check that the ramp-up ends at the full batch size."""
    if c.batch.rampup_batch_size is None:
        return
    (start, increment, _), full = c.batch.rampup_batch_size, c.batch.global_batch_size
    if start >= full:
        yield Refusal(
            "batch.rampup_batch_size",
            list(c.batch.rampup_batch_size),
            f"begins with {start} sequences, not less than batch.global_batch_size = {full}",
            "Begin with fewer, or remove the key",
        )
    elif (full - start) % increment:
        yield Refusal(
            "batch.rampup_batch_size",
            list(c.batch.rampup_batch_size),
            f"increments of {increment} do not lead from {start} to batch.global_batch_size = "
            f"{full}",
            f"Choose an increment that divides {full - start}",
        )


def check_rampup_layout(c: RunConfig, data: int) -> Iterator[Refusal]:
    """Check that every batch size of the ramp-up divides into micro batches, as the full one does.

    Args:
        c: The run, which has a ramp-up.
        data: Data-parallel ranks.
    """
    assert c.batch.rampup_batch_size is not None
    unit = c.batch.micro_batch_size * data
    what = f"batch.micro_batch_size = {c.batch.micro_batch_size} x {data} data-parallel ranks"
    if c.parallel.virtual_pipeline_model_parallel_size:
        stages = c.parallel.pipeline_model_parallel_size
        unit *= stages
        what += f" x {stages} pipeline stages, as the interleaved schedule needs"
    for size in {*c.batch.rampup_batch_size[:2]}:
        yield from check_divides("batch.rampup_batch_size", size, unit, what)


# ---- Refuse a [data] section that no data set can be built from ----


DOCUMENT_BACKENDS = ("auto", "triton", "sdpa", "reference")
"""Values of model.attention_backend that serve data.per_document_attention."""


def check_data(c: RunConfig) -> Iterator[Refusal]:
    """Check the vocabulary and the corpora, and that a shard holds a block."""
    d = c.data
    # Of a vocabulary that is made of the text. One that is given in a file has as many as it has.
    least = LEAST_PIECES.get(d.tokenizer, 2)
    if d.vocab_size < least:
        yield Refusal(
            "data.vocab_size",
            d.vocab_size,
            "less than what every vocabulary of data.tokenizer begins with",
            f"Choose {least} or more",
        )
    if d.corpora:
        yield from _corpora(d)
    if d.tokens_per_shard < d.tokens_per_block:
        yield Refusal(
            "data.tokens_per_shard",
            d.tokens_per_shard,
            f"less than one block of data.tokens_per_block = {d.tokens_per_block}",
            f"Choose {d.tokens_per_block} or more, or lower data.tokens_per_block",
        )
    if d.per_document_attention and d.tokenizer == WORDS:
        yield Refusal(
            "data.per_document_attention",
            True,
            f'with data.tokenizer = "{WORDS}" the token that ends a document ends each line',
            "Remove the key, or use another tokenizer",
        )
    backend = c.model.attention_backend
    if d.per_document_attention and backend not in DOCUMENT_BACKENDS:
        yield Refusal(
            "data.per_document_attention",
            True,
            f'model.attention_backend = "{backend}" has no mask by document',
            'Set model.attention_backend = "auto" or "triton", or remove the key',
        )


def _corpora(d: DataSection) -> Iterator[Refusal]:
    """Check the names of the corpora and that their shares are told in one way."""
    for key, value in (("data.paths", list(d.paths)), ("data.text_field", d.text_field)):
        if value:
            yield Refusal(
                key,
                value,
                "data.corpora is set too, and a data set has either one corpus or a table of them",
                f"Set {key.removeprefix('data.')} in the table [data.corpora.NAME] of a file "
                f"instead, where NAME is one of {', '.join(d.corpora)} or a further corpus; or "
                "remove data.corpora",
            )
    for name in d.corpora:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_]{0,63}", name):
            yield Refusal(
                "data.corpora",
                name,
                "the name of a corpus is part of file names",
                "Use lower-case letters, digits and underscores, at most 64 of them",
            )
    have_weight = [name for name, corpus in d.corpora.items() if corpus.weight is not None]
    have_epochs = [name for name, corpus in d.corpora.items() if corpus.epochs is not None]
    if have_weight and (have_epochs or len(have_weight) < len(d.corpora)):
        without = sorted({*d.corpora} - {*have_weight}) or have_epochs
        yield Refusal(
            f"data.corpora.{have_weight[0]}.weight",
            d.corpora[have_weight[0]].weight,
            f"{', '.join(without)} {'have' if len(without) > 1 else 'has'} no weight, or epochs",
            "Give every corpus a weight and none epochs, or use epochs alone",
        )


# ---- Refuse layouts that cannot split the model, or that the processes cannot share ----


def check_tensor_parallel(c: RunConfig) -> Iterator[Refusal]:
    """Check that tensor-parallel ranks can split heads, MLP, vocabulary and sequence evenly."""
    m, tp = c.model, c.parallel.tensor_model_parallel_size
    size = f"parallel.tensor_model_parallel_size = {tp}"
    for key, value in (
        ("model.num_attention_heads", m.num_attention_heads),
        ("model.num_query_groups", c.num_query_groups),
        ("model.ffn_hidden_size", c.ffn_hidden_size),
    ):
        remedy = "Choose a tensor-parallel size that divides it"
        yield from check_divides(key, value, tp, size, remedy)
    if c.padded_vocab_size % tp:
        yield Refusal(
            "model.make_vocab_size_divisible_by",
            m.make_vocab_size_divisible_by,
            f"the padded vocabulary of {c.padded_vocab_size} is not divisible by {size}",
            f"Choose a multiple of {tp}",
        )
    if not c.parallel.sequence_parallel:
        return
    if tp == 1:
        yield Refusal(
            "parallel.sequence_parallel",
            True,
            "there is one tensor-parallel rank, and nothing to split the sequence over",
            "Remove the key, or raise parallel.tensor_model_parallel_size",
        )
    for key, lengths in (
        ("data.sequence_length", [c.data.sequence_length]),
        ("evaluation.lengths", c.evaluation_lengths),
    ):
        for length in lengths:
            ranks = f"the {tp} ranks of sequence parallelism"
            yield from check_divides(key, length, tp, ranks)


def check_pipeline(c: RunConfig) -> Iterator[Refusal]:
    """Check that every pipeline chunk has a layer, and that ZeRO works with pipeline stages."""
    p = c.parallel
    pp, vpp = p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size
    if p.gradient_reduce_dtype != "fp32" and p.zero_stage > 1:
        yield Refusal(
            "parallel.gradient_reduce_dtype",
            p.gradient_reduce_dtype,
            f"at ZeRO {p.zero_stage} DeepSpeed would also add up in it, over all ranks",
            'Set parallel.gradient_reduce_dtype = "fp32", or parallel.zero_stage = 1',
        )
    if p.gradient_reduce_dtype == "fp16" and c.train.precision != "fp16":
        yield Refusal(
            "parallel.gradient_reduce_dtype",
            p.gradient_reduce_dtype,
            f"gradients of train.precision = {c.train.precision} are not scaled to the range of "
            "fp16",
            'Choose "fp32" or "bf16"',
        )
    if pp > 1 and p.zero_stage > 1:
        yield Refusal(
            "parallel.zero_stage",
            p.zero_stage,
            f"ZeRO {p.zero_stage} does not work with pipeline stages "
            f"(parallel.pipeline_model_parallel_size = {pp})",
            "Set parallel.zero_stage = 1, or parallel.pipeline_model_parallel_size = 1",
        )
    if vpp is not None and pp == 1:
        yield Refusal(
            "parallel.virtual_pipeline_model_parallel_size",
            vpp,
            "the interleaved schedule needs more than one pipeline stage",
            "Remove the key, or raise parallel.pipeline_model_parallel_size",
        )
    chunks = pp * (vpp or 1)
    if chunks > c.model.num_layers:
        yield Refusal(
            "model.num_layers",
            c.model.num_layers,
            f"fewer than the {chunks} pipeline chunks",
            "Lower parallel.pipeline_model_parallel_size"
            + (" or parallel.virtual_pipeline_model_parallel_size" if vpp else ""),
        )


def check_processes(c: RunConfig, world_size: int) -> Iterator[Refusal]:
    """Check that the processes divide into the layout, and the batch into micro batches."""
    p, b = c.parallel, c.batch
    model = p.tensor_model_parallel_size * p.pipeline_model_parallel_size
    if world_size % model:
        yield Refusal(
            "parallel.tensor_model_parallel_size x parallel.pipeline_model_parallel_size",
            model,
            f"does not divide the {world_size} process{'es' * (world_size > 1)}",
            f"Start a multiple of {model} processes, or lower one of the two sizes",
        )
        return
    data = world_size // model
    at_once = b.micro_batch_size * data
    what = f"batch.micro_batch_size = {b.micro_batch_size} x {data} data-parallel ranks"
    size = b.global_batch_size
    remedy = f"Choose a multiple of {at_once}, a smaller micro batch, or fewer processes"
    if refused := [*check_divides("batch.global_batch_size", size, at_once, what, remedy)]:
        yield from refused
        return
    if b.rampup_batch_size is not None:
        yield from check_rampup_layout(c, data)
    micro = b.global_batch_size // at_once
    # Megatron's interleaved schedule passes micro batches on in groups of the pipeline size.
    if p.virtual_pipeline_model_parallel_size and micro % p.pipeline_model_parallel_size:
        group = at_once * p.pipeline_model_parallel_size
        yield Refusal(
            "batch.global_batch_size",
            b.global_batch_size,
            f"gives {micro} micro batches on each data-parallel rank, and the interleaved schedule "
            f"needs a multiple of the {p.pipeline_model_parallel_size} pipeline stages",
            f"Choose a multiple of {group}, or remove "
            "parallel.virtual_pipeline_model_parallel_size",
        )


# ---- Refuse steps to profile that a run does not take, and what a masked objective cannot do ----


def check_profile(c: RunConfig) -> Iterator[Refusal]:
    """Check that the run has the steps of train.profile_steps."""
    if c.train.profile_steps is None:
        return
    first, last = c.train.profile_steps
    if not first <= last <= c.train.num_steps:
        yield Refusal(
            "train.profile_steps",
            [first, last],
            "not the first and the last of some steps of a run of train.num_steps = "
            f"{c.train.num_steps}",
            f"Choose [first, last] within 1 to {c.train.num_steps}, or remove the key",
        )


def check_objective(c: RunConfig) -> Iterator[Refusal]:
    """Check that nothing of a run with masked tokens needs a causal mask."""
    if not c.is_masked:
        return
    causal = 'Set train.objective = "next_token"'
    if c.data.per_document_attention:
        yield Refusal(
            "data.per_document_attention",
            True,
            'documents are parted under a causal mask, and train.objective = "masked" looks both '
            "ways",
            f"Remove the key. {causal} to train within documents",
        )
    if c.model.adaptive_cutoffs is not None:
        yield Refusal(
            "model.adaptive_cutoffs",
            list(c.model.adaptive_cutoffs),
            'its rows are words, and train.objective = "masked" needs one for the mask',
            f"Remove the key. {causal} to train with an adaptive softmax",
        )
    if "sliding" in c.evaluation.protocols:
        yield Refusal(
            "evaluation.protocols",
            list(c.evaluation.protocols),
            "a sliding window gives each token more of what is before it, and train.objective = "
            '"masked" looks both ways',
            'Set evaluation.protocols = ["nonoverlapping"], or remove the key',
        )


# ---- Refuse a warm-up that cannot be ----


def check_warmup_init(c: RunConfig) -> Iterator[Refusal]:
    """Check that the warm-up begins somewhere below the peak."""
    begin, peak = c.schedule.lr_warmup_init, c.optimizer.learning_rate
    if begin > peak:
        yield Refusal(
            "schedule.lr_warmup_init",
            begin,
            f"above optimizer.learning_rate = {peak}, which the warm-up leads to",
            f"Choose {peak} or less",
        )


# ---- Refuse adaptive inputs and an adaptive softmax that cannot work ----


def check_adaptive(c: RunConfig) -> Iterator[Refusal]:
    """Check the clusters of words, and that one rank holds all of them."""
    m, p = c.model, c.parallel
    if m.adaptive_cutoffs is None:
        return
    cutoffs = list(m.adaptive_cutoffs)
    if not cutoffs or any(a >= b for a, b in pairwise([*cutoffs, c.data.vocab_size])):
        yield Refusal(
            "model.adaptive_cutoffs",
            cutoffs,
            "not the rising first ids of one or more tails of a vocabulary of data.vocab_size = "
            f"{c.data.vocab_size}",
            f"Choose rising numbers below {c.data.vocab_size}, or remove the key",
        )
    if m.adaptive_factor ** len(cutoffs) > m.hidden_size:
        yield Refusal(
            "model.adaptive_factor",
            m.adaptive_factor,
            f"leaves no channel of model.hidden_size = {m.hidden_size} to the last of "
            f"{len(cutoffs)} tails",
            "Lower it, or give model.adaptive_cutoffs fewer numbers",
        )
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(p, key)) > 1:
            yield Refusal(
                f"parallel.{key}",
                size,
                "every rank needs all of the adaptive inputs and the adaptive softmax of "
                "model.adaptive_cutoffs",
                f"Set parallel.{key} = 1; data parallelism and parallel.zero_stage work",
            )


def check(config: RunConfig) -> None:
    """Check every rule that does not depend on the number of processes.

    Raises:
        ConfigError: With one line for each rule that is broken.
    """
    refusals = [
        *check_needed(config),
        *_model(config),
        *check_adaptive(config),
        *config.position.refusals(config),
        *check_tensor_parallel(config),
        *check_pipeline(config),
        *check_rampup(config),
        *config.optimizer.refusals(),
        *_schedule(config),
        *check_warmup_init(config),
        *_spikes(config),
        *check_profile(config),
        *check_objective(config),
        *_upload(config),
        *_evaluation(config),
        *check_data(config),
    ]
    # Not after other refusals: a layout that is broken by itself would be reported twice.
    if config.parallel.world_size is not None and not refusals:
        refusals = list(check_processes(config, config.parallel.world_size))
    _raise(refusals)


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
        _raise([Refusal("parallel.world_size", planned, reason, remedy)])
    _raise(list(check_processes(config, world_size)))


def _raise(refusals: list[Refusal]) -> None:
    if refusals:
        raise ConfigError("\n".join(str(refusal) for refusal in refusals))


def _model(c: RunConfig) -> Iterator[Refusal]:
    """Check that heads divide the model evenly."""
    m = c.model
    heads = f"model.num_attention_heads = {m.num_attention_heads}"
    yield from check_divides("model.hidden_size", m.hidden_size, m.num_attention_heads, heads)
    if m.num_attention_heads % c.num_query_groups:
        yield Refusal(
            "model.num_query_groups",
            c.num_query_groups,
            f"does not divide {heads}",
            f"Choose a divisor of {m.num_attention_heads}",
        )


def _schedule(c: RunConfig) -> Iterator[Refusal]:
    """Check that the learning rate can rise and fall within the run."""
    s, steps = c.schedule, c.train.num_steps
    if s.lr_warmup_steps >= steps:
        yield Refusal(
            "schedule.lr_warmup_steps",
            s.lr_warmup_steps,
            f"the warm-up would not end within train.num_steps = {steps}",
            f"Choose less than {steps}",
        )
    if s.min_learning_rate > c.optimizer.learning_rate:
        yield Refusal(
            "schedule.min_learning_rate",
            s.min_learning_rate,
            f"above the peak, optimizer.learning_rate = {c.optimizer.learning_rate}",
            "Lower it, or raise optimizer.learning_rate",
        )
    decayed = s.lr_decay_style == "warmup_stable_decay"
    if decayed and not 0 < s.lr_wsd_decay_steps <= steps - s.lr_warmup_steps:
        yield Refusal(
            "schedule.lr_wsd_decay_steps",
            s.lr_wsd_decay_steps,
            'schedule.lr_decay_style = "warmup_stable_decay" needs steps to decay in',
            f"Choose 1 to {steps - s.lr_warmup_steps}, the steps after the warm-up",
        )


def _spikes(c: RunConfig) -> Iterator[Refusal]:
    """Check that the spike policy can be followed."""
    if c.train.spike_policy == "skip" and c.parallel.zero_stage > 1:
        yield Refusal(
            "train.spike_policy",
            c.train.spike_policy,
            f"at ZeRO {c.parallel.zero_stage} DeepSpeed measures the gradient norm and updates the "
            "weights in one call, so that no update can be left out",
            'Choose "rollback" or "stop", or set parallel.zero_stage = 1',
        )


def _upload(config: RunConfig) -> Iterator[Refusal]:
    """Refuse what is no URL, and a URL that holds a secret. The secret is not repeated."""
    url = config.checkpoint.upload_to
    if url is None:
        return
    key = "checkpoint.upload_to"
    protocol, separator, rest = url.partition("://")
    user, at, host = rest.partition("/")[0].rpartition("@")
    # abfs://container@account has no secret before the @.
    if at and ":" in user:
        yield Refusal(
            key,
            f"{protocol}://***@{host}...",
            "holds a password, which would be copied to every config and log",
            "Leave it out, and give it to the package of the protocol by its own settings",
        )
    elif "?" in rest:
        yield Refusal(
            key,
            f"{url.partition('?')[0]}?***",
            "what follows the ? may be a secret, and would be copied to every config and log",
            "Leave it out, and give it to the package of the protocol by its own settings",
        )
    elif not separator or not protocol or "::" in url or not rest.strip("/"):
        yield Refusal(
            key,
            url,
            "not a URL with one protocol and a path",
            "Set one like s3://bucket/prefix, or file:///directory",
        )


def _evaluation(c: RunConfig) -> Iterator[Refusal]:
    """Check that the model can be evaluated at every length, and windows leave no token out."""
    end = c.position.table_end(c)
    for length in c.evaluation_lengths:
        if length < 1:
            yield Refusal(
                "evaluation.lengths", length, "not a number of tokens", "Choose 1 or more"
            )
        if end is not None and length > end:
            yield Refusal(
                "evaluation.lengths",
                length,
                f"the {c.position.method} position table holds {end} positions",
                "Choose a shorter length, or train with a larger position.max_position_embeddings",
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

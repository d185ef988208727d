"""Refuse runs that cannot work, before any process starts.

pydantic checks the type and range of each key by itself (`schema`). The rules here relate keys to
each other and to the number of processes. Each yields a Refusal with its remedy, and a user sees
all that apply at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from pretrain.config.errors import ConfigError, Refusal
from pretrain.config.schema import (
    LEAST_TRAINED,
    LEAST_WORDS,
    WORDS,
    DataSection,
)

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig


# ---- Refuse a ramp-up of the batch size that would not end, and name batch sizes that work ----


MOST_TRIED = 100_000
"""Sizes that are tried to find one that works."""


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
    for size in c.batch.rampup_batch_size[:2]:
        if size % unit:
            yield Refusal(
                "batch.rampup_batch_size",
                list(c.batch.rampup_batch_size),
                f"{size} is not divisible by {what}",
                f"Begin with a multiple of {unit}, and add multiples of it",
            )
            return


def fitting_batches(batch: int, micro_batch: int, data: int, model: int) -> str:
    """Return which batch sizes and numbers of processes would work, those nearest to the present.

    Args:
        batch: batch.global_batch_size.
        micro_batch: batch.micro_batch_size.
        data: Data-parallel ranks.
        model: Processes that hold one copy of the model.
    """
    unit = micro_batch * data
    below = batch // unit * unit
    ways = [f"a multiple of {unit}, such as {f'{below} or ' if below else ''}{below + unit}"]
    # Any larger number is a typing mistake, and a search up to it would never end.
    smaller = range(min(micro_batch - 1, MOST_TRIED), 0, -1) if batch % data == 0 else ()
    if size := next((n for n in smaller if batch // data % n == 0), None):
        ways.append(f"batch.micro_batch_size = {size}")
    fewer = range(min(data - 1, batch // micro_batch, MOST_TRIED), 0, -1)
    if ranks := next((n for n in fewer if batch % (micro_batch * n) == 0), None):
        ways.append(f"{ranks * model} process{'es' * (ranks * model > 1)}")
    return f"Choose {', or '.join(ways)}"


# ---- Refuse a [data] section that no data set can be built from ----


DOCUMENT_BACKENDS = ("auto", "triton", "sdpa", "reference")
"""Values of model.attention_backend that serve data.per_document_attention."""


def check_data(c: RunConfig) -> Iterator[Refusal]:
    """Check the vocabulary and the corpora, and that a shard holds a block."""
    d = c.data
    yield from _vocabulary(d)
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


def _vocabulary(d: DataSection) -> Iterator[Refusal]:
    """Check that a vocabulary that is made of the text holds what every such vocabulary has.

    One that is given in a file has as many pieces as it has.
    """
    if d.tokenizer is None and d.vocab_size < LEAST_TRAINED:
        yield Refusal(
            "data.vocab_size",
            d.vocab_size,
            "a SentencePiece BPE that is trained on the text has 256 byte pieces, three control "
            "pieces and the text's characters",
            f'Choose {LEAST_TRAINED} or more, or set data.tokenizer = "{WORDS}" or to a file',
        )
    if d.tokenizer == WORDS and d.vocab_size < LEAST_WORDS:
        yield Refusal(
            "data.vocab_size",
            d.vocab_size,
            f'data.tokenizer = "{WORDS}" begins with four words of its own, as fairseq does',
            f"Choose {LEAST_WORDS} or more",
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
    divisible = {
        "model.num_attention_heads": m.num_attention_heads,
        "model.num_query_groups": c.num_query_groups,
        "model.ffn_hidden_size": c.ffn_hidden_size,
    }
    for key, value in divisible.items():
        if value % tp:
            yield Refusal(
                key,
                value,
                f"not divisible by {size}",
                "Choose a tensor-parallel size that divides it",
            )
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
    if c.data.sequence_length % tp:
        yield Refusal(
            "data.sequence_length",
            c.data.sequence_length,
            f"not divisible by the {tp} ranks of sequence parallelism",
            f"Choose a multiple of {tp}",
        )


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
    if b.global_batch_size % at_once:
        yield Refusal(
            "batch.global_batch_size",
            b.global_batch_size,
            f"not divisible by batch.micro_batch_size = {b.micro_batch_size} x {data} "
            "data-parallel ranks",
            fitting_batches(b.global_batch_size, b.micro_batch_size, data, model),
        )
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
    if not begin:
        return
    if not c.schedule.lr_warmup_steps:
        yield Refusal(
            "schedule.lr_warmup_init",
            begin,
            "there is no warm-up",
            "Remove the key, or set schedule.lr_warmup_steps",
        )
    elif begin > peak:
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
        yield from _unused(c)
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


def _unused(c: RunConfig) -> Iterator[Refusal]:
    """Refuse settings of an adaptive softmax without one."""
    for name in ("adaptive_factor", "adaptive_dropout"):
        value = getattr(c.model, name)
        if value != type(c.model).model_fields[name].default:
            yield Refusal(
                f"model.{name}",
                value,
                "there is no adaptive softmax",
                "Remove the key, or set model.adaptive_cutoffs",
            )


def check(config: RunConfig) -> None:
    """Check every rule that does not depend on the number of processes.

    Raises:
        ConfigError: With one line for each rule that is broken.
    """
    refusals = [
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
        *_checkpoint(config),
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
    if m.hidden_size % m.num_attention_heads:
        yield Refusal(
            "model.hidden_size",
            m.hidden_size,
            f"not divisible by model.num_attention_heads = {m.num_attention_heads}",
            f"Choose a multiple of {m.num_attention_heads}, so that all heads have the same width",
        )
    if m.num_attention_heads % c.num_query_groups:
        yield Refusal(
            "model.num_query_groups",
            c.num_query_groups,
            f"does not divide model.num_attention_heads = {m.num_attention_heads}",
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
    if not decayed and s.lr_wsd_decay_steps:
        yield Refusal(
            "schedule.lr_wsd_decay_steps",
            s.lr_wsd_decay_steps,
            f'schedule.lr_decay_style = "{s.lr_decay_style}" does not use it',
            'Remove the key, or set schedule.lr_decay_style = "warmup_stable_decay"',
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


def _checkpoint(config: RunConfig) -> Iterator[Refusal]:
    """Refuse keep_every and keep_best where checkpoint.keep is unset, so that all are kept."""
    checkpoint = config.checkpoint
    if checkpoint.keep is not None:
        return
    for key in ("keep_every", "keep_best"):
        if value := getattr(checkpoint, key):
            yield Refusal(
                f"checkpoint.{key}",
                value,
                "without checkpoint.keep every checkpoint is kept",
                "Set checkpoint.keep as well, to the number of newest ones to keep",
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
    tp, end = c.parallel.tensor_model_parallel_size, c.position.table_end(c)
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
        if c.parallel.sequence_parallel and length % tp:
            yield Refusal(
                "evaluation.lengths",
                length,
                f"not divisible by the {tp} ranks of sequence parallelism",
                f"Choose a multiple of {tp}",
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

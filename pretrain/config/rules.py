"""Refuse runs that cannot work, before any process starts.

pydantic checks the type and range of each key by itself (`schema`). The rules here relate keys to
each other and to the number of processes. Each yields a Refusal with its remedy, and a user sees
all that apply at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrain.config.adaptive_rules import check_adaptive
from pretrain.config.batch_rules import check_rampup
from pretrain.config.data_rules import check_data
from pretrain.config.errors import ConfigError
from pretrain.config.optimizer_rules import check_optimizer, check_warmup_init
from pretrain.config.parallel_rules import check_pipeline, check_processes, check_tensor_parallel
from pretrain.config.refusal import Refusal
from pretrain.config.slopes import check_slopes
from pretrain.config.train_rules import check_objective, check_profile

if TYPE_CHECKING:
    # RunConfig.layout applies these rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig


def check(config: RunConfig) -> None:
    """Check every rule that does not depend on the number of processes.

    Raises:
        ConfigError: With one line for each rule that is broken.
    """
    refusals = [
        *_model(config),
        *check_adaptive(config),
        *_positions(config),
        *check_slopes(config),
        *check_tensor_parallel(config),
        *check_pipeline(config),
        *check_rampup(config),
        *check_optimizer(config),
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


def _positions(c: RunConfig) -> Iterator[Refusal]:
    """Check what each position method needs of the model."""
    m, p = c.model, c.position
    if p.method == "rotary" and c.head_dim % 2:
        yield Refusal(
            "model.hidden_size",
            m.hidden_size,
            f"rotary positions rotate pairs of channels, and a head has {c.head_dim} channels",
            "Choose a hidden_size that gives each head an even width",
        )
    elif p.method == "rotary" and (c.rotary_channels % 2 or not c.rotary_channels):
        yield Refusal(
            "position.rotary_percent",
            p.rotary_percent,
            f"rotates {c.rotary_channels} of a head's {c.head_dim} channels, and rotary positions "
            "rotate pairs of them",
            "Choose a share that gives an even number of channels",
        )
    if p.rotary_percent != 1 and p.method != "rotary":
        yield Refusal(
            "position.rotary_percent",
            p.rotary_percent,
            f'position.method = "{p.method}" rotates nothing',
            'Remove the key, or set position.method = "rotary"',
        )
    if p.method == "sinusoidal" and m.hidden_size % 2:
        yield Refusal(
            "model.hidden_size",
            m.hidden_size,
            "sinusoidal positions consist of pairs of a sine and a cosine",
            "Choose an even number",
        )
    if p.trainable_slopes and p.method != "alibi":
        yield Refusal(
            "position.trainable_slopes",
            p.trainable_slopes,
            f'position.method = "{p.method}" has no slopes',
            'Remove the key, or set position.method = "alibi"',
        )
    # T5 gives the first half of the buckets one distance each. The other half covers the distances
    # from there to relative_attention_max_distance, which must therefore be larger.
    exact = p.relative_attention_num_buckets // 2
    if p.method == "t5" and p.relative_attention_max_distance <= exact:
        yield Refusal(
            "position.relative_attention_max_distance",
            p.relative_attention_max_distance,
            f"half of the {p.relative_attention_num_buckets} buckets hold one distance each and "
            "already reach as far",
            "Choose a larger distance, or fewer position.relative_attention_num_buckets",
        )
    if p.method == "learned" and c.data.sequence_length > c.max_position_embeddings:
        yield Refusal(
            "position.max_position_embeddings",
            c.max_position_embeddings,
            f"less than data.sequence_length = {c.data.sequence_length}",
            f"Set {c.data.sequence_length} or more, or remove the key",
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
    tp = c.parallel.tensor_model_parallel_size
    for length in c.evaluation_lengths:
        if length < 1:
            yield Refusal(
                "evaluation.lengths", length, "not a number of tokens", "Choose 1 or more"
            )
        if c.position.method == "learned" and length > c.max_position_embeddings:
            yield Refusal(
                "evaluation.lengths",
                length,
                f"the learned position table holds {c.max_position_embeddings} positions",
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

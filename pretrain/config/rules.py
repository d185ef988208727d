"""What cannot work is refused here, before any process starts, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pretrain.config.errors import ConfigError

if TYPE_CHECKING:
    # The schema applies these rules itself (RunConfig.layout); they need its type alone.
    from pretrain.config.schema import RunConfig


class Refusal(NamedTuple):
    key: str
    value: object
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.reason}. {self.remedy}"


def check(config: RunConfig) -> None:
    """Raises ConfigError with every refusal that holds whatever the number of processes."""
    refusals = [
        *_model(config),
        *_parallel(config),
        *_schedule(config),
        *_evaluation(config),
        *_data(config),
    ]
    if config.parallel.world_size is not None and not refusals:
        refusals = list(_layout(config, config.parallel.world_size))
    _raise(refusals)


def check_layout(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError when `world_size` processes cannot share this run."""
    planned = config.parallel.world_size
    if planned is not None and planned != world_size:
        _raise(
            [
                Refusal(
                    "parallel.world_size",
                    planned,
                    f"the run was started with {world_size} processes",
                    f"Start {planned}, or change the plan with --set parallel.world_size={world_size}",
                )
            ]
        )
    _raise(list(_layout(config, world_size)))


def _raise(refusals: list[Refusal]) -> None:
    if refusals:
        raise ConfigError("\n".join(str(r) for r in refusals))


def _model(c: RunConfig) -> Iterator[Refusal]:
    m = c.model
    if m.hidden_size % m.num_attention_heads:
        yield Refusal(
            "model.hidden_size",
            m.hidden_size,
            f"not divisible by num_attention_heads = {m.num_attention_heads}",
            "Choose a multiple, so that every head has the same width",
        )
    if m.num_attention_heads % c.num_query_groups:
        yield Refusal(
            "model.num_query_groups",
            c.num_query_groups,
            f"does not divide num_attention_heads = {m.num_attention_heads}",
            "Choose a divisor",
        )
    if c.position.method == "rotary" and c.head_dim % 2:
        yield Refusal(
            "model.hidden_size",
            m.hidden_size,
            f"rotary turns pairs of channels, a head has {c.head_dim}",
            "Choose an even width a head",
        )
    if c.position.method == "sinusoidal" and m.hidden_size % 2:
        yield Refusal(
            "model.hidden_size",
            m.hidden_size,
            "sinusoidal positions need an even width",
            "Choose an even one",
        )
    if c.position.trainable_slopes and c.position.method != "alibi":
        yield Refusal(
            "position.trainable_slopes",
            True,
            f"position.method = {c.position.method} has no slopes",
            "Leave it out, or choose alibi",
        )
    p = c.position
    if (
        p.method == "t5"
        and p.relative_attention_max_distance <= p.relative_attention_num_buckets // 2
    ):
        yield Refusal(
            "position.relative_attention_max_distance",
            p.relative_attention_max_distance,
            f"half of the {p.relative_attention_num_buckets} buckets hold one distance each and reach as far",
            "Choose a larger distance or fewer buckets",
        )
    if p.method == "learned" and c.data.sequence_length > c.max_position_embeddings:
        yield Refusal(
            "position.max_position_embeddings",
            c.max_position_embeddings,
            f"shorter than data.sequence_length = {c.data.sequence_length}",
            "Raise it, or leave it out",
        )


def _parallel(c: RunConfig) -> Iterator[Refusal]:
    m, p = c.model, c.parallel
    tp, pp, vpp = (
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.virtual_pipeline_model_parallel_size,
    )
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
                f"not divisible by parallel.tensor_model_parallel_size = {tp}",
                "Choose a tensor-parallel size that divides it",
            )
    if c.padded_vocab_size % tp:
        yield Refusal(
            "model.make_vocab_size_divisible_by",
            m.make_vocab_size_divisible_by,
            f"the padded vocabulary of {c.padded_vocab_size} is not divisible by "
            f"parallel.tensor_model_parallel_size = {tp}",
            f"Choose a multiple of {tp}",
        )
    if pp > 1 and p.zero_stage > 1:
        yield Refusal(
            "parallel.zero_stage",
            p.zero_stage,
            f"ZeRO {p.zero_stage} does not work with pipeline stages "
            f"(parallel.pipeline_model_parallel_size = {pp})",
            "Choose zero_stage = 1 or one stage",
        )
    if p.sequence_parallel and tp == 1:
        yield Refusal(
            "parallel.sequence_parallel",
            True,
            "there is one tensor-parallel rank to share the sequence",
            "Leave it out, or raise parallel.tensor_model_parallel_size",
        )
    if p.sequence_parallel and c.data.sequence_length % tp:
        yield Refusal(
            "data.sequence_length",
            c.data.sequence_length,
            f"not divisible by the {tp} ranks of sequence parallelism",
            "Choose a multiple",
        )
    if vpp is not None and pp == 1:
        yield Refusal(
            "parallel.virtual_pipeline_model_parallel_size",
            vpp,
            "interleaving needs pipeline stages",
            "Leave it out, or raise parallel.pipeline_model_parallel_size",
        )
    if pp * (vpp or 1) > m.num_layers:
        yield Refusal(
            "model.num_layers",
            m.num_layers,
            f"fewer than the {pp * (vpp or 1)} pipeline chunks",
            "Lower the pipeline size",
        )


def _layout(c: RunConfig, world_size: int) -> Iterator[Refusal]:
    p, b = c.parallel, c.batch
    model = p.tensor_model_parallel_size * p.pipeline_model_parallel_size
    if world_size % model:
        yield Refusal(
            "parallel.tensor_model_parallel_size x parallel.pipeline_model_parallel_size",
            model,
            f"does not divide the {world_size} process{'es' * (world_size > 1)}",
            f"Start a multiple of {model}, or shrink the layout",
        )
        return
    data = world_size // model
    if b.global_batch_size % (b.micro_batch_size * data):
        yield Refusal(
            "batch.global_batch_size",
            b.global_batch_size,
            f"not divisible by batch.micro_batch_size = {b.micro_batch_size} x {data} data-parallel ranks",
            f"Choose a multiple of {b.micro_batch_size * data}",
        )
        return
    micro = b.global_batch_size // (b.micro_batch_size * data)
    if p.virtual_pipeline_model_parallel_size and micro % p.pipeline_model_parallel_size:
        yield Refusal(
            "batch.global_batch_size",
            b.global_batch_size,
            f"{micro} micro batches a rank: the interleaved schedule needs a multiple of the "
            f"{p.pipeline_model_parallel_size} stages",
            "Change the batch, or leave out parallel.virtual_pipeline_model_parallel_size",
        )


def _schedule(c: RunConfig) -> Iterator[Refusal]:
    s = c.schedule
    if s.lr_warmup_steps >= c.train.num_steps:
        yield Refusal(
            "schedule.lr_warmup_steps",
            s.lr_warmup_steps,
            f"train.num_steps = {c.train.num_steps} would never reach the peak",
            "Warm up for fewer steps",
        )
    if s.min_learning_rate > c.optimizer.learning_rate:
        yield Refusal(
            "schedule.min_learning_rate",
            s.min_learning_rate,
            f"above the peak, optimizer.learning_rate = {c.optimizer.learning_rate}",
            "Lower it",
        )
    if s.lr_decay_style == "warmup_stable_decay":
        if not 0 < s.lr_wsd_decay_steps <= c.train.num_steps - s.lr_warmup_steps:
            yield Refusal(
                "schedule.lr_wsd_decay_steps",
                s.lr_wsd_decay_steps,
                f"must be 1 to {c.train.num_steps - s.lr_warmup_steps} (the steps after warm-up)",
                "Set it",
            )
    elif s.lr_wsd_decay_steps:
        yield Refusal(
            "schedule.lr_wsd_decay_steps",
            s.lr_wsd_decay_steps,
            f"schedule.lr_decay_style = {s.lr_decay_style} has none",
            "Leave it out",
        )


def _evaluation(c: RunConfig) -> Iterator[Refusal]:
    yield from evaluation_refusals(c, c.evaluation_lengths, c.evaluation_stride)


def evaluation_refusals(c: RunConfig, lengths: tuple[int, ...], stride: int) -> Iterator[Refusal]:
    """Why `lengths` (tokens) and `stride` cannot be evaluated with this model; also asked by `pretrain evaluate`."""
    for length in lengths:
        if length < 1:
            yield Refusal(
                "evaluation.lengths", length, "not a number of tokens", "Choose 1 or more"
            )
        if c.position.method == "learned" and length > c.max_position_embeddings:
            yield Refusal(
                "evaluation.lengths",
                length,
                f"the learned position table holds {c.max_position_embeddings} positions",
                "Evaluate within it, or train with a larger position.max_position_embeddings",
            )
        tp = c.parallel.tensor_model_parallel_size
        if c.parallel.sequence_parallel and length % tp:
            yield Refusal(
                "evaluation.lengths",
                length,
                f"not divisible by the {tp} ranks of sequence parallelism",
                "Choose a multiple",
            )
    if lengths and stride > min(lengths):
        yield Refusal(
            "evaluation.stride",
            stride,
            f"longer than the shortest window of {min(lengths)} tokens",
            "Tokens would be left out; choose a stride no longer than that",
        )


def _data(c: RunConfig) -> Iterator[Refusal]:
    d = c.data
    if d.source != "shakespeare" and not d.paths:
        yield Refusal(
            "data.paths",
            [],
            f'data.source = "{d.source}" reads files',
            "Name them, or a glob pattern",
        )
    if d.source == "shakespeare" and (d.paths or d.validation_paths):
        yield Refusal(
            "data.paths",
            list(d.paths or d.validation_paths),
            'data.source = "shakespeare" brings its own text',
            'Leave it out, or set data.source = "text"',
        )
    if d.tokens_per_shard < d.tokens_per_block:
        yield Refusal(
            "data.tokens_per_shard",
            d.tokens_per_shard,
            f"less than one block of {d.tokens_per_block}",
            "Raise it, or lower data.tokens_per_block",
        )

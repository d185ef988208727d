"""Refuse layouts that cannot split the model, or that the processes cannot share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrain.config.batch_rules import check_rampup_layout, fitting_batches
from pretrain.config.refusal import Refusal

if TYPE_CHECKING:
    # RunConfig.layout applies these rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig


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

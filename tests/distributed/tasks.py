"""Define the tasks that worker processes run.

Each task is called on every rank and returns something picklable. Imports of Megatron and DeepSpeed
stand inside the functions: they must come after `pretrain.platform.prepare`, and the test process,
which imports this module too, does without them.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain import platform
from pretrain.config import RunConfig
from pretrain.topology import Topology, initialize, own_part, replica_group
from tests.conftest import tiny_config


def gradients(config: RunConfig, state: dict[str, Tensor], tokens: Tensor) -> dict[str, Any] | None:
    """Compute the loss, logits and gradients of a model on one batch.

    Args:
        config: The run's config; its layout must fit the number of ranks.
        state: Full fp32 weights by global name.
        tokens: Token ids of the global batch, [global batch, S + 1].

    Returns:
        On rank 0 {"loss": mean loss in nats, "logits": [global batch, S, V], "gradients": full
        tensors by global name}; None elsewhere.
    """
    from pretrain.model.forward import run_schedule
    from pretrain.optim.buckets import finalize_gradients, gradient
    from pretrain.training.step import _mean_loss, average_loss

    topology, chunks = _build_model_with(config, state)
    micro_batches = _split_among_ranks(config, topology, tokens)
    local_logits = _logits(config, chunks, micro_batches)
    losses = run_schedule(chunks, micro_batches, _mean_loss)
    for parameter in chunks[0].position.parameters():
        # The optimizer's fp32 sums are there, too, where no layer of a stage uses a parameter.
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    finalize_gradients(chunks)
    loss = average_loss(losses, topology)
    full = _assemble(chunks, gradient, average_over=topology.layout.replicas)
    place = topology.data_rank, topology.context_rank, topology.tensor_rank
    gathered = _gathered((*place, local_logits))
    if not topology.is_main:
        return None
    # Tensor ranks hold slices of the vocabulary, context ranks parts of the sequences, data ranks
    # rows of the batch.
    for axis in (-1, 1, 0):
        joined: dict[tuple[int, ...], list[Tensor]] = {}
        for *place, x in sorted((x for x in gathered if x[-1] is not None), key=lambda x: x[:-1]):
            joined.setdefault(tuple(place[:-1]), []).append(x)
        gathered = [(*place, torch.cat(parts, dim=axis)) for place, parts in joined.items()]
    [(logits,)] = gathered
    return {"loss": loss, "logits": logits, "gradients": full}


def embeddings(config: RunConfig, tokens: Tensor) -> dict[str, Tensor]:
    """Compute what the first layer of a newly initialized model sees. On one process.

    Args:
        config: The run's config.
        tokens: Token ids [B, S].

    Returns:
        "output": [B, S, hidden], and the initial weights by global name.
    """
    from pretrain.model.gpt import build_model, named_parameters

    initialize(config)
    chunks = build_model(config)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        output = chunks[0].embedding(tokens, positions).transpose(0, 1)
    weights = {named.name: named.parameter.detach() for named in named_parameters(chunks)}
    return {"output": output, **weights}


def train_steps(
    config: RunConfig, state: dict[str, Tensor], steps: list[Tensor]
) -> dict[str, Any] | None:
    """Train a model from given weights, one optimizer step per batch.

    Args:
        config: The run's config.
        state: Full fp32 weights by global name.
        steps: Token ids of the global batches, each [global batch, S + 1].

    Returns:
        On rank 0 {"losses", "norms": per step, "weights": full fp32 tensors by global name}; None
        elsewhere.
    """
    from pretrain.optim.optimizers import learning_rate
    from pretrain.optim.zero import ZeroOptimizer
    from pretrain.training.step import average_loss, forward_backward, seed_step

    topology, chunks = _build_model_with(config, state)
    optimizer = ZeroOptimizer(config, topology, chunks)
    losses, norms = [], []
    for step, tokens in enumerate(steps):
        seed_step(config, topology, step)
        kept = forward_backward(chunks, optimizer, _split_among_ranks(config, topology, tokens))
        norms.append(float(optimizer.step(learning_rate(config, step))))
        losses.append(average_loss(kept, topology))
    weights = full_tensors(optimizer, "master")
    # The engine is part of reference cycles. Collected now, its memory does not add up over tasks.
    del optimizer, chunks
    gc.collect()
    return {"losses": losses, "norms": norms, "weights": weights} if topology.is_main else None


def activation_masks(config: RunConfig, steps: int) -> list[list[Tensor]] | None:
    """Draw what model.activation_dropout multiplies a micro batch with, as each layer does.

    Args:
        config: The run's config. Its only dropout is that of the activations, there is one pipeline
            stage and a step has one micro batch a rank.
        steps: Number of steps.

    Returns:
        On rank 0 the masks of every step and layer, [global batch, S, ffn]; None elsewhere.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from pretrain.training.step import seed_step

    topology = initialize(config)
    own, p = [], config.model.activation_dropout
    size = config.ffn_hidden_size // topology.layout.tensor
    shape = (config.data.sequence_length, config.batch.micro_batch_size, size)
    for step in range(steps):
        seed_step(config, topology, step)
        with get_cuda_rng_tracker().fork():
            for _ in range(config.model.num_layers):
                own.append(torch.nn.functional.dropout(torch.ones(shape), p).transpose(0, 1))
    gathered = _gathered((topology.data_rank, topology.tensor_rank, own))
    if not topology.is_main:
        return None
    # Tensor ranks hold slices of the channels, data ranks hold rows of the batch.
    ordered = [masks for _, _, masks in sorted(gathered, key=lambda each: each[:2])]
    tensor = topology.layout.tensor
    rows = [
        [torch.cat(parts, dim=-1) for parts in zip(*ordered[i : i + tensor])]
        for i in range(0, len(ordered), tensor)
    ]
    masks = [torch.cat(parts) for parts in zip(*rows)]
    layers = config.model.num_layers
    return [masks[step * layers : (step + 1) * layers] for step in range(steps)]


def evaluated_logits(config: RunConfig, state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of token ids [B, S] in evaluation. On one process."""
    _, chunks = _build_model_with(config, state)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return chunks[0].eval()(tokens, positions, None)


def in_fp16_on_cpu(task: Callable[..., Any], *args: Any) -> Any:
    """Run a task in fp16 on a CPU, which DeepSpeed and `pretrain.platform` refuse otherwise."""
    platform.prepare(0)
    with platform.fp16_allowed_on_cpu():
        return task(*args)


def in_fp16_that_grows(task: Callable[..., Any], *args: Any) -> Any:
    """Run a task in fp16 on a CPU; the loss scale doubles every second step, not every 1,000."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    update = DynamicLossScaler.update_scale

    def often(scaler: Any, overflow: bool) -> None:
        scaler.scale_window = 2
        update(scaler, overflow)

    with patch.object(DynamicLossScaler, "update_scale", often):
        return in_fp16_on_cpu(task, *args)


def uncompiled(task: Callable[..., Any], *args: Any) -> Any:
    """Run a task with compiled regions executed as plain Python.

    Compilation costs many seconds. Everything else about the fused model stays as it is.
    """
    with torch.compiler.set_stance("force_eager"):
        return task(*args)


def traced(task: Callable[..., Any], *args: Any) -> Any:
    """Run a task whose graphs and their gradients are traced, but executed by torch's operators.

    Inductor's C++ takes most of the time of a compilation.
    """
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        return task(*args)


def full_tensors(optimizer: Any, kind: str) -> dict[str, Tensor]:
    """Return the optimizer's state by global name, assembled from the fragments of every rank.

    Only rank 0 returns any.

    Args:
        optimizer: The optimizer.
        kind: "master", "exp_avg" or "exp_avg_sq".
    """
    fragments = optimizer.state().fragments
    mine = [(f.named, f.start, f.tensors[kind].clone()) for f in fragments]
    gathered = _gathered(
        [(n.name, n.shape, n.global_shape, n.parts, start, t) for n, start, t in mine]
    )
    full: dict[str, Tensor] = {}
    for name, shape, global_shape, parts, start, flat in (
        item for part in gathered for item in part
    ):
        # NaN marks what no fragment has filled yet.
        whole = full.setdefault(name, torch.full(global_shape, float("nan")))
        local = torch.full(shape, float("nan"))
        local.view(-1)[start : start + flat.numel()] = flat
        for target, part in _boxes(whole, parts, local):
            target.copy_(torch.where(part.isnan(), target, part))
    return full


def _gathered(mine: Any) -> list[Any]:
    """Return what each rank gives, in the order of ranks, on rank 0, and nothing elsewhere."""
    gathered: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(mine, gathered or None)
    return gathered


def _boxes(whole: Tensor, parts: Any, local: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each box of `whole` that a rank holds, and what it holds of it, as views."""
    held = local.split([size[0] for _, size in parts]) if len(parts) > 1 else [local]
    boxes = [tuple(slice(o, o + s) for o, s in zip(*part)) for part in parts]
    return [(whole[box], part) for box, part in zip(boxes, held, strict=True)]


def _build_model_with(config: RunConfig, state: dict[str, Tensor]) -> tuple[Topology, list[Any]]:
    """Set up the layout, build this rank's chunks, and fill them with slices of full weights."""
    from pretrain.model.gpt import build_model, named_parameters

    topology = initialize(config)
    chunks = build_model(config)
    with torch.no_grad():
        for named in named_parameters(chunks):
            named.parameter.copy_(named.slice_of(state[named.name]))
    return topology, chunks


def _split_among_ranks(config: RunConfig, topology: Topology, tokens: Tensor) -> list[Tensor]:
    """Return this data rank's micro batches of a global batch."""
    share = tokens.chunk(topology.layout.data)[topology.data_rank]
    return list(share.split(config.batch.micro_batch_size))


def _logits(config: RunConfig, chunks: list[Any], batches: list[Tensor]) -> Tensor | None:
    """Return this rank's logits on the last pipeline stage, else None.

    They are [B, S / context ranks, V / tensor ranks].
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Any, chunk: Any) -> Any:
        inputs = next(iterator)[:, :-1].contiguous().to(platform.device())
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        own = own_part(inputs.shape[1])
        inputs, positions = inputs[:, own].contiguous(), positions[:, own].contiguous()
        return chunk(inputs, positions, None), lambda out: (out.sum(), out.detach().clone())

    shape = batches[0].shape
    with torch.no_grad():
        kept = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=shape[1] - 1,
            micro_batch_size=shape[0],
            decoder_seq_length=shape[1] - 1,
            forward_only=True,
        )
    return torch.cat(kept) if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None


def _assemble(chunks: list[Any], value: Any, average_over: int) -> dict[str, Tensor]:
    """Return full tensors by global name, and check that copies of a parameter agree.

    Only rank 0 returns any.

    Args:
        chunks: This rank's model chunks.
        value: Function from a parameter to the tensor to assemble, such as its gradient.
        average_over: Number of replicas, whose tensors are averaged.
    """
    from pretrain.model.gpt import named_parameters

    group = replica_group()
    mine = []
    for named in named_parameters(chunks):
        tensor = value(named.parameter).detach().clone()
        dist.all_reduce(tensor, group=group)
        mine.append((named.name, named.global_shape, named.parts, tensor / average_over))
    gathered = _gathered(mine)
    full: dict[str, Tensor] = {}
    for name, global_shape, parts, tensor in (item for part in gathered for item in part):
        whole = full.setdefault(name, torch.full(global_shape, float("nan")))
        for target, held in _boxes(whole, parts, tensor):
            assert target.isnan().all() or torch.allclose(target, held, atol=1e-6), (
                f"copies of {name} differ"
            )
            target.copy_(held)
    return full


def loaded_run(config: RunConfig, resume: str, allowed: Collection[str] = ()) -> Any:
    """Return the run with its data, its model and what `resume`, a value of --resume, names."""
    from pretrain.training.reporter import AttemptReporter, Requests
    from pretrain.training.start import (
        StartPoint,
        data_hashes,
        find_start_point,
        load_run,
        prepare,
    )

    streams, topology, checkpoint = prepare(config, resume, allowed)
    known = StartPoint(checkpoint, data=data_hashes(streams), allowed=tuple(allowed))
    start_point = find_start_point(config, resume, known)
    return load_run(config, streams, topology, start_point, Requests(), AttemptReporter())


def save_at_once(run: Any) -> None:
    """Save a run's state, and wait for it."""
    from pretrain.checkpoint.save import Saver

    saver = Saver(run.config, run.topology, run.optimizer)
    saver.begin(run.state, run.origin)
    saver.finish()
    saver.close()


def continue_run(
    config: RunConfig, resume: str, until: int, allowed: Collection[str] = ()
) -> dict[str, Any] | None:
    """Train a run on real data to a step and save a checkpoint there.

    Args:
        config: The run's config.
        resume: Value of --resume.
        until: The step to stop at.
        allowed: Keys that may change.

    Returns:
        On rank 0 {"began": first step, "losses", "norms": per step, "samples": consumed samples};
        None elsewhere.
    """
    from pretrain.training.loop import queue_step, step_batches

    run = loaded_run(config, resume, allowed)
    began = run.state.step
    steps = step_batches(run)
    records = [queue_step(run, steps, platform.Moment()).read() for _ in range(until - began)]
    save_at_once(run)
    result = {
        "began": began,
        "losses": [r["loss_nats"] for r in records],
        "norms": [r["gradient_norm"] for r in records],
        "samples": run.state.consumed_samples,
    }
    return result if run.topology.is_main else None


def save_and_take_a_step(config: RunConfig, resume: str, until: int) -> float:
    """Go on from a checkpoint to a step, save at once, then take one more step.

    Args:
        config: The run's config; its directory takes the save.
        resume: Value of --resume.
        until: The step to save at.

    Returns:
        The loss of the step after the save, in nats.
    """
    from pretrain.training.loop import queue_step, step_batches

    run = loaded_run(config, resume)
    steps = step_batches(run)
    for _ in range(until - run.state.step):
        queue_step(run, steps, platform.Moment()).read()
    save_at_once(run)
    return float(queue_step(run, steps, platform.Moment()).read()["loss_nats"])


def bytes_of_a_load(config: RunConfig) -> dict[str, Any]:
    """Load a run's newest checkpoint, and count what is read of its files of tensors.

    Args:
        config: The run's config; the run has a checkpoint.

    Returns:
        "read": file name -> bytes; "needed": bytes of this rank's weights and moments.
    """

    read: Counter[str] = Counter()
    preadv = os.preadv

    def counted(descriptor: int, *args: Any) -> int:
        got = preadv(descriptor, *args)
        read[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] += got
        return got

    with patch.object(os, "preadv", counted):
        run = loaded_run(config, "auto")
    fragments = run.optimizer.state().fragments
    needed = sum(t.numel() * t.element_size() for f in fragments for t in f.tensors.values())
    return {"read": dict(read), "needed": needed}


def evaluate(
    config: RunConfig, state: dict[str, Tensor], protocols: list[Any], tokens_per_batch: int
) -> list[Any]:
    """Evaluate a model with given weights on the validation stream.

    Args:
        config: The run's config.
        state: Full fp32 weights by global name.
        protocols: The protocols to evaluate.
        tokens_per_batch: Tokens in an evaluation batch.

    Returns:
        One result per protocol, on every rank.
    """
    from pretrain.data.stream import open_stream
    from pretrain.evaluation.perplexity import Evaluator
    from pretrain.evaluation.windows import ScoredText
    from pretrain.optim.zero import ZeroOptimizer

    topology, chunks = _build_model_with(config, state)
    # Under ZeRO 3 only DeepSpeed's engine can gather the weights for a forward pass.
    needs_engine = config.parallel.zero_stage == 3
    optimizer = ZeroOptimizer(config, topology, chunks) if needs_engine else None
    evaluator = Evaluator(
        chunks,
        topology,
        ScoredText(open_stream(config, "validation"), config.evaluation.max_tokens),
        tokens_per_batch=tokens_per_batch,
        schedule_module=optimizer.schedule_module if optimizer else None,
        mask_id=config.mask_id if config.train.objective == "masked" else None,
        by_token=True,
    )
    return [evaluator.evaluate(protocol) for protocol in protocols]


def reduce_gradients(
    config: RunConfig, state: dict[str, Tensor], tokens: Tensor
) -> list[dict[str, Any]]:
    """Reduce a step's gradients over the data-parallel ranks at ZeRO 1, and compare with fp64.

    Args:
        config: The run; its layout must fit the number of ranks.
        state: Full fp32 weights by global name.
        tokens: Token ids of the global batch, [global batch, S + 1].

    Returns:
        For each part of a parameter whose sum this rank receives: "name"; "error", the norm of the
        difference from the sum in fp64; "sum", the norm of that sum; "terms", the norm of the sum
        of the terms' magnitudes, in which rounding errors are measured.
    """
    from megatron.core import parallel_state

    from pretrain.optim.buckets import finalize_gradients, gradient
    from pretrain.optim.zero import ZeroOptimizer
    from pretrain.training.step import forward_backward, seed_step

    topology, chunks = _build_model_with(config, state)
    optimizer = ZeroOptimizer(config, topology, chunks)
    seed_step(config, topology, 0)
    # So that this rank's own sums over its micro batches can be read.
    with without_overlap():
        forward_backward(chunks, optimizer, _split_among_ranks(config, topology, tokens))
    group = parallel_state.get_data_parallel_group()
    sums, magnitudes = {}, {}
    own = {named.name: gradient(named.parameter).clone() for named in optimizer.parameters}
    finalize_gradients(chunks)
    for named in optimizer.parameters:
        sums[named.name] = gradient(named.parameter).double()
        magnitudes[named.name] = sums[named.name].abs()
        dist.all_reduce(sums[named.name], group=group)
        dist.all_reduce(magnitudes[named.name], group=group)
        gradient(named.parameter).copy_(own[named.name])
    optimizer.reduce_gradients()
    found = []
    for named in optimizer.parameters:
        mapping = named.parameter._hp_mapping
        if mapping is None:
            continue
        shard = optimizer._sharded_step.reducer.shards[mapping.param_group_index]
        to, source = mapping.hp_fragment_address, mapping.lp_fragment_address
        part = slice(source.start, source.start + to.numel)
        expected = sums[named.name].flatten()[part]
        error = shard[to.start : to.start + to.numel].double() - expected
        terms = magnitudes[named.name].flatten()[part]
        found.append(
            {
                "name": named.name,
                "error": float(error.norm()),
                "sum": float(expected.norm()),
                "terms": float(terms.norm()),
            }
        )
    return found


@contextlib.contextmanager
def without_overlap() -> Iterator[None]:
    """Send gradients when the backward pass has ended, and wait at once for weights."""
    from pretrain.optim.buckets import WeightGather
    from pretrain.optim.sharded_step import GradientReducer

    start = WeightGather.start

    def start_and_wait(self: Any) -> None:
        start(self)
        self.wait()

    with (
        patch.object(GradientReducer, "_send_complete", lambda _: None),
        patch.object(WeightGather, "start", start_and_wait),
    ):
        yield


def train_and_watch_reductions(
    config: RunConfig, state: dict[str, Tensor], steps: list[Tensor], overlap: bool
) -> dict[str, Any]:
    """Train at ZeRO 1, and see when buckets are sent and weights awaited.

    Args:
        config: The run's config.
        state: Full fp32 weights by global name.
        steps: Token ids of the global batches, each [global batch, S + 1].
        overlap: Communicate while the model computes.

    Returns:
        On every rank: "losses", "norms", "weights" (this rank's), and the counts.
    """

    from pretrain.optim.buckets import WeightGather
    from pretrain.optim.optimizers import learning_rate
    from pretrain.optim.sharded_step import GradientReducer
    from pretrain.optim.zero import ZeroOptimizer
    from pretrain.training.step import average_loss, forward_backward

    topology, chunks = _build_model_with(config, state)
    optimizer = ZeroOptimizer(config, topology, chunks)
    counts: Counter[str] = Counter()
    send, wait = GradientReducer._send, WeightGather.wait
    in_forward = False

    def counted_send(self: Any, bucket: Any) -> None:
        # Autograd numbers the backward pass that is running; -1 means none.
        is_within = torch._C._current_graph_task_id() != -1
        counts["sent_within_backward" if is_within else "sent_after_backward"] += 1
        send(self, bucket)

    def counted_wait(self: Any, *buckets: list[int]) -> None:
        before = len(self._works)
        wait(self, *buckets)
        counts["weights_awaited_in_forward"] += (before - len(self._works)) * in_forward

    losses, norms = [], []
    with (
        patch.object(GradientReducer, "_send", counted_send),
        patch.object(WeightGather, "wait", counted_wait),
        contextlib.nullcontext() if overlap else without_overlap(),
    ):
        for step, tokens in enumerate(steps):
            in_forward = True
            kept = forward_backward(chunks, optimizer, _split_among_ranks(config, topology, tokens))
            in_forward = False
            norms.append(float(optimizer.step(learning_rate(config, step))))
            losses.append(average_loss(kept, topology))
        optimizer.wait_for_weights()
    buckets = optimizer._sharded_step._buckets
    return {
        "losses": losses,
        "norms": norms,
        "weights": [named.parameter.detach().clone() for named in optimizer.parameters],
        "num_buckets": len(buckets),
        "num_late_buckets": sum(bucket.is_late for bucket in buckets),
        **{
            key: counts[key]
            for key in ("sent_within_backward", "sent_after_backward", "weights_awaited_in_forward")
        },
    }


def order_of_events(config: RunConfig) -> list[tuple[str, int]]:
    """Train a run, and return when steps were queued, read and saved, each with its step."""
    from pretrain.checkpoint.save import Saver
    from pretrain.training import loop
    from pretrain.training.step import QueuedStep

    events: list[tuple[str, int]] = []
    queue_step, read, save = loop.queue_step, QueuedStep.read, Saver.begin

    def queued(run: Any, *args: Any) -> Any:
        step = queue_step(run, *args)
        events.append(("queue", run.state.step))
        return step

    def counted_read(self: Any) -> Any:
        record = read(self)
        events.append(("read", record["step"]))
        return record

    def counted_save(self: Any, state: Any, *args: Any) -> Any:
        events.append(("save", state.step))
        return save(self, state, *args)

    with (
        patch.object(loop, "queue_step", queued),
        patch.object(QueuedStep, "read", counted_read),
        patch.object(Saver, "begin", counted_save),
    ):
        assert loop.train(config) == 0
    return events


def gradients_seen_by_adam(
    config: RunConfig, state: dict[str, Tensor], tokens: Tensor
) -> dict[str, Tensor] | None:
    """Take one step, and return the gradients with which Adam was fed, at any ZeRO stage.

    After its first step, Adam's first moment is (1 - beta1) times the gradient.

    Args:
        config: The run's config, without clipping.
        state: Full fp32 weights by global name.
        tokens: Token ids of the global batch, [global batch, S + 1].

    Returns:
        On rank 0, the means over the global batch by global name; None elsewhere.
    """
    from pretrain.optim.zero import ZeroOptimizer
    from pretrain.training.step import forward_backward, seed_step

    topology, chunks = _build_model_with(config, state)
    optimizer = ZeroOptimizer(config, topology, chunks)
    seed_step(config, topology, 0)
    forward_backward(chunks, optimizer, _split_among_ranks(config, topology, tokens))
    optimizer.step(0.0)
    factor = 1 / (1 - config.optimizer.adam_beta1)
    full = {n: t * factor for n, t in full_tensors(optimizer, "exp_avg").items()}
    return full if topology.is_main else None


def reduce_gradients_on_two_nodes(
    config: RunConfig, state: dict[str, Tensor], tokens: Tensor
) -> dict[str, Any]:
    """Run `reduce_gradients` on 4 ranks as if they stood on two nodes, and watch what is sent.

    Args:
        config: As in `reduce_gradients`.
        state: As in `reduce_gradients`.
        tokens: As in `reduce_gradients`.

    Returns:
        "parts": what `reduce_gradients` returns; "sent": {(collective, ranks, dtype)} -> elements.
    """

    from pretrain import topology

    sent: Counter[tuple[str, tuple[int, ...], str]] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(output: Tensor, given: Tensor, group: Any = None, **kwargs: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            sent[name, ranks, str(given.dtype)] += given.numel()
            return original(output, given, group=group, **kwargs)

        return call

    node = f"node{topology.Process.from_environment().rank // 2}"
    names = ("reduce_scatter_tensor", "all_to_all_single")
    with (
        patch.object(topology, "host_name", lambda: node),
        patch.multiple(dist, **{name: counted(name) for name in names}),
    ):
        parts = reduce_gradients(config, state, tokens)
    return {"parts": parts, "sent": dict(sent)}


def ranks_per_node(jobs: list[str]) -> list[int]:
    """Return what the topology says about nodes of these names, a letter for each rank of a job."""
    from pretrain import topology

    platform.prepare(0)
    topology.initialize(tiny_config())
    found = []
    for hosts in jobs:
        with patch.object(topology, "host_name", lambda hosts=hosts: hosts[dist.get_rank()]):
            found.append(topology.ranks_per_node(dist.group.WORLD))
    return found


def bucket_layout(config: RunConfig) -> tuple[int, list[list[str]]]:
    """Return this rank's pipeline stage and the names in each of its buckets, in order."""
    from pretrain.model.gpt import build_model, named_parameters
    from pretrain.optim.buckets import plan_buckets

    topology = initialize(config)
    named = list(named_parameters(build_model(config)))
    names = {id(each.parameter): each.name for each in named}
    buckets = plan_buckets(config, named)
    return topology.pipeline_rank, [[names[id(p)] for p in b.parameters] for b in buckets]


def initial_weights(config: RunConfig) -> dict[str, Tensor]:
    """Return the weights that a new model starts with, full tensors by global name."""
    from pretrain.model.gpt import build_model

    topology = initialize(config)
    return _assemble(build_model(config), lambda p: p, average_over=topology.layout.data)

"""Tasks for worker processes about models that predict masked tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.config import RunConfig
from tests.distributed import tasks


def gradients(
    config: RunConfig, state: dict[str, Tensor], tokens: Tensor, consumed: int
) -> dict[str, Any] | None:
    """Mask a global batch, and compute its loss and gradients.

    Args:
        config: The run's config; its layout must fit the number of ranks.
        state: Full fp32 weights by global name.
        tokens: Token ids of the global batch, [global batch, S + 1].
        consumed: Samples consumed before it.

    Returns:
        On rank 0 {"loss", "gradients", "inputs" and "chosen" of this rank}; None elsewhere.
    """
    from pretrain.model.forward import run_schedule
    from pretrain.optim.buckets import finalize_gradients, gradient
    from pretrain.training.step import _mean_loss, average_loss, masked_batches

    topology, chunks = tasks._build_model_with(config, state)
    mine = tasks._split_among_ranks(config, topology, tokens)
    batches = masked_batches(config, topology, consumed, mine)
    losses = run_schedule(chunks, batches, _mean_loss)
    finalize_gradients(chunks)
    loss = average_loss(losses, topology)
    full = tasks._assemble(chunks, gradient, average_over=topology.layout.data)
    if not topology.is_main:
        return None
    return {
        "loss": loss,
        "gradients": full,
        "inputs": torch.cat([batch.inputs for batch in batches]),
        "chosen": torch.cat([batch.chosen for batch in batches]),
    }


def evaluate(
    config: RunConfig, state: dict[str, Tensor], lengths: list[int], tokens_per_batch: int
) -> list[Any]:
    """Evaluate a model with given weights on the masked tokens of the validation stream.

    Args:
        config: The run's config.
        state: Full fp32 weights by global name.
        lengths: Window lengths.
        tokens_per_batch: Tokens in an evaluation batch.

    Returns:
        One result per length, on every rank.
    """
    from pretrain.data.stream import open_stream
    from pretrain.evaluation.perplexity import Evaluator
    from pretrain.evaluation.windows import Protocol, ScoredText

    topology, chunks = tasks._build_model_with(config, state)
    evaluator = Evaluator(
        chunks,
        topology,
        ScoredText(open_stream(config, "validation"), config.evaluation.max_tokens),
        tokens_per_batch=tokens_per_batch,
        mask_id=config.mask_id,
    )
    return [evaluator.evaluate(Protocol("masked", length, length)) for length in lengths]


def train_on(config: RunConfig, text: Any) -> list[float]:
    """Train a model on the rows of a text from scratch, and return the loss of each step.

    Args:
        config: The run's config, for one process.
        text: Token ids, [rows, S]; the rows are used in their order, again and again.

    Returns:
        The losses in nats.
    """
    from pretrain.model.gpt import build_model
    from pretrain.optim.schedule import learning_rate
    from pretrain.optim.zero import ZeroOptimizer
    from pretrain.topology import initialize
    from pretrain.training.step import average_loss, forward_backward, masked_batches

    topology = initialize(config)
    chunks = build_model(config)
    optimizer = ZeroOptimizer(config, topology, chunks)
    size, losses = config.batch.global_batch_size, []
    rows = torch.nn.functional.pad(torch.from_numpy(text), (0, 1))
    for step in range(config.train.num_steps):
        at = torch.arange(step * size, (step + 1) * size) % len(rows)
        batches = masked_batches(config, topology, step * size, [rows[at]])
        kept = forward_backward(chunks, optimizer, batches)
        optimizer.step(learning_rate(config, step))
        losses.append(average_loss(kept, topology))
    return losses


def initial_weights(config: RunConfig) -> dict[str, Tensor]:
    """Return the weights that a new model starts with, full tensors by global name."""
    from pretrain.model.gpt import build_model
    from pretrain.topology import initialize

    topology = initialize(config)
    chunks = build_model(config)
    return tasks._assemble(chunks, lambda p: p, average_over=topology.layout.data)

"""Define the tasks of test_documents that worker processes run."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pretrain import platform
from pretrain.config import RunConfig
from tests.distributed import tasks


def packed(
    config: RunConfig, state: dict[str, Tensor], tokens: Tensor, eos_id: int | None
) -> dict[str, Any]:
    """Train on documents that share samples, as a step does up to the reduction of gradients.

    Args:
        config: The run's config; its layout must fit the number of ranks.
        state: Full fp32 weights by global name.
        tokens: Token ids of the global batch, [global batch, S + 1].
        eos_id: End-of-document token; None computes each sample as one text.

    Returns:
        {"data_rank"; "losses": of each token of this rank's samples, [B, S], on one rank of each
        data rank, else None; "gradients": full tensors by global name}.
    """
    from pretrain.model.forward import is_reporting_rank, run_schedule
    from pretrain.optim.buckets import finalize_gradients, gradient

    topology, chunks = tasks._build_model_with(config, state)
    batches = tasks._split_among_ranks(config, topology, tokens)
    losses = run_schedule(chunks, batches, _kept_whole, eos_id=eos_id)
    finalize_gradients(chunks)
    gradients = tasks._assemble(chunks, gradient, average_over=topology.layout.data)
    kept = torch.cat(losses) if is_reporting_rank() else None
    return {"data_rank": topology.data_rank, "losses": kept, "gradients": gradients}


def _kept_whole(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the mean to differentiate, the tokens' losses)."""
    return losses.float().mean(), losses.detach().clone()


def eos_id_in_a_step(config: RunConfig) -> list[int | None]:
    """Start a run on real data, take a step, and return the end-of-document token it was given."""
    from pretrain.training import loop
    from pretrain.training.reporter import AttemptReporter, Requests
    from pretrain.training.start import StartPoint, load_run, prepare

    def forward_backward(chunks: Any, optimizer: Any, batches: Any, eos_id: int | None) -> Any:
        seen.append(eos_id)
        return step(chunks, optimizer, batches, eos_id)

    seen: list[int | None] = []
    step = loop.forward_backward
    streams, topology, _ = prepare(config, "none")
    run = load_run(config, streams, topology, StartPoint(), Requests(), AttemptReporter())
    with patch.object(loop, "forward_backward", forward_backward):
        loop.queue_step(run, loop.step_batches(run), platform.Moment()).read()
    return seen


def refusal_without_mask(config: RunConfig) -> tuple[str | None, str | None]:
    """Return how `check_positions` refuses a model, and one whose layers lose the mask.

    The messages end before their numbers; None stands for no refusal.
    """
    from pretrain.config import RunFailed
    from pretrain.model import attention
    from pretrain.model.attention import check_positions
    from pretrain.model.gpt import build_model
    from pretrain.topology import initialize

    def refusal() -> str | None:
        try:
            check_positions(config, chunks)
        except RunFailed as error:
            return str(error).partition(" by ")[0]
        return None

    def without_mask(*qkv: Tensor, document_starts: Tensor, **arguments: Any) -> Tensor:
        return attend(*qkv, **arguments)

    initialize(config)
    chunks, attend = build_model(config), attention.attention
    with_mask = refusal()
    with patch.object(attention, "attention", without_mask):
        return with_mask, refusal()

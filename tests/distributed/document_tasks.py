"""Define the tasks of test_documents that worker processes run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    from pretrain.optim.gradients import finalize_gradients, gradient

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

"""Write a checkpoint from whole weights, in one process, as for an imported model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from pretrain.checkpoint.content import (
    MASTER,
    Origin,
    TrainerState,
    lineage_content,
    state_content,
)
from pretrain.checkpoint.index import Part, Piece
from pretrain.checkpoint.part import Values, write_part
from pretrain.checkpoint.publish import Publication, publish
from pretrain.checkpoint.tokenizer import put_tokenizer
from pretrain.config import RunConfig, dump_config, writing
from pretrain.data.tokenizers.base import Tokenizer
from pretrain.rundir.checkpoints import begin_partial, checkpoint_directory
from pretrain.rundir.lineage import new_id


def write_checkpoint(
    run: Path,
    config: RunConfig,
    masters: Mapping[str, torch.Tensor],
    trainer_state: TrainerState,
    origin: Origin,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write a checkpoint from whole weights, in this process alone. The moments are zero.

    Args:
        run: The run's directory.
        config: What is saved as the checkpoint's config.
        masters: Global name -> weights of every parameter.
        trainer_state: How far training has come.
        origin: Where the state comes from.
        tokenizer: The model's tokenizer, if it is known.

    Returns:
        The checkpoint's directory.

    Raises:
        RunFailed: The disk refused, or a weight is not finite.
    """
    final = checkpoint_directory(run, trainer_state.step)
    pieces = tuple(
        Piece(f"{kind}/{name}", tuple(whole.shape), (((0,) * whole.dim(), tuple(whole.shape)),))
        for name, whole in masters.items()
        for kind in (MASTER, *config.moments)
    )

    def values() -> Iterator[Values]:
        for master in masters.values():
            flat = master.detach().float().contiguous().view(-1).numpy()
            yield flat
            for _ in config.moments:
                yield np.zeros_like(flat)

    with writing(final):
        partial = begin_partial(run, trainer_state.step, None)
        put_tokenizer(tokenizer, partial)
        write_part(partial, Part(0, pieces), values())
        publish(
            Publication(
                partial=str(partial),
                final=str(final),
                attempt=None,
                keep=(None, None, 0),
                world_size=1,
                lineage=lineage_content(new_id(), trainer_state.step, origin),
                state=state_content(trainer_state, 0, None, origin),
                config=dump_config(config),
                tokenizer=tokenizer.file_name if tokenizer else None,
            )
        )
    return final

"""Models that predict masked tokens, against the dense reference with a symmetric bias in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.config import RunConfig
from pretrain.data.order import mask_samples, mask_text
from pretrain.data.stream import open_stream
from pretrain.evaluation.windows import Protocol
from pretrain.positions.base import METHODS
from tests.conftest import LAYOUTS, tiny_config
from tests.distributed import tasks
from tests.distributed.test_parallel_equals_dense import TOLERANCE, assert_close_by_name
from tests.reference.dense_gpt import DenseGPT, random_state

VARIANTS: dict[str, dict[str, Any]] = {
    "alibi-trainable": {"trainable_slopes": True, "slopes": {"first": 0.9, "last": 0.01}},
    "alibi-two": {"slopes": {"factor": 0.3, "by_head": True}, "slopes_right": {"factor": 3.0}},
    "alibi-two-trainable": {"trainable_slopes": True, "slopes_right": {"bias_max": 3}},
}
# A learned table is looked up alike with both objectives. Others are defined under a causal mask.
CAUSAL = ("learned", "xpos", "cope", "fire")
VARIANTS |= {method: {} for method in METHODS if method not in CAUSAL}
VARIANTS["windowed"] = {"window": 7}


def masked_config(method: str, parallel: dict[str, Any], **sections: Any) -> RunConfig:
    # A layer of each kind, and one in each of two chunks of two stages.
    layers = 4 if method == "hybrid" or "virtual_pipeline_model_parallel_size" in parallel else 2
    return tiny_config(
        position={"method": method.partition("-")[0], **VARIANTS[method]},
        parallel=parallel,
        model={"num_layers": layers},
        train={"objective": "masked"},
        **{"batch": {"micro_batch_size": 4}, **sections},
    )


# What differs with the objective is the bias of a rank's heads.
# test_parallel_equals_dense.py has each method on two stages.
STAGED = ("alibi-two-trainable", "hybrid")
CASES = [(method, "tp2pp2sp" if method in STAGED else "tp2") for method in VARIANTS]
CASES += [("alibi", "dp2"), ("alibi", "pp2vpp2")]


@pytest.mark.parametrize(("method", "layout"), CASES)
def test_loss_and_gradients_equal_the_dense_reference(pools, method, layout):
    """Loss and gradients of the chosen tokens, attention both ways, biases -slope |i - j|."""
    processes, parallel = LAYOUTS[layout]
    config = masked_config(method, parallel)
    state = random_state(config, seed=3)
    tokens = torch.randint(0, 512, (8, 33), generator=torch.Generator().manual_seed(5))
    labels = tokens[:, :-1]
    # Whatever the layout, the masks are those of the samples 40 to 47 of the run.
    inputs, chosen = mask_samples(
        labels.numpy(), range(40, 48), config.run.seed, config.data.vocab_size
    )
    dense = DenseGPT(config).load_global_state(state).double()
    loss = dense.masked_loss(torch.from_numpy(inputs), labels, torch.from_numpy(chosen))
    loss.backward()
    actual = pools(processes).run(masked_gradients, config, state, tokens, 40)[0]
    rows = len(actual["inputs"])
    assert torch.equal(actual["inputs"], torch.from_numpy(inputs)[:rows])
    assert torch.equal(actual["chosen"], torch.from_numpy(chosen)[:rows])
    assert actual["loss"] == pytest.approx(loss.item(), rel=1e-6)
    expected = {name: parameter.grad.float() for name, parameter in dense.named_parameters()}
    assert_close_by_name(actual["gradients"], expected, **TOLERANCE)


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2sp"])
def test_evaluation_scores_the_same_masked_tokens_at_every_length(pools, tiny_data, layout):
    processes, parallel = LAYOUTS[layout]
    data = {"directory": str(tiny_data)}
    config = masked_config("alibi", parallel, data=data, evaluation={"max_tokens": 300})
    state = random_state(config, seed=3)
    # 300 tokens are neither whole windows nor whole batches.
    protocols = [Protocol("masked", length, length) for length in (32, 128)]
    found = pools(processes).run(tasks.evaluate, config, state, protocols, 256)[0]
    ids = torch.from_numpy(open_stream(config, "validation").read(0, 300).astype(np.int64))
    inputs, chosen = map(torch.from_numpy, mask_text(ids.numpy(), 0, config.mask_id))
    assert chosen.sum() == 45
    dense = DenseGPT(config).load_global_state(state)
    for result, length in zip(found, (32, 128)):
        losses = torch.zeros(300)
        for start in range(0, 300, length):
            # The last window is whole too, and reads some tokens again.
            first = min(start, 300 - length)
            with torch.no_grad():
                logits = dense(inputs[None, first : first + length])[0]
            all_losses = torch.nn.functional.cross_entropy(
                logits, ids[first : first + length], reduction="none"
            )
            losses[start : start + length] = all_losses[start - first :]
        assert result.tokens == 45
        assert result.loss_nats == pytest.approx(losses[chosen].mean().item(), rel=1e-6)
        record = result.record()
        assert (record["protocol"], record["length"], record["stride"]) == ("masked", *2 * [length])
        assert record["bits_per_byte"] is None
        assert record["bytes"] is None
        assert result.by_block.counts.sum() == 45


def test_zero_and_a_restart_on_another_layout_go_on_with_the_same_masks(pools, tiny_data, tmp_path):
    """Samples of two ranks, gathered in other micro batches, have the masks that they had."""

    def losses(name: str, processes: int, until: int, **parallel: int) -> list[float]:
        config = masked_config(
            "alibi",
            parallel,
            data={"directory": str(tiny_data)},
            run={"directory": str(tmp_path / name)},
            batch={"micro_batch_size": 4 // processes},
        )
        return pools(processes).run(tasks.continue_run, config, "auto", until)[0]["losses"]

    whole = losses("whole", 1, 4)
    assert losses("parts", 2, 2, zero_stage=3) == pytest.approx(whole[:2], rel=2e-6)
    rest = losses("parts", 2, 4, pipeline_model_parallel_size=2)
    assert rest == pytest.approx(whole[2:], rel=1e-5)


# ---- tasks of the ranks --------------------------------------------------------------------------
def masked_gradients(
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
    full = tasks._assemble(chunks, gradient, average_over=topology.layout.replicas)
    if not topology.is_main:
        return None
    return {
        "loss": loss,
        "gradients": full,
        "inputs": torch.cat([batch.inputs for batch in batches]),
        "chosen": torch.cat([batch.chosen for batch in batches]),
    }

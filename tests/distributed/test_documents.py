"""Test data.per_document_attention: a packed sample is trained on as its documents alone would be.

The oracle knows nothing of documents: `tests.reference.dense_gpt` is run on each document by
itself, and the losses are averaged. Every position method, in every kind of layout, must give the
same losses and gradients.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain import platform
from pretrain.config import RunConfig, RunFailed
from pretrain.data.shards import MODEL
from pretrain.data.tokenizer import load_tokenizer
from pretrain.topology import initialize
from tests.conftest import ALL_LAYOUTS, tiny_config
from tests.distributed import tasks
from tests.distributed.test_parallel_equals_dense import (
    TOLERANCE,
    VARIANTS,
    assert_close_by_name,
)
from tests.reference.dense_gpt import DenseGPT, random_state

EOS = 2
# Where documents end in the 33 tokens of each sample: nowhere, at either end, two in a row.
ENDS = [[], [0], [31], [32], [9, 20], [4, 5, 6], [0, 1, 15, 31, 32], [16]]


# For Triton's interpreter.
SMALL = {"model": {"num_layers": 1, "num_attention_heads": 2}}


def sample_tokens() -> Tensor:
    """Return token ids [8, 33] in which EOS stands where ENDS says, and nowhere else."""
    tokens = torch.randint(3, 512, (8, 33), generator=torch.Generator().manual_seed(5))
    for row, ends in zip(tokens, ENDS, strict=True):
        row[ends] = EOS
    return tokens


def config_of(variant: str, parallel: dict, **sections: dict) -> RunConfig:
    """Return the config of a variant of test_parallel_equals_dense, with the key set."""
    settings = SMALL if variant.endswith("small") else VARIANTS[variant]
    for name, keys in settings.items():
        sections[name] = {**keys, **sections.get(name, {})}
    sections.setdefault("position", {})["method"] = variant.split("-")[0]
    return tiny_config(parallel=parallel, data={"per_document_attention": True}, **sections)


@functools.cache
def alone(variant: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Return (weights, losses [8, 32], gradients) of each document run by itself."""
    config = config_of(variant, {})
    state = random_state(config, seed=3)
    model = DenseGPT(config).load_global_state(state)
    rows = []
    for tokens, ends in zip(sample_tokens(), ENDS, strict=True):
        bounds = sorted({0, 32, *(end + 1 for end in ends if end < 32)})
        parts = []
        for first, stop in itertools.pairwise(bounds):
            logits = model(tokens[None, first:stop])[0]
            # The end of a document predicts the first token of the next one.
            parts.append(F.cross_entropy(logits, tokens[first + 1 : stop + 1], reduction="none"))
        rows.append(torch.cat(parts))
    losses = torch.stack(rows)
    losses.mean().backward()
    return state, losses.detach(), {name: p.grad for name, p in model.named_parameters()}


# Where the heads of a method differ, on two ranks; else they are alike, and one rank has them.
CASES = [(method, "tp2") for method in ("alibi", "alibi-trainable", "t5")]
CASES += [(method, "one") for method in ("sinusoidal", "rotary", "learned", "none")]
CASES += [
    ("t5", "pp2"),
    ("alibi", "pp2vpp2"),
    ("alibi", "tp2pp2sp"),
    ("learned", "tp2pp2sp"),
    ("alibi", "dp2"),
    ("t5", "cp4"),
    ("rotary", "tp2cp2sp"),
]


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_packed_documents_give_what_each_gives_alone(pools, variant, layout):
    processes, parallel = ALL_LAYOUTS[layout]
    assert_as_alone(pools(processes), variant, config_of(variant, parallel))


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputation_hides_the_same_keys(pools, granularity):
    config = config_of("alibi", {}, train={"recompute_granularity": granularity})
    assert_as_alone(pools(1), "alibi", config)


def test_the_triton_kernel_parts_documents_in_the_model(pools):
    config = config_of("alibi-small", {}, model={"attention_backend": "triton"})
    assert_as_alone(pools(1), "alibi-small", config)


# By distance and by place; how else methods differ is no matter of the samples.
@pytest.mark.parametrize("variant", ["alibi", "sinusoidal"])
def test_the_comparison_would_notice_samples_as_one_text(pools, variant):
    """Without the key, losses differ by far more than the tolerance after the first document."""
    state, losses, _ = alone(variant)
    result = pools(1).run(packed, config_of(variant, {}), state, sample_tokens(), None)[0]
    difference = (result["losses"] - losses).abs()
    # The first three samples and the last token's row have no border within their inputs, or none
    # that a prediction stands behind.
    assert difference[0].max() < 1e-4
    assert difference[4:].max() > 100 * TOLERANCE["atol"]


def assert_as_alone(pool, variant: str, config: RunConfig) -> None:
    """Compare a packed step on a pool of processes with `alone`."""
    state, losses, gradients = alone(variant)
    results = pool.run(packed, config, state, sample_tokens(), EOS)
    parts = {r["place"]: r["losses"] for r in results if r["losses"] is not None}
    rows = [[parts[place] for place in sorted(parts) if place[0] == row] for row in range(2)]
    found = torch.cat([torch.cat(row, dim=1) for row in rows if row])
    torch.testing.assert_close(found, losses, **TOLERANCE)
    assert_close_by_name(results[0]["gradients"], gradients, **TOLERANCE)


@pytest.mark.parametrize("parted", [True, False])
def test_a_run_parts_documents_at_its_tokenizers_end_token(pools, tiny_data, tmp_path, parted):
    data = {"directory": str(tiny_data), "per_document_attention": parted}
    config = tiny_config(run={"directory": str(tmp_path)}, data=data)
    eos_id = load_tokenizer(tiny_data / MODEL).eos_id
    assert pools(1).run(eos_id_in_a_step, config)[0] == ([eos_id] if parted else [None])


def test_a_run_whose_attention_ignores_the_documents_is_not_started(pools):
    """The check at the start of every run compares attention with two documents, too."""
    config = config_of("alibi", {})
    assert pools(1).run(refusal_without_mask, config)[0] == (
        None,
        "position.method = alibi: attention differs from the dense reference",
    )


# ---- tasks of the ranks --------------------------------------------------------------------------
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
        {"place": data and context rank; "losses": of each token of this rank's part, [B, S], on
        one rank of each place, else None; "gradients": full tensors by global name}.
    """
    from pretrain.model.forward import is_reporting_rank, run_schedule
    from pretrain.optim.buckets import finalize_gradients, gradient

    topology, chunks = tasks._build_model_with(config, state)
    batches = tasks._split_among_ranks(config, topology, tokens)
    losses = run_schedule(chunks, batches, _kept_whole, eos_id=eos_id)
    finalize_gradients(chunks)
    gradients = tasks._assemble(chunks, gradient, average_over=topology.layout.replicas)
    kept = torch.cat(losses) if is_reporting_rank() else None
    place = topology.data_rank, topology.context_rank
    return {"place": place, "losses": kept, "gradients": gradients}


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
    from pretrain.model import attention
    from pretrain.model.attention import check_positions
    from pretrain.model.gpt import build_model

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

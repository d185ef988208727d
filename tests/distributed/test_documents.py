"""Test data.per_document_attention: a packed sample is trained on as its documents alone would be.

The oracle knows nothing of documents: `tests.reference.dense_gpt` is run on each document by
itself, and the losses are averaged. Every position method, in every kind of layout, must give the
same losses and gradients.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import RunConfig
from pretrain.data.manifest import TOKENIZER
from pretrain.data.tokenizer import load_tokenizer
from tests.conftest import LAYOUTS, mark_torture, tiny_config
from tests.distributed import document_tasks
from tests.distributed.test_parallel_equals_dense import TOLERANCE, VARIANTS
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


METHODS = ["alibi", "alibi-trainable", "sinusoidal", "rotary", "t5", "learned", "none"]
ALL = {"tp1": (1, {}), **LAYOUTS}
CASES = [(variant, layout) for variant in [*METHODS, "alibi-grouped"] for layout in ALL]
CORE = {(variant, layout) for variant in METHODS for layout in ("tp1", "tp2", "pp2")}
CORE |= {("alibi", "pp2vpp2"), ("alibi", "tp2pp2sp"), ("learned", "tp2pp2sp"), ("alibi", "dp2")}


@pytest.mark.parametrize(("variant", "layout"), mark_torture(CASES, CORE))
def test_packed_documents_give_what_each_gives_alone(pools, variant, layout):
    processes, parallel = ALL[layout]
    assert_as_alone(pools(processes), variant, config_of(variant, parallel))


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputation_hides_the_same_keys(pools, granularity):
    config = config_of("alibi", {}, train={"recompute_granularity": granularity})
    assert_as_alone(pools(1), "alibi", config)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_other_backends_part_documents_in_the_model(pools, backend):
    config = config_of("alibi-small", {}, model={"attention_backend": backend})
    assert_as_alone(pools(1), "alibi-small", config)


@pytest.mark.parametrize("variant", METHODS)
def test_the_comparison_would_notice_samples_as_one_text(pools, variant):
    """Without the key, losses differ by far more than the tolerance after the first document."""
    state, losses, _ = alone(variant)
    config = config_of(variant, {})
    result = pools(1).run(document_tasks.packed, config, state, sample_tokens(), None)[0]
    difference = (result["losses"] - losses).abs()
    # The first three samples and the last token's row have no border within their inputs, or none
    # that a prediction stands behind.
    assert difference[0].max() < 1e-4
    assert difference[4:].max() > 100 * TOLERANCE["atol"]


def assert_as_alone(pool, variant: str, config: RunConfig) -> None:
    """Compare a packed step on a pool of processes with `alone`."""
    state, losses, gradients = alone(variant)
    results = pool.run(document_tasks.packed, config, state, sample_tokens(), EOS)
    rows = {r["data_rank"]: r["losses"] for r in results if r["losses"] is not None}
    packed = torch.cat([rows[data_rank] for data_rank in sorted(rows)])
    torch.testing.assert_close(packed, losses, **TOLERANCE)
    actual = results[0]["gradients"]
    assert actual.keys() == gradients.keys()
    for name, expected in gradients.items():
        torch.testing.assert_close(
            actual[name], expected, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("parted", [True, False])
def test_a_run_parts_documents_at_its_tokenizers_end_token(pools, tiny_data, tmp_path, parted):
    data = {"directory": str(tiny_data), "per_document_attention": parted}
    config = tiny_config(run={"directory": str(tmp_path)}, data=data)
    eos_id = load_tokenizer(tiny_data / TOKENIZER).eos_id
    expected = [eos_id] if parted else [None]
    assert pools(1).run(document_tasks.eos_id_in_a_step, config)[0] == expected


def test_a_run_whose_attention_ignores_the_documents_is_not_started(pools):
    """The check at the start of every run compares attention with two documents, too."""
    config = config_of("alibi", {})
    assert pools(1).run(document_tasks.refusal_without_mask, config)[0] == (
        None,
        "position.method = alibi: attention differs from the dense reference",
    )

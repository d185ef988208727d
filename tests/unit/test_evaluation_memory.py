"""Lengths that memory cannot carry are refused beforehand, with the numbers."""

from __future__ import annotations

import pytest

from pretrain.config import load_config
from pretrain.evaluation.perplexity import forward_bytes
from pretrain.platform import _cgroup_memory
from tests.changed import ROOT

DEMO = ROOT / "configs/demo.toml"


def needed(length: int, *overrides: str) -> int:
    config = load_config(DEMO, overrides)
    return forward_bytes(config, config.layout(1), length)


def test_the_estimate_grows_with_what_takes_the_memory():
    # Measured on a CPU beside what the process takes without a forward pass: 381 and 683 MiB.
    assert 381 < needed(16_384) / 2**20 < 1.3 * 381
    assert 683 < needed(32_768) / 2**20 < 1.3 * 683
    # Shorter windows go together in one batch, which takes the same.
    assert needed(128) == needed(2048) == needed(8192)
    assert needed(2048, "evaluation.tokens_per_batch=2048") < needed(2048) / 2


def test_an_adaptive_softmax_takes_the_memory_of_its_head():
    words = ["data.vocab_size=200_000", "model.make_vocab_size_divisible_by=8"]
    plain = needed(1024, *words)
    adaptive = needed(1024, *words, "model.adaptive_cutoffs=[20_000]")
    # A tenth of the logits, beside what does not depend on them.
    assert plain / 20 < adaptive < plain / 5
    # The probabilities of all words, in fp32.
    assert needed(1024, *words, "model.adaptive_cutoffs=[20_000]", "train.fusion=off") > plain


@pytest.mark.parametrize(("own", "expected"), [("/job/step", [700, 950]), ("/", [])])
def test_every_cgroup_on_the_way_up_counts(tmp_path, own, expected):
    """As of a Slurm job: the step may take less than the job, and files in cache are not lost."""
    step = tmp_path / "job/step"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("1000\n")
    (step / "memory.current").write_text("500\n")
    (step / "memory.stat").write_text("anon 300\ninactive_file 150\nactive_file 50\n")
    (step.parent / "memory.max").write_text("1500\n")
    (step.parent / "memory.current").write_text("550\n")
    (step.parent / "memory.stat").write_text("anon 550\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_memory(tmp_path, own) == expected

"""Test the model of a training step against closed forms, and its page against the model."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.step_model.__main__ import updated
from benchmarks.step_model.tables import CONFIG
from pretrain.config import load_config, num_parameters
from pretrain.model.flops import flops_per_token
from pretrain.plan.hardware import EDR, FAST, H200, INPUTS, V100, Network
from pretrain.plan.timing import REDUCTIONS, Step

PAGE = Path(__file__).parents[2] / "docs/performance.md"
PERFECT = replace(
    H200,
    gemm_fraction=1.0,
    multiprocessors=1,
    tile=(1, 1),
    tile_overhead=0,
    memory_tb_per_second=1e9,
    attention_tflops={s: (H200.peak_tflops, H200.peak_tflops) for s in ("before", "after")},
    launch_gap_us=0.0,
    host_us=0.0,
)
"""A device that does its operations at the peak and everything else at no cost."""


def step(**changes):
    return replace(Step(load_config(CONFIG), H200, 2**14, 2**13), **changes)


def test_the_page_shows_what_the_model_computes():
    page = PAGE.read_text()
    assert updated(page) == page, (
        "run: python -m benchmarks.step_model --update docs/performance.md"
    )


@pytest.mark.parametrize("state", ["before", "after"])
def test_a_perfect_device_needs_the_time_of_its_operations(state):
    lines = step(device=PERFECT, state=state).compute_lines()
    config = load_config(CONFIG)
    linear = flops_per_token(config, 0, causal=True)
    assert lines["matrix products"] == pytest.approx(2**14 * linear / H200.peak_tflops / 1e9)
    # The convention of MFU counts two products forward and four backward, the kernel computes five.
    attention = (flops_per_token(config, 1024, causal=True) - linear) * 7 / 6
    assert lines["attention"] == pytest.approx(2**14 * attention / H200.peak_tflops / 1e9)
    assert sum(lines.values()) == pytest.approx(lines["matrix products"] + lines["attention"])


def test_tiles_that_fill_the_device_once_waste_nothing_and_one_more_costs_a_wave():
    rows, columns = H200.tile
    one = replace(H200, gemm_fraction=1.0, tile_overhead=0)
    full = one.gemm_ms(rows * H200.multiprocessors, 1000, columns)
    flops = 2 * rows * H200.multiprocessors * 1000 * columns
    assert full == pytest.approx(flops / H200.peak_tflops / 1e9)
    assert one.gemm_ms(rows * H200.multiprocessors + 1, 1000, columns) == pytest.approx(2 * full)


def test_the_large_product_is_within_what_was_measured():
    rate = 2 * 8192**3 / H200.gemm_ms(8192, 8192, 8192) / 1e9
    assert 769 <= rate <= 798


def test_a_ring_sends_all_but_one_part():
    ideal = Network("ideal", 100.0, 1.0, between_nodes_us=0.0, within_node_us=0.0)
    assert ideal.ring_ms(100e9, 8) == pytest.approx(1e3 * 7 / 8)
    assert ideal.ring_ms(100e9, 128) == pytest.approx(1e3 * 127 / 128)
    assert ideal.ring_ms(100e9, 1) == 0
    # 16 steps to another node and 111 within one, for each of three collectives.
    assert FAST.ring_ms(0, 128, collectives=3) == pytest.approx(3 * (16 * 7 + 111 * 1.5) / 1e3)


def test_before_nothing_is_hidden():
    """DeepSpeed's own step reduces 2.72 GB twice and gathers 2.72 GB, after the backward pass."""
    run = step(state="before", ranks=128, network=EDR, reduction="ring, 16 bit")
    lines = run.communication_lines()
    size = 2 * num_parameters(load_config(CONFIG))
    assert size == pytest.approx(2.72e9, rel=2e-3)
    exposed = 3 * EDR.ring_ms(size, 128, collectives=3)
    assert sum(lines.values()) == pytest.approx(exposed)


@pytest.mark.parametrize("network", [FAST, EDR])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_is_hidden_fits_behind_the_pass_that_hides_it(network, reduction):
    after = step(ranks=128, network=network, reduction=reduction)
    lines = after.communication_lines()
    forward, backward = after.passes_ms()
    tail = INPUTS["part of all bytes in the bucket that is last to reduce"].after
    gather = network.ring_ms(2 * after.parameters, 128, 40)
    for line, whole, window in (
        ("reduction of gradients, exposed", after.reduction_ms(), backward),
        ("gather of weights, exposed", gather, forward),
    ):
        assert tail * whole <= lines[line] <= whole
        assert whole - lines[line] <= window


def test_the_last_bucket_is_the_tied_embedding():
    config = load_config(CONFIG)
    embedding = config.padded_vocab_size * config.model.hidden_size
    tail = INPUTS["part of all bytes in the bucket that is last to reduce"].after
    assert tail == pytest.approx(embedding / num_parameters(config), rel=1e-2)


def test_bytes_between_nodes_are_those_of_a_simulated_exchange():
    """Count what leaves a node, for two nodes of eight ranks that own one element each."""
    ideal = Network("ideal", 1.0, 1.0, between_nodes_us=0.0, within_node_us=0.0)
    ranks, elements = 16, 16
    crossing = [(a, b) for a in range(8) for b in range(8, ranks)]
    # All-to-all: every rank of a node sends one unsummed element to every rank of the other.
    sent = 2 * len(crossing)
    assert ideal.all_to_all_ms(2 * elements, ranks) == pytest.approx(1e3 * sent / 1e9)
    # Two stages: each rank has the node's sums of two elements, and one of them leaves.
    assert ideal.all_to_all_ms(2 * elements / 8, ranks) == pytest.approx(1e3 * 2 * 8 / 1e9)
    # A ring crosses the border between the nodes once in each of its 15 steps.
    assert ideal.ring_ms(4 * elements, ranks) == pytest.approx(1e3 * 4 * 15 / 1e9)


def test_passes_add_up_to_the_compute_of_a_micro_batch():
    one = step()
    whole = sum(one.compute_lines().values())
    assert one.num_micro_batches * sum(one.passes_ms()) == pytest.approx(whole)


def test_a_slow_host_sets_the_pace():
    slow = replace(H200, host_us=200.0)
    lines = step(device=slow).compute_lines()
    launches = 25 * INPUTS["kernel launches per layer, forward and backward"].after
    assert lines["waiting for the host"] > 0
    assert sum(lines.values()) == pytest.approx(2 * launches * slow.host_us / 1e3)


def test_ways_to_reduce_differ_in_the_reduction_alone():
    ways = [step(ranks=128, network=EDR, reduction=way).lines() for way in REDUCTIONS]
    differing = {name for name in ways[0] if len({lines[name] for lines in ways}) > 1}
    assert differing == {
        "reduction of gradients, exposed",
        "compute slowed by hidden communication",
    }


def test_a_v100_accumulated_in_fp16_before():
    line = "gradient accumulation"
    before, after = (
        step(device=V100, micro_batch_tokens=2048, state=state).compute_lines()[line]
        for state in ("before", "after")
    )
    # Seven additions of 6 bytes, against a copy of 6 and seven additions of 10.
    assert before / after == pytest.approx(7 * 6 / (6 + 7 * 10))

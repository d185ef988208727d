"""Test the model of a training step against closed forms, and its page against the model."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published_steps
from pretrain.config import load_config
from pretrain.model import flops_per_token
from pretrain.plan.command import read_target
from pretrain.plan.memory import stages_of
from pretrain.plan.timing import (
    GATHER,
    H100,
    H200,
    HOST,
    LARGE_PRODUCT,
    PARTS,
    REDUCTION,
    Inputs,
    Network,
    Step,
    Target,
    Timing,
    time_of_step,
)

PAGE = Path(__file__).parents[2] / "docs/performance.md"
CONFIG = Path(__file__).parents[2] / "configs/cc100_roberta/alibi_1024.toml"
FAST = Network(3200)
PERFECT = replace(
    H200,
    gemm_fraction=1.0,
    multiprocessors=1,
    tile=(1, 1),
    tile_overhead=0,
    memory_tb_per_second=1e9,
    attention_tflops=(H200.peak_tflops, H200.peak_tflops),
    launch_gap_us=0.0,
    host_us=0.0,
)
"""A device that does its operations at the peak and everything else at no cost."""
ON_H200 = ["train.precision=bf16", "batch.micro_batch_size=8"]


def step(gpus=1, device=H200, network=FAST, *settings):
    """The step of one rank with 16,384 tokens, in two micro batches."""
    batch = [f"parallel.world_size={gpus}", f"batch.global_batch_size={16 * gpus}"]
    config = load_config(CONFIG, [*ON_H200, *batch, *settings])
    layout = config.layout(gpus)
    [stage] = stages_of(config, layout)
    return Step(config, layout, stage, Target(gpus, device, network))


def test_the_page_shows_what_the_model_computes():
    """Every line of the table, in the order and rounding of the page."""
    cases = [
        (1, "h100", None, [*ON_H200, "batch.global_batch_size=16"]),
        (1, "h200", None, [*ON_H200, "batch.global_batch_size=64"]),
        (128, "h200", 3200, ON_H200),
        (128, "h200", 400, ON_H200),
        (128, "h200", 400, [*ON_H200, "parallel.gradient_reduce_dtype=bf16"]),
        (128, "v100-32", 400, []),
    ]
    columns: list[tuple[Timing, list[float]]] = []
    for gpus, gpu_type, network, settings in cases:
        config = load_config(CONFIG, [f"parallel.world_size={gpus}", *settings])
        layout, target = config.layout(gpus), read_target(gpus, gpu_type, network)
        timing = time_of_step(config, layout, stages_of(config, layout), target)
        columns.append((timing, [timing.mfu(config, target.device, c) for c in (False, True)]))
    names = dict.fromkeys(name for timing, _ in columns for name in timing.lines)
    rows = [[name, *(f"{t.lines.get(name, 0):.1f}" for t, _ in columns)] for name in names]
    rows.append(["**step, ms**", *(f"**{timing.milliseconds:.1f}**" for timing, _ in columns)])
    for number, title in enumerate(("MFU, all of attention", "MFU, causal half")):
        rows.append([title, *(f"{mfu[number]:.1%}" for _, mfu in columns)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    assert table in PAGE.read_text(), f"put this into {PAGE}:\n{table}"


def test_an_h100_computes_as_long_as_was_measured():
    """In ms: two lines of the step in benchmarks/results/gpu_day_h100.md."""
    lines = step(device=H100).compute_lines
    shown = lines["matrix products"], lines["attention"]
    assert shown == pytest.approx((181.3, 27.75), rel=0.01)


def test_a_perfect_device_needs_the_time_of_its_operations():
    lines, config = step(device=PERFECT).compute_lines, load_config(CONFIG)
    linear = flops_per_token(config, 0, causal=True)
    assert lines["matrix products"] == pytest.approx(2**14 * linear / H200.peak_tflops / 1e9)
    # The convention of MFU counts two products forward and four backward, the kernel computes five.
    attention = (flops_per_token(config, 1024, causal=True) - linear) * 7 / 6
    assert lines["attention"] == pytest.approx(2**14 * attention / H200.peak_tflops / 1e9)
    assert sum(lines.values()) == pytest.approx(lines["matrix products"] + lines["attention"])


def test_products_of_8_bits_take_half_the_time_of_two_in_three():
    """But those of the output layer. Casts of a weight move 5 bytes, and 7 when transposed."""
    device = replace(PERFECT, memory_tb_per_second=4.0)
    plain, eight = (
        step(1, device, FAST, "train.fusion=layers", f"train.fp8={on}") for on in ("false", "true")
    )
    weights, tokens = 25 * 12 * 2048**2, 8 * 1024
    products, casts = 2 * tokens * weights / H200.peak_tflops / 1e9, 12 * weights / 4e9
    assert sum(plain.gemm_ms) - sum(eight.gemm_ms) == pytest.approx(products - casts)
    # Of width d 16 numbers are cast: the inputs of four products, and gradients of their outputs.
    moved = [each.elements(each.config.position) for each in (plain, eight)]
    assert moved[1] - moved[0] == pytest.approx(16 * 5 / 2)


def seen_pairs(length, near):
    """Pairs of query and key at a distance below `near`, counted query by query."""
    return sum(min(i, near) for i in range(1, length + 1))


@pytest.mark.parametrize("method", ["alibi", "rotary"])
def test_attention_beyond_the_reach_of_a_head_costs_nothing(method):
    """Per token it is that of every head's own window, and constant at length; else it doubles."""
    slopes = [2.0 ** (-(h + 1) / 2) for h in range(16)] if method == "alibi" else [0.0] * 16
    per_token = {}
    for length, ranks in ((2048, 1), (2**16, 1), (2**17, 1), (2**16, 2)):
        settings = [f"data.sequence_length={length}", f"position.method={method}"]
        settings.append(f"parallel.tensor_model_parallel_size={ranks}")
        of = step(ranks, PERFECT, FAST, *settings, "batch.micro_batch_size=1")
        # The last heads see farthest, and the others' ranks wait for theirs.
        windows = [round(max(32 / s, 1024)) if s else length for s in slopes[16 - 16 // ranks :]]
        pairs = sum(seen_pairs(length, near) for near in windows) / length
        # Seven products of 128 channels, of which a multiply-add counts as two operations.
        flops = 7 * 2 * 128 * pairs * 25 * of.config.tokens_per_step
        found = of.compute_lines["attention"]
        assert found == pytest.approx(flops / H200.peak_tflops / 1e9, rel=1e-3)
        per_token[length, ranks] = found / of.config.tokens_per_step
    grown = per_token[2**17, 1] / per_token[2**16, 1]
    assert grown < 1.05 if method == "alibi" else grown == pytest.approx(2)


@pytest.mark.parametrize("method", ["alibi", "rotary"])
def test_context_ranks_wait_for_the_last_part_which_receives_the_keys_that_its_heads_see(method):
    length, parts = 2**15, 8
    begin = length - length // parts
    settings = [f"data.sequence_length={length}", f"position.method={method}"]
    of = step(8, PERFECT, FAST, *settings, f"parallel.context_parallel_size={parts}")
    slopes = [2.0 ** (-(h + 1) / 2) if method == "alibi" else 0.0 for h in range(16)]
    windows = [round(max(32 / slope, 1024)) if slope else length for slope in slopes]
    pairs = sum(seen_pairs(length, near) - seen_pairs(begin, near) for near in windows)
    flops = 7 * 2 * 128 * pairs * 25 * of.config.batch.global_batch_size
    found = of.compute_lines["attention"]
    assert found == pytest.approx(flops / H200.peak_tflops / 1e9, rel=1e-3)
    keys = sum(min(near, begin) for near in windows)
    # Keys and values of 128 channels in bf16, and their gradients back, in every layer.
    sent = 2 * 2 * 2 * 128 * keys * 25 * of.config.batch.global_batch_size
    expected = sent / H200.nvlink_gb_per_second / 1e6
    latency = 2 * 25 * of.layout.num_microbatches * (parts - 1) * FAST.within_node_us / 1e3
    found = of.model_parallel_lines()["exchange of keys and values"]
    assert found - latency == pytest.approx(expected, rel=1e-3)


def test_tiles_that_fill_the_device_once_waste_nothing_and_one_more_costs_a_wave():
    rows, columns = H200.tile
    one = replace(H200, gemm_fraction=1.0, tile_overhead=0)
    full = one.gemm_ms(rows * H200.multiprocessors, 1000, columns)
    flops = 2 * rows * H200.multiprocessors * 1000 * columns
    assert full == pytest.approx(flops / H200.peak_tflops / 1e9)
    assert one.gemm_ms(rows * H200.multiprocessors + 1, 1000, columns) == pytest.approx(2 * full)
    # Within what was measured of a large product alone, 769 to 798 TFLOP/s.
    alone = replace(H200, gemm_fraction=LARGE_PRODUCT)
    assert 769 <= 2 * 8192**3 / alone.gemm_ms(8192, 8192, 8192) / 1e9 <= 798


def test_bytes_between_nodes_are_those_of_a_simulated_exchange():
    """Count what leaves a node, for two nodes of eight ranks that own one element each."""
    ideal = Target(16, H200, Network(8, 1.0, between_nodes_us=0.0, within_node_us=0.0))
    ranks, elements = 16, 16
    crossing = [(a, b) for a in range(8) for b in range(8, ranks)]
    # Two stages: each rank has its node's sums of two elements, and sends one of them in 16 bit.
    sent = 2 * len(crossing) / 8
    assert ideal.ring_ms(2 * elements / 8, 2, groups=8) == pytest.approx(1e3 * sent / 1e9)
    # A ring crosses the border between the nodes once in each of its 15 steps.
    assert ideal.ring_ms(4 * elements, ranks) == pytest.approx(1e3 * 4 * 15 / 1e9)


HANGS = (PARTS["GEMM"], PARTS["attention"], (*PARTS["elementwise"], "optimizer"), ())
"""The lines that each speed divides alone; of the network's a part is hidden."""


@pytest.mark.parametrize(("speed", "doubled"), zip(Inputs._fields, HANGS))
def test_a_speed_that_is_halved_doubles_the_time_that_hangs_on_it(speed, doubled):
    """Slower compute hides more communication; of a slower network all that is added shows."""
    of = step(128, H200, Network(100, between_nodes_us=0.0, within_node_us=0.0))
    slow = of.target.moved(Inputs(**{speed: 0.5}))
    stated, found = (each.lines() for each in (of, Step(of.config, of.layout, of.stage, slow)))
    for line in {*stated} - {"gaps between kernels", HOST, *PARTS["communication"]}:
        assert found[line] == pytest.approx((1 + (line in doubled)) * stated[line])
    before, after = (each[REDUCTION] + each[GATHER] for each in (stated, found))
    assert after > 2 * before if speed == "network" else after <= before


def test_the_speeds_are_those_that_published_training_is_fitted_by():
    """And the page says how far the model is from the rows that were left out."""
    page = " ".join(PAGE.read_text().split())
    found = list(published_steps.rows())
    for device in {row.target.device for row in found}:
        fitted, held_out = (
            [r for r in found if r.target.device == device and r.is_fitted == is_fitted]
            for is_fitted in (True, False)
        )
        fraction, backward = published_steps.fit(fitted)
        assert device.gemm_fraction == pytest.approx(fraction, abs=0.006)
        assert device.attention_tflops[1] == pytest.approx(backward, abs=1)
        for rows in (fitted, held_out):
            mean, root, largest = published_steps.summary(rows)
            numbers = f"{len(rows)} rows, mean {mean:+.1%}, rms {root:.1%}, largest {largest:+.1%}"
            assert numbers in page, f"{device.name}: put this into {PAGE}:\n{numbers}"
    within = [row.is_within for row in found if not row.is_fitted]
    sentence = f"{sum(within)} of the {len(within)} rows that were left out"
    assert sentence in page, f"put this into {PAGE}: {sentence}"

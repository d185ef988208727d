"""The tables of docs/performance.md, computed from the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.step_model.inputs import COUNTED
from pretrain.config import RunConfig, load_config, num_parameters
from pretrain.model.flops import flops_per_token, num_matmul_parameters
from pretrain.plan.hardware import (
    EDR,
    ELEMENTWISE,
    FAST,
    H200,
    INPUTS,
    SLOW,
    TITLES,
    V100,
    Device,
    Network,
)
from pretrain.plan.timing import Step

CONFIG = Path(__file__).parents[2] / "configs/cc100_roberta/alibi_1024.toml"
RANKS, TOKENS = 128, 2**21
"""The published run: 128 GPUs, and 2.1M tokens a step, hence 16,384 tokens a GPU."""
H200_SEQUENCES = 8
"""Sequences in a micro batch on an H200. A V100 takes what the config says."""
NETWORKS = (FAST, SLOW, EDR)


def tables() -> dict[str, str]:
    """Return every table of the page, as Markdown, by its name there."""
    config = load_config(CONFIG)
    return {
        "model": _model(config),
        "devices": _devices(),
        "networks": _networks(),
        "elementwise": _elementwise(config),
        "inputs": _inputs(),
        "counted": _counted(),
        "one-h200": _one_h200(config),
        "bytes": _bytes(config),
        **{f"128-h200-{slug}": _many(config, H200, network) for slug, network in SLUGS.items()},
        "128-v100": _many(config, V100, EDR),
        "mfu": _mfu(config),
        "sensitivity": _sensitivity(config),
        "hierarchical": _hierarchical(config),
    }


SLUGS = {"8x400": FAST, "8x100": SLOW, "4xedr": EDR}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. A column that holds nothing but numbers is aligned to the right."""
    columns = list(zip(*rows))
    numbers = [all(re.fullmatch(r"[*\d.,%]*", cell) for cell in column) for column in columns]
    rule = ["---:" if number else "---" for number in numbers]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def _model(config: RunConfig) -> str:
    m, length = config.model, config.data.sequence_length
    flops = [flops_per_token(config, length, causal=causal) for causal in (False, True)]
    return table(
        ["quantity", "value"],
        [
            [
                "layers n, width d, FFN, heads, length L",
                f"{m.num_layers}, {m.hidden_size}, "
                f"{config.ffn_hidden_size}, {m.num_attention_heads}, {length}",
            ],
            ["vocabulary, padded", f"{config.padded_vocab_size:,}"],
            ["parameters", f"{num_parameters(config):,}"],
            ["weights in matrix products, N", f"{num_matmul_parameters(config):,}"],
            ["FLOPs a token, 6 N + 12 n d L", f"{flops[0] / 1e9:.3f} G"],
            ["FLOPs a token, 6 N + 6 n d L (causal)", f"{flops[1] / 1e9:.3f} G"],
        ],
    )


def _devices() -> str:

    def cells(device: Device, name: str) -> list[str]:
        value = getattr(device, name)
        if name == "attention_tflops":
            value = "; ".join(f"{state} {f:g}, {b:g}" for state, (f, b) in value.items())
        elif name == "tile":
            value = f"{value[0]} x {value[1]}"
        return [str(value), device.origins[name]]

    rows = [[title, *cells(H200, name), *cells(V100, name)] for name, title in TITLES.items()]
    return table(["device", H200.name, "origin", V100.name, "origin"], rows)


def _networks() -> str:
    rows = [
        [
            n.name,
            f"{n.node_gb_per_second:g}",
            f"{n.efficiency:.2f}",
            f"{n.between_nodes_us:g}",
            f"{n.within_node_us:g}",
        ]
        for n in NETWORKS
    ]
    header = [
        "links of a node",
        "GB/s each way",
        "achieved part",
        "ring step between nodes, us",
        "ring step within a node, us",
    ]
    return table(header, rows)


def _elementwise(config: RunConfig) -> str:
    """Return the elements that a layer moves per token: before, after, and after on a V100."""

    def cells(*elements: float) -> list[str]:
        kilobytes = (2 * each * config.model.hidden_size / 1e3 for each in elements)
        return [*(f"{each:g}" for each in elements), *(f"{each:.1f}" for each in kilobytes)]

    columns = [
        [row.of(state, is_v100) for row in ELEMENTWISE.values()] for state, is_v100 in COLUMNS
    ]
    rows = [
        [name, *cells(*values), row.origin]
        for (name, row), values in zip(ELEMENTWISE.items(), zip(*columns))
    ]
    rows.append(["sum", *cells(*map(sum, columns)), ""])
    names = ["before", "after", "after, V100"]
    header = ["per layer and token", f"elements of d, {names[0]}", *names[1:]]
    return table([*header, f"kB, {names[0]}", *names[1:], "origin"], rows)


COLUMNS = [("before", False), ("after", False), ("after", True)]
"""State, and if it is that of a V100."""


def _inputs() -> str:
    rows = [
        [name, *(f"{i.of(state, is_v100):g}" for state, is_v100 in COLUMNS), i.origin]
        for name, i in INPUTS.items()
    ]
    return table(["input", "before", "after", "after, V100", "origin"], rows)


def _counted() -> str:
    """Return what was counted, before and after."""
    rows = [
        [name, *(f"{n:,}" for n in c.launches), *(f"{gb:.2f}" for gb in c.gigabytes)]
        for name, c in COUNTED.items()
    ]
    return table(["", "launches, before", "after", "GB, before", "after"], rows)


def _steps(steps: dict[str, Step]) -> str:
    """Return a table with one column for each step: its lines, their sum, and what follows."""
    lines = {name: step.lines() for name, step in steps.items()}
    names = list(dict.fromkeys(line for column in lines.values() for line in column))
    rows = [
        [line, *(f"{column[line]:.1f}" if line in column else "" for column in lines.values())]
        for line in names
    ]
    rows.append(["**step, ms**", *(f"**{s.milliseconds:.1f}**" for s in steps.values())])
    for title, causal in (("MFU, all of attention", False), ("MFU, causal half", True)):
        rows.append([title, *(f"{s.mfu(causal):.1%}" for s in steps.values())])
    rows.append(
        ["tokens/s a GPU", *(f"{1e3 * s.tokens / s.milliseconds:,.0f}" for s in steps.values())]
    )
    return table(["ms", *steps], rows)


def _one_h200(config: RunConfig) -> str:
    return _steps(
        {
            f"{name}, {state}": step
            for name, sizes in ONE.items()
            for state in ("before", "after")
            for step in [_step(config, H200, sizes, state)]
        }
    )


ONE = {"16k": 2**14, "65k": 2**16, "262k": 2**18}
"""Tokens a step on one GPU."""


def _step(config: RunConfig, device: Device, tokens: int, state: str) -> Step:
    """Return a step on one rank."""
    sequences = H200_SEQUENCES if device is H200 else config.batch.micro_batch_size
    return Step(config, device, tokens, sequences * config.data.sequence_length, state)


def _parallel(config: RunConfig, device: Device, network: Network) -> dict[str, Step]:
    """Return the step of 128 ranks: before, and after with each way to reduce gradients."""

    def step(state: str, reduction: str) -> Step:
        one = _step(config, device, TOKENS // RANKS, state)
        return replace(one, ranks=RANKS, network=network, reduction=reduction)

    befores = ("ring, 16 bit", "ring, fp32")
    afters = ("ring, fp32", "all-to-all, 16 bit", "two stages, 16 bit")
    return {f"before: {way}": step("before", way) for way in befores} | {
        f"after: {way}": step("after", way) for way in afters
    }


def _many(config: RunConfig, device: Device, network: Network) -> str:
    return _steps(_parallel(config, device, network))


def _bytes(config: RunConfig) -> str:
    """Return the bytes that a node of eight sends to others in a step of 128 ranks."""
    parameters = num_parameters(config) / 1e9
    ring, nodes = (RANKS - 1) / RANKS, (RANKS - 8) / RANKS
    ways = {
        "before: all-reduce, 16 bit": 2 * 2 * ring,
        "before: all-reduce, fp32": 2 * 4 * ring,
        "after: reduce-scatter as a ring, fp32": 4 * ring,
        "after: all-to-all, 16 bit, sums in fp32": 8 * 2 * nodes,
        "after: two stages, 16 bit between nodes, sums in fp32": 2 * nodes,
    }
    rows = []
    for way, factor in ways.items():
        total = (factor + 2 * ring) * parameters
        milliseconds = (1e3 * total / (n.node_gb_per_second * n.efficiency) for n in NETWORKS)
        rows.append(
            [
                way,
                f"{factor * parameters:.2f}",
                f"{2 * ring * parameters:.2f}",
                f"{total:.2f}",
                *(f"{ms:.0f}" for ms in milliseconds),
            ]
        )
    header = ["GB that a node sends in a step", "gradients", "weights", "sum"]
    return table([*header, *(f"ms, {n.name}" for n in NETWORKS)], rows)


def _mfu(config: RunConfig) -> str:
    steps: dict[str, tuple[Step, Step]] = {
        f"one H200, {name} tokens": (
            _step(config, H200, tokens, "before"),
            _step(config, H200, tokens, "after"),
        )
        for name, tokens in ONE.items()
        if name != "262k"
    }
    for device, network in ((H200, FAST), (H200, SLOW), (H200, EDR), (V100, EDR)):
        before, _, after, *_ = _parallel(config, device, network).values()
        name = device.name.split("-")[0].split()[-1]
        steps[f"128 {name}, {network.name}, 2.1M tokens"] = before, after
    rows = []
    for name, pair in steps.items():
        numbers = (f"{step.mfu(causal):.1%}" for causal in (False, True) for step in pair)
        rows.append([name, *numbers])
    return table(["", "all of attention, before", "after", "causal half, before", "after"], rows)


def _sensitivity(config: RunConfig) -> str:
    """Return how the causal MFU on one H200 answers if an assumption is wrong."""
    worse: dict[str, Device] = {
        "as assumed": H200,
        "matrix products 0.75 of the peak, not 0.83": replace(H200, gemm_fraction=0.75),
        "memory 3.3 TB/s, not 4.0": replace(H200, memory_tb_per_second=3.3),
        "attention as before": replace(
            H200, attention_tflops={"after": H200.attention_tflops["before"]}
        ),
        "gaps of 3 us, not 1.5": replace(H200, launch_gap_us=3.0),
        "10 us of host time a launch, not 6": replace(H200, host_us=10.0),
    }
    rows = []
    for name, device in worse.items():
        steps = [
            replace(_step(config, H200, ONE[size], "after"), device=device)
            for size in ("16k", "65k")
        ]
        rows.append([name, *(f"{step.mfu(True):.1%}" for step in steps)])
    small = [
        replace(_step(config, H200, ONE[size], "after"), micro_batch_tokens=2048)
        for size in ("16k", "65k")
    ]
    rows.append(["micro batches of 2 sequences, not 8", *(f"{s.mfu(True):.1%}" for s in small)])
    return table(["after, one H200, MFU with the causal half", "16k", "65k"], rows)


def _hierarchical(config: RunConfig) -> str:
    """Return the bytes through a node's network links, sharded over all ranks or within nodes.

    Sharded over all ranks, a node sends the gradients once (reduce-scatter) and the weights once
    (all-gather), which ZeRO 3 does twice a micro batch. Sharded within nodes, each node's shards
    together are all-reduced between nodes: the gradients twice, the weights never. Gradients are
    counted once a step in every row.
    """
    parameters, nodes = num_parameters(config) / 1e9, RANKS // 8
    ring, between = (RANKS - 1) / RANKS, (nodes - 1) / nodes
    micro_batches = TOKENS // RANKS // (config.batch.micro_batch_size * config.data.sequence_length)
    rows = []
    for stage, gathers in (("1 or 2", 1), ("3", 2 * micro_batches)):
        for wire, size in (("bf16", 2), ("fp32", 4)):
            everywhere = (size + 2 * gathers) * parameters * ring
            within = 2 * size * parameters * between
            rows.append(
                [
                    f"ZeRO {stage}, {wire} on the wire",
                    f"{everywhere:.2f}",
                    f"{within:.2f}",
                    f"{within / everywhere:.2f}",
                ]
            )
    return table(["GB a node sends in a step", "sharded over 128", "within nodes", "ratio"], rows)

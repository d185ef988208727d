"""Measure what generation costs with each position method at each length of its context.

The contestants are methods and lengths. They take turns as in `pretrain.study.efficiency`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pretrain import platform
from pretrain.config import ConfigError, RunConfig
from pretrain.model.generate import Decoder, cache_bytes, check_generation, greedy
from pretrain.model.gpt import build_model
from pretrain.study.efficiency import BASELINE, ratio, shown
from pretrain.study.turns import interleave, take_turn
from pretrain.topology import Topology

WARM_UP_TOKENS = 4
"""Tokens that are generated before the clock runs."""
REPEATS = 5
"""How often a turn generates behind its prompts; means count."""
PREFILL, DECODE = "prefill_tokens_per_second", "decode_tokens_per_second"


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens that are generated, and of those before them."""

    length: int
    """Tokens of each prompt."""
    new_tokens: int
    """Tokens that are generated behind each prompt."""
    batch_size: int
    """Sequences at once."""


@dataclass(frozen=True)
class Turn:
    """Measurements of one rank in one turn."""

    prefill_seconds: float
    """Seconds for the prompts, with the first generated tokens."""
    decode_seconds: float
    """Seconds for the generated tokens after the first ones."""
    cache_bytes: int
    """Bytes that the cache took."""
    peak_memory_bytes: int
    """Peak memory: allocated on a GPU; on a CPU all that was resident, libraries included."""
    device: str
    """The device's name."""


TakeTurn = Callable[[RunConfig, Sizes, int], list[Turn]]
"""Lets a contestant take its turn in so many processes; returns what each rank measured."""


def measure_inference(
    configs: Sequence[RunConfig], sizes: Sequence[Sizes], rounds: int, nproc: int
) -> dict[str, Any]:
    """Time prompts and generated tokens of each config at each length, in turns. Prints progress.

    The weights are random, and so are the prompts: neither changes the speed.

    Args:
        configs: One for each method.
        sizes: The lengths to measure each at.
        rounds: How often each config takes its turn at each length.
        nproc: Tensor-parallel processes of each.

    Returns:
        {"device", "rounds", "batch_size", "new_tokens", "rows": [{"method", "length",
        "prefill_tokens_per_second", "decode_tokens_per_second", "cache_bytes",
        "peak_memory_bytes"}], "failed": [{"method", "length", "reason"}]}: speeds are lists with
        one value for each round and count the tokens of all sequences; bytes are those of one
        process.

    Raises:
        ConfigError: A config cannot generate so many tokens, or not on so many processes.
        RunFailed: All failed.
    """
    for config in configs:
        for each in sizes:
            check_generation(config, each.length + each.new_tokens)
        split = config.parallel.tensor_model_parallel_size
        if split != nproc:
            raise ConfigError(
                f"--nproc {nproc}: generation is measured on one copy of the model, which "
                f"parallel.tensor_model_parallel_size = {split} splits over {split} processes. "
                f"Give --nproc {split}, or set that key"
            )
    return measure_inference_with(_turn_in_processes, configs, sizes, rounds, nproc)


def measure_inference_with(
    turn: TakeTurn, configs: Sequence[RunConfig], sizes: Sequence[Sizes], rounds: int, nproc: int
) -> dict[str, Any]:
    """Let the contestants take turns, and put together what they measured.

    Args:
        turn: Lets one contestant take one turn.
        configs: One for each method.
        sizes: The lengths to measure each at.
        rounds: How often each takes its turn.
        nproc: Processes of each.

    Returns:
        As `measure_inference`.
    """
    contestants = [(config, each) for each in sizes for config in configs]
    keys = [{"method": c.position_name, "length": each.length} for c, each in contestants]

    def one(number: int) -> tuple[float, float, list[Turn]]:
        config, each = contestants[number]
        ranks = turn(config, each, nproc)
        prefill = max(rank.prefill_seconds for rank in ranks)
        decode = max(rank.decode_seconds for rank in ranks)
        rows = each.batch_size
        return rows * each.length / prefill, rows * (each.new_tokens - 1) / decode, ranks

    taken, failed = interleave(
        [f"{key['method']}, {key['length']:,} tokens" for key in keys],
        rounds,
        one,
        lambda t: f"{t[0]:,.0f} tokens/s of the prompt, {t[1]:,.1f} generated",
    )
    rows = []
    for number, turns in enumerate(taken):
        if number not in failed:
            prefill, decode, ranks = zip(*turns)
            everyone = [rank for each in ranks for rank in each]
            rows.append(
                {
                    **keys[number],
                    PREFILL: list(prefill),
                    DECODE: list(decode),
                    "cache_bytes": max(rank.cache_bytes for rank in everyone),
                    "peak_memory_bytes": max(rank.peak_memory_bytes for rank in everyone),
                }
            )
    return {
        "device": f"{nproc} x {next(filter(None, taken))[0][2][0].device}",
        "rounds": rounds,
        "batch_size": sizes[0].batch_size,
        "new_tokens": sizes[0].new_tokens,
        "rows": rows,
        "failed": [{**keys[number], "reason": reason} for number, reason in failed.items()],
    }


def inference_table(result: dict[str, Any]) -> str:
    """Return what `measure_inference` returned as a Markdown table, with ratios to sinusoidal.

    Ratios are as in `pretrain.study.efficiency.efficiency_table`, to the same length of context.
    """
    baselines = {row["length"]: row for row in result["rows"] if row["method"] == BASELINE}
    lines = [
        f"{result['device']}, {result['batch_size']} sequences at once, {result['new_tokens']} "
        f"tokens generated behind each prompt; medians of {result['rounds']} rounds in turn; "
        f"ratios to {BASELINE} positions at the same length, with their range over the rounds",
        "",
        "| method | prompt, tokens | prompt, tokens/s | ratio | generated, tokens/s | ratio "
        "| cache, bytes a process | peak memory |",
        "|---|---:|---:|---|---:|---|---:|---:|",
    ]
    for row in result["rows"]:
        baseline = baselines.get(row["length"])
        cells = [row["method"], f"{row['length']:,}"]
        for speed in (PREFILL, DECODE):
            cells.append(f"{statistics.median(row[speed]):,.1f}")
            cells.append("-" if baseline is None else shown(ratio(row, baseline, speed)))
        cells += [f"{row['cache_bytes']:,}", f"{row['peak_memory_bytes'] / 2**20:,.0f} MiB"]
        lines.append(f"| {' | '.join(cells)} |")
    for failed in result["failed"]:
        reason = failed["reason"].strip().splitlines()[-1]
        lines += ["", f"{failed['method']}, {failed['length']:,} tokens: failed: {reason}"]
    return "\n".join(lines)


def generation_turn(config: RunConfig, topology: Topology, sizes: Sizes) -> Turn:
    """Build a model and time the prompt and the generated tokens. All ranks together.

    Args:
        config: The run.
        topology: This process's place in it.
        sizes: How much to generate.
    """
    (chunk,) = build_model(config)
    decoder = Decoder(chunk, sizes.batch_size, sizes.length + sizes.new_tokens)
    shape = sizes.batch_size, sizes.length
    generator = torch.Generator().manual_seed(config.run.seed)
    prompt = torch.randint(0, config.data.vocab_size, shape, generator=generator)
    prompt = prompt.to(platform.device())
    vocabulary = config.data.vocab_size
    # A prompt of the full length, so that kernels and memory are those that are timed.
    greedy(decoder, prompt, min(WARM_UP_TOKENS, sizes.new_tokens), vocabulary)
    prefill = decode = 0.0
    for _ in range(REPEATS):
        decoder.reset()
        begin = _now()
        first = greedy(decoder, prompt, 1, vocabulary)
        middle = _now()
        greedy(decoder, first, sizes.new_tokens - 1, vocabulary)
        prefill, decode = prefill + middle - begin, decode + _now() - middle
    expected = cache_bytes(config, sizes.batch_size, sizes.length + sizes.new_tokens)
    assert decoder.allocated_bytes() == expected
    peak = platform.peak_memory_bytes()
    return Turn(prefill / REPEATS, decode / REPEATS, expected, peak, platform.device_name())


def _turn_in_processes(config: RunConfig, sizes: Sizes, nproc: int) -> list[Turn]:
    return take_turn(functools.partial(generation_turn, sizes=sizes), config, nproc)


def _now() -> float:
    platform.synchronize()
    return time.perf_counter()

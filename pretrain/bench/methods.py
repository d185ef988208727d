"""Measure what position methods cost beside each other: training, evaluation and generation.

The contestants are methods and lengths. They take turns as `pretrain.bench.turns` says.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pretrain import platform
from pretrain.bench.training import WARM_UP_STEPS, Clock, TrainingStep
from pretrain.bench.turns import Column, Key, Measured, contest, name_of, table, take_turn
from pretrain.config import ConfigError, RunConfig
from pretrain.evaluation.perplexity import Evaluator
from pretrain.evaluation.windows import Protocol, ScoredText
from pretrain.model.forward import Decoder, cache_bytes, check_generation, greedy
from pretrain.model.gpt import build_model
from pretrain.topology import Topology

# ---- Measure what methods and training lengths cost beside each other, in one job ----


STEPS = 5
"""Training steps that are timed in a turn, after WARM_UP_STEPS."""
PASSES = 4
"""Forward passes of each rank that are timed in a turn, after one that warms up."""
BASELINE = "sinusoidal"
"""The method that ratios are taken to, as in the paper's table of speed and memory."""
TRAINING, EVALUATION = "train_tokens_per_second", "evaluation_tokens_per_second"
MEMORY = "peak_memory_bytes"


Task = Callable[[RunConfig, Topology], tuple[str, Measured]]
"""Measures on one rank, all ranks together; returns the device's name and what was measured."""


def measure(configs: Sequence[RunConfig], rounds: int, nproc: int) -> dict[str, Any]:
    """Time training and evaluation of several configs in turns, and measure their memory.

    Each turn has new processes, builds the model and its optimizer, and takes a few real training
    steps and a real evaluation at the training length, on random tokens. Progress goes to stderr.

    Args:
        configs: The contestants, one for each method and training length. All must take equally
            many tokens a step.
        rounds: How often each contestant takes its turn.
        nproc: Processes of each contestant.

    Returns:
        {"device", "rounds", "rows": [{"method", "train_length", "train_tokens_per_second",
        "evaluation_tokens_per_second", "peak_memory_bytes"}], "failed": [{"method", "train_length",
        "reason"}]}: the speeds are lists with one value for each round, of the whole job; the
        memory is the largest of any process of the contestant while it trained. A contestant that
        failed in any round has no row.

    Raises:
        ConfigError: Two configs are the same contestant, or take different numbers of tokens a
            step, or one cannot run on so many processes.
        RunFailed: All contestants failed.
    """
    check_contestants(configs, nproc)
    return _measured(
        [(_key(config), measure_turn, config) for config in configs],
        rounds,
        nproc,
        lambda t: f"{t[TRAINING]:,.0f} tokens/s in training, {t[EVALUATION]:,.0f} in evaluation",
    )


def _measured(
    contestants: Sequence[tuple[Key, Task, RunConfig]],
    rounds: int,
    nproc: int,
    said: Callable[[Measured], str],
) -> dict[str, Any]:
    """Let contestants take turns in processes of their own, and put together what they measured.

    Args:
        contestants: What each is called, does, and does it with.
        rounds: How often each takes its turn.
        nproc: Processes of each.
        said: What to print of a turn.

    Returns:
        As `contest`, and "device". The slowest rank counts, and the one with the most bytes.
    """
    device = ""

    def one(number: int) -> Measured:
        nonlocal device
        _, task, config = contestants[number]
        ranks = take_turn(task, config, nproc)
        device = ranks[0][0]
        measured = [each for _, each in ranks]
        return {
            name: (max if name.endswith("_bytes") else min)(each[name] for each in measured)
            for name in measured[0]
        }

    result = contest([key for key, _, _ in contestants], rounds, one, said)
    return {"device": f"{nproc} x {device}", **result}


def check_contestants(configs: Sequence[RunConfig], nproc: int) -> None:
    """Check that configs can be compared with each other on so many processes.

    Raises:
        ConfigError: They cannot; see `measure`.
    """
    seen = set()
    for config in configs:
        name = name_of(_key(config))
        if name in seen:
            raise ConfigError(f"{name}: given twice. Measure each method and length once")
        seen.add(name)
        config.layout(nproc)
    tokens = {config.tokens_per_step: config for config in configs}
    if len(tokens) > 1:
        said = ", ".join(f"{name_of(_key(c))} takes {n:,}" for n, c in tokens.items())
        raise ConfigError(
            f"tokens a step: {said}. Set batch.global_batch_size so that all take equally many"
        )


def efficiency_table(result: dict[str, Any]) -> str:
    """Return what `measure` returned as a Markdown table, with ratios to sinusoidal positions."""
    baselines = {r["train_length"]: r for r in result["rows"] if r["method"] == BASELINE}
    return table(
        result,
        f"{result['device']}; medians of {result['rounds']} rounds in turn; ratios to {BASELINE} "
        "positions of the same length, with their range over the rounds",
        ["method", "train_length"],
        [
            Column("training, tokens/s", TRAINING, "{:,.0f}", ratio=True),
            Column("evaluation, tokens/s", EVALUATION, "{:,.0f}", ratio=True),
            Column("peak memory in training", MEMORY, "{:,.0f} MiB", 2**20, ratio=True),
        ],
        lambda row: baselines.get(row["train_length"]),
    )


class RandomText(ScoredText):
    """Random tokens to score, where speed is measured and no data set is needed."""

    def __init__(self, config: RunConfig, tokens: int) -> None:
        """Draw `tokens` token ids of the config's vocabulary."""
        self.total = self.tokens = self.bytes = tokens
        self.tokenizer = self.validation = ""
        generator = np.random.default_rng(config.run.seed)
        self._ids = generator.integers(config.data.vocab_size, size=tokens + 1)
        self.block_ends = np.array([tokens])


def measure_turn(config: RunConfig, topology: Topology) -> tuple[str, Measured]:
    """Build a model, time training steps and an evaluation of it, and note its memory.

    All ranks together, in processes that have done nothing before. Memory is what is allocated on a
    GPU; on a CPU all that is resident, libraries included.
    """
    training = TrainingStep(config, topology)
    for _ in range(WARM_UP_STEPS):
        training.take()
    begin = _together()
    for _ in range(STEPS):
        training.take()
    train_seconds = _together() - begin
    training.optimizer.wait_for_weights()
    peak = platform.peak_memory_bytes()
    length = config.data.sequence_length
    protocol = Protocol("nonoverlapping", length, length)
    layout = topology.layout
    windows = max(1, config.evaluation.tokens_per_batch // length)
    tokens = windows * length * layout.data * layout.pipeline * layout.virtual
    seconds = []
    for passes in (1, PASSES):
        evaluator = Evaluator(
            training.chunks,
            topology,
            RandomText(config, passes * tokens),
            tokens_per_batch=config.evaluation.tokens_per_batch,
            schedule_module=training.optimizer.schedule_module,
        )
        begin = _together()
        evaluator.evaluate(protocol)
        seconds.append(_together() - begin)
    return platform.device_name(), {
        TRAINING: STEPS * config.tokens_per_step / train_seconds,
        EVALUATION: PASSES * tokens / seconds[-1],
        MEMORY: peak,
    }


def _together() -> float:
    """Return the time in seconds once all ranks have done everything so far."""
    platform.synchronize()
    dist.barrier()
    return time.perf_counter()


def _key(config: RunConfig) -> Key:
    return {"method": config.position_name, "train_length": config.data.sequence_length}


WARM_UP_TOKENS = 4
"""Tokens that are generated before the clock runs."""
REPEATS = 5
"""How often a turn generates behind its prompts; means count."""
PREFILL, DECODE = "prefill_tokens_per_second", "decode_tokens_per_second"
CACHE = "cache_bytes"


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens that are generated, and of those before them."""

    length: int
    """Tokens of each prompt."""
    new_tokens: int
    """Tokens that are generated behind each prompt."""
    batch_size: int
    """Sequences at once."""


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
    contestants: list[tuple[Key, Task, RunConfig]] = [
        (
            {"method": config.position_name, "length": each.length},
            functools.partial(generation_turn, sizes=each),
            config,
        )
        for each in sizes
        for config in configs
    ]
    result = _measured(
        contestants,
        rounds,
        nproc,
        lambda t: f"{t[PREFILL]:,.0f} tokens/s of the prompt, {t[DECODE]:,.1f} generated",
    )
    own = {"batch_size": sizes[0].batch_size, "new_tokens": sizes[0].new_tokens}
    return own | result


def inference_table(result: dict[str, Any]) -> str:
    """Return what `measure_inference` returned as a Markdown table, with ratios to sinusoidal."""
    baselines = {row["length"]: row for row in result["rows"] if row["method"] == BASELINE}
    return table(
        result,
        f"{result['device']}, {result['batch_size']} sequences at once, {result['new_tokens']} "
        f"tokens generated behind each prompt; medians of {result['rounds']} rounds in turn; "
        f"ratios to {BASELINE} positions at the same length, with their range over the rounds",
        ["method", "length"],
        [
            Column("prompt, tokens/s", PREFILL, "{:,.1f}", ratio=True),
            Column("generated, tokens/s", DECODE, "{:,.1f}", ratio=True),
            Column("cache, bytes a process", CACHE, "{:,}"),
            Column("peak memory", MEMORY, "{:,.0f} MiB", 2**20),
        ],
        lambda row: baselines.get(row["length"]),
    )


def generation_turn(config: RunConfig, topology: Topology, sizes: Sizes) -> tuple[str, Measured]:
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
        begin = Clock.now()
        first = greedy(decoder, prompt, 1, vocabulary)
        middle = Clock.now()
        greedy(decoder, first, sizes.new_tokens - 1, vocabulary)
        prefill, decode = prefill + middle - begin, decode + Clock.now() - middle
    expected = cache_bytes(config, sizes.batch_size, sizes.length + sizes.new_tokens)
    assert decoder.allocated_bytes() == expected
    return platform.device_name(), {
        PREFILL: REPEATS * sizes.batch_size * sizes.length / prefill,
        DECODE: REPEATS * sizes.batch_size * (sizes.new_tokens - 1) / decode,
        CACHE: expected,
        MEMORY: platform.peak_memory_bytes(),
    }

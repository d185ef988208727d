"""Measure what methods and training lengths cost beside each other, in one job.

The contestants take turns, round by round and in the opposite order every second round, so that
what else the machine does hits all of them alike. Numbers of runs that trained at different times
could not be compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from pretrain import platform
from pretrain.config import ConfigError, RunConfig
from pretrain.evaluate.perplexity import Evaluator
from pretrain.evaluate.text import ScoredText
from pretrain.evaluate.windows import Protocol
from pretrain.study.turns import interleave, take_turn
from pretrain.topology import Topology
from pretrain.train.bench import WARM_UP_STEPS, TrainingStep

STEPS = 5
"""Training steps that are timed in a turn, after WARM_UP_STEPS."""
PASSES = 4
"""Forward passes of each rank that are timed in a turn, after one that warms up."""
BASELINE = "sinusoidal"
"""The method that ratios are taken to, as in the paper's table of speed and memory."""
SPEEDS = ("train_tokens_per_second", "evaluation_tokens_per_second")


@dataclass(frozen=True)
class Turn:
    """Measurements of one rank in one turn."""

    train_seconds: float
    """Seconds of STEPS training steps."""
    evaluation_seconds: float
    """Seconds of an evaluation of `evaluation_tokens`."""
    evaluation_tokens: int
    """Tokens that all ranks scored together."""
    peak_memory_bytes: int
    """Peak memory of training: allocated on a GPU; on a CPU all that was resident, libraries
    included."""
    device: str
    """The device's name."""


class Ratio(NamedTuple):
    """Ratio of one contestant's value to another's: its median and range over the rounds."""

    median: float
    low: float
    high: float


TakeTurn = Callable[[RunConfig, int], list[Turn]]
"""Lets a contestant take its turn in so many processes; returns what each rank measured."""


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
    return measure_with(_turn_in_processes, configs, rounds, nproc)


def measure_with(
    turn: TakeTurn, configs: Sequence[RunConfig], rounds: int, nproc: int
) -> dict[str, Any]:
    """Let the contestants take turns, and put together what they measured.

    Args:
        turn: Lets one contestant take one turn.
        configs: The contestants.
        rounds: How often each takes its turn.
        nproc: Processes of each.

    Returns:
        As `measure`.

    Raises:
        RunFailed: All contestants failed.
    """
    names = [_name(config) for config in configs]

    def speeds(turn: tuple[float, float, list[Turn]]) -> str:
        return f"{turn[0]:,.0f} tokens/s in training, {turn[1]:,.0f} in evaluation"

    def one(contestant: int) -> tuple[float, float, list[Turn]]:
        ranks = turn(configs[contestant], nproc)
        return *_speeds(configs[contestant], ranks), ranks

    taken, failed = interleave(names, rounds, one, speeds)
    rows = []
    for number, (config, turns) in enumerate(zip(configs, taken)):
        if number not in failed:
            train, evaluation, ranks = zip(*turns)
            peaks = [rank.peak_memory_bytes for each in ranks for rank in each]
            rows.append(
                {
                    **_key(config),
                    "train_tokens_per_second": list(train),
                    "evaluation_tokens_per_second": list(evaluation),
                    "peak_memory_bytes": max(peaks),
                }
            )
    return {
        "device": f"{nproc} x {next(filter(None, taken))[0][2][0].device}",
        "rounds": rounds,
        "rows": rows,
        "failed": [{**_key(configs[n]), "reason": reason} for n, reason in failed.items()],
    }


def check_contestants(configs: Sequence[RunConfig], nproc: int) -> None:
    """Check that configs can be compared with each other on so many processes.

    Raises:
        ConfigError: They cannot; see `measure`.
    """
    seen = set()
    for config in configs:
        if _name(config) in seen:
            raise ConfigError(f"{_name(config)}: given twice. Measure each method and length once")
        seen.add(_name(config))
        config.layout(nproc)
    tokens = {config.tokens_per_step: config for config in configs}
    if len(tokens) > 1:
        said = ", ".join(f"{_name(c)} takes {n:,}" for n, c in tokens.items())
        raise ConfigError(
            f"tokens a step: {said}. Set batch.global_batch_size so that all take equally many"
        )


def ratio(row: dict[str, Any], baseline: dict[str, Any], speed: str) -> Ratio:
    """Return a contestant's speed as a multiple of the baseline's, by rounds.

    Args:
        row: The contestant's row.
        baseline: The baseline's row, of the same rounds.
        speed: The key of the speeds by round, such as one of SPEEDS.
    """
    ratios = [own / other for own, other in zip(row[speed], baseline[speed], strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def efficiency_table(result: dict[str, Any]) -> str:
    """Return what `measure` returned as a Markdown table, with ratios to sinusoidal positions.

    A ratio is the median over the rounds of the ratio in a round, with the smallest and the largest
    one; it is taken to the baseline of the same training length.
    """
    baselines = {r["train_length"]: r for r in result["rows"] if r["method"] == BASELINE}
    lines = [
        f"{result['device']}; medians of {result['rounds']} rounds in turn; ratios to {BASELINE} "
        "positions of the same length, with their range over the rounds",
        "",
        "| method | L | training, tokens/s | ratio | evaluation, tokens/s | ratio | peak memory "
        "in training | ratio |",
        "|---|---:|---:|---|---:|---|---:|---:|",
    ]
    for row in result["rows"]:
        baseline = baselines.get(row["train_length"])
        cells = [row["method"], f"{row['train_length']:,}"]
        for speed in SPEEDS:
            cells.append(f"{statistics.median(row[speed]):,.0f}")
            cells.append("-" if baseline is None else shown(ratio(row, baseline, speed)))
        memory = row["peak_memory_bytes"]
        cells.append(f"{memory / 2**20:,.0f} MiB")
        cells.append("-" if baseline is None else f"{memory / baseline['peak_memory_bytes']:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    for failed in result["failed"]:
        reason = failed["reason"].strip().splitlines()[-1]
        lines += ["", f"{failed['method']}, L = {failed['train_length']:,}: failed: {reason}"]
    return "\n".join(lines)


class RandomText(ScoredText):
    """Random tokens to score, where speed is measured and no data set is needed."""

    def __init__(self, config: RunConfig, tokens: int) -> None:
        """Draw `tokens` token ids of the config's vocabulary."""
        self.total = self.tokens = self.bytes = tokens
        self.tokenizer = self.validation = ""
        generator = np.random.default_rng(config.run.seed)
        self._ids = generator.integers(config.data.vocab_size, size=tokens + 1)
        self.block_ends = np.array([tokens])


def measure_turn(config: RunConfig, topology: Topology) -> Turn:
    """Build a model, time training steps and an evaluation of it, and note its memory.

    All ranks together, in processes that have done nothing before.
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
    return Turn(train_seconds, seconds[-1], PASSES * tokens, peak, platform.device_name())


def _turn_in_processes(config: RunConfig, nproc: int) -> list[Turn]:
    return take_turn(measure_turn, config, nproc)


def _together() -> float:
    """Return the time in seconds once all ranks have done everything so far."""
    platform.synchronize()
    dist.barrier()
    return time.perf_counter()


def _speeds(config: RunConfig, ranks: list[Turn]) -> tuple[float, float]:
    """Return the job's tokens/s in training and in evaluation, by its slowest rank."""
    train = max(rank.train_seconds for rank in ranks)
    evaluation = max(rank.evaluation_seconds for rank in ranks)
    return STEPS * config.tokens_per_step / train, ranks[0].evaluation_tokens / evaluation


def _key(config: RunConfig) -> dict[str, Any]:
    return {"method": config.position_name, "train_length": config.data.sequence_length}


def _name(config: RunConfig) -> str:
    return f"{config.position_name}, {config.data.sequence_length:,} tokens"


def shown(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"

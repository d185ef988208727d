"""Measure training steps, and compare the costs of position methods.

`pretrain bench train` takes steps of one run. They are the steps of training, but without data,
hooks or a run's directory, so nothing has to be built or written first.

`pretrain bench methods` has contestants: methods and lengths. They take turns round by round, and
in the opposite order every second round, so that other load on the machine affects all of them
equally. Measurements at different times cannot be compared, so ratios are taken within a round.

Each turn has new processes: memory is then that of one contestant alone, a GPU is empty when the
next turn begins, and idle processes of other contestants take no time from the one that is
measured. Between turns nothing is kept but compiled kernels on the disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)
from tqdm import tqdm

from pretrain import platform
from pretrain.config import ConfigError, RunConfig, RunFailed, num_parameters
from pretrain.evaluation.perplexity import Evaluator
from pretrain.evaluation.records import Table
from pretrain.evaluation.windows import Protocol, ScoredText
from pretrain.model import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.topology import Process, Topology, finish, initialize
from pretrain.training.step import average_loss, forward_backward

# ---- Training steps: `pretrain bench train` ----
# The first steps allocate memory, compile kernels and create Adam's state.
WARM_UP_STEPS = 3


def bench_training(config: RunConfig, steps: int) -> dict[str, float]:
    """Measure training steps and print a table. All ranks together.

    Args:
        config: The run; its data is not read.
        steps: Number of steps to measure, after the warm-up.

    Returns:
        The medians over the steps: seconds of "step" and of each of its parts, by name;
        "tokens_per_second" of the whole job; "peak_memory_bytes" of this process.
    """
    topology = initialize(config)
    training = TrainingStep(config, topology)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(WARM_UP_STEPS + steps):
        begin = last = synchronized()
        for name in training.parts():
            now = synchronized()
            times[name].append(now - last)
            last = now
        times["step"].append(synchronized() - begin)
    training.optimizer.wait_for_weights()
    seconds = {name: statistics.median(each[WARM_UP_STEPS:]) for name, each in times.items()}
    totals = {
        "tokens_per_second": config.tokens_per_step / seconds["step"],
        "peak_memory_bytes": float(platform.peak_memory_bytes()),
    }
    if topology.is_main:
        print(_table(config, steps, topology.layout.world_size, seconds, totals))
    finish()
    return {**seconds, **totals}


class TrainingStep:
    """A model, its optimizer and random tokens for training steps without a run's directory."""

    def __init__(self, config: RunConfig, topology: Topology) -> None:
        """Build the model and its optimizer. All ranks together.

        Args:
            config: The run.
            topology: The result of `initialize` for a config of the same layout. Several models can
                share it.
        """
        self.config, self.topology = config, topology
        self.chunks = build_model(config)
        self.optimizer = ZeroOptimizer(config, topology, self.chunks)
        self.batches = random_batches(config, topology.layout.num_microbatches)
        # A document of random tokens has data.vocab_size tokens on average, so this measures the
        # cost of the mask, but not its savings with short documents.
        self.eos_id = 0 if config.data.per_document_attention else None

    def parts(self, tokens: Tensor | None = None) -> Iterator[str]:
        """Take one optimizer step, and yield the name of each part after it. All ranks together.

        Args:
            tokens: Token ids [sequences, S + 1]; random ones if None.
        """
        if tokens is None:
            micro_batches = next(self.batches)
        else:
            micro_batches = list(torch.split(tokens, self.config.batch.micro_batch_size))
        yield "data"
        losses = forward_backward(self.chunks, self.optimizer, micro_batches, self.eos_id)
        yield "forward and backward"
        # The rest of the reduction, which began during the backward pass.
        self.optimizer.reduce_gradients()
        yield "gradient reduction"
        self.optimizer.update(self.config.optimizer.learning_rate)
        yield "optimizer step"
        average_loss(losses, self.topology)

    def take(self, tokens: Tensor | None = None) -> None:
        """Take one optimizer step, and wait for its loss; `tokens` as in `parts`."""
        for _ in self.parts(tokens):
            pass


def synchronized() -> float:
    """Wait until the device has done all queued work, and return the time in seconds."""
    platform.synchronize()
    return time.perf_counter()


def random_batches(config: RunConfig, num_microbatches: int) -> Iterator[list[Tensor]]:
    """Yield a step's micro batches of random token ids, int64 [B, S + 1], without end."""
    generator = torch.Generator().manual_seed(config.run.seed)
    shape = (config.batch.micro_batch_size, config.data.sequence_length + 1)
    size = config.data.vocab_size

    def tokens() -> Tensor:
        if config.model.adaptive_cutoffs is None:
            return torch.randint(0, size, shape, generator=generator)
        # Drawn by Zipf's law (id i with probability ~ 1 / (i + 1)), because rare words cost an
        # adaptive softmax more. Equally frequent words would cost it several times as much.
        share = torch.rand(shape, generator=generator, dtype=torch.float64)
        return ((size + 1.0) ** share - 1).long().clamp(max=size - 1)

    while True:
        yield [tokens() for _ in range(num_microbatches)]


def _table(
    config: RunConfig,
    steps: int,
    world_size: int,
    seconds: dict[str, float],
    totals: dict[str, float],
) -> str:
    """Return the lines that the command prints.

    Args:
        config: The run.
        steps: Number of measured steps.
        world_size: Number of processes, one per device.
        seconds: Medians of "step" and of its parts.
        totals: Speed and memory, as `bench_training` returns them.
    """
    device, rate = platform.device_name(), totals["tokens_per_second"]
    length = config.data.sequence_length
    lines = [
        f"{num_parameters(config):,} parameters, {config.position.method}, L = {length}, "
        f"{config.train.precision}, {world_size} x {device}; medians of {steps} steps",
        f"{'tokens/s':<22}{rate:>12,.0f}",
    ]
    peak = peak_tflops_per_second(device)
    for name, causal in (("all of attention", False), ("causal attention", True)):
        flops = flops_per_token(config, length, causal=causal)
        tflops = flops * rate / world_size / 1e12
        mfu = f", MFU {model_flops_utilization(rate / world_size, flops, peak):.1%}" if peak else ""
        lines.append(f"{'TFLOP/s a device':<22}{tflops:>12.3f}  ({name} counted{mfu})")
    for name, value in seconds.items():
        lines.append(f"{name:<22}{value * 1e3:>9.2f} ms  {value / seconds['step']:>6.1%}")
    lines.append(f"{'peak memory':<22}{totals['peak_memory_bytes'] / 2**20:>9,.0f} MiB")
    return "\n".join(lines)


# ---- Let contestants take turns, each in its own processes ----
Measured = dict[str, float]
"""The measurements of a turn, by the names in a result's row."""
Task = Callable[[RunConfig, Topology], Any]
"""Measures on one rank, all ranks together; its result is JSON."""


ADDRESS = "127.0.0.1"
"""All processes of a turn are on this machine."""


def take_turn(task: Task, config: RunConfig, nproc: int) -> list[Any]:
    """Call task(config, topology) in `nproc` new processes of this machine.

    Without GPUs, the processes are forked in a tenth of a second from a server that has imported
    everything; imports alone would take longer than the measurement. With GPUs, each process
    imports by itself, since a library that queries the GPUs at import makes them unusable in forks.

    Args:
        task: A function of a module, since it is found by its name, or functools.partial of such a
            function. Called on all ranks together; its result is JSON.
        config: The run, in whose layout the processes join.
        nproc: Number of processes, one for each GPU or a few on CPU cores.

    Returns:
        The task's result on each rank.

    Raises:
        RunFailed: The task failed on a rank, or a process was killed. All processes have ended.
    """
    module = getattr(task, "func", task).__module__
    multiprocessing.set_forkserver_preload([__name__, module])
    method = "spawn" if platform.has_cuda() else "forkserver"
    with tempfile.TemporaryDirectory(prefix="turn-") as name:
        folder = Path(name)
        arguments = task, config, nproc, folder
        try:
            start_processes(_work, arguments, nproc, daemon=True, start_method=method)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except (ProcessRaisedException, ProcessExitedException) as error:
            # Only the last line of the traceback is shown.
            raise RunFailed(
                f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}"
            ) from None
        return [json.loads((folder / str(rank)).read_bytes()) for rank in range(nproc)]


def _work(rank: int, task: Task, config: RunConfig, nproc: int, folder: Path) -> None:
    """Do a task and write its result; for a process of a turn.

    Args:
        rank: This process.
        task: The task.
        config: The run.
        nproc: Number of processes.
        folder: The folder for results, in which rank 0 also publishes its port.
    """
    # Only the process that started the turns handles Ctrl-C; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # tqdm's default lock is a system semaphore, which os._exit below would leave behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(max(1, torch.get_num_threads() // nproc))
    place = Process(rank, nproc, rank, ADDRESS, 0, folder if nproc > 1 else None)
    result = task(config, initialize(config, place))
    (folder / str(rank)).write_text(json.dumps(result))
    # Ranks exit together, because a rank that exits early breaks the collectives of the others.
    dist.barrier()
    # A normal exit would take seconds to unload the imported libraries.
    os._exit(0)


# ---- Training and evaluation: `pretrain bench methods`, and a study's efficiency ----
BASELINE = "sinusoidal"
"""The method to which ratios are taken, as in the paper's table of speed and memory."""
STEPS = 5
"""Training steps that are timed in a turn, after WARM_UP_STEPS."""
PASSES = 4
"""Forward passes of each rank that are timed in a turn, after one warm-up pass."""
TRAINING, EVALUATION = "train_tokens_per_second", "evaluation_tokens_per_second"
MEMORY = "peak_memory_bytes"


def measure(configs: Sequence[RunConfig], rounds: int, nproc: int) -> dict[str, Any]:
    """Time training and evaluation of several configs in turns, and measure their memory.

    Each turn builds the model and its optimizer, and takes a few real training steps and a real
    evaluation at the training length, on random tokens. Progress goes to stderr.

    Args:
        configs: The contestants, one for each method and training length. All must take equally
            many tokens a step.
        rounds: How often each contestant takes its turn.
        nproc: Processes of each contestant.

    Returns:
        {"device", "rounds", "rows", "failed"}. A row has "method" and "train_length"; for every
        round "train_tokens_per_second" and "evaluation_tokens_per_second" of the whole job, as
        measured by the slowest rank; and "peak_memory_bytes", the largest of any process during
        training. A contestant that failed in any round has no row; its "reason" is in "failed".

    Raises:
        ConfigError: Two configs take different numbers of tokens per step, or a config cannot run
            on `nproc` processes.
        RunFailed: All contestants failed.
    """
    check_contestants(configs, nproc)
    taken: list[list[Measured]] = [[] for _ in configs]
    failed: dict[int, str] = {}
    device = ""
    for number in range(1, rounds + 1):
        order = range(len(configs)) if number % 2 else reversed(range(len(configs)))
        for contestant in order:
            if contestant in failed:
                continue
            config = configs[contestant]
            try:
                ranks = take_turn(measure_turn, config, nproc)
            except RunFailed as error:
                failed[contestant] = str(error)
                said = f"failed: {error}"
            else:
                device = ranks[0][0]
                turn = {
                    name: (max if name == MEMORY else min)(each[name] for _, each in ranks)
                    for name in (TRAINING, EVALUATION, MEMORY)
                }
                taken[contestant].append(turn)
                said = ", ".join(f"{name} {value:,.0f}" for name, value in turn.items())
            said = f"round {number} of {rounds}: {_named(_key(config))}: {said}"
            print(said, file=sys.stderr, flush=True)
    if len(failed) == len(configs):
        raise RunFailed("nothing could be measured:\n" + "\n".join(failed.values()))
    rows = [
        {
            **_key(config),
            **{name: [turn[name] for turn in turns] for name in (TRAINING, EVALUATION)},
            MEMORY: max(turn[MEMORY] for turn in turns),
        }
        for number, (config, turns) in enumerate(zip(configs, taken))
        if number not in failed
    ]
    reasons = [{**_key(configs[n]), "reason": reason} for n, reason in failed.items()]
    return {"device": f"{nproc} x {device}", "rounds": rounds, "rows": rows, "failed": reasons}


def check_contestants(configs: Sequence[RunConfig], nproc: int) -> None:
    """Check that configs can be compared with each other on `nproc` processes.

    Raises:
        ConfigError: They cannot be compared; see `measure`.
    """
    for config in configs:
        config.layout(nproc)
    tokens = {config.tokens_per_step: config for config in configs}
    if len(tokens) > 1:
        said = ", ".join(f"{_named(_key(c))} takes {n:,}" for n, c in tokens.items())
        raise ConfigError(
            f"tokens a step: {said}. Set batch.global_batch_size so that all take equally many"
        )


def _key(config: RunConfig) -> dict[str, Any]:
    return {"method": config.position_name, "train_length": config.data.sequence_length}


def _named(key: dict[str, Any]) -> str:
    """Return a contestant in words: "alibi, 1,024 tokens"."""
    return f"{key['method']}, {key['train_length']:,} tokens"


def efficiency_table(result: dict[str, Any]) -> str:
    """Return the result of `measure` as a Markdown table, with ratios to BASELINE.

    A ratio of speeds is the median over rounds of the ratio within a round, with the smallest and
    the largest. A ratio of memory is a single number, because memory is measured over all rounds.
    """
    baselines = {row["train_length"]: row for row in result["rows"] if row["method"] == BASELINE}
    titles = ["training, tokens/s", "evaluation, tokens/s", "peak memory in training"]
    header = ["method", "train length", *(word for title in titles for word in (title, "ratio"))]
    rows = []
    for row in result["rows"]:
        other = baselines.get(row["train_length"])
        shown = [f"{statistics.median(row[name]):,.0f}" for name in (TRAINING, EVALUATION)]
        ratios = ["-"] * 3
        if other is not None:
            ratios = [_ratio(row[name], other[name]) for name in (TRAINING, EVALUATION)]
            ratios.append(f"{row[MEMORY] / other[MEMORY]:.3f}")
        cells = zip([*shown, f"{row[MEMORY] / 2**20:,.0f} MiB"], ratios)
        rows.append([row["method"], f"{row['train_length']:,}", *chain.from_iterable(cells)])
    title = (
        f"{result['device']}; medians of {result['rounds']} rounds in turn; ratios to {BASELINE} "
        "positions at the same length, with their range over the rounds"
    )
    failed = [f"{_named(each)}: failed: {each['reason']}" for each in result["failed"]]
    return "\n\n".join([Table(title, header, rows, names=1).markdown(), *failed])


def _ratio(own: Sequence[float], other: Sequence[float]) -> str:
    """Return speeds as multiples of the baseline's: the median and the range over rounds."""
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


class RandomText(ScoredText):
    """Random tokens to score, so that measuring speed needs no data set."""

    def __init__(self, config: RunConfig, tokens: int) -> None:
        """Draw `tokens` token ids of the config's vocabulary."""
        self.total = self.tokens = self.bytes = tokens
        generator = np.random.default_rng(config.run.seed)
        self._ids = generator.integers(config.data.vocab_size, size=tokens + 1)
        self.block_ends = np.array([tokens])


def measure_turn(config: RunConfig, topology: Topology) -> tuple[str, Measured]:
    """Build a model, time training steps and an evaluation of it, and measure its memory.

    All ranks together, in new processes. Memory is the allocated memory of a GPU; on a CPU it is
    all resident memory, including libraries.
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
        evaluation_seconds = _together() - begin
    return platform.device_name(), {
        TRAINING: STEPS * config.tokens_per_step / train_seconds,
        EVALUATION: PASSES * tokens / evaluation_seconds,
        MEMORY: peak,
    }


def _together() -> float:
    """Wait until all ranks have done all queued work, and return the time in seconds."""
    platform.synchronize()
    dist.barrier()
    return time.perf_counter()

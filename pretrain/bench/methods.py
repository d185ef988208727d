"""Measure what generation costs with each position method at each length of its context.

The contestants are methods and lengths. They take turns as in `pretrain.bench.methods`.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from pretrain import platform
from pretrain.bench.training import WARM_UP_STEPS, TrainingStep
from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.evaluate.perplexity import Evaluator
from pretrain.evaluate.windows import Protocol, ScoredText
from pretrain.model.forward import Decoder, cache_bytes, check_generation, greedy
from pretrain.model.gpt import build_model
from pretrain.topology import Process, Topology, initialize

# ---- Run a function in processes of its own, which join each other and end with it ----
# A comparison of speed and memory lets its contestants take turns. Each turn has new processes:
# memory is then that of one contestant alone, a GPU is empty when the next one begins, and no idle
# process of another contestant takes time from the one that is measured. Between turns nothing is
# kept but compiled kernels on the disk.


T = TypeVar("T")
ADDRESS = "127.0.0.1"
"""All processes of a turn are on this machine."""


def interleave(
    names: Sequence[str], rounds: int, turn: Callable[[int], T], shown: Callable[[T], str]
) -> tuple[list[list[T]], dict[int, str]]:
    """Let contestants take turns, round by round, back and forth. Progress goes to stderr.

    Args:
        names: What to call each contestant.
        rounds: How often each takes its turn.
        turn: Lets the contestant of a number take one turn. A RunFailed that it raises is that
            contestant's end, and the others go on.
        shown: What to print of a turn.

    Returns:
        (what each contestant measured in each round, number -> why a contestant failed)

    Raises:
        RunFailed: All contestants failed.
    """
    taken: list[list[T]] = [[] for _ in names]
    failed: dict[int, str] = {}
    for number in range(1, rounds + 1):
        # Back and forth, so that a drift during the job favours no contestant.
        order = range(len(names)) if number % 2 else reversed(range(len(names)))
        for contestant in order:
            if contestant in failed:
                continue
            said = f"round {number} of {rounds}: {names[contestant]}"
            try:
                result = turn(contestant)
            except RunFailed as error:
                failed[contestant] = str(error)
                print(f"{said} failed: {error}", file=sys.stderr, flush=True)
                continue
            taken[contestant].append(result)
            print(f"{said}: {shown(result)}", file=sys.stderr, flush=True)
    if len(failed) == len(names):
        raise RunFailed("nothing could be measured:\n" + "\n".join(failed.values()))
    return taken, failed


def take_turn(task: Callable[[RunConfig, Topology], T], config: RunConfig, nproc: int) -> list[T]:
    """Call task(config, topology) in `nproc` new processes of this machine.

    Args:
        task: A function of a module, since it is found by its name, or functools.partial of one.
            Called on all ranks together; it, what it returns and `config` are pickled.
        config: The run, whose layout the processes join in.
        nproc: Number of processes, one for each GPU or a few on CPU cores.

    Returns:
        What the task returned on each rank.

    Raises:
        RunFailed: The task failed on a rank, or a process was killed. All have ended then.
    """
    context = _context(getattr(task, "func", task).__module__)
    with tempfile.TemporaryDirectory(prefix="turn-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(nproc):
                ours, theirs = context.Pipe()
                place = Process(rank, nproc, rank, ADDRESS, 0, Path(folder) if nproc > 1 else None)
                # The task in a pickle of its own: reading it imports what may warn.
                arguments = theirs, pickle.dumps(task), config, place
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                # The process alone keeps its end open, so that its death reads as an end of file.
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            results = _results(pipes)
            for pipe in pipes:
                # Ranks leave together: one that has gone breaks a collective of the others.
                pipe.send(None)
            for process in processes:
                process.join()
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _context(module: str) -> ForkServerContext | SpawnContext:
    """Return how processes are started; `module` is what they will need.

    Without GPUs they are forked from a server that has imported everything, in a tenth of a second;
    imports alone would take longer than what is measured. With GPUs each process imports for
    itself, since a library that asks for the GPUs at import would leave forked ones without them.
    """
    if platform.has_cuda():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pretrain.bench.quiet", __name__, module])
    return context


def _results(pipes: list[Connection]) -> list[Any]:
    """Wait for the result of every rank; RunFailed as soon as one has none."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        for pipe in wait(waiting):
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                ok, value = False, "the process was killed, often because memory ran out"
            if not ok:
                raise RunFailed(f"rank {rank}: {value}" if len(pipes) > 1 else value)
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _work(pipe: Connection, task: bytes, config: RunConfig, process: Process) -> None:
    """Do a task and send (True, result) or (False, why there is none); for a process of a turn.

    Args:
        pipe: Where to send it; afterwards the word to leave comes from there.
        task: The task, pickled.
        config: The run.
        process: This process.
    """
    # Ctrl-C is for the process that started the turns, and this one ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    warnings.simplefilter("ignore")
    # Its own lock is one of the system's, which a process that leaves at once would leave behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(max(1, torch.get_num_threads() // process.world_size))
    try:
        outcome = True, pickle.loads(task)(config, initialize(config, process))
    except (ConfigError, RunFailed, MemoryError, torch.OutOfMemoryError) as error:
        outcome = False, str(error) or type(error).__name__
    except Exception:
        outcome = False, traceback.format_exc()
    with contextlib.suppress(EOFError, OSError):
        pipe.send(outcome)
        pipe.recv()
    # An ordinary exit would take seconds to unload the imported libraries.
    os._exit(0)


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


# ---- Measure what methods and training lengths cost beside each other, in one job ----
# The contestants take turns, round by round and in the opposite order every second round, so that
# what else the machine does hits all of them alike. Numbers of runs that trained at different times
# could not be compared.


STEPS = 5
"""Training steps that are timed in a turn, after WARM_UP_STEPS."""
PASSES = 4
"""Forward passes of each rank that are timed in a turn, after one that warms up."""
BASELINE = "sinusoidal"
"""The method that ratios are taken to, as in the paper's table of speed and memory."""
SPEEDS = ("train_tokens_per_second", "evaluation_tokens_per_second")


@dataclass(frozen=True)
class TrainingTurn:
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


TakeTrainingTurn = Callable[[RunConfig, int], list[TrainingTurn]]
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
    return measure_with(_training_in_processes, configs, rounds, nproc)


def measure_with(
    turn: TakeTrainingTurn, configs: Sequence[RunConfig], rounds: int, nproc: int
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

    def speeds(turn: tuple[float, float, list[TrainingTurn]]) -> str:
        return f"{turn[0]:,.0f} tokens/s in training, {turn[1]:,.0f} in evaluation"

    def one(contestant: int) -> tuple[float, float, list[TrainingTurn]]:
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


def measure_turn(config: RunConfig, topology: Topology) -> TrainingTurn:
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
    return TrainingTurn(train_seconds, seconds[-1], PASSES * tokens, peak, platform.device_name())


def _training_in_processes(config: RunConfig, nproc: int) -> list[TrainingTurn]:
    return take_turn(measure_turn, config, nproc)


def _together() -> float:
    """Return the time in seconds once all ranks have done everything so far."""
    platform.synchronize()
    dist.barrier()
    return time.perf_counter()


def _speeds(config: RunConfig, ranks: list[TrainingTurn]) -> tuple[float, float]:
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
class GenerationTurn:
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


TakeGenerationTurn = Callable[[RunConfig, Sizes, int], list[GenerationTurn]]
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
    return measure_inference_with(_generation_in_processes, configs, sizes, rounds, nproc)


def measure_inference_with(
    turn: TakeGenerationTurn,
    configs: Sequence[RunConfig],
    sizes: Sequence[Sizes],
    rounds: int,
    nproc: int,
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

    def one(number: int) -> tuple[float, float, list[GenerationTurn]]:
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

    Ratios are as in `pretrain.bench.methods.efficiency_table`, to the same length of context.
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


def generation_turn(config: RunConfig, topology: Topology, sizes: Sizes) -> GenerationTurn:
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
    return GenerationTurn(
        prefill / REPEATS, decode / REPEATS, expected, peak, platform.device_name()
    )


def _generation_in_processes(config: RunConfig, sizes: Sizes, nproc: int) -> list[GenerationTurn]:
    return take_turn(functools.partial(generation_turn, sizes=sizes), config, nproc)


def _now() -> float:
    platform.synchronize()
    return time.perf_counter()

"""A study's directory with made-up results of the published shape, for the tests of its report."""

from __future__ import annotations

import json
import math

import numpy as np

from pretrain.evaluation.records import BLOCKS, POSITIONS, Binned, Losses, records_json
from pretrain.study.reading import read_results
from pretrain.study.runs import State, Study, StudyFile, StudyRun
from tests.conftest import tiny_config
from tests.unit.report_records import make_record

METHODS = ("alibi", "sinusoidal", "rotary", "t5", "alibi_trained_slopes")
TRAINED = (64, 128)
SLOPES = {"method": "alibi", "trainable_slopes": True}
LENGTHS = (64, 128, 192, 256, 384, 512, 1024, 2048, 1024 * 64, 1024 * 128)
STRIDE = 32
AT_L = {
    "alibi": {64: 20.0, 128: 18.0},
    "sinusoidal": {64: 20.1, 128: 19.0},
    "rotary": {64: 20.1, 128: 18.2},
    "t5": {64: 20.1, 128: 18.1},
    "alibi_trained_slopes": {64: 20.0, 128: 18.0},
}
SPEEDS = {"alibi": 1.0, "sinusoidal": 1.0, "rotary": 0.6, "t5": 0.2, "alibi_trained_slopes": 0.9}
MEMORY = {"alibi": 1.005, "sinusoidal": 1.0, "rotary": 1.2, "t5": 1.1, "alibi_trained_slopes": 1.0}


def published_shape(method, trained, protocol, length):
    """Return a perplexity that goes with the length as in the paper's figures."""
    multiple, beyond = length / trained, length - trained
    factor = {
        "alibi": 0.93 if multiple == 3 else 0.94 if multiple >= 2 else 1.0,
        "sinusoidal": 1.5 * (multiple / 2) ** 0.8 if multiple > 1 else 1.0,
        "rotary": 1.0 if beyond <= 128 else 1 + beyond / 500,
        "t5": 1.0 if beyond == 0 else 0.98 if beyond <= 512 else 1.2,
        "alibi_trained_slopes": 1 + multiple / 20 if multiple >= 2 else 1.0,
    }[method]
    if protocol == "sliding":
        factor = 0.94 + min(multiple, 16) / 1000 if method == "alibi" else 0.95 * factor
    return AT_L[method][trained] * factor


def make_records(
    perplexity=published_shape,
    methods=METHODS,
    trained=TRAINED,
    lengths=LENGTHS,
    seeds=(1,),
    spread=0.001,
    noise=0.0,
):
    """Return the records of all runs under both protocols.

    Args:
        perplexity: (method, training length, protocol, length) -> perplexity.
        methods: Methods of the runs.
        trained: Training lengths.
        lengths: Window lengths; those below a run's training length are left out.
        seeds: Seeds; each has a run.
        spread: Half of every interval, in nats.
        noise: What a seed adds to a method's loss in nats, times the places of both in their lists.
    """
    return [
        make_record(
            method,
            protocol,
            length,
            perplexity(method, trained_at, protocol, length) * math.exp(noise * i * k),
            seed=seed,
            train_length=trained_at,
            stride=STRIDE if protocol == "sliding" else length,
            spread=spread,
            run=f"runs/{name(method, trained_at, seed, seeds)}",
        )
        for k, method in enumerate(methods)
        for trained_at in trained
        for i, seed in enumerate(seeds)
        for protocol in ("nonoverlapping", "sliding")
        for length in lengths
        if length >= trained_at
    ]


def name(method, trained, seed, seeds):
    return f"{method}-{trained}" + (f"-s{seed}" if len(seeds) > 1 else "")


def published_cost(quantity, method, trained):
    """Return a speed, or memory, that goes with the training length."""
    costs = MEMORY if quantity == "memory" else SPEEDS
    return costs[method] * (trained / 64) ** (0.5 if quantity == "memory" else -0.5)


def rows(cost=published_cost, rounds=(1.0, 1.001, 0.999), trained=TRAINED):
    """Return the rows of efficiency.json.

    Args:
        cost: ("training", "evaluation" or "memory", method, training length) -> a relative number.
        rounds: Factors of the speeds of each round.
        trained: Training lengths.
    """
    return [
        {
            "method": method,
            "train_length": length,
            "train_tokens_per_second": [1e4 * cost("training", method, length) * r for r in rounds],
            "evaluation_tokens_per_second": [
                3e4 * cost("evaluation", method, length) * r for r in rounds
            ],
            "peak_memory_bytes": int(2e9 * cost("memory", method, length)),
        }
        for method in METHODS
        for length in trained
    ]


def with_positions(records):
    """Return the records, the nonoverlapping ones with losses by position: early ones are worse."""
    found = []
    for record in records:
        length = record["length"]
        shape = 1 / np.sqrt(np.arange(1, length + 1))
        losses = record["loss_nats"] + shape - shape.mean()
        counts = np.full(length, -(-record["tokens"] // length))
        binned = Binned.of(Losses(losses, counts))
        is_whole = record["protocol"] == "nonoverlapping"
        found.append(record | ({POSITIONS: binned} if is_whole else {}))
    return found


def with_blocks(records, blocks=25):
    """Return the records with losses by block: some are hard for all, own noise is small."""
    found = []
    for i, record in enumerate(records):
        hard = np.random.default_rng(1).normal(0, 0.3, blocks)
        own = np.random.default_rng(i + 10).normal(0, 0.001, blocks)
        counts = np.full(blocks, record["tokens"] / blocks)
        losses = record["loss_nats"] + hard - hard.mean() + own - own.mean()
        found.append(record | {BLOCKS: Losses(losses * counts, counts)})
    return found


def make_study(
    directory, title="A synthetic study", states=None, published="wikitext103", **changes
):
    """Write what the runs of a study leave in its directory, and return its results.

    Args:
        directory: Made when missing.
        title: The study's title.
        states: Run -> (state, reason) of runs that did not finish.
        published: What the report puts beside the results.
        changes: As of `make_records`.
    """
    states, seeds = states or {}, changes.get("seeds", (1,))
    asked = StudyFile(title=title, directory=str(directory), published=published)
    runs = [
        StudyRun(
            run := name(method, trained, seed, seeds),
            tiny_config(
                position=SLOPES if method.endswith("slopes") else {"method": method},
                data={"sequence_length": trained},
                batch={"micro_batch_size": 1, "global_batch_size": 1024 // trained},
                run={"directory": str(directory / "runs" / run), "seed": seed},
            ),
            directory,
        )
        for method in changes.get("methods", METHODS)
        for trained in changes.get("trained", TRAINED)
        for seed in seeds
    ]
    ends = [(run, State(*states.get(run.name, ("finished", "")))) for run in runs]
    done = {f"runs/{run.name}" for run, state in ends if state.state == "finished"}
    records = [
        # Records of older evaluations have position.method, which is that of both kinds of slopes.
        record
        | {
            "method": record["method"].removesuffix("_trained_slopes"),
            "settings": ("b" if record["method"].endswith("slopes") else "c") * 12,
        }
        for record in make_records(**changes)
        if record["run"] in done
    ]
    (directory / "evaluation").mkdir(parents=True)
    if records:
        content = records_json(with_blocks(with_positions(records)))
        (directory / "evaluation/curve.json").write_bytes(content)
    efficiency = {"device": "one synthetic GPU", "rounds": 3, "rows": rows()}
    (directory / "efficiency.json").write_text(json.dumps(efficiency))
    for run, state in ends:
        if state.state == "finished":
            _write_metrics(run.config.directory, run, changes.get("perplexity"))
    return read_results(Study(directory / "study.toml", asked, tuple(runs)), ends)


def _write_metrics(run_directory, run, perplexity):
    """Write metrics.jsonl: two evaluations while training, which end at the final values."""
    run_directory.mkdir(parents=True)
    lines = []
    for step, factor in ((200, 1.5), (400, 1.0)):
        lines.append({"step": step, "loss_nats": 3.0})
        for length in (n for n in LENGTHS if n >= run.train_length):
            shape = perplexity or published_shape
            value = shape(run.method, run.train_length, "nonoverlapping", length) * factor
            lines.append(
                {
                    "step": step,
                    "evaluation": True,
                    "protocol": "nonoverlapping",
                    "stride": length,
                    "length": length,
                    "loss_nats": math.log(value),
                    "perplexity": value,
                    "tokens": 5_000,
                }
            )
    (run_directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

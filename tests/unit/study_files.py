"""A study's directory with made-up results of the published shape, for the tests of its report."""

from __future__ import annotations

import json
import math

import numpy as np

from pretrain.evaluation.curves import POSITION_FIELDS, Binned, position_rows
from pretrain.evaluation.records import (
    BLOCK_FIELDS,
    BlockLosses,
    PositionLosses,
    block_key,
    block_rows,
    blocks_path,
    curve_json,
    to_csv,
    with_blocks,
)
from tests.unit.report_records import make_record

METHODS = ("alibi", "sinusoidal", "rotary", "t5", "alibi_trained_slopes")
TRAINED = (64, 128)
LENGTHS = (64, 128, 256, 512, 1024, 2048)
STRIDE = 32
AT_L = {
    "alibi": {64: 20.0, 128: 18.0},
    "sinusoidal": {64: 20.1, 128: 18.2},
    "rotary": {64: 20.1, 128: 18.2},
    "t5": {64: 19.9, 128: 17.9},
    "alibi_trained_slopes": {64: 20.0, 128: 18.0},
}
SPEEDS = {"alibi": 1.0, "sinusoidal": 1.0, "rotary": 0.7, "t5": 0.4, "alibi_trained_slopes": 0.97}
MEMORY = {"alibi": 1.005, "sinusoidal": 1.0, "rotary": 1.2, "t5": 1.1, "alibi_trained_slopes": 1.0}


def published_shape(method, trained, protocol, length):
    """Return a perplexity that goes with the length as in the paper's figures."""
    multiple, beyond = length / trained, length - trained
    factor = {
        "alibi": 0.94 if multiple >= 2 else 1.0,
        "sinusoidal": 1.5 * (multiple / 2) ** 0.8 if multiple >= 2 else 1.0,
        "rotary": 1.0 if beyond <= 128 else 1 + beyond / 500,
        "t5": 1.0 if beyond == 0 else 0.98 if beyond <= 512 else 1.02,
        "alibi_trained_slopes": 1 + multiple / 20 if multiple >= 2 else 1.0,
    }[method]
    if protocol == "sliding":
        factor = 0.94 + multiple / 1000 if method == "alibi" else 0.95 * factor
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
        noise: How far the losses of two seeds with neighbouring numbers lie apart, in nats.
    """
    return [
        make_record(
            method,
            protocol,
            length,
            perplexity(method, trained_at, protocol, length) * math.exp(noise * i),
            seed=seed,
            train_length=trained_at,
            stride=STRIDE if protocol == "sliding" else length,
            spread=spread,
            run=f"runs/{name(method, trained_at, seed, seeds)}",
        )
        for method in methods
        for trained_at in trained
        for i, seed in enumerate(seeds)
        for protocol in ("nonoverlapping", "sliding")
        for length in lengths
        if length >= trained_at
    ]


def name(method, trained, seed, seeds):
    return f"{method}-{trained}" + (f"-s{seed}" if len(seeds) > 1 else "")


def rows(speeds=None, memory=None, rounds=(1.0, 1.001, 0.999)):
    """Return the rows of efficiency.json."""
    return [
        {
            "method": method,
            "train_length": trained,
            "train_tokens_per_second": [1e4 * (speeds or SPEEDS)[method] * r for r in rounds],
            "evaluation_tokens_per_second": [3e4 * (speeds or SPEEDS)[method] * r for r in rounds],
            "peak_memory_bytes": int(2e9 * (memory or MEMORY)[method]),
        }
        for method in METHODS
        for trained in TRAINED
    ]


def make_positions(records):
    """Return losses by position of every nonoverlapping record: early tokens are worse."""
    positions = {}
    for record in records:
        if record["protocol"] == "nonoverlapping":
            length = record["length"]
            shape = 1 / np.sqrt(np.arange(1, length + 1))
            losses = record["loss_nats"] + shape - shape.mean()
            key = record["checkpoint"], length
            counts = np.full(length, record["tokens"] // length)
            positions[key] = Binned.of(PositionLosses(losses, counts))
    return positions


def make_blocks(records, blocks=25):
    """Return losses by block: some are hard for all, and a value's own noise is small."""
    found = {}
    for i, record in enumerate(records):
        hard = np.random.default_rng(1).normal(0, 0.3, blocks)
        own = np.random.default_rng(i + 10).normal(0, 0.001, blocks)
        counts = np.full(blocks, record["tokens"] / blocks)
        losses = record["loss_nats"] + hard - hard.mean() + own - own.mean()
        found[block_key(record)] = BlockLosses(losses * counts, counts)
    return found


def make_study(
    directory, title="A synthetic study", states=None, published="wikitext103", **changes
):
    """Write a study's directory, and return it.

    Args:
        directory: Made when missing.
        title: The study's title.
        states: Run -> (state, reason) of runs that did not finish.
        published: What the report puts beside the results.
        changes: As of `make_records`.
    """
    states, seeds = states or {}, changes.get("seeds", (1,))
    runs = [
        {
            "name": (run := name(method, trained, seed, seeds)),
            "method": method,
            "train_length": trained,
            "seed": seed,
            "directory": f"runs/{run}",
            "state": states.get(run, ("finished", None))[0],
            "reason": states.get(run, ("finished", None))[1],
        }
        for method in changes.get("methods", METHODS)
        for trained in changes.get("trained", TRAINED)
        for seed in seeds
    ]
    directory.mkdir(parents=True, exist_ok=True)
    study = {"title": title, "command": "pretrain study demo.toml", "published": published}
    (directory / "study.json").write_text(json.dumps(study | {"runs": runs}))
    (directory / "study.toml").write_text(f"title = {json.dumps(title)}\n")
    done = {f"runs/{run['name']}" for run in runs if run["state"] == "finished"}
    # Runs are recorded as the evaluation was given them, here below the study's directory.
    records = [
        # A record's method is position.method, which is that of both kinds of slopes.
        record
        | {
            "run": str(directory / record["run"]),
            "method": record["method"].removesuffix("_trained_slopes"),
            "settings": ("b" if record["method"].endswith("slopes") else "c") * 12,
            "checkpoint": str(directory / record["checkpoint"]),
        }
        for record in make_records(**changes)
        if record["run"] in done
    ]
    if records:
        _write_evaluation(directory / "evaluation" / "curve.json", records)
    efficiency = {"device": "one synthetic GPU", "rounds": 3, "rows": rows()}
    (directory / "efficiency.json").write_text(json.dumps(efficiency))
    for run in runs:
        if run["state"] == "finished":
            _write_metrics(directory / run["directory"], run, changes.get("perplexity"))
    return directory


def _write_evaluation(out, records):
    """Write the files of an evaluation as `write_report` does, but for figures and text."""
    out.parent.mkdir()
    blocks = make_blocks(records)
    rows = list(position_rows(records, make_positions(records)))
    out.with_name("positions.csv").write_bytes(to_csv(POSITION_FIELDS, rows))
    rows = block_rows([with_blocks(record, blocks) for record in records])
    blocks_path(out).write_bytes(to_csv(BLOCK_FIELDS, rows))
    out.write_bytes(curve_json(records))


def _write_metrics(run_directory, run, perplexity):
    """Write metrics.jsonl: two evaluations while training, which end at the final values."""
    run_directory.mkdir(parents=True)
    lines = []
    for step, factor in ((200, 1.5), (400, 1.0)):
        lines.append({"step": step, "loss_nats": 3.0})
        for length in (n for n in LENGTHS if n >= run["train_length"]):
            shape = perplexity or published_shape
            value = shape(run["method"], run["train_length"], "nonoverlapping", length) * factor
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
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_directory / "metrics.jsonl").write_text(text)

"""Run `pretrain evaluate-tasks`: what a model makes of a long context, beyond perplexity.

A task makes sequences of `length` inputs and as many targets, of which the last ones are scored:
the answer. What it draws is a function of a seed, the length, a depth and the sample's number, so
that every checkpoint is asked the same. At each depth, from 0 (the beginning of the context) to 1
(right before the query), the answer is planted in the context; in the control it is not, and all
else is the same. The difference of the two losses is the gain, in nats per token: 0 means that the
model makes no use of the context.

    with the needle       text text NEEDLE text text text  NEEd l e
    control               text text  text  text text text  NEEd l e      scored: l e

Batches of sequences are dealt to the data-parallel ranks and go through the pipeline forward only,
as in an evaluation, on any parallel layout.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from torch import Tensor

from pretrain import platform
from pretrain.config import ConfigError, EvaluationRequest
from pretrain.data.stream import TokenStream
from pretrain.evaluation.command import Opened, is_main, measure_all, open_source, say
from pretrain.evaluation.perplexity import deal
from pretrain.evaluation.records import Table, cluster_interval, length_label, records_json
from pretrain.evaluation.report import Page, check_out, write_files
from pretrain.evaluation.windows import NONOVERLAPPING, Protocol
from pretrain.model.forward import is_reporting_rank, run_schedule
from pretrain.topology import Topology, own_part

SEED = 1234
"""Seed of all that is drawn."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PLANTED = 32
"""Tokens of a needle, and of a random sequence that is to be copied."""
QUERY = 8
"""Tokens at the beginning of a repetition that are not scored: they say what is repeated."""
SAMPLED_TOKENS = 2**20
"""Random sequences consist of tokens that occur among so many first ones of the text."""
MAX_DRAWS = 10_000
"""Draws of a place for a needle until the text is found to have none."""
Tokens = NDArray[np.int64]


# ---- the text, and the tasks that draw from it ---------------------------------------------------
@dataclass(frozen=True)
class Text:
    """The validation text."""

    stream: TokenStream
    seed: int = SEED

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Return the position of each end-of-document token."""
        ends = []
        for start in range(0, len(self.stream), SAMPLED_TOKENS):
            ids = self.stream.read(start, min(SAMPLED_TOKENS, len(self.stream) - start))
            ends.append(start + np.flatnonzero(ids == self.stream.eos_id))
        return np.concatenate(ends)

    @cached_property
    def occurring(self) -> Tokens:
        """Return the different tokens of the text's beginning, ascending."""
        found: Tokens = np.unique(self.stream.read(0, min(SAMPLED_TOKENS, len(self.stream))))
        occurring: Tokens = found[found != self.stream.eos_id]
        return occurring

    def random(self, *key: int) -> np.random.Generator:
        """Return the generator that belongs to a key, whatever else has been drawn before."""
        return np.random.default_rng([self.seed, *key])


class Task:
    """A task. A new one is a class with a name, words, and `tokens`, and a row of TASKS."""

    name: str
    says: str
    """What it is, for the report."""
    scored = PLANTED - QUERY
    """Targets at the end of each sequence that are scored."""
    shortest = 2 * PLANTED
    """The least length of a context."""

    def tokens(self, text: Text, length: int, depth: float | None, sample: int) -> Tokens:
        """Return the ids [length + 1] of a sample: the inputs, and the target of the last one.

        Args:
            text: The text to draw from.
            length: Tokens of the context.
            depth: Where the answer stands in it; None for the control.
            sample: The sample's number.
        """
        raise NotImplementedError

    def cluster(self, text: Text, sample: int) -> int:
        """Return a number that samples share which depend on each other."""
        return sample


class Needle(Task):
    """Tokens of the text, which are then cut out of the text around."""

    name = "needle"
    says = (
        f"{PLANTED} tokens of validation text stand at a depth of other validation text (0: at its "
        "beginning, 1: right before the query), and are repeated at the end. The first "
        f"{QUERY} tokens of the repetition are the query, the loss is that of the other "
        f"{PLANTED - QUERY}. The gain is how much lower it is than without the needle in the "
        "context."
    )

    def tokens(self, text: Text, length: int, depth: float | None, sample: int) -> Tokens:
        start = self._start(text, sample)
        return _planted(text, length, depth, sample, text.stream.read(start, PLANTED), start)

    def cluster(self, text: Text, sample: int) -> int:
        # Samples of one document are alike, so that many of them know little more than one.
        return int(np.searchsorted(text.ends, self._start(text, sample)))

    def _start(self, text: Text, sample: int) -> int:
        """Draw where a sample's needle stands in the text, within one document."""
        random, stream = text.random(0, sample), text.stream
        for _ in range(MAX_DRAWS):
            start = int(random.integers(0, len(stream) - PLANTED + 1))
            if stream.eos_id not in stream.read(start, PLANTED):
                return start
        raise ConfigError(
            f"{stream.directory}: has no {PLANTED} tokens in a row within one document, which the "
            "task needle plants. Leave it out of --tasks"
        )


class Induction(Task):
    """Random tokens: nothing but copying helps, which models learn early, with heads that can be
    named (Olsson et al., "In-context Learning and Induction Heads", 2022, arXiv 2209.11895).

    There the second copy is compared with the first, here with the same tokens at the same
    positions where they have not been seen before, so that a model that is worse at later positions
    does not seem to copy less.
    """

    name = "induction"
    says = (
        f"the same with {PLANTED} random tokens, all different, so that nothing but copying helps. "
        "Accuracy is the share of scored tokens that the model holds for the most probable ones."
    )

    def tokens(self, text: Text, length: int, depth: float | None, sample: int) -> Tokens:
        if len(text.occurring) < PLANTED:
            raise ConfigError(
                f"{text.stream.directory}: has fewer than {PLANTED} different tokens, which the "
                "task induction plants. Leave it out of --tasks"
            )
        content = text.random(1, sample).choice(text.occurring, PLANTED, replace=False)
        return _planted(text, length, depth, sample, content, None)


TASKS: Mapping[str, Task] = {task.name: task for task in (Needle(), Induction())}


def _planted(
    text: Text, length: int, depth: float | None, sample: int, content: Tokens, hole: int | None
) -> Tokens:
    """Return text in a row from a random place, with `content` planted, and `content` at its end.

    Args:
        text: Where the text around is drawn from.
        length: Tokens of the context.
        depth: Where `content` is planted; None for nowhere.
        sample: The sample's number.
        content: The tokens.
        hole: Where they stand in the text, from which they are then cut out; None for nowhere.
    """
    stream, count = text.stream, length + 1 - PLANTED
    width = 0 if hole is None else PLANTED
    start = int(text.random(2, length, sample).integers(0, len(stream) - width - count + 1))
    if hole is None or start + count <= hole:
        around = stream.read(start, count)
    elif start >= hole:
        around = stream.read(start + width, count)
    else:
        before, after = hole - start, count - (hole - start)
        around = np.concatenate([stream.read(start, before), stream.read(hole + width, after)])
    if depth is not None:
        place = round(depth * (length + 1 - 2 * PLANTED))
        around[place : place + PLANTED] = content
    return np.concatenate([around, content])


# ---- what is measured ----------------------------------------------------------------------------
MEASURES = ("gain_nats", "loss_nats", "accuracy")
"""What a record says: the gain, the loss with the answer in the context, and the share of scored
tokens that the model then holds for the most probable ones. In nats per token."""
Score = Callable[[int, int, Sequence[Callable[[], Tokens]]], NDArray[np.float64]]
"""(length, scored targets, sequences) -> [sequences, 2]: the mean loss of each in nats, and the
share of its scored targets that the model holds for the most probable token."""


def measure(
    task: Task, text: Text, length: int, samples: int, score: Score
) -> Iterator[dict[str, Any]]:
    """Yield a record for each depth and measure of a task at a length.

    Args:
        task: The task.
        text: The text to draw from.
        length: Tokens of the context.
        samples: How many samples are drawn.
        score: Scores sequences.
    """

    def scores(depth: float | None) -> NDArray[np.float64]:
        rows = [partial(task.tokens, text, length, depth, sample) for sample in range(samples)]
        return score(length, task.scored, rows)

    clusters = [task.cluster(text, sample) for sample in range(samples)]
    control = scores(None)[:, 0]
    for depth in DEPTHS:
        loss, right = scores(depth).T
        # The gain is a mean of differences within samples, which share all but the context.
        for name, values in zip(MEASURES, (control - loss, loss, right)):
            low, high = interval(values, clusters)
            of = {"task": task.name, "length": length, "depth": depth, "measure": name}
            yield {**of, "value": float(values.mean()), "low": low, "high": high, "n": samples}


def interval(samples: NDArray[np.float64], clusters: Sequence[int]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of samples that come in clusters.

    Args:
        samples: [n] values.
        clusters: [n] the cluster of each.

    Returns:
        Its ends; nan with a single cluster, or if a value is not finite.
    """
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    sums, counts = np.bincount(cluster, samples), np.bincount(cluster).astype(np.float64)
    return cluster_interval(sums.astype(np.float64), counts)


# ---- the command ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan(Opened):
    """The measurements of one checkpoint."""

    cells: tuple[tuple[Task, int], ...]
    """Tasks with their lengths."""


def evaluate_tasks(
    sources: list[Path],
    tasks: str,
    lengths: str | None,
    samples: int,
    overrides: list[str],
    out: Path | None,
) -> list[dict[str, Any]]:
    """Measure runs or checkpoints, print tables of all, and write a report if asked to.

    Args:
        sources: Run directories (their newest checkpoint is measured) or checkpoint directories.
        tasks: Names out of TASKS, separated by commas.
        lengths: Context lengths in tokens, separated by commas; None for the config's.
        samples: Samples of each task at each length and depth.
        overrides: `section.key=value` settings for every checkpoint.
        out: FILE.json of the report, whose other files are written beside it; None for no report.

    Returns:
        The records: what Opened.common and `measure` say.

    Raises:
        ConfigError: An option is not valid, a source is not a run or checkpoint, a length cannot be
            measured, the sources have several texts, or the report cannot be written to `out`.
    """
    # All of it is checked before the process group starts, which takes seconds.
    names = tasks.split(",")
    if unknown := set(names) - TASKS.keys():
        known = ",".join(TASKS)
        raise ConfigError(f"--tasks {','.join(unknown)}: unknown task. Choose out of {known}")
    request = EvaluationRequest.parse(lengths, NONOVERLAPPING, None, None)
    chosen = [task for name, task in TASKS.items() if name in names]
    plans = [_plan(source, chosen, request, overrides) for source in sources]
    if len({(plan.stream.tokenizer_sha256, plan.stream.identity) for plan in plans}) > 1:
        raise ConfigError(
            f"{sources[0]} and others have several tokenizers or validation texts, whose nats per "
            "token do not compare. Measure them one by one"
        )
    if out is not None:
        check_out(out, {"task", "measure"}, [f"{out.stem}.md"])
    return measure_all(plans, partial(_measure, samples), format_tables, write_report, out)


def _plan(
    source: Path, tasks: Sequence[Task], request: EvaluationRequest, overrides: list[str]
) -> Plan:
    """Return what is measured of a source; nothing of the model is read yet."""
    # A fused loss has no logits, and accuracy needs them. Last, so that nothing overrides it.
    opened = open_source(source, request, [*overrides, "train.fusion=off"])
    config, available = opened.config, len(opened.stream)
    if config.is_masked:
        raise ConfigError(
            f"{opened.checkpoint.path}: was trained with train.objective = masked, and the tasks "
            "ask for the token that follows. `pretrain evaluate` scores its masked tokens"
        )
    cells = []
    for task in tasks:
        for length in config.evaluation_lengths:
            if task.shortest <= length < available:
                cells.append((task, length))
                continue
            why = (
                f"{task.name} at {length} tokens: a context has {task.shortest} tokens at least, "
                f"and fewer than the validation text's {available:,}"
            )
            if request.lengths is not None:
                raise ConfigError(f"--lengths: {why}")
            say(f"{source}: left out: {why}")
    return Plan(**vars(opened), cells=tuple(cells))


def _measure(samples: int, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the records of a checkpoint, and print each task and length when it is done."""
    lengths = dict.fromkeys(length for _, length in plan.cells)
    chunks, topology = plan.load([Protocol(NONOVERLAPPING, n, n) for n in lengths])
    scorer = Scorer(chunks, topology, plan.stream.eos_id, plan.config.evaluation.tokens_per_batch)
    common, text = plan.common(), Text(plan.stream)
    if is_main():
        print(f"{plan.run}, step {common['step']} ({common['method']})", flush=True)
    for task, length in plan.cells:
        found = list(measure(task, text, length, samples, scorer))
        if is_main():
            gains = [r["value"] for r in found if r["measure"] == "gain_nats"]
            spread = f"{min(gains):.3f} to {max(gains):.3f}"
            print(f"{task.name:<10} {length:>7} tokens  gain {spread} nats", flush=True)
        yield from ({**common, **record} for record in found)


# ---- the report ----------------------------------------------------------------------------------
INTERVALS = (
    "In brackets: the 95 % confidence interval of the mean of n samples, by Student's t over the "
    "documents that they are from (of random tokens: over the samples); none where all are from "
    "one document. It is about other such samples, not about another seed of the training."
)
TABLES = {"gain_nats": "gain in nats per token", "accuracy": "accuracy"}
Record = Mapping[str, Any]


def _labels(records: Sequence[Record]) -> dict[tuple[str, int], str]:
    """Return a name for each run and step: the method, with both where it is not the only one."""
    methods: dict[tuple[str, int], str] = {(r["run"], r["step"]): r["method"] for r in records}
    names = list(methods.values())
    return {
        (run, step): method if names.count(method) == 1 else f"{method} ({run}, step {step})"
        for (run, step), method in methods.items()
    }


def make_tables(records: Sequence[Record]) -> list[Table]:
    """Return a table of each task and measure: a row for each depth, a column for each length."""
    labels, tables = _labels(records), []
    lengths = sorted({record["length"] for record in records})
    trained = {record["train_length"] for record in records}
    only = trained.pop() if len(trained) == 1 else None
    for task in dict.fromkeys(record["task"] for record in records):
        for name, words in TABLES.items():
            own = [r for r in records if (r["task"], r["measure"]) == (task, name)]
            cells: dict[tuple[str, float], dict[int, str]] = {}
            for r in own:
                row = cells.setdefault((labels[r["run"], r["step"]], r["depth"]), {})
                ends = "" if math.isnan(r["low"]) else f" [{r['low']:.3f}, {r['high']:.3f}]"
                row[r["length"]] = f"{r['value']:.3f}{ends}"
            rows = [
                [label, f"{depth:g}", *(found.get(n, "-") for n in lengths)]
                for (label, depth), found in cells.items()
            ]
            header = ["method", "depth", *(length_label(n, only) for n in lengths)]
            tables.append(Table(f"{task}: {words}, n = {own[0]['n']}", header, rows, 2))
    return tables


def format_tables(records: Sequence[Record]) -> str:
    """Return all tables as plain text, with what the brackets mean."""
    return "\n\n".join([*(table.plain() for table in make_tables(records)), INTERVALS])


def write_report(out: Path, records: Sequence[Record]) -> None:
    """Write FILE.json and, beside it, FILE.md."""
    trained = {r["run"]: r["train_length"] for r in records}
    page = Page(
        "# Long-context tasks",
        "A gain is in nats per token; 0 means that the model makes no use of the context that "
        "could help. L is the training length in tokens: "
        f"{', '.join(f'{run} at {length}' for run, length in trained.items())}.",
        "\n".join(f"- **{t.name}**: {t.says}" for t in TASKS.values()),
        INTERVALS,
    )
    page.add(*(table.markdown() for table in make_tables(records)))
    files = {out.name: records_json(records), f"{out.stem}.md": page.text().encode()}
    write_files(out.parent, files)


# ---- the model ----------------------------------------------------------------------------------
class Scorer:
    """Scores sequences with one model; a Score."""

    def __init__(
        self, chunks: list[GPTModel], topology: Topology, eos_id: int, tokens_per_batch: int
    ) -> None:
        """Switch the model to evaluation, without dropout.

        Args:
            chunks: This rank's model chunks, built with train.fusion = "off": a fused loss has no
                logits to look at.
            topology: This process's ranks in the parallel layout.
            eos_id: A token to fill up batches with.
            tokens_per_batch: Tokens in a micro batch, rounded down to whole sequences (at least
                one).
        """
        self.chunks, self.topology, self.eos_id = chunks, topology, eos_id
        self.tokens_per_batch = tokens_per_batch
        for chunk in chunks:
            chunk.eval()

    def __call__(
        self, length: int, scored: int, rows: Sequence[Callable[[], Tokens]]
    ) -> NDArray[np.float64]:
        """Score sequences. All ranks together; the result is the same on every rank."""
        found = torch.zeros(len(rows), 2, dtype=torch.float64)
        size = max(1, self.tokens_per_batch // length)
        # The answer may lie on several context ranks. Each adds up what it has of it.
        own = own_part(length)
        answer = slice(min(max(own.start, length - scored), own.stop), own.stop)
        count = answer.stop - answer.start
        with torch.no_grad(), _predictions(self.chunks) as predicted:

            def keep(losses: Tensor) -> tuple[Tensor, Any]:
                # Losses may be those of the answer alone, or of all of this rank's positions.
                kept = losses[:, losses.shape[1] - count :].double()
                tokens = predicted.pop()
                return losses.sum(), (kept, tokens[len(tokens) - count :].t())

            for passed in deal(enumerate(rows), size, self.topology):
                batches = []
                for dealt in passed:
                    # Sequences that are missing are filled with EOS.
                    batch = np.full((size, length + 1), self.eos_id, dtype=np.int64)
                    for target, (_, row) in zip(batch, dealt):
                        target[:] = row()
                    batches.append(torch.from_numpy(batch))
                ends = [scored] * len(batches)
                kept = run_schedule(self.chunks, batches, keep, forward_only=True, scored=ends)
                if not is_reporting_rank():
                    continue
                for (losses, tokens), asked, dealt in zip(kept, batches, passed):
                    right = tokens.cpu() == asked[:, 1:][:, answer]
                    sums = torch.stack([losses.sum(1).cpu(), right.double().sum(1)], dim=1)
                    for (place, _), result in zip(dealt, sums / scored):
                        found[place] = result
        # NCCL reduces device tensors only. Ranks that do not report add zeros.
        found = found.to(platform.device())
        dist.all_reduce(found)
        return found.cpu().numpy()


@contextlib.contextmanager
def _predictions(chunks: list[GPTModel]) -> Iterator[list[Tensor]]:
    """Collect the most probable token at every position whose logits are computed.

    Yields:
        A list to which each forward pass of the last stage adds its token ids [S, B].
    """
    found: list[Tensor] = []

    def look(_module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        found.append(_most_probable(output[0]))

    hooks = [
        chunk.output_layer.register_forward_hook(look) for chunk in chunks if chunk.post_process
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _most_probable(logits: Tensor) -> Tensor:
    """Return the token ids [S, B] of the largest logits, which tensor ranks hold parts of.

    Args:
        logits: [S, B, V], the vocabulary of this tensor rank.
    """
    largest, index = logits.float().max(dim=-1)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return index
    index = index + group.rank() * logits.shape[-1]
    best = largest.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
    # Of equal ones the first, as on one rank. A nan is the largest nowhere, and the token no id.
    index = torch.where(largest == best, index, torch.iinfo(index.dtype).max)
    dist.all_reduce(index, dist.ReduceOp.MIN, group=group)
    return index

"""Run `pretrain evaluate-tasks`: measure how well a model uses a long context, beyond perplexity.

A sample of a task ends in its answer (`pretrain.evaluation.task_samples`). The loss of the answer
is compared with its loss in a control, in which the context does not help. The difference is the
gain, in nats per token: 0 means that the model does not use the context.

Greedy decoding produces exactly the answer if and only if each of its tokens is the most probable
one after the query and the preceding tokens of the answer. One forward pass over both therefore
shows whether it would, on every layout, without generating anything.

Batches of sequences are dealt to the data-parallel ranks and go through the pipeline forward only,
as in an evaluation, on any parallel layout.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from pretrain.evaluation.command import (
    Opened,
    is_main,
    measure_all,
    open_source,
    say,
    temporary_texts,
)
from pretrain.evaluation.figures import FORMATS, Frame, Line
from pretrain.evaluation.perplexity import deal
from pretrain.evaluation.records import (
    Table,
    Value,
    cluster_interval,
    grouped,
    length_label,
    wilson_interval,
)
from pretrain.evaluation.report import Page, check_out, save
from pretrain.evaluation.task_samples import TASKS, Drawn, Task, Text
from pretrain.evaluation.windows import NONOVERLAPPING, Protocol
from pretrain.model.forward import is_reporting_rank, run_schedule
from pretrain.topology import Topology, own_part

# ---- what is measured ----------------------------------------------------------------------------
MEASURES = ("gain_nats", "loss_nats", "accuracy", "exact")
"""Measures of a record: the gain; and with the answer in the context the loss, the share of scored
tokens that the model predicts as the most probable ones, and the share of samples in which these
are all tokens, so that greedy decoding gives the answer. Gain and loss are in nats per token."""
Score = Callable[[int, Sequence[Callable[[], Drawn]]], NDArray[np.float64]]
"""(length, samples) -> [samples, 3]: the mean loss of the answer in nats, the share of its tokens
that the model predicts as the most probable ones, and 1 if these are all of them, else 0."""


def measure(
    task: Task, text: Text, length: int, samples: int, score: Score
) -> Iterator[dict[str, Any]]:
    """Yield a record for each depth and measure of a task at a length.

    Args:
        task: The task.
        text: The text to draw samples from.
        length: Tokens of the context.
        samples: Number of samples to draw.
        score: Scores sequences.
    """

    def scores(depth: float | None, planted: bool) -> NDArray[np.float64]:
        draw = partial(task.draw, text, length, depth, planted=planted)
        return score(length, [partial(draw, sample) for sample in range(samples)])

    clusters = [task.cluster(text, sample) for sample in range(samples)]
    control = scores(task.depths[0], False)[:, 0]
    for depth in task.depths:
        loss, *right = scores(depth, True).T
        # The gain is a mean of differences within samples, because a sample and its control differ
        # only in the context.
        for name, values in zip(MEASURES, (control - loss, loss, *right)):
            is_share = name == "exact" and len(set(clusters)) == samples
            low, high = wilson_interval(values) if is_share else interval(values, clusters)
            of = {"task": task.name, "length": length, "depth": depth, "measure": name}
            yield {**of, "value": float(values.mean()), "low": low, "high": high, "n": samples}


def interval(samples: NDArray[np.float64], clusters: Sequence[int]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of samples that come in clusters.

    Args:
        samples: [n] values.
        clusters: [n] the cluster of each.

    Returns:
        The ends of the interval; NaN with a single cluster, or if a value is not finite.
    """
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    sums, counts = np.bincount(cluster, samples), np.bincount(cluster).astype(np.float64)
    return cluster_interval(sums.astype(np.float64), counts)


# ---- the command ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """The measurements of one model."""

    opened: Opened
    cells: tuple[tuple[Task, int], ...]
    """Tasks with their lengths."""
    text: Text


def evaluate_tasks(
    sources: list[Path],
    tasks: str,
    lengths: str | None,
    samples: int,
    overrides: list[str],
    out: Path | None,
) -> list[dict[str, Any]]:
    """Measure models, print tables of all, and write a report if `out` is given.

    Args:
        sources: As for `evaluate_sources`.
        tasks: Names in TASKS, separated by commas.
        lengths: Context lengths in tokens, separated by commas; None for the config's.
        samples: Samples of each task at each length and depth.
        overrides: `section.key=value` settings for every checkpoint.
        out: FILE.json of the report, whose other files are written beside it; None for no report.

    Returns:
        The records, with the keys of Opened.common and `measure`.

    Raises:
        ConfigError: An option is not valid, a source is not a model, a length cannot be measured,
            the sources have several texts, or the report cannot be written to `out`.
    """
    # Everything is checked before the process group starts, which takes seconds.
    names = tasks.split(",")
    if unknown := set(names) - TASKS.keys():
        known = ",".join(TASKS)
        raise ConfigError(f"--tasks {','.join(unknown)}: unknown task. Choose from {known}")
    request = EvaluationRequest.parse(lengths, NONOVERLAPPING, None, None)
    chosen = [task for name, task in TASKS.items() if name in names]
    # Accuracy needs logits, which a fused loss does not have. Last, so that nothing overrides it.
    overrides = [*overrides, "train.fusion=off"]
    with temporary_texts() as texts:
        opened = [open_source(source, request, overrides, texts) for source in sources]
        # Each is also that of the tokenizer.
        if len({each.stream.identity for each in opened}) > 1:
            raise ConfigError(
                f"{sources[0]} and others have several tokenizers or validation texts, whose nats "
                "per token are not comparable. Measure them one by one"
            )
        plans = [_plan(each, chosen, request, samples) for each in opened]
        if out is not None:
            check_out(out, {"task", "measure"}, [f"{out.stem}.{end}" for end in ("md", *FORMATS)])
        records = (record for plan in plans for record in _measure(samples, plan))
        return measure_all(opened, records, format_tables, write_report, out)


def _plan(opened: Opened, tasks: Sequence[Task], request: EvaluationRequest, samples: int) -> Plan:
    """Return what to measure for a model, without reading its weights."""
    config, available = opened.config, len(opened.stream)
    if config.is_masked:
        raise ConfigError(
            f"{opened.path}: was trained with train.objective = masked, and the tasks "
            "ask for the token that follows. `pretrain evaluate` scores its masked tokens"
        )
    cells, text = [], Text(opened.stream)
    for task in tasks:
        shortest = task.shortest(text, samples)
        for length in config.evaluation_lengths:
            if shortest <= length < available:
                cells.append((task, length))
                continue
            why = (
                f"{task.name} at {length} tokens: a context needs {shortest} tokens or more, "
                f"and fewer than the validation text's {available:,}"
            )
            if request.lengths is not None:
                raise ConfigError(f"--lengths: {why}")
            say(f"{opened.run}: left out: {why}")
    return Plan(opened, tuple(cells), text)


def _measure(samples: int, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the records of a model, and print a line after each task and length."""
    lengths = dict.fromkeys(length for _, length in plan.cells)
    opened = plan.opened
    chunks, topology = opened.load([Protocol(NONOVERLAPPING, n, n) for n in lengths])
    batch = opened.config.evaluation.tokens_per_batch
    scorer, common = Scorer(chunks, topology, opened.stream.manifest.eos_id, batch), opened.common()
    if is_main():
        print(f"{opened.run}, step {common['step']} ({common['method']})", flush=True)
    for task, length in plan.cells:
        found = list(measure(task, plan.text, length, samples, scorer))
        if is_main():
            values = [[r["value"] for r in found if r["measure"] == name] for name in MEASURES]
            gain, _, _, exact = (f"{min(each):.3f} to {max(each):.3f}" for each in values)
            line = f"{task.name:<15} {length:>7} tokens  gain {gain} nats  exact {exact}"
            print(line, flush=True)
        yield from ({**common, **record} for record in found)


# ---- the report ----------------------------------------------------------------------------------
INTERVALS = (
    "In brackets: the 95 % confidence interval of the mean of n samples, by Student's t over the "
    "documents that they are from (of random tokens: over the samples); none where all are from "
    "one document. Of exact answers, where no two samples are from one document: Wilson's interval "
    "of a share. It is about other such samples, not about another seed of the training."
)
TABLES = {
    "exact": "share of answers that are exact",
    "gain_nats": "gain in nats per token",
    "accuracy": "accuracy",
}
Record = Mapping[str, Any]


def _labels(records: Sequence[Record]) -> dict[tuple[str, int], str]:
    """Return a name for each run and step: the method; with run and step if methods repeat."""
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
        for name in TASKS[task].shown:
            own = [r for r in records if (r["task"], r["measure"]) == (task, name)]
            of_row = grouped(own, lambda r: (labels[r["run"], r["step"]], r["depth"]))
            rows = []
            for (label, depth), of in of_row.items():
                found = {r["length"]: _cell(r) for r in of}
                where = "any" if depth is None else f"{depth:g}"
                rows.append([label, where, *(found.get(n, "-") for n in lengths)])
            header = ["method", "depth", *(length_label(n, only) for n in lengths)]
            tables.append(Table(f"{task}: {TABLES[name]}, n = {own[0]['n']}", header, rows, 2))
    return tables


def _cell(record: Record) -> str:
    """Return a value with its interval, where there is one."""
    low, high = record["low"], record["high"]
    return f"{record['value']:.3f}" + ("" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]")


def _lines(records: Sequence[Record]) -> tuple[list[Line], Frame]:
    """Return the share of right tokens by length, with a panel for each task."""
    labels = _labels(records)
    right = [r for r in records if r["measure"] == "accuracy"]
    of_line = grouped(right, lambda r: (r["task"], labels[r["run"], r["step"]]))
    lines = []
    for (task, label), of in of_line.items():
        by_length = grouped(of, lambda r: r["length"]).items()
        means = {n: float(np.mean([r["value"] for r in found])) for n, found in by_length}
        values = [Value(mean, math.nan, math.nan) for mean in means.values()]
        lines.append(Line(task, label, list(means), values))
    ticks = {float(x): str(x) for x in sorted({x for line in lines for x in line.xs})}
    trained = sorted({float(r["train_length"]) for r in records})
    marked = {line.panel: trained for line in lines}
    return lines, Frame("Context (tokens)", "Accuracy", ticks, marked)


def format_tables(records: Sequence[Record]) -> str:
    """Return all tables as plain text, with an explanation of the brackets."""
    return "\n\n".join([*(table.plain() for table in make_tables(records)), INTERVALS])


def write_report(out: Path, records: Sequence[Record]) -> None:
    """Write FILE.json and, beside it, FILE.md and the figure."""
    trained = {r["run"]: r["train_length"] for r in records}
    page = Page(
        "# Long-context tasks",
        "A gain is in nats per token; 0 means that the model makes no use of the context that "
        "could help. L is the training length in tokens: "
        f"{', '.join(f'{run} at {length}' for run, length in trained.items())}.",
        "\n".join(f"- **{t.name}**: {t.says}" for t in TASKS.values()),
        f"An answer is exact if greedy decoding gives all of its tokens. {INTERVALS}",
    )
    page.show(out.stem, "Accuracy by length, mean over the depths.", *_lines(records))
    page.add(*(table.markdown() for table in make_tables(records)))
    save(out, records, page, f"{out.stem}.md")


# ---- the model ----------------------------------------------------------------------------------
class Scorer:
    """Scores sequences with one model, as a `Score`."""

    def __init__(
        self, chunks: list[GPTModel], topology: Topology, eos_id: int, tokens_per_batch: int
    ) -> None:
        """Switch the model to evaluation, without dropout.

        Args:
            chunks: This rank's model chunks, built with train.fusion = "off": a fused loss has no
                logits to look at.
            topology: This process's ranks in the parallel layout.
            eos_id: A token that fills incomplete batches.
            tokens_per_batch: Tokens in a micro batch, rounded down to whole sequences (at least
                one).
        """
        self.chunks, self.topology, self.eos_id = chunks, topology, eos_id
        self.tokens_per_batch = tokens_per_batch
        for chunk in chunks:
            chunk.eval()

    def __call__(self, length: int, rows: Sequence[Callable[[], Drawn]]) -> NDArray[np.float64]:
        """Score samples. All ranks call this together; the result is the same on every rank."""
        # For each sample: summed losses, correct tokens, and tokens of the answer. Context ranks
        # may each have a part of the answer, and add up their part.
        found = torch.zeros(len(rows), 3, dtype=torch.float64)
        size = max(1, self.tokens_per_batch // length)
        own = own_part(length)
        with torch.no_grad(), _predictions(self.chunks) as predicted:

            def keep(losses: Tensor) -> tuple[Tensor, Any]:
                return losses.sum(), (losses.double().cpu(), predicted.pop().t().cpu())

            for passed in deal(enumerate(rows), size, self.topology):
                batches, drawn = [], [[row() for _, row in dealt] for dealt in passed]
                for samples in drawn:
                    # Missing sequences are filled with EOS.
                    batch = np.full((size, length + 1), self.eos_id, dtype=np.int64)
                    for target, sample in zip(batch, samples):
                        target[:] = sample.tokens
                    batches.append(torch.from_numpy(batch))
                # The losses may be those of the longest answer, or of all this rank's positions.
                ends = [max((s.scored for s in samples), default=1) for samples in drawn]
                kept = run_schedule(self.chunks, batches, keep, forward_only=True, scored=ends)
                for dealt, samples, asked, (losses, tokens) in zip(passed, drawn, batches, kept):
                    for row, ((place, _), sample) in enumerate(zip(dealt, samples)):
                        count = own.stop - min(max(own.start, length - sample.scored), own.stop)
                        answer = asked[row, 1:][own.stop - count : own.stop]
                        right = tokens[row, tokens.shape[1] - count :] == answer
                        loss = losses[row, losses.shape[1] - count :].sum()
                        found[place] += torch.stack([loss, right.sum(), torch.tensor(count)])
        # On the device, because NCCL reduces only device tensors. Ranks that do not report add
        # zeros.
        if not is_reporting_rank():
            found.zero_()
        found = found.to(platform.device())
        dist.all_reduce(found)
        loss, right, count = found.cpu().numpy().T
        return np.stack([loss / count, right / count, right == count], axis=1)


@contextlib.contextmanager
def _predictions(chunks: list[GPTModel]) -> Iterator[list[Tensor]]:
    """Collect the most probable token at every position whose logits are computed.

    Yields:
        A list to which each forward pass of the last stage appends token ids [S, B].
    """
    found: list[Tensor] = []

    def look(_module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        found.append(_most_probable(output[0]))

    with contextlib.ExitStack() as hooks:
        for chunk in chunks:
            if chunk.post_process:
                hooks.enter_context(chunk.output_layer.register_forward_hook(look))
        yield found


def _most_probable(logits: Tensor) -> Tensor:
    """Return the token ids [S, B] of the largest logits over all tensor ranks.

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
    # Of several largest logits take the first, as on one rank. With a NaN none is the largest, and
    # the result is not a valid id.
    index = torch.where(largest == best, index, torch.iinfo(index.dtype).max)
    dist.all_reduce(index, dist.ReduceOp.MIN, group=group)
    return index

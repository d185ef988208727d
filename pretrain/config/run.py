"""Define what a run is: all sections of its config, and every value that is derived from them.

Importing this module costs pydantic alone and no torch, so that the launcher can check a run on a
login node.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from pretrain.config.errors import ConfigError, Refusal
from pretrain.config.rules import check_layout
from pretrain.config.schema import (
    BatchSection,
    CheckpointSection,
    CleaningSection,
    DataSection,
    EvaluationSection,
    ExportSection,
    LoggingSection,
    ModelSection,
    ParallelSection,
    PhaseSection,
    RecoverySection,
    RunSection,
    ScheduleSection,
    Section,
    TrainSection,
)
from pretrain.config.tensors import num_parameters, num_parameters_of_rank
from pretrain.optim.optimizers import AnyOptimizer
from pretrain.positions.alibi import Alibi
from pretrain.positions.base import OWN, Position

PROTOCOLS = ("nonoverlapping", "sliding")
MASKED = "masked"
"""What records call the protocol of a model that predicts masked tokens: windows that do not
overlap, of whose tokens those of fixed masks are predicted, from both sides. It has a name of its
own, so that no table or plot puts these perplexities beside those of a language model."""
STREAM = "stream"
"""The protocol of one pass over the whole text, with all tokens before each as its context."""
LENGTH_FACTORS = (1, 2, 4, 8, 16)
"""Default evaluation lengths, as multiples of each training length."""
PIECE = 2048
"""Tokens of a long text that pass through a model with a cache at once."""


# ---- Compute the batch size of a step while it is ramped up, in Megatron's arithmetic ----


Rampup = tuple[int, int, int]
"""batch.rampup_batch_size: (first batch size, increment, samples until the full batch size)."""


def batch_size_at(consumed_samples: int, global_batch_size: int, rampup: Rampup | None) -> int:
    """Return the samples of the step that begins after `consumed_samples`.

    The same as Megatron's RampupBatchsizeNumMicroBatchesCalculator
    (megatron/core/num_microbatches_calculator.py), its floating-point division included.

    Args:
        consumed_samples: Samples consumed before the step, over all ranks.
        global_batch_size: Samples of a step after the ramp-up.
        rampup: The ramp-up; None for steps of the full size from the start.
    """
    if rampup is None:
        return global_batch_size
    start, increment, samples = rampup
    if consumed_samples > samples:
        return global_batch_size
    samples_per_increment = samples / ((global_batch_size - start) // increment)
    return min(start + int(consumed_samples / samples_per_increment) * increment, global_batch_size)


@dataclass(frozen=True)
class Layout:
    """The way in which a number of processes share the work of a run."""

    world_size: int
    """Number of processes: tensor x context x pipeline x data."""

    tensor: int
    """Tensor-parallel size."""

    context: int
    """Parts of each sequence."""

    pipeline: int
    """Pipeline stages."""

    virtual: int
    """Chunks of layers on each stage; 1 without the interleaved schedule."""

    data: int
    """Data-parallel size."""

    num_microbatches: int
    """Micro batches that each data-parallel rank accumulates in a step of the full batch size."""

    zero_stage: int
    """The ZeRO stage of the run: always 1 with one replica, where there is nothing to shard."""

    @property
    def replicas(self) -> int:
        """Return how many ranks hold the same parameters and see other tokens: data x context."""
        return self.data * self.context

    @property
    def sizes(self) -> str:
        """Return the layout in words, as "tensor 2 x context 2 x pipeline 1 x data 4"."""
        return f"{_model_sizes(self.tensor, self.context, self.pipeline)} x data {self.data}"


class Cluster(NamedTuple):
    """Token ids [first, end) of an adaptive softmax, whose embeddings have one width."""

    first: int
    end: int
    dim: int
    """Channels of their embeddings."""

    @property
    def size(self) -> int:
        """Return the number of ids."""
        return self.end - self.first


@dataclass(frozen=True)
class RunPhase:
    """A part of a run with one config: a run of its own, which ends in a checkpoint at `end`.

    The next phase goes on from that checkpoint as any run does whose keys have changed, so a run in
    phases is the chain of such runs.
    """

    number: int
    """From 1."""

    of: int
    """Phases of the run."""

    first: int
    """Steps done when it begins."""

    config: RunConfig
    """The run's config in this phase, without phases. Its train.num_steps is `end`."""

    changes: dict[str, Any]
    """The keys that its table changes."""

    tokens: int
    """Tokens that it trains on."""

    @property
    def end(self) -> int:
        """Return the steps done when it ends."""
        return self.config.train.num_steps

    @property
    def alone(self) -> RunConfig:
        """Return it as a run from step 0, to plan it; `tokens` counts an earlier ramp-up."""
        if self.of == 1:
            return self.config
        changes = {"num_steps": self.end - self.first, "profile_steps": None}
        return self.config.model_copy(
            update={"train": self.config.train.model_copy(update=changes)}
        )

    def __str__(self) -> str:
        """Return "phase 2 of 3, steps 101 to 200"."""
        return f"phase {self.number} of {self.of}, steps {self.first + 1:,} to {self.end:,}"


class RunConfig(Section):
    """A whole run. Build it with `load_config`, which also applies the rules that span sections."""

    run: RunSection
    model: ModelSection
    position: Position = Alibi()
    parallel: ParallelSection = ParallelSection()
    batch: BatchSection
    data: DataSection
    cleaning: CleaningSection = CleaningSection()
    optimizer: AnyOptimizer
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    logging: LoggingSection = LoggingSection()
    recovery: RecoverySection = RecoverySection()
    export: ExportSection = ExportSection()
    phases: tuple[PhaseSection, ...] = Field(default=(), strict=False)

    def value(self, key: str) -> Any:
        """Return the value of "section.key" as the run uses it: with defaults resolved.

        None for a key that another method has.
        """
        section, *path, name = key.split(".")
        holder = functools.reduce(getattr, path, getattr(self, section))
        # The properties of a run are named as the keys whose defaults they resolve.
        return getattr(self, name, getattr(holder, name, None))

    def refusal(self, key: str, reason: str, remedy: str) -> Refusal:
        """Return why the run cannot have its value of a key, which is shown as the file has it."""
        value = self.value(key)
        written = value.model_dump(exclude_none=True) if isinstance(value, Section) else value
        shown = list(written) if isinstance(written, tuple) else written
        return Refusal(key, shown, reason, remedy)

    # The values below are derived from the sections. No other module computes them again.

    @property
    def directory(self) -> Path:
        """Return run.directory as a path."""
        return Path(self.run.directory)

    @property
    def data_directory(self) -> Path:
        """Return data.directory as a path."""
        return Path(self.data.directory)

    @property
    def moments(self) -> tuple[str, ...]:
        """Return what the optimizer keeps of each parameter beside its fp32 master, fp32 too."""
        return tuple(self.optimizer.moments)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a parameter in a checkpoint: the fp32 master and the moments."""
        return 4 * (1 + len(self.moments))

    @property
    def num_query_groups(self) -> int:
        """Return the number of key/value heads."""
        return self.model.num_query_groups or self.model.num_attention_heads

    @property
    def ffn_hidden_size(self) -> int:
        """Return the inner width of the MLP."""
        return self.model.ffn_hidden_size or 4 * self.model.hidden_size

    @property
    def embedding_scale(self) -> float:
        """Return the factor on the word embeddings."""
        scale = self.model.embedding_scale
        if scale != "auto":
            return scale
        return 1.0 if self.model.embedding_layernorm else math.sqrt(self.model.hidden_size)

    @property
    def embedding_init_method_std(self) -> float:
        """Return the standard deviation of the initial embeddings."""
        std = self.model.embedding_init_method_std
        return self.model.hidden_size**-0.5 if std is None else std

    @property
    def head_dim(self) -> int:
        """Return the width of an attention head."""
        return self.model.kv_channels or self.model.hidden_size // self.model.num_attention_heads

    @property
    def kv_channels(self) -> int:
        """Return `head_dim`, by the name of its key."""
        return self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Return data.vocab_size rounded up to a multiple of model.make_vocab_size_divisible_by.

        With train.objective = "masked" there is at least one row more, for the mask.
        """
        unit = self.model.make_vocab_size_divisible_by
        return -(-(self.data.vocab_size + self.is_masked) // unit) * unit

    @property
    def is_masked(self) -> bool:
        """Return True if the model predicts masked tokens, and attention looks both ways."""
        return self.train.objective == "masked"

    @property
    def mask_id(self) -> int:
        """Return the id of the mask, which no tokenizer gives to a text."""
        return self.data.vocab_size

    @property
    def position_name(self) -> str:
        """Return the name under which results of the position method are compared."""
        return self.position.result_name(self)

    @property
    def adaptive_clusters(self) -> list[Cluster]:
        """Return the clusters of model.adaptive_cutoffs, the head first; [] without cutoffs."""
        m = self.model
        if m.adaptive_cutoffs is None:
            return []
        bounds = [0, *m.adaptive_cutoffs, self.padded_vocab_size]
        return [
            Cluster(first, end, m.hidden_size // m.adaptive_factor**i)
            for i, (first, end) in enumerate(pairwise(bounds))
        ]

    @property
    def evaluation_lengths(self) -> tuple[int, ...]:
        """Return the window lengths of evaluations, in tokens."""
        length = self.data.sequence_length
        if self.evaluation.lengths is not None:
            return self.evaluation.lengths
        end = self.position.table_end(self) or math.inf
        return tuple(length * k for k in LENGTH_FACTORS if length * k <= end)

    @property
    def evaluation_stride(self) -> int:
        """Return the stride of sliding windows, in tokens."""
        # There are no lengths where a learned table is shorter than the training length. The rules
        # refuse such a run, and read this property on the way.
        return self.evaluation.stride or min(self.evaluation_lengths, default=1)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens that an optimizer step trains on, at the full batch size."""
        return self.batch.global_batch_size * self.data.sequence_length

    def batch_size_at(self, consumed_samples: int) -> int:
        """Return the samples of the step that begins after `consumed_samples`."""
        b = self.batch
        return batch_size_at(consumed_samples, b.global_batch_size, b.rampup_batch_size)

    @property
    def planned_tokens(self) -> int:
        """Return the tokens that a run of train.num_steps steps trains on, from its first step."""
        return sum(phase.tokens for phase in self.parts)

    @property
    def position_learning_rate_mult(self) -> float:
        """Return the factor on the learning rate of "position.*" parameters; 1 without any."""
        return self.optimizer.position_learning_rate_mult if self.has_position_parameters else 1.0

    @property
    def has_position_parameters(self) -> bool:
        """Return True if there are "position.*" parameters, which all layers share."""
        return any(name.startswith(OWN) for name in self.position.tensors(self))

    @property
    def lr_end_step(self) -> int:
        """Return the steps done when the schedule's decay ends."""
        return self.schedule.lr_end_step or self.train.num_steps

    @property
    def parts(self) -> tuple[RunPhase, ...]:
        """Return the phases with their configs, the first one first; the whole run without any.

        Where a phase begins depends on the config alone, never on what happened while training.

        Raises:
            ConfigError, pydantic.ValidationError: A phase cannot work; a note names it.
        """
        return _parts(self)

    def phase_after(self, step: int) -> RunPhase:
        """Return the phase that goes on after `step` steps; the last one when all are done."""
        parts = self.parts
        return next((phase for phase in parts if step < phase.end), parts[-1])

    def layout(self, world_size: int) -> Layout:
        """Return how `world_size` processes share this run.

        Raises:
            ConfigError: When they cannot, or parallel.world_size plans for another number.
        """
        check_layout(self, world_size)
        p = self.parallel
        data = world_size // p.ranks_per_copy
        return Layout(
            world_size=world_size,
            tensor=p.tensor_model_parallel_size,
            context=p.context_parallel_size,
            pipeline=p.pipeline_model_parallel_size,
            virtual=p.virtual_pipeline_model_parallel_size or 1,
            data=data,
            num_microbatches=self.batch.global_batch_size // (self.batch.micro_batch_size * data),
            zero_stage=1 if data * p.context_parallel_size == 1 else p.zero_stage,
        )

    @property
    def layers_per_chunk(self) -> list[int]:
        """Return the number of layers of each pipeline chunk, in the order of the model.

        Chunk c stands on stage c modulo the pipeline size. Layers that do not divide evenly go to
        the middle chunks first, then to the first chunk, and to the last one never: it also
        computes the logits, and the first stage of a 1F1B pipeline keeps the most activations.
        """
        p = self.parallel
        chunks = p.pipeline_model_parallel_size * (p.virtual_pipeline_model_parallel_size or 1)
        base, extra = divmod(self.model.num_layers, chunks)
        fill = [*range(1, chunks - 1), 0, chunks - 1][:extra]
        return [base + (c in fill) for c in range(chunks)]


# ---- Resolve the phases of a run ----


@contextlib.contextmanager
def in_phase(number: int) -> Iterator[None]:
    """Name the phase in what is raised."""
    try:
        yield
    except (ConfigError, ValidationError) as error:
        error.add_note(f"phase {number}")
        raise


@dataclass
class _Span:
    """A phase while it is resolved."""

    first: int
    end: int
    samples: int
    """Samples consumed before it."""
    values: dict[str, Any]
    """Its config, as TOML has it; the schedule's end is still missing."""
    begins_schedule: bool


def _parts(run: RunConfig) -> tuple[RunPhase, ...]:
    """Return what `RunConfig.parts` does."""
    last, count = run.train.num_steps, len(run.phases)
    if not run.phases:
        return (RunPhase(1, 1, 0, run, {}, samples_of(run, last) * run.data.sequence_length),)
    spans: list[_Span] = []
    for number, phase in enumerate(run.phases, 1):
        with in_phase(number):
            spans.append(_span(run, phase, spans[-1] if spans else None, number == count))
    # The run's own schedule goes on to the run's end, one that a phase begins to the next one.
    end, begun = last, [span.first for span in spans if span.begins_schedule]
    for span in reversed(spans):
        is_own = bool(begun) and span.first >= begun[0]
        span.values["schedule"].setdefault("lr_end_step", end if is_own else last)
        end = span.first if span.begins_schedule else end
    found = []
    for number, (span, phase) in enumerate(zip(spans, run.phases, strict=True), 1):
        config = RunConfig.model_validate(span.values)
        samples = samples_of(config, span.end - span.first, span.samples)
        tokens = samples * config.data.sequence_length
        found.append(RunPhase(number, count, span.first, config, changed_keys(phase), tokens))
    return tuple(found)


def changed_keys(phase: PhaseSection) -> dict[str, Any]:
    """Return what a phase changes: "section.key" or "data.corpora.NAME.key", with its value."""
    return dict(_flat(phase.model_extra or {}))


def _flat(table: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested tables, down to where a table is the value of a key."""
    for name, value in table.items():
        # A name with dots, as --set writes it, is nested tables.
        first, _, rest = name.partition(".")
        path, value = (*above, first), {rest: value} if rest else value
        depth = 4 if path[:2] == ("data", "corpora") else 2
        if isinstance(value, dict) and len(path) < depth:
            yield from _flat(value, path)
        else:
            yield ".".join(path), value


def _span(run: RunConfig, phase: PhaseSection, before: _Span | None, is_last: bool) -> _Span:
    """Return where a phase begins and ends, and its values: those before it with its changes."""
    first, samples, last = 0, 0, run.train.num_steps
    values = run.model_dump(mode="json", exclude_none=True, exclude={"phases"})
    if before is not None:
        config = RunConfig.model_validate(before.values)
        first, values = before.end, before.values
        samples = before.samples + samples_of(config, first - before.first, before.samples)
    changes = changed_keys(phase)
    values = _changed(values, changes)
    config = RunConfig.model_validate(values)
    given = [each for each in (phase.steps, phase.tokens) if each is not None]
    if len(given) > 1 or not (given or is_last):
        raise ConfigError(
            f"steps = {phase.steps}, tokens = {phase.tokens}: a phase has one of them, and only "
            f"the last phase may have none, for the rest up to train.num_steps = {last}. Set one"
        )
    end = first + (phase.steps or last - first)
    if phase.tokens is not None:
        end = first + _steps(config, -(-phase.tokens // config.data.sequence_length), samples)
    if not first < end <= last or (is_last and end < last):
        raise ConfigError(
            f"the phase would begin after step {first} and end with step {end}, and the run ends "
            f"with step {last} = train.num_steps, with its last phase. Change train.num_steps, or "
            "steps or tokens of the phases"
        )
    train, schedule = dict(values["train"]), dict(values["schedule"])
    train["num_steps"] = end
    # Steps of the whole run, of which a phase profiles those that lie in it.
    if profiled := run.train.profile_steps:
        train["profile_steps"] = [profiled[0], min(profiled[1], end)]
        if not first < profiled[0] <= end:
            del train["profile_steps"]
    begins = any(key.startswith("schedule.") for key in changes)
    if begins and "schedule.lr_begin_step" not in changes:
        schedule["lr_begin_step"] = first
    if begins and "schedule.lr_end_step" not in changes:
        schedule.pop("lr_end_step", None)
    return _Span(first, end, samples, {**values, "train": train, "schedule": schedule}, begins)


def samples_of(config: RunConfig, steps: int, before: int = 0) -> int:
    """Return the samples that some steps consume, before which `before` were consumed."""
    consumed, rampup = before, config.batch.rampup_batch_size
    while rampup is not None and steps and consumed <= rampup[2]:
        consumed += config.batch_size_at(consumed)
        steps -= 1
    return consumed + steps * config.batch.global_batch_size - before


def _steps(config: RunConfig, samples: int, before: int) -> int:
    """Return the fewest steps that consume `samples`, before which `before` were consumed."""
    steps, end, rampup = 0, before + samples, config.batch.rampup_batch_size
    while rampup is not None and before < end and before <= rampup[2]:
        before += config.batch_size_at(before)
        steps += 1
    return steps + max(0, -(-(end - before) // config.batch.global_batch_size))


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values with the changes of a phase.

    Another method has other keys, so that its section begins anew.
    """
    result = copy.deepcopy(values)
    for section in [s for s in result if f"{s}.method" in changes]:
        if result[section].get("method") != changes[f"{section}.method"]:
            result[section] = {}
    for key, value in changes.items():
        *tables, name = key.split(".")
        holder = result
        for table in tables:
            holder = holder.setdefault(table, {})
        holder[name] = value
    return result


def is_url(directory: str | Path) -> bool:
    """Return True for what fsspec reads, such as s3://bucket/run, and False for a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", str(directory)) is not None


def recorded_protocol(config: RunConfig, name: str) -> str:
    """Return what the records of a run call a protocol that is asked for by a name of PROTOCOLS."""
    return MASKED if config.is_masked and name == "nonoverlapping" else name


# ---- Describe a run: its size, its length, its layout, what it exports as ----


def describe(config: RunConfig, export: Iterable[str] = ()) -> str:
    """Return the summary that `pretrain config` prints below the resolved config.

    Every line is a TOML comment, so that the output of the command can be saved and used as a
    config file.

    Args:
        config: The run.
        export: What the run will export as, or why not: `pretrain.huggingface.classes` says it.
    """
    total, tokens = num_parameters(config), config.planned_tokens
    begin = ramp = ""
    if config.batch.rampup_batch_size is not None:
        start, _, samples = config.batch.rampup_batch_size
        begin = f"{start * config.data.sequence_length:,} to "
        ramp = f" (ramped up over {samples:,} samples)"
    steps = f"{config.train.num_steps:,} steps of {begin}{config.tokens_per_step:,} tokens{ramp}"
    vocabulary = f"{config.data.vocab_size:,} padded to {config.padded_vocab_size:,}"
    if clusters := config.adaptive_clusters:
        parts = " + ".join(f"{cluster.size:,} x {cluster.dim}" for cluster in clusters)
        vocabulary += f" in clusters of {parts}"
    # Those of the model that results.
    last, every = config.parts[-1].config, config.evaluation.interval_steps
    lengths = ", ".join(str(length) for length in last.evaluation_lengths)
    at = dict.fromkeys(str(phase.config.data.sequence_length) for phase in config.parts)
    trained = f"trained at {', then '.join(at)} tokens"
    if config.data.per_document_attention:
        trained += " within documents"
    if config.is_masked:
        trained += ", predicts masked tokens from both sides"
    if config.phases:
        steps = f"{config.train.num_steps:,} steps in {len(config.phases)} phases"
    rows = [
        ("parameters", f"{total:,} ({_short(total)}), vocabulary of {vocabulary}"),
        ("positions", f"{last.position.description(last)}, {trained}, evaluated at {lengths}"),
        ("training", f"{steps} = {tokens:,} tokens ({_short(tokens)})"),
        *(_phases(config) if config.phases else ()),
        ("evaluations", f"every {every:,} steps, and after the last one"),
        ("layout", _layout(config)),
        *_stages(config),
        *(("export", line) for line in export),
    ]
    return "\n".join(f"# {name:<16} {text}" for name, text in rows)


def _phases(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield a row for each phase: its steps and tokens, and what it changes."""
    for phase in config.parts:
        changes = ", ".join(f"{key} = {value}" for key, value in phase.changes.items())
        span = f"steps {phase.first + 1:,} to {phase.end:,}, {phase.tokens:,} tokens"
        yield f"phase {phase.number}", f"{span}: {changes or 'no change'}"


def _layout(config: RunConfig) -> str:
    """Return the parallel sizes, and where they are known the data-parallel size and batches."""
    p = config.parallel
    if p.world_size is None:
        model = _model_sizes(
            p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size
        )
        return f"{model} x data (all remaining processes), ZeRO {p.zero_stage}"
    layout = config.layout(p.world_size)
    batches = f"{layout.num_microbatches} micro batches of {config.batch.micro_batch_size} a step"
    return f"{layout.world_size} processes = {layout.sizes}, {batches}, ZeRO {p.zero_stage}"


def _model_sizes(tensor: int, context: int, pipeline: int) -> str:
    """Return the sizes of the axes that share a sample; the context's where it is split."""
    split = f" x context {context}" if context > 1 else ""
    return f"tensor {tensor}{split} x pipeline {pipeline}"


def _stages(config: RunConfig) -> list[tuple[str, str]]:
    """Return a row for each pipeline stage: layers of its chunks, and parameters of a rank."""
    pipeline = config.parallel.pipeline_model_parallel_size
    rows = []
    for stage in range(pipeline):
        layers = "+".join(map(str, config.layers_per_chunk[stage::pipeline]))
        parameters = num_parameters_of_rank(config, stage)
        rows.append((f"stage {stage}", f"{layers} layers, {parameters:,} parameters a rank"))
    return rows


def _short(count: int) -> str:
    """Return a count in millions or billions: 1317632 -> "1.32M", 1359000000 -> "1.36B"."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"

